// GPUs are named by UUID, as nvidia-smi -L gives it.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_format.h"

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

}  // namespace stoker::kernels::cuda
