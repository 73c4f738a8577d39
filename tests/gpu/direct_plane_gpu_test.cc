// The direct plane of a GPU between two processes: this one is the engine, and runs the steps on a stream of its own;
// the daemon, another one, owns the memory. No MPS is needed.
//
// Rows are compared on the GPU, by the kernels of stoker-replay, with what their layer and token say they hold. Steps
// commit their newest rows, and entries reach back over them: what was stored wrongly comes back wrong.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/direct_plane.h"
#include "kernels/cuda/handles.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using client::DirectPlane;
using client::PlaneMail;
using kernels::cuda::GraphExecHandle;
using kernels::cuda::GraphHandle;
using kernels::cuda::StreamHandle;
using replay::OpenSequence;
using replay::Request;

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0 &&
         setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0) == 0;
}();

class DirectEngine : public GpuEngine {
 public:
  DirectEngine(const client::Client& client, const v1::PoolSpec& pool, const std::string& name,
               v1::ArenaSharing sharing = v1::ARENA_SHARING_UNSPECIFIED)
      : GpuEngine(client, pool, name, v1::PLANE_DIRECT, sharing) {
    auto stream = kernels::cuda::MakeStream();
    auto mail = session().arena()->Mail();
    EXPECT_TRUE(stream.ok()) << stream.status();
    EXPECT_TRUE(mail.ok()) << mail.status();
    if (!stream.ok() || !mail.ok()) return;
    stream_ = *std::move(stream);
    mail_ = *mail;
    auto plane = DirectPlane::Open(session(), kTopK, {.stream = stream_.get()});
    EXPECT_TRUE(plane.ok()) << plane.status();
    if (plane.ok()) plane_ = *std::move(plane);
  }

  DirectPlane* plane() { return plane_.get(); }
  cudaStream_t stream() { return stream_.get(); }

  // Writes newest rows, entries and batch for a step of these rows, all of which commit.
  void PublishStep(absl::Span<const replay::BatchRow> batch, std::mt19937_64& random) {
    Publish(batch, random);
    std::vector<uint64_t> ids;
    std::vector<int32_t> state_rows, lengths;
    for (const replay::BatchRow& row : batch) {
      ids.push_back(row.sequence->id);
      state_rows.push_back(static_cast<int32_t>(row.sequence->state_row));
      lengths.push_back(static_cast<int32_t>(row.length));
    }
    const auto count = static_cast<int32_t>(batch.size());
    const std::vector<int32_t> commits(batch.size(), 1);
    Put(mail_.batch_rows, &count, 1);
    Put(mail_.sequence_ids.data(), ids.data(), ids.size());
    Put(mail_.state_rows.data(), state_rows.data(), state_rows.size());
    Put(mail_.lengths.data(), lengths.data(), lengths.size());
    Put(mail_.commits.data(), commits.data(), commits.size());
  }

  // All of a step, enqueued: by itself, or while the stream is captured.
  absl::Status Enqueue() {
    absl::Status status = plane_->EnqueueBegin();
    for (uint32_t group = 0; group < kGroups; ++group) status.Update(plane_->EnqueueGroup(group));
    status.Update(plane_->EnqueueCommit());
    return status;
  }

