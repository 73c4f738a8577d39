// Another process of the pool tests: maps a pool by the descriptors that it has inherited, and gathers its rows.
//
//   pool_reader KIND DESCRIPTOR BYTES [DESCRIPTOR BYTES ...]
//
// KIND is a value of ExportedMemory::Kind. Exit status: 0 when all rows are right.
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/pool_memory.h"
#include "tests/gpu/pool_rows.h"

int main(int argc, char** argv) {
  namespace kernels = stoker::kernels;
  if (argc < 4) return 2;
  kernels::ExportedMemory exported;
  exported.kind = static_cast<kernels::ExportedMemory::Kind>(std::atoi(argv[1]));
  for (int i = 2; i + 1 < argc; i += 2) {
    exported.parts.push_back({std::atoi(argv[i]), std::strtoull(argv[i + 1], nullptr, 10)});
  }
  const auto backend = kernels::cuda::MakeCudaBackend(0);
  if (!backend.ok()) {
    std::fprintf(stderr, "pool_reader: %s\n", backend.status().ToString().c_str());
    return 1;
  }
  const auto pool = kernels::cuda::ImportPool(kernels::cuda::LoadPoolDriver(), {0}, exported);
  if (!pool.ok()) {
    std::fprintf(stderr, "pool_reader: %s\n", pool.status().ToString().c_str());
    return 1;
  }
  const int64_t wrong = kernels::cuda::CountWrongRows(**backend, (*pool)->data(), (*pool)->bytes());
  if (wrong != 0) std::fprintf(stderr, "pool_reader: %lld wrong rows\n", static_cast<long long>(wrong));
  // A mark by which the owner sees that this memory is its own.
  if (wrong == 0) (*pool)->data()[(*pool)->bytes() - 1] = std::byte{42};
  return wrong == 0 ? 0 : 1;
}
