// The contract of resolve, line by line: entries become a list of items, each item gets its outcome by the first rule
// that matches, and everything is kept in maps and lists.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "tests/reference/reference.h"

namespace stoker::reference {
namespace {

using kernels::IndexSpace;
using kernels::Outcome;
using kernels::ResolveArgs;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

struct Row {
  int64_t state_row = -1;  // -1: padding
  int64_t table_row = -1;
  int64_t length = 0;
};

struct Item {
  int32_t row = 0;
  int32_t entry = 0;
  int64_t key = -1;
  std::optional<Outcome> outcome;  // none for entries < 0
  int64_t hot_row = -1;
  int64_t pool_row = -1;
  int64_t slot = -1;
};

int64_t At(const kernels::IntArray& array, int64_t i) {
  if (array.is_int64) return static_cast<const int64_t*>(array.data)[i];
  return static_cast<const int32_t*>(array.data)[i];
}

Row ReadRow(const ResolveArgs& args, int32_t r) {
  if (args.real_rows != nullptr && r >= *args.real_rows) return Row{};
  Row row;
  row.table_row = At(args.state_rows, r);
  row.state_row = row.table_row;
  if (args.request_states != nullptr) {
    if (row.table_row < 0 || row.table_row >= args.request_count) return Row{};
    row.state_row = args.request_states[row.table_row];
  }
  if (row.state_row < 0 || row.state_row >= args.residency.state_rows) return Row{};
  if (args.index_space == IndexSpace::kPosition) {
    row.length = std::min(std::max(At(args.lengths, r), int64_t{0}), kMaxInt32);
  }
  return row;
}

// Row of a table's block, or -1.
int64_t Look(const int32_t* table, int64_t stride, int64_t rows, int64_t columns, int64_t row, int64_t index,
             int64_t block_rows, int64_t null_block, int64_t limit) {
  const int64_t column = index / block_rows;
  if (table == nullptr || row >= rows || column >= columns) return -1;
  const int64_t block = table[row * stride + column];
  if (block < 0 || block == null_block) return -1;
  const int64_t paged = block * block_rows + index % block_rows;
  return paged < limit ? paged : -1;
}

int64_t Physical(const ResolveArgs& args, const Row& row, int64_t logical) {
  if (args.hot_block_table != nullptr) {
    return Look(args.hot_block_table, args.hot_block_stride, kMaxInt32, args.hot_block_stride, row.table_row, logical,
                args.hot_block_rows, -1, kMaxInt32 + 1);
  }
  return logical < args.region_rows ? row.state_row * args.region_rows + logical : -1;
}

bool Allowed(const ResolveArgs& args, const Row& row, int64_t pool_row) {
  if (args.allowed_blocks == nullptr) return true;
  const int64_t block = pool_row / args.block_rows;
  if (block / 64 >= args.allowed_stride) return false;
  return (args.allowed_blocks[row.state_row * args.allowed_stride + block / 64] >> (block % 64)) & 1;
}

int64_t Attention(const ResolveArgs& args, int64_t hot_row) {
  if (hot_row < 0) return -1;
  const int64_t index = hot_row / args.hot_block_rows * args.attention_block_stride + hot_row % args.hot_block_rows;
  return index <= kMaxInt32 ? index : -1;
}

// The residency of one state row, in containers.
class State {
 public:
  State(const ResolveArgs& args, int64_t state_row) : args_(args), state_row_(state_row) {
    const int64_t n = args.residency.hot_rows;
    keys_.assign(args.residency.slot_key + state_row * n, args.residency.slot_key + (state_row + 1) * n);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = args.residency.lru[state_row * n + i];
      if (slot >= 0 && slot < n && seen.insert(slot).second) {
        order_.push_back(slot);
      } else {
        ++repairs_;
      }
    }
    std::vector<int64_t> missing;
    for (int64_t s = 0; s < n; ++s) {
      if (seen.count(s) == 0) missing.push_back(s);
    }
    order_.insert(order_.begin(), missing.begin(), missing.end());
    for (int64_t s = 0; s < n; ++s) {
      // The first one counts.
      if (keys_[s] >= 0) slots_.emplace(keys_[s], s);
    }
  }

