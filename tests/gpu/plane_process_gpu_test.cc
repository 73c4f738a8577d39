// The server plane of a GPU between two processes: this one is the engine, the daemon is another one, under the same
// MPS. Without MPS the plane must be refused, with the reason, and steps by calls must work.
//
// Rows are compared on the GPU, by the kernels of stoker-replay, with what their layer and token say they hold.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/device_plane.h"
#include "client/replay/cuda/gpu_plane.h"
#include "client/replay/cuda/row_kernels.h"
#include "kernels/cuda/handles.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using client::DevicePlane;
using kernels::cuda::DeviceMemory;
using kernels::cuda::GraphExecHandle;
using kernels::cuda::GraphHandle;
using kernels::cuda::StreamHandle;
using replay::OpenSequence;
using replay::Request;
using ::testing::HasSubstr;

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  DevicePlane::SetUpProcess();
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0;
}();

// From CMake; the environment variable STOKER_TEST_REPLAY names another.
std::string ReplayPath() {
  const char* other = std::getenv("STOKER_TEST_REPLAY");
  return other == nullptr ? STOKER_REPLAY_PATH : other;
}

class PlaneProcessGpuTest : public DaemonTest {
 protected:
  PlaneProcessGpuTest() { pool_ = CreatePool(LinearPool("p", kLayers, kRowBytes, 1200)); }

  bool mps() { return client().GetStatus()->mps_enabled(); }
  // What a session is told where kernels of two processes take turns. Ends the test's part that needs the plane.
  void ExpectRefused(GpuEngine& engine) {
    const absl::Status refused = DevicePlane::Arm(engine.session(), kTopK).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("MPS does not run"));
    EXPECT_EQ(client().GetStatus()->armed_sessions(), 0u);
  }
  static std::unique_ptr<replay::StepPlane> Arm(GpuEngine& engine) {
    auto plane = replay::MakeGpuPlane(engine.session(), client::Plane::kServer, kTopK);
    EXPECT_TRUE(plane.ok()) << plane.status();
    return plane.ok() ? *std::move(plane) : nullptr;
  }

  v1::PoolSpec pool_;
};

class ArenaKindsGpuTest : public PlaneProcessGpuTest, public testing::WithParamInterface<v1::ArenaSharing> {};
INSTANTIATE_TEST_SUITE_P(Arenas, ArenaKindsGpuTest,
                         testing::Values(v1::ARENA_SHARING_IPC_HANDLE, v1::ARENA_SHARING_DESCRIPTOR),
                         [](const auto& sharing) {
                           return sharing.param == v1::ARENA_SHARING_DESCRIPTOR ? "Descriptor" : "IpcHandle";
                         });

TEST_P(ArenaKindsGpuTest, DecodesAThousandSteps) {
  GpuEngine engine(client(), pool_, "engine", v1::PLANE_UNSPECIFIED, GetParam());
  EXPECT_EQ(engine.session().info().arena().cuda_ipc_handle().empty(), GetParam() == v1::ARENA_SHARING_DESCRIPTOR);
  std::mt19937_64 random(1);
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 12; ++i) requests.push_back(Prompt(i));
  std::unique_ptr<replay::StepPlane> plane;
  if (mps()) {
    plane = Arm(engine);
    ASSERT_NE(plane, nullptr);
  } else {
    ExpectRefused(engine);
  }
  const OpenSequence lasting = engine.Open(requests[0]);
  OpenSequence passing = engine.Open(requests[1]);
  uint32_t length = kPrompt + 1, passing_length = kPrompt + 1;
  for (uint32_t step = 0; step < 1000 && !HasFailure(); ++step, ++length) {
    // Sequences join and leave between steps, and batches differ in size.
    if (step % 100 == 99) {
      engine.Close(passing);
      passing = engine.Open(requests[2 + step / 100 % 10]);
      passing_length = kPrompt + 1;
    }
    std::vector<replay::BatchRow> batch = {{&lasting, length}};
    if (step % 3 != 2) batch.push_back({&passing, passing_length++});
    if (plane != nullptr) {
      engine.Step(*plane, batch, random);
    } else {
      engine.StepByCall(batch, random);
    }
  }
  EXPECT_GT(engine.checked(), uint64_t{1000} * kTopK * kLayers);
  for (const v1::SequenceInfo& info : Sequences("p")) {
    if (info.sequence_id() == lasting.id) {
      EXPECT_EQ(info.stored_rows(), kPrompt + 1000);
    }
  }
}

