// Resolve on the CPU. kernels/README.md, section "Residency", is the contract.
//
// The keys of the slots are copied and indexed first. Then a union is resolved in three passes:
//   1. every entry in order: all outcomes but misses are final. A hit marks its slot; a marked slot means a repeat.
//      Entries that are in no slot become pending.
//   2. the LRU order once: stale slots to the front of `order`, hit slots to its back.
//   3. pending entries in order: each takes the next stale slot. The index tells repeats, because the first of them has
//      put the key there.
//
// Invariants, whatever a client writes into the residency, the entries and the order meanwhile:
//   1. every index is checked after it was read and before it is used;
//   2. slots are handed out from `order`, which is built from checked values alone;
//   3. an LRU order that was no permutation is repaired before it is used, so what is written back is one.
#include "kernels/resolve.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/key_index.h"

namespace stoker::kernels::cpu {
namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
static_assert(kMaxHotRows - 1 <= std::numeric_limits<int16_t>::max(), "every slot fits int16 beside -1");
static_assert(kMaxHotRows <= KeyIndex::kMaxKeys);

// Splits a row number. Divisors are powers of two in practice, and a shift is cheaper than a division.
class RowSplit {
 public:
  explicit RowSplit(int32_t rows)
      : rows_(static_cast<uint32_t>(rows)), shift_(std::has_single_bit(rows_) ? std::countr_zero(rows_) : -1) {}
  uint32_t Block(uint32_t row) const { return shift_ >= 0 ? row >> shift_ : row / rows_; }
  uint32_t Rest(uint32_t row) const { return shift_ >= 0 ? row & (rows_ - 1) : row % rows_; }
  int64_t Join(int32_t block, uint32_t rest) const { return int64_t{block} * rows_ + rest; }

 private:
  uint32_t rows_;
  int shift_;
};

struct BatchRow {
  int32_t state_row = kNone;
  int32_t table_row = kNone;  // row of the block tables: the request, or the state row
  int64_t length = 0;
  int32_t valid = 0;
  int32_t counts[kOutcomes] = {};
};

struct Pending {
  int32_t key;
  int32_t pool_row;
  int32_t row;
  int32_t entry;
};

enum Mark : uint8_t { kUnmarked = 0, kHitSlot = 1, kSeenSlot = 2 };

struct Scratch {
  std::vector<BatchRow> rows;
  std::vector<Pending> pending;
  std::vector<uint8_t> marks;     // [hot_rows] Mark bits
  std::vector<int16_t> old_lru;   // as read
  std::vector<int16_t> repaired;  // only where old_lru is no permutation
  std::vector<int16_t> order;     // stale slots from the front, hit slots from the back, both in old order
  const std::unique_ptr<KeyIndex> slots = std::make_unique<KeyIndex>();  // of the state row's keys

  // A giant batch must not pin its scratch to the thread: the lists are given back above 4 MiB.
  void Trim() {
    constexpr size_t kKeepBytes = size_t{4} << 20;
    if (pending.capacity() * sizeof(Pending) > kKeepBytes) std::vector<Pending>().swap(pending);
  }
};

int64_t LoadInt(const IntArray& array, int32_t index) {
  return array.is_int64 ? Load(static_cast<const int64_t*>(array.data) + index)
                        : int64_t{Load(static_cast<const int32_t*>(array.data) + index)};
}

template <IndexSpace kSpace>
class Resolver {
 public:
  Resolver(const ResolveArgs& args, Scratch& scratch)
      : args_(args),
        scratch_(scratch),
        slots_(*scratch.slots),
        blocks_(args.block_rows),
        hot_blocks_(args.hot_block_rows) {}

  void Run() {
    LoadBatch();
    const int32_t rows = args_.rows;
    for (int32_t first = 0; first < rows;) {
      const int32_t state_row = scratch_.rows[first].state_row;
      if (state_row < 0) {
        FillPadding(first++);
        continue;
      }
      int32_t end = first + 1;
      while (end < rows && scratch_.rows[end].state_row == state_row) ++end;
      ResolveUnion(first, end);
      first = end;
    }
    if (args_.stats != nullptr) {
      for (int32_t i = 0; i < kStats; ++i) Add(args_.stats + i, stats_[i]);
    }
    scratch_.Trim();
  }

 private:
  static constexpr bool kPosition = kSpace == IndexSpace::kPosition;

