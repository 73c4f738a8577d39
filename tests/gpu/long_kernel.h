// A kernel that runs for a given time and writes all the while.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stoker::gpu_test {

// Raises *word, which is device memory, again and again for so long.
cudaError_t LaunchLongKernel(uint64_t* word, uint64_t ns, cudaStream_t stream);

}  // namespace stoker::gpu_test
