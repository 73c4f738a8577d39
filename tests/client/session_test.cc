#include "client/session.h"

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "client/backoff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_arena.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/gate.h"
#include "tests/client/temporary_directory.h"

namespace stoker::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Bound of a wait for something that must happen; when it runs out the test fails.
constexpr auto kSoon = std::chrono::seconds(20);

// What happened, in order. Written by callbacks, awaited by the test.
class Events {
 public:
  void Add(const std::string& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    changed_.notify_all();
  }
  bool Await(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kSoon, [&] { return events_.size() >= count; });
  }
  std::vector<std::string> all() {
    const std::lock_guard lock(mutex_);
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> events_;
};

v1::AdmitRequest AdmitOne(uint32_t prompt_rows = 10) {
  v1::AdmitRequest request;
  request.add_items()->set_prompt_rows(prompt_rows);
  request.mutable_items(0)->set_max_rows(100);
  return request;
}

v1::StepRequest StepOf(uint64_t sequence_id) {
  v1::StepRequest request;
  v1::StepRow& row = *request.add_rows();
  row.set_sequence_id(sequence_id);
  row.set_length(5);
  v1::StepGroup& group = *request.add_groups();
  group.add_indices(3);
  group.add_indices(-1);
  request.set_top_k(2);
  request.set_source(v1::DATA_SOURCE_INLINE);
  return request;
}

CallOptions Within(absl::Duration timeout) {
  CallOptions options;
  options.timeout = timeout;
  return options;
}

