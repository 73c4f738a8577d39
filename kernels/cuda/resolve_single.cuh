// Resolve of one batch row that is alone in its state row: the usual case, and the one that is made fast.
//
// One block resolves; the other blocks of its cluster copy. They are told twice: which pool rows are missing as soon as
// that is known, so that their reads are under way, and where each goes at the end. Everything that depends on global
// memory is two trips deep (batch, then state), and the state is read whole and in order: random loads of single values
// cost a block more than reading all of it. Then, between barriers:
//   1. slots into the index;
//   2. entries look up their slots;
//   3. hits set the flags of theirs, misses leave their number in the index and are told;
//   4. the order: which of its slots are stale, and whether it is a permutation; of entries with one key, who is first;
//   5. ranks, from one scan of both counts; victims into shared memory, the order into global memory;
//   6. misses take the victims.
// A step without misses ends after 5 and writes nothing but the outputs and those places of the order that change.
//
// Instructions limit it, not memory: at 1,024 threads an instruction of each takes 8 cycles. Hence the packed counts,
// ballots instead of scans, and instances for common shapes and for batches without optional inputs and outputs.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/resolve_args.cuh"
#include "kernels/cuda/slot_index.cuh"

namespace stoker::kernels::cuda {

// What the threads of a block share, beside the dynamic part.
struct SingleState {
  uint32_t ranks[kResolveWarps];
  uint32_t outcomes[kResolveWarps];
  int32_t rest_count;
  int32_t repairs;
  int32_t corrupt;
  int32_t valid;
  int32_t told;     // misses that have a number
  int32_t late[2];  // duplicates and invalid entries that step 6 found
  // Misses by position, where they are copied in its order: how many in each part of the sequence, then the first
  // number of each.
  static constexpr int kBucketBits = 7;
  static constexpr int kBuckets = 1 << kBucketBits;
  int32_t buckets[kBuckets];
};

// kTopK and kHotRows: the shape, or 0 for what the arguments say.
template <IndexSpace kSpace, bool kOptions, int kTopK, int kHotRows>
class SingleRow {
 public:
  static constexpr bool kPosition = kSpace == IndexSpace::kPosition;
  static constexpr int kMaxTopK = kTopK > 0 ? kTopK : SingleShared::kMaxTopK;
  static constexpr int kMaxHotRows = kHotRows > 0 ? kHotRows : SingleShared::kMaxHotRows;
  // Of one thread: entries, places of the order, and fours of slots.
  static constexpr int kEntries = (kMaxTopK + kResolveThreads - 1) / kResolveThreads;
  static constexpr int kPlaces = (kMaxHotRows + kResolveThreads - 1) / kResolveThreads;
  static constexpr int kQuads = (kPlaces + 3) / 4;
  static constexpr bool kPowerOfTwo = kHotRows > 0 && (kHotRows & (kHotRows - 1)) == 0;

  __device__ SingleRow(const ResolveKernelArgs& args, char* shared, SingleState* state)
      : args_(args),
        a_(args.a),
        access_(args),
        shared_(shared),
        keys_(reinterpret_cast<int32_t*>(shared + args.single.keys)),
        flags_(reinterpret_cast<uint32_t*>(shared + args.single.flags)),
        state_(state) {}

  // Before anything is read that an earlier kernel wrote.
  __device__ void Clear() {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (HasSlot(SlotsOf(q))) *reinterpret_cast<uint4*>(flags_ + SlotsOf(q)) = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x < SingleState::kBuckets) state_->buckets[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      state_->rest_count = state_->repairs = state_->corrupt = state_->valid = state_->told = 0;
      state_->late[0] = state_->late[1] = 0;
    }
  }

