// The CUDA backend: pools are pinned host memory that kernels read and write, hot caches and state are on one GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stoker::kernels::cuda {

// A GPU that this process can use.
struct DeviceInfo {
  int ordinal = 0;
  std::string uuid;  // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string name;
};

// The GPUs of this machine, at least one. NOT_FOUND, with the driver's or the runtime's reason: no driver, one that is
// too old, or no GPU. The driver is looked for at run time. Makes no context; asks for eager loading of kernels unless
// the environment says otherwise, so it is called before anything else that uses CUDA, and before threads are started.
absl::StatusOr<std::vector<DeviceInfo>> ListDevices();

// clusters: false runs the kernels as on compute capability 8, with no clusters of blocks and no launch before the end
// of the one before, also where the GPU has these.
//
// NOT_FOUND: no such GPU. FAILED_PRECONDITION: its compute capability is below 8.0, or this build has no code for it.
// Streams must be destroyed before the backend.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int ordinal, bool clusters = true);

}  // namespace stoker::kernels::cuda
