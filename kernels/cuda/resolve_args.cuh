// What a resolve kernel gets, and what a batch row means: its state row, its rows in the pool and in the hot cache, its
// outputs.
//
// Every value read from entries, tables and residency is read once and checked before it is followed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/resolve_shared.cuh"
#include "kernels/cuda/row_copy.cuh"
#include "kernels/plane.h"
#include "kernels/resolve.h"

namespace stoker::kernels::cuda {

// The gather of a fused kernel.
struct GatherPart {
  RowCopy copy;
  int64_t pool_rows = 0;
  int64_t hot_rows = 0;
  int32_t piece_bytes = 0;
  uint64_t* gathered_bytes = nullptr;
};

struct ResolveKernelArgs {
  ResolveArgs a;
  SingleShared single;
  UnionShared shared_union;
  // log2 of block_rows, or -1: a division costs more than all other arithmetic of an entry.
  int32_t block_shift = -1;
  // Whole blocks of the pool. No block above has rows, and no row of these overflows.
  uint32_t pool_blocks = 0;
  // Whether the next kernel may start before this one has told whether it has misses: see LetNextStart.
  bool starts_next_early = false;
  // Whether misses are copied in the order of their positions, and many of them by fewer threads: see
  // kMinRowsForSorting and kMinRowsForFewThreads.
  bool sorts_misses = false;
  bool copies_with_few_threads = false;
  // Whether two batch rows are a cluster of two blocks, the second of which copies when the first has: see TakesTurns.
  bool takes_turns = false;
  // ceil(2^16 / (blocks of a cluster - 1)): divides numbers of misses among the blocks that copy.
  uint32_t copier_reciprocal = 0;
  GatherPart gather;
  // Rung when all blocks have ended; `done` null: nothing is.
  RingDoorbellArgs ring;
};

#ifdef __CUDACC__

inline constexpr int32_t kNone = -1;

// What a batch row is: state row, row of the block tables (no table has more rows than INT32_MAX), length.
struct BatchRow {
  int32_t state_row;
  int32_t table_row;
  int32_t length;
};

// A batch row, and the state rows of those before and after it: kNone for padding, and where there is none.
struct BatchPlace {
  BatchRow row;
  int32_t before;
  int32_t after;
};

// Loads at this place: the compiler would put a load behind the branch that decides whether it is needed, and make two
// trips to memory of one.
__device__ inline int32_t LoadNow(const int32_t* address) {
  int32_t value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ inline long long LoadNow(const long long* address) {
  long long value;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// Clamped to 32 bits, which no id and no length exceeds that means anything.
__device__ inline int32_t Clamped(long long value) {
  return static_cast<int32_t>(min(max(value, -1ll), static_cast<long long>(INT32_MAX)));
}

// The batch as the kernel's arguments describe it, and the outputs of one state row.
template <IndexSpace kSpace, bool kOptions>
class RowAccess {
 public:
  static constexpr bool kPosition = kSpace == IndexSpace::kPosition;

  __device__ explicit RowAccess(const ResolveKernelArgs& args)
      : a_(args.a), shift_(args.block_shift), pool_blocks_(args.pool_blocks) {}

  // Batch row r and its neighbours. All that needs one trip to memory is asked for at once. Without options ids and
  // lengths have 32 bits. Who writes the batch may change it meanwhile: what a block must agree on, one thread loads.
  __device__ BatchPlace Load(int32_t r) const {
    const int32_t at[3] = {max(r - 1, 0), r, min(r + 1, a_.rows - 1)};
    int32_t id[3];
    int32_t length = 0;
    if constexpr (kPosition) {
      length = kOptions && a_.lengths.is_int64 ? Clamped(LoadNow(static_cast<const long long*>(a_.lengths.data) + r))
                                               : LoadNow(static_cast<const int32_t*>(a_.lengths.data) + r);
    }
    if (kOptions && a_.state_rows.is_int64) {
#pragma unroll
      for (int i = 0; i < 3; ++i) id[i] = Clamped(LoadNow(static_cast<const long long*>(a_.state_rows.data) + at[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 3; ++i) id[i] = LoadNow(static_cast<const int32_t*>(a_.state_rows.data) + at[i]);
    }
    const int32_t real = a_.real_rows == nullptr ? a_.rows : min(__ldcg(a_.real_rows), a_.rows);
    BatchPlace place;
    place.row.length = max(length, 0);
    place.row.table_row = id[1];
    place.row.state_row = r < real ? StateRowOf(id[1]) : kNone;
    place.before = r > 0 ? StateRowOf(id[0]) : kNone;
    place.after = r + 1 < real ? StateRowOf(id[2]) : kNone;
    return place;
  }

  __device__ uint32_t BlockOf(uint32_t row) const {
    // Without options block_rows is a power of 2.
    return !kOptions || shift_ >= 0 ? row >> shift_ : row / static_cast<uint32_t>(a_.block_rows);
  }
  __device__ uint32_t RestOf(uint32_t row, uint32_t block) const {
    return row - block * static_cast<uint32_t>(a_.block_rows);
  }

  // Columns of the block table that row `table_row` has.
  __device__ int32_t TableColumns(int32_t table_row) const {
    return table_row < a_.block_table_rows ? a_.block_table_columns : 0;
  }
  __device__ const int32_t* Table(int32_t table_row) const {
    return a_.block_table + int64_t{table_row} * a_.block_table_stride;
  }

  // Pool row of row `rest` of the block that a block table gave.
  __device__ int32_t PoolRow(int32_t block, uint32_t rest) const {
    const uint32_t row = static_cast<uint32_t>(block) * static_cast<uint32_t>(a_.block_rows) + rest;
    const bool exists = static_cast<uint32_t>(block) <= pool_blocks_ && block != a_.null_block &&
                        row < static_cast<uint32_t>(a_.pool_rows);
    return exists ? static_cast<int32_t>(row) : kNone;
  }

  __device__ int32_t PoolRowOf(const BatchRow& row, int32_t position) const {
    const uint32_t column = BlockOf(static_cast<uint32_t>(position));
    if (column >= static_cast<uint32_t>(TableColumns(row.table_row))) return kNone;
    return PoolRow(__ldcg(Table(row.table_row) + column), RestOf(static_cast<uint32_t>(position), column));
  }

  __device__ int32_t ResidentRowOf(const BatchRow& row, int32_t position) const {
    if (!kOptions || a_.resident_table == nullptr || row.table_row >= a_.resident_rows) return kNone;
    const uint32_t column = BlockOf(static_cast<uint32_t>(position));
    if (column >= static_cast<uint32_t>(a_.resident_columns)) return kNone;
    return PagedRow(__ldcg(a_.resident_table + int64_t{row.table_row} * a_.resident_stride + column), a_.block_rows,
                    RestOf(static_cast<uint32_t>(position), column), a_.resident_null_block, int64_t{INT32_MAX} + 1);
  }

  // Whether a POOL_ROW key may be named by the state row.
  __device__ bool Allowed(int32_t state_row, int32_t pool_row) const {
    if (pool_row >= a_.pool_rows) return false;
    if (a_.allowed_blocks == nullptr) return true;
    const uint32_t block = BlockOf(static_cast<uint32_t>(pool_row));
    if (block / 64 >= a_.allowed_stride) return false;
    return a_.allowed_blocks[state_row * a_.allowed_stride + block / 64] >> (block % 64) & 1;
  }

  __device__ int32_t NewestPoolRow(int32_t r) const {
    return kPosition || a_.newest_pool_rows == nullptr ? kNone : __ldcg(a_.newest_pool_rows + r);
  }

  // Hot row of a logical row of the state row's region.
  __device__ int32_t PhysicalRow(const BatchRow& row, int64_t logical) const {
    if (!kOptions || a_.hot_block_table == nullptr) {
      return logical < a_.region_rows ? row.state_row * a_.region_rows + static_cast<int32_t>(logical) : kNone;
    }
    if (logical > INT32_MAX) return kNone;
    const uint32_t column = static_cast<uint32_t>(logical) / static_cast<uint32_t>(a_.hot_block_rows);
    if (column >= a_.hot_block_stride) return kNone;
    return PagedRow(__ldcg(a_.hot_block_table + int64_t{row.table_row} * a_.hot_block_stride + column),
                    a_.hot_block_rows, static_cast<uint32_t>(logical) % static_cast<uint32_t>(a_.hot_block_rows), kNone,
                    int64_t{INT32_MAX} + 1);
  }

  // Writes the outputs of entry i of batch row r.
  __device__ void Emit(int32_t r, int32_t i, int32_t hot_row, int32_t pool_row, int32_t miss) const {
    a_.hot_rows_out[r * a_.hot_rows_out_stride + i] = hot_row;
    if constexpr (kOptions) {
      if (a_.attention_indices != nullptr) {
        int64_t index = kNone;
        if (hot_row >= 0) {
          index = static_cast<int64_t>(hot_row / a_.hot_block_rows) * a_.attention_block_stride +
                  hot_row % a_.hot_block_rows;
          if (index > INT32_MAX) index = kNone;
        }
        a_.attention_indices[r * a_.attention_stride + i] = static_cast<int32_t>(index);
      }
      const int64_t flat = static_cast<int64_t>(r) * a_.top_k + i;
      if (a_.resolved_pool_rows != nullptr) a_.resolved_pool_rows[flat] = pool_row;
      if (a_.miss_mask != nullptr) a_.miss_mask[flat] = miss;
    }
  }

  // Miss m of batch row r, where the lists are wanted.
  __device__ void EmitMiss(int32_t r, int32_t m, int32_t hot_row, int32_t pool_row) const {
    if (a_.miss_counts == nullptr) return;
    const int64_t at = static_cast<int64_t>(r) * a_.top_k + m;
    a_.miss_pool_rows[at] = pool_row;
    a_.miss_hot_rows[at] = hot_row;
  }

  __device__ void EmitCount(int32_t r, int32_t outcome, int32_t count) const {
    if (a_.counts != nullptr) a_.counts[static_cast<int64_t>(r) * kOutcomes + outcome] = count;
    if (outcome == kMiss && a_.miss_counts != nullptr) a_.miss_counts[r] = count;
    if (outcome == kMiss && a_.told_miss_counts != nullptr) a_.told_miss_counts[r] = count;
    AddStat(outcome, count);
  }

  __device__ void EmitValid(int32_t r, int32_t valid) const {
    if (a_.valid_counts != nullptr) a_.valid_counts[r * a_.valid_count_stride] = valid;
  }

  __device__ void AddStat(int32_t stat, int32_t value) const {
    if (a_.stats != nullptr && value != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(a_.stats + stat), static_cast<unsigned long long>(value));
    }
  }

  // A padding row: the whole block writes it.
  __device__ void EmitPadding(int32_t r) const {
    for (int32_t i = threadIdx.x; i < a_.top_k; i += kResolveThreads) Emit(r, i, kNone, kNone, 0);
    if (threadIdx.x < kOutcomes) EmitCount(r, static_cast<int32_t>(threadIdx.x), 0);
    if (threadIdx.x == 0) EmitValid(r, 0);
  }

 private:
  // State row of a request, or of itself.
  __device__ int32_t StateRowOf(int32_t id) const {
    int32_t state_row = id;
    if (kOptions && a_.request_states != nullptr) {
      if (id < 0 || id >= a_.request_count) return kNone;
      state_row = __ldcg(a_.request_states + id);
    }
    return static_cast<uint32_t>(state_row) < static_cast<uint32_t>(a_.residency.state_rows) ? state_row : kNone;
  }

  __device__ static int32_t PagedRow(int32_t block, int32_t block_rows, uint32_t rest, int32_t null_block,
                                     int64_t limit) {
    if (block < 0 || block == null_block) return kNone;
    const int64_t paged = static_cast<int64_t>(block) * block_rows + rest;
    return paged < limit ? static_cast<int32_t>(paged) : kNone;
  }

  const ResolveArgs& a_;
  const int32_t shift_;
  const uint32_t pool_blocks_;
};

#endif  // __CUDACC__

}  // namespace stoker::kernels::cuda
