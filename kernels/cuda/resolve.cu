// Resolve, and resolve fused with the gather of its misses. kernels/README.md, section "Residency", is the contract.
//
// One cluster of blocks takes one union (all batch rows of a state row). In the usual case of one batch row, every
// block of the cluster resolves for itself, from the same state, into its shared memory; then all blocks share the
// copies, and the first one publishes outputs and state. That costs reads that the L2 cache serves, and saves what a
// hand-over between blocks would cost: with few sequences it is the latency of this chain that decides, not its work.
// The state is written only when all blocks have read it (cluster barrier).
//
// A union is resolved in three passes, as on the CPU:
//   1. every entry: all outcomes but misses are final; hits are marked in a bitmap, the others go into a table of keys;
//   2. the LRU order once: with the number of hits known, one scan over "stale or hit" gives every slot its new place
//   and every
//      stale slot its rank;
//   3. the misses in entry order: the first entry of a key with miss rank m takes the stale slot of rank m.
// A larger union, and one whose miss list does not fit into shared memory, is resolved by the first block alone: pass 1
// marks the hits of all its rows, pass 3 goes through the rows one after the other, and then all blocks copy what its
// lists name.
//
// Expected bound: about eight dependent trips to L2 (0.6 us each) and six barriers, 4 us; then the link.
//
// Invariants: as in cpu/resolve.cc. Every value read from residency, entries and tables is read once and checked.
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/resolve_shared.cuh"
#include "kernels/cuda/row_copy.cuh"

namespace stoker::kernels::cuda {
namespace {

constexpr int32_t kNone = -1;

struct GatherPart {
  RowCopy copy;
  int64_t pool_rows = 0;
  int64_t hot_rows = 0;
  int32_t piece_bytes = 0;
  uint64_t* gathered_bytes = nullptr;
};

struct KernelArgs {
  ResolveArgs a;
  ResolveShared shared;
  GatherPart gather;
};

__device__ int64_t LoadInt(const IntArray& array, int32_t index) {
  return array.is_int64 ? __ldcg(static_cast<const long long*>(array.data) + index)
                        : static_cast<int64_t>(__ldcg(static_cast<const int32_t*>(array.data) + index));
}

// What a batch row is: state row, row of the block tables, length.
struct BatchRow {
  int32_t state_row = kNone;
  int64_t table_row = kNone;
  int64_t length = 0;
};

__device__ int32_t RealRows(const ResolveArgs& a) {
  return a.real_rows == nullptr ? a.rows : min(__ldcg(a.real_rows), a.rows);
}

__device__ int32_t StateRowOf(const ResolveArgs& a, int32_t r, int64_t* table_row) {
  const int64_t id = LoadInt(a.state_rows, r);
  int64_t state_row = id;
  if (a.request_states != nullptr) {
    if (id < 0 || id >= a.request_count) return kNone;
    state_row = __ldcg(a.request_states + id);
  }
  *table_row = id;
  return state_row < 0 || state_row >= a.residency.state_rows ? kNone : static_cast<int32_t>(state_row);
}

struct Counters {
  int32_t outcome[kOutcomes];
  int32_t valid;
  int32_t evictions;
  int32_t repairs;
};

template <IndexSpace kSpace>
class Resolver {
 public:
  static constexpr bool kPosition = kSpace == IndexSpace::kPosition;
  // Indices into `totals`: distinct slots of the order, stale slots, misses that want a slot, and entries that do.
  enum { kSeen, kStaleTotal, kPending, kPendingEntries, kTotals };

  __device__ Resolver(const KernelArgs& args, char* shared, Counters* counters, int32_t* totals, bool publishes)
      : a_(args.a),
        table_(shared, args.shared),
        lru_(reinterpret_cast<int16_t*>(shared + args.shared.lru)),
        stale_(reinterpret_cast<int16_t*>(shared + args.shared.stale)),
        key_(reinterpret_cast<int32_t*>(shared + args.shared.key)),
        found_(reinterpret_cast<uint16_t*>(shared + args.shared.found)),
        hit_bits_(reinterpret_cast<uint32_t*>(shared + args.shared.hit_bits)),
        seen_bits_(reinterpret_cast<uint32_t*>(shared + args.shared.seen_bits)),
        slot_counts_(reinterpret_cast<int32_t*>(shared + args.shared.slot_counts)),
        entry_counts_(reinterpret_cast<int32_t*>(shared + args.shared.entry_counts)),
        entry_pool_(args.shared.miss_pool == 0 ? nullptr : reinterpret_cast<int32_t*>(shared + args.shared.entry_pool)),
        miss_key_(args.shared.miss_pool == 0 ? nullptr : reinterpret_cast<int32_t*>(shared + args.shared.miss_key)),
        miss_pool_(args.shared.miss_pool == 0 ? nullptr : reinterpret_cast<int32_t*>(shared + args.shared.miss_pool)),
        miss_hot_(args.shared.miss_pool == 0 ? nullptr : reinterpret_cast<int32_t*>(shared + args.shared.miss_hot)),
        counters_(counters),
        totals_(totals),
        publishes_(publishes),
        n_(args.a.residency.hot_rows),
        k_(args.a.top_k) {}

