// Ordered calls against a real daemon, on the CPU and on the devices of bounced_daemon: the test is the engine, and its
// words are in shared memory. Those of a GPU are in tests/gpu.
#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/status.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/rank.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kTopK = 8;
constexpr uint32_t kPrompt = 100;
constexpr uint32_t kMaxRows = 400;

client::SessionOptions Ordered() {
  client::SessionOptions options = WithoutReattach();
  options.ordered_calls = true;
  return options;
}

v1::CallOrder Order(uint64_t number, bool wait, bool signal) {
  v1::CallOrder order;
  order.set_number(number);
  order.set_wait(wait);
  order.set_signal(signal);
  return order;
}

class OrderedCallsTest : public DaemonTest {
 protected:
  explicit OrderedCallsTest(std::vector<std::string> flags = {})
      : DaemonTest(std::move(flags)), pool_(CreatePool(LinearPool("p", 2, 64, 64))) {}

  static Tokens Prompt(uint32_t rows) { return MakeTokens(3, rows); }
  v1::AttachRequest Request(const std::string& name) const {
    v1::AttachRequest request = AttachTo(pool_, name);
    request.set_staging_bytes(64 * 1024);
    return request;
  }
  static std::atomic_ref<uint64_t> Word(client::Session& session, const std::string& name) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>((*session.arena()->Tensor(name))->data));
  }
  static uint64_t EngineWord(client::Session& session) { return Word(session, "engine_word").load(); }
  static uint64_t DaemonWord(client::Session& session) { return Word(session, "daemon_word").load(); }

  // A shared step that commits the newest row, whose entries are set.
  static v1::StepRequest StepOf(Rank& rank, const Sequence& sequence, uint32_t length,
                                const std::vector<int32_t>& entries) {
    const std::vector<BatchRow> batch = {{&sequence, length, /*commit=*/true}};
    const auto indices = rank.session().arena()->Indices(0);
    EXPECT_TRUE(rank.session().arena()->CopyIn(entries.data(), (*indices)[0].subspan(0, kTopK)).ok());
    rank.WriteNewest(sequence, length - 1);
    return rank.StepRequestOf(batch, {entries}, kTopK, v1::DATA_SOURCE_SHARED);
  }
  void ExpectHotRows(Rank& rank, const Sequence& sequence, const std::vector<int32_t>& entries) {
    const auto hot_rows = (*rank.session().arena()->HotRows(0))[0];
    for (uint32_t k = 0; k < kTopK; ++k) {
      ASSERT_GE(hot_rows[k], 0);
      for (uint32_t layer = 0; layer < pool_.layers(); ++layer) {
        EXPECT_EQ(rank.ArenaRow(layer, static_cast<uint32_t>(hot_rows[k])),
                  RowOf(pool_, layer, sequence.tokens[static_cast<size_t>(entries[k])]));
      }
    }
  }
  // A store of one row from the staging area.
  static v1::StoreRequest StoreOf(const Sequence& sequence, uint32_t row, const v1::CallOrder& order) {
    v1::StoreRequest store;
    *store.mutable_order() = order;
    v1::StoreItem* const item = store.add_items();
    item->mutable_range()->set_sequence_id(sequence.id);
    item->mutable_range()->set_first_row(row);
    item->mutable_range()->set_row_count(1);
    item->set_source(v1::DATA_SOURCE_SHARED);
    return store;
  }

  const v1::PoolSpec pool_;
};

