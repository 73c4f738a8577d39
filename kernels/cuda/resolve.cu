// Resolve, and resolve fused with the gather of its misses. kernels/README.md, section "Residency", is the contract.
//
// A cluster of blocks takes the batch rows of one state row. The first block resolves, for a single row as in
// resolve_single.cuh and else as in resolve_union.cuh; then all blocks copy, a contiguous part of the misses each. The
// part of a single row's list that a block needs is written right into its shared memory. One block a sequence could
// not keep the link busy at small batches.
//
// Bound: without misses 3 to 5 us, of which 0.6 are the launch, 1 the two trips to memory, the rest instructions of one
// block; with misses the link. Between kernels of one stream the launch overlaps with the end of the one before.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/resolve_single.cuh"
#include "kernels/cuda/resolve_union.cuh"

namespace stoker::kernels::cuda {
namespace {

// Rows of a pair that exist.
__device__ int2 Clipped(const GatherPart& gather, int32_t pool_row, int32_t hot_row) {
  return make_int2(pool_row >= 0 && pool_row < gather.pool_rows ? pool_row : kNone,
                   hot_row >= 0 && hot_row < gather.hot_rows ? hot_row : kNone);
}

// Adds the bytes of `rows` rows of this thread. Every thread of the warp calls it.
__device__ void CountGathered(const GatherPart& gather, int32_t rows) {
  if (gather.gathered_bytes == nullptr) return;
  rows = __reduce_add_sync(~0u, rows);
  if (threadIdx.x % 32 == 0 && rows > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(gather.gathered_bytes),
              static_cast<unsigned long long>(rows) * gather.copy.layers.count * gather.copy.row_bytes());
  }
}

// How the blocks of a cluster share the pieces of a layer of `rows` rows: a contiguous part each.
struct Shares {
  __device__ Shares(const GatherPart& gather, const Cluster& cluster, int32_t rows)
      : row_pieces(gather.row_pieces),
        pieces(static_cast<uint32_t>(rows) * row_pieces),
        share((pieces + cluster.blocks - 1) / cluster.blocks) {}

  __device__ uint32_t Begin(uint32_t block) const { return min(block * share, pieces); }
  // Rows of which the block copies a piece.
  __device__ uint32_t Rows(uint32_t block) const {
    const uint32_t begin = Begin(block), end = Begin(block + 1);
    return begin == end ? 0 : (end - 1) / row_pieces - begin / row_pieces + 1;
  }
  __device__ uint32_t FirstBlock(uint32_t row) const { return row * row_pieces / share; }
  __device__ uint32_t LastBlock(uint32_t row) const { return ((row + 1) * row_pieces - 1) / share; }

