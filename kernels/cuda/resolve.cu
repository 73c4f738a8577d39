// Resolve, and resolve fused with the gather of its misses. kernels/README.md, section "Residency", is the contract.
//
// A cluster of blocks takes the batch rows of one state row. The first block resolves, for a single row as in
// resolve_single.cuh and else as in resolve_union.cuh; the others copy. They read nothing but what the first one writes
// into their shared memory, so that one that waits costs nothing. One block a sequence could not keep the link busy at
// small batches, and its copies would begin when the resolve has ended. In larger batches than half the
// multiprocessors there are no others: each block copies what it has resolved, and a cluster is two that take turns.
//
// Bound: without misses 3.5 to 6 us, of which 0.6 are the launch, 1 the two trips to memory, the rest instructions of
// one block; with misses the link.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/cuda/doorbell.cuh"
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

// Threads that copy so many rows of a block or more, where many blocks copy: see kMinRowsForFewThreads.
constexpr int32_t kManyRows = 200;
constexpr uint32_t kFewThreads = 256;

// Where the rows of a block's misses come from and go to, in its shared memory. The first of the sources is a header.
struct Lists {
  __device__ Lists(const ResolveKernelArgs& args, char* shared)
      : sources(reinterpret_cast<int2*>(shared + args.single.list)),
        targets(reinterpret_cast<int2*>(shared + args.single.second)),
        few_threads(args.copies_with_few_threads) {}

  template <typename Ready>
  __device__ void Copy(const GatherPart& gather, int32_t rows, Ready ready) const {
    const uint32_t threads = few_threads && rows >= kManyRows ? kFewThreads : kResolveThreads;
    if (threadIdx.x >= threads) return;
    CopyRows(
        gather.piece_bytes, gather.copy, rows, Share{threadIdx.x, threads},
        [this](uint32_t i) { return sources[1 + i].x; }, [this](uint32_t i) { return targets[i].x; }, ready);
  }

  int2* sources;
  int2* targets;
  bool few_threads;
};

// What a block that copies is told.
struct Messages {
  Inbox sources;
  Inbox targets;
};

// The blocks of a cluster that copy: all but the first.
class OtherBlocks {
 public:
  __device__ OtherBlocks(const ResolveKernelArgs& args, const Cluster& cluster, char* shared, Messages* messages)
      : gather_(args.gather),
        cluster_(cluster),
        reciprocal_(args.copier_reciprocal),
        lists_(args, shared),
        messages_(messages) {}

  __device__ void Miss(int32_t number, int32_t pool_row) {
    const uint32_t turn = TurnOf(number);
    messages_->sources.Send(BlockOf(number, turn), lists_.sources + 1 + turn, Clipped(gather_, pool_row, 0));
  }

  // The header: how many rows the block copies.
  __device__ void Misses(int32_t count) const {
    if (!IsBlock()) return;
    const int32_t rows = RowsOf(static_cast<int32_t>(threadIdx.x), count);
    messages_->sources.Send(threadIdx.x, lists_.sources, make_int2(rows, 0));
    // A block without rows ends when the first message is there.
    if (rows > 0) messages_->targets.Close(threadIdx.x, static_cast<uint32_t>(rows));
    messages_->sources.Close(threadIdx.x, static_cast<uint32_t>(rows) + 1);
  }

  __device__ void Target(int32_t number, int32_t pool_row, int32_t hot_row) {
    const int2 pair = Clipped(gather_, pool_row, hot_row);
    moved_ += pair.x >= 0 && pair.y >= 0;
    const uint32_t turn = TurnOf(number);
    messages_->targets.Send(BlockOf(number, turn), lists_.targets + turn, make_int2(pair.y, 0));
  }

  // The header, negative: that the lists of `rows` batch rows are in global memory. By all threads, behind a barrier.
  __device__ void Union(int32_t rows) const {
    if (!IsBlock()) return;
    messages_->sources.Send(threadIdx.x, lists_.sources, make_int2(~rows, 0));
    messages_->sources.CloseAndRelease(threadIdx.x, 1);
  }

  // What such a block does. Returns the number of batch rows that it is to take from global memory.
  __device__ int32_t Serve() const {
    messages_->sources.AwaitClosed();
    WaitForEarlier();  // the block that resolves has, and for the rows that are read now each block must
    const int32_t rows = lists_.sources->x;
    if (rows < 0) return ~rows;
    if (rows > 0) lists_.Copy(gather_, rows, [this] { messages_->targets.AwaitClosed(); });
    return 0;
  }

