#include "tests/gpu/order_kernels.h"

namespace stoker::gpu_test {
namespace {

constexpr int kThreads = 256;

__device__ uint32_t RowWord(int layer, int64_t position, int word) {
  return (static_cast<uint32_t>(layer) + 1) * 0x9e3779b1u ^ static_cast<uint32_t>(position) * 0x85ebca6bu ^
         static_cast<uint32_t>(word) * 0xc2b2ae35u;
}

__device__ int32_t EntryOf(int64_t length, int k) {
  return static_cast<int32_t>(k == 0 ? length - 1 : (k * 37 + length * 7919 % 1009) % length);
}

__device__ uint64_t Now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

template <typename Word>
__device__ void ForEachWord(const LayerRows& rows, int64_t row, int64_t count, Word word) {
  const int64_t words = int64_t{rows.layers} * count * rows.row_words;
  for (int64_t i = threadIdx.x + int64_t{blockIdx.x} * blockDim.x; i < words; i += int64_t{blockDim.x} * gridDim.x) {
    const int w = static_cast<int>(i % rows.row_words);
    const int64_t r = i / rows.row_words % count;
    const int layer = static_cast<int>(i / rows.row_words / count);
    word(rows.layer[layer] + (row + r) * rows.row_stride_words + w, layer, r, w);
  }
}

// One block: it is waited for by one flag.
__global__ void ProduceKernel(ProduceArgs args) {
  ForEachWord(args.rows, args.row, args.count, [](uint32_t* at, int, int64_t, int) { *at = 0xdeadbeefu; });
  if (args.entries != nullptr) {
    for (int k = threadIdx.x; k < args.top_k; k += blockDim.x) args.entries[k] = -1;
  }
  __threadfence_system();
  __syncthreads();
  const uint64_t end = Now() + args.work_ns;
  while (Now() < end) __nanosleep(200);
  ForEachWord(args.rows, args.row, args.count,
              [&](uint32_t* at, int layer, int64_t r, int w) { *at = RowWord(layer, args.first + r, w); });
  if (args.entries != nullptr) {
    for (int k = threadIdx.x; k < args.top_k; k += blockDim.x) args.entries[k] = EntryOf(args.length, k);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && args.told != nullptr) *static_cast<volatile uint32_t*>(args.told) = args.number;
}

__global__ void CheckKernel(LayerRows rows, const int32_t* entries, const int32_t* hot_rows, int top_k,
                            RowCounts* counts) {
  for (int i = threadIdx.x; i < top_k * rows.layers; i += blockDim.x) {
    const int k = i % top_k;
    const int layer = i / top_k;
    bool right = entries[k] >= 0 && hot_rows[k] >= 0;
    for (int w = 0; right && w < rows.row_words; ++w) {
      right = rows.layer[layer][hot_rows[k] * rows.row_stride_words + w] == RowWord(layer, entries[k], w);
    }
    atomicAdd(&counts->compared, 1ull);
    if (!right) atomicAdd(&counts->wrong, 1ull);
  }
}

__global__ void CheckRangeKernel(LayerRows rows, int64_t row, int64_t first, int64_t count, RowCounts* counts) {
  ForEachWord(rows, row, count, [&](const uint32_t* at, int layer, int64_t r, int w) {
    if (w == 0) atomicAdd(&counts->compared, 1ull);
    if (*at != RowWord(layer, first + r, w)) atomicAdd(&counts->wrong, 1ull);
  });
}

}  // namespace

cudaError_t LaunchProduce(const ProduceArgs& args, cudaStream_t stream) {
  ProduceKernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchCheck(const LayerRows& rows, const int32_t* entries, const int32_t* hot_rows, int top_k,
                        RowCounts* counts, cudaStream_t stream) {
  CheckKernel<<<1, kThreads, 0, stream>>>(rows, entries, hot_rows, top_k, counts);
  return cudaGetLastError();
}

cudaError_t LaunchCheckRange(const LayerRows& rows, int64_t row, int64_t first, int64_t count, RowCounts* counts,
                             cudaStream_t stream) {
  CheckRangeKernel<<<1, kThreads, 0, stream>>>(rows, row, first, count, counts);
  return cudaGetLastError();
}

}  // namespace stoker::gpu_test