  uint32_t row_pieces;
  uint32_t pieces;
  uint32_t share;
};

template <typename PairAt>
__device__ void CopyShare(const GatherPart& gather, const Cluster& cluster, int32_t rows, PairAt pair_at) {
  const Shares shares(gather, cluster, rows);
  if (threadIdx.x >= gather.copy_threads) return;
  CopyPieces(gather.piece_bytes, gather.copy, shares.Begin(cluster.rank) + threadIdx.x, shares.Begin(cluster.rank + 1),
             gather.copy_threads, pair_at);
}

// What the first block tells the others: misses of a row that is alone, whose list they have; or, negative, how many
// batch rows (~value) have their lists in global memory.
__device__ void CopyList(const GatherPart& gather, const Cluster& cluster, const int2* list, int32_t misses) {
  CopyShare(gather, cluster, misses, [list](uint32_t i, int32_t* src_row, int32_t* dst_row) {
    const int2 pair = list[i];
    *src_row = pair.x;
    *dst_row = pair.y;
  });
}

__device__ void CopyUnion(const ResolveArgs& a, const GatherPart& gather, const Cluster& cluster, int32_t first,
                          int32_t end) {
  for (int32_t r = first; r < end; ++r) {
    const int32_t misses = min(max(__ldcg(a.miss_counts + r), 0), a.top_k);
    const int64_t at = static_cast<int64_t>(r) * a.top_k;
    const auto pair_of = [&](int32_t m) {
      return Clipped(gather, __ldcg(a.miss_pool_rows + at + m), __ldcg(a.miss_hot_rows + at + m));
    };
    if (cluster.rank == 0) {
      int32_t moved = 0;
      for (int32_t m = static_cast<int32_t>(threadIdx.x); m < misses; m += kResolveThreads) {
        const int2 pair = pair_of(m);
        moved += pair.x >= 0 && pair.y >= 0;
      }
      __syncwarp();
      CountGathered(gather, moved);
    }
    CopyShare(gather, cluster, misses, [&](uint32_t m, int32_t* src_row, int32_t* dst_row) {
      const int2 pair = pair_of(static_cast<int32_t>(m));
      *src_row = pair.x;
      *dst_row = pair.y;
    });
  }
}

struct BlockState {
  Inbox inbox;
  SingleState single;
  UnionState rows;
};

// kSingle false: single rows are resolved as unions too.
template <IndexSpace kSpace, bool kOptions, bool kSingle, int kTopK, int kHotRows, bool kGather>
__global__ void __launch_bounds__(kResolveThreads) ResolveKernel(const __grid_constant__ ResolveKernelArgs args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ BlockState state;
  using Single = SingleRow<kSpace, kOptions, kTopK, kHotRows>;
  const ResolveArgs& a = args.a;
  const Cluster cluster = Cluster::Here();
  // The message to the other blocks: what to copy, then its list.
  int2* const message = reinterpret_cast<int2*>(shared + args.single.list);
  int2* const list = message + 1;
  if (kGather && cluster.blocks > 1) {
    if (threadIdx.x == 0) state.inbox.Open();
    cluster.Arrive();
    if (cluster.rank > 0) {
      LetNextStart();
      const int32_t r = static_cast<int32_t>(blockIdx.x / cluster.blocks);
      cluster.Wait();
      state.inbox.AwaitClosed();
      const int32_t what = message->x;
      if (what >= 0) {
        CopyList(args.gather, cluster, list, what);
      } else {
        CopyUnion(a, args.gather, cluster, r, r + ~what);
      }
      return;
    }
  }
  const int32_t r = static_cast<int32_t>(blockIdx.x / cluster.blocks);
  const RowAccess<kSpace, kOptions> access(args);
  const auto tell = [&](int32_t what, const Shares& shares) {
    if (!kGather || threadIdx.x == 0 || threadIdx.x >= cluster.blocks) return;
    state.inbox.Send(threadIdx.x, message, make_int2(what, 0));
    state.inbox.Close(threadIdx.x, shares.Rows(threadIdx.x) + 1);
  };
  Single single(args, shared, &state.single);
  if (kSingle) single.Clear();
  LetNextStart();
  WaitForEarlier();

  int32_t key[Single::kEntries];
  if (kSingle) single.LoadEntries(r, key);
  int32_t before, after;
  const BatchRow row = access.Load(r, &before, &after);
  if (row.state_row < 0 || before == row.state_row) {  // a union's first row takes it
    if (row.state_row < 0) access.EmitPadding(r);
    if (kGather) cluster.Wait();
    tell(0, Shares(args.gather, cluster, 0));
    return;
  }
  if constexpr (kSingle) {
    if (after != row.state_row) {
      int32_t moved = 0;
      const int32_t misses = single.Run(
          r, row, key,
          [&] {
            if (kGather) cluster.Wait();
          },
          [&](int32_t m, int32_t total, int32_t pool_row, int32_t hot_row) {
            if constexpr (kGather) {
              const int2 pair = Clipped(args.gather, pool_row, hot_row);
              moved += pair.x >= 0 && pair.y >= 0;
              const Shares shares(args.gather, cluster, total);
              const uint32_t last = shares.LastBlock(static_cast<uint32_t>(m));
              for (uint32_t b = shares.FirstBlock(static_cast<uint32_t>(m)); b <= last; ++b) {
                if (b == 0) {
                  list[m] = pair;
                } else {
                  state.inbox.Send(b, list + m, pair);
                }
              }
            }
          });
      if constexpr (kGather) {
        tell(misses, Shares(args.gather, cluster, misses));
        CountGathered(args.gather, moved);
        if (misses == 0) return;
        __syncthreads();
        CopyList(args.gather, cluster, list, misses);
      }
      return;
    }
  }

  int32_t end = r + 1;
  int32_t unused;
  while (end < a.rows && access.Load(end, &unused, &unused).state_row == row.state_row) ++end;
  RowUnion<kSpace>(args, shared, &state.rows).Run(r, end, row, [&](int32_t i) {
    return access.Load(i, &unused, &unused);
  });
  if constexpr (kGather) {
    cluster.Wait();
    if (cluster.blocks > 1) __threadfence();
    __syncthreads();
    tell(~(end - r), Shares(args.gather, cluster, 0));
    CopyUnion(a, args.gather, cluster, r, end);
  }
}

using Kernel = void (*)(ResolveKernelArgs);

// Blocks of one sequence. Sixteen (which a kernel must ask for) against the portable eight: see kernels/README.md.
constexpr int kMaxCluster = 16;

// Which instance a launch takes: what it can do, and for which shapes it was made.
struct Instance {
  bool options = false;
  bool single = false;
  bool fixed = false;  // for exactly this top_k, and hot_rows twice that
  int32_t top_k = 0;
};

template <IndexSpace kSpace, bool kGather>
Kernel ChooseKernel(const Instance& instance) {
  if (!instance.single) return ResolveKernel<kSpace, true, false, 0, 0, kGather>;
  if (instance.options) return ResolveKernel<kSpace, true, true, 0, 0, kGather>;
  if constexpr (kSpace == IndexSpace::kPosition) {
    if (!instance.fixed) return ResolveKernel<kSpace, false, true, 0, 0, kGather>;
    if (instance.top_k == 2048) return ResolveKernel<kSpace, false, true, 2048, 4096, kGather>;
    if (instance.top_k == 1024) return ResolveKernel<kSpace, false, true, 1024, 2048, kGather>;
    return ResolveKernel<kSpace, false, true, 512, 1024, kGather>;
  }
  return ResolveKernel<kSpace, true, true, 0, 0, kGather>;
}

Kernel ChooseKernel(IndexSpace space, const Instance& instance, bool gather) {
  if (space == IndexSpace::kPoolRow) {
    return gather ? ChooseKernel<IndexSpace::kPoolRow, true>(instance)
                  : ChooseKernel<IndexSpace::kPoolRow, false>(instance);
  }
  return gather ? ChooseKernel<IndexSpace::kPosition, true>(instance)
                : ChooseKernel<IndexSpace::kPosition, false>(instance);
}

bool HasOptions(const ResolveArgs& a) {
  return a.request_states != nullptr || a.resident_table != nullptr || a.hot_block_table != nullptr ||
         a.attention_indices != nullptr || a.resolved_pool_rows != nullptr || a.miss_mask != nullptr ||
         a.valid_counts != nullptr;
}

Instance InstanceFor(const ResolveKernelArgs& args) {
  const int32_t top_k = args.a.top_k;
  const int32_t hot_rows = args.a.residency.hot_rows;
  Instance instance;
  instance.options = HasOptions(args.a) || args.block_shift < 0;
  instance.single = args.single.bytes > 0 && reinterpret_cast<uintptr_t>(args.a.residency.slot_key) % 16 == 0;
  instance.fixed = hot_rows == 2 * top_k && (top_k == 512 || top_k == 1024 || top_k == 2048);
  instance.top_k = top_k;
  return instance;
}

ResolveKernelArgs MakeArgs(const ResolveArgs& a, const DeviceLimits& limits) {
  ResolveKernelArgs args;
  args.a = a;
  args.single =
      SingleShared::Make(a.residency.hot_rows, a.top_k, a.index_space == IndexSpace::kPosition ? a.block_table_columns : 0,
                         limits.max_shared_bytes);
  args.shared_union = UnionShared::Make(a.residency.hot_rows, a.top_k);
  const auto block_rows = static_cast<uint32_t>(a.block_rows);
  if (std::has_single_bit(block_rows)) args.block_shift = std::countr_zero(block_rows);
  args.pool_blocks = static_cast<uint32_t>(a.pool_rows / a.block_rows);
  return args;
}

cudaError_t Launch(const ResolveKernelArgs& args, bool gather, int cluster, const DeviceLimits& limits,
                   cudaStream_t stream) {
  const Instance instance = InstanceFor(args);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(args.a.rows * cluster));
  config.blockDim = dim3(kResolveThreads);
  config.dynamicSmemBytes = static_cast<size_t>(std::max(instance.single ? args.single.bytes : 0, args.shared_union.bytes));
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (limits.clusters && !(getenv("PDL") && atoi(getenv("PDL")) == 0)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, ChooseKernel(args.a.index_space, instance, gather), args);
}