// Steps that are enqueued ahead, as one graph each: nothing but the doorbells keeps the two processes in order. What is
// compared is what kernels behind the wait see.
TEST_F(PlaneProcessGpuTest, StepsEnqueuedAheadSeeTheirRows) {
  GpuEngine engine(client(), pool_, "engine");
  if (!mps()) {
    ExpectRefused(engine);
    return;
  }
  constexpr uint32_t kRows = 3, kVariants = 8, kRounds = 125;
  std::vector<Request> requests;
  for (uint32_t i = 0; i < kRows; ++i) requests.push_back(Prompt(i));
  std::vector<OpenSequence> sequences;
  for (const Request& request : requests) sequences.push_back(engine.Open(request));
  ASSERT_FALSE(HasFailure());
  const std::shared_ptr<const client::Arena> arena = engine.session().arena();

  std::vector<DeviceMemory> memory;
  const auto on_device = [&](const auto& values) {
    using T = typename std::decay_t<decltype(values)>::value_type;
    auto made = kernels::cuda::MakeDeviceMemory(values.size() * sizeof(T));
    EXPECT_TRUE(made.ok()) << made.status();
    memory.push_back(*std::move(made));
    EXPECT_EQ(cudaMemcpy(memory.back().get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    // From pageable memory the call may return before the bytes are there, and other streams do not wait for it.
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    return static_cast<T*>(memory.back().get());
  };
  std::vector<replay::DevicePart> parts(kLayers * replay::kDeviceParts);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto view = arena->HotPart(layer, client::RowPart::kRow);
    ASSERT_TRUE(view.ok()) << view.status();
    ASSERT_EQ(view->page_rows(), 1u);
    parts[layer * replay::kDeviceParts] = {reinterpret_cast<char*>(view->data()), view->page_stride_bytes(),
                                           view->row_stride_bytes(), 0, kRowBytes / 4};
  }
  // The mailbox of one group at a time: entries are published, and rows compared, group by group.
  std::vector<replay::DeviceGroup> groups(kGroups);
  for (uint32_t g = 0; g < kGroups; ++g) {
    const auto indices = arena->Indices(g);
    const auto hot_rows = arena->HotRows(g);
    ASSERT_TRUE(indices.ok() && hot_rows.ok());
    groups[g] = {(*indices)[0].data(),
                 (*hot_rows)[0].data(),
                 indices->row_stride_bytes() / 4,
                 hot_rows->row_stride_bytes() / 4,
                 2 * g,
                 2 * g + 2};
  }
  std::vector<replay::DeviceRow> rows(kRows);
  std::vector<uint64_t> ids;
  std::vector<int32_t> state_rows, lengths;
  for (uint32_t i = 0; i < kRows; ++i) {
    rows[i].tokens = requests[i].tokens();
    rows[i].region = {static_cast<int64_t>(arena->RegionBegin(sequences[i].state_row)), kHotRows,
                      static_cast<uint32_t>(arena->newest_row())};
    rows[i].length = kPrompt;
    ids.push_back(sequences[i].id);
    state_rows.push_back(static_cast<int32_t>(sequences[i].state_row));
    lengths.push_back(static_cast<int32_t>(kPrompt));
  }
  std::mt19937_64 random(2);
  std::vector<int32_t> positions(size_t{kVariants} * kGroups * kRows * kTopK);
  for (int32_t& position : positions) position = static_cast<int32_t>(random() % kPrompt);
  const auto* const device_parts = on_device(parts);
  const auto* const device_groups = on_device(groups);
  const auto* const device_rows = on_device(rows);
  const auto* const device_positions = on_device(positions);
  auto* const totals = on_device(std::vector<replay::CheckTotals>(1));
  client::DeviceBatch batch;
  batch.rows = on_device(std::vector<int32_t>{static_cast<int32_t>(kRows)});
  batch.sequence_ids = on_device(ids);
  batch.state_rows = on_device(state_rows);
  batch.lengths = on_device(lengths);
  // The newest rows, which entries may name.
  auto made = kernels::cuda::MakeStream();
  ASSERT_TRUE(made.ok()) << made.status();
  const StreamHandle stream = *std::move(made);
  ASSERT_EQ(replay::LaunchNewest(device_parts, kLayers, device_rows, kRows, 128, stream.get()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);

  auto armed = DevicePlane::Arm(engine.session(), kTopK);
  ASSERT_TRUE(armed.ok()) << armed.status();
  const std::unique_ptr<DevicePlane> plane = *std::move(armed);
  std::vector<GraphExecHandle> graphs;
  for (uint32_t variant = 0; variant < kVariants; ++variant) {
    ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    absl::Status status = plane->PublishBatch(batch, stream.get());
    for (uint32_t g = 0; g < kGroups; ++g) {
      replay::DeviceEntries entries;
      entries.groups = device_groups + g;
      entries.positions = entries.names = device_positions + (variant * kGroups + g) * size_t{kRows} * kTopK;
      entries.group_count = 1;
      entries.rows = entries.max_rows = kRows;
      entries.top_k = kTopK;
      if (g == 0) {
        EXPECT_EQ(replay::LaunchEntries(entries, 128, stream.get()), cudaSuccess);
        status.Update(plane->Ring(g, stream.get()));
      } else {
        status.Update(plane->PublishEntries(g, entries.names, kTopK, stream.get()));
      }
      status.Update(plane->Await(g, stream.get()));
      EXPECT_EQ(replay::LaunchCheck(device_parts, entries, device_rows, totals, 128, stream.get()), cudaSuccess);
    }
    status.Update(plane->PublishCommits(nullptr, stream.get()));
    status.Update(plane->RingCommit(stream.get()));
    status.Update(plane->AwaitCommit(stream.get()));
    cudaGraph_t captured = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream.get(), &captured), cudaSuccess);
    const GraphHandle graph(captured);
    ASSERT_TRUE(status.ok()) << status;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&exec, captured, 0), cudaSuccess);
    graphs.emplace_back(exec);
  }
  for (uint32_t step = 0; step < kRounds * kVariants; ++step) {
    ASSERT_EQ(cudaGraphLaunch(graphs[step % kVariants].get(), stream.get()), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  const absl::Status status = plane->status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(plane->finished_step(), plane->first_step() + kRounds * kVariants - 1);
  replay::CheckTotals found;
  ASSERT_EQ(cudaMemcpy(&found, totals, sizeof found, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(found.wrong, 0u) << "first " << found.first;
  EXPECT_EQ(found.checked, uint64_t{kRounds} * kVariants * kRows * kTopK * kLayers);
  const auto steps = plane->Disarm();
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(*steps, uint64_t{kRounds} * kVariants);
}

TEST_F(PlaneProcessGpuTest, AnEngineThatIsKilledIsGoneAndOthersGoOn) {
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  {
    GpuEngine engine(client(), pool_, "engine");
    std::mt19937_64 random(3);
    const Request request = Prompt(0);
    const OpenSequence sequence = engine.Open(request);
    std::unique_ptr<replay::StepPlane> plane;
    if (mps()) {
      plane = Arm(engine);
      ASSERT_NE(plane, nullptr);
    }
    uint32_t length = kPrompt + 1;
    const auto step = [&] {
      const std::vector<replay::BatchRow> batch = {{&sequence, length++}};
      if (plane != nullptr) {
        engine.Step(*plane, batch, random);
      } else {
        engine.StepByCall(batch, random);
      }
    };
    for (int round = 0; round < 3 && !HasFailure(); ++round) {
      ChildProcess other({ReplayPath(),
                          "--server",
                          daemon().address(),
                          "--device",
                          "cuda",
                          "--transfer",
                          "shared",
                          "--plane",
                          mps() ? "server" : "rpc",
                          "--pool",
                          "other",
                          "--pool-blocks",
                          "2000",
                          "--requests",
                          "4000",
                          "--output-length",
                          "500",
                          "--layers",
                          "8",
                          "--groups",
                          "4",
                          "--row-bytes",
                          "656",
                          "--top-k",
                          "256",
                          "--hot-rows",
                          "512",
                          "--concurrency",
                          "4",
                          "--progress",
                          "none"},
                         daemon().folder().File(absl::StrCat("replay", round)));
      const auto steps_of_other = [&] {
        uint64_t steps = 0;
        const auto sessions = client().ListSessions();
        if (!sessions.ok()) return steps;
        for (const v1::SessionInfo& info : sessions->sessions()) {
          if (info.pool() == "other") steps = std::max<uint64_t>(steps, info.steps());
        }
        return steps;
      };
      ASSERT_TRUE(Eventually(absl::Seconds(60), [&] { return steps_of_other() >= 50 || !other.running(); }))
          << other.Output();
      ASSERT_TRUE(other.running()) << other.Output();
      for (int i = 0; i < 20 && !HasFailure(); ++i) step();
      other.Kill();
      const absl::Time begin = absl::Now();
      EXPECT_TRUE(Eventually(absl::Seconds(3), [&] { return SessionCount() == 1; }));
      EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
      for (int i = 0; i < 20 && !HasFailure(); ++i) step();
    }
    if (mps()) {
      EXPECT_EQ(client().GetStatus()->armed_sessions(), 1u);
    }
  }
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 0; }));
  EXPECT_EQ(client().GetStatus()->hot_bytes(), hot_bytes);
}