  void LoadBatch() {
    scratch_.rows.assign(args_.rows, BatchRow{});
    const int32_t real_rows = args_.real_rows == nullptr ? args_.rows : std::min(Load(args_.real_rows), args_.rows);
    for (int32_t r = 0; r < real_rows; ++r) {
      int64_t id = LoadInt(args_.state_rows, r);
      BatchRow& row = scratch_.rows[r];
      int64_t state_row = id;
      if (args_.request_states != nullptr) {
        if (id < 0 || id >= args_.request_count) continue;
        state_row = Load(args_.request_states + id);
      }
      if (state_row < 0 || state_row >= args_.residency.state_rows) continue;
      row.state_row = static_cast<int32_t>(state_row);
      row.table_row = static_cast<int32_t>(id);
      if (kPosition) row.length = std::clamp<int64_t>(LoadInt(args_.lengths, r), 0, kMaxInt32);
    }
  }

  void FillPadding(int32_t r) {
    for (int32_t i = 0; i < args_.top_k; ++i) Emit(r, i, kNone, kNone, 0);
    PublishCounts(r);
  }

  void Emit(int32_t r, int32_t i, int32_t hot_row, int32_t pool_row, int32_t miss) {
    args_.hot_rows_out[r * args_.hot_rows_out_stride + i] = hot_row;
    if (args_.attention_indices != nullptr) {
      args_.attention_indices[r * args_.attention_stride + i] = AttentionIndex(hot_row);
    }
    const int64_t flat = int64_t{r} * args_.top_k + i;
    if (args_.resolved_pool_rows != nullptr) args_.resolved_pool_rows[flat] = pool_row;
    if (args_.miss_mask != nullptr) args_.miss_mask[flat] = miss;
    scratch_.rows[r].valid += hot_row >= 0;
  }

  void Finish(int32_t r, int32_t i, Outcome outcome, int32_t hot_row, int32_t pool_row) {
    if (outcome == kMiss && args_.miss_counts != nullptr) {
      const int64_t at = int64_t{r} * args_.top_k + scratch_.rows[r].counts[kMiss];
      args_.miss_pool_rows[at] = pool_row;
      args_.miss_hot_rows[at] = hot_row;
    }
    ++scratch_.rows[r].counts[outcome];
    Emit(r, i, hot_row, pool_row, outcome == kMiss);
  }

  int32_t AttentionIndex(int32_t hot_row) const {
    if (hot_row < 0) return kNone;
    const auto row = static_cast<uint32_t>(hot_row);
    const int64_t index = hot_blocks_.Block(row) * args_.attention_block_stride + hot_blocks_.Rest(row);
    return index > kMaxInt32 ? kNone : static_cast<int32_t>(index);
  }

  void PublishCounts(int32_t r) {
    const BatchRow& row = scratch_.rows[r];
    if (args_.valid_counts != nullptr) args_.valid_counts[r * args_.valid_count_stride] = row.valid;
    if (args_.miss_counts != nullptr) args_.miss_counts[r] = row.counts[kMiss];
    if (args_.told_miss_counts != nullptr) args_.told_miss_counts[r] = row.counts[kMiss];
    if (args_.counts != nullptr) std::copy_n(row.counts, kOutcomes, args_.counts + int64_t{r} * kOutcomes);
    for (int32_t i = 0; i < kOutcomes; ++i) stats_[i] += row.counts[i];
  }

  // The physical row of a logical row of the state row's hot buffer, or -1.
  int32_t PhysicalRow(const BatchRow& row, int64_t logical) const {
    if (args_.hot_block_table == nullptr) {
      return logical < args_.region_rows ? static_cast<int32_t>(int64_t{row.state_row} * args_.region_rows + logical)
                                         : kNone;
    }
    if (logical > kMaxInt32) return kNone;
    const uint32_t column = hot_blocks_.Block(static_cast<uint32_t>(logical));
    if (column >= args_.hot_block_stride) return kNone;
    return PagedRow(args_.hot_block_table + row.table_row * args_.hot_block_stride + column, hot_blocks_,
                    hot_blocks_.Rest(static_cast<uint32_t>(logical)), kNone, kMaxInt32 + 1);
  }

  // Row `rest` of the block that *block names, or -1: none, null or at or above the limit.
  static int32_t PagedRow(const int32_t* block, const RowSplit& split, uint32_t rest, int32_t null_block,
                          int64_t limit) {
    const int32_t id = Load(block);
    if (id < 0 || id == null_block) return kNone;
    const int64_t paged = split.Join(id, rest);
    return paged < limit ? static_cast<int32_t>(paged) : kNone;
  }

