// Resolve of several batch rows of one state row as one union (speculative decoding), and of shapes that the resolve of
// a single row has no room for. One block does it.
//
//   1. every row: its keys into a table, the slot of each from one look at all slots; hits are marked in a bitmap;
//   2. the LRU order once: with the number of hits known, one scan over "stale or hit" gives every slot its new place
//      and every stale slot its rank;
//   3. every row again, in order: all outcomes; its first entry of a key with miss rank m takes the stale slot of rank
//   m.
//
// Invariants: as in cpu/resolve.cc. Every value read from residency, entries and tables is read once and checked.
#pragma once

#include "kernels/cuda/resolve_args.cuh"

namespace stoker::kernels::cuda {

struct UnionState {
  // Indices into `totals`: distinct slots of the order, stale slots, misses that want a slot, and entries that do.
  enum { kSeen, kStaleTotal, kPending, kPendingEntries, kTotals };
  int32_t totals[kTotals];
  int32_t outcome[kOutcomes];
  int32_t valid;
  int32_t evictions;
  int32_t repairs;
};

template <IndexSpace kSpace>
class RowUnion {
 public:
  static constexpr bool kPosition = kSpace == IndexSpace::kPosition;
  using Access = RowAccess<kSpace, true>;

  __device__ RowUnion(const ResolveKernelArgs& args, char* shared, UnionState* state)
      : a_(args.a),
        access_(args),
        table_(reinterpret_cast<uint16_t*>(shared + args.shared_union.table),
               reinterpret_cast<int32_t*>(shared + args.shared_union.key), args.shared_union.table_mask),
        lru_(reinterpret_cast<int16_t*>(shared + args.shared_union.lru)),
        stale_(reinterpret_cast<int16_t*>(shared + args.shared_union.stale)),
        key_(reinterpret_cast<int32_t*>(shared + args.shared_union.key)),
        found_(reinterpret_cast<uint16_t*>(shared + args.shared_union.found)),
        hit_bits_(reinterpret_cast<uint32_t*>(shared + args.shared_union.hit_bits)),
        seen_bits_(reinterpret_cast<uint32_t*>(shared + args.shared_union.seen_bits)),
        slot_counts_(reinterpret_cast<int32_t*>(shared + args.shared_union.slot_counts)),
        entry_counts_(reinterpret_cast<int32_t*>(shared + args.shared_union.entry_counts)),
        state_(state),
        n_(args.a.residency.hot_rows),
        k_(args.a.top_k) {}