// Sessions whose doorbells are never rung, and others that come, are armed and go, cost the one that steps nothing.
TEST_F(PlaneProcessGpuTest, IdleSessionsCostTheOthersNothing) {
  GpuEngine engine(client(), pool_, "engine");
  if (!mps()) {
    ExpectRefused(engine);
    return;
  }
  std::mt19937_64 random(5);
  const Request request = Prompt(0);
  const OpenSequence sequence = engine.Open(request);
  const auto plane = Arm(engine);
  ASSERT_NE(plane, nullptr);
  uint32_t length = kPrompt + 1;
  const auto step = [&] {
    const absl::Time begin = absl::Now();
    engine.Step(*plane, std::vector<replay::BatchRow>{{&sequence, length++}}, random);
    return absl::Now() - begin;
  };
  const auto median_of = [&](int steps) {
    std::vector<absl::Duration> times;
    for (int i = 0; i < steps && !HasFailure(); ++i) times.push_back(step());
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times.empty() ? absl::ZeroDuration() : times[times.size() / 2];
  };
  median_of(50);
  const absl::Duration alone = median_of(200);
  constexpr int kLimit = 8;  // the default of max_armed_sessions
  std::vector<std::unique_ptr<GpuEngine>> idle_engines;
  std::vector<std::unique_ptr<DevicePlane>> idle;
  while (static_cast<int>(idle.size()) + 1 < kLimit) {
    idle_engines.push_back(std::make_unique<GpuEngine>(client(), pool_, absl::StrCat("idle", idle.size())));
    auto armed = DevicePlane::Arm(idle_engines.back()->session(), kTopK);
    ASSERT_TRUE(armed.ok()) << armed.status();
    idle.push_back(*std::move(armed));
  }
  const absl::Duration beside_idle = median_of(200);
  {
    GpuEngine one_more(client(), pool_, "one_more");
    const absl::Status refused = DevicePlane::Arm(one_more.session(), kTopK).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat("limit max_armed_sessions ", kLimit)));
  }
  // One of the idle ones makes room for sessions that come, are armed, and go, some of them killed by an eviction.
  idle.pop_back();
  idle_engines.pop_back();
  std::atomic<bool> stop = false;
  std::atomic<int> came = 0;
  std::thread others([&] {
    while (!stop) {
      GpuEngine other(client(), pool_, "other");
      auto armed = DevicePlane::Arm(other.session(), kTopK);
      EXPECT_TRUE(armed.ok()) << armed.status();
      if (came % 2 == 1) {
        v1::EvictSessionRequest evict;
        evict.set_session_id(other.session().info().session_id());
        EXPECT_TRUE(client().EvictSession(evict).ok());
      }
      ++came;
    }
  });
  const absl::Duration beside_others = median_of(500);
  stop = true;
  others.join();
  EXPECT_GE(came, 2);
  GTEST_LOG_(INFO) << "median step: alone " << alone << ", beside " << idle.size() + 1 << " idle sessions "
                   << beside_idle << ", beside " << came << " that came and went " << beside_others;
  EXPECT_LT(beside_idle, 1.3 * alone);
  // They attach and arm on this process's threads and cores, too.
  EXPECT_LT(beside_others, 2.0 * alone);
}

