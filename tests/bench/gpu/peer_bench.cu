// The peers' bench over many workload files in one process, with one pool for all: to pin 16 GiB for each of them takes
// longer than to time it.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -I SEED_DIR -I PEERS_DIR -o peer_bench peer_bench.cu
//   peer_bench [--pool-gib N] WORKLOAD...
//
// SEED_DIR is what peers/extract_seed_kernels.py has written.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

template <typename T>
cudaError_t KeptHostAlloc(T** memory, size_t bytes, unsigned flags) {
  static void* kept = nullptr;
  static size_t kept_bytes = 0;
  if (bytes > kept_bytes) {
    if (kept != nullptr) cudaFreeHost(kept);
    if (const cudaError_t error = cudaHostAlloc(&kept, bytes, flags); error != cudaSuccess) return error;
    kept_bytes = bytes;
  }
  *memory = static_cast<T*>(kept);
  return cudaSuccess;
}

}  // namespace

#define cudaHostAlloc KeptHostAlloc
#define main PeerMain
#include "seed_kernels_bench.cu"
#undef main
#undef cudaHostAlloc

int main(int argc, char** argv) {
  std::string pool_gib = "0";
  std::vector<char*> workloads;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--pool-gib" && i + 1 < argc) {
      pool_gib = argv[++i];
    } else {
      workloads.push_back(argv[i]);
    }
  }
  std::string option = "--pool-gib";
  for (char* const workload : workloads) {
    char* arguments[] = {argv[0], workload, option.data(), pool_gib.data()};
    if (const int status = PeerMain(4, arguments); status != 0) return status;
    std::fflush(stdout);
  }
  return workloads.empty() ? 2 : 0;
}