  // Resolves batch rows [first, end). `load` gives a batch row. Ends with a barrier.
  template <typename Load>
  __device__ void Run(int32_t first, int32_t end, const BatchRow& row, Load load) {
    slot_key_ = a_.residency.slot_key + static_cast<int64_t>(row.state_row) * n_;
    global_lru_ = a_.residency.lru + static_cast<int64_t>(row.state_row) * n_;
    const int64_t base = row.length;
    Begin();
    for (int32_t r = first; r < end; ++r) {
      Classify<Look::kMark>(r, load(r), base);
      table_.Clear();
      __syncthreads();
    }
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) key_[i] = kFinal;
    __syncthreads();
    Count(true);
    RankStale();
    for (int32_t i = threadIdx.x; i < (n_ + 31) / 32; i += kResolveThreads) seen_bits_[i] = 0;
    __syncthreads();
    int32_t taken = 0;
    int32_t told = 0;
    for (int32_t r = first; r < end; ++r) {
      const BatchRow own = load(r);
      Classify<Look::kTell>(r, own, base);
      if (threadIdx.x < 32) told = SettleHits(told);
      Count(false);
      taken += Assign(r, own, taken);
      PublishCounts(r);
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int o = 0; o < kOutcomes; ++o) state_->outcome[o] = 0;
        state_->valid = 0;
        state_->totals[UnionState::kPendingEntries] = 0;
      }
      table_.Clear();
      __syncthreads();
    }
    PublishOrder(taken);
    if (threadIdx.x == 0) {
      access_.AddStat(kEvictions, state_->evictions);
      access_.AddStat(kLruRepairs, state_->repairs);
    }
    __syncthreads();
  }

 private:
  // What a look at the entries of a batch row is for.
  enum class Look {
    kMark,  // pass 1: marks hits
    kTell,  // pass 3: tells outcomes; a slot without a hit mark was given to the key by an earlier row
  };

  // Brings the LRU order into shared memory and clears what is counted in. Ends with a barrier.
  __device__ void Begin() {
    for (int32_t i = threadIdx.x; i < (n_ + 31) / 32; i += kResolveThreads) hit_bits_[i] = seen_bits_[i] = 0;
    table_.Clear();
    if (threadIdx.x == 0) *state_ = UnionState{};
    for (int32_t i = threadIdx.x; i < n_; i += kResolveThreads) lru_[i] = __ldcg(global_lru_ + i);
    __syncthreads();
  }

  // With an empty table. Entries that are told get a final key, the others are in the table. Ends with a barrier.
  template <Look kLook>
  __device__ void Classify(int32_t r, const BatchRow& row, int64_t base) {
    FindSlots<kLook>(r, row, base);
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    int32_t pending = 0;
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
      const int32_t key = key_[i];
      if (key < 0) continue;
      const uint16_t slot = found_[table_.First(key)];
      if (slot == kNoSlot) {
        ++pending;
        continue;
      }
      if constexpr (kLook == Look::kMark) {
        atomicOr(hit_bits_ + slot / 32, 1u << (slot % 32));
        continue;
      }
      if (IsHit(slot)) {
        atomicOr(seen_bits_ + slot / 32, 1u << (slot % 32));
        ++counts[kHot];
      } else {
        ++counts[kDuplicate];
      }
      Tell(r, i, access_.PhysicalRow(row, slot), PoolRow(row, key), 0, &valid);
    }
    __syncthreads();  // First reads keys until here
    if constexpr (kLook == Look::kTell) {
      for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
        const int32_t key = key_[i];
        if (key >= 0 && found_[table_.First(key)] != kNoSlot) key_[i] = key | kFinal;
      }
      AddCounts(counts, valid);
      const int32_t sum = __reduce_add_sync(~0u, pending);
      if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(state_->totals + UnionState::kPendingEntries, sum);
      __syncthreads();
    }
  }

  // Keys of the row's entries that may be hot into the table, and the slot of each from one look at all slots; where a
  // key is in several, the lowest counts. The other entries are told. Ends with a barrier.
  template <Look kLook>
  __device__ void FindSlots(int32_t r, const BatchRow& row, int64_t base) {
    constexpr bool kTells = kLook == Look::kTell;
    const int32_t newest_pool_row = access_.NewestPoolRow(r);
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
      const int32_t key = __ldcg(a_.entries + r * a_.entry_stride + i);
      key_[i] = kFinal;
      if (key < 0) {
        if (kTells) Tell(r, i, kNone, kNone, 0, &valid);
        continue;
      }
      int32_t pool_row = kNone;
      int32_t resident_row = kNone;
      int64_t newest = kNone;
      if constexpr (kPosition) {
        if (key < row.length) {
          pool_row = access_.PoolRowOf(row, key);
          resident_row = access_.ResidentRowOf(row, key);
          newest = key - (base - 1);
        }
      } else {
        if (access_.Allowed(row.state_row, key)) pool_row = key;
        if (key == newest_pool_row) newest = 0;
      }
      Outcome outcome = kInvalid;
      int32_t hot_row = kNone;
      if (pool_row >= 0 || resident_row >= 0) {
        if (newest >= 0) {
          hot_row = access_.PhysicalRow(row, a_.newest_row + newest);
          if (hot_row >= 0) outcome = kNewest;
        } else if (resident_row >= 0) {
          hot_row = resident_row;
          outcome = kResident;
        } else {
          key_[i] = key;
          found_[i] = kNoSlot;
          table_.Insert(i);
          continue;
        }
      }
      if (!kTells) continue;
      ++counts[outcome];
      Tell(r, i, hot_row, outcome == kInvalid ? kNone : pool_row, 0, &valid);
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

  // Counts pending first entries by warp and, with `slots`, stale slots too; then scans. Repairs an order that is no
  // permutation. Sets stale_total and misses. Ends with a barrier.
  __device__ void Count(bool slots) {
    CountPending();
    if (slots) CountStale();
    __syncthreads();
    Scan(slots);
    __syncthreads();
    if (slots && state_->totals[UnionState::kSeen] != n_) {
      Repair();
      CountPending();  // the scan has replaced the counts
      CountStale();
      __syncthreads();
      Scan(true);
      __syncthreads();
    }
  }

  // Fills `stale` with the slots of stale ranks. Ends with a barrier.
  __device__ void RankStale() {
    const int lane = threadIdx.x % 32;
    for (int32_t begin = 0; begin < n_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= n_) break;
      const bool stale = i < n_ && !IsHit(lru_[i]);
      const unsigned ballot = __ballot_sync(~0u, stale);
      if (stale) stale_[slot_counts_[i / 32] + __popc(ballot & ((1u << lane) - 1))] = lru_[i];
    }
    __syncthreads();
  }

  // Pass 3 of one batch row: gives pending entries their slots, which are the stale ones from rank `taken` on. Returns
  // the number of misses that got one. Ends with a barrier.
  __device__ int32_t Assign(int32_t r, const BatchRow& row, int32_t taken) {
    const int lane = threadIdx.x % 32;
    const int32_t misses = min(state_->totals[UnionState::kPending], state_->totals[UnionState::kStaleTotal] - taken);
    int32_t counts[kOutcomes] = {};
    int32_t valid = 0;
    int32_t evictions = 0;
    for (int32_t begin = 0; begin < k_; begin += kResolveThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      if (begin + static_cast<int32_t>(threadIdx.x & ~31u) >= k_) break;
      const bool first = IsPendingFirst(i);
      const unsigned ballot = __ballot_sync(~0u, first);
      if (!first) continue;
      const int32_t rank = entry_counts_[i / 32] + __popc(ballot & ((1u << lane) - 1));
      if (rank >= misses) {
        ++counts[kInvalid];
        Tell(r, i, kNone, kNone, 0, &valid);
        continue;
      }
      const int16_t slot = stale_[taken + rank];
      const int32_t key = key_[i];
      found_[i] = static_cast<uint16_t>(slot);
      evictions += __ldcg(slot_key_ + slot) >= 0;
      slot_key_[slot] = key;
      const int32_t hot_row = access_.PhysicalRow(row, slot);
      const int32_t pool_row = PoolRow(row, key);
      ++counts[kMiss];
      Tell(r, i, hot_row, pool_row, 1, &valid);
      access_.EmitMiss(r, rank, hot_row, pool_row);
    }
    __syncthreads();
    if (state_->totals[UnionState::kPendingEntries] != state_->totals[UnionState::kPending]) {
      for (int32_t i = threadIdx.x; i < k_; i += kResolveThreads) {
        const int32_t key = key_[i];
        if (key < 0) continue;
        const int32_t first = table_.First(key);
        if (first == i) continue;
        const uint16_t slot = found_[first];
        if (slot == kNoSlot) {
          ++counts[kInvalid];
          Tell(r, i, kNone, kNone, 0, &valid);
        } else {
          ++counts[kDuplicate];
          Tell(r, i, access_.PhysicalRow(row, slot), PoolRow(row, key), 0, &valid);
        }
      }
    }
    AddCounts(counts, valid);
    if (evictions > 0) atomicAdd(&state_->evictions, evictions);
    __syncthreads();
    return misses;
  }

  // Writes the new order: stale slots behind the victims, the victims, the hits.
  __device__ void PublishOrder(int32_t victims) {
    const int lane = threadIdx.x % 32;
    const int32_t stale_total = state_->totals[UnionState::kStaleTotal];
    const bool repaired = state_->repairs > 0;
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
    if (threadIdx.x < kOutcomes) {
      access_.EmitCount(r, static_cast<int32_t>(threadIdx.x), state_->outcome[threadIdx.x]);
    }
    if (threadIdx.x == 0) access_.EmitValid(r, state_->valid);
  }

  // Hits of a batch row are the slots that it marked first; its other entries with a slot are repeats. `before` is the
  // number of marks before the row. The first warp calls it, behind a barrier; returns the number now.
  __device__ int32_t SettleHits(int32_t before) {
    const int32_t now = WarpPopcount(seen_bits_, (n_ + 31) / 32);
    if (threadIdx.x == 0) {
      state_->outcome[kDuplicate] += state_->outcome[kHot] - (now - before);
      state_->outcome[kHot] = now - before;
    }
    return now;
  }

  __device__ bool IsHit(int32_t slot) const { return hit_bits_[slot / 32] >> (slot % 32) & 1; }

  __device__ bool IsPendingFirst(int32_t i) const {
    if (i >= k_) return false;
    const int32_t key = key_[i];
    return key >= 0 && table_.First(key) == i;
  }

  __device__ int32_t PoolRow(const BatchRow& row, int32_t key) const {
    return kPosition ? access_.PoolRowOf(row, key) : key;
  }

  __device__ void Tell(int32_t r, int32_t i, int32_t hot_row, int32_t pool_row, int32_t miss, int32_t* valid) const {
    *valid += hot_row >= 0;
    access_.Emit(r, i, hot_row, pool_row, miss);
  }

  __device__ void AddCounts(const int32_t (&counts)[kOutcomes], int32_t valid) {
#pragma unroll
    for (int o = 0; o < kOutcomes; ++o) {
      const int32_t sum = __reduce_add_sync(~0u, counts[o]);
      if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&state_->outcome[o], sum);
    }
    const int32_t sum = __reduce_add_sync(~0u, valid);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&state_->valid, sum);
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
      if (threadIdx.x == 0) state_->totals[UnionState::kPending] = total;
    } else if (warp == 1 && slots) {
      const int32_t total = WarpExclusiveScan(slot_counts_, (n_ + 31) / 32);
      if (threadIdx.x == 32) state_->totals[UnionState::kStaleTotal] = total;
    } else if (warp == 2 && slots) {
      const int32_t seen = WarpPopcount(seen_bits_, (n_ + 31) / 32);
      if (threadIdx.x == 64) state_->totals[UnionState::kSeen] = seen;
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
      state_->repairs = n_ - kept;
      for (int32_t i = kept - 1, to = n_ - 1; i >= 0; --i, --to) lru_[to] = lru_[i];
      int32_t to = 0;
      for (int32_t s = 0; s < n_; ++s) {
        if (!(seen_bits_[s / 32] >> (s % 32) & 1)) lru_[to++] = static_cast<int16_t>(s);
      }
    }
    __syncthreads();
  }

  const ResolveArgs& a_;
  const Access access_;
  EntryTable table_;
  int16_t* const lru_;
  int16_t* const stale_;
  int32_t* const key_;
  uint16_t* const found_;
  uint32_t* const hit_bits_;
  uint32_t* const seen_bits_;
  int32_t* const slot_counts_;
  int32_t* const entry_counts_;
  UnionState* const state_;
  const int32_t n_;
  const int32_t k_;
  int32_t* slot_key_ = nullptr;
  int16_t* global_lru_ = nullptr;
};

}  // namespace stoker::kernels::cuda