// What ends a daemon while an engine waits for it.
class DaemonEndsGpuTest : public PlaneProcessGpuTest, public testing::WithParamInterface<int> {
 protected:
  void TearDown() override {
    if (!killed_) PlaneProcessGpuTest::TearDown();
  }
  bool killed_ = false;
};
INSTANTIATE_TEST_SUITE_P(Signals, DaemonEndsGpuTest, testing::Values(SIGTERM, SIGKILL),
                         [](const auto& signal) { return signal.param == SIGTERM ? "Stopped" : "Killed"; });

TEST_P(DaemonEndsGpuTest, AWaitEnds) {
  const Request request = Prompt(0);
  const bool with_mps = mps();
  std::mt19937_64 random(4);
  {
    GpuEngine engine(client(), pool_, "engine");
    const OpenSequence sequence = engine.Open(request);
    if (!with_mps) {
      ExpectRefused(engine);
      return;
    }
    auto armed = DevicePlane::Arm(engine.session(), kTopK);
    ASSERT_TRUE(armed.ok()) << armed.status();
    const std::unique_ptr<DevicePlane> plane = *std::move(armed);
    auto stream = kernels::cuda::MakeStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    auto pinned = kernels::cuda::MakePinnedMemory(64);
    ASSERT_TRUE(pinned.ok()) << pinned.status();
    auto* const words = static_cast<uint64_t*>(pinned->get());
    auto* const numbers = reinterpret_cast<int32_t*>(words + 1);
    words[0] = sequence.id;
    numbers[0] = 1;
    numbers[1] = static_cast<int32_t>(sequence.state_row);
    numbers[2] = static_cast<int32_t>(kPrompt);
    // An answer that nobody has asked for does not come.
    absl::Status status = plane->PublishBatch({numbers, words, numbers + 1, numbers + 2}, stream->get());
    status.Update(plane->Await(0, stream->get()));
    // And what is enqueued behind it runs through.
    for (uint32_t group = 0; group < kGroups; ++group) {
      status.Update(plane->Ring(group, stream->get()));
      status.Update(plane->Await(group, stream->get()));
    }
    status.Update(plane->RingCommit(stream->get()));
    status.Update(plane->AwaitCommit(stream->get()));
    ASSERT_TRUE(status.ok()) << status;
    absl::SleepFor(absl::Milliseconds(300));
    EXPECT_EQ(cudaStreamQuery(stream->get()), cudaErrorNotReady);
    EXPECT_TRUE(plane->status().ok()) << plane->status();
    killed_ = GetParam() == SIGKILL;
    daemon().process().Signal(GetParam());
    const absl::Time begin = absl::Now();
    const cudaError_t waited = cudaStreamSynchronize(stream->get());
    EXPECT_LT(absl::Now() - begin, GetParam() == SIGKILL ? absl::Seconds(1) : absl::Seconds(10));
    EXPECT_TRUE(Eventually(absl::Seconds(1), [&] { return !plane->status().ok(); }));
    status = plane->status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(plane->finished_step(), 0u);
    if (GetParam() == SIGKILL) {
      // MPS: a process that is killed inside a kernel, and an armed session always has one that waits, may take its
      // neighbours' contexts along (deploy/README.md): then nothing of CUDA's can be used in this process any more.
      GTEST_LOG_(INFO) << "the engine's stream: " << cudaGetErrorString(waited);
      return;
    }
    EXPECT_EQ(waited, cudaSuccess);
  }
  // The GPU is as before for this process, and for a daemon that comes.
  EXPECT_EQ(daemon().process().Wait(absl::Seconds(10)), 0);
  daemon().Restart();
  ASSERT_TRUE(Eventually(absl::Seconds(30), [&] { return client().GetStatus().ok(); }));
  pool_ = CreatePool(pool_);
  GpuEngine engine(client(), pool_, "engine");
  const OpenSequence sequence = engine.Open(request);
  const auto plane = Arm(engine);
  ASSERT_NE(plane, nullptr);
  for (uint32_t length = kPrompt + 1; length < kPrompt + 50 && !HasFailure(); ++length) {
    engine.Step(*plane, std::vector<replay::BatchRow>{{&sequence, length}}, random);
  }
}

