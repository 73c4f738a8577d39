// Compares gathered rows on the device with what they were gathered from.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stoker::kernels::cuda {

// How many of the n hot rows do not begin with pool_rows[i] and end with its complement. Waits for the stream; exits on
// a CUDA error.
int CountWrongRows(const int32_t* pool_rows, const int32_t* hot_rows, const char* hot, int64_t row_bytes, int n,
                   cudaStream_t stream);

}  // namespace stoker::kernels::cuda