  int32_t PoolRowOf(const BatchRow& row, int32_t position) const {
    const uint32_t column = blocks_.Block(static_cast<uint32_t>(position));
    if (row.table_row >= args_.block_table_rows || column >= static_cast<uint32_t>(args_.block_table_columns)) {
      return kNone;
    }
    return PagedRow(args_.block_table + row.table_row * args_.block_table_stride + column, blocks_,
                    blocks_.Rest(static_cast<uint32_t>(position)), args_.null_block, args_.pool_rows);
  }

  int32_t ResidentRowOf(const BatchRow& row, int32_t position) const {
    const uint32_t column = blocks_.Block(static_cast<uint32_t>(position));
    if (args_.resident_table == nullptr || row.table_row >= args_.resident_rows ||
        column >= static_cast<uint32_t>(args_.resident_columns)) {
      return kNone;
    }
    return PagedRow(args_.resident_table + row.table_row * args_.resident_stride + column, blocks_,
                    blocks_.Rest(static_cast<uint32_t>(position)), args_.resident_null_block, kMaxInt32 + 1);
  }

  bool Allowed(const BatchRow& row, int32_t pool_row) const {
    if (pool_row >= args_.pool_rows) return false;
    if (args_.allowed_blocks == nullptr) return true;
    const uint32_t block = blocks_.Block(static_cast<uint32_t>(pool_row));
    if (block / 64 >= args_.allowed_stride) return false;
    return Load(args_.allowed_blocks + row.state_row * args_.allowed_stride + block / 64) >> (block % 64) & 1;
  }

  void ResolveUnion(int32_t first, int32_t end) {
    const Residency& residency = args_.residency;
    const int64_t state_row = scratch_.rows[first].state_row;
    slot_key_ = residency.slot_key + state_row * residency.hot_rows;
    lru_ = residency.lru + state_row * residency.hot_rows;
    scratch_.pending.clear();
    scratch_.marks.assign(residency.hot_rows, kUnmarked);
    IndexSlots(int64_t{end - first} * args_.top_k);
    const int64_t base = scratch_.rows[first].length;
    for (int32_t r = first; r < end; ++r) Classify(r, base);
    OrderSlots();
    const int32_t victims = TakeVictims();
    PublishOrder(victims);
    for (int32_t r = first; r < end; ++r) PublishCounts(r);
  }

  void IndexSlots(int64_t entries) {
    const int32_t hot_rows = args_.residency.hot_rows;
    const int32_t* const slot_key = slot_key_;
    slots_.Build(hot_rows, static_cast<int32_t>(std::min<int64_t>(entries, hot_rows)),
                 [slot_key](int32_t slot) { return Load(slot_key + slot); });
  }

  void Classify(int32_t r, int64_t base) {
    const BatchRow row = scratch_.rows[r];
    const int32_t* entries = args_.entries + r * args_.entry_stride;
    const int32_t newest_pool_row =
        !kPosition && args_.newest_pool_rows != nullptr ? Load(args_.newest_pool_rows + r) : kNone;
    for (int32_t i = 0; i < args_.top_k; ++i) {
      const int32_t key = Load(entries + i);
      if (key < 0) {
        Emit(r, i, kNone, kNone, 0);
        continue;
      }
      int32_t pool_row = key;
      int64_t newest = kNone;
      int32_t resident_row = kNone;
      if constexpr (kPosition) {
        if (key >= row.length) {
          Finish(r, i, kInvalid, kNone, kNone);
          continue;
        }
        resident_row = ResidentRowOf(row, key);
        pool_row = PoolRowOf(row, key);
        newest = key - (base - 1);
      } else {
        if (!Allowed(row, key)) pool_row = kNone;
        if (key == newest_pool_row) newest = 0;
      }
      if (pool_row < 0 && resident_row < 0) {
        Finish(r, i, kInvalid, kNone, kNone);
      } else if (newest >= 0) {
        const int32_t hot_row = PhysicalRow(row, args_.newest_row + newest);
        if (hot_row >= 0) {
          Finish(r, i, kNewest, hot_row, pool_row);
        } else {
          Finish(r, i, kInvalid, kNone, kNone);
        }
      } else if (resident_row >= 0) {
        Finish(r, i, kResident, resident_row, pool_row);
      } else if (const int32_t slot = slots_.Find(key); slot >= 0) {
        const bool repeat = scratch_.marks[slot] != kUnmarked;
        scratch_.marks[slot] = kHitSlot;
        Finish(r, i, repeat ? kDuplicate : kHot, PhysicalRow(row, slot), pool_row);
      } else {
        scratch_.pending.push_back({key, pool_row, r, i});
      }
    }
  }

