// Resolve against the oracle over many steps and many random shapes.
#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/resolve.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"

namespace stoker::kernels {
namespace {

class ResolveRandomTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(ResolveRandomTest);

int32_t Draw(std::mt19937_64& rng, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

template <typename T>
T Pick(std::mt19937_64& rng, const std::vector<T>& choices) {
  return choices[Draw(rng, 0, static_cast<int32_t>(choices.size()) - 1)];
}

bool Chance(std::mt19937_64& rng, double share) { return std::uniform_real_distribution<>(0, 1)(rng) < share; }

// Decoding: every step replaces some entries. The order of all slots is compared after each step.
TEST_P(ResolveRandomTest, TwoHundredDriftingSteps) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    std::mt19937_64 rng(6);
    ResolveShape shape;
    shape.index_space = index_space;
    shape.state_rows = 3;
    shape.rows = 3;
    shape.top_k = 128;
    shape.hot_rows = 256;
    shape.positions = 4096;
    shape.blocks = 256;
    ResolveCase c(shape);
    std::vector<std::vector<int32_t>> entries(3);
    for (auto& row : entries) {
      for (int32_t i = 0; i < 128; ++i) row.push_back(Draw(rng, 0, 3999));
    }
    for (int32_t step = 0; step < 200; ++step) {
      for (int32_t r = 0; r < 3; ++r) {
        for (int32_t i = 0; i < 10 * r + 1; ++i) entries[r][Draw(rng, 0, 127)] = Draw(rng, 0, 3799 + step);
        c.SetLength(r, 3800 + step);
        c.SetEntries(r, entries[r]);
      }
      ASSERT_TRUE(c.Step(bench())) << "step " << step;
    }
  }
}

ResolveShape RandomShape(std::mt19937_64& rng) {
  ResolveShape shape;
  shape.index_space = Chance(rng, 0.5) ? IndexSpace::kPosition : IndexSpace::kPoolRow;
  const bool positions = shape.index_space == IndexSpace::kPosition;
  shape.state_rows = Draw(rng, 1, 5);
  shape.rows = Draw(rng, 1, 8);
  shape.top_k = Pick<int32_t>(rng, {1, 2, 7, 16, 31, 32, 33, 64, 65, 100});
  shape.hot_rows = shape.top_k + Pick<int32_t>(rng, {0, 1, 3, 32, 100, 200});
  shape.positions = Draw(rng, 1, 700);
  shape.blocks = Draw(rng, 1, 80);
  shape.block_rows = Pick<int32_t>(rng, {1, 3, 16, 64});
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
  return shape;
}

void RandomInputs(ResolveCase& c, std::mt19937_64& rng) {
  const ResolveShape& shape = c.shape();
  const int32_t keys = shape.index_space == IndexSpace::kPosition ? shape.positions : shape.blocks * shape.block_rows;
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

void RunRandomCase(Bench& bench, uint64_t seed, bool corrupt) {
  std::mt19937_64 rng(seed);
  ResolveCase c(RandomShape(rng));
  const ResolveShape& shape = c.shape();
  const int32_t keys = shape.index_space == IndexSpace::kPosition ? shape.positions : shape.blocks * shape.block_rows;
  RandomTables(c, rng);
  c.FillState(rng, keys, 0.7);
  for (int32_t step = 0; step < 3; ++step) {
    RandomInputs(c, rng);
    for (int32_t i = 0; corrupt && i < 12; ++i) {
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
    ASSERT_TRUE(c.Step(bench, !corrupt)) << "seed " << seed << " step " << step;
  }
}

TEST_P(ResolveRandomTest, TwoThousandCases) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(bench(), seed, /*corrupt=*/false)) << "seed " << seed;
  }
}

TEST_P(ResolveRandomTest, FiveHundredCorruptCases) {
  for (uint64_t seed = 10001; seed <= 10500; ++seed) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(bench(), seed, /*corrupt=*/true)) << "seed " << seed;
  }
}

// The rules of a repair, by hand.
TEST_P(ResolveRandomTest, RepairsTheOrder) {
  ResolveShape shape;
  shape.top_k = 1;
  shape.hot_rows = 8;
  ResolveCase c(shape);
  const std::vector<int16_t> broken = {5, 5, -1, 3, 8, 5, 0, 32767};
  std::copy(broken.begin(), broken.end(), c.lru(0));
  c.SetEntries(0, {-1});
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_EQ(std::vector<int16_t>(c.lru(0), c.lru(0) + 8), (std::vector<int16_t>{1, 2, 4, 6, 7, 5, 3, 0}));
  EXPECT_EQ(c.stats()[kLruRepairs], 1005);
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_EQ(c.stats()[kLruRepairs], 1005);
}

}  // namespace
}  // namespace stoker::kernels