  // Rows of this thread that are copied, not zero-filled.
  __device__ int32_t moved() const { return moved_; }

 private:
  __device__ bool IsBlock() const { return threadIdx.x > 0 && threadIdx.x < cluster_.blocks; }
  __device__ uint32_t TurnOf(int32_t number) const { return static_cast<uint32_t>(number) * reciprocal_ >> 16; }
  __device__ uint32_t BlockOf(int32_t number, uint32_t turn) const {
    return 1 + static_cast<uint32_t>(number) - turn * (cluster_.blocks - 1);
  }
  __device__ int32_t RowsOf(int32_t block, int32_t count) const {
    const int32_t copiers = static_cast<int32_t>(cluster_.blocks) - 1;
    return static_cast<int32_t>(TurnOf(max(count + copiers - block, 0)));
  }

  const GatherPart& gather_;
  const Cluster& cluster_;
  const uint32_t reciprocal_;
  const Lists lists_;
  Messages* const messages_;
  int32_t moved_ = 0;
};

// A block that copies what it resolves.
class ThisBlock {
 public:
  __device__ ThisBlock(const ResolveKernelArgs& args, char* shared) : gather_(args.gather), lists_(args, shared) {}

  __device__ void Miss(int32_t number, int32_t pool_row) { lists_.sources[1 + number] = Clipped(gather_, pool_row, 0); }
  __device__ void Misses(int32_t) const {}
  __device__ void Target(int32_t number, int32_t pool_row, int32_t hot_row) {
    const int2 pair = Clipped(gather_, pool_row, hot_row);
    moved_ += pair.x >= 0 && pair.y >= 0;
    lists_.targets[number] = make_int2(pair.y, 0);
  }
  // Behind a barrier.
  __device__ void Copy(int32_t rows) const {
    lists_.Copy(gather_, rows, [] {});
  }
  __device__ int32_t moved() const { return moved_; }

 private:
  const GatherPart& gather_;
  const Lists lists_;
  int32_t moved_ = 0;
};

// A share of the rows that the lists of batch rows [first, end) name, for block `rank` of `blocks`.
__device__ void CopyLists(const ResolveArgs& a, const GatherPart& gather, uint32_t rank, uint32_t blocks, int32_t first,
                          int32_t end) {
  for (int32_t r = first; r < end; ++r) {
    const int32_t misses = min(max(__ldcg(a.miss_counts + r), 0), a.top_k);
    const int32_t* const pool_rows = a.miss_pool_rows + static_cast<int64_t>(r) * a.top_k;
    const int32_t* const hot_rows = a.miss_hot_rows + static_cast<int64_t>(r) * a.top_k;
    CopyRows(
        gather.piece_bytes, gather.copy, misses, Share{rank * kResolveThreads + threadIdx.x, blocks * kResolveThreads},
        [&](uint32_t i) { return Clipped(gather, __ldcg(pool_rows + i), 0).x; },
        [&](uint32_t i) { return Clipped(gather, 0, __ldcg(hot_rows + i)).y; });
  }
}

__device__ void CountLists(const ResolveArgs& a, const GatherPart& gather, int32_t first, int32_t end) {
  int32_t moved = 0;
  for (int32_t r = first; r < end; ++r) {
    const int32_t misses = min(max(__ldcg(a.miss_counts + r), 0), a.top_k);
    const int64_t at = static_cast<int64_t>(r) * a.top_k;
    for (int32_t m = static_cast<int32_t>(threadIdx.x); m < misses; m += kResolveThreads) {
      const int2 pair = Clipped(gather, __ldcg(a.miss_pool_rows + at + m), __ldcg(a.miss_hot_rows + at + m));
      moved += pair.x >= 0 && pair.y >= 0;
    }
  }
  __syncwarp();
  CountGathered(gather, moved);
}

struct BlockState {
  Messages messages;
  SingleState single;
  UnionState rows;
  BatchPlace place;
  int32_t union_end;
};