  __device__ void SelectState(int32_t state_row) {
    state_row_ = state_row;
    slot_key_ = a_.residency.slot_key + static_cast<int64_t>(state_row) * n_;
    global_lru_ = a_.residency.lru + static_cast<int64_t>(state_row) * n_;
    if (kPosition) slot_of_ = a_.residency.slot_of + state_row * a_.residency.slot_of_stride;
  }

  // Brings the LRU order into shared memory and clears what is counted in. Ends without a barrier.
  __device__ void Begin() {
    for (int32_t i = threadIdx.x; i < (n_ + 31) / 32; i += kResolveThreads) hit_bits_[i] = seen_bits_[i] = 0;
    table_.Clear();
    if (threadIdx.x == 0) {
      *counters_ = Counters{};
      totals_[kPendingEntries] = 0;
    }
    if (n_ % 8 == 0 && reinterpret_cast<uintptr_t>(global_lru_) % 16 == 0) {
      const uint4* const from = reinterpret_cast<const uint4*>(global_lru_);
      uint4* const to = reinterpret_cast<uint4*>(lru_);
      for (int32_t i = threadIdx.x; i < n_ / 8; i += kResolveThreads) to[i] = __ldcg(from + i);
    } else {
      for (int32_t i = threadIdx.x; i < n_; i += kResolveThreads) lru_[i] = __ldcg(global_lru_ + i);
    }
  }

  // What a look at the entries of a batch row is for.
  enum class Look {
    kOnly,  // the union's only row: marks hits, tells all outcomes but misses, puts the rest into the table
    kMark,  // pass 1 of a larger union: marks hits
    kTell,  // pass 3 of it: tells outcomes; a slot without a hit mark was given to the key by an earlier row
  };

  // What global memory says about an entry. The trips for several entries are under way together: one after the other,
  // the eight trips of two entries took as long as the rest of the kernel.
  struct Seen {
    int32_t key = kNone;
    int32_t pool_row = kNone;
    int32_t resident_row = kNone;
    int32_t slot = kNone;
  };
  static constexpr int kTogether = 4;

  // Entries begin + u * threads of a batch row.
  __device__ void LoadKeys(int32_t r, int32_t begin, Seen (&seen)[kTogether]) const {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int32_t i = begin + u * kResolveThreads;
      seen[u].key = i < k_ ? __ldcg(a_.entries + r * a_.entry_stride + i) : kNone;
    }
  }

  __device__ void LookUp(const BatchRow& row, Seen (&seen)[kTogether]) const {
    int32_t slot[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int32_t key = seen[u].key;
      const bool within = key >= 0 && key < row.length;
      slot[u] = within && key < a_.residency.slot_of_stride ? __ldcg(slot_of_ + key) : kNone;
      seen[u].pool_row = within ? PoolRowOf(row, key) : kNone;
      seen[u].resident_row = within ? ResidentRowOf(row, key) : kNone;
    }
    int32_t slot_key[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      slot_key[u] = slot[u] >= 0 && slot[u] < n_ ? __ldcg(slot_key_ + slot[u]) : kNone;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) seen[u].slot = slot_key[u] >= 0 && slot_key[u] == seen[u].key ? slot[u] : kNone;
  }

  // Behind a barrier, with an empty table. `seen` may hold the keys of the first entries already. Ends with a barrier.
  template <Look kLook>
  __device__ void Classify(int32_t r, const BatchRow& row, int64_t base, Seen (&seen)[kTogether], bool loaded) {
    if constexpr (!kPosition) FindKeys<kLook>(r, row);
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    int32_t pending = 0;
    for (int32_t begin = threadIdx.x; begin < k_; begin += kTogether * kResolveThreads) {
      if constexpr (kPosition) {
        if (!loaded) LoadKeys(r, begin, seen);
        loaded = false;
        LookUp(row, seen);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int32_t i = begin + u * kResolveThreads;
        if (i >= k_) continue;
        const int32_t key = kPosition ? seen[u].key : key_[i];
        if (key < 0) {
          // POOL_ROW has told these already, and its keys are final.
          if constexpr (kPosition) {
            key_[i] = kFinal;
            if (kLook != Look::kMark) Emit(r, i, kNone, kNone, 0, &valid);
          }
          continue;
        }
        Outcome outcome = kHot;
        int32_t hot_row = kNone;
        int32_t pool_row = key;
        int32_t slot = kNone;
        bool looks_for_slot = true;
        if constexpr (kPosition) {
          const int64_t newest = key - (base - 1);
          pool_row = seen[u].pool_row;
          if (pool_row < 0 && seen[u].resident_row < 0) {
            outcome = kInvalid;
            looks_for_slot = false;
          } else if (newest >= 0) {
            hot_row = PhysicalRow(row, a_.newest_row + newest);
            outcome = hot_row >= 0 ? kNewest : kInvalid;
            looks_for_slot = false;
          } else if (seen[u].resident_row >= 0) {
            hot_row = seen[u].resident_row;
            outcome = kResident;
            looks_for_slot = false;
          } else {
            slot = seen[u].slot;
          }
        } else {
          const uint16_t there = found_[table_.First(key)];
          slot = there == kNoSlot ? kNone : there;
        }
        if (looks_for_slot && slot < 0) {
          key_[i] = key;
          if (entry_pool_ != nullptr) entry_pool_[i] = pool_row;
          ++pending;
          if constexpr (kPosition && kLook != Look::kMark) {
            found_[i] = kNoSlot;
            table_.Insert(i);
          }
          continue;
        }
        key_[i] = key | kFinal;
        if (slot >= 0) {
          if constexpr (kLook == Look::kTell) {
            if (IsHit(slot)) {
              atomicOr(seen_bits_ + slot / 32, 1u << (slot % 32));
            } else {
              outcome = kDuplicate;
            }
          } else {
            atomicOr(hit_bits_ + slot / 32, 1u << (slot % 32));
          }
          hot_row = PhysicalRow(row, slot);
        }
        if constexpr (kLook != Look::kMark) {
          ++counts[outcome];
          Emit(r, i, hot_row, outcome == kInvalid ? kNone : pool_row, 0, &valid);
        }
      }
    }
    if constexpr (kLook != Look::kMark) {
      AddCounts(counts, valid);
      const int32_t sum = __reduce_add_sync(~0u, pending);
      if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(totals_ + kPendingEntries, sum);
    }
    __syncthreads();
  }

