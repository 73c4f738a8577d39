#include "tests/kernels/resolve_random.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace stoker::kernels {
namespace {

template <typename T>
T Pick(std::mt19937_64& rng, const std::vector<T>& choices) {
  return choices[kernels::Draw(rng, 0, static_cast<int32_t>(choices.size()) - 1)];
}

}  // namespace

int32_t Draw(std::mt19937_64& rng, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

bool Chance(std::mt19937_64& rng, double share) { return std::uniform_real_distribution<>(0, 1)(rng) < share; }

ResolveShape RandomShape(std::mt19937_64& rng, RandomSize size) {
  ResolveShape shape;
  shape.index_space = Chance(rng, 0.5) ? IndexSpace::kPosition : IndexSpace::kPoolRow;
  const bool positions = shape.index_space == IndexSpace::kPosition;
  shape.state_rows = Draw(rng, 1, 5);
  shape.rows = Draw(rng, 1, 8);
  if (size == RandomSize::kSmall) {
    shape.top_k = Pick<int32_t>(rng, {1, 2, 7, 16, 31, 32, 33, 64, 65, 100});
    shape.hot_rows = shape.top_k + Pick<int32_t>(rng, {0, 1, 3, 32, 100, 200});
    shape.positions = Draw(rng, 1, 700);
    shape.blocks = Draw(rng, 1, 80);
  } else {
    shape.top_k = Pick<int32_t>(rng, {300, 512, 1000, 1024, 2047, 2048, 2049, 3000});
    shape.hot_rows = Chance(rng, 0.6) ? 2 * shape.top_k
                                      : std::max(shape.top_k, Pick<int32_t>(rng, {2048, 4100, 8189, 8192, 8196, 9000}));
    shape.positions = Draw(rng, 1, 100000);
    shape.blocks = Draw(rng, 100, 9000);
  }
  shape.block_rows = Pick<int32_t>(rng, {1, 3, 16, 48, 64});
  shape.table_rows = shape.state_rows + Draw(rng, 0, 2);
  if (Chance(rng, 0.3)) shape.table_columns = Draw(rng, 1, 50);
  shape.null_block = Chance(rng, 0.5) ? -1 : 0;
  shape.newest_capacity = Draw(rng, 1, 4);
  shape.stride_padding = Chance(rng, 0.5) ? 0 : Draw(rng, 1, 9);
  shape.int64_lengths = Chance(rng, 0.5);
  shape.int64_state_rows = Chance(rng, 0.5);
  shape.real_rows = Chance(rng, 0.3);
  shape.request_states = Chance(rng, 0.4);
  shape.hot_block_table = Chance(rng, 0.4);
  shape.resident_table = positions && Chance(rng, 0.4);
  shape.allowed_blocks = !positions && Chance(rng, 0.4);
  shape.newest_pool_rows = !positions && Chance(rng, 0.6);
  shape.attention_indices = Chance(rng, 0.7);
  shape.resolved_pool_rows = Chance(rng, 0.7);
  shape.valid_counts = Chance(rng, 0.7);
  shape.miss_mask = Chance(rng, 0.7);
  shape.compact_list = Chance(rng, 0.8);
  shape.hot_block_rows = Pick<int32_t>(rng, {1, 5, 16, 64});
  shape.attention_block_stride = shape.hot_block_rows + Draw(rng, 0, 9);
  if (Chance(rng, 0.1)) shape.slot_key_offset = Draw(rng, 1, 3);
  return Chance(rng, 0.35) ? Plain(shape) : shape;
}

int32_t KeyLimit(const ResolveShape& shape) {
  return shape.index_space == IndexSpace::kPosition ? shape.positions : shape.blocks * shape.block_rows;
}

void RandomInputs(ResolveCase& c, std::mt19937_64& rng) {
  const ResolveShape& shape = c.shape();
  const int32_t keys = KeyLimit(shape);
  const int32_t ids = shape.request_states ? std::max(shape.table_rows, 1) : shape.state_rows;
  // Rows of one sequence are adjacent: the ids are dealt in runs that do not come back. Two requests may share a state
  // row, so only runs of different state rows follow each other.
  std::vector<int32_t> order;
  for (int32_t i = 0; i < ids; ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), rng);
  if (shape.request_states) {
    for (int32_t i = 0; i < ids; ++i) c.request_states()[i] = i < shape.state_rows ? i : -1;
  }
  size_t at = 0;
  int32_t length = Draw(rng, 0, shape.positions + 5);
  for (int32_t r = 0; r < shape.rows; ++r) {
    if (Chance(rng, 0.5)) {
      ++at;
      length = Draw(rng, 0, shape.positions + 5);
    }
    const bool padding = at >= order.size();
    c.SetStateRow(r, padding ? Pick<int32_t>(rng, {-1, ids, ids + 3}) : order[at]);
    length += Draw(rng, 0, 1);
    c.SetLength(r, length);
    if (shape.newest_pool_rows) c.newest_pool_rows()[r] = Draw(rng, -1, keys - 1);
    std::vector<int32_t> entries;
    for (int32_t i = 0; i < shape.top_k; ++i) {
      const double kind = std::uniform_real_distribution<>(0, 1)(rng);
      if (kind < 0.4 && !padding && order[at] < shape.state_rows) {
        entries.push_back(c.slot_key(order[at])[Draw(rng, 0, shape.hot_rows - 1)]);
      } else if (kind < 0.85) {
        entries.push_back(Draw(rng, 0, std::max(keys - 1, 0)));
      } else if (kind < 0.9) {
        entries.push_back(length - Draw(rng, 0, 3));
      } else if (kind < 0.95 && !entries.empty()) {
        entries.push_back(Pick(rng, entries));
      } else {
        entries.push_back(Pick<int32_t>(
            rng, {-1, -2, keys, keys + 1, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}));
      }
    }
    c.SetEntries(r, entries);
  }
  if (shape.real_rows) *c.real_rows() = Draw(rng, -1, shape.rows + 1);
}