// As calls, in turns with those of a stream, where the caller signals and waits himself.
TEST_F(OrderedCallsTest, StepsAreAnsweredWithWhatIsKnown) {
  Rank rank(client(), pool_, Request("rank"), Ordered());
  client::Session& session = rank.session();
  EXPECT_TRUE(session.info().ordered_calls().available());
  EXPECT_EQ(session.info().ordered_calls().reason(), "");
  EXPECT_EQ(session.info().ordered_calls().wait_timeout_ms(), 10000u);
  const uint32_t steps = 6;
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  Sequence longer = sequence;
  longer.tokens = Prompt(kPrompt + steps);
  auto stream = session.RunSteps();
  ASSERT_TRUE(stream.ok());
  const auto count = [this] {
    double sum = 0;
    for (const auto& [series, value] : Scrape(daemon().metrics_port())) {
      if (series.starts_with("stoker_lookups_total{")) sum += value;
    }
    return sum;
  };
  for (uint32_t i = 0; i < steps; ++i) {
    SCOPED_TRACE(i);
    const uint32_t length = kPrompt + 1 + i;
    std::vector<int32_t> entries(kTopK);
    for (uint32_t k = 0; k < kTopK; ++k) entries[k] = static_cast<int32_t>(length - 1 - k * (3 + i));
    v1::RunStepsRequest request;
    *request.mutable_step() = StepOf(rank, longer, length, entries);
    // The second row has a sequence that is none.
    v1::StepRow* const unknown = request.mutable_step()->add_rows();
    unknown->set_sequence_id(77);
    unknown->set_length(1);
    v1::RunStepsResponse response;
    absl::Status status;
    if (i % 2 == 0) {
      *request.mutable_step()->mutable_order() = Order(0, true, true);
      status = session.Step(request.step(), response.mutable_step());
    } else {
      const auto call = session.SignalEngine(nullptr);
      ASSERT_TRUE(call.ok()) << call.status();
      EXPECT_EQ(call->number, i + 1);
      *request.mutable_step()->mutable_order() = Order(call->number, true, true);
      status = (*stream)->Run(request, &response);
      if (status.ok()) status = session.AwaitDaemon(*call, {});
    }
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(EngineWord(session), i + 1);
    EXPECT_EQ(DaemonWord(session), i + 1);
    EXPECT_NE(response.step().boot_epoch(), 0u);
    ASSERT_EQ(response.step().statuses_size(), 2);
    EXPECT_EQ(response.step().statuses(0).code(), 0) << response.step().statuses(0).message();
    EXPECT_EQ(response.step().statuses(1).code(), static_cast<int>(absl::StatusCode::kNotFound));
    ASSERT_EQ(response.step().groups_size(), 1);
    EXPECT_EQ(response.step().groups(0).counts_size(), 0);
    EXPECT_EQ(response.step().groups(0).hot_rows_size(), 0);
    EXPECT_EQ(response.step().gathered_bytes(), 0u);
    EXPECT_EQ(response.step().device_ns(), 0u);
    // What the reply does not say, the arena and the metrics do.
    ExpectHotRows(rank, longer, entries);
    EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return count() == (i + 1) * kTopK; })) << count();
  }
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_step_duration_seconds_count{plane=\"rpc\"}"], steps);
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_ordered_sessions"], 1);
  EXPECT_EQ(client().GetStatus()->ordered_sessions(), 1u);
  rank.CheckStored(longer, kPrompt + steps);
  // In the message there is nothing that could outlive the reply.
  const std::vector<BatchRow> batch = {{&longer, kPrompt + steps}};
  v1::StepRequest refused = rank.StepRequestOf(batch, {std::vector<int32_t>(kTopK, 1)}, kTopK, v1::DATA_SOURCE_INLINE);
  *refused.mutable_order() = Order(0, false, true);
  v1::StepResponse response;
  const absl::Status status = session.Step(refused, &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("source: INLINE given with order.signal"));
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return DaemonWord(session) == steps + 1; }));
  EXPECT_EQ(rank.Store(longer, kPrompt, 1, v1::DATA_SOURCE_INLINE), absl::OkStatus());
}

