#include "client/device_plane.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/device_plane_kernels.h"
#include "client/plane.h"
#include "client/plane_batch.h"
#include "kernels/cuda/handles.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::DeviceMemory;
using kernels::cuda::PinnedMemory;
using kernels::cuda::StreamHandle;
using kernels::cuda::ToStatus;

// Bound of the Disarm that the destructor sends.
constexpr absl::Duration kDisarmTimeout = absl::Seconds(5);
// The words of the host's that kernels read and write are each in a cache line of their own.
constexpr size_t kReportOffset = 128;
constexpr size_t kPinnedBytes = kReportOffset + 128;
static_assert(sizeof(DoorbellReport) <= kPinnedBytes - kReportOffset);

template <typename T>
T LoadAcquire(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

class CudaDevicePlane final : public DevicePlane {
 public:
  CudaDevicePlane(Session& session, std::shared_ptr<const Arena> arena, uint64_t generation, absl::Duration wait_limit)
      : session_(session), arena_(std::move(arena)), generation_(generation), wait_limit_(wait_limit), batch_("Ring") {}
  ~CudaDevicePlane() override;

  // Makes views and memory, and loads the kernels.
  absl::Status Open(uint32_t top_k);
  // Sends the call, and takes what it answers.
  absl::Status SendArm(const CallOptions& call);

  absl::Status PublishBatch(const DeviceBatch& batch, cudaStream_t stream) override;
  absl::Status PublishEntries(uint32_t group, const int32_t* entries, uint64_t stride, cudaStream_t stream) override;
  absl::Status Ring(uint32_t group, cudaStream_t stream) override;
  absl::Status Await(uint32_t group, cudaStream_t stream) override;
  absl::Status PublishCommits(const int32_t* commits, cudaStream_t stream) override;
  absl::Status RingCommit(cudaStream_t stream) override;
  absl::Status AwaitCommit(cudaStream_t stream) override;
  absl::Status CopyStatuses(int32_t* target, cudaStream_t stream) override;

  void Abort() override { SetAbort(absl::CancelledError("the server plane was aborted")); }
  absl::StatusOr<uint64_t> Disarm(const CallOptions& options) override;
  absl::Status status() override;
  uint64_t finished_step() const override { return LoadAcquire(report_->finished); }
  const DoorbellView& view() const override { return view_; }
  const Arena& arena() const override { return *arena_; }
  uint32_t top_k() const override { return batch_.top_k(); }
  uint32_t groups() const override { return static_cast<uint32_t>(batch_.groups()); }
  uint64_t first_step() const override { return first_step_; }
  absl::Duration doorbell_timeout() const override { return doorbell_timeout_; }

 private:
  // OK where the session is attached and armed as it was by Arm.
  absl::Status CheckSession() const;
  absl::Status CheckGroup(uint32_t group) const;
  absl::Status CheckMail(const PlaneMail& mail) const;
  absl::Status StartState();
  // Ends the waits; the first reason stays.
  void SetAbort(absl::Status why);
  void Watch();
  absl::Status FromReport() const;
  int32_t max_rows() const { return static_cast<int32_t>(batch_.mail().lengths.size()); }
  uint32_t commit_doorbell() const { return groups(); }

  Session& session_;
  const std::shared_ptr<const Arena> arena_;
  const uint64_t generation_;
  const absl::Duration wait_limit_;
  PlaneBatch batch_;  // its views alone: the order of calls is not the host's here
  int ordinal_ = 0;
  DeviceMemory state_;
  PinnedMemory pinned_;
  uint32_t* abort_ = nullptr;         // in pinned_
  DoorbellReport* report_ = nullptr;  // likewise
  DoorbellView view_;
  bool armed_ = false;
  uint64_t arm_call_ = 0;
  uint64_t first_step_ = 0;
  absl::Duration doorbell_timeout_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;   // guarded by mutex_
  absl::Status abort_why_;  // guarded by mutex_
  std::thread watcher_;
};

absl::Status CudaDevicePlane::Open(uint32_t top_k) {
  if (!arena_->status().ok()) return arena_->status();
  if (!arena_->on_device()) {
    return absl::FailedPreconditionError(
        "the arena is in host memory: there host code rings the doorbells (ServerPlane), and kernels do not");
  }
  if (absl::Status status = batch_.Open(*arena_, top_k); !status.ok()) return status;
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, arena_->bytes().data()); error != cudaSuccess) {
    return ToStatus(error, "the arena's GPU cannot be had");
  }
  ordinal_ = attributes.device;
  const CurrentDevice current(ordinal_);
  if (const cudaError_t error = PreparePlaneKernels(); error != cudaSuccess) {
    return ToStatus(error, "the kernels of the server plane cannot be loaded");
  }
  absl::StatusOr<DeviceMemory> state = kernels::cuda::MakeDeviceMemory(sizeof(DoorbellState));
  if (!state.ok()) return state.status();
  state_ = *std::move(state);
  absl::StatusOr<PinnedMemory> pinned = kernels::cuda::MakePinnedMemory(kPinnedBytes);
  if (!pinned.ok()) return pinned.status();
  pinned_ = *std::move(pinned);
  auto* const words = static_cast<std::byte*>(pinned_.get());
  abort_ = new (words) uint32_t(0);
  report_ = new (words + kReportOffset) DoorbellReport();

  const PlaneMail& mail = batch_.mail();
  view_.request = reinterpret_cast<char*>(mail.request.data());
  view_.request_stride = mail.request.stride_bytes();
  view_.done = reinterpret_cast<const char*>(mail.done.data());
  view_.done_stride = mail.done.stride_bytes();
  view_.ended = mail.ended;
  view_.abort = abort_;  // one address for host and GPU: memory of cudaHostAlloc under unified addressing
  view_.limit_ns =
      wait_limit_ == absl::InfiniteDuration() ? 0 : static_cast<uint64_t>(absl::ToInt64Nanoseconds(wait_limit_));
  view_.state = static_cast<DoorbellState*>(state_.get());
  view_.report = report_;
  return absl::OkStatus();
}