  // Resolves all batch rows [first, end) of the state row in this block alone. `load` gives a batch row.
  template <typename Load>
  __device__ void RunUnion(int32_t first, int32_t end, int64_t base, Load load) {
    Begin();
    __syncthreads();
    for (int32_t r = first; r < end; ++r) {
      Seen seen[kTogether];
      Classify<Look::kMark>(r, load(r), base, seen, false);
      if (!kPosition) {
        table_.Clear();
        __syncthreads();
      }
    }
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) key_[i] = kFinal;
    __syncthreads();
    Count(true);
    RankStale(n_);
    for (int32_t i = threadIdx.x; i < (n_ + 31) / 32; i += kResolveThreads) seen_bits_[i] = 0;
    __syncthreads();
    int32_t taken = 0;
    int32_t told = 0;
    for (int32_t r = first; r < end; ++r) {
      const BatchRow row = load(r);
      Seen seen[kTogether];
      Classify<Look::kTell>(r, row, base, seen, false);
      if (threadIdx.x < 32) told = SettleHits(seen_bits_, told);
      Count(false);
      taken += Assign(r, row, taken, [] {});
      PublishCounts(r);
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int o = 0; o < kOutcomes; ++o) counters_->outcome[o] = 0;
        counters_->valid = 0;
        totals_[kPendingEntries] = 0;
      }
      table_.Clear();
      __syncthreads();
    }
    PublishOrder(taken);
    PublishStats();
  }

  // Counts pending first entries by warp and, with `slots`, stale slots too; then scans. Repairs an order that is no
  // permutation. Sets stale_total and misses. Ends with a barrier.
  __device__ void Count(bool slots) {
    CountPending();
    if (slots) CountStale();
    __syncthreads();
    Scan(slots);
    __syncthreads();
    if (slots && totals_[kSeen] != n_) {
      Repair();
      CountPending();  // the scan has replaced the counts
      CountStale();
      __syncthreads();
      Scan(true);
      __syncthreads();
    }
  }

  // Fills `stale` with the slots of stale ranks below `limit`. Ends with a barrier.
  __device__ void RankStale(int32_t limit) {
    const int lane = threadIdx.x % 32;
    for (int32_t begin = 0; begin < n_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= n_) break;
      const bool stale = i < n_ && !IsHit(lru_[i]);
      const unsigned ballot = __ballot_sync(~0u, stale);
      const int32_t rank = slot_counts_[i / 32] + __popc(ballot & ((1u << lane) - 1));
      if (stale && rank < limit) stale_[rank] = lru_[i];
    }
    __syncthreads();
  }

  // Pass 3 of one batch row: gives pending entries their slots, which are the stale ones from rank `taken` on, and
  // writes the misses into the lists. Publishing blocks write outputs and, when `state_free` says so, the state. Ends
  // with a barrier. Returns the number of misses that got a slot.
  template <typename StateFree>
  __device__ int32_t Assign(int32_t r, const BatchRow& row, int32_t taken, StateFree state_free) {
    const int lane = threadIdx.x % 32;
    const int32_t left = totals_[kStaleTotal] - taken;
    const int32_t misses = min(totals_[kPending], max(left, 0));
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    for (int32_t begin = 0; begin < k_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= k_) break;
      const bool first = IsPendingFirst(i);
      const unsigned ballot = __ballot_sync(~0u, first);
      if (!first) continue;
      const int32_t rank = entry_counts_[i / 32] + __popc(ballot & ((1u << lane) - 1));
      if (rank >= misses) {
        ++counts[kInvalid];
        Emit(r, i, kNone, kNone, 0, &valid);
        continue;
      }
      const int16_t slot = stale_[taken + rank];
      found_[i] = static_cast<uint16_t>(slot);
      const int32_t key = key_[i];
      const int32_t hot_row = PhysicalRow(row, slot);
      const int32_t pool_row = !kPosition ? key : entry_pool_ != nullptr ? entry_pool_[i] : PoolRowOf(row, key);
      ++counts[kMiss];
      Emit(r, i, hot_row, pool_row, 1, &valid);
      if (miss_pool_ != nullptr) {
        miss_key_[rank] = key;
        miss_pool_[rank] = pool_row;
        miss_hot_[rank] = hot_row;
      }
      if (publishes_ && a_.miss_counts != nullptr) {
        const int64_t at = static_cast<int64_t>(r) * k_ + rank;
        a_.miss_pool_rows[at] = pool_row;
        a_.miss_hot_rows[at] = hot_row;
      }
    }
    __syncthreads();
    if (!publishes_) return misses;
    int32_t evictions = 0;
    state_free();
    if (miss_pool_ != nullptr) {
      for (int32_t m = threadIdx.x; m < misses; m += kResolveThreads)
        evictions += Take(stale_[taken + m], miss_key_[m]);
    }
    const bool repeats = totals_[kPendingEntries] != totals_[kPending];
    if (miss_pool_ == nullptr || repeats) {
      for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
        const int32_t key = key_[i];
        if (key < 0) continue;
        const int32_t first = table_.First(key);
        const uint16_t slot = found_[first];
        if (first == i) {
          if (slot != kNoSlot && miss_pool_ == nullptr) evictions += Take(static_cast<int16_t>(slot), key);
        } else if (slot == kNoSlot) {
          ++counts[kInvalid];
          Emit(r, i, kNone, kNone, 0, &valid);
        } else {
          ++counts[kDuplicate];
          Emit(r, i, PhysicalRow(row, slot), kPosition ? PoolRowOf(row, key) : key, 0, &valid);
        }
      }
    }
    AddCounts(counts, valid);
    if (evictions > 0) atomicAdd(&counters_->evictions, evictions);
    __syncthreads();
    return misses;
  }

  // Writes the new order: stale slots behind the victims, the victims, the hits.
  __device__ void PublishOrder(int32_t victims) {
    const int lane = threadIdx.x % 32;
    const int32_t stale_total = totals_[kStaleTotal];
    const bool repaired = counters_->repairs > 0;
    for (int32_t begin = 0; begin < n_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= n_) break;
      const bool stale = i < n_ && !IsHit(lru_[i]);
      const unsigned ballot = __ballot_sync(~0u, stale);
      if (i >= n_) continue;
      const int32_t rank = slot_counts_[i / 32] + __popc(ballot & ((1u << lane) - 1));
      int32_t to;
      if (!stale) {
        to = stale_total + (i - rank);
      } else if (rank < victims) {
        to = stale_total - victims + rank;
      } else {
        to = rank - victims;
      }
      // A repaired order is not what global memory holds, so it is written whole.
      if (repaired || lru_[to] != lru_[i]) global_lru_[to] = lru_[i];
    }
  }

  __device__ void PublishCounts(int32_t r) {
    if (threadIdx.x != 0) return;
    const Counters& c = *counters_;
    if (a_.valid_counts != nullptr) a_.valid_counts[r * a_.valid_count_stride] = c.valid;
    if (a_.miss_counts != nullptr) a_.miss_counts[r] = c.outcome[kMiss];
    for (int o = 0; o < kOutcomes; ++o) {
      if (a_.counts != nullptr) a_.counts[static_cast<int64_t>(r) * kOutcomes + o] = c.outcome[o];
      AddStat(o, c.outcome[o]);
    }
  }

  __device__ void PublishStats() {
    if (threadIdx.x != 0) return;
    AddStat(kEvictions, counters_->evictions);
    AddStat(kLruRepairs, counters_->repairs);
  }

  __device__ void FillPadding(int32_t r) {
    int32_t valid = 0;
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) Emit(r, i, kNone, kNone, 0, &valid);
    if (threadIdx.x != 0) return;
    if (a_.valid_counts != nullptr) a_.valid_counts[r * a_.valid_count_stride] = 0;
    if (a_.miss_counts != nullptr) a_.miss_counts[r] = 0;
    for (int o = 0; o < kOutcomes && a_.counts != nullptr; ++o) a_.counts[static_cast<int64_t>(r) * kOutcomes + o] = 0;
  }

  // Hits of a batch row are the slots that it marked first; its other entries with a slot are repeats. `before` is the
  // number of marks before the row. The first warp calls it, behind a barrier; returns the number now.
  __device__ int32_t SettleHits(const uint32_t* marks, int32_t before) {
    const int32_t now = WarpPopcount(marks, (n_ + 31) / 32);
    if (threadIdx.x == 0) {
      counters_->outcome[kDuplicate] += counters_->outcome[kHot] - (now - before);
      counters_->outcome[kHot] = now - before;
    }
    return now;
  }

  __device__ const uint32_t* hit_bits() const { return hit_bits_; }
  __device__ int32_t miss_pool(uint32_t i) const { return miss_pool_[i]; }
  __device__ int32_t miss_hot(uint32_t i) const { return miss_hot_[i]; }

 private:
  __device__ bool IsHit(int32_t slot) const { return hit_bits_[slot / 32] >> (slot % 32) & 1; }

  __device__ bool IsPendingFirst(int32_t i) const {
    if (i >= k_) return false;
    const int32_t key = key_[i];
    return key >= 0 && table_.First(key) == i;
  }

  __device__ void AddStat(int stat, int32_t value) {
    if (a_.stats != nullptr && value != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(a_.stats + stat), static_cast<unsigned long long>(value));
    }
  }

  __device__ void AddCounts(const int32_t (&counts)[kOutcomes], int32_t valid) {
#pragma unroll
    for (int o = 0; o < kOutcomes; ++o) {
      const int32_t sum = __reduce_add_sync(~0u, counts[o]);
      if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&counters_->outcome[o], sum);
    }
    const int32_t sum = __reduce_add_sync(~0u, valid);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&counters_->valid, sum);
  }

  __device__ void Emit(int32_t r, int32_t i, int32_t hot_row, int32_t pool_row, int32_t miss, int32_t* valid) {
    *valid += hot_row >= 0;
    if (!publishes_) return;
    a_.hot_rows_out[r * a_.hot_rows_out_stride + i] = hot_row;
    if (a_.attention_indices != nullptr) {
      int64_t index = kNone;
      if (hot_row >= 0) {
        index =
            static_cast<int64_t>(hot_row / a_.hot_block_rows) * a_.attention_block_stride + hot_row % a_.hot_block_rows;
        if (index > INT32_MAX) index = kNone;
      }
      a_.attention_indices[r * a_.attention_stride + i] = static_cast<int32_t>(index);
    }
    const int64_t flat = static_cast<int64_t>(r) * k_ + i;
    if (a_.resolved_pool_rows != nullptr) a_.resolved_pool_rows[flat] = pool_row;
    if (a_.miss_mask != nullptr) a_.miss_mask[flat] = miss;
  }

  __device__ int32_t PagedRow(const int32_t* block, int32_t block_rows, uint32_t rest, int32_t null_block,
                              int64_t limit) const {
    const int32_t id = __ldcg(block);
    if (id < 0 || id == null_block) return kNone;
    const int64_t paged = static_cast<int64_t>(id) * block_rows + rest;
    return paged < limit ? static_cast<int32_t>(paged) : kNone;
  }

  __device__ int32_t PhysicalRow(const BatchRow& row, int64_t logical) const {
    if (a_.hot_block_table == nullptr) {
      return logical < a_.region_rows ? static_cast<int32_t>(int64_t{state_row_} * a_.region_rows + logical) : kNone;
    }
    if (logical > INT32_MAX) return kNone;
    const uint32_t column = static_cast<uint32_t>(logical) / a_.hot_block_rows;
    if (column >= a_.hot_block_stride) return kNone;
    return PagedRow(a_.hot_block_table + row.table_row * a_.hot_block_stride + column, a_.hot_block_rows,
                    static_cast<uint32_t>(logical) % a_.hot_block_rows, kNone, int64_t{INT32_MAX} + 1);
  }

  __device__ int32_t PoolRowOf(const BatchRow& row, int32_t position) const {
    const uint32_t column = static_cast<uint32_t>(position) / a_.block_rows;
    if (position >= a_.residency.slot_of_stride || row.table_row >= a_.block_table_rows ||
        column >= static_cast<uint32_t>(a_.block_table_columns)) {
      return kNone;
    }
    return PagedRow(a_.block_table + row.table_row * a_.block_table_stride + column, a_.block_rows,
                    static_cast<uint32_t>(position) % a_.block_rows, a_.null_block, a_.pool_rows);
  }

  __device__ int32_t ResidentRowOf(const BatchRow& row, int32_t position) const {
    if (a_.resident_table == nullptr || row.table_row >= a_.resident_rows) return kNone;
    const uint32_t column = static_cast<uint32_t>(position) / a_.block_rows;
    if (column >= static_cast<uint32_t>(a_.resident_columns)) return kNone;
    return PagedRow(a_.resident_table + row.table_row * a_.resident_stride + column, a_.block_rows,
                    static_cast<uint32_t>(position) % a_.block_rows, a_.resident_null_block, int64_t{INT32_MAX} + 1);
  }

  __device__ bool Allowed(int32_t pool_row) const {
    if (pool_row >= a_.pool_rows) return false;
    if (a_.allowed_blocks == nullptr) return true;
    const uint32_t block = static_cast<uint32_t>(pool_row) / a_.block_rows;
    if (block / 64 >= a_.allowed_stride) return false;
    return a_.allowed_blocks[state_row_ * a_.allowed_stride + block / 64] >> (block % 64) & 1;
  }

  // POOL_ROW: keys of the row's valid entries into the table, and the slot of each from one look at all slots. Entries
  // that are not valid, or newest, are told here and get a final key.
  template <Look kLook>
  __device__ void FindKeys(int32_t r, const BatchRow& row) {
    constexpr bool kTells = kLook != Look::kMark;
    const int32_t newest_pool_row = a_.newest_pool_rows == nullptr ? kNone : __ldcg(a_.newest_pool_rows + r);
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
      const int32_t key = __ldcg(a_.entries + r * a_.entry_stride + i);
      if (key < 0) {
        if (kTells) Emit(r, i, kNone, kNone, 0, &valid);
      } else if (!Allowed(key)) {
        ++counts[kInvalid];
        if (kTells) Emit(r, i, kNone, kNone, 0, &valid);
      } else if (key == newest_pool_row) {
        const int32_t hot_row = PhysicalRow(row, a_.newest_row);
        ++counts[hot_row >= 0 ? kNewest : kInvalid];
        if (kTells) Emit(r, i, hot_row, hot_row >= 0 ? key : kNone, 0, &valid);
      } else {
        key_[i] = key;
        found_[i] = kNoSlot;
        table_.Insert(i);
        continue;
      }
      key_[i] = kFinal;
    }
    if (kTells) AddCounts(counts, valid);
    __syncthreads();
    for (int32_t s = threadIdx.x; s < n_; s += kResolveThreads) {
      const int32_t key = __ldcg(slot_key_ + s);
      if (key < 0) continue;
      if (const int32_t first = table_.First(key); first >= 0) AtomicMin(found_ + first, static_cast<uint16_t>(s));
    }
    __syncthreads();
  }

  __device__ void CountPending() {
    for (int32_t begin = 0; begin < k_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= k_) break;
      const unsigned ballot = __ballot_sync(~0u, IsPendingFirst(i));
      if (threadIdx.x % 32 == 0) entry_counts_[i / 32] = __popc(ballot);
    }
  }

  __device__ void CountStale() {
    for (int32_t begin = 0; begin < n_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= n_) break;
      bool stale = false;
      if (i < n_) {
        const int32_t slot = lru_[i];
        if (slot >= 0 && slot < n_) {
          atomicOr(seen_bits_ + slot / 32, 1u << (slot % 32));
          stale = !IsHit(slot);
        }
      }
      const unsigned ballot = __ballot_sync(~0u, stale);
      if (threadIdx.x % 32 == 0) slot_counts_[i / 32] = __popc(ballot);
    }
  }

  __device__ void Scan(bool slots) {
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      const int32_t total = WarpExclusiveScan(entry_counts_, (k_ + 31) / 32);
      if (threadIdx.x == 0) totals_[kPending] = total;
    } else if (warp == 1 && slots) {
      const int32_t total = WarpExclusiveScan(slot_counts_, (n_ + 31) / 32);
      if (threadIdx.x == 32) totals_[kStaleTotal] = total;
    } else if (warp == 2 && slots) {
      const int32_t seen = WarpPopcount(seen_bits_, (n_ + 31) / 32);
      if (threadIdx.x == 64) totals_[kSeen] = seen;
    }
  }

  // Rare, so one thread does it: drops entries that are out of range or repeats, puts the missing slots in front.
  __device__ void Repair() {
    if (threadIdx.x == 0) {
      for (int32_t w = 0; w < (n_ + 31) / 32; ++w) seen_bits_[w] = 0;
      int32_t kept = 0;
      for (int32_t i = 0; i < n_; ++i) {
        const int32_t slot = lru_[i];
        if (slot < 0 || slot >= n_ || (seen_bits_[slot / 32] >> (slot % 32) & 1)) continue;
        seen_bits_[slot / 32] |= 1u << (slot % 32);
        lru_[kept++] = static_cast<int16_t>(slot);
      }
      counters_->repairs = n_ - kept;
      for (int32_t i = kept - 1, to = n_ - 1; i >= 0; --i, --to) lru_[to] = lru_[i];
      int32_t to = 0;
      for (int32_t s = 0; s < n_; ++s) {
        if (!(seen_bits_[s / 32] >> (s % 32) & 1)) lru_[to++] = static_cast<int16_t>(s);
      }
    }
    __syncthreads();
  }

  // The slot gets the key. Returns 1 when it held another one.
  __device__ int32_t Take(int16_t slot, int32_t key) {
    const int32_t old_key = __ldcg(slot_key_ + slot);
    slot_key_[slot] = key;
    if constexpr (kPosition) {
      if (old_key >= 0 && old_key < a_.residency.slot_of_stride && __ldcg(slot_of_ + old_key) == slot) {
        slot_of_[old_key] = kNone;
      }
      slot_of_[key] = slot;
    }
    return old_key >= 0 ? 1 : 0;
  }

  const ResolveArgs& a_;
  EntryTable table_;
  int16_t* const lru_;
  int16_t* const stale_;
  int32_t* const key_;
  uint16_t* const found_;
  uint32_t* const hit_bits_;
  uint32_t* const seen_bits_;
  int32_t* const slot_counts_;
  int32_t* const entry_counts_;
  int32_t* const entry_pool_;
  int32_t* const miss_key_;
  int32_t* const miss_pool_;
  int32_t* const miss_hot_;
  Counters* const counters_;
  int32_t* const totals_;
  const bool publishes_;
  const int32_t n_;
  const int32_t k_;
  int32_t state_row_ = kNone;
  int32_t* slot_key_ = nullptr;
  int16_t* global_lru_ = nullptr;
  int16_t* slot_of_ = nullptr;
};

