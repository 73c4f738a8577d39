// Without a GPU the tests fail: they are labelled gpu and not run there.
#include <cuda_runtime_api.h>

#include "client/replay/cuda/gpu_rows.h"
#include "kernels/cuda/error.h"
#include "tests/replay/row_device_case.h"

namespace stoker::replay {

absl::StatusOr<std::unique_ptr<RowDevice>> MakeRowDevice(const RowDeviceSpec& spec,
                                                         const std::shared_ptr<const client::Arena>& arena) {
  // Kernels reach it under its own address, and the test can look at it.
  const cudaError_t error =
      cudaHostRegister(arena->bytes().data(), arena->bytes().size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) return kernels::cuda::ToStatus(error, "the arena cannot be registered");
  return MakeGpuRows(spec, arena);
}

void LeaveArena(const client::Arena& arena) { cudaHostUnregister(arena.bytes().data()); }

bool RowsAreCheckedOnDevice() { return true; }

}  // namespace stoker::replay