// kSingle false: single rows are resolved as unions too. kTells: the cluster has blocks that copy.
template <IndexSpace kSpace, bool kOptions, bool kSingle, int kTopK, int kHotRows, bool kGather, bool kTells>
__device__ void RunBlock(const ResolveKernelArgs& args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ BlockState state;
  using Single = SingleRow<kSpace, kOptions, kTopK, kHotRows>;
  const ResolveArgs& a = args.a;
  const GatherPart& gather = args.gather;
  const int32_t r = static_cast<int32_t>(blockIdx.y);
  if (r >= a.rows) return;
  const Cluster cluster = kTells ? Cluster{blockIdx.x, gridDim.x} : Cluster{};
  OtherBlocks others(args, cluster, shared, &state.messages);
  if constexpr (kTells) {
    if (threadIdx.x == 0) {
      state.messages.sources.Open();
      state.messages.targets.Open();
    }
    cluster.Arrive();
    if (args.starts_next_early) LetNextStart();
    if (cluster.rank > 0) {
      cluster.Wait();
      const int32_t rows = others.Serve();
      if (rows > 0) CopyLists(a, gather, cluster.rank - 1, cluster.blocks - 1, r, r + rows);
      return;
    }
  } else {
    if (args.starts_next_early) LetNextStart();
  }
  const RowAccess<kSpace, kOptions> access(args);
  Single single(args, shared, &state.single);
  if (kSingle) single.Clear();
  WaitForEarlier();

  int32_t key[Single::kEntries];
  if (kSingle) single.LoadEntries(r, key);
  // One thread looks, here and below at how far the union goes, so that all agree, whatever is written meanwhile.
  if (threadIdx.x == 0) state.place = access.Load(r);
  if (kTells) cluster.Wait();
  __syncthreads();
  const BatchRow row = state.place.row;
  if (row.state_row < 0 || state.place.before == row.state_row) {  // a union's first row takes it
    if (row.state_row < 0) access.EmitPadding(r);
    if (kTells) others.Misses(0);
    return;
  }
  if constexpr (kSingle) {
    if (state.place.after != row.state_row) {
      if constexpr (kTells) {
        single.template Run<true>(r, row, key, others);
        CountGathered(gather, others.moved());
      } else {
        ThisBlock self(args, shared);
        const int32_t misses = single.template Run<kGather>(r, row, key, self);
        if (!kGather || misses == 0) return;
        CountGathered(gather, self.moved());
        __syncthreads();
        if (args.takes_turns) AwaitEndOfFirstBlock();
        self.Copy(misses);
      }
      return;
    }
  }

  if (threadIdx.x == 0) {
    int32_t i = r + 1;
    while (i < a.rows && access.Load(i).row.state_row == row.state_row) ++i;
    state.union_end = i;
  }
  __syncthreads();
  const int32_t end = state.union_end;
  RowUnion<kSpace>(args, shared, &state.rows).Run(r, end, row, [&](int32_t i) {
    BatchRow other = access.Load(i).row;
    if (other.state_row != row.state_row) other.table_row = row.table_row;  // it has changed: its id means nothing
    other.state_row = row.state_row;
    return other;
  });
  if constexpr (kGather) {
    CountLists(a, gather, r, end);
    if constexpr (kTells) {
      __threadfence();
      __syncthreads();
      others.Union(end - r);
    } else {
      CopyLists(a, gather, 0, 1, r, end);
    }
  }
}

template <IndexSpace kSpace, bool kOptions, bool kSingle, int kTopK, int kHotRows, bool kGather, bool kTells>
__global__ void __launch_bounds__(kResolveThreads) ResolveKernel(const __grid_constant__ ResolveKernelArgs args) {
  RunBlock<kSpace, kOptions, kSingle, kTopK, kHotRows, kGather, kTells>(args);
  if constexpr (kGather) {
    if (args.ring.done != nullptr) {
      WaitForEarlier();  // blocks that had nothing to do have not: an earlier kernel may ring by the same counter
      if constexpr (kTells) {
        RingAtEnd(args.ring, Cluster{blockIdx.x, gridDim.x}, gridDim.y);
      } else {
        RingAtEnd(args.ring, Cluster{}, gridDim.x * gridDim.y);
      }
    }
  }
}

using Kernel = void (*)(ResolveKernelArgs);

// Which instance a launch takes: what it can do, and for which shapes it was made.
struct Instance {
  bool options = false;
  bool single = false;
  bool fixed = false;  // for exactly this top_k, and hot_rows twice that
  int32_t top_k = 0;
};