// As many blocks for each sequence as keep the whole batch on the device at once.
int ClusterSize(int32_t rows, const DeviceLimits& limits) {
  if (!limits.clusters) return 1;
  int cluster = 1;
  const int kmc = getenv("CL") ? atoi(getenv("CL")) : kMaxCluster;
  while (cluster < kmc && rows * cluster * 2 <= limits.multiprocessors) cluster *= 2;
  return cluster;
}

}  // namespace

cudaError_t PrepareKernels(const DeviceLimits& limits) {
  std::vector<Instance> instances = {{.options = true}, {.options = true, .single = true}, {.single = true}};
  for (const int32_t top_k : {512, 1024, 2048}) instances.push_back({.single = true, .fixed = true, .top_k = top_k});
  for (const Instance& instance : instances) {
    for (const IndexSpace space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
      for (const bool gather : {false, true}) {
        const Kernel kernel = ChooseKernel(space, instance, gather);
        cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.max_shared_bytes);
        if (error == cudaSuccess && limits.clusters) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        }
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchResolve(const ResolveArgs& args, const DeviceLimits& limits, cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  return Launch(MakeArgs(args, limits), false, 1, limits, stream);
}

cudaError_t LaunchResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather, const DeviceLimits& limits,
                                cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  ResolveKernelArgs kernel = MakeArgs(args, limits);
  kernel.gather.copy = MakeRowCopy(gather.pool, gather.hot);
  kernel.gather.pool_rows = gather.pool_rows;
  kernel.gather.hot_rows = gather.hot_rows;
  kernel.gather.piece_bytes = PieceBytes(kernel.gather.copy);
  kernel.gather.gathered_bytes = gather.gathered_bytes;
  kernel.gather.row_pieces = static_cast<uint32_t>(kernel.gather.copy.row_bytes() / kernel.gather.piece_bytes);
  kernel.gather.copy_threads = getenv("CT") ? atoi(getenv("CT")) : 1024;
  const int32_t fused = std::min(gather.layer_count, LayerPairs::kMax);
  kernel.gather.copy.layers.count = fused;
  for (int32_t l = 0; l < fused; ++l) {
    kernel.gather.copy.layers.src[l] = kernel.gather.copy.layers.dst[l] = static_cast<int16_t>(gather.layers[l]);
  }
  const cudaError_t error = Launch(kernel, true, ClusterSize(args.rows, limits), limits, stream);
  if (error != cudaSuccess || fused == gather.layer_count) return error;
  GatherCompactArgs rest = gather;
  rest.layers += fused;
  rest.layer_count -= fused;
  return LaunchGather(rest, limits, stream);
}

}  // namespace stoker::kernels::cuda
