// Interprocess events between this process, which is the engine, and a daemon on the GPU, with MPS and without: calls
// that are made while the engine's kernels still run, and answered before they have ended, find what those write last;
// and the engine's stream finds what the daemon did, without a wait on the host in between.
#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/device_plane.h"
#include "client/status.h"
#include "kernels/cuda/ipc_event.h"
#include "tests/gpu/event_engine.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using gpu_test::EventEngine;
using gpu_test::RowCounts;
using ::testing::HasSubstr;

constexpr uint64_t kMillisecond = 1'000'000;

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  client::DevicePlane::SetUpProcess();
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0;
}();

// A stream that does not end keeps the process from ending as well.
void ExpectStreamEnds(const EventEngine& engine, absl::Duration limit) {
  const absl::Status status = engine.AwaitStream(limit);
  if (absl::IsDeadlineExceeded(status)) {
    std::fprintf(stderr, "FAILED: %s\n", status.ToString().c_str());
    std::fflush(nullptr);
    std::_Exit(1);
  }
  EXPECT_TRUE(status.ok()) << status;
}

// The programs lie beside this one.
std::string ProgramPath(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}
std::string EnginePath() { return ProgramPath("event_engine"); }

class EventsGpuTest : public DaemonTest {
 protected:
  EventsGpuTest() { CreatePool(EventEngine::Pool("p")); }