// The cluster's barrier, in two halves. Before compute capability 9.0 there are no clusters.
template <bool kCluster>
__device__ void Arrive() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
template <bool kCluster>
__device__ void AwaitOthers() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

template <bool kCluster>
__device__ void ClusterPlace(uint32_t* rank, uint32_t* blocks) {
  *rank = 0;
  *blocks = 1;
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(*rank));
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(*blocks));
  }
#endif
}

// Counts the bytes of the pairs whose rows both exist. All threads of one block call it.
template <typename PairAt>
__device__ void CountGathered(const GatherPart& gather, int32_t misses, PairAt pair_at) {
  if (gather.gathered_bytes == nullptr) return;
  int32_t moved = 0;
  for (int32_t begin = 0; begin < misses; begin += kResolveThreads) {
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
    int32_t src_row = kNone;
    int32_t dst_row = kNone;
    if (i < misses) pair_at(static_cast<uint32_t>(i), &src_row, &dst_row);
    moved += __syncthreads_count(src_row >= 0 && dst_row >= 0);
  }
  if (threadIdx.x == 0 && moved > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(gather.gathered_bytes),
              static_cast<unsigned long long>(moved) * gather.copy.layers.count * gather.copy.row_bytes());
  }
}

template <IndexSpace kSpace, bool kGather, bool kCluster>
__global__ void __launch_bounds__(kResolveThreads) ResolveKernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Counters counters;
  using R = Resolver<kSpace>;
  __shared__ int32_t totals[R::kTotals];
  const ResolveArgs& a = args.a;
  const GatherPart& gather = args.gather;
  uint32_t rank, blocks;
  ClusterPlace<kCluster>(&rank, &blocks);
  const int32_t r = static_cast<int32_t>(blockIdx.x / blocks);
  const int32_t real = RealRows(a);
  const uint32_t first_piece = rank * kResolveThreads + threadIdx.x;
  const uint32_t stride = blocks * kResolveThreads;

  R resolver(args, shared, &counters, totals, rank == 0);
  const auto load = [&](int32_t i) {
    BatchRow b;
    b.state_row = i < real ? StateRowOf(a, i, &b.table_row) : kNone;
    if (R::kPosition && b.state_row >= 0) b.length = min(max(LoadInt(a.lengths, i), int64_t{0}), int64_t{INT32_MAX});
    return b;
  };
  // The keys and the neighbours' state rows are asked for before anything is decided: all in one trip.
  typename R::Seen seen[R::kTogether];
  if (R::kPosition) resolver.LoadKeys(r, static_cast<int32_t>(threadIdx.x), seen);
  int64_t table_row;
  const int32_t before = r > 0 ? StateRowOf(a, r - 1, &table_row) : kNone;
  const int32_t after = r + 1 < a.rows ? StateRowOf(a, r + 1, &table_row) : kNone;
  BatchRow row;
  row.state_row = StateRowOf(a, r, &row.table_row);
  if (R::kPosition) row.length = min(max(LoadInt(a.lengths, r), int64_t{0}), int64_t{INT32_MAX});
  if (r >= real || row.state_row < 0) {
    if (rank == 0) resolver.FillPadding(r);
    return;
  }
  if (before == row.state_row) return;  // the union's first row takes it
  int32_t end = r + 1;
  if (after == row.state_row && end < real) {
    while (end < real && StateRowOf(a, end, &table_row) == row.state_row) ++end;
  }
  resolver.SelectState(row.state_row);

  if (end == r + 1 && (!kGather || args.shared.miss_pool != 0)) {
    resolver.Begin();
    __syncthreads();
    resolver.template Classify<R::Look::kOnly>(r, row, row.length, seen, true);
    Arrive<kCluster>();  // this block has read all the state that it needs
    if (threadIdx.x < 32) resolver.SettleHits(resolver.hit_bits(), 0);
    resolver.Count(true);
    resolver.RankStale(min(totals[R::kPending], totals[R::kStaleTotal]));
    const int32_t misses = resolver.Assign(r, row, 0, [] { AwaitOthers<kCluster>(); });
    if (rank == 0) {
      resolver.PublishOrder(misses);
      resolver.PublishCounts(r);
      resolver.PublishStats();
    } else {
      AwaitOthers<kCluster>();
    }
    if constexpr (kGather) {
      const auto pair_at = [&](uint32_t i, int32_t* src_row, int32_t* dst_row) {
        const int32_t pool_row = resolver.miss_pool(i);
        const int32_t hot_row = resolver.miss_hot(i);
        *src_row = pool_row < gather.pool_rows ? pool_row : kNone;
        *dst_row = hot_row < gather.hot_rows ? hot_row : kNone;
      };
      if (rank == 0) CountGathered(gather, misses, pair_at);
      CopyRows(gather.piece_bytes, gather.copy, misses, first_piece, stride, pair_at);
    }
    return;
  }

  if (rank == 0) resolver.RunUnion(r, end, row.length, load);
  __syncthreads();
  Arrive<kCluster>();
  AwaitOthers<kCluster>();
  if constexpr (kGather) {
    for (int32_t i = r; i < end; ++i) {
      const int32_t misses = min(max(__ldcg(a.miss_counts + i), 0), a.top_k);
      const int64_t at = static_cast<int64_t>(i) * a.top_k;
      const auto pair_at = [&](uint32_t m, int32_t* src_row, int32_t* dst_row) {
        const int32_t pool_row = __ldcg(a.miss_pool_rows + at + m);
        const int32_t hot_row = __ldcg(a.miss_hot_rows + at + m);
        *src_row = pool_row >= 0 && pool_row < gather.pool_rows ? pool_row : kNone;
        *dst_row = hot_row >= 0 && hot_row < gather.hot_rows ? hot_row : kNone;
      };
      if (rank == 0) CountGathered(gather, misses, pair_at);
      CopyRows(gather.piece_bytes, gather.copy, misses, first_piece, stride, pair_at);
    }
  }
}

