// Events of sessions against a real daemon: refused on the CPU backend, and on the devices of bounced_daemon, which
// take an event whose work is always done, what a call with them answers.
#include <stdlib.h>

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/rank.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kTopK = 8;
constexpr uint32_t kPrompt = 100;
constexpr uint32_t kMaxRows = 400;

// What bounced_daemon takes for an event of another process.
std::string OtherProcessesEvent() {
  std::string handle = "of another process";
  handle.resize(64, ' ');
  return handle;
}

// Before the daemon is started, which reads it.
struct OnDevice {
  explicit OnDevice(const char* device) { setenv("STOKER_TEST_DEVICE", device, /*overwrite=*/1); }
};

class EventsTest : private OnDevice, public DaemonTest {
 protected:
  explicit EventsTest(const char* device) : OnDevice(device), pool_(CreatePool(LinearPool("p", 2, 64, 64))) {}

  std::string Device() const { return client().GetStatus()->devices(0); }
  v1::AttachRequest WithEvent(const std::string& handle, const std::string& device) const {
    v1::AttachRequest request = AttachTo(pool_, "rank");
    request.mutable_engine_event()->set_handle(handle);
    request.mutable_engine_event()->set_device(device);
    return request;
  }
  void ExpectRefused(const v1::AttachRequest& request, absl::StatusCode code, const std::string& message) {
    const auto session = client().Attach(request, WithoutReattach());
    EXPECT_EQ(session.status().code(), code) << session.status();
    EXPECT_THAT(std::string(session.status().message()), HasSubstr(message));
    EXPECT_EQ(SessionCount(), 0);
  }
  static Tokens Prompt(uint32_t rows) { return MakeTokens(3, rows); }

  const v1::PoolSpec pool_;
};

class CpuEventsTest : public EventsTest {
 protected:
  CpuEventsTest() : EventsTest("cpu") {}
};

class BouncedEventsTest : public EventsTest {
 protected:
  BouncedEventsTest() : EventsTest("bounced") {}
};

TEST_F(CpuEventsTest, ADeviceWithoutEventsRefusesThem) {
  ExpectRefused(WithEvent(std::string(64, 'x'), Device()), absl::StatusCode::kFailedPrecondition,
                "engine_event: given, the session is on cpu, and only GPUs have interprocess events");
  // Before the handle is looked at.
  ExpectRefused(WithEvent("", ""), absl::StatusCode::kFailedPrecondition, "engine_event: given");
  client::SessionOptions options;
  options.exchange_events = true;
  const auto session = client().Attach(AttachTo(pool_, "rank"), options);
  EXPECT_THAT(std::string(session.status().message()), HasSubstr("exchange_events: the session is on cpu"));
  EXPECT_EQ(session.status().code(),
            STOKER_HAS_CUDA ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kUnimplemented);
  v1::AttachRequest elsewhere = AttachTo(pool_, "rank");
  elsewhere.set_device("GPU-of-nobody");
  const auto unseen = client().Attach(elsewhere, options);
  EXPECT_THAT(std::string(unseen.status().message()), HasSubstr("exchange_events: the session is on GPU-of-nobody"));
  EXPECT_EQ(unseen.status().code(), STOKER_HAS_CUDA ? absl::StatusCode::kNotFound : absl::StatusCode::kUnimplemented);
  EXPECT_EQ(SessionCount(), 0);
}

#ifdef EXAMPLE_EVENTS
TEST_F(CpuEventsTest, TheExampleSaysWhyThereAreNone) {
  const Finished example = RunToEnd({EXAMPLE_EVENTS, daemon().address()}, daemon().folder());
  EXPECT_EQ(example.status, 0) << example.output;
  EXPECT_THAT(example.output, HasSubstr("no events: exchange_events: the session is on cpu"));
}
#endif