class SessionTest : public testing::Test {
 protected:
  SessionTest() { daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR)); }

  Client Connect() {
    absl::StatusOr<Client> client = Client::Connect(daemon_.address());
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // Every callback writes to events_.
  SessionOptions Options() {
    SessionOptions options;
    options.initial_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(10);
    options.on_draining = [this](const v1::Draining& e) { events_.Add(absl::StrCat("draining ", e.grace_ms())); };
    options.on_pool_pressure = [this](const v1::PoolPressure& e) {
      events_.Add(absl::StrCat("pressure ", e.free_blocks(), " ", e.cached_blocks(), " ", e.total_blocks()));
    };
    options.on_superseded = [this](const v1::Superseded& e) {
      events_.Add(absl::StrCat("superseded ", e.by_session_id()));
    };
    options.on_detached = [this](const absl::Status&) { events_.Add("detached"); };
    options.on_reattach = [this](uint64_t generation) { events_.Add(absl::StrCat("reattach ", generation)); };
    options.on_ended = [this](const absl::Status& s) {
      events_.Add(absl::StrCat("ended ", absl::StatusCodeToString(s.code())));
    };
    return options;
  }

  std::unique_ptr<Session> Attach(SessionOptions options, const std::string& name = "") {
    v1::AttachRequest request = FakeAttachRequest("kv");
    request.set_name(name);
    absl::StatusOr<std::unique_ptr<Session>> session = Connect().Attach(request, std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
  std::unique_ptr<Session> Attach() { return Attach(Options()); }

  static uint64_t Admit(Session& session) {
    v1::AdmitResponse response;
    const absl::Status status = session.Admit(AdmitOne(), &response);
    EXPECT_TRUE(status.ok()) << status;
    return response.sequences_size() == 1 ? response.sequences(0).sequence_id() : 0;
  }

  Events events_;  // outlives sessions and the daemon
  TemporaryDirectory directory_;
  FakeDaemon daemon_{directory_.path()};
};

TEST_F(SessionTest, EveryCallCarriesTheToken) {
  auto session = Attach();
  const std::string token = session->info().token();
  EXPECT_THAT(token, StartsWith("token-"));
  const uint64_t id = Admit(*session);
  ASSERT_NE(id, 0u);

  const auto check = [](const absl::Status& status, const auto& response) {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(FirstError(response.statuses()).ok()) << FirstError(response.statuses());
    EXPECT_EQ(response.statuses_size(), 1);
  };
  v1::ExtendRequest extend;
  extend.add_items()->set_sequence_id(id);
  v1::ExtendResponse extended;
  check(session->Extend(extend, &extended), extended);
  v1::ForkRequest fork;
  fork.add_items()->set_sequence_id(id);
  v1::ForkResponse forked;
  EXPECT_TRUE(session->Fork(fork, &forked).ok());
  EXPECT_NE(forked.sequences(0).sequence_id(), 0u);
  v1::StoreRequest store;
  store.add_items()->mutable_range()->set_sequence_id(id);
  store.mutable_items(0)->set_rows("abc");
  v1::StoreResponse stored;
  check(session->Store(store, &stored), stored);
  EXPECT_EQ(stored.stored_bytes(), 3u);
  v1::LoadRequest load;
  load.add_items()->mutable_range()->set_sequence_id(id);
  v1::LoadResponse loaded;
  check(session->Load(load, &loaded), loaded);
  v1::StepResponse stepped;
  check(session->Step(StepOf(id), &stepped), stepped);
  EXPECT_THAT(stepped.groups(0).hot_rows(), ElementsAre(3, -1));
  v1::ResolveRequest resolve;
  resolve.add_rows()->set_sequence_id(id);
  v1::ResolveResponse resolved;
  check(session->Resolve(resolve, &resolved), resolved);
  v1::GatherRequest gather;
  gather.add_layers(1);
  v1::GatherResponse gathered;
  EXPECT_TRUE(session->Gather(gather, &gathered).ok());
  EXPECT_EQ(gathered.gathered_bytes(), 1u);
  v1::CommitRequest commit;
  commit.add_items()->set_sequence_id(id);
  v1::CommitResponse committed;
  check(session->Commit(commit, &committed), committed);
  v1::InvalidateRequest invalidate;
  invalidate.add_items()->set_sequence_id(id);
  v1::InvalidateResponse invalidated;
  check(session->Invalidate(invalidate, &invalidated), invalidated);
  v1::ReadRequest read;
  read.set_sequence_id(id);
  v1::ReadResponse rows;
  EXPECT_TRUE(session->Read(read, &rows).ok());
  EXPECT_EQ(rows.rows(), "bytes");
  v1::ReleaseRequest release;
  release.add_sequence_ids(id);
  v1::ReleaseResponse released;
  check(session->Release(release, &released), released);
  session.reset();

  for (const char* const method : {"Admit", "Extend", "Fork", "Store", "Load", "Step", "Resolve", "Gather", "Commit",
                                   "Invalidate", "Read", "Release", "Detach"}) {
    const std::vector<SeenCall> calls = daemon_.calls(method);
    ASSERT_EQ(calls.size(), 1u) << method;
    EXPECT_EQ(calls[0].token, token) << method;
    EXPECT_LE(calls[0].time_left, absl::Seconds(31)) << method;
  }
  EXPECT_EQ(daemon_.calls("Attach")[0].token, "");
  EXPECT_THAT(events_.all(), ElementsAre());
}

TEST_F(SessionTest, CallAndItemErrorsAreStatuses) {
  auto session = Attach();
  v1::StepResponse stepped;
  EXPECT_EQ(session->Step(v1::StepRequest(), &stepped), absl::InvalidArgumentError("rows is empty"));
  ASSERT_TRUE(session->Step(StepOf(4711), &stepped).ok());
  EXPECT_EQ(FirstError(stepped.statuses()), absl::NotFoundError("items[0]: sequence 4711 is not open"));
  v1::AdmitResponse admitted;
  ASSERT_TRUE(session->Admit(AdmitOne(0), &admitted).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(FromItem(admitted.sequences(0).status())));
}

TEST_F(SessionTest, AttachErrorsAreStatuses) {
  EXPECT_TRUE(absl::IsNotFound(Connect().Attach(FakeAttachRequest("none")).status()));
  SessionOptions options;
  options.attach_timeout = absl::ZeroDuration();
  EXPECT_TRUE(absl::IsInvalidArgument(Connect().Attach(FakeAttachRequest("kv"), options).status()));
  options = SessionOptions();
  options.max_backoff = absl::Milliseconds(1);
  EXPECT_TRUE(absl::IsInvalidArgument(Connect().Attach(FakeAttachRequest("kv"), options).status()));
  ASSERT_TRUE(Connect().Drain().ok());
  EXPECT_TRUE(absl::IsUnavailable(Connect().Attach(FakeAttachRequest("kv")).status()));
}

TEST_F(SessionTest, AttachThatIsNotAnsweredEndsAtItsTimeout) {
  Gate gate;
  daemon_.SetHook(gate.Hook("Attach"));
  SessionOptions options;
  options.attach_timeout = absl::Milliseconds(100);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Connect().Attach(FakeAttachRequest("kv"), options).status()));
  gate.Open();
}

