#include "server/gpus.h"

namespace stoker::server {

absl::StatusOr<std::vector<Gpu>> ListGpus() {
  return absl::UnimplementedError("this build of stokerd has no CUDA backend");
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeGpuBackend(const Gpu&) {
  return absl::UnimplementedError("this build of stokerd has no CUDA backend");
}

}  // namespace stoker::server