template <IndexSpace kSpace, bool kGather, bool kTells>
Kernel ChooseKernel(const Instance& instance) {
  if (!instance.single) return ResolveKernel<kSpace, true, false, 0, 0, kGather, kTells>;
  if (instance.options) return ResolveKernel<kSpace, true, true, 0, 0, kGather, kTells>;
  if constexpr (kSpace == IndexSpace::kPosition) {
    if (!instance.fixed) return ResolveKernel<kSpace, false, true, 0, 0, kGather, kTells>;
    if (instance.top_k == 2048) return ResolveKernel<kSpace, false, true, 2048, 4096, kGather, kTells>;
    if (instance.top_k == 1024) return ResolveKernel<kSpace, false, true, 1024, 2048, kGather, kTells>;
    return ResolveKernel<kSpace, false, true, 512, 1024, kGather, kTells>;
  }
  return ResolveKernel<kSpace, true, true, 0, 0, kGather, kTells>;
}

// How a launch copies: not at all, each block for itself, or other blocks for the one that resolves.
enum class Copy { kNone, kSelf, kOthers };

template <IndexSpace kSpace>
Kernel ChooseKernel(const Instance& instance, Copy copy) {
  if (copy == Copy::kNone) return ChooseKernel<kSpace, false, false>(instance);
  return copy == Copy::kSelf ? ChooseKernel<kSpace, true, false>(instance) : ChooseKernel<kSpace, true, true>(instance);
}

Kernel ChooseKernel(IndexSpace space, const Instance& instance, Copy copy) {
  return space == IndexSpace::kPoolRow ? ChooseKernel<IndexSpace::kPoolRow>(instance, copy)
                                       : ChooseKernel<IndexSpace::kPosition>(instance, copy);
}

bool HasOptions(const ResolveArgs& a) {
  return a.request_states != nullptr || a.resident_table != nullptr || a.hot_block_table != nullptr ||
         a.attention_indices != nullptr || a.resolved_pool_rows != nullptr || a.miss_mask != nullptr ||
         a.valid_counts != nullptr || a.state_rows.is_int64 || a.lengths.is_int64;
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
      SingleShared::Make(a.residency.hot_rows, a.top_k,
                         a.index_space == IndexSpace::kPosition ? a.block_table_columns : 0, limits.max_shared_bytes);
  args.shared_union = UnionShared::Make(a.residency.hot_rows, a.top_k);
  const auto block_rows = static_cast<uint32_t>(a.block_rows);
  if (std::has_single_bit(block_rows)) args.block_shift = std::countr_zero(block_rows);
  args.pool_blocks = static_cast<uint32_t>(a.pool_rows / a.block_rows);
  return args;
}

// Whether batch rows copy two by two, one behind the other. All at once they keep each other's address translations
// from being found: with 128 sequences 38 GB/s, some of them done after 0.6 ms and others after 1.4, against 45 where
// 64 copy at a time (30 % misses; 2 to 14 %: 4 to 7 % faster; nothing missing: equal). Not where there are clusters
// that copy: of those there are at most 66.
bool TakesTurns(bool gather, int cluster, const DeviceLimits& limits) {
  return gather && cluster == 1 && limits.clusters;
}

// Up to this many batch rows the next kernel of the stream may start at once. It then finds its place while this one
// still runs, on other multiprocessors than last time: with 64 sequences that cost a third of the gather's rate
// (address translations that are kept near a multiprocessor are lost), with 16 nothing.
constexpr int32_t kMaxRowsForEarlyStart = 16;

// From this many batch rows on misses are copied in the order of their positions: 5 to 10 % more of them a second with
// 16 to 64 sequences. It costs a barrier and a scan before the first read; with few sequences the address translations
// of all their rows are at hand anyway.
constexpr int32_t kMinRowsForSorting = 16;

// From this many batch rows on a block that has many rows to copy does so with a quarter of its threads: so many reads
// are under way at one time that more of them only widen what address translations must reach (batch 64, 14 and 30 %
// misses: 293 -> 283 us and 613 -> 603).
constexpr int32_t kMinRowsForFewThreads = 32;