TEST_F(CpuEventsTest, CallsOfASessionWithoutEventsAreRefusedAndLoseNothing) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  EXPECT_EQ(rank.session().info().event_handle(), "");
  const Sequence sequence = rank.Open(Prompt(kPrompt + 1), kMaxRows);
  const std::vector<BatchRow> batch = {{&sequence, kPrompt + 1}};
  std::vector<int32_t> entries(kTopK);
  std::iota(entries.begin(), entries.end(), 20);
  const auto check = [](const absl::Status& status, const std::string& field) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(field, ": given, session ")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("attached without engine_event"));
  };
  client::Session& session = rank.session();
  for (const bool wait : {true, false}) {
    const std::string field = wait ? "wait_event" : "signal_event";
    SCOPED_TRACE(field);
    const auto set = [&](auto request) {
      request.set_wait_event(wait);
      request.set_signal_event(!wait);
      return request;
    };
    const v1::StepRequest step = set(rank.StepRequestOf(batch, {entries}, kTopK, v1::DATA_SOURCE_SHARED));
    v1::StepResponse stepped;
    check(session.Step(step, &stepped), field);
    v1::ResolveRequest resolve = set(v1::ResolveRequest());
    *resolve.mutable_rows() = step.rows();
    resolve.set_top_k(kTopK);
    resolve.set_source(v1::DATA_SOURCE_SHARED);
    v1::ResolveResponse resolved;
    check(session.Resolve(resolve, &resolved), field);
    v1::GatherResponse gathered;
    check(session.Gather(set(v1::GatherRequest()), &gathered), field);
    v1::CommitRequest commit = set(v1::CommitRequest());
    commit.add_items();
    v1::CommitResponse committed;
    check(session.Commit(commit, &committed), field);
    v1::StoreRequest store = set(v1::StoreRequest());
    store.add_items()->set_source(v1::DATA_SOURCE_SHARED);
    v1::StoreResponse stored;
    check(session.Store(store, &stored), field);
    v1::LoadRequest load = set(v1::LoadRequest());
    load.add_items()->set_target(v1::LOAD_TARGET_STAGING);
    v1::LoadResponse loaded;
    check(session.Load(load, &loaded), field);
    auto steps = session.RunSteps();
    ASSERT_TRUE(steps.ok());
    v1::RunStepsRequest request;
    *request.mutable_step() = step;
    v1::RunStepsResponse response;
    check((*steps)->Run(request, &response), field);
  }
  EXPECT_EQ(session.RecordEvent(nullptr).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(session.AwaitEvent(nullptr).code(), absl::StatusCode::kFailedPrecondition);
  rank.CheckRows(batch, {entries}, kTopK, rank.Step(batch, {entries}, kTopK));
}

TEST_F(BouncedEventsTest, ADeviceWithEventsTakesOnlyWhatIsOne) {
  ExpectRefused(WithEvent(std::string(64, 'x'), Device()), absl::StatusCode::kInvalidArgument, "engine_event.handle");
  ExpectRefused(WithEvent(OtherProcessesEvent(), "GPU-0"), absl::StatusCode::kInvalidArgument,
                absl::StrCat("engine_event.device: \"GPU-0\" given, the session is on ", Device()));
}

TEST_F(BouncedEventsTest, StepsAreAnsweredWithWhatIsKnown) {
  Rank rank(client(), pool_, WithEvent(OtherProcessesEvent(), Device()));
  client::Session& session = rank.session();
  EXPECT_EQ(session.info().event_handle().size(), 64u);
  const uint32_t steps = 6;
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  Sequence longer = sequence;
  longer.tokens = Prompt(kPrompt + steps);
  const auto indices = session.arena()->Indices(0);
  ASSERT_TRUE(indices.ok()) << indices.status();
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
    // The second row has a sequence that is none.
    const std::vector<BatchRow> batch = {{&longer, length, /*commit=*/true}};
    std::vector<int32_t> entries(kTopK);
    for (uint32_t k = 0; k < kTopK; ++k) entries[k] = static_cast<int32_t>(length - 1 - k * (3 + i));
    ASSERT_TRUE(session.arena()->CopyIn(entries.data(), (*indices)[0].subspan(0, kTopK)).ok());
    rank.WriteNewest(longer, length - 1);
    v1::RunStepsRequest request;
    *request.mutable_step() = rank.StepRequestOf(batch, {entries}, kTopK, v1::DATA_SOURCE_SHARED);
    v1::StepRow* const unknown = request.mutable_step()->add_rows();
    unknown->set_sequence_id(77);
    unknown->set_length(1);
    request.mutable_step()->set_wait_event(true);
    request.mutable_step()->set_signal_event(true);
    v1::RunStepsResponse response;
    // By turns as a call and in the stream.
    const absl::Status status =
        i % 2 == 0 ? session.Step(request.step(), response.mutable_step()) : (*stream)->Run(request, &response);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_NE(response.step().boot_epoch(), 0u);
    ASSERT_EQ(response.step().statuses_size(), 2);
    EXPECT_EQ(response.step().statuses(0).code(), 0) << response.step().statuses(0).message();
    EXPECT_EQ(response.step().statuses(1).code(), static_cast<int>(absl::StatusCode::kNotFound));
    ASSERT_EQ(response.step().groups_size(), 1);
    EXPECT_EQ(response.step().groups(0).counts_size(), 0);
    EXPECT_EQ(response.step().groups(0).hot_rows_size(), 0);
    EXPECT_EQ(response.step().gathered_bytes(), 0u);
    EXPECT_EQ(response.step().device_ns(), 0u);
    // What the reply does not say, the metrics and the arena do.
    EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return count() == (i + 1) * kTopK; })) << count();
    std::vector<int32_t> hot_rows(kTopK);
    ASSERT_TRUE(session.arena()->CopyOut((*session.arena()->HotRows(0))[0].subspan(0, kTopK), hot_rows.data()).ok());
    for (uint32_t k = 0; k < kTopK; ++k) {
      ASSERT_GE(hot_rows[k], 0);
      for (uint32_t layer = 0; layer < pool_.layers(); ++layer) {
        EXPECT_EQ(rank.ArenaRow(layer, static_cast<uint32_t>(hot_rows[k])),
                  RowOf(pool_, layer, longer.tokens[static_cast<size_t>(entries[k])]));
      }
    }
  }
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_step_duration_seconds_count{plane=\"rpc\"}"], steps);
  rank.CheckStored(longer, kPrompt + steps);
  // In the message there is nothing that could outlive the reply.
  const std::vector<BatchRow> batch = {{&longer, kPrompt + steps}};
  v1::StepRequest refused = rank.StepRequestOf(batch, {std::vector<int32_t>(kTopK, 1)}, kTopK, v1::DATA_SOURCE_INLINE);
  refused.set_signal_event(true);
  v1::StepResponse response;
  const absl::Status status = session.Step(refused, &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("source: INLINE given with signal_event"));
  EXPECT_EQ(rank.Store(longer, kPrompt, 1, v1::DATA_SOURCE_INLINE), absl::OkStatus());
}