  // Builds `order` from the LRU order, which it repairs first where it is no permutation.
  void OrderSlots() {
    const int32_t n = args_.residency.hot_rows;
    scratch_.old_lru.resize(n);
    scratch_.order.resize(n);
    for (int32_t i = 0; i < n; ++i) scratch_.old_lru[i] = Load(lru_ + i);
    if (Partition(scratch_.old_lru)) return;
    for (uint8_t& mark : scratch_.marks) mark &= kHitSlot;
    Repair();
    Partition(scratch_.repaired);
  }

  // Returns whether `lru` is a permutation.
  bool Partition(const std::vector<int16_t>& lru) {
    const int32_t n = args_.residency.hot_rows;
    uint8_t* const marks = scratch_.marks.data();
    int16_t* const order = scratch_.order.data();
    int32_t stale = 0;
    int32_t hits = 0;
    uint8_t repeats = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t slot = lru[i];
      if (slot < 0 || slot >= n) return false;
      const uint8_t mark = marks[slot];
      repeats |= mark & kSeenSlot;
      marks[slot] = mark | kSeenSlot;
      // Both ends are written and one index advances: no branch on data that looks random.
      const int32_t hit = mark & kHitSlot;
      order[stale] = static_cast<int16_t>(slot);
      order[n - 1 - hits] = static_cast<int16_t>(slot);
      hits += hit;
      stale += 1 - hit;
    }
    stale_ = stale;
    return repeats == 0;
  }

  void Repair() {
    const int32_t n = args_.residency.hot_rows;
    std::vector<bool> present(n);
    std::vector<int16_t> kept;
    kept.reserve(n);
    for (const int16_t slot : scratch_.old_lru) {
      if (slot < 0 || slot >= n || present[slot]) {
        ++stats_[kLruRepairs];
      } else {
        present[slot] = true;
        kept.push_back(slot);
      }
    }
    scratch_.repaired.clear();
    for (int32_t s = 0; s < n; ++s) {
      if (!present[s]) scratch_.repaired.push_back(static_cast<int16_t>(s));
    }
    scratch_.repaired.insert(scratch_.repaired.end(), kept.begin(), kept.end());
  }

  // Gives the pending entries their slots. Returns how many stale slots were taken.
  int32_t TakeVictims() {
    int32_t victims = 0;
    for (const Pending& pending : scratch_.pending) {
      const BatchRow& row = scratch_.rows[pending.row];
      if (const int32_t slot = slots_.Find(pending.key); slot >= 0) {
        Finish(pending.row, pending.entry, kDuplicate, PhysicalRow(row, slot), pending.pool_row);
      } else if (victims < stale_) {
        const int16_t victim = scratch_.order[victims++];
        Assign(victim, pending.key);
        Finish(pending.row, pending.entry, kMiss, PhysicalRow(row, victim), pending.pool_row);
      } else {
        Finish(pending.row, pending.entry, kInvalid, kNone, kNone);
      }
    }
    return victims;
  }

  void Assign(int16_t slot, int32_t key) {
    if (slots_.KeyAt(slot) >= 0) ++stats_[kEvictions];
    slots_.Replace(slot, key);
    Store(slot_key_ + slot, key);
  }

  void PublishOrder(int32_t victims) {
    const int32_t n = args_.residency.hot_rows;
    const int16_t* const order = scratch_.order.data();
    int32_t at = 0;
    const auto put = [&](int16_t slot) {
      if (scratch_.old_lru[at] != slot) Store(lru_ + at, slot);
      ++at;
    };
    for (int32_t i = victims; i < stale_; ++i) put(order[i]);
    for (int32_t i = 0; i < victims; ++i) put(order[i]);
    for (int32_t i = n - 1; i >= stale_; --i) put(order[i]);
  }

  const ResolveArgs args_;
  Scratch& scratch_;
  KeyIndex& slots_;
  const RowSplit blocks_;
  const RowSplit hot_blocks_;
  int32_t* slot_key_ = nullptr;
  int16_t* lru_ = nullptr;
  int32_t stale_ = 0;
  uint64_t stats_[kStats] = {};
};

}  // namespace

void Resolve(const ResolveArgs& args) {
  thread_local Scratch scratch;
  if (args.index_space == IndexSpace::kPosition) {
    Resolver<IndexSpace::kPosition>(args, scratch).Run();
  } else {
    Resolver<IndexSpace::kPoolRow>(args, scratch).Run();
  }
}

}  // namespace stoker::kernels::cpu