TEST_F(SessionTest, AFirstMessageThatCannotBeIsRefused) {
  for (const std::string& token : {std::string(), std::string("a\nb"), std::string("a\x80"), std::string(5000, 'a')}) {
    daemon_.SetAttachedEditor([&](v1::AttachResponse* first) { first->mutable_attached()->set_token(token); });
    EXPECT_EQ(Connect().Attach(FakeAttachRequest("kv")).status().code(), absl::StatusCode::kInternal);
  }
  daemon_.SetAttachedEditor([](v1::AttachResponse* first) { first->mutable_draining(); });
  EXPECT_EQ(Connect().Attach(FakeAttachRequest("kv")).status().code(), absl::StatusCode::kInternal);
}

TEST_F(SessionTest, TheArenaIsTheDaemonsMemory) {
  auto session = Attach();
  const std::shared_ptr<const Arena> arena = session->arena();
  ASSERT_TRUE(arena->status().ok()) << arena->status();
  (*arena->Indices(1))[2][3] = 1234;
  const v1::ArenaLayout layout = session->info().arena();
  const FileDescriptor memory = daemon_.arena_memory();
  void* const mapping = mmap(nullptr, layout.size_bytes(), PROT_READ, MAP_SHARED, memory.get(), 0);
  ASSERT_NE(mapping, MAP_FAILED);
  for (const v1::ArenaTensor& tensor : layout.tensors()) {
    if (tensor.name() != "indices.1") continue;
    const char* const element = static_cast<const char*>(mapping) + tensor.offset_bytes() + 2 * 7 * 4 + 3 * 4;
    EXPECT_EQ(*reinterpret_cast<const int32_t*>(element), 1234);
  }
  munmap(mapping, layout.size_bytes());
}

