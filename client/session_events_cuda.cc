#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/session_events.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/ipc_event.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::EventHandle;
using kernels::cuda::StreamHandle;
using kernels::cuda::ToStatus;

class CudaSessionEvents final : public SessionEvents {
 public:
  CudaSessionEvents(int ordinal, StreamHandle releasing, EventHandle own, v1::CudaIpcEvent engine_event)
      : ordinal_(ordinal),
        engine_event_(std::move(engine_event)),
        releasing_(std::move(releasing)),
        own_(std::move(own)) {}

  ~CudaSessionEvents() override {
    const CurrentDevice current(ordinal_);
    Release();
    daemons_.clear();
    // The daemon's stream may wait for what will be recorded: nobody would tell it any more.
    if (cudaEventQuery(own_.get()) == cudaErrorNotReady) {
      cudaGetLastError();
      own_.Release();
    }
    own_ = {};
    releasing_ = {};
  }

  const v1::CudaIpcEvent& engine_event() const override { return engine_event_; }

  absl::Status Open(absl::string_view event_handle) override {
    const CurrentDevice current(ordinal_);
    absl::StatusOr<EventHandle> opened = kernels::cuda::OpenIpcEvent(
        std::string_view(event_handle.data(), event_handle.size()), "Attached.event_handle");
    if (!opened.ok()) return absl::InternalError(opened.status().message());
    const std::lock_guard lock(mutex_);
    daemons_.push_back(*std::move(opened));
    return absl::OkStatus();
  }

  void Release() override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    // An error is the device's, which tells all that use it.
    if (!daemons_.empty()) cudaEventRecord(daemons_.back().get(), releasing_.get());
  }

  absl::Status Record(CUstream_st* stream) override {
    const CurrentDevice current(ordinal_);
    return ToStatus(cudaEventRecord(own_.get(), stream), "wait_event: the engine's event cannot be recorded");
  }

  absl::Status Await(CUstream_st* stream) override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    return ToStatus(cudaStreamWaitEvent(stream, daemons_.back().get(), 0),
                    "signal_event: the stream cannot wait for the daemon's event");
  }

 private:
  const int ordinal_;
  const v1::CudaIpcEvent engine_event_;
  StreamHandle releasing_;
  EventHandle own_;
  std::mutex mutex_;
  std::vector<EventHandle> daemons_;  // guarded by mutex_; the last one is in force
};

}  // namespace

absl::StatusOr<std::unique_ptr<SessionEvents>> SessionEvents::Make(absl::string_view device) {
  if (!absl::StartsWithIgnoreCase(device, "GPU-")) {
    return absl::FailedPreconditionError(
        absl::StrCat("exchange_events: the session is on ", device, ", and only GPUs have interprocess events"));
  }
  const absl::StatusOr<int> ordinal = kernels::cuda::FindDevice(device);
  if (!ordinal.ok()) {
    return absl::NotFoundError(
        absl::StrCat("exchange_events: the session is on ", device, "; ", ordinal.status().message()));
  }
  const CurrentDevice current(*ordinal);
  absl::StatusOr<StreamHandle> releasing = kernels::cuda::MakeReleasingStream();
  if (!releasing.ok()) return releasing.status();
  std::string handle;
  absl::StatusOr<EventHandle> own = kernels::cuda::MakeIpcEvent(&handle);
  if (!own.ok()) return own.status();
  v1::CudaIpcEvent event;
  event.set_handle(std::move(handle));
  event.set_device(std::string(device));
  return std::make_unique<CudaSessionEvents>(*ordinal, *std::move(releasing), *std::move(own), std::move(event));
}

}  // namespace stoker::client
