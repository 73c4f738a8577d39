#include "tests/gpu/long_kernel.h"

namespace stoker::gpu_test {
namespace {

__device__ uint64_t NowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void LongKernel(uint64_t* word, uint64_t ns) {
  const uint64_t begin = NowNs();
  while (NowNs() - begin < ns) {
    atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull);
  }
}

}  // namespace

cudaError_t LaunchLongKernel(uint64_t* word, uint64_t ns, cudaStream_t stream) {
  LongKernel<<<1, 1, 0, stream>>>(word, ns);
  return cudaGetLastError();
}

}  // namespace stoker::gpu_test