TEST_F(SessionTest, AnArenaThatCannotBeMappedFailsAttachOnlyWhereItIsRequired) {
  daemon_.SetAttachedEditor(
      [](v1::AttachResponse* first) { first->mutable_attached()->mutable_arena()->clear_descriptor_socket(); });
  auto session = Attach();
  EXPECT_EQ(session->arena()->Indices(0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Admit(*session), 0u);
  SessionOptions options = Options();
  options.arena_mapping = ArenaMapping::kRequired;
  EXPECT_EQ(Connect().Attach(FakeAttachRequest("kv"), options).status().code(), absl::StatusCode::kFailedPrecondition);
  daemon_.SetAttachedEditor(nullptr);
  options.arena_mapping = ArenaMapping::kNever;
  EXPECT_FALSE(Attach(options)->arena()->status().ok());
}

TEST_F(SessionTest, ASessionOnAGpuWorksWithoutItsArena) {
  SessionOptions options = Options();
  options.arena_mapping = ArenaMapping::kDevice;
  // An arena in host memory is mapped as ever.
  EXPECT_TRUE(Attach(options)->arena()->status().ok());
  daemon_.SetAttachedEditor([](v1::AttachResponse* first) {
    v1::Attached& attached = *first->mutable_attached();
    attached.set_device("GPU-00000000-1111-2222-3333-444444444444");
    attached.mutable_arena()->clear_descriptor_socket();
    attached.mutable_arena()->set_cuda_ipc_handle(std::string(64, 'h'));
  });
  auto session = Attach();
  EXPECT_EQ(session->arena()->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Admit(*session), 0u);
  // Here is no such GPU, or no CUDA.
  EXPECT_FALSE(Connect().Attach(FakeAttachRequest("kv"), options).ok());
  options.arena_mapping = ArenaMapping::kRequired;
  EXPECT_EQ(Connect().Attach(FakeAttachRequest("kv"), options).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SessionTest, EventsReachTheirCallbacksInOrder) {
  auto session = Attach();
  v1::AttachResponse event;
  event.mutable_draining()->set_grace_ms(1500);
  daemon_.Send(event);
  event.mutable_pool_pressure()->set_free_blocks(1);
  event.mutable_pool_pressure()->set_cached_blocks(2);
  event.mutable_pool_pressure()->set_total_blocks(8);
  daemon_.Send(event);
  daemon_.Send(v1::AttachResponse());  // one that this version does not know
  event.mutable_draining()->set_grace_ms(7);
  daemon_.Send(event);
  ASSERT_TRUE(events_.Await(3));
  EXPECT_THAT(events_.all(), ElementsAre("draining 1500", "pressure 1 2 8", "draining 7"));
  EXPECT_TRUE(session->attached());
  EXPECT_EQ(session->generation(), 1u);
}

TEST_F(SessionTest, ASupersededSessionEndsForGood) {
  auto first = Attach(Options(), "rank0");
  auto second = Attach(SessionOptions(), "rank0");
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre(absl::StrCat("superseded ", second->info().session_id()), "ended ABORTED"));
  v1::AdmitResponse response;
  EXPECT_TRUE(absl::IsAborted(first->Admit(AdmitOne(), &response)));
  EXPECT_FALSE(first->attached());
  EXPECT_TRUE(first->ended());
  EXPECT_TRUE(absl::IsAborted(first->AwaitAttached().status()));
  EXPECT_NE(Admit(*second), 0u);
  EXPECT_EQ(daemon_.calls("Attach").size(), 2u);
}

TEST_F(SessionTest, AnEvictedSessionEndsForGood) {
  auto session = Attach();
  v1::EvictSessionRequest evict;
  evict.set_session_id(session->info().session_id());
  ASSERT_TRUE(Connect().EvictSession(evict).ok());
  ASSERT_TRUE(events_.Await(1));
  EXPECT_THAT(events_.all(), ElementsAre("ended ABORTED"));
}

TEST_F(SessionTest, DestroyingASessionDetachesIt) {
  Attach().reset();
  EXPECT_EQ(daemon_.calls("Detach").size(), 1u);
  EXPECT_TRUE(daemon_.AwaitNoSession());
}

TEST_F(SessionTest, ASessionComesBackAfterTheDaemonRestarts) {
  auto session = Attach();
  const std::string old_token = session->info().token();
  const std::shared_ptr<const Arena> old_arena = session->arena();
  const uint64_t old_id = Admit(*session);

  daemon_.Kill();
  ASSERT_TRUE(events_.Await(1));
  EXPECT_FALSE(session->attached());
  EXPECT_EQ(session->generation(), 1u);
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  daemon_.Restart();
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "reattach 2"));
  EXPECT_TRUE(session->attached());
  EXPECT_EQ(session->generation(), 2u);
  EXPECT_NE(session->info().token(), old_token);
  EXPECT_EQ(session->info().boot_epoch(), daemon_.boot_epoch());

  // The old view stays readable, and the new one is the new daemon's memory.
  (*old_arena->Indices(0))[0][0] = 1;
  ASSERT_NE(session->arena(), old_arena);
  (*session->arena()->Indices(0))[0][0] = 2;
  EXPECT_EQ((*old_arena->Indices(0))[0][0], 1);

  // Sequence ids of before are errors; with their generation the call is not even sent.
  v1::StepResponse stepped;
  ASSERT_TRUE(session->Step(StepOf(old_id), &stepped).ok());
  EXPECT_TRUE(absl::IsNotFound(FirstError(stepped.statuses())));
  CallOptions options;
  options.generation = 1;
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Step(StepOf(old_id), &stepped, options)));
  options.generation = 2;
  EXPECT_TRUE(session->Step(StepOf(Admit(*session)), &stepped, options).ok());
  EXPECT_TRUE(FirstError(stepped.statuses()).ok());
  EXPECT_EQ(daemon_.calls("Step").size(), 2u);
}