  std::unique_ptr<EventEngine> Attach(const std::string& name, client::SessionOptions options = {}) {
    auto engine = EventEngine::Attach(client(), "p", name, "key of " + name, std::move(options));
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  // Whether the sequence has rows that the engine has stored, and how many.
  uint32_t StoredRows(const std::string& key) const {
    for (const v1::SequenceInfo& sequence : Sequences("p")) {
      if (sequence.sequence_key() == key) return sequence.stored_rows();
    }
    return 0;
  }
};

TEST_F(EventsGpuTest, StepsFindWhatKernelsWriteLast) {
  const std::unique_ptr<EventEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->session().info().event_handle().size(), 64u);
  absl::Status status = engine->StorePrompt(50 * kMillisecond);
  ASSERT_TRUE(status.ok()) << status;
  // Nobody has waited, and the kernel that writes the rows is at work.
  EXPECT_LT(engine->ended(), engine->begun());
  constexpr uint32_t kSteps = 300;
  uint32_t early = 0;
  uint32_t slow = 0;
  for (uint32_t step = 0; step < kSteps; ++step) {
    const bool is_slow = step % 10 == 0;
    status = engine->Step(EventEngine::kPrompt + 1 + step, is_slow ? 50 * kMillisecond : 20'000);
    ASSERT_TRUE(status.ok()) << step << ": " << status;
    // A call counts as queued until its work is done, and there is a limit.
    if (step % 32 == 31) ExpectStreamEnds(*engine, absl::Seconds(60));
    if (!is_slow) continue;
    ++slow;
    // The reply is there, and the kernel has not ended that the step waits for.
    early += engine->ended() < engine->begun() ? 1 : 0;
  }
  EXPECT_EQ(early, slow);
  ExpectStreamEnds(*engine, absl::Seconds(60));
  const RowCounts counts = engine->counts();
  EXPECT_EQ(counts.compared, uint64_t{kSteps} * EventEngine::kTopK * EventEngine::kLayers);
  EXPECT_EQ(counts.wrong, 0u);
  EXPECT_EQ(engine->ended(), engine->begun());
  // The counters are taken in when the work is done.
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
    const auto sessions = client().ListSessions();
    return sessions.ok() && sessions->sessions(0).steps() == kSteps;
  }));
  // What was committed: the newest rows of all steps, in the pool.
  v1::LoadRequest load;
  load.set_signal_event(true);
  v1::LoadItem* item = load.add_items();
  item->mutable_range()->set_sequence_id(engine->sequence_id());
  item->mutable_range()->set_row_count(EventEngine::kPrompt + kSteps);
  item->set_target(v1::LOAD_TARGET_STAGING);
  v1::LoadResponse loaded;
  status = engine->session().Load(load, &loaded, {.stream = engine->stream()});
  status.Update(client::FirstError(loaded.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  const gpu_test::LayerRows staging = engine->Staging(0, EventEngine::kPrompt + kSteps);
  ASSERT_EQ(gpu_test::LaunchCheckRange(staging, 0, 0, EventEngine::kPrompt + kSteps, engine->counts_on_device(),
                                       engine->stream()),
            cudaSuccess);
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_EQ(engine->counts().compared,
            counts.compared + uint64_t{EventEngine::kPrompt + kSteps} * EventEngine::kLayers);
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// So that the test above is known to see it.
TEST_F(EventsGpuTest, WithoutTheWaitRowsAreWrong) {
  const std::unique_ptr<EventEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  const absl::Status status = engine->Step(EventEngine::kPrompt + 1, 300 * kMillisecond, /*wait=*/false);
  ASSERT_TRUE(status.ok()) << status;
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_GT(engine->counts().wrong, 0u);
}

// Resolve, gather and commit as calls of their own, and steps in a stream, where the engine records and waits itself.
TEST_F(EventsGpuTest, AllCallsAreOrderedAndSoIsAStreamOfSteps) {
  const std::unique_ptr<EventEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(20 * kMillisecond).ok());
  client::Session& session = engine->session();
  const client::CallOptions on_stream = {.stream = engine->stream()};
  uint32_t length = EventEngine::kPrompt + 1;
  uint64_t checked = 0;
  for (int round = 0; round < 20; ++round, ++length) {
    ASSERT_TRUE(engine->Produce(length, 5 * kMillisecond).ok());
    v1::ResolveRequest resolve;
    resolve.set_wait_event(true);
    const v1::StepRequest step = engine->StepRequest(length, true);
    *resolve.mutable_rows() = step.rows();
    resolve.mutable_rows(0)->set_commit(false);
    resolve.set_top_k(EventEngine::kTopK);
    resolve.set_source(v1::DATA_SOURCE_SHARED);
    resolve.set_signal_event(true);
    v1::ResolveResponse resolved;
    absl::Status status = session.Resolve(resolve, &resolved, on_stream);
    status.Update(client::FirstError(resolved.statuses()));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(resolved.miss_pool_rows_size(), 0);
    EXPECT_EQ(resolved.result().counts_size(), 0);
    v1::GatherRequest gather;
    gather.set_signal_event(true);
    v1::GatherResponse gathered;
    status = session.Gather(gather, &gathered, on_stream);
    ASSERT_TRUE(status.ok()) << status;
    v1::CommitRequest commit;
    commit.set_wait_event(true);
    commit.set_signal_event(true);
    v1::CommitItem* item = commit.add_items();
    item->set_sequence_id(engine->sequence_id());
    item->set_first_row(length - 1);
    item->set_row_count(1);
    v1::CommitResponse committed;
    status = session.Commit(commit, &committed, on_stream);
    status.Update(client::FirstError(committed.statuses()));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_test::LaunchCheck(engine->hot(), engine->entries(), engine->hot_rows(), EventEngine::kTopK,
                                    engine->counts_on_device(), engine->stream()),
              cudaSuccess);
    checked += EventEngine::kTopK * EventEngine::kLayers;
  }
  auto steps = session.RunSteps();
  ASSERT_TRUE(steps.ok()) << steps.status();
  for (int round = 0; round < 20; ++round, ++length) {
    ASSERT_TRUE(engine->Produce(length, 5 * kMillisecond).ok());
    ASSERT_TRUE(session.RecordEvent(engine->stream()).ok());
    v1::RunStepsRequest request;
    *request.mutable_step() = engine->StepRequest(length, true);
    v1::RunStepsResponse response;
    absl::Status status = (*steps)->Run(request, &response);
    status.Update(client::FirstError(response.step().statuses()));
    status.Update(session.AwaitEvent(engine->stream()));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_test::LaunchCheck(engine->hot(), engine->entries(), engine->hot_rows(), EventEngine::kTopK,
                                    engine->counts_on_device(), engine->stream()),
              cudaSuccess);
    checked += EventEngine::kTopK * EventEngine::kLayers;
  }
  ExpectStreamEnds(*engine, absl::Seconds(30));
  EXPECT_EQ(engine->counts().compared, checked);
  EXPECT_EQ(engine->counts().wrong, 0u);
  EXPECT_TRUE((*steps)->Finish().ok());
}