  int64_t Find(int64_t key) const {
    const auto found = slots_.find(key);
    return found == slots_.end() ? -1 : found->second;
  }

  // Splits the order into stale and hit slots.
  void Hit(const std::set<int64_t>& hits) {
    for (const int64_t slot : order_) (hits.count(slot) != 0 ? hits_ : stale_).push_back(slot);
  }

  // The next victim, now with `key`, or -1.
  int64_t Take(int64_t key) {
    if (taken_.size() == stale_.size()) return -1;
    const int64_t slot = stale_[taken_.size()];
    taken_.push_back(slot);
    if (keys_[slot] >= 0) ++evictions_;
    keys_[slot] = static_cast<int32_t>(key);
    return slot;
  }

  void WriteBack() {
    const int64_t n = args_.residency.hot_rows;
    std::vector<int64_t> order(stale_.begin() + static_cast<int64_t>(taken_.size()), stale_.end());
    order.insert(order.end(), taken_.begin(), taken_.end());
    order.insert(order.end(), hits_.begin(), hits_.end());
    for (int64_t i = 0; i < n; ++i) args_.residency.lru[state_row_ * n + i] = static_cast<int16_t>(order[i]);
    std::copy(keys_.begin(), keys_.end(), args_.residency.slot_key + state_row_ * n);
    if (args_.stats != nullptr) {
      args_.stats[kernels::kEvictions] += evictions_;
      args_.stats[kernels::kLruRepairs] += repairs_;
    }
  }

