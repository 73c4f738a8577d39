// Ordered calls between this process, which is the engine, and a daemon on the GPU, with MPS and without: calls that
// are made while the engine's kernels still run, and answered before they have ended, find what those write last; and
// the engine's stream finds what the daemon did, without a wait on the host in between.
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
#include "kernels/cuda/stream_words.h"
#include "kernels/order_word.h"
#include "tests/gpu/order_engine.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using gpu_test::OrderEngine;
using gpu_test::RowCounts;
using ::testing::HasSubstr;

constexpr uint64_t kMillisecond = 1'000'000;

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  client::DevicePlane::SetUpProcess();
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0;
}();

// A stream that does not end keeps the process from ending as well.
void ExpectEnded(const absl::Status& stream) {
  if (!absl::IsDeadlineExceeded(stream)) return;
  std::fprintf(stderr, "FAILED: %s\n", stream.ToString().c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}
void ExpectStreamEnds(const OrderEngine& engine, absl::Duration limit) {
  const absl::Status status = engine.AwaitStream(limit);
  ExpectEnded(status);
  EXPECT_TRUE(status.ok()) << status;
}

// The programs lie beside this one.
std::string ProgramPath(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}
std::string EnginePath() { return ProgramPath("order_engine"); }

class OrderGpuTest : public DaemonTest {
 protected:
  OrderGpuTest() { CreatePool(OrderEngine::Pool("p")); }

  std::unique_ptr<OrderEngine> Attach(const std::string& name, client::SessionOptions options = {}) {
    auto engine = OrderEngine::Attach(client(), "p", name, "key of " + name, std::move(options));
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

TEST_F(OrderGpuTest, StepsFindWhatKernelsWriteLast) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  EXPECT_TRUE(engine->session().info().ordered_calls().available());
  absl::Status status = engine->StorePrompt(50 * kMillisecond);
  ASSERT_TRUE(status.ok()) << status;
  // Nobody has waited, and the kernel that writes the rows is at work.
  EXPECT_LT(engine->ended(), engine->begun());
  constexpr uint32_t kSteps = 300;
  uint32_t early = 0;
  uint32_t slow = 0;
  for (uint32_t step = 0; step < kSteps; ++step) {
    const bool is_slow = step % 10 == 0;
    status = engine->Step(OrderEngine::kPrompt + 1 + step, is_slow ? 50 * kMillisecond : 20'000);
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
  EXPECT_EQ(counts.compared, uint64_t{kSteps} * OrderEngine::kTopK * OrderEngine::kLayers);
  EXPECT_EQ(counts.wrong, 0u);
  EXPECT_EQ(engine->ended(), engine->begun());
  // The counters are taken in when the work is done.
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
    const auto sessions = client().ListSessions();
    return sessions.ok() && sessions->sessions(0).steps() == kSteps;
  }));
  // What was committed: the newest rows of all steps, in the pool.
  v1::LoadRequest load;
  load.mutable_order()->set_signal(true);
  v1::LoadItem* item = load.add_items();
  item->mutable_range()->set_sequence_id(engine->sequence_id());
  item->mutable_range()->set_row_count(OrderEngine::kPrompt + kSteps);
  item->set_target(v1::LOAD_TARGET_STAGING);
  v1::LoadResponse loaded;
  status = engine->session().Load(load, &loaded, {.stream = engine->stream()});
  status.Update(client::FirstError(loaded.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  const gpu_test::LayerRows staging = engine->Staging(0, OrderEngine::kPrompt + kSteps);
  ASSERT_EQ(gpu_test::LaunchCheckRange(staging, 0, 0, OrderEngine::kPrompt + kSteps, engine->counts_on_device(),
                                       engine->stream()),
            cudaSuccess);
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_EQ(engine->counts().compared,
            counts.compared + uint64_t{OrderEngine::kPrompt + kSteps} * OrderEngine::kLayers);
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// So that the test above is known to see it.
TEST_F(OrderGpuTest, WithoutTheWaitRowsAreWrong) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  const absl::Status status = engine->Step(OrderEngine::kPrompt + 1, 300 * kMillisecond, /*wait=*/false);
  ASSERT_TRUE(status.ok()) << status;
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_GT(engine->counts().wrong, 0u);
}

// Resolve, gather and commit as calls of their own, and steps in a stream, where the engine records and waits itself.
TEST_F(OrderGpuTest, AllCallsAreOrderedAndSoIsAStreamOfSteps) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(20 * kMillisecond).ok());
  client::Session& session = engine->session();
  const client::CallOptions on_stream = {.stream = engine->stream()};
  uint32_t length = OrderEngine::kPrompt + 1;
  uint64_t checked = 0;
  for (int round = 0; round < 20; ++round, ++length) {
    ASSERT_TRUE(engine->Produce(length, 5 * kMillisecond).ok());
    v1::ResolveRequest resolve;
    resolve.mutable_order()->set_wait(true);
    const v1::StepRequest step = engine->StepRequest(length, true);
    *resolve.mutable_rows() = step.rows();
    resolve.mutable_rows(0)->set_commit(false);
    resolve.set_top_k(OrderEngine::kTopK);
    resolve.set_source(v1::DATA_SOURCE_SHARED);
    resolve.mutable_order()->set_signal(true);
    v1::ResolveResponse resolved;
    absl::Status status = session.Resolve(resolve, &resolved, on_stream);
    status.Update(client::FirstError(resolved.statuses()));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(resolved.miss_pool_rows_size(), 0);
    EXPECT_EQ(resolved.result().counts_size(), 0);
    v1::GatherRequest gather;
    gather.mutable_order()->set_signal(true);
    v1::GatherResponse gathered;
    status = session.Gather(gather, &gathered, on_stream);
    ASSERT_TRUE(status.ok()) << status;
    v1::CommitRequest commit;
    commit.mutable_order()->set_wait(true);
    commit.mutable_order()->set_signal(true);
    v1::CommitItem* item = commit.add_items();
    item->set_sequence_id(engine->sequence_id());
    item->set_first_row(length - 1);
    item->set_row_count(1);
    v1::CommitResponse committed;
    status = session.Commit(commit, &committed, on_stream);
    status.Update(client::FirstError(committed.statuses()));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_test::LaunchCheck(engine->hot(), engine->entries(), engine->hot_rows(), OrderEngine::kTopK,
                                    engine->counts_on_device(), engine->stream()),
              cudaSuccess);
    checked += OrderEngine::kTopK * OrderEngine::kLayers;
    // No more than the daemon queues.
    if (round % 8 == 7) ExpectStreamEnds(*engine, absl::Seconds(30));
  }
  auto steps = session.RunSteps();
  ASSERT_TRUE(steps.ok()) << steps.status();
  for (int round = 0; round < 20; ++round, ++length) {
    ASSERT_TRUE(engine->Produce(length, 5 * kMillisecond).ok());
    const auto call = session.SignalEngine(engine->stream());
    ASSERT_TRUE(call.ok()) << call.status();
    v1::RunStepsRequest request;
    *request.mutable_step() = engine->StepRequest(length, true);
    request.mutable_step()->mutable_order()->set_number(call->number);
    v1::RunStepsResponse response;
    absl::Status status = (*steps)->Run(request, &response);
    status.Update(client::FirstError(response.step().statuses()));
    status.Update(session.AwaitDaemon(*call, on_stream));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_test::LaunchCheck(engine->hot(), engine->entries(), engine->hot_rows(), OrderEngine::kTopK,
                                    engine->counts_on_device(), engine->stream()),
              cudaSuccess);
    checked += OrderEngine::kTopK * OrderEngine::kLayers;
    // No more than the daemon queues.
    if (round % 8 == 7) ExpectStreamEnds(*engine, absl::Seconds(30));
  }
  ExpectStreamEnds(*engine, absl::Seconds(30));
  EXPECT_EQ(engine->counts().compared, checked);
  EXPECT_EQ(engine->counts().wrong, 0u);
  EXPECT_TRUE((*steps)->Finish().ok());
}