TEST_F(OrderedCallsTest, ResolveAndRowCallsAreAnsweredWithWhatIsKnown) {
  Rank rank(client(), pool_, Request("rank"), Ordered());
  client::Session& session = rank.session();
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  const std::vector<int32_t> entries = {0, 10, 20, 30, 40, 50, 60, 70};
  v1::ResolveRequest resolve;
  *resolve.mutable_rows() = StepOf(rank, sequence, kPrompt, entries).rows();
  resolve.mutable_rows(0)->set_commit(false);
  resolve.set_top_k(kTopK);
  resolve.set_source(v1::DATA_SOURCE_SHARED);
  *resolve.mutable_order() = Order(0, true, true);
  v1::ResolveResponse resolved;
  absl::Status status = session.Resolve(resolve, &resolved);
  status.Update(client::FirstError(resolved.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(resolved.miss_pool_rows_size() + resolved.miss_hot_rows_size() + resolved.result().counts_size(), 0);
  v1::GatherRequest gather;
  *gather.mutable_order() = Order(0, false, true);
  v1::GatherResponse gathered;
  status = session.Gather(gather, &gathered);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(gathered.gathered_bytes(), 0u);
  ExpectHotRows(rank, sequence, entries);
  v1::LoadRequest load;
  *load.mutable_order() = Order(0, true, true);
  for (const uint64_t id : {sequence.id, uint64_t{77}}) {
    v1::LoadItem* const item = load.add_items();
    item->mutable_range()->set_sequence_id(id);
    item->mutable_range()->set_row_count(2);
    item->set_target(v1::LOAD_TARGET_STAGING);
  }
  v1::LoadResponse loaded;
  status = session.Load(load, &loaded);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(loaded.statuses_size(), 2);
  EXPECT_EQ(loaded.statuses(0).code(), 0);
  EXPECT_EQ(loaded.statuses(1).code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(loaded.loaded_bytes(), 2u * pool_.layers() * RowBytes(pool_));
  v1::StoreResponse stored;
  status = session.Store(StoreOf(sequence, kPrompt, Order(0, true, false)), &stored);
  status.Update(client::FirstError(stored.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  v1::CommitRequest commit;
  *commit.mutable_order() = Order(0, true, true);
  commit.add_items()->set_sequence_id(sequence.id);
  commit.mutable_items(0)->set_first_row(kPrompt + 1);
  commit.mutable_items(0)->set_row_count(1);
  v1::CommitResponse committed;
  status = session.Commit(commit, &committed);
  status.Update(client::FirstError(committed.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(DaemonWord(session), 5u);
  EXPECT_EQ(EngineWord(session), 5u);
}

// Several threads: their numbers come in the order of their calls, whoever is first.
TEST_F(OrderedCallsTest, CallsOfSeveralThreadsHaveNumbersThatRise) {
  Rank rank(client(), pool_, Request("rank"), Ordered());
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        v1::StoreResponse stored;
        absl::Status status = rank.session().Store(StoreOf(sequence, 7, Order(0, i % 2 == 0, true)), &stored);
        status.Update(client::FirstError(stored.statuses()));
        ASSERT_TRUE(status.ok()) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(DaemonWord(rank.session()), 200u);
}

TEST_F(OrderedCallsTest, CallsOfASessionWithoutAreRefusedAndLoseNothing) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  client::Session& session = rank.session();
  EXPECT_TRUE(session.info().ordered_calls().available());
  const Sequence sequence = rank.Open(Prompt(kPrompt + 1), kMaxRows);
  const std::vector<BatchRow> batch = {{&sequence, kPrompt + 1}};
  std::vector<int32_t> entries(kTopK);
  std::iota(entries.begin(), entries.end(), 20);
  const auto check = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("order: given, session "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("attached without ordered_calls"));
  };
  for (const bool wait : {true, false}) {
    SCOPED_TRACE(wait);
    const auto set = [&](auto request) {
      *request.mutable_order() = Order(1, wait, !wait);
      return request;
    };
    const v1::StepRequest step = set(rank.StepRequestOf(batch, {entries}, kTopK, v1::DATA_SOURCE_SHARED));
    v1::StepResponse stepped;
    check(session.Step(step, &stepped));
    v1::ResolveRequest resolve = set(v1::ResolveRequest());
    *resolve.mutable_rows() = step.rows();
    resolve.set_top_k(kTopK);
    resolve.set_source(v1::DATA_SOURCE_SHARED);
    v1::ResolveResponse resolved;
    check(session.Resolve(resolve, &resolved));
    v1::GatherResponse gathered;
    check(session.Gather(set(v1::GatherRequest()), &gathered));
    v1::CommitRequest commit = set(v1::CommitRequest());
    commit.add_items();
    v1::CommitResponse committed;
    check(session.Commit(commit, &committed));
    v1::StoreResponse stored;
    check(session.Store(StoreOf(sequence, 0, Order(1, wait, !wait)), &stored));
    v1::LoadRequest load = set(v1::LoadRequest());
    load.add_items()->set_target(v1::LOAD_TARGET_STAGING);
    v1::LoadResponse loaded;
    check(session.Load(load, &loaded));
    auto steps = session.RunSteps();
    ASSERT_TRUE(steps.ok());
    v1::RunStepsRequest request;
    *request.mutable_step() = step;
    v1::RunStepsResponse response;
    check((*steps)->Run(request, &response));
  }
  EXPECT_EQ(session.SignalEngine(nullptr).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(session.AwaitDaemon({.generation = 1, .number = 1}, {}).code(), absl::StatusCode::kFailedPrecondition);
  rank.CheckRows(batch, {entries}, kTopK, rank.Step(batch, {entries}, kTopK));
}

// What the messages themselves have wrong is found before the session is asked; its number comes as well.
TEST_F(OrderedCallsTest, NumbersOfMalformedCallsCome) {
  Rank rank(client(), pool_, Request("rank"), Ordered());
  client::Session& session = rank.session();
  uint64_t number = 0;
  const auto check = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return DaemonWord(session) == number; })) << number;
  };
  v1::StoreRequest store;
  store.add_items();
  *store.mutable_order() = Order(++number, true, true);
  v1::StoreResponse stored;
  check(session.Store(store, &stored));
  v1::LoadRequest load;
  load.add_items();
  *load.mutable_order() = Order(++number, true, true);
  v1::LoadResponse loaded;
  check(session.Load(load, &loaded));
  v1::StepRequest step;
  *step.mutable_order() = Order(++number, true, true);
  v1::StepResponse stepped;
  check(session.Step(step, &stepped));
  v1::ResolveRequest resolve;
  *resolve.mutable_order() = Order(++number, true, true);
  v1::ResolveResponse resolved;
  check(session.Resolve(resolve, &resolved));
  // Good, but for its number.
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  const absl::Status again = session.Store(StoreOf(sequence, 7, Order(number, true, true)), &stored);
  EXPECT_EQ(again.code(), absl::StatusCode::kInvalidArgument) << again;
  EXPECT_THAT(std::string(again.message()), HasSubstr(absl::StrCat("order.number: ", number, " given, limits ")));
  EXPECT_EQ(DaemonWord(session), number);
}

// The engine is gone before it has set its word.
TEST_F(OrderedCallsTest, AnEngineThatIsKilledIsGoneAndOthersGoOn) {
  Rank rank(client(), pool_, Request("bystander"), Ordered());
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  const auto store = [&] {
    v1::StoreResponse stored;
    absl::Status status = rank.session().Store(StoreOf(sequence, 7, Order(0, true, true)), &stored);
    status.Update(client::FirstError(stored.statuses()));
    EXPECT_TRUE(status.ok()) << status;
  };
  for (int round = 0; round < 3; ++round) {
    ChildProcess engine({ClientProcessPath(), daemon().address(), "p", "engine", "ordered"},
                        daemon().folder().File(absl::StrCat("engine", round)));
    ASSERT_TRUE(engine.AwaitOutput("ready", absl::Seconds(30))) << engine.Output();
    store();
    const absl::Time begin = absl::Now();
    engine.Kill();
    EXPECT_TRUE(Eventually(absl::Seconds(2),
                           [&] { return SessionCount() == 1 && client().GetStatus()->hot_bytes() == hot_bytes; }));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    store();
    uint32_t stored_rows = 0;
    for (const v1::SequenceInfo& info : Sequences("p")) {
      if (info.sequence_key() == "victim") stored_rows = info.stored_rows();
    }
    EXPECT_EQ(stored_rows, 32u);
  }
  EXPECT_EQ(client().GetStatus()->ordered_sessions(), 1u);
}

// The caller waits for a daemon that is gone, or for a session that has ended.
TEST_F(OrderedCallsTest, AWaitEndsWithItsSessionAndWithTheDaemon) {
  for (const bool kill : {false, true}) {
    SCOPED_TRACE(kill);
    Rank rank(client(), pool_, Request("rank"), Ordered());
    client::Session& session = rank.session();
    const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
    // The number is the test's: nobody sets the engine word to it.
    absl::Status status;
    std::atomic<bool> over = false;
    std::thread call([&] {
      v1::StoreResponse stored;
      status = session.Store(StoreOf(sequence, 7, Order(5, true, true)), &stored);
      over = true;
    });
    EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
      const auto sessions = client().ListSessions();
      return sessions.ok() && sessions->sessions_size() == 1 && session.attached();
    }));
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_FALSE(over);
    const absl::Time begin = absl::Now();
    if (kill) {
      daemon().process().Kill();
    } else {
      v1::EvictSessionRequest evict;
      evict.set_session_id(session.info().session_id());
      EXPECT_TRUE(client().EvictSession(evict).ok());
    }
    call.join();
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_FALSE(status.ok());
    EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_FALSE(session.status().ok());
    // So does one that comes later.
    EXPECT_FALSE(session.AwaitDaemon({.generation = 1, .number = 99}, {}).ok());
  }
  daemon().Restart();  // for TearDown
}

