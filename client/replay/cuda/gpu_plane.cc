#include "client/replay/cuda/gpu_plane.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/device_plane.h"
#include "kernels/cuda/handles.h"

namespace stoker::replay {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::GraphExecHandle;
using kernels::cuda::GraphHandle;
using kernels::cuda::MakePinnedMemory;
using kernels::cuda::PinnedMemory;
using kernels::cuda::StreamHandle;
using kernels::cuda::ToStatus;

// An array in pinned memory.
template <typename T>
class Pinned {
 public:
  absl::Status Make(size_t count) {
    auto memory = MakePinnedMemory(count * sizeof(T));
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    std::fill_n(data(), count, T());
    return absl::OkStatus();
  }
  T* data() const { return static_cast<T*>(memory_.get()); }
  T& operator[](size_t i) const { return data()[i]; }

 private:
  PinnedMemory memory_;
};

class CudaGpuPlane final : public GpuPlane {
 public:
  explicit CudaGpuPlane(int ordinal) : ordinal_(ordinal) {}
  ~CudaGpuPlane() override;
  absl::Status Init(client::Session& session, uint32_t top_k);

  absl::Status RunGroups(absl::Span<const client::PlaneRow> rows) override;
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const override {
    return {hot_rows_.data() + (group * max_rows_ + row) * plane_->top_k(), plane_->top_k()};
  }
  int32_t Misses(uint32_t group, size_t row) const override { return misses_[group * max_rows_ + row]; }
  absl::Status Commit(absl::Span<const int32_t> commits) override;

 private:
  absl::Status Capture(const std::function<absl::Status()>& enqueue, GraphExecHandle* exec);
  absl::Status EnqueueGroups();
  absl::Status EnqueueCommit();
  absl::Status Run(const GraphExecHandle& exec);

  const int ordinal_;
  std::unique_ptr<client::DevicePlane> plane_;
  StreamHandle stream_;
  size_t max_rows_ = 0;
  Pinned<int32_t> row_count_;
  Pinned<uint64_t> sequence_ids_;
  // As the next three, [max_rows_].
  Pinned<int32_t> state_rows_;
  Pinned<int32_t> lengths_;
  Pinned<int32_t> commits_;
  Pinned<int32_t> statuses_;
  Pinned<int32_t> hot_rows_;  // [group][max_rows_][top_k]
  Pinned<int32_t> misses_;    // [group][max_rows_]
  std::vector<client::PlaneRow> rows_;
  GraphExecHandle groups_;
  GraphExecHandle commit_;
};

CudaGpuPlane::~CudaGpuPlane() {
  const CurrentDevice current(ordinal_);
  if (plane_ != nullptr && stream_.get() != nullptr) {
    // A step that was given up may still wait.
    plane_->Abort();
    kernels::cuda::ReportLoss(cudaStreamSynchronize(stream_.get()), "the last step");
  }
  groups_ = {};
  commit_ = {};
  plane_.reset();
  stream_ = {};
}

absl::Status CudaGpuPlane::Init(client::Session& session, uint32_t top_k) {
  const CurrentDevice current(ordinal_);
  // Before the session is armed: then the daemon's stream waits.
  auto stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  auto plane = client::DevicePlane::Arm(session, top_k);
  if (!plane.ok()) return plane.status();
  plane_ = *std::move(plane);
  auto mail = plane_->arena().Mail();
  if (!mail.ok()) return mail.status();
  max_rows_ = mail->lengths.size();
  const size_t groups = plane_->groups();
  for (absl::Status status : {row_count_.Make(1), sequence_ids_.Make(max_rows_), state_rows_.Make(max_rows_),
                              lengths_.Make(max_rows_), commits_.Make(max_rows_), statuses_.Make(max_rows_),
                              hot_rows_.Make(groups * max_rows_ * top_k), misses_.Make(groups * max_rows_)}) {
    if (!status.ok()) return status;
  }
  if (absl::Status status = Capture([this] { return EnqueueGroups(); }, &groups_); !status.ok()) return status;
  return Capture([this] { return EnqueueCommit(); }, &commit_);
}

absl::Status CudaGpuPlane::Capture(const std::function<absl::Status()>& enqueue, GraphExecHandle* exec) {
  // Of this thread alone: others go on with calls that a capture does not allow.
  cudaError_t error = cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal);
  if (error != cudaSuccess) return ToStatus(error, "a step cannot be captured");
  const absl::Status status = enqueue();
  cudaGraph_t captured = nullptr;
  error = cudaStreamEndCapture(stream_.get(), &captured);
  const GraphHandle graph(captured);
  if (error != cudaSuccess) cudaGetLastError();
  if (!status.ok()) return status;
  if (error != cudaSuccess) return ToStatus(error, "a step cannot be captured");
  cudaGraphExec_t instantiated = nullptr;
  error = cudaGraphInstantiate(&instantiated, captured, 0);
  if (error != cudaSuccess) return ToStatus(error, "the graph of a step cannot be made");
  *exec = GraphExecHandle(instantiated);
  return ToStatus(cudaGraphUpload(instantiated, stream_.get()), "the graph of a step cannot be made");
}

