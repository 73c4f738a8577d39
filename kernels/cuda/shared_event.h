// kernels::SharedEvent on a GPU.
#pragma once

#include <string>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/device_health.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {

class CudaSharedEvent final : public SharedEvent {
 public:
  // `health` and `releasing`, a stream on which nothing is ever under way, outlive it.
  CudaSharedEvent(int device, DeviceHealth* health, cudaStream_t releasing, EventHandle event, std::string ipc_handle)
      : device_(device),
        health_(health),
        releasing_(releasing),
        ipc_handle_(std::move(ipc_handle)),
        event_(std::move(event)) {}
  ~CudaSharedEvent() override {
    const CurrentDevice current(device_);
    event_ = {};
  }

  std::string_view ipc_handle() const override { return ipc_handle_; }
  absl::Status Release() override {
    const CurrentDevice current(device_);
    return health_->Check(cudaEventRecord(event_.get(), releasing_), "an event cannot be recorded");
  }
  cudaEvent_t get() const { return event_.get(); }

 private:
  const int device_;
  DeviceHealth* const health_;
  const cudaStream_t releasing_;
  const std::string ipc_handle_;
  EventHandle event_;
};

}  // namespace stoker::kernels::cuda