// The session's waits are aborted: it is drained while the kernel still runs, and what that kernel writes is not
// stored.
TEST_F(OrderGpuTest, ASessionEndsWhileTheEnginesKernelRuns) {
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    const std::unique_ptr<OrderEngine> engine = Attach("engine");
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->StorePrompt(2000 * kMillisecond).ok());
    EXPECT_LT(engine->ended(), engine->begun());
    const absl::Time begin = absl::Now();
    if (round % 2 == 0) {
      v1::EvictSessionRequest evict;
      evict.set_session_id(engine->session().info().session_id());
      EXPECT_TRUE(client().EvictSession(evict).ok());
      EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return client().GetStatus()->hot_bytes() == 0; }));
    } else {
      // Superseded: the next one has its name when it is drained. Without the arena, whose mapping in this process
      // would wait for the kernel.
      client::SessionOptions unmapped = WithoutReattach();
      unmapped.arena_mapping = client::ArenaMapping::kNever;
      const auto next = client().Attach(AttachTo(OrderEngine::Pool("p"), "engine"), unmapped);
      ASSERT_TRUE(next.ok()) << next.status();
    }
    const absl::Duration drained = absl::Now() - begin;
    std::printf("round %d: drained after %.3f s\n", round, absl::ToDoubleSeconds(drained));
    EXPECT_LT(drained, absl::Seconds(1));
    EXPECT_LT(engine->ended(), engine->begun());
    EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return engine->session().ended(); }));
    ExpectStreamEnds(*engine, absl::Seconds(10));
    EXPECT_FALSE(engine->Step(OrderEngine::kPrompt + 1, 0).ok());
    ExpectStreamEnds(*engine, absl::Seconds(10));
    EXPECT_EQ(StoredRows("key of engine"), 0u);
  }
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 0; }));
}