 private:
  const ResolveArgs& args_;
  const int64_t state_row_;
  std::vector<int32_t> keys_;
  std::vector<int64_t> order_;
  std::map<int64_t, int64_t> slots_;
  std::vector<int64_t> stale_;
  std::vector<int64_t> taken_;
  std::vector<int64_t> hits_;
  uint64_t evictions_ = 0;
  uint64_t repairs_ = 0;
};

// The rules above "duplicate". Returns whether one matched.
bool Settle(const ResolveArgs& args, const Row& row, int64_t base, Item& item) {
  if (item.key < 0) return true;
  int64_t resident = -1;
  int64_t newest = -1;
  bool in_range = true;
  if (args.index_space == IndexSpace::kPosition) {
    in_range = item.key < row.length;
    resident = Look(args.resident_table, args.resident_stride, args.resident_rows, args.resident_columns, row.table_row,
                    item.key, args.block_rows, args.resident_null_block, kMaxInt32 + 1);
    item.pool_row = Look(args.block_table, args.block_table_stride, args.block_table_rows, args.block_table_columns,
                         row.table_row, item.key, args.block_rows, args.null_block, args.pool_rows);
    if (item.key >= base - 1) newest = item.key - (base - 1);
  } else {
    if (item.key < args.pool_rows && Allowed(args, row, item.key)) item.pool_row = item.key;
    if (args.newest_pool_rows != nullptr && args.newest_pool_rows[item.row] == item.key) newest = 0;
  }
  if (!in_range || (item.pool_row < 0 && resident < 0)) {
    item.outcome = kernels::kInvalid;
  } else if (newest >= 0) {
    item.hot_row = Physical(args, row, args.newest_row + newest);
    item.outcome = item.hot_row >= 0 ? kernels::kNewest : kernels::kInvalid;
  } else if (resident >= 0) {
    item.hot_row = resident;
    item.outcome = kernels::kResident;
  }
  if (item.outcome == kernels::kInvalid) item.pool_row = -1;
  return item.outcome.has_value();
}

void ResolveUnion(const ResolveArgs& args, const std::vector<Row>& rows, std::vector<Item>& items) {
  const Row& first = rows[items.front().row];
  State state(args, first.state_row);
  std::map<int64_t, Item*> reached;
  std::set<int64_t> hit_slots;
  std::vector<Item*> misses;
  std::vector<Item*> repeats;
  for (Item& item : items) {
    if (Settle(args, rows[item.row], first.length, item)) continue;
    if (!reached.emplace(item.key, &item).second) {
      repeats.push_back(&item);
    } else if (item.slot = state.Find(item.key); item.slot >= 0) {
      item.outcome = kernels::kHot;
      hit_slots.insert(item.slot);
    } else {
      misses.push_back(&item);
    }
  }
  state.Hit(hit_slots);
  for (Item* item : misses) {
    item->slot = state.Take(item->key);
    item->outcome = item->slot >= 0 ? kernels::kMiss : kernels::kInvalid;
  }
  for (Item* item : repeats) {
    item->slot = reached[item->key]->slot;
    item->outcome = item->slot >= 0 ? kernels::kDuplicate : kernels::kInvalid;
  }
  for (Item& item : items) {
    if (item.slot >= 0) item.hot_row = Physical(args, rows[item.row], item.slot);
    if (item.outcome == kernels::kInvalid) item.pool_row = -1;
  }
  state.WriteBack();
}

void Publish(const ResolveArgs& args, const std::vector<Item>& items) {
  for (int32_t r = 0; r < args.rows; ++r) {
    int32_t valid = 0;
    std::vector<int32_t> counts(kernels::kOutcomes, 0);
    std::vector<const Item*> misses;
    for (int32_t i = 0; i < args.top_k; ++i) {
      const Item& item = items[int64_t{r} * args.top_k + i];
      const int64_t flat = int64_t{r} * args.top_k + i;
      const bool miss = item.outcome == kernels::kMiss;
      args.hot_rows_out[r * args.hot_rows_out_stride + i] = static_cast<int32_t>(item.hot_row);
      if (args.attention_indices != nullptr) {
        args.attention_indices[r * args.attention_stride + i] = static_cast<int32_t>(Attention(args, item.hot_row));
      }
      if (args.resolved_pool_rows != nullptr) args.resolved_pool_rows[flat] = static_cast<int32_t>(item.pool_row);
      if (args.miss_mask != nullptr) args.miss_mask[flat] = miss ? 1 : 0;
      if (item.hot_row >= 0) ++valid;
      if (item.outcome.has_value()) ++counts[*item.outcome];
      if (miss) misses.push_back(&item);
    }
    if (args.valid_counts != nullptr) args.valid_counts[r * args.valid_count_stride] = valid;
    if (args.miss_counts != nullptr) {
      args.miss_counts[r] = static_cast<int32_t>(misses.size());
      for (size_t m = 0; m < misses.size(); ++m) {
        args.miss_pool_rows[int64_t{r} * args.top_k + m] = static_cast<int32_t>(misses[m]->pool_row);
        args.miss_hot_rows[int64_t{r} * args.top_k + m] = static_cast<int32_t>(misses[m]->hot_row);
      }
    }
    if (args.told_miss_counts != nullptr) args.told_miss_counts[r] = static_cast<int32_t>(misses.size());
    if (args.counts != nullptr) std::copy(counts.begin(), counts.end(), args.counts + r * kernels::kOutcomes);
    if (args.stats != nullptr) {
      for (int32_t o = 0; o < kernels::kOutcomes; ++o) args.stats[o] += counts[o];
    }
  }
}

}  // namespace

void Resolve(const ResolveArgs& args) {
  std::vector<Row> rows;
  for (int32_t r = 0; r < args.rows; ++r) rows.push_back(ReadRow(args, r));
  std::vector<Item> all;
  for (int32_t r = 0; r < args.rows;) {
    std::vector<Item> items;
    const int64_t state_row = rows[r].state_row;
    do {
      for (int32_t i = 0; i < args.top_k; ++i) {
        Item item;
        item.row = r;
        item.entry = i;
        if (state_row >= 0) item.key = args.entries[r * args.entry_stride + i];
        items.push_back(item);
      }
      ++r;
    } while (state_row >= 0 && r < args.rows && rows[r].state_row == state_row);
    if (state_row >= 0) ResolveUnion(args, rows, items);
    all.insert(all.end(), items.begin(), items.end());
  }
  Publish(args, all);
}

}  // namespace stoker::reference
