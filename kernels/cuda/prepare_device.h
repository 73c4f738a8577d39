// What must be known, and done, before a GPU runs the kernels: by the backend, and by whoever runs them on a stream of
// its own.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/launch.h"

namespace stoker::kernels::cuda {

struct PreparedDevice {
  std::string uuid;
  DeviceLimits limits;
  size_t memory_bytes = 0;
};

// Checks the GPU and loads the kernels there. NOT_FOUND: no such GPU. FAILED_PRECONDITION: its compute capability is
// below 8.0, it cannot use host memory at its host address, or this build has no code for it. Errors of MakeContext.
absl::StatusOr<PreparedDevice> PrepareDevice(int ordinal);

}  // namespace stoker::kernels::cuda
