#include <cstdio>
#include <cstdlib>

#include "tests/gpu/compare_rows.h"

namespace stoker::kernels::cuda {
namespace {

__global__ void CompareKernel(const int32_t* pool_rows, const int32_t* hot_rows, const char* hot, int64_t row_bytes,
                              int n, int* wrong) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  if (hot_rows[i] < 0) {
    atomicAdd(wrong, 1);
    return;
  }
  const int32_t* const words = reinterpret_cast<const int32_t*>(hot + hot_rows[i] * row_bytes);
  if (words[0] != pool_rows[i] || words[row_bytes / 4 - 1] != ~pool_rows[i]) atomicAdd(wrong, 1);
}

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "compare: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

}  // namespace

int CountWrongRows(const int32_t* pool_rows, const int32_t* hot_rows, const char* hot, int64_t row_bytes, int n,
                   cudaStream_t stream) {
  int* wrong;
  Check(cudaMalloc(reinterpret_cast<void**>(&wrong), sizeof(int)));
  Check(cudaMemsetAsync(wrong, 0, sizeof(int), stream));
  CompareKernel<<<(n + 255) / 256, 256, 0, stream>>>(pool_rows, hot_rows, hot, row_bytes, n, wrong);
  Check(cudaGetLastError());
  int count = 0;
  Check(cudaMemcpyAsync(&count, wrong, sizeof(int), cudaMemcpyDeviceToHost, stream));
  Check(cudaStreamSynchronize(stream));
  Check(cudaFree(wrong));
  return count;
}

}  // namespace stoker::kernels::cuda