  __device__ void LoadEntries(int32_t r, int32_t (&key)[kEntries]) const {
    const int32_t* const entries = a_.entries + r * a_.entry_stride + EntryOf(0);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) key[j] = HasEntry(EntryOf(j)) ? LoadNow(entries + 32 * j) : kNone;
  }

  // Resolves batch row r. With kCopies `copiers` hears of the misses:
  //   copiers.Miss(number, pool row)              every entry that wants a slot has a number, from 0 on,
  //   copiers.Misses(count)                       how many there are, by all threads, when all are told;
  //   copiers.Target(number, pool row, hot row)   where it goes, or -1.
  // Returns how many entries have a number.
  template <bool kCopies, typename Copiers>
  __device__ int32_t Run(int32_t r, const BatchRow& row, const int32_t (&key)[kEntries], Copiers& copiers) {
    int32_t* const slot_key = a_.residency.slot_key + static_cast<int64_t>(row.state_row) * n();
    int16_t* const global_lru = a_.residency.lru + static_cast<int64_t>(row.state_row) * n();
    const SlotIndex index(args_.single, shared_, &state_->rest_count, n(),
                          kPosition && row.length <= 1 << args_.single.index_bits);

    int16_t lru[kPlaces];
    uint16_t* place[kEntries];
    int32_t slot[kEntries];
    const int32_t columns = LoadState(row, slot_key, global_lru, index, key, lru, place, slot);

    int32_t pool_row[kEntries];
    int32_t valid = 0;
    const uint32_t outcomes = Classify(r, row, columns, key, place, slot, pool_row, &valid);
    bool wants = false;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) wants |= slot[j] == kPending;
    int32_t number[kEntries];
    const bool sorts = kCopies && kPosition && args_.sorts_misses;
    if (kCopies && !sorts) {
      NumberMisses(slot, number);
      TellMisses(slot, pool_row, number, copiers);
    }
    if (sorts) CountMisses(row, key, slot, number);
    const bool any = __syncthreads_or(wants);
    if (sorts && any) {
      RankBuckets();
      SortMisses(row, key, slot, number);
      TellMisses(slot, pool_row, number, copiers);
    }
    const int32_t told = kCopies && any ? state_->told : 0;
    if constexpr (kCopies) copiers.Misses(told);
    if (!any) LetNextStart();  // nothing will be copied: see kMaxRowsForEarlyStart

    unsigned stale[kPlaces];
    const bool corrupt = MarkOrder(lru, stale);
    int32_t first[kEntries];  // entry with the same key that comes first; kNone for entries that are done
    bool contest = false;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      first[j] = kNone;
      if (slot[j] != kPending) continue;
      first[j] = EntryOf(j);
      contest |= *place[j] != (kMark | first[j]);
    }
    PublishRanks(any, stale, first, outcomes);
    bool contested = false;
    if (__syncthreads_or(corrupt || contest)) {
      if (corrupt) state_->corrupt = 1;
      contested = __syncthreads_or(contest);
      if (state_->corrupt != 0) Repair(lru, stale);
      if (contested) FindFirsts(key, first);
      PublishRanks(any, stale, first, outcomes);
      __syncthreads();
    }

    const uint32_t own = state_->ranks[threadIdx.x % 32];
    const uint32_t before = __reduce_add_sync(~0u, threadIdx.x % 32 < threadIdx.x / 32 ? own : 0);
    const uint32_t total = __reduce_add_sync(~0u, own);
    const int32_t stale_total = static_cast<int32_t>(total & 0xffff);
    const int32_t pending = static_cast<int32_t>(total >> 16);
    const int32_t misses = min(pending, stale_total);
    // Where nothing below changes them the counts are told now, while other warps write the order.
    const bool counts_are_final = pending <= misses && !contested && !(kOptions && a_.valid_counts != nullptr);
    if (counts_are_final) PublishCounts(r, n() - stale_total, misses);
    WriteOrder(lru, stale, static_cast<int32_t>(before & 0xffff), stale_total, misses, global_lru);
    if (pending > 0) {
      __syncthreads();
      int32_t target[kEntries];
      TakeVictims(r, row, static_cast<int32_t>(before >> 16), misses, contested, key, first, pool_row, slot_key, target,
                  &valid);
      if constexpr (kCopies) {
#pragma unroll
        for (int j = 0; j < kEntries; ++j) {
          if (slot[j] == kPending) copiers.Target(number[j], pool_row[j], target[j]);
        }
      }
    }
    if (!counts_are_final) {
      AddValid(valid);
      __syncthreads();
      PublishCounts(r, n() - stale_total, misses);
    }
    return told;
  }

 private:
  static constexpr int32_t kPending = -2;
  static constexpr uint32_t kMark = 0x8000;  // in the index: the number of an entry, not of a slot
  static_assert(SingleShared::kMaxHotRows <= 0x8000 && SingleShared::kMaxTopK <= 0x8000);
  // Flags of a slot: 0, or kHit; then kSeen.
  static constexpr uint32_t kHit = 1;
  static constexpr uint32_t kSeen = 2;
  // Counts of a warp's entries, a byte each.
  static constexpr int kFoundShift = 0;
  static constexpr int kNewestShift = 8;
  static constexpr int kResidentShift = 16;
  static constexpr int kInvalidShift = 24;
  static_assert(32 * kEntries <= 255);

  __device__ int32_t n() const { return kHotRows > 0 ? kHotRows : a_.residency.hot_rows; }
  __device__ int32_t k() const { return kTopK > 0 ? kTopK : a_.top_k; }
  __device__ bool HasEntry(int32_t i) const { return (kTopK > 0 && kTopK % kResolveThreads == 0) || i < k(); }
  __device__ bool HasPlace(int32_t p) const { return (kHotRows > 0 && kHotRows % kResolveThreads == 0) || p < n(); }
  __device__ bool HasSlot(int32_t s) const {
    return (kHotRows > 0 && kHotRows % (4 * kResolveThreads) == 0) || s < n();
  }

  __device__ static int32_t EntryOf(int j) {
    return (static_cast<int32_t>(threadIdx.x / 32) * kEntries + j) * 32 + static_cast<int32_t>(threadIdx.x % 32);
  }
  // First of the four slots of quad q.
  __device__ static int32_t SlotsOf(int q) { return 4 * (q * kResolveThreads + static_cast<int32_t>(threadIdx.x)); }
  // Place j of this thread in the order: a warp has consecutive ones.
  __device__ static int32_t PlaceOf(int j) {
    return (static_cast<int32_t>(threadIdx.x / 32) * kPlaces + j) * 32 + static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ static unsigned LanesBelow() { return (1u << (threadIdx.x % 32)) - 1; }

  template <typename T>
  __device__ T* Part(int32_t offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }

  // Brings keys, order and block table over, builds the index and looks the entries up: place of each in the index, and
  // slot. Returns the columns of the table that are in shared memory. Ends with a barrier, behind which misses may
  // leave marks in the index.
  __device__ int32_t LoadState(const BatchRow& row, const int32_t* slot_key, const int16_t* global_lru,
                               const SlotIndex& index, const int32_t (&key)[kEntries], int16_t (&lru)[kPlaces],
                               uint16_t* (&place)[kEntries], int32_t (&slot)[kEntries]) {
    int4 quad[kQuads];
    const int4* const quads = reinterpret_cast<const int4*>(slot_key) + threadIdx.x;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      quad[q] = HasSlot(SlotsOf(q)) ? __ldcg(quads + q * kResolveThreads) : make_int4(kNone, kNone, kNone, kNone);
    }
    const int16_t* const places = global_lru + PlaceOf(0);
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) lru[j] = HasPlace(PlaceOf(j)) ? __ldcg(places + 32 * j) : int16_t{kNone};
    int32_t columns = 0;
    if constexpr (kPosition) {
      const uint32_t table_columns = static_cast<uint32_t>(access_.TableColumns(row.table_row));
      const uint32_t needed = access_.BlockOf(static_cast<uint32_t>(row.length)) + 1;
      columns = static_cast<int32_t>(min(min(table_columns, static_cast<uint32_t>(args_.single.columns)), needed));
      const int32_t* const table = access_.Table(row.table_row) + threadIdx.x;
#pragma unroll
      for (int c = 0; c < SingleShared::kMaxColumns; c += kResolveThreads) {
        if (c + static_cast<int32_t>(threadIdx.x) < columns) {
          Part<int32_t>(args_.single.table)[c + threadIdx.x] = __ldcg(table + c);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEntries; ++j) place[j] = index.First(key[j]);
    uint16_t* held[kQuads][4];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int32_t s = SlotsOf(q);
      if (!HasSlot(s)) continue;
      *reinterpret_cast<int4*>(keys_ + s) = quad[q];
      const int32_t keys[4] = {quad[q].x, quad[q].y, quad[q].z, quad[q].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        held[q][j] = index.First(keys[j]);
        *held[q][j] = static_cast<uint16_t>(s + j);
      }
    }
    __syncthreads();
    bool lost = false;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int32_t s = SlotsOf(q);
      if (!HasSlot(s)) continue;
      const int32_t keys[4] = {quad[q].x, quad[q].y, quad[q].z, quad[q].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) lost |= *held[q][j] != s + j && keys[j] >= 0;
    }