void RandomTables(ResolveCase& c, std::mt19937_64& rng) {
  const ResolveShape& shape = c.shape();
  const int32_t columns =
      shape.table_columns != 0 ? shape.table_columns : (shape.positions + shape.block_rows - 1) / shape.block_rows;
  for (int32_t r = 0; r < shape.table_rows; ++r) {
    for (int32_t i = 0; i < columns; ++i) {
      c.SetBlock(r, i, Chance(rng, 0.1) ? Draw(rng, -2, shape.blocks + 1) : Draw(rng, 0, shape.blocks - 1));
      if (shape.resident_table) c.SetResidentPage(r, i, Chance(rng, 0.2) ? Draw(rng, -1, 30) : -1);
    }
  }
  if (shape.allowed_blocks) {
    for (int32_t s = 0; s < shape.state_rows; ++s) {
      for (int32_t b = 0; b < shape.blocks; ++b) c.SetAllowed(s, b, Chance(rng, 0.8));
    }
  }
}

void CorruptState(ResolveCase& c, std::mt19937_64& rng) {
  const ResolveShape& shape = c.shape();
  const int32_t keys = KeyLimit(shape);
  for (int32_t i = 0; i < 12; ++i) {
    const int32_t s = Draw(rng, 0, shape.state_rows - 1);
    const int32_t slot = Draw(rng, 0, shape.hot_rows - 1);
    switch (Draw(rng, 0, 2)) {
      case 0:
        c.slot_key(s)[slot] = Chance(rng, 0.7) ? Draw(rng, -2, keys + 2) : static_cast<int32_t>(rng());
        break;
      case 1:
        c.lru(s)[slot] = static_cast<int16_t>(Chance(rng, 0.7) ? Draw(rng, -2, shape.hot_rows + 2) : rng());
        break;
      default:
        c.slot_key(s)[slot] = c.slot_key(s)[Draw(rng, 0, shape.hot_rows - 1)];
    }
  }
}

}  // namespace stoker::kernels