TEST_F(SessionTest, CallsWhileDetachedWaitAndThenRunOrFail) {
  auto session = Attach();
  const uint64_t id = Admit(*session);
  daemon_.Kill();
  ASSERT_TRUE(events_.Await(1));

  // Nobody comes back: the deadline ends the wait.
  EXPECT_TRUE(absl::IsUnavailable(session->AwaitAttached(absl::Milliseconds(50)).status()));
  EXPECT_FALSE(session->ended());
  v1::AdmitResponse admitted;
  v1::StepResponse stepped;
  EXPECT_TRUE(absl::IsUnavailable(session->Admit(AdmitOne(), &admitted, Within(absl::Milliseconds(50)))));
  EXPECT_TRUE(absl::IsUnavailable(session->Step(StepOf(id), &stepped, Within(absl::Milliseconds(50)))));
  EXPECT_TRUE(absl::IsUnavailable(session->RunSteps(Within(absl::Milliseconds(50))).status()));
  absl::Status async = absl::OkStatus();
  const v1::StepRequest step = StepOf(id);
  session->StepAsync(&step, &stepped, [&](absl::Status status) { async = status; });
  EXPECT_TRUE(absl::IsUnavailable(async)) << "at once, on this thread";

  // It comes back while they wait. Whether a thread has begun to wait before the restart cannot be seen from outside; a
  // late one meets the new session, where an Admit runs too, and the Step names its generation.
  CallOptions first_generation = Within(absl::Seconds(20));
  first_generation.generation = 1;
  absl::Status admit_status, step_status;
  std::thread admitting([&] { admit_status = session->Admit(AdmitOne(), &admitted, Within(absl::Seconds(20))); });
  std::thread stepping([&] { step_status = session->Step(StepOf(id), &stepped, first_generation); });
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  daemon_.Restart();
  admitting.join();
  stepping.join();
  EXPECT_EQ(*session->AwaitAttached(), 2u);
  EXPECT_TRUE(admit_status.ok()) << admit_status;
  EXPECT_NE(admitted.sequences(0).sequence_id(), 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(step_status)) << step_status;
  EXPECT_EQ(daemon_.calls("Step").size(), 0u);
}

TEST_F(SessionTest, ADaemonThatNeverReturnsEndsTheSession) {
  SessionOptions options = Options();
  options.reattach_timeout = absl::Milliseconds(100);
  auto session = Attach(options);
  daemon_.Kill();
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "ended UNAVAILABLE"));
  v1::AdmitResponse response;
  const absl::Status status = session->Admit(AdmitOne(), &response);  // default deadline: it must not wait for it
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("not attached again within 100ms"));
}

TEST_F(SessionTest, WithoutReattachTheSessionEndsAtOnce) {
  SessionOptions options = Options();
  options.reattach_timeout = absl::ZeroDuration();
  auto session = Attach(options);
  daemon_.Kill();
  ASSERT_TRUE(events_.Await(1));
  EXPECT_THAT(events_.all(), ElementsAre("ended UNAVAILABLE"));
}

TEST_F(SessionTest, ASessionCanBeDestroyedWhileItTriesToComeBack) {
  auto session = Attach();
  daemon_.Kill();
  ASSERT_TRUE(events_.Await(1));
  session.reset();
  EXPECT_THAT(events_.all(), ElementsAre("detached"));
}

TEST_F(SessionTest, RefusalsThatCanPassAreRepeatedAndOthersEndTheSession) {
  auto session = Attach();
  daemon_.Kill();
  ASSERT_TRUE(events_.Await(1));
  // Without the pool Attach is answered with NOT_FOUND, until somebody creates it.
  daemon_.Restart();
  while (daemon_.calls("Attach").size() < 4) std::this_thread::yield();
  EXPECT_FALSE(session->attached());
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "reattach 2"));

  daemon_.Kill();
  ASSERT_TRUE(events_.Await(3));
  daemon_.SetHook([](const std::string&) { return absl::InvalidArgumentError("hot_rows 100 is above 64"); });
  daemon_.Restart();
  ASSERT_TRUE(events_.Await(4));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "reattach 2", "detached", "ended INVALID_ARGUMENT"));
}

TEST_F(SessionTest, APoolThatTheRestartLostIsCreatedAgainOnRequest) {
  SessionOptions options = Options();
  options.recreate_pool = true;
  auto session = Attach(options);
  daemon_.Kill();
  daemon_.Restart();
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "reattach 2"));
  EXPECT_EQ(daemon_.calls("CreatePool").size(), 1u);
  EXPECT_NE(Admit(*session), 0u);
}

TEST_F(SessionTest, CallbacksMayCallTheSession) {
  SessionOptions options = Options();
  std::unique_ptr<Session> session;
  options.on_reattach = [&](uint64_t) { events_.Add(Admit(*session) != 0 ? "admitted" : "failed"); };
  session = Attach(options);
  daemon_.Kill();
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  daemon_.Restart();
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "admitted"));
}

