// GPUs are named by UUID, as nvidia-smi -L gives it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace stoker::kernels::cuda {

// "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx".
inline std::string UuidOf(const cudaDeviceProp& properties) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  std::string uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    absl::StrAppendFormat(&uuid, "%02x", bytes[i]);
  }
  return uuid;
}

// The ordinal of the GPU with that UUID. NOT_FOUND: this process does not see it.
inline absl::StatusOr<int> FindDevice(absl::string_view uuid) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return absl::NotFoundError(absl::StrCat("this process sees no GPU: ", cudaGetErrorString(error)));
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) continue;
    if (absl::EqualsIgnoreCase(UuidOf(properties), uuid)) return ordinal;
  }
  return absl::NotFoundError(
      absl::StrCat(uuid, " is not among the ", count, " GPUs that this process sees (CUDA_VISIBLE_DEVICES)"));
}

}  // namespace stoker::kernels::cuda
