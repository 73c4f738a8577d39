// The peers' bench over many workload files in one process, with one pool for all: to pin 16 GiB for each of them takes
// longer than to time it.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 -I SEED_DIR -I BENCH_DIR -o peer_bench peer_bench.cu
//   peer_bench [--pool-gib N] WORKLOAD...
//
// SEED_DIR is what peers/extract_seed_kernels.py has written, BENCH_DIR has seed_kernels_bench.cu as grid.py changes
// it: it writes a pool's rows from RowsWritten on.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

int64_t rows_written = 0;  // of the pool, from its first on

template <typename T>
cudaError_t KeptHostAlloc(T** memory, size_t bytes, unsigned flags) {
  static void* kept = nullptr;
  static size_t kept_bytes = 0;
  if (bytes > kept_bytes) {
    if (kept != nullptr) cudaFreeHost(kept);
    kept = nullptr;
    if (const cudaError_t error = cudaHostAlloc(&kept, bytes, flags); error != cudaSuccess) return error;
    kept_bytes = bytes;
    rows_written = 0;
  }
  *memory = static_cast<T*>(kept);
  return cudaSuccess;
}

// First row of the pool that does not say yet which it is; the caller writes it and those behind it.
int64_t RowsWritten(int64_t rows, int64_t row_bytes) {
  static int64_t last_row_bytes = 0;
  if (row_bytes != last_row_bytes) rows_written = 0;
  last_row_bytes = row_bytes;
  const int64_t first = rows_written < rows ? rows_written : rows;
  rows_written = rows_written < rows ? rows : rows_written;
  return first;
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