// More work than fits into a stream, behind a wait that nobody ends but the end of the session.
TEST_F(OrderGpuTest, AStreamThatIsFullAndWaitsIsDrained) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  ASSERT_TRUE(engine->Produce(OrderEngine::kPrompt + 1, 5000 * kMillisecond).ok());
  absl::Status status;
  int steps = 0;
  for (; status.ok() && steps < 1000; ++steps) {
    v1::StepRequest step = engine->StepRequest(OrderEngine::kPrompt + 1, /*wait=*/true);
    step.mutable_rows(0)->set_commit(false);
    v1::StepResponse stepped;
    status = engine->session().Step(step, &stepped, {.timeout = absl::Seconds(5), .stream = engine->stream()});
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  std::printf("refused after %d steps: %s\n", steps, status.ToString().c_str());
  EXPECT_LT(engine->ended(), engine->begun());
  const absl::Time begin = absl::Now();
  v1::EvictSessionRequest evict;
  evict.set_session_id(engine->session().info().session_id());
  EXPECT_TRUE(client().EvictSession(evict).ok());
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return client().GetStatus()->hot_bytes() == 0; }));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
  EXPECT_LT(engine->ended(), engine->begun());
  ExpectStreamEnds(*engine, absl::Seconds(20));
}

// A call that is refused, and whose answer the stream has been told to wait for.
TEST_F(OrderGpuTest, ARefusedCallsNumberComes) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(300 * kMillisecond).ok());
  client::Session& session = engine->session();
  const auto call = session.SignalEngine(engine->stream());
  ASSERT_TRUE(call.ok()) << call.status();
  ASSERT_TRUE(session.AwaitDaemon(*call, {.stream = engine->stream()}).ok());
  v1::StepRequest step = engine->StepRequest(OrderEngine::kPrompt + 1, true);
  step.mutable_order()->set_number(call->number);
  step.set_top_k(OrderEngine::kTopK + 1);
  v1::StepResponse stepped;
  EXPECT_EQ(session.Step(step, &stepped, {.stream = engine->stream()}).code(), absl::StatusCode::kInvalidArgument);
  ExpectStreamEnds(*engine, absl::Seconds(10));
  // It came behind the store.
  EXPECT_EQ(StoredRows("key of engine"), OrderEngine::kPrompt);
  ASSERT_TRUE(engine->Step(OrderEngine::kPrompt + 1, 0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// What cuStreamWaitValue64 does with the word that ends all waits, and with none that has come.
TEST_F(OrderGpuTest, ReleasedWordsEndEveryWait) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const kernels::cuda::StreamWords words(kernels::cuda::LoadStreamWordDriver());
  ASSERT_TRUE(words.CheckSupport(0).ok()) << words.CheckSupport(0);
  auto memory = kernels::cuda::MakeDeviceMemory(8);
  auto waiting = kernels::cuda::MakeStream();
  auto other = kernels::cuda::MakeReleasingStream();
  ASSERT_TRUE(memory.ok() && waiting.ok() && other.ok());
  auto* const word = static_cast<uint64_t*>(memory->get());
  for (const uint64_t number : {uint64_t{1}, uint64_t{77}, kernels::kMaxOrder}) {
    SCOPED_TRACE(number);
    ASSERT_EQ(words.Write(word, number - 1, other->get()), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(other->get()), cudaSuccess);
    ASSERT_EQ(words.Await(word, number, waiting->get()), cudaSuccess);
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_EQ(cudaStreamQuery(waiting->get()), cudaErrorNotReady);
    ASSERT_EQ(words.Write(word, kernels::kReleasedOrder, other->get()), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(waiting->get()), cudaSuccess);
  }
}

// While the daemon's stream waits for one engine, and the work of an armed session for doorbells that nobody rings,
// others come, work and go.
TEST_F(OrderGpuTest, OthersDoNotWaitForOneThatWaits) {
  const v1::PoolSpec pool = OrderEngine::Pool("p");
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
    const std::unique_ptr<OrderEngine> other = Attach("other");
    ASSERT_NE(other, nullptr);
    ASSERT_TRUE(other->StorePrompt(0).ok());
    for (uint32_t step = 1; step <= 20; ++step) ASSERT_TRUE(other->Step(OrderEngine::kPrompt + step, 0).ok());
    ExpectStreamEnds(*other, absl::Seconds(20));
    EXPECT_EQ(other->counts().wrong, 0u);
  }
  EXPECT_TRUE(Eventually(absl::Seconds(20), [&] { return client().GetStatus()->hot_bytes() == hot_bytes; }));
  std::printf("three sessions took %.3f s\n", absl::ToDoubleSeconds(absl::Now() - begin));
  EXPECT_EQ(slow.Output().find("ended"), std::string::npos);
  EXPECT_TRUE(slow.AwaitOutput("ended", absl::Seconds(30))) << slow.Output();
}