TEST_F(BouncedEventsTest, ResolveAndRowCallsAreAnsweredWithWhatIsKnown) {
  v1::AttachRequest attach = WithEvent(OtherProcessesEvent(), Device());
  attach.set_staging_bytes(64 * 1024);
  Rank rank(client(), pool_, attach);
  client::Session& session = rank.session();
  const Sequence sequence = rank.Open(Prompt(kPrompt), kMaxRows);
  const auto indices = session.arena()->Indices(0);
  ASSERT_TRUE(indices.ok()) << indices.status();
  const std::vector<int32_t> entries = {0, 10, 20, 30, 40, 50, 60, 70};
  ASSERT_TRUE(session.arena()->CopyIn(entries.data(), (*indices)[0].subspan(0, kTopK)).ok());
  v1::ResolveRequest resolve;
  resolve.set_wait_event(true);
  resolve.set_signal_event(true);
  resolve.add_rows()->set_sequence_id(sequence.id);
  resolve.mutable_rows(0)->set_length(kPrompt);
  resolve.set_top_k(kTopK);
  resolve.set_source(v1::DATA_SOURCE_SHARED);
  v1::ResolveResponse resolved;
  absl::Status status = session.Resolve(resolve, &resolved);
  status.Update(client::FirstError(resolved.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(resolved.miss_pool_rows_size() + resolved.miss_hot_rows_size() + resolved.result().counts_size(), 0);
  v1::GatherRequest gather;
  gather.set_signal_event(true);
  v1::GatherResponse gathered;
  status = session.Gather(gather, &gathered);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(gathered.gathered_bytes(), 0u);
  v1::LoadRequest load;
  load.set_wait_event(true);
  load.set_signal_event(true);
  load.add_items()->mutable_range()->set_sequence_id(sequence.id);
  load.mutable_items(0)->mutable_range()->set_row_count(2);
  load.mutable_items(0)->set_target(v1::LOAD_TARGET_STAGING);
  load.add_items()->mutable_range()->set_sequence_id(77);
  load.mutable_items(1)->mutable_range()->set_row_count(2);
  load.mutable_items(1)->set_target(v1::LOAD_TARGET_STAGING);
  v1::LoadResponse loaded;
  status = session.Load(load, &loaded);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(loaded.statuses_size(), 2);
  EXPECT_EQ(loaded.statuses(0).code(), 0);
  EXPECT_EQ(loaded.statuses(1).code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(loaded.loaded_bytes(), 2u * pool_.layers() * RowBytes(pool_));
  // A call without: the work before it is done when it is answered.
  v1::StoreRequest store;
  store.add_items()->mutable_range()->set_sequence_id(sequence.id);
  store.mutable_items(0)->mutable_range()->set_first_row(kPrompt);
  store.mutable_items(0)->mutable_range()->set_row_count(2);
  store.mutable_items(0)->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse stored;
  status = session.Store(store, &stored);
  status.Update(client::FirstError(stored.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  std::vector<int32_t> hot_rows(kTopK);
  ASSERT_TRUE(session.arena()->CopyOut((*session.arena()->HotRows(0))[0].subspan(0, kTopK), hot_rows.data()).ok());
  for (uint32_t k = 0; k < kTopK; ++k) {
    EXPECT_EQ(rank.ArenaRow(0, static_cast<uint32_t>(hot_rows[k])),
              RowOf(pool_, 0, sequence.tokens[static_cast<size_t>(entries[k])]));
  }
}

}  // namespace
}  // namespace stoker::system_test