TEST_F(SessionTest, AsynchronousCallsReportOnce) {
  auto session = Attach();
  const v1::StepRequest step = StepOf(Admit(*session));
  v1::StepResponse stepped;
  session->StepAsync(&step, &stepped, [&](absl::Status s) { events_.Add(s.ToString()); });
  ASSERT_TRUE(events_.Await(1));
  EXPECT_THAT(stepped.groups(0).hot_rows(), ElementsAre(3, -1));
  v1::StoreRequest store;
  store.add_items()->mutable_range()->set_sequence_id(step.rows(0).sequence_id());
  v1::StoreResponse stored;
  session->StoreAsync(&store, &stored, [&](absl::Status s) { events_.Add(s.ToString()); });
  ASSERT_TRUE(events_.Await(2));
  EXPECT_EQ(stored.statuses_size(), 1);
  const v1::StepRequest wrong;
  session->StepAsync(&wrong, &stepped, [&](absl::Status s) { events_.Add(s.ToString()); });
  ASSERT_TRUE(events_.Await(3));
  EXPECT_THAT(events_.all(), ElementsAre("OK", "OK", "INVALID_ARGUMENT: rows is empty"));
  EXPECT_EQ(daemon_.calls("Step")[0].token, session->info().token());
}

TEST_F(SessionTest, AsynchronousCallsHaveADeadline) {
  Gate gate;
  daemon_.SetHook(gate.Hook("Step"));
  auto session = Attach();
  const v1::StepRequest step = StepOf(1);
  v1::StepResponse stepped;
  session->StepAsync(
      &step, &stepped, [&](absl::Status s) { events_.Add(std::string(absl::StatusCodeToString(s.code()))); },
      Within(absl::Milliseconds(50)));
  ASSERT_TRUE(events_.Await(1));
  EXPECT_THAT(events_.all(), ElementsAre("DEADLINE_EXCEEDED"));
  gate.Open();
}

TEST_F(SessionTest, DestructionCancelsCallsUnderWay) {
  Gate gate;
  daemon_.SetHook(gate.Hook("Step"));
  auto session = Attach();
  const v1::StepRequest step = StepOf(1);
  v1::StepResponse stepped;
  session->StepAsync(&step, &stepped,
                     [&](absl::Status s) { events_.Add(std::string(absl::StatusCodeToString(s.code()))); });
  ASSERT_TRUE(gate.AwaitCaller());
  session.reset();
  EXPECT_THAT(events_.all(), ElementsAre("CANCELLED"));
  gate.Open();
}

TEST_F(SessionTest, ADeathWithACallUnderWayFailsTheCall) {
  Gate gate;
  daemon_.SetHook(gate.Hook("Step"));
  auto session = Attach();
  absl::Status status;
  bool attached = true;
  std::thread stepping([&] {
    v1::StepResponse stepped;
    status = session->Step(StepOf(1), &stepped);
    attached = session->attached();
    gate.Open();  // only now may the dying daemon's thread go
  });
  ASSERT_TRUE(gate.AwaitCaller());
  daemon_.Kill();
  stepping.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_FALSE(attached);
}

// As gRPC ends what a daemon meets while it stops: nobody here has cancelled it.
TEST_F(SessionTest, ACallThatTheOtherSideCutsOffIsUnavailable) {
  auto session = Attach();
  const uint64_t id = Admit(*session);
  daemon_.SetHook([](const std::string&) { return absl::CancelledError("cut"); });
  const auto check = [](const absl::Status& status) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cut the call off: cut"));
  };
  v1::StepResponse stepped;
  check(session->Step(StepOf(id), &stepped));
  const v1::StepRequest step = StepOf(id);
  std::promise<absl::Status> asynchronous;
  session->StepAsync(&step, &stepped, [&](absl::Status status) { asynchronous.set_value(std::move(status)); });
  check(asynchronous.get_future().get());
  check(Connect().ListPools().status());
  auto stream = session->RunSteps();
  ASSERT_TRUE(stream.ok());
  check((*stream)->Finish());
  daemon_.SetHook(nullptr);
  daemon_.EndSessions(absl::CancelledError("cut"));
  ASSERT_TRUE(events_.Await(2));
  EXPECT_THAT(events_.all(), ElementsAre("detached", "reattach 2"));
}