TEST_F(OrderGpuTest, TheExampleRuns) {
  const Finished example =
      RunToEnd({ProgramPath("example_ordered_calls"), daemon().address(), "200"}, daemon().folder());
  EXPECT_EQ(example.status, 0) << example.output;
  EXPECT_THAT(example.output, HasSubstr("200 steps, each entry has its hot row"));
}

// An engine that is killed while the daemon's stream waits for it: the session is over, nothing that the engine did not
// write is stored, and another engine goes on. Under MPS its stream hangs without a kernel: a process that is killed
// inside one may take its neighbours' contexts along (lost_context_gpu_test).
TEST_F(OrderGpuTest, AnEngineThatIsKilledIsGoneAndOthersGoOn) {
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ExpectStreamEnds(*engine, absl::Seconds(10));
  const bool with_mps = client().GetStatus()->mps_enabled();
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  uint32_t length = OrderEngine::kPrompt + 1;
  for (int round = 0; round < 4; ++round) {
    const std::string work = with_mps || round % 2 == 0 ? "hang" : "300";
    const std::string key = "killed " + std::to_string(round);
    ChildProcess other({EnginePath(), daemon().address(), "p", key, work}, daemon().folder().File("engine"));
    ASSERT_TRUE(other.AwaitOutput("enqueued", absl::Seconds(30))) << other.Output();
    const absl::Time begin = absl::Now();
    other.Kill();
    ASSERT_TRUE(Eventually(absl::Seconds(20), [&] {
      const auto status = client().GetStatus();
      return status.ok() && status->sessions() == 1 && status->hot_bytes() == hot_bytes;
    })) << "the killed engine's session is not drained";
    std::printf("round %d, %s: drained %.3f s after the kill\n", round, work.c_str(),
                absl::ToDoubleSeconds(absl::Now() - begin));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_EQ(StoredRows(key), OrderEngine::kPrompt);
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(engine->Step(length++, 0).ok());
    ExpectStreamEnds(*engine, absl::Seconds(10));
  }
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// The engine's stream waits for the daemon word, and the daemon will not raise it any more.
class DaemonEndsGpuTest : public OrderGpuTest, public testing::WithParamInterface<int> {
 protected:
  void TearDown() override {
    if (!lost_) OrderGpuTest::TearDown();
  }
  bool lost_ = false;  // this process's context, and with it a daemon that could be started under the same MPS
};
INSTANTIATE_TEST_SUITE_P(Signals, DaemonEndsGpuTest, testing::Values(SIGTERM, SIGKILL),
                         [](const auto& signal) { return signal.param == SIGTERM ? "Stopped" : "Killed"; });

TEST_P(DaemonEndsGpuTest, AWaitEnds) {
  const bool with_mps = client().GetStatus()->mps_enabled();
  {
    client::SessionOptions options;
    options.reattach_timeout = absl::ZeroDuration();
    const std::unique_ptr<OrderEngine> engine = Attach("engine", options);
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->StorePrompt(0).ok());
    ExpectStreamEnds(*engine, absl::Seconds(10));
    ASSERT_TRUE(engine->Step(OrderEngine::kPrompt + 1, 1000 * kMillisecond).ok());
    EXPECT_LT(engine->ended(), engine->begun());
    daemon().process().Signal(GetParam());
    const absl::Time begin = absl::Now();
    absl::Status stream;
    while (absl::IsDeadlineExceeded(stream = engine->AwaitStream(absl::Milliseconds(10))) &&
           absl::Now() - begin < absl::Seconds(20)) {
    }
    std::printf("the stream ended %.3f s after the signal: %s\n", absl::ToDoubleSeconds(absl::Now() - begin),
                stream.ToString().c_str());
    const bool killed = GetParam() == SIGKILL;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(killed ? 3 : 15));
    ExpectEnded(stream);
    // MPS: a process that is killed may take its neighbours' contexts along (deploy/README.md): then nothing of CUDA's
    // can be used in this process any more.
    lost_ = !stream.ok();
    EXPECT_TRUE(stream.ok() || (with_mps && killed)) << stream;
    if (killed) {
      // What says that the rows are worth nothing: before the wait has ended.
      EXPECT_FALSE(engine->session().status().ok());
      EXPECT_FALSE(engine->Step(OrderEngine::kPrompt + 2, 0).ok());
      // Its kernels are done with the arena before that is unmapped, which waits for none.
      ExpectEnded(engine->AwaitStream(absl::Seconds(10)));
    } else if (engine->session().status().ok()) {
      // Work that was enqueued is done while the daemon drains.
      EXPECT_EQ(engine->counts().wrong, 0u);
    }
    if (lost_) return;
  }
  // The GPU is as before for this process, and for a daemon that comes.
  EXPECT_TRUE(daemon().process().Wait(absl::Seconds(20)).has_value());
  daemon().Restart();
  ASSERT_TRUE(Eventually(absl::Seconds(30), [&] { return client().GetStatus().ok(); }));
  CreatePool(OrderEngine::Pool("p"));
  const std::unique_ptr<OrderEngine> engine = Attach("engine");
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  for (uint32_t step = 1; step <= 20; ++step) ASSERT_TRUE(engine->Step(OrderEngine::kPrompt + step, 100'000).ok());
  ExpectStreamEnds(*engine, absl::Seconds(20));
  EXPECT_EQ(engine->counts().wrong, 0u);
}

// The session comes back in a daemon that was started anew, while the engine's stream waits for the one before.
TEST_F(OrderGpuTest, ASessionThatComesBackHasNumbersOfItsOwnWhenTheDaemonIsKilled) {
  const bool with_mps = client().GetStatus()->mps_enabled();
  if (with_mps) return;  // as above: the context may be lost
  client::SessionOptions options;
  options.recreate_pool = true;
  const std::unique_ptr<OrderEngine> engine = Attach("engine", options);
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(engine->StorePrompt(0).ok());
  ASSERT_TRUE(engine->Step(OrderEngine::kPrompt + 1, 1000 * kMillisecond).ok());
  daemon().process().Kill();
  daemon().process().Wait(absl::Seconds(20));
  daemon().Restart();
  const auto generation = engine->session().AwaitAttached(absl::Seconds(30));
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_EQ(*generation, 2u);
  ExpectStreamEnds(*engine, absl::Seconds(10));
  const auto call = engine->session().SignalEngine(engine->stream());
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->number, 1u);
  EXPECT_EQ(call->generation, 2u);
  // A wait for the daemon before says so, and is none.
  EXPECT_EQ(engine->session().AwaitDaemon({.generation = 1, .number = 2}, {.stream = engine->stream()}).code(),
            absl::StatusCode::kUnavailable);
  ExpectStreamEnds(*engine, absl::Seconds(10));
}

}  // namespace
}  // namespace stoker::system_test
