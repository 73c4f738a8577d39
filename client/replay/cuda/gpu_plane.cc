#include "client/replay/cuda/gpu_plane.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/device_plane.h"
#include "client/direct_plane.h"
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

// What a plane enqueues for a step, on the stream with which it was made. Arrays are in pinned memory, and read when
// the work runs.
class EnqueuedPlane {
 public:
  virtual ~EnqueuedPlane() = default;

  // Brings the batch to the arena and begins a step with it.
  virtual absl::Status Begin(const client::DeviceBatch& batch) = 0;
  // What follows on the stream finds the group's hot rows. Its entries are in the mailbox.
  virtual absl::Status Group(uint32_t group) = 0;
  // Ends the step. `commits` has a flag for each batch row.
  virtual absl::Status Commit(const int32_t* commits) = 0;
  // Copies the statuses of all batch rows to pinned memory.
  virtual absl::Status CopyStatuses(int32_t* target) = 0;
  // Lets work that waits for the daemon run through.
  virtual void Abort() = 0;
  virtual absl::Status status() = 0;
  virtual const client::Arena& arena() const = 0;
};

class ServerSteps final : public EnqueuedPlane {
 public:
  ServerSteps(std::unique_ptr<client::DevicePlane> plane, cudaStream_t stream)
      : plane_(std::move(plane)), stream_(stream) {}

  absl::Status Begin(const client::DeviceBatch& batch) override { return plane_->PublishBatch(batch, stream_); }
  absl::Status Group(uint32_t group) override {
    if (absl::Status status = plane_->Ring(group, stream_); !status.ok()) return status;
    return plane_->Await(group, stream_);
  }
  absl::Status Commit(const int32_t* commits) override {
    if (absl::Status status = plane_->PublishCommits(commits, stream_); !status.ok()) return status;
    if (absl::Status status = plane_->RingCommit(stream_); !status.ok()) return status;
    return plane_->AwaitCommit(stream_);
  }
  absl::Status CopyStatuses(int32_t* target) override { return plane_->CopyStatuses(target, stream_); }
  void Abort() override { plane_->Abort(); }
  absl::Status status() override { return plane_->status(); }
  const client::Arena& arena() const override { return plane_->arena(); }

 private:
  const std::unique_ptr<client::DevicePlane> plane_;
  const cudaStream_t stream_;
};

class DirectSteps final : public EnqueuedPlane {
 public:
  DirectSteps(std::unique_ptr<client::DirectPlane> plane, client::PlaneMail mail, cudaStream_t stream)
      : plane_(std::move(plane)), mail_(std::move(mail)), stream_(stream) {}

  absl::Status Begin(const client::DeviceBatch& batch) override {
    const size_t rows = mail_.lengths.size();
    for (absl::Status status :
         {Copy(mail_.batch_rows, batch.rows, 1), Copy(mail_.sequence_ids.data(), batch.sequence_ids, rows),
          Copy(mail_.state_rows.data(), batch.state_rows, rows), Copy(mail_.lengths.data(), batch.lengths, rows)}) {
      if (!status.ok()) return status;
    }
    return plane_->EnqueueBegin();
  }
  absl::Status Group(uint32_t group) override { return plane_->EnqueueGroup(group); }
  absl::Status Commit(const int32_t* commits) override {
    if (absl::Status status = Copy(mail_.commits.data(), commits, mail_.commits.size()); !status.ok()) return status;
    return plane_->EnqueueCommit();
  }
  absl::Status CopyStatuses(int32_t* target) override {
    return Copy(target, mail_.statuses.data(), mail_.statuses.size());
  }
  void Abort() override {}  // nothing waits for anybody
  absl::Status status() override { return plane_->status(); }
  const client::Arena& arena() const override { return plane_->arena(); }

 private:
  template <typename T>
  absl::Status Copy(T* target, const T* source, size_t count) const {
    return ToStatus(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyDefault, stream_),
                    "the batch of a step");
  }

  const std::unique_ptr<client::DirectPlane> plane_;
  const client::PlaneMail mail_;
  const cudaStream_t stream_;
};

absl::StatusOr<std::unique_ptr<EnqueuedPlane>> MakeSteps(client::Session& session, client::Plane plane, uint32_t top_k,
                                                         cudaStream_t stream) {
  if (plane == client::Plane::kDirect) {
    client::DirectPlaneOptions options;
    options.stream = stream;
    auto direct = client::DirectPlane::Open(session, top_k, options);
    if (!direct.ok()) return direct.status();
    auto mail = (*direct)->arena().Mail();
    if (!mail.ok()) return mail.status();
    return std::make_unique<DirectSteps>(*std::move(direct), *std::move(mail), stream);
  }
  auto server = client::DevicePlane::Arm(session, top_k);
  if (!server.ok()) return server.status();
  return std::make_unique<ServerSteps>(*std::move(server), stream);
}

class CudaGpuPlane final : public StepPlane {
 public:
  CudaGpuPlane(int ordinal, uint32_t top_k) : ordinal_(ordinal), top_k_(top_k) {}
  ~CudaGpuPlane() override;
  absl::Status Init(client::Session& session, client::Plane plane);

  absl::Status RunGroups(absl::Span<const client::PlaneRow> rows) override;
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const override {
    return {hot_rows_.data() + (group * max_rows_ + row) * top_k_, top_k_};
  }
  int32_t Misses(uint32_t group, size_t row) const override { return misses_[group * max_rows_ + row]; }
  absl::Status Commit(absl::Span<const int32_t> commits) override;

