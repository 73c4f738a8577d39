#include "kernels/cuda/prepare_device.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kMinCapability = 8;
// Blocks have some static shared memory beside what they ask for.
constexpr int kStaticSharedBytes = 1024;

}  // namespace

absl::StatusOr<PreparedDevice> PrepareDevice(int ordinal) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || ordinal < 0 || ordinal >= count) {
    cudaGetLastError();
    return absl::NotFoundError(
        absl::StrCat("device: cuda:", ordinal, " given, ", error == cudaSuccess ? count : 0, " GPUs found",
                     error == cudaSuccess ? "" : absl::StrCat(" (", cudaGetErrorString(error), ")")));
  }
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) return ToStatus(error, absl::StrCat("device: cuda:", ordinal));
  if (properties.major < kMinCapability) {
    return absl::FailedPreconditionError(absl::StrCat("device: cuda:", ordinal, " has compute capability ",
                                                      properties.major, ".", properties.minor, ", limit ",
                                                      kMinCapability, ".0"));
  }
  const CurrentDevice current(ordinal);
  if (absl::Status status = MakeContext(absl::StrCat("device: cuda:", ordinal)); !status.ok()) return status;
  // Pool memory has one address for all GPUs and for the host.
  int same_address = 0;
  error = cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal);
  if (error != cudaSuccess) return ToStatus(error, absl::StrCat("device: cuda:", ordinal));
  if (!properties.unifiedAddressing || same_address == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("device: cuda:", ordinal, " cannot use registered host memory at its host address"));
  }
  PreparedDevice device;
  device.uuid = UuidOf(properties);
  device.memory_bytes = properties.totalGlobalMem;
  device.limits.multiprocessors = properties.multiProcessorCount;
  device.limits.max_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin) - kStaticSharedBytes;
  device.limits.clusters = properties.major >= 9;
  error = PrepareKernels(device.limits);
  if (error != cudaSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("device: cuda:", ordinal, ": the kernels cannot be loaded: ", cudaGetErrorString(error)));
  }
  return device;
}

}  // namespace stoker::kernels::cuda