absl::Status CudaDevicePlane::SendArm(const CallOptions& call) {
  v1::ArmRequest request;
  request.set_top_k(top_k());
  v1::ArmResponse response;
  if (absl::Status status = session_.Arm(request, &response, call); !status.ok()) return status;
  armed_ = true;
  arm_call_ = ArmCalls(session_);
  first_step_ = response.first_step();
  doorbell_timeout_ = absl::Milliseconds(response.doorbell_timeout_ms());
  if (first_step_ == 0) return absl::InternalError("Arm: first_step is 0, which no step before it can have answered");
  if (absl::Status status = CheckMail(batch_.mail()); !status.ok()) return status;
  if (absl::Status status = StartState(); !status.ok()) return status;
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::Status CudaDevicePlane::CheckMail(const PlaneMail& mail) const {
  for (size_t doorbell = 0; doorbell <= batch_.groups(); ++doorbell) {
    uint64_t request = 0, done = 0;
    absl::Status status = arena_->CopyOut(absl::MakeConstSpan(&mail.request[doorbell], 1), &request);
    status.Update(arena_->CopyOut(absl::MakeConstSpan(&mail.done[doorbell], 1), &done));
    if (!status.ok()) return status;
    if (request == first_step_ - 1 && done == first_step_ - 1) continue;
    return absl::InternalError(absl::StrCat("Arm: request[", doorbell, "] is ", request, " and done[", doorbell, "] ",
                                            done, "; both must be ", first_step_ - 1, ", one less than first_step"));
  }
  return absl::OkStatus();
}

absl::Status CudaDevicePlane::StartState() {
  const CurrentDevice current(ordinal_);
  DoorbellState start;
  start.step = first_step_ - 1;
  // On a stream of its own, so that no other stream is waited for.
  absl::StatusOr<StreamHandle> stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  cudaError_t error = cudaMemcpyAsync(state_.get(), &start, sizeof(start), cudaMemcpyHostToDevice, stream->get());
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream->get());
  return ToStatus(error, "the words of the server plane");
}