using Kernel = void (*)(KernelArgs);

// A block's list of misses is kept in shared memory up to this top_k; beyond, with the largest hot buffers, it would
// not fit.
constexpr int32_t kMaxListTopK = 2048;
// Blocks of one sequence. Sixteen (which a kernel must ask for) against the portable eight: see kernels/README.md.
constexpr int kMaxCluster = 16;

Kernel ChooseKernel(IndexSpace space, bool gather, bool cluster) {
  if (space == IndexSpace::kPosition) {
    if (!gather) return ResolveKernel<IndexSpace::kPosition, false, false>;
    return cluster ? ResolveKernel<IndexSpace::kPosition, true, true>
                   : ResolveKernel<IndexSpace::kPosition, true, false>;
  }
  if (!gather) return ResolveKernel<IndexSpace::kPoolRow, false, false>;
  return cluster ? ResolveKernel<IndexSpace::kPoolRow, true, true> : ResolveKernel<IndexSpace::kPoolRow, true, false>;
}

cudaError_t Launch(const KernelArgs& args, bool gather, int cluster, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(args.a.rows * cluster));
  config.blockDim = dim3(kResolveThreads);
  config.dynamicSmemBytes = static_cast<size_t>(args.shared.bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, ChooseKernel(args.a.index_space, gather, cluster > 1), args);
}