 private:
  absl::Status Capture(const std::function<absl::Status()>& enqueue, GraphExecHandle* exec);
  absl::Status EnqueueGroups();
  absl::Status EnqueueCommit();
  absl::Status Run(const GraphExecHandle& exec);

  const int ordinal_;
  const uint32_t top_k_;
  std::unique_ptr<EnqueuedPlane> steps_;
  StreamHandle stream_;
  size_t max_rows_ = 0;
  Pinned<int32_t> row_count_;
  Pinned<uint64_t> sequence_ids_;
  // As the next three, [max_rows_].
  Pinned<int32_t> state_rows_;
  Pinned<int32_t> lengths_;
  Pinned<int32_t> commits_;
  Pinned<int32_t> statuses_;
  Pinned<int32_t> hot_rows_;  // [group][max_rows_][top_k_]
  Pinned<int32_t> misses_;    // [group][max_rows_]
  std::vector<client::PlaneRow> rows_;
  bool step_is_open_ = false;  // begun and not committed
  GraphExecHandle groups_;
  GraphExecHandle commit_;
};

CudaGpuPlane::~CudaGpuPlane() {
  const CurrentDevice current(ordinal_);
  if (steps_ != nullptr && stream_.get() != nullptr) {
    // A step that was given up may still wait. On the direct plane the daemon would wait for its end.
    steps_->Abort();
    if (step_is_open_) {
      std::fill_n(commits_.data(), max_rows_, 0);
      static_cast<void>(Run(commit_));  // whoever gave the step up has had the reason
    }
    kernels::cuda::ReportLoss(cudaStreamSynchronize(stream_.get()), "the last step");
  }
  groups_ = {};
  commit_ = {};
  steps_.reset();
  stream_ = {};
}

absl::Status CudaGpuPlane::Init(client::Session& session, client::Plane plane) {
  const CurrentDevice current(ordinal_);
  // Before the session is armed: then the daemon's stream waits.
  auto stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  auto steps = MakeSteps(session, plane, top_k_, stream_.get());
  if (!steps.ok()) return steps.status();
  steps_ = *std::move(steps);
  auto mail = steps_->arena().Mail();
  if (!mail.ok()) return mail.status();
  max_rows_ = mail->lengths.size();
  const size_t groups = steps_->arena().groups();
  for (absl::Status status : {row_count_.Make(1), sequence_ids_.Make(max_rows_), state_rows_.Make(max_rows_),
                              lengths_.Make(max_rows_), commits_.Make(max_rows_), statuses_.Make(max_rows_),
                              hot_rows_.Make(groups * max_rows_ * top_k_), misses_.Make(groups * max_rows_)}) {
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
  if (absl::Status status = steps_->Begin(batch); !status.ok()) return status;
  const client::Arena& arena = steps_->arena();
  const size_t row_bytes = top_k_ * sizeof(int32_t);
  for (uint32_t group = 0; group < arena.groups(); ++group) {
    if (absl::Status status = steps_->Group(group); !status.ok()) return status;
    auto hot_rows = arena.HotRows(group);
    if (!hot_rows.ok()) return hot_rows.status();
    auto misses = arena.Misses(group);
    if (!misses.ok()) return misses.status();
    cudaError_t error =
        cudaMemcpy2DAsync(hot_rows_.data() + group * max_rows_ * top_k_, row_bytes, (*hot_rows)[0].data(),
                          hot_rows->row_stride_bytes(), row_bytes, max_rows_, cudaMemcpyDeviceToHost, stream_.get());
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(misses_.data() + group * max_rows_, misses->data(), max_rows_ * sizeof(int32_t),
                              cudaMemcpyDeviceToHost, stream_.get());
    }
    if (error != cudaSuccess) return ToStatus(error, "the hot rows of a step");
  }
  return steps_->CopyStatuses(statuses_.data());
}

absl::Status CudaGpuPlane::EnqueueCommit() {
  if (absl::Status status = steps_->Commit(commits_.data()); !status.ok()) return status;
  return steps_->CopyStatuses(statuses_.data());
}

absl::Status CudaGpuPlane::Run(const GraphExecHandle& exec) {
  if (absl::Status status = steps_->status(); !status.ok()) return status;
  const CurrentDevice current(ordinal_);
  cudaError_t error = cudaGraphLaunch(exec.get(), stream_.get());
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_.get());
  if (error != cudaSuccess) return ToStatus(error, "a step");
  if (absl::Status status = steps_->status(); !status.ok()) return status;
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
  step_is_open_ = true;
  return Run(groups_);
}

absl::Status CudaGpuPlane::Commit(absl::Span<const int32_t> commits) {
  if (commits.size() != rows_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("commits are ", commits.size(), "; the step has ", rows_.size(), " rows"));
  }
  std::copy(commits.begin(), commits.end(), commits_.data());
  step_is_open_ = false;
  return Run(commit_);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepPlane>> MakeGpuPlane(client::Session& session, client::Plane plane, uint32_t top_k) {
  const std::shared_ptr<const client::Arena> arena = session.arena();
  if (!arena->status().ok()) return arena->status();
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, arena->bytes().data()); error != cudaSuccess) {
    return ToStatus(error, "the arena's GPU cannot be had");
  }
  auto gpu_plane = std::make_unique<CudaGpuPlane>(attributes.device, top_k);
  if (absl::Status status = gpu_plane->Init(session, plane); !status.ok()) return status;
  return gpu_plane;
}

}  // namespace stoker::replay