TEST_F(EventsGpuTest, ASessionEndsWhileTheEnginesKernelRuns) {
  for (int round = 0; round < 5; ++round) {
    const std::unique_ptr<EventEngine> engine = Attach("engine");
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->StorePrompt(100 * kMillisecond).ok());
    EXPECT_LT(engine->ended(), engine->begun());
    if (round % 2 == 0) {
      v1::EvictSessionRequest evict;
      evict.set_session_id(engine->session().info().session_id());
      EXPECT_TRUE(client().EvictSession(evict).ok());
    } else {
      // Superseded: the next one has its name, and its sequence, when its work is done.
      const std::unique_ptr<EventEngine> next = Attach("engine");
      ASSERT_NE(next, nullptr);
      EXPECT_EQ(engine->ended(), engine->begun());
      EXPECT_EQ(next->stored_rows(), EventEngine::kPrompt);
    }
    ExpectStreamEnds(*engine, absl::Seconds(10));
    EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return engine->session().ended(); }));
    EXPECT_FALSE(engine->Step(EventEngine::kPrompt + 1, 0).ok());
    ExpectStreamEnds(*engine, absl::Seconds(10));
  }
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 0; }));
}

// While the daemon's stream waits for one engine, and the work of an armed session for doorbells that nobody rings,
// others come, work and go.
TEST_F(EventsGpuTest, OthersDoNotWaitForOneThatWaits) {
  const v1::PoolSpec pool = EventEngine::Pool("p");
  client::SessionOptions on_device;
  on_device.arena_mapping = client::ArenaMapping::kDevice;
  const auto idle = client().Attach(AttachTo(pool, "idle", 2, 64, 16, 1024), on_device);
  ASSERT_TRUE(idle.ok()) << idle.status();
  const auto plane = client::DevicePlane::Arm(**idle, 16);
  EXPECT_TRUE(plane.ok() || absl::IsFailedPrecondition(plane.status())) << plane.status();  // without MPS
  ChildProcess slow({EnginePath(), daemon().address(), "p", "slow", "5000"}, daemon().folder().File("slow"));
  ASSERT_TRUE(slow.AwaitOutput("enqueued", absl::Seconds(30))) << slow.Output();
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  const absl::Time begin = absl::Now();
  for (int round = 0; round < 3; ++round) {
    const std::unique_ptr<EventEngine> other = Attach("other");
    ASSERT_NE(other, nullptr);
    ASSERT_TRUE(other->StorePrompt(0).ok());
    for (uint32_t step = 1; step <= 20; ++step) ASSERT_TRUE(other->Step(EventEngine::kPrompt + step, 0).ok());
    ExpectStreamEnds(*other, absl::Seconds(20));
    EXPECT_EQ(other->counts().wrong, 0u);
  }
  EXPECT_TRUE(Eventually(absl::Seconds(20), [&] { return client().GetStatus()->hot_bytes() == hot_bytes; }));
  std::printf("three sessions took %.3f s\n", absl::ToDoubleSeconds(absl::Now() - begin));
  EXPECT_EQ(slow.Output().find("ended"), std::string::npos);
  EXPECT_TRUE(slow.AwaitOutput("ended", absl::Seconds(30))) << slow.Output();
}

// As when an engine without a name comes back before its old session is drained.
TEST_F(EventsGpuTest, OneEventForTwoSessions) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  std::string handle;
  const auto event = kernels::cuda::MakeIpcEvent(&handle);
  ASSERT_TRUE(event.ok()) << event.status();
  v1::AttachRequest request = AttachTo(EventEngine::Pool("p"), "", 2, 64, 16, 1024);
  request.mutable_engine_event()->set_handle(handle);
  request.mutable_engine_event()->set_device(client().GetStatus()->devices(0));
  const auto first = client().Attach(request);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = client().Attach(request);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE((*first)->info().event_handle(), (*second)->info().event_handle());
}

