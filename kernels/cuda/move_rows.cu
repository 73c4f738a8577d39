// Gather from the compact list and from the dense plan, and transfer.
//
// Bound: the link. A row that misses is read once from host memory (55 GB/s each way, less for random rows of a large
// pool, where address translation limits) and written once to device memory (4.3 TB/s): the writes are free.
#include <algorithm>
#include <limits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/row_copy.cuh"

namespace stoker::kernels::cuda {
namespace {

constexpr int kThreads = 512;

struct Limits {
  int64_t src_rows;
  int64_t dst_rows;
};

struct CompactPlan {
  const int32_t* pool_rows;
  const int32_t* hot_rows;
  const int32_t* counts;
  int32_t rows;
  int32_t top_k;
  uint64_t* gathered_bytes;
};

// Pool rows that do not exist become -1 (zero fill), hot rows that do not exist -1 (skip).
__device__ int32_t Clip(int32_t row, int64_t limit) { return row >= 0 && row < limit ? row : -1; }

__device__ void CountBytes(uint64_t* counter, uint64_t bytes) {
  if (counter != nullptr && bytes != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(bytes));
  }
}

// Number of pairs with both rows in range, summed over the block. Every thread of the block calls it.
__device__ int32_t BlockCount(bool counted) { return __syncthreads_count(counted); }

__global__ void __launch_bounds__(kThreads)
    GatherCompactKernel(const __grid_constant__ RowCopy copy, const __grid_constant__ CompactPlan plan, Limits limits,
                        int piece_bytes) {
  __shared__ int32_t count_of_block;
  for (int32_t row = static_cast<int32_t>(blockIdx.y); row < plan.rows; row += static_cast<int32_t>(gridDim.y)) {
    // One thread looks, so that all agree, whatever is written meanwhile.
    if (threadIdx.x == 0) count_of_block = min(max(__ldcg(plan.counts + row), 0), plan.top_k);
    __syncthreads();
    const int32_t count = count_of_block;
    const int32_t* const pool_rows = plan.pool_rows + static_cast<int64_t>(row) * plan.top_k;
    const int32_t* const hot_rows = plan.hot_rows + static_cast<int64_t>(row) * plan.top_k;
    if (plan.gathered_bytes != nullptr && blockIdx.x == 0) {
      int32_t moved = 0;
      for (int32_t begin = 0; begin < count; begin += kThreads) {
        const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
        moved += BlockCount(i < count && Clip(__ldcg(hot_rows + i), limits.dst_rows) >= 0 &&
                            Clip(__ldcg(pool_rows + i), limits.src_rows) >= 0);
      }
      if (threadIdx.x == 0) CountBytes(plan.gathered_bytes, uint64_t(moved) * copy.layers.count * copy.row_bytes());
    }
    CopyRows(
        piece_bytes, copy, count, Share{blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads},
        [&](uint32_t i) { return Clip(__ldcg(pool_rows + i), limits.src_rows); },
        [&](uint32_t i) { return Clip(__ldcg(hot_rows + i), limits.dst_rows); });
    __syncthreads();  // all have taken the count
  }
}

struct DensePlan {
  const int32_t* pool_rows;
  const int32_t* hot_rows;
  const int32_t* miss_mask;
  const int32_t* state_rows;
  int32_t top_k;
  int32_t* attention_indices;
  int64_t attention_block_stride;
  int32_t hot_block_rows;
  uint64_t* gathered_bytes;
};

// A block compacts its share of the entries in shared memory, then copies them as a compact list.
__global__ void __launch_bounds__(kThreads)
    GatherDenseKernel(const __grid_constant__ RowCopy copy, const __grid_constant__ DensePlan plan, Limits limits,
                      int piece_bytes, bool first_layers) {
  __shared__ int32_t list_pool[kThreads];
  __shared__ int32_t list_hot[kThreads];
  __shared__ int32_t warp_counts[kThreads / 32];
  const int row = blockIdx.y;
  const bool padding = plan.state_rows != nullptr && plan.state_rows[row] < 0;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint64_t moved = 0;
  for (int32_t begin = blockIdx.x * kThreads; begin < plan.top_k; begin += gridDim.x * kThreads) {
    const int32_t e = begin + static_cast<int32_t>(threadIdx.x);
    const int64_t i = static_cast<int64_t>(row) * plan.top_k + e;
    int32_t hot_row = -1;
    int32_t pool_row = -1;
    bool wanted = false;
    if (e < plan.top_k) {
      hot_row = plan.hot_rows[i];
      if (plan.attention_indices != nullptr && first_layers) {
        const int64_t index = static_cast<int64_t>(hot_row / plan.hot_block_rows) * plan.attention_block_stride +
                              hot_row % plan.hot_block_rows;
        plan.attention_indices[i] = padding || hot_row < 0 || index > INT32_MAX ? -1 : static_cast<int32_t>(index);
      }
      hot_row = Clip(hot_row, limits.dst_rows);
      wanted = !padding && hot_row >= 0 && plan.miss_mask[i] != 0;
      if (wanted) pool_row = Clip(plan.pool_rows[i], limits.src_rows);
    }
    const unsigned ballot = __ballot_sync(~0u, wanted);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    moved += BlockCount(wanted && pool_row >= 0);
    int32_t before = 0;
    int32_t count = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += warp_counts[w];
      count += warp_counts[w];
    }
    if (wanted) {
      const int32_t at = before + __popc(ballot & ((1u << lane) - 1));
      list_pool[at] = pool_row;
      list_hot[at] = hot_row;
    }
    __syncthreads();
    CopyRows(
        piece_bytes, copy, count, Share{threadIdx.x, kThreads}, [&](uint32_t at) { return list_pool[at]; },
        [&](uint32_t at) { return list_hot[at]; });
    __syncthreads();
  }
  if (threadIdx.x == 0) CountBytes(plan.gathered_bytes, moved * copy.layers.count * copy.row_bytes());
}