// As many blocks for each sequence as keep the whole batch on the device at once.
int ClusterSize(int32_t rows, const DeviceLimits& limits) {
  if (!limits.clusters) return 1;
  int cluster = 1;
  while (cluster < kMaxCluster && rows * cluster * 2 <= limits.multiprocessors) cluster *= 2;
  return cluster;
}

}  // namespace

cudaError_t PrepareKernels(const DeviceLimits& limits) {
  for (const IndexSpace space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    for (const bool gather : {false, true}) {
      for (const bool cluster : {false, true}) {
        if (cluster && (!gather || !limits.clusters)) continue;
        const Kernel kernel = ChooseKernel(space, gather, cluster);
        cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.max_shared_bytes);
        if (error == cudaSuccess && cluster) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        }
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchResolve(const ResolveArgs& args, const DeviceLimits&, cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  KernelArgs kernel;
  kernel.a = args;
  kernel.shared = ResolveShared::Make(args.residency.hot_rows, args.top_k, args.top_k <= kMaxListTopK);
  return Launch(kernel, false, 1, stream);
}

cudaError_t LaunchResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather, const DeviceLimits& limits,
                                cudaStream_t stream) {
  if (args.rows == 0 || args.top_k == 0) return cudaSuccess;
  KernelArgs kernel;
  kernel.a = args;
  kernel.shared = ResolveShared::Make(args.residency.hot_rows, args.top_k, args.top_k <= kMaxListTopK);
  kernel.gather.copy = MakeRowCopy(gather.pool, gather.hot);
  kernel.gather.pool_rows = gather.pool_rows;
  kernel.gather.hot_rows = gather.hot_rows;
  kernel.gather.piece_bytes = PieceBytes(kernel.gather.copy);
  kernel.gather.gathered_bytes = gather.gathered_bytes;
  const int32_t fused = std::min(gather.layer_count, LayerPairs::kMax);
  kernel.gather.copy.layers.count = fused;
  for (int32_t l = 0; l < fused; ++l) {
    kernel.gather.copy.layers.src[l] = kernel.gather.copy.layers.dst[l] = static_cast<int16_t>(gather.layers[l]);
  }
  const cudaError_t error = Launch(kernel, true, ClusterSize(args.rows, limits), stream);
  if (error != cudaSuccess || fused == gather.layer_count) return error;
  GatherCompactArgs rest = gather;
  rest.layers += fused;
  rest.layer_count -= fused;
  return LaunchGather(rest, limits, stream);
}

}  // namespace stoker::kernels::cuda