#pragma unroll
    for (int j = 0; j < kEntries; ++j) slot[j] = index.FindFirst(place[j], key[j]);
    if (__syncthreads_or(lost)) {
      FinishIndex(index);
#pragma unroll
      for (int j = 0; j < kEntries; ++j) slot[j] = key[j] >= 0 ? index.Find(key[j]) : kNone;
      __syncthreads();
    }
    return columns;
  }

  // Rare with positions below the index's places, usual beyond. Ends with a barrier.
  __device__ void FinishIndex(const SlotIndex& index) {
    for (int step = 0; step < 2; ++step) {
      for (int32_t s = static_cast<int32_t>(threadIdx.x); s < n(); s += kResolveThreads) {
        const int32_t key = keys_[s];
        if (key < 0) continue;
        if (step == 0) {
          index.WriteSecond(s, key);
        } else {
          index.WriteRest(s, key);
        }
      }
      __syncthreads();
    }
  }

  // Pool row of a position, from the part of the block table that is in shared memory, or from the whole.
  __device__ int32_t PoolRowOf(const BatchRow& row, int32_t columns, int32_t position) const {
    const uint32_t column = access_.BlockOf(static_cast<uint32_t>(position));
    int32_t block = kNone;
    if (column < static_cast<uint32_t>(columns)) {
      block = Part<int32_t>(args_.single.table)[column];
    } else if (column < static_cast<uint32_t>(access_.TableColumns(row.table_row))) {
      block = __ldcg(access_.Table(row.table_row) + column);
    }
    return access_.PoolRow(block, access_.RestOf(static_cast<uint32_t>(position), column));
  }

  // Outcomes of all entries but misses. Entries that want a slot get kPending, and leave their number in the index.
  __device__ uint32_t Classify(int32_t r, const BatchRow& row, int32_t columns, const int32_t (&key)[kEntries],
                               uint16_t* const (&place)[kEntries], int32_t (&slot)[kEntries],
                               int32_t (&pool_row)[kEntries], int32_t* valid) {
    const int32_t newest_key = kPosition ? row.length - 1 : access_.NewestPoolRow(r);
    uint32_t outcomes = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      const int32_t i = EntryOf(j);
      pool_row[j] = kNone;
      if (!HasEntry(i)) continue;
      int32_t resident_row = kNone;
      if constexpr (kPosition) {
        if (static_cast<uint32_t>(key[j]) < static_cast<uint32_t>(row.length)) {
          pool_row[j] = PoolRowOf(row, columns, key[j]);
          resident_row = access_.ResidentRowOf(row, key[j]);
        }
      } else {
        if (key[j] >= 0 && access_.Allowed(row.state_row, key[j])) pool_row[j] = key[j];
      }
      int32_t hot_row = kNone;
      uint32_t outcome = key[j] >= 0 ? 1u << kInvalidShift : 0;
      if (pool_row[j] >= 0 || resident_row >= 0) {
        if (key[j] == newest_key) {
          hot_row = access_.PhysicalRow(row, a_.newest_row);
          if (hot_row >= 0) outcome = 1u << kNewestShift;
        } else if (resident_row >= 0) {
          hot_row = resident_row;
          outcome = 1u << kResidentShift;
        } else if (slot[j] >= 0) {
          flags_[slot[j]] = kHit;
          hot_row = access_.PhysicalRow(row, slot[j]);
          outcome = 1u << kFoundShift;
        } else {
          *place[j] = static_cast<uint16_t>(kMark | i);
          slot[j] = kPending;
          continue;
        }
      }
      slot[j] = kNone;
      outcomes += outcome;
      if (kOptions) {
        *valid += hot_row >= 0;
        if (outcome == 1u << kInvalidShift) pool_row[j] = kNone;
      }
      access_.Emit(r, i, hot_row, pool_row[j], 0);
    }
    return outcomes;
  }

  // Numbers the misses in any order.
  __device__ void NumberMisses(const int32_t (&slot)[kEntries], int32_t (&number)[kEntries]) {
    unsigned wanted[kEntries];
    int32_t count = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      wanted[j] = __ballot_sync(~0u, slot[j] == kPending);
      count += __popc(wanted[j]);
    }
    if (count == 0) return;
    int32_t base = 0;
    if (threadIdx.x % 32 == 0) base = atomicAdd(&state_->told, count);
    base = __shfl_sync(~0u, base, 0);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      number[j] = base + __popc(wanted[j] & LanesBelow());
      base += __popc(wanted[j]);
    }
  }

  // The same in the order of the positions, bucket by bucket, so that rows with one address translation are read
  // together: first the rank in the bucket; behind a barrier the first number of each bucket; then the numbers.
  __device__ int32_t BucketOf(const BatchRow& row, int32_t position) const {
    return position >> max(32 - __clz(row.length) - SingleState::kBucketBits, 0);
  }
  __device__ void CountMisses(const BatchRow& row, const int32_t (&key)[kEntries], const int32_t (&slot)[kEntries],
                              int32_t (&number)[kEntries]) {
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (slot[j] == kPending) number[j] = atomicAdd(state_->buckets + BucketOf(row, key[j]), 1);
    }
  }
  // Ends with a barrier.
  __device__ void RankBuckets() {
    if (threadIdx.x < 32) {
      const int32_t total = WarpExclusiveScan(state_->buckets, SingleState::kBuckets);
      if (threadIdx.x == 0) state_->told = total;
    }
    __syncthreads();
  }
  __device__ void SortMisses(const BatchRow& row, const int32_t (&key)[kEntries], const int32_t (&slot)[kEntries],
                             int32_t (&number)[kEntries]) {
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (slot[j] == kPending) number[j] += state_->buckets[BucketOf(row, key[j])];
    }
  }

  template <typename Copiers>
  __device__ void TellMisses(const int32_t (&slot)[kEntries], const int32_t (&pool_row)[kEntries],
                             const int32_t (&number)[kEntries], Copiers& copiers) {
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (slot[j] == kPending) copiers.Miss(number[j], pool_row[j]);
    }
  }

  // Which of this warp's places hold stale slots, by ballot. Returns whether the thread saw the order broken.
  __device__ bool MarkOrder(const int16_t (&lru)[kPlaces], unsigned (&stale)[kPlaces]) {
    uint32_t slots = 0;
    uint32_t seen = 0;
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      uint32_t flag = kHit;
      if (HasPlace(PlaceOf(j))) {
        const uint32_t slot = static_cast<uint16_t>(lru[j]);
        if constexpr (kPowerOfTwo) {
          slots |= slot;
          flag = atomicOr(flags_ + (slot & (kHotRows - 1)), kSeen);
        } else {
          flag = slot < static_cast<uint32_t>(n()) ? atomicOr(flags_ + slot, kSeen) : kSeen;
        }
        seen |= flag;
      }
      stale[j] = __ballot_sync(~0u, flag == 0);
    }
    return seen >= kSeen || (kPowerOfTwo && slots >= kHotRows);
  }

  // Counts of each warp: stale slots, and misses in the upper half; and outcomes.
  __device__ void PublishRanks(bool any, const unsigned (&stale)[kPlaces], const int32_t (&first)[kEntries],
                               uint32_t outcomes) {
    uint32_t count = 0;
    if (any) {
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        count += static_cast<uint32_t>(__popc(__ballot_sync(~0u, first[j] == EntryOf(j))));
      }
    }
    count <<= 16;
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) count += static_cast<uint32_t>(__popc(stale[j]));
    const uint32_t sum = __reduce_add_sync(~0u, outcomes);
    if (threadIdx.x % 32 == 0) {
      state_->ranks[threadIdx.x / 32] = count;
      state_->outcomes[threadIdx.x / 32] = sum;
    }
  }

  // Rare, so one thread does it: drops entries that are out of range or repeats, puts the missing slots in front.
  __device__ void Repair(int16_t (&lru)[kPlaces], unsigned (&stale)[kPlaces]) {
    int16_t* const order = Part<int16_t>(args_.single.second);
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      if (HasPlace(PlaceOf(j))) order[PlaceOf(j)] = lru[j];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int32_t s = 0; s < n(); ++s) flags_[s] &= kHit;
      int32_t kept = 0;
      for (int32_t i = 0; i < n(); ++i) {
        const int32_t slot = order[i];
        if (slot < 0 || slot >= n() || flags_[slot] >= kSeen) continue;
        flags_[slot] |= kSeen;
        order[kept++] = static_cast<int16_t>(slot);
      }
      state_->repairs = n() - kept;
      for (int32_t i = kept - 1, to = n() - 1; i >= 0; --i, --to) order[to] = order[i];
      int32_t to = 0;
      for (int32_t s = 0; s < n(); ++s) {
        if (flags_[s] < kSeen) order[to++] = static_cast<int16_t>(s);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      bool is_stale = false;
      if (HasPlace(PlaceOf(j))) {
        lru[j] = order[PlaceOf(j)];
        is_stale = (flags_[lru[j]] & kHit) == 0;
      }
      stale[j] = __ballot_sync(~0u, is_stale);
    }
    __syncthreads();
  }

  // Entries whose marks met in the index: repeats, or keys with one place. Ends with a barrier.
  __device__ void FindFirsts(const int32_t (&key)[kEntries], int32_t (&first)[kEntries]) {
    int32_t* const keys = Part<int32_t>(args_.single.work);
    EntryTable table(Part<uint16_t>(args_.single.second), keys, (1u << SingleShared::kSecondBits) - 1);
    static_assert(1 << SingleShared::kSecondBits >= 2 * SingleShared::kMaxTopK);
    table.Clear();
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (first[j] >= 0) keys[first[j]] = key[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (first[j] >= 0) table.Insert(first[j]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (first[j] >= 0) first[j] = table.First(key[j]);
    }
    __syncthreads();
  }

  // The new order: stale slots behind the victims, the victims, the hits. And the victims by rank.
  __device__ void WriteOrder(const int16_t (&lru)[kPlaces], const unsigned (&stale)[kPlaces], int32_t before,
                             int32_t stale_total, int32_t misses, int16_t* global_lru) {
    // A repaired order is not what global memory holds, so it is written whole.
    const bool repaired = state_->repairs > 0;
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const int32_t p = PlaceOf(j);
      const int32_t rank = before + __popc(stale[j] & LanesBelow());
      before += __popc(stale[j]);
      if (!HasPlace(p)) continue;
      int32_t to = stale_total + p - rank;
      if (stale[j] >> lane & 1) {
        to = rank - misses;
        if (to < 0) {
          Part<int16_t>(args_.single.victims)[rank] = lru[j];
          to += stale_total;
        }
      }
      if (to != p || repaired) global_lru[to] = lru[j];
    }
  }

  // Behind a barrier. Gives the hot rows of the entries that take a victim themselves.
  __device__ void TakeVictims(int32_t r, const BatchRow& row, int32_t before, int32_t misses, bool contested,
                              const int32_t (&key)[kEntries], const int32_t (&first)[kEntries],
                              const int32_t (&pool_row)[kEntries], int32_t* slot_key, int32_t (&target)[kEntries],
                              int32_t* valid) {
    int16_t* const slots = Part<int16_t>(args_.single.work);  // of the entries, where repeats want them
    int32_t evictions = 0;
    int32_t invalid = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      const int32_t i = EntryOf(j);
      const bool wants = first[j] == i;
      target[j] = kNone;
      const unsigned ballot = __ballot_sync(~0u, wants);
      const int32_t m = before + __popc(ballot & LanesBelow());
      before += __popc(ballot);
      if (!wants) continue;
      int32_t slot = kNone;
      if (m < misses) {
        slot = Part<int16_t>(args_.single.victims)[m];
        const int32_t hot_row = access_.PhysicalRow(row, slot);
        target[j] = hot_row;
        evictions += keys_[slot] >= 0;
        slot_key[slot] = key[j];
        access_.Emit(r, i, hot_row, pool_row[j], 1);
        access_.EmitMiss(r, m, hot_row, pool_row[j]);
        if (kOptions) *valid += hot_row >= 0;
      } else {
        access_.Emit(r, i, kNone, kNone, 0);
        ++invalid;
      }
      if (contested) slots[i] = static_cast<int16_t>(slot);
    }
    evictions = __reduce_add_sync(~0u, evictions);
    if (threadIdx.x % 32 == 0) access_.AddStat(kEvictions, evictions);
    int32_t duplicates = 0;
    if (contested) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        const int32_t i = EntryOf(j);
        if (first[j] < 0 || first[j] == i) continue;
        const int32_t slot = slots[first[j]];
        if (slot < 0) {
          access_.Emit(r, i, kNone, kNone, 0);
          ++invalid;
        } else {
          const int32_t hot_row = access_.PhysicalRow(row, slot);
          access_.Emit(r, i, hot_row, pool_row[j], 0);
          if (kOptions) *valid += hot_row >= 0;
          ++duplicates;
        }
      }
    }
    if (duplicates > 0) atomicAdd(&state_->late[0], duplicates);
    if (invalid > 0) atomicAdd(&state_->late[1], invalid);
  }

  // Of this thread's entries, those with a hot row.
  __device__ void AddValid(int32_t valid) {
    if (!kOptions || a_.valid_counts == nullptr) return;
    valid = __reduce_add_sync(~0u, valid);
    if (threadIdx.x % 32 == 0) atomicAdd(&state_->valid, valid);
  }

  // Behind a barrier after the last change of what is counted. A warp for each count: one for all of them would end
  // 0.3 us after the others.
  __device__ void PublishCounts(int32_t r, int32_t hits, int32_t misses) const {
    static_assert(kFoundShift == 0 && kNewestShift == 8 && kResidentShift == 16 && kInvalidShift == 24);
    constexpr uint32_t kSums = 4;
    const uint32_t warp = threadIdx.x / 32;
    if (warp > kSums + 2) return;
    int32_t count = 0;
    if (warp < kSums) {
      count = static_cast<int32_t>(__reduce_add_sync(~0u, state_->outcomes[threadIdx.x % 32] >> (8 * warp) & 0xff));
    }
    if (threadIdx.x % 32 != 0) return;
    switch (warp) {
      case 0:
        return access_.EmitCount(r, kDuplicate, count - hits + state_->late[0]);
      case 1:
        return access_.EmitCount(r, kNewest, count);
      case 2:
        return access_.EmitCount(r, kResident, count);
      case 3:
        return access_.EmitCount(r, kInvalid, count + state_->late[1]);
      case kSums:
        return access_.EmitCount(r, kHot, hits);
      case kSums + 1:
        return access_.EmitCount(r, kMiss, misses);
      default:
        access_.AddStat(kLruRepairs, state_->repairs);
        if (kOptions) access_.EmitValid(r, state_->valid);
    }
  }

  const ResolveKernelArgs& args_;
  const ResolveArgs& a_;
  const RowAccess<kSpace, kOptions> access_;
  char* const shared_;
  int32_t* const keys_;
  uint32_t* const flags_;
  SingleState* const state_;
};

}  // namespace stoker::kernels::cuda