CudaDevicePlane::~CudaDevicePlane() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  if (abort_ != nullptr) std::atomic_ref<uint32_t>(*abort_).store(1, std::memory_order_release);
  if (armed_ && CheckSession().ok()) {
    CallOptions options;
    options.timeout = kDisarmTimeout;
    // The end of the session, and the next Arm, end the plane as well: there is nothing to do about an error.
    static_cast<void>(Disarm(options));
  }
  const CurrentDevice current(ordinal_);
  pinned_ = {};
  state_ = {};
}

absl::Status CudaDevicePlane::CheckSession() const {
  if (absl::Status status = session_.status(); !status.ok()) return status;
  if (const uint64_t generation = session_.generation(); generation != generation_) {
    return absl::UnavailableError(
        absl::StrCat("generation ", generation_, " of the session is over, it is ", generation, " now: arm anew"));
  }
  if (ArmCalls(session_) != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  return absl::OkStatus();
}

void CudaDevicePlane::SetAbort(absl::Status why) {
  const std::lock_guard lock(mutex_);
  if (!abort_why_.ok()) return;
  abort_why_ = std::move(why);
  std::atomic_ref<uint32_t>(*abort_).store(1, std::memory_order_release);
}

void CudaDevicePlane::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && abort_why_.ok()) {
    lock.unlock();
    if (absl::Status status = CheckSession(); !status.ok()) SetAbort(std::move(status));
    lock.lock();
    changed_.wait_for(lock, absl::ToChronoNanoseconds(kWatchPeriod), [this] { return stopping_; });
  }
}

absl::Status CudaDevicePlane::FromReport() const {
  const auto outcome = static_cast<WaitOutcome>(LoadAcquire(report_->outcome));
  const std::string where = DoneOf(report_->doorbell, report_->step);
  switch (outcome) {
    case WaitOutcome::kDone:
      return absl::OkStatus();
    case WaitOutcome::kEnded:
      return FromPlaneEnd(report_->ended, where, doorbell_timeout_);
    case WaitOutcome::kAborted:
      return absl::CancelledError(absl::StrCat("the wait for ", where, " was aborted"));
    case WaitOutcome::kTimedOut:
      return absl::DeadlineExceededError(
          absl::StrCat(where, " did not come within ", absl::FormatDuration(wait_limit_)));
    case WaitOutcome::kBadStep:
      break;
  }
  return absl::InternalError(
      absl::StrCat(where, " has a number that cannot be: the daemon does not keep to the protocol"));
}

absl::Status CudaDevicePlane::status() {
  {
    // The reason why waits were aborted says more than that they were.
    const std::lock_guard lock(mutex_);
    if (!abort_why_.ok()) return abort_why_;
  }
  if (absl::Status status = FromReport(); !status.ok()) return status;
  if (!armed_) return absl::FailedPreconditionError("the server plane was disarmed");
  absl::Status status = CheckSession();
  if (!status.ok()) SetAbort(status);
  return status;
}

absl::StatusOr<uint64_t> CudaDevicePlane::Disarm(const CallOptions& options) {
  if (!armed_) return absl::FailedPreconditionError("the server plane was disarmed");
  if (ArmCalls(session_) != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  CallOptions call = options;
  call.generation = generation_;
  v1::DisarmResponse response;
  if (absl::Status status = session_.Disarm({}, &response, call); !status.ok()) return status;
  armed_ = false;
  return response.steps();
}

absl::Status CudaDevicePlane::CheckGroup(uint32_t group) const {
  if (group < groups()) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("group ", group, " is not below the ", groups(), " of the session"));
}

absl::Status CudaDevicePlane::PublishBatch(const DeviceBatch& batch, cudaStream_t stream) {
  if (batch.rows == nullptr || batch.sequence_ids == nullptr || batch.state_rows == nullptr ||
      batch.lengths == nullptr) {
    return absl::InvalidArgumentError("batch: rows, sequence_ids, state_rows or lengths is null");
  }
  const PlaneMail& mail = batch_.mail();
  PublishBatchArgs args;
  args.rows = batch.rows;
  args.sequence_ids = batch.sequence_ids;
  args.state_rows = batch.state_rows;
  args.lengths = batch.lengths;
  args.rows_out = mail.batch_rows;
  args.sequence_ids_out = mail.sequence_ids.data();
  args.state_rows_out = mail.state_rows.data();
  args.lengths_out = mail.lengths.data();
  args.max_rows = max_rows();
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchPublishBatch(view_, args, stream), "PublishBatch");
}