// `cluster`: blocks of one sequence, of which all but one copy.
cudaError_t Launch(ResolveKernelArgs& args, bool gather, int cluster, const DeviceLimits& limits, cudaStream_t stream) {
  const Instance instance = InstanceFor(args);
  // The other blocks' lists are then at the front, since no more shared memory is asked for than a union needs.
  if (!instance.single) args.single = SingleShared{};
  args.starts_next_early = !gather || args.a.rows <= kMaxRowsForEarlyStart;
  args.sorts_misses = args.a.rows >= kMinRowsForSorting;
  args.takes_turns = TakesTurns(gather, cluster, limits);
  args.copies_with_few_threads = args.a.rows >= kMinRowsForFewThreads;
  if (cluster > 1) {
    args.copier_reciprocal = (65536u + static_cast<uint32_t>(cluster) - 2) / (static_cast<uint32_t>(cluster) - 1);
  }
  cudaLaunchConfig_t config = {};
  const unsigned turns = args.takes_turns ? 2 : 1;
  const unsigned rows = static_cast<unsigned>(args.a.rows);
  config.gridDim = dim3(static_cast<unsigned>(cluster), (rows + turns - 1) / turns * turns);
  config.blockDim = dim3(kResolveThreads);
  config.dynamicSmemBytes = static_cast<size_t>(std::max(args.single.bytes, args.shared_union.bytes));
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (cluster > 1 || turns > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = turns;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (limits.clusters) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  const Copy copy = !gather ? Copy::kNone : cluster == 1 ? Copy::kSelf : Copy::kOthers;
  return cudaLaunchKernelEx(&config, ChooseKernel(args.a.index_space, instance, copy), args);
}

}  // namespace

cudaError_t PrepareKernels(const DeviceLimits& limits) {
  std::vector<Instance> instances = {{.options = true}, {.options = true, .single = true}, {.single = true}};
  for (const int32_t top_k : {512, 1024, 2048}) instances.push_back({.single = true, .fixed = true, .top_k = top_k});
  for (const Instance& instance : instances) {
    for (const IndexSpace space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
      for (const Copy copy : {Copy::kNone, Copy::kSelf, Copy::kOthers}) {
        const Kernel kernel = ChooseKernel(space, instance, copy);
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
  ResolveKernelArgs kernel = MakeArgs(args, limits);
  return Launch(kernel, false, 1, limits, stream);
}

cudaError_t LaunchResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather, const RingDoorbellArgs* ring,
                                const DeviceLimits& limits, cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return ring != nullptr ? LaunchRingDoorbell(*ring, stream) : cudaSuccess;
  const ResolveGatherShape shape = ShapeOfResolveGather(args.rows, limits, gather.limits.max_blocks);
  if (!shape.fused) {
    cudaError_t error = LaunchResolve(args, limits, stream);
    if (error == cudaSuccess) error = LaunchGather(gather, stream);
    return error != cudaSuccess || ring == nullptr ? error : LaunchRingDoorbell(*ring, stream);
  }
  ResolveKernelArgs kernel = MakeArgs(args, limits);
  kernel.gather.copy = MakeRowCopy(gather.pool, gather.hot);
  kernel.gather.pool_rows = gather.pool_rows;
  kernel.gather.hot_rows = gather.hot_rows;
  kernel.gather.piece_bytes = PieceBytes(kernel.gather.copy);
  kernel.gather.gathered_bytes = gather.gathered_bytes;
  const int32_t fused = std::min(gather.layer_count, GatherLayers(args.rows, args.top_k, kernel.gather.copy.row_bytes(),
                                                                  gather.limits, LayerPairs::kMax));
  kernel.gather.copy.layers.count = fused;
  for (int32_t l = 0; l < fused; ++l) {
    kernel.gather.copy.layers.src[l] = kernel.gather.copy.layers.dst[l] = static_cast<int16_t>(gather.layers[l]);
  }
  const bool is_whole = fused == gather.layer_count;
  if (ring != nullptr && is_whole) kernel.ring = *ring;
  cudaError_t error = Launch(kernel, true, shape.cluster, limits, stream);
  if (error != cudaSuccess || is_whole) return error;
  GatherCompactArgs rest = gather;
  rest.layers += fused;
  rest.layer_count -= fused;
  error = LaunchGather(rest, stream);
  return error != cudaSuccess || ring == nullptr ? error : LaunchRingDoorbell(*ring, stream);
}

}  // namespace stoker::kernels::cuda