struct TransferPlan {
  const int32_t* src_rows;
  const int32_t* dst_rows;
  uint64_t* transferred_bytes;
  const uint32_t* skip;
};

__global__ void __launch_bounds__(kThreads)
    TransferKernel(const __grid_constant__ RowCopy copy, const __grid_constant__ TransferPlan plan, int32_t count,
                   Limits limits, int piece_bytes) {
  if (plan.skip != nullptr && __ldcg(plan.skip) != 0) return;
  const auto source_of = [&](uint32_t i) { return Clip(__ldcg(plan.src_rows + i), limits.src_rows); };
  const auto target_of = [&](uint32_t i) {
    return source_of(i) < 0 ? -1 : Clip(__ldcg(plan.dst_rows + i), limits.dst_rows);
  };
  if (plan.transferred_bytes != nullptr && blockIdx.x == 0 && blockIdx.y == 0) {
    uint64_t moved = 0;
    for (int32_t begin = 0; begin < count; begin += kThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      moved += BlockCount(i < count && target_of(static_cast<uint32_t>(i)) >= 0);
    }
    if (threadIdx.x == 0) CountBytes(plan.transferred_bytes, moved * copy.layers.count * copy.row_bytes());
  }
  const Share share = {blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads, static_cast<int32_t>(blockIdx.y),
                       static_cast<int32_t>(gridDim.y)};
  CopyRows(piece_bytes, copy, count, share, source_of, target_of);
}

// Calls `launch` for at most max_layers layers at a time, of which there are LayerPairs::kMax or fewer.
template <typename Launch>
cudaError_t ForLayers(RowCopy copy, const int32_t* src_layers, const int32_t* dst_layers, int32_t count,
                      int32_t max_layers, Launch launch) {
  for (int32_t begin = 0; begin < count; begin += max_layers) {
    copy.layers.count = std::min(max_layers, count - begin);
    for (int32_t l = 0; l < copy.layers.count; ++l) {
      copy.layers.src[l] = static_cast<int16_t>(src_layers[begin + l]);
      copy.layers.dst[l] = static_cast<int16_t>(dst_layers[begin + l]);
    }
    launch(copy, begin == 0);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchGather(const GatherCompactArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  const RowCopy copy = MakeRowCopy(args.pool, args.hot);
  const CompactPlan plan = {args.miss_pool_rows, args.miss_hot_rows, args.miss_counts,
                            args.rows,           args.top_k,         args.gathered_bytes};
  const GatherShape shape = ShapeOfGather(args.rows, args.limits.max_blocks);
  const dim3 grid(static_cast<unsigned>(shape.shares), static_cast<unsigned>(shape.rows));
  const int32_t layers = GatherLayers(args.rows, args.top_k, copy.row_bytes(), args.limits, LayerPairs::kMax);
  return ForLayers(copy, args.layers, args.layers, args.layer_count, layers, [&](const RowCopy& c, bool) {
    GatherCompactKernel<<<grid, kThreads, 0, stream>>>(c, plan, Limits{args.pool_rows, args.hot_rows}, PieceBytes(c));
  });
}

cudaError_t LaunchGather(const GatherDenseArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  const RowCopy copy = MakeRowCopy(args.pool, args.hot);
  const DensePlan plan = {
      args.entry_pool_rows,   args.entry_hot_rows,         args.miss_mask,      args.state_rows,    args.top_k,
      args.attention_indices, args.attention_block_stride, args.hot_block_rows, args.gathered_bytes};
  const int shares = (args.top_k + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(shares), static_cast<unsigned>(args.rows));
  return ForLayers(copy, args.layers, args.layers, args.layer_count, LayerPairs::kMax,
                   [&](const RowCopy& c, bool first) {
                     GatherDenseKernel<<<grid, kThreads, 0, stream>>>(c, plan, Limits{args.pool_rows, args.hot_rows},
                                                                      PieceBytes(c), first);
                   });
}

cudaError_t LaunchTransfer(const TransferArgs& args, cudaStream_t stream) {
  // Pieces of one layer are counted in 32 bits: the longest row has 16,384 of them.
  constexpr int64_t kMaxPairs = 65536;
  const RowCopy copy = MakeRowCopy(args.src, args.dst);
  const Limits limits = {args.src_row_limit, args.dst_row_limit};
  cudaError_t error = cudaSuccess;
  ForTransferParts(
      args.count, args.layer_count, copy.row_bytes(), args.limits, kMaxPairs, LayerPairs::kMax,
      [&](const TransferPart& of_all) {
        if (error != cudaSuccess) return;
        const TransferArgs part = PartOf(args, of_all);
        const int32_t count = static_cast<int32_t>(part.count);
        const TransferPlan plan = {part.src_rows, part.dst_rows, part.transferred_bytes, part.skip};
        error = ForLayers(
            copy, part.src_layers, part.dst_layers, part.layer_count, LayerPairs::kMax, [&](const RowCopy& c, bool) {
              const TransferShape shape =
                  ShapeOfTransfer(int64_t{count} * c.row_bytes(), c.layers.count, kThreads, args.limits.max_blocks);
              const dim3 grid(static_cast<unsigned>(shape.shares), static_cast<unsigned>(shape.layers));
              TransferKernel<<<grid, kThreads, 0, stream>>>(c, plan, count, limits, PieceBytes(c));
            });
      });
  return error;
}

}  // namespace stoker::kernels::cuda