  // Waits for the step, and looks at every row that it handed out.
  void CheckStep(absl::Span<const replay::BatchRow> batch) {
    ASSERT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
    std::vector<int32_t> statuses(batch.size(), -1);
    ASSERT_EQ(cudaMemcpy(statuses.data(), mail_.statuses.data(), statuses.size() * 4, cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (const int32_t status : statuses) ASSERT_EQ(status, v1::BATCH_ROW_STATUS_UNSPECIFIED);
    Check(batch);
  }

  void ClosePlane() { plane_.reset(); }

 private:
  template <typename T>
  void Put(T* target, const T* source, size_t count) {
    ASSERT_EQ(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyHostToDevice, stream_.get()), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  }

  StreamHandle stream_;
  PlaneMail mail_;
  std::unique_ptr<DirectPlane> plane_;
};

class DirectPlaneGpuTest : public DaemonTest {
 protected:
  DirectPlaneGpuTest() { pool_ = CreatePool(LinearPool("p", kLayers, kRowBytes, 1200)); }

  uint32_t StoredRows(uint64_t id) {
    for (const v1::SequenceInfo& info : Sequences("p")) {
      if (info.sequence_id() == id) return info.stored_rows();
    }
    return 0;
  }

  v1::PoolSpec pool_;
};

class ArenaKindsGpuTest : public DirectPlaneGpuTest, public testing::WithParamInterface<v1::ArenaSharing> {};
INSTANTIATE_TEST_SUITE_P(Arenas, ArenaKindsGpuTest,
                         testing::Values(v1::ARENA_SHARING_IPC_HANDLE, v1::ARENA_SHARING_DESCRIPTOR),
                         [](const auto& sharing) {
                           return sharing.param == v1::ARENA_SHARING_DESCRIPTOR ? "Descriptor" : "IpcHandle";
                         });

TEST_P(ArenaKindsGpuTest, DecodesAThousandSteps) {
  DirectEngine engine(client(), pool_, "engine", GetParam());
  ASSERT_NE(engine.plane(), nullptr);
  EXPECT_EQ(engine.session().info().arena().cuda_ipc_handle().empty(), GetParam() == v1::ARENA_SHARING_DESCRIPTOR);
  std::mt19937_64 random(1);
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 12; ++i) requests.push_back(Prompt(i));
  const OpenSequence lasting = engine.Open(requests[0]);
  OpenSequence passing = engine.Open(requests[1]);
  uint32_t length = kPrompt + 1, passing_length = kPrompt + 1;
  uint64_t entries = 0;
  for (uint32_t step = 0; step < 1000 && !HasFailure(); ++step, ++length) {
    // Sequences join and leave between steps, and batches differ in size.
    if (step % 100 == 99) {
      engine.Close(passing);
      passing = engine.Open(requests[2 + step / 100 % 10]);
      passing_length = kPrompt + 1;
    }
    std::vector<replay::BatchRow> batch = {{&lasting, length}};
    if (step % 3 != 2) batch.push_back({&passing, passing_length++});
    entries += batch.size();
    engine.PublishStep(batch, random);
    ASSERT_FALSE(HasFatalFailure());
    const absl::Status status = engine.Enqueue();
    ASSERT_TRUE(status.ok()) << status;
    engine.CheckStep(batch);
  }
  EXPECT_EQ(StoredRows(lasting.id), kPrompt + 1000);
  // What the steps counted reaches the daemon, which has done nothing for them.
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
    return Scrape(daemon().metrics_port())["stoker_committed_bytes_total{pool=\"p\"}"] ==
           static_cast<double>(entries * kLayers * kRowBytes);
  }));
  EXPECT_GE(Scrape(daemon().metrics_port())["stoker_step_duration_seconds_count{plane=\"direct\"}"], 1);
}

// A step captured once, launched again and again with another batch.
TEST_F(DirectPlaneGpuTest, ACapturedStep) {
  DirectEngine engine(client(), pool_, "engine");
  ASSERT_NE(engine.plane(), nullptr);
  std::mt19937_64 random(2);
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 3; ++i) requests.push_back(Prompt(i));
  std::vector<OpenSequence> sequences;
  for (const Request& request : requests) sequences.push_back(engine.Open(request));
  ASSERT_FALSE(HasFailure());
  ASSERT_EQ(cudaStreamBeginCapture(engine.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const absl::Status captured = engine.Enqueue();
  cudaGraph_t made = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(engine.stream(), &made), cudaSuccess);
  const GraphHandle graph(made);
  ASSERT_TRUE(captured.ok()) << captured;
  cudaGraphExec_t instantiated = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&instantiated, graph.get(), 0), cudaSuccess);
  const GraphExecHandle exec(instantiated);
  for (uint32_t length = kPrompt + 1; length <= kPrompt + 300 && !HasFailure(); ++length) {
    std::vector<replay::BatchRow> batch;
    for (size_t i = 0; i < 1 + length % 3; ++i) batch.push_back({&sequences[i], 0});
    // Each of them as long as it was used.
    for (replay::BatchRow& row : batch) row.length = StoredRows(row.sequence->id) + 1;
    engine.PublishStep(batch, random);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(engine.plane()->status(), absl::OkStatus());
    ASSERT_EQ(cudaGraphLaunch(exec.get(), engine.stream()), cudaSuccess);
    engine.CheckStep(batch);
  }
  EXPECT_EQ(StoredRows(sequences[0].id), kPrompt + 300);
}

TEST_F(DirectPlaneGpuTest, AnEvictedSessionStepsNoMore) {
  DirectEngine engine(client(), pool_, "engine");
  ASSERT_NE(engine.plane(), nullptr);
  std::mt19937_64 random(3);
  const Request request = Prompt(0);
  const OpenSequence sequence = engine.Open(request);
  const std::vector<replay::BatchRow> batch = {{&sequence, kPrompt + 1}};
  engine.PublishStep(batch, random);
  ASSERT_EQ(engine.Enqueue(), absl::OkStatus());
  engine.CheckStep(batch);
  EXPECT_EQ(engine.plane()->Begin({}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.plane()->EnqueueGroup(kGroups).code(), absl::StatusCode::kOutOfRange);
  v1::EvictSessionRequest evict;
  evict.set_session_id(engine.session().info().session_id());
  ASSERT_TRUE(client().EvictSession(evict).ok());
  ASSERT_TRUE(Eventually(absl::Seconds(10), [&] { return !engine.session().status().ok(); }));
  EXPECT_EQ(engine.plane()->EnqueueBegin(), engine.session().status());
  EXPECT_EQ(engine.plane()->EnqueueCommit(), engine.session().status());
  engine.ClosePlane();
}

}  // namespace
}  // namespace stoker::system_test