TEST_F(PlaneProcessGpuTest, EndsBeforeItsFirstStep) {
  GpuEngine engine(client(), pool_, "engine");
  if (!mps()) {
    ExpectRefused(engine);
    return;
  }
  for (int round = 0; round < 3; ++round) {
    auto plane = DevicePlane::Arm(engine.session(), kTopK);
    ASSERT_TRUE(plane.ok()) << plane.status();
    const absl::Time begin = absl::Now();
    const auto steps = (*plane)->Disarm();
    ASSERT_TRUE(steps.ok()) << steps.status();
    EXPECT_EQ(*steps, 0u);
    EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
  }
}

TEST_F(PlaneProcessGpuTest, AWaitEndsAtItsLimitAndWithItsSession) {
  GpuEngine engine(client(), pool_, "engine");
  if (!mps()) {
    ExpectRefused(engine);
    return;
  }
  auto stream = kernels::cuda::MakeStream();
  ASSERT_TRUE(stream.ok()) << stream.status();
  {
    client::DevicePlaneOptions options;
    options.wait_limit = absl::Milliseconds(200);
    auto plane = DevicePlane::Arm(engine.session(), kTopK, options);
    ASSERT_TRUE(plane.ok()) << plane.status();
    const absl::Time begin = absl::Now();
    // The number of the step is that of no step yet, so the answer to it is there.
    ASSERT_TRUE((*plane)->Await(1, stream->get()).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream->get()), cudaSuccess);
    EXPECT_TRUE((*plane)->status().ok()) << (*plane)->status();
    auto pinned = kernels::cuda::MakePinnedMemory(64);
    ASSERT_TRUE(pinned.ok()) << pinned.status();
    auto* const words = static_cast<uint64_t*>(pinned->get());
    std::fill_n(words, 8, 0);  // a batch without rows
    auto* const numbers = reinterpret_cast<int32_t*>(words);
    ASSERT_TRUE((*plane)->PublishBatch({numbers, words, numbers, numbers}, stream->get()).ok());
    ASSERT_TRUE((*plane)->Await(0, stream->get()).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream->get()), cudaSuccess);
    EXPECT_GE(absl::Now() - begin, absl::Milliseconds(190));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_EQ((*plane)->status().code(), absl::StatusCode::kDeadlineExceeded) << (*plane)->status();
  }
  auto plane = DevicePlane::Arm(engine.session(), kTopK);
  ASSERT_TRUE(plane.ok()) << plane.status();
  EXPECT_TRUE((*plane)->status().ok()) << (*plane)->status();
  v1::EvictSessionRequest evict;
  evict.set_session_id(engine.session().info().session_id());
  ASSERT_TRUE(client().EvictSession(evict).ok());
  EXPECT_TRUE(Eventually(absl::Seconds(2), [&] { return !(*plane)->status().ok(); }));
}

}  // namespace
}  // namespace stoker::system_test