TEST_F(EventsGpuTest, RefusesHandlesThatAreNone) {
  v1::PoolSpec pool = EventEngine::Pool("p");
  const v1::AttachRequest plain = AttachTo(pool, "rank", 2, 64, 16, 1024);
  const std::string device = client().GetStatus()->devices(0);
  const auto refused = [&](const std::string& handle, const std::string& of, const std::string& part) {
    v1::AttachRequest request = plain;
    request.mutable_engine_event()->set_handle(handle);
    request.mutable_engine_event()->set_device(of);
    const auto session = client().Attach(request);
    EXPECT_EQ(session.status().code(), absl::StatusCode::kInvalidArgument) << session.status();
    EXPECT_THAT(std::string(session.status().message()), HasSubstr(part));
  };
  refused("", device, "engine_event.handle: 0 bytes given, a cudaIpcEventHandle_t has 64");
  refused(std::string(63, 'x'), device, "engine_event.handle: 63 bytes given");
  refused(std::string(64, '\0'), device, "engine_event.handle: ");
  refused(std::string(64, '\xff'), device, "engine_event.handle: ");
  std::mt19937 random(5);
  for (int i = 0; i < 50; ++i) {
    std::string handle(64, '\0');
    for (char& byte : handle) byte = static_cast<char>(random());
    refused(handle, device, "engine_event.handle: ");
  }
  refused(std::string(64, 'x'), "GPU-00000000-0000-0000-0000-000000000000", "the session is on");
  // The daemon and its device are as before.
  const std::unique_ptr<EventEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ASSERT_TRUE(engine->Step(EventEngine::kPrompt + 1, 0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_EQ(engine->counts().wrong, 0u);
}

TEST_F(EventsGpuTest, TheExampleRuns) {
  const Finished example = RunToEnd({ProgramPath("example_events"), daemon().address(), "200"}, daemon().folder());
  EXPECT_EQ(example.status, 0) << example.output;
  EXPECT_THAT(example.output, HasSubstr("200 steps, each entry has its hot row"));
}

// An engine that is killed while its kernel runs and the daemon's stream waits for it: the session is over, nothing
// that the kernel did not write is stored, and another engine goes on.
TEST_F(EventsGpuTest, AnEngineThatIsKilledIsGoneAndOthersGoOn) {
  const std::unique_ptr<EventEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  uint32_t length = EventEngine::kPrompt + 1;
  for (int round = 0; round < 3; ++round) {
    const std::string key = "killed " + std::to_string(round);
    ChildProcess other({EnginePath(), daemon().address(), "p", key, "300"}, daemon().folder().File("engine"));
    ASSERT_TRUE(other.AwaitOutput("enqueued", absl::Seconds(30))) << other.Output();
    other.Kill();
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(Eventually(absl::Seconds(20), [&] { return SessionCount() == 1; }));
    EXPECT_TRUE(Eventually(absl::Seconds(20), [&] { return client().GetStatus()->hot_bytes() == hot_bytes; }))
        << "the killed engine's session is not drained";
    std::printf("round %d: drained %.3f s after the kill\n", round, absl::ToDoubleSeconds(absl::Now() - begin));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_EQ(StoredRows(key), EventEngine::kPrompt);
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(engine->Step(length++, 0).ok());
    ExpectStreamEnds(*engine, absl::Seconds(10));
  }
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// The engine's stream waits for the daemon's event, and the daemon will not record it any more.
TEST_F(EventsGpuTest, AWaitEndsWhenTheDaemonIsKilled) {
  client::SessionOptions options;
  options.reattach_timeout = absl::ZeroDuration();
  const std::unique_ptr<EventEngine> engine = Attach("engine", options);
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  ASSERT_TRUE(engine->Step(EventEngine::kPrompt + 1, 1000 * kMillisecond).ok());
  EXPECT_LT(engine->ended(), engine->begun());
  daemon().process().Kill();
  const absl::Time begin = absl::Now();
  ExpectStreamEnds(*engine, absl::Seconds(10));
  std::printf("the stream ended %.3f s after the daemon\n", absl::ToDoubleSeconds(absl::Now() - begin));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(3));
  // What says that the rows are worth nothing.
  EXPECT_TRUE(Eventually(absl::Seconds(2), [&] { return !engine->session().status().ok(); }));
  EXPECT_FALSE(engine->Step(EventEngine::kPrompt + 2, 0).ok());
  daemon().Restart();  // for TearDown
}

}  // namespace
}  // namespace stoker::system_test