TEST_F(SessionTest, StepsRunInAStream) {
  auto session = Attach();
  const uint64_t id = Admit(*session);
  auto stream = session->RunSteps();
  ASSERT_TRUE(stream.ok()) << stream.status();
  v1::RunStepsRequest request;
  *request.mutable_step() = StepOf(id);
  v1::RunStepsResponse response;
  for (int i = 0; i < 100; ++i) {
    request.mutable_step()->mutable_groups(0)->set_indices(0, i);
    ASSERT_TRUE((*stream)->Run(request, &response).ok());
    ASSERT_THAT(response.step().groups(0).hot_rows(), ElementsAre(i, -1));
  }
  // Several steps ahead of the replies.
  for (int i = 0; i < 20; ++i) {
    request.mutable_step()->mutable_groups(0)->set_indices(0, i);
    ASSERT_TRUE((*stream)->Write(request).ok());
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE((*stream)->Read(&response).ok());
    ASSERT_THAT(response.step().groups(0).hot_rows(), ElementsAre(i, -1));
  }
  EXPECT_TRUE((*stream)->Finish().ok());
  EXPECT_TRUE(absl::IsOutOfRange((*stream)->Read(&response)));
  EXPECT_TRUE(absl::IsUnavailable((*stream)->Write(request)));
  EXPECT_EQ(daemon_.calls("RunSteps")[0].token, session->info().token());
}

TEST_F(SessionTest, AStepThatFailsEndsTheStreamWithItsStatus) {
  auto session = Attach();
  auto stream = session->RunSteps();
  ASSERT_TRUE(stream.ok());
  v1::RunStepsRequest request;
  v1::RunStepsResponse response;
  EXPECT_EQ((*stream)->Run(request, &response), absl::InvalidArgumentError("rows is empty"));
  *request.mutable_step() = StepOf(1);
  EXPECT_EQ((*stream)->Run(request, &response), absl::InvalidArgumentError("rows is empty"));
  EXPECT_EQ((*stream)->Finish(), absl::InvalidArgumentError("rows is empty"));
}

TEST_F(SessionTest, AReplyThatIsLateCanBeReadLater) {
  Gate gate;
  daemon_.SetHook(gate.Hook("RunSteps.step"));
  auto session = Attach();
  const uint64_t id = Admit(*session);
  auto stream = session->RunSteps();
  v1::RunStepsRequest request;
  *request.mutable_step() = StepOf(id);
  v1::RunStepsResponse response;
  ASSERT_TRUE((*stream)->Write(request).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded((*stream)->Read(&response, absl::Milliseconds(50))));
  EXPECT_TRUE(absl::IsDeadlineExceeded((*stream)->Finish(absl::Milliseconds(50))));
  gate.Open();
  ASSERT_TRUE((*stream)->Read(&response).ok());
  EXPECT_THAT(response.step().groups(0).hot_rows(), ElementsAre(3, -1));
}

TEST_F(SessionTest, AStreamEndsWithTheDaemonAndOutlivesItsSession) {
  auto session = Attach();
  auto stream = session->RunSteps();
  ASSERT_TRUE(stream.ok());
  v1::RunStepsRequest request;
  *request.mutable_step() = StepOf(Admit(*session));
  v1::RunStepsResponse response;
  ASSERT_TRUE((*stream)->Run(request, &response).ok());
  daemon_.Kill();
  EXPECT_FALSE((*stream)->Run(request, &response).ok());
  session.reset();
  EXPECT_FALSE((*stream)->Read(&response).ok());
}

TEST_F(SessionTest, ManyThreadsShareASession) {
  auto session = Attach();
  const uint64_t id = Admit(*session);
  std::vector<std::thread> threads;
  std::atomic<int> done = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const v1::StepRequest request = StepOf(id);
      v1::StepResponse response;
      for (int step = 0; step < 50; ++step) {
        if (session->Step(request, &response).ok() && FirstError(response.statuses()).ok()) ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 200);
}

TEST(BackoffTest, WaitsDoubleUpToTheLargestWithJitter) {
  absl::BitGen random;
  for (int run = 0; run < 100; ++run) {
    Backoff backoff(absl::Milliseconds(10), absl::Milliseconds(70));
    for (const int step : {10, 20, 40, 70, 70, 70}) {
      const absl::Duration wait = backoff.Next(random);
      EXPECT_GE(wait, absl::Milliseconds(step) / 2);
      EXPECT_LE(wait, absl::Milliseconds(step));
    }
  }
  Backoff first(absl::Hours(1), absl::Hours(1)), second(absl::Hours(1), absl::Hours(1));
  EXPECT_NE(first.Next(random), second.Next(random));
}

}  // namespace
}  // namespace stoker::client