absl::Status CudaDevicePlane::PublishEntries(uint32_t group, const int32_t* entries, uint64_t stride,
                                             cudaStream_t stream) {
  if (absl::Status status = CheckGroup(group); !status.ok()) return status;
  if (entries == nullptr) return absl::InvalidArgumentError("entries is null");
  absl::StatusOr<MatrixView<int32_t>> mailbox = arena_->Indices(group);
  if (!mailbox.ok()) return mailbox.status();
  PublishEntriesArgs args;
  args.entries = entries;
  args.stride = stride;
  args.out = (*mailbox)[0].data();
  args.out_stride = mailbox->row_stride_bytes() / sizeof(int32_t);
  args.max_rows = max_rows();
  args.top_k = static_cast<int32_t>(top_k());
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchPublishEntries(view_, group, args, stream), "PublishEntries");
}

absl::Status CudaDevicePlane::Ring(uint32_t group, cudaStream_t stream) {
  if (absl::Status status = CheckGroup(group); !status.ok()) return status;
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchRing(view_, group, stream), "Ring");
}

absl::Status CudaDevicePlane::Await(uint32_t group, cudaStream_t stream) {
  if (absl::Status status = CheckGroup(group); !status.ok()) return status;
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchAwait(view_, group, /*finishes=*/false, stream), "Await");
}

absl::Status CudaDevicePlane::PublishCommits(const int32_t* commits, cudaStream_t stream) {
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchPublishCommits(view_, commits, batch_.mail().commits.data(), stream), "PublishCommits");
}

absl::Status CudaDevicePlane::RingCommit(cudaStream_t stream) {
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchRing(view_, commit_doorbell(), stream), "RingCommit");
}

absl::Status CudaDevicePlane::AwaitCommit(cudaStream_t stream) {
  const CurrentDevice current(ordinal_);
  return ToStatus(LaunchAwait(view_, commit_doorbell(), /*finishes=*/true, stream), "AwaitCommit");
}

absl::Status CudaDevicePlane::CopyStatuses(int32_t* target, cudaStream_t stream) {
  if (target == nullptr) return absl::InvalidArgumentError("target is null");
  const absl::Span<const int32_t> statuses = batch_.mail().statuses;
  const CurrentDevice current(ordinal_);
  return ToStatus(
      cudaMemcpyAsync(target, statuses.data(), statuses.size() * sizeof(int32_t), cudaMemcpyDeviceToHost, stream),
      "CopyStatuses");
}

}  // namespace

void DevicePlane::SetUpProcess() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // Under MPS a process has 2 unless it says, and all processes of a GPU share some 100: with the daemon's 32 for each
  // engine, the second one would find none left.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 0);
}

absl::StatusOr<std::unique_ptr<DevicePlane>> DevicePlane::Arm(Session& session, uint32_t top_k,
                                                              const DevicePlaneOptions& options) {
  absl::StatusOr<uint64_t> generation = session.AwaitAttached(options.arm.timeout);
  if (!generation.ok()) return generation.status();
  // The call names the generation, so that it fails where this arena is another one's.
  CallOptions call = options.arm;
  if (call.generation == 0) call.generation = *generation;
  // Before anything is made for it.
  if (absl::Status status = ChoosePlane(session.info(), Plane::kServer).status(); !status.ok()) return status;
  auto plane = std::make_unique<CudaDevicePlane>(session, session.arena(), call.generation, options.wait_limit);
  if (absl::Status status = plane->Open(top_k); !status.ok()) return status;
  if (absl::Status status = plane->SendArm(call); !status.ok()) return status;
  return plane;
}

}  // namespace stoker::client
