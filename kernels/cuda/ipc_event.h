// Interprocess events: made here for another process, or made there and opened here.
//
// A wait is for the record that is the last one when the wait is enqueued, wherever it was made, so that the two
// processes must have told each other in between. An event that was never recorded is complete.
//
// The process that made a record must live until it is complete: nothing else ends the waits for it. Whoever outlives
// the other one records the event anew, on a stream on which nothing is under way.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {

// On the current device.
inline absl::StatusOr<EventHandle> MakeIpcEvent(std::string* ipc_handle) {
  cudaEvent_t made = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventInterprocess);
  if (error != cudaSuccess) return ToStatus(error, "an interprocess event cannot be made");
  EventHandle event(made);
  cudaIpcEventHandle_t handle;
  error = cudaIpcGetEventHandle(&handle, event.get());
  if (error != cudaSuccess) return ToStatus(error, "an interprocess event has no handle");
  ipc_handle->assign(handle.reserved, sizeof handle.reserved);
  return event;
}

// On the current device. INVALID_ARGUMENT: no handle of an event, with what CUDA says; UNAVAILABLE: the device is lost.
// `field` is what the handle came in.
inline absl::StatusOr<EventHandle> OpenIpcEvent(std::string_view ipc_handle, absl::string_view field) {
  cudaIpcEventHandle_t handle;
  if (ipc_handle.size() != sizeof handle.reserved) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, ": ", ipc_handle.size(), " bytes given, a cudaIpcEventHandle_t has ", sizeof handle.reserved));
  }
  std::memcpy(handle.reserved, ipc_handle.data(), ipc_handle.size());
  cudaEvent_t opened = nullptr;
  if (const cudaError_t error = cudaIpcOpenEventHandle(&opened, handle); error != cudaSuccess) {
    cudaGetLastError();
    absl::Status status = ToStatus(error, absl::StrCat(field, ": cannot be opened"));
    if (absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) return status;
    return absl::InvalidArgumentError(absl::StrCat(
        status.message(),
        ". It must be of an event of another process on the same machine, made with cudaEventInterprocess and "
        "cudaEventDisableTiming, that is still there"));
  }
  EventHandle event(opened);
  // What a handle is worth that only looks like one, its first use tells.
  if (const cudaError_t error = cudaEventQuery(event.get()); error != cudaSuccess) {
    cudaGetLastError();
    if (error != cudaErrorNotReady) {
      absl::Status status = ToStatus(error, absl::StrCat(field, ": is of no event that can be used"));
      return absl::IsUnavailable(status) ? status : absl::InvalidArgumentError(status.message());
    }
  }
  return event;
}

// A stream for records that release. Of the highest priority, so that it shares no connection to the device with
// streams that wait, which have none: behind one of them its record would wait as well.
inline absl::StatusOr<StreamHandle> MakeReleasingStream() {
  int lowest = 0;
  int highest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest);
  if (error != cudaSuccess) return ToStatus(error, "a stream cannot be made");
  return StreamHandle(stream);
}

}  // namespace stoker::kernels::cuda