absl::Status CudaGpuPlane::EnqueueGroups() {
  client::DeviceBatch batch;
  batch.rows = row_count_.data();
  batch.sequence_ids = sequence_ids_.data();
  batch.state_rows = state_rows_.data();
  batch.lengths = lengths_.data();
  if (absl::Status status = plane_->PublishBatch(batch, stream_.get()); !status.ok()) return status;
  const size_t row_bytes = plane_->top_k() * sizeof(int32_t);
  for (uint32_t group = 0; group < plane_->groups(); ++group) {
    if (absl::Status status = plane_->Ring(group, stream_.get()); !status.ok()) return status;
    if (absl::Status status = plane_->Await(group, stream_.get()); !status.ok()) return status;
    auto hot_rows = plane_->arena().HotRows(group);
    if (!hot_rows.ok()) return hot_rows.status();
    auto misses = plane_->arena().Misses(group);
    if (!misses.ok()) return misses.status();
    cudaError_t error =
        cudaMemcpy2DAsync(hot_rows_.data() + group * max_rows_ * plane_->top_k(), row_bytes, (*hot_rows)[0].data(),
                          hot_rows->row_stride_bytes(), row_bytes, max_rows_, cudaMemcpyDeviceToHost, stream_.get());
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(misses_.data() + group * max_rows_, misses->data(), max_rows_ * sizeof(int32_t),
                              cudaMemcpyDeviceToHost, stream_.get());
    }
    if (error != cudaSuccess) return ToStatus(error, "the hot rows of a step");
  }
  return plane_->CopyStatuses(statuses_.data(), stream_.get());
}

absl::Status CudaGpuPlane::EnqueueCommit() {
  if (absl::Status status = plane_->PublishCommits(commits_.data(), stream_.get()); !status.ok()) return status;
  if (absl::Status status = plane_->RingCommit(stream_.get()); !status.ok()) return status;
  if (absl::Status status = plane_->AwaitCommit(stream_.get()); !status.ok()) return status;
  return plane_->CopyStatuses(statuses_.data(), stream_.get());
}

absl::Status CudaGpuPlane::Run(const GraphExecHandle& exec) {
  if (absl::Status status = plane_->status(); !status.ok()) return status;
  const CurrentDevice current(ordinal_);
  cudaError_t error = cudaGraphLaunch(exec.get(), stream_.get());
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_.get());
  if (error != cudaSuccess) return ToStatus(error, "a step");
  if (absl::Status status = plane_->status(); !status.ok()) return status;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto status = static_cast<v1::BatchRowStatus>(statuses_[i]);
    if (status != v1::BATCH_ROW_STATUS_UNSPECIFIED) return client::FromBatchRow(status, i, rows_[i]);
  }
  return absl::OkStatus();
}

absl::Status CudaGpuPlane::RunGroups(absl::Span<const client::PlaneRow> rows) {
  if (rows.size() > max_rows_) {
    return absl::InvalidArgumentError(absl::StrCat("rows are ", rows.size(), ", above max_batch_rows, ", max_rows_));
  }
  rows_.assign(rows.begin(), rows.end());
  row_count_[0] = static_cast<int32_t>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    sequence_ids_[i] = rows[i].sequence_id;
    state_rows_[i] = static_cast<int32_t>(rows[i].state_row);
    lengths_[i] = static_cast<int32_t>(rows[i].length);
  }
  return Run(groups_);
}

absl::Status CudaGpuPlane::Commit(absl::Span<const int32_t> commits) {
  if (commits.size() != rows_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("commits are ", commits.size(), "; the step has ", rows_.size(), " rows"));
  }
  std::copy(commits.begin(), commits.end(), commits_.data());
  return Run(commit_);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuPlane>> MakeGpuPlane(client::Session& session, uint32_t top_k) {
  const std::shared_ptr<const client::Arena> arena = session.arena();
  if (!arena->status().ok()) return arena->status();
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, arena->bytes().data()); error != cudaSuccess) {
    return ToStatus(error, "the arena's GPU cannot be had");
  }
  auto plane = std::make_unique<CudaGpuPlane>(attributes.device);
  if (absl::Status status = plane->Init(session, top_k); !status.ok()) return status;
  return plane;
}

}  // namespace stoker::replay