// Numbers and words are of one attachment.
TEST_F(OrderedCallsTest, ASessionThatComesBackBeginsAnew) {
  client::SessionOptions options = Ordered();
  options.reattach_timeout = absl::Seconds(30);
  options.recreate_pool = true;
  Rank rank(client(), pool_, Request("rank"), options);
  client::Session& session = rank.session();
  const Sequence before = rank.Open(Prompt(kPrompt), kMaxRows);
  v1::StoreResponse stored;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(session.Store(StoreOf(before, 7, Order(0, true, true)), &stored).ok());
  const auto call = session.SignalEngine(nullptr);
  ASSERT_TRUE(call.ok());
  EXPECT_EQ(call->number, 4u);
  // It waits for what nobody has asked for, until the daemon goes.
  absl::Status waited;
  std::thread waiting([&] { waited = session.AwaitDaemon(*call, {}); });
  absl::SleepFor(absl::Milliseconds(20));
  const absl::Time begin = absl::Now();
  daemon().process().Kill();
  waiting.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
  EXPECT_EQ(waited.code(), absl::StatusCode::kUnavailable) << waited;
  daemon().Restart();
  EXPECT_TRUE(Eventually(absl::Seconds(30), [&] { return session.generation() == 2 && session.attached(); }));
  const absl::Status late = session.AwaitDaemon(*call, {});
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable) << late;
  const Sequence after = rank.Open(Prompt(kPrompt), kMaxRows);
  absl::Status status = session.Store(StoreOf(after, 7, Order(0, true, true)), &stored);
  status.Update(client::FirstError(stored.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(EngineWord(session), 1u);
  EXPECT_EQ(DaemonWord(session), 1u);
}

TEST_F(OrderedCallsTest, AnAttachThatCannotHaveThemSaysWhy) {
  client::SessionOptions options = Ordered();
  options.arena_mapping = client::ArenaMapping::kNever;
  const auto unmapped = client().Attach(Request("rank"), options);
  EXPECT_EQ(unmapped.status().code(), absl::StatusCode::kFailedPrecondition) << unmapped.status();
  // A stream is of a GPU.
  Rank rank(client(), pool_, Request("rank"), Ordered());
  const absl::Status stream = rank.session().SignalEngine(reinterpret_cast<CUstream_st*>(1)).status();
  EXPECT_EQ(stream.code(), absl::StatusCode::kInvalidArgument) << stream;
}

class FewOrderedCallsTest : public OrderedCallsTest {
 protected:
  FewOrderedCallsTest() : OrderedCallsTest({"--max-armed-sessions=1"}) {}
};

TEST_F(FewOrderedCallsTest, NoMoreThanTheLimitHaveThem) {
  auto first = std::make_unique<Rank>(client(), pool_, Request("first"), Ordered());
  const auto refused = client().Attach(Request("second"), Ordered());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("0 are armed, 1 have ordered calls, limit max_armed_sessions 1"));
  // Nobody is superseded for a session that cannot be had.
  Rank plain(client(), pool_, Request("plain"), WithoutReattach());
  EXPECT_EQ(client().Attach(Request("plain"), Ordered()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(plain.session().attached());
  EXPECT_EQ(SessionCount(), 2);
  // Its own name is free for a session that takes its place.
  const auto next = client().Attach(Request("first"), Ordered());
  EXPECT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_ordered_sessions"], 1);
}

#ifdef EXAMPLE_ORDERED_CALLS
TEST_F(OrderedCallsTest, TheExampleRuns) {
  if (TestDevice() != "cpu") return;  // the example's pool has another name for a device
  const Finished example = RunToEnd({EXAMPLE_ORDERED_CALLS, daemon().address(), "100"}, daemon().folder());
  EXPECT_EQ(example.status, 0) << example.output;
  EXPECT_THAT(example.output, HasSubstr("100 steps, each entry has its hot row"));
}

TEST_F(FewOrderedCallsTest, TheExampleSaysWhyThereAreNone) {
  Rank rank(client(), pool_, Request("rank"), Ordered());
  const Finished example = RunToEnd({EXAMPLE_ORDERED_CALLS, daemon().address()}, daemon().folder());
  EXPECT_NE(example.status, 0) << example.output;
  EXPECT_THAT(example.output, HasSubstr("limit max_armed_sessions 1"));
}
#endif

}  // namespace
}  // namespace stoker::system_test
