// A process's context on a GPU: made by the first call that needs it, or here, where its failure can be told apart.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/error.h"

namespace stoker::kernels::cuda {

// Makes the context of the current device, which functions of the driver need; once it is there, nothing. `device` is
// what errors call it. RESOURCE_EXHAUSTED: no memory, or under MPS no connections: all processes of a GPU share them,
// and with 32 for each the fourth process had none (one H200); of those with 8 ten were not too many beside one with
// 32. UNAVAILABLE: the device is lost, or MPS takes nobody in.
inline absl::Status MakeContext(absl::string_view device) {
  const cudaError_t error = cudaFree(nullptr);
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const absl::Status status = ToStatus(error, absl::StrCat(device, ": no context can be made"));
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(absl::StrCat(
      status.message(),
      ". Where the GPU has memory left: under MPS its processes share its connections, of which each takes "
      "CUDA_DEVICE_MAX_CONNECTIONS; give engines 8"));
}

}  // namespace stoker::kernels::cuda
