#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_backend.h"
#include "server/gpus.h"

namespace stoker::server {

absl::StatusOr<std::vector<Gpu>> ListGpus() {
  const absl::StatusOr<std::vector<kernels::cuda::DeviceInfo>> devices = kernels::cuda::ListDevices();
  if (!devices.ok()) {
    return absl::NotFoundError(absl::StrCat("no GPU can be used: ", devices.status().message()));
  }
  std::vector<Gpu> gpus;
  for (const kernels::cuda::DeviceInfo& device : *devices) gpus.push_back({device.ordinal, device.uuid, device.name});
  return gpus;
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeGpuBackend(const Gpu& gpu) {
  return kernels::cuda::MakeCudaBackend(gpu.ordinal);
}

}  // namespace stoker::server
