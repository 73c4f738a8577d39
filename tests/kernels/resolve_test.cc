// Resolve against the oracle, by shape: sizes at the edges of warps, blocks and the slot type, and every rule of the
// contract.
#include "kernels/resolve.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"

namespace stoker::kernels {
namespace {

using testing::Each;
using testing::ElementsAre;

class ResolveTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(ResolveTest);

std::vector<int32_t> Range(int32_t first, int32_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

std::vector<int32_t> ShuffledRange(int32_t first, int32_t count, std::mt19937_64& rng) {
  std::vector<int32_t> values = Range(first, count);
  std::shuffle(values.begin(), values.end(), rng);
  return values;
}

// A shape whose positions and pool have room for `keys` keys.
ResolveShape ShapeFor(IndexSpace index_space, int32_t top_k, int32_t hot_rows, int32_t keys) {
  ResolveShape shape;
  shape.index_space = index_space;
  shape.top_k = top_k;
  shape.hot_rows = hot_rows;
  shape.positions = keys + 1;
  shape.blocks = keys / shape.block_rows + 2;
  return shape;
}

// What the table of the contract says for one sequence, by hand.
TEST_P(ResolveTest, HandWorkedExample) {
  ResolveShape shape;
  shape.top_k = 8;
  shape.hot_rows = 8;
  shape.positions = 128;
  ResolveCase c(shape);
  // Slots 0 to 7 hold nothing but 2: 20, 5: 50, 6: 60; the order is 7 6 5 4 3 2 1 0.
  for (int32_t i = 0; i < 8; ++i) c.lru(0)[i] = static_cast<int16_t>(7 - i);
  c.Hold(0, 2, 20);
  c.Hold(0, 5, 50);
  c.Hold(0, 6, 60);
  c.SetLength(0, 101);
  c.SetEntries(0, {20, 33, -1, 100, 101, 33, 50, 20});
  ASSERT_TRUE(c.Step(bench()));
  // 33 takes slot 7, which is the least recent.
  EXPECT_THAT(c.hot_rows(0), ElementsAre(2, 7, -1, 8, -1, 7, 5, 2));
  // hot, newest, resident, miss, duplicate, invalid
  EXPECT_THAT(c.counts(0), ElementsAre(2, 1, 0, 1, 2, 1));
  EXPECT_THAT(std::vector<int16_t>(c.lru(0), c.lru(0) + 8), ElementsAre(6, 4, 3, 1, 0, 7, 5, 2));
  EXPECT_THAT(c.misses(0), ElementsAre(7));
  EXPECT_EQ(c.valid_counts()[0], 6);
  EXPECT_EQ(c.stats()[kEvictions], 1000) << "slot 7 was empty";
  // A second miss evicts 60 from slot 6.
  c.SetEntries(0, {70});
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.hot_rows(0), ElementsAre(6, -1, -1, -1, -1, -1, -1, -1));
  EXPECT_EQ(c.stats()[kEvictions], 1001);
  EXPECT_EQ(c.slot_key(0)[6], 70);
}

enum class Mix { kAllMiss, kAllHot, kMixed };

TEST_P(ResolveTest, EdgeSizes) {
  std::mt19937_64 rng(1);
  for (const int32_t top_k : {1, 31, 32, 33, 63, 64, 65, 128, 2048}) {
    for (const int32_t hot_rows : {top_k, 2 * top_k, 5 * top_k, kMaxHotRows}) {
      for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
        for (const Mix mix : {Mix::kAllMiss, Mix::kAllHot, Mix::kMixed}) {
          SCOPED_TRACE(testing::Message() << "top_k " << top_k << " hot_rows " << hot_rows << " index space "
                                          << static_cast<int>(index_space) << " mix " << static_cast<int>(mix));
          const int32_t keys = hot_rows + top_k + 3;
          ResolveCase c(ShapeFor(index_space, top_k, hot_rows, keys));
          // Slot s holds hot_rows - 1 - s, in shuffled order of recency: position and slot are never confused.
          for (int32_t s = 0; s < hot_rows; ++s) c.Hold(0, s, hot_rows - 1 - s);
          std::shuffle(c.lru(0), c.lru(0) + hot_rows, rng);
          const int32_t hits = mix == Mix::kAllMiss ? 0 : mix == Mix::kAllHot ? top_k : top_k / 2;
          std::vector<int32_t> entries = ShuffledRange(0, hot_rows, rng);
          entries.resize(hits);
          const std::vector<int32_t> missing = ShuffledRange(hot_rows, top_k, rng);
          entries.insert(entries.end(), missing.begin(), missing.begin() + top_k - hits);
          std::shuffle(entries.begin(), entries.end(), rng);
          c.SetEntries(0, entries);
          ASSERT_TRUE(c.Step(bench()));
          ASSERT_THAT(c.counts(0), ElementsAre(hits, 0, 0, top_k - hits, 0, 0));
          ASSERT_TRUE(c.Step(bench()));
          ASSERT_THAT(c.counts(0), ElementsAre(top_k, 0, 0, 0, 0, 0)) << "the same entries again are all hot";
        }
      }
    }
  }
}

TEST_P(ResolveTest, LastSlotOfTheLargestHotBuffer) {
  ResolveCase c(ShapeFor(IndexSpace::kPosition, 2, kMaxHotRows, kMaxHotRows + 64));
  for (int32_t s = 0; s < kMaxHotRows; ++s) c.Hold(0, s, s);
  std::swap(c.lru(0)[0], c.lru(0)[kMaxHotRows - 1]);
  c.SetEntries(0, {32768});
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_EQ(c.hot_rows(0)[0], 32767);
  EXPECT_EQ(c.slot_key(0)[32767], 32768);
  c.SetEntries(0, {32768, 32767});
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_EQ(c.hot_rows(0)[0], 32767);
  EXPECT_THAT(c.counts(0), ElementsAre(1, 0, 0, 1, 0, 0));
}

TEST_P(ResolveTest, LargestTopK) {
  std::mt19937_64 rng(2);
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveCase c(ShapeFor(index_space, kMaxTopK, kMaxTopK, 20000));
    c.FillState(rng, 20000, 0.7);
    std::vector<int32_t> entries = ShuffledRange(0, 20000, rng);
    entries.resize(kMaxTopK);
    c.SetEntries(0, entries);
    ASSERT_TRUE(c.Step(bench()));
  }
}

// A short sequence lies in slots 0, 1, ...; the step that makes it longer than the hot buffer finds it there.
TEST_P(ResolveTest, LengthsAroundHotRows) {
  for (const int32_t length : {1, 2, 62, 63, 64, 65, 66, 128}) {
    SCOPED_TRACE(length);
    ResolveShape shape;
    shape.top_k = 64;
    shape.hot_rows = 64;
    ResolveCase c(shape);
    for (int32_t p = 0; p < std::min(length - 1, 64); ++p) c.Hold(0, p, p);
    for (int32_t step = 0; step < 4; ++step) {
      c.SetLength(0, length + step);
      std::vector<int32_t> entries = Range(std::max(0, length + step - 64), std::min(64, length + step));
      std::reverse(entries.begin(), entries.end());
      c.SetEntries(0, entries);
      ASSERT_TRUE(c.Step(bench()));
      ASSERT_EQ(c.counts(0)[kNewest], 1);
      ASSERT_EQ(c.counts(0)[kInvalid], 0);
      if (step == 0 && length <= 65) {
        ASSERT_EQ(c.counts(0)[kMiss], 0);
      }
    }
  }
}

TEST_P(ResolveTest, LengthsOfEveryKind) {
  ResolveShape shape;
  shape.top_k = 8;
  for (const bool wide : {false, true}) {
    shape.int64_lengths = wide;
    ResolveCase c(shape);
    c.SetEntries(0, {0, 1, 2, 3, 511, 512, 513, std::numeric_limits<int32_t>::max()});
    for (const int64_t length :
         {int64_t{0}, int64_t{-1}, int64_t{1}, int64_t{3}, int64_t{512}, int64_t{513},
          int64_t{std::numeric_limits<int32_t>::max()}, int64_t{std::numeric_limits<int32_t>::min()}}) {
      SCOPED_TRACE(length);
      c.SetLength(0, length);
      ASSERT_TRUE(c.Step(bench()));
    }
    if (!wide) continue;
    for (const int64_t length :
         {int64_t{1} << 32, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
      SCOPED_TRACE(length);
      c.SetLength(0, length);
      ASSERT_TRUE(c.Step(bench()));
    }
  }
}

// A table of single rows, whose last column no integer of 32 bits has the number behind.
TEST_P(ResolveTest, LongestLengthInBlocksOfOneRow) {
  for (const bool plain : {true, false}) {
    ResolveShape shape;
    shape.top_k = 8;
    shape.hot_rows = 16;
    shape.positions = 100;
    shape.block_rows = 1;
    shape.blocks = 100;
    ResolveCase c(plain ? Plain(shape) : shape);
    c.SetLength(0, INT32_MAX);
    c.Hold(0, 2, 5);
    c.SetEntries(0, {5, 6, 99, 100, 70000, 1 << 30, INT32_MAX - 1, INT32_MAX});
    ASSERT_TRUE(c.Step(bench())) << plain;
    EXPECT_THAT(c.counts(0), ElementsAre(1, 0, 0, 2, 0, 5));
  }
}

TEST_P(ResolveTest, PaddingRows) {
  std::mt19937_64 rng(3);
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape shape;
    shape.index_space = index_space;
    shape.state_rows = 4;
    shape.rows = 6;
    shape.real_rows = true;
    for (const int32_t real_rows : {-3, 0, 1, 3, 5, 6, 7, 1000}) {
      for (const std::vector<int64_t>& states :
           {std::vector<int64_t>{0, 1, 2, 3, -1, -1}, {-1, -1, 2, -1, 1, 0}, {4, 0, 5, 2, 1 << 30, -7}}) {
        ResolveCase c(shape);
        c.FillState(rng, 300, 0.6);
        *c.real_rows() = real_rows;
        for (int32_t r = 0; r < 6; ++r) {
          c.SetStateRow(r, states[r]);
          c.SetEntries(r, ShuffledRange(r * 40, 32, rng));
        }
        ASSERT_TRUE(c.Step(bench()));
        for (int32_t r = 0; r < 6; ++r) {
          if (r < real_rows && states[r] >= 0 && states[r] < 4) continue;
          EXPECT_THAT(c.hot_rows(r), Each(-1));
          EXPECT_THAT(c.counts(r), Each(0));
          EXPECT_THAT(c.misses(r), testing::IsEmpty());
        }
      }
    }
  }
}

TEST_P(ResolveTest, WideStateRowsDoNotWrap) {
  ResolveShape shape;
  shape.int64_state_rows = true;
  ResolveCase c(shape);
  c.SetEntries(0, {1, 2, 3});
  c.SetStateRow(0, int64_t{1} << 32);
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.hot_rows(0), Each(-1));
}

TEST_P(ResolveTest, NoRows) {
  ResolveShape shape;
  shape.rows = 0;
  ResolveCase c(shape);
  ASSERT_TRUE(c.Step(bench()));
}

TEST_P(ResolveTest, KeyInSeveralSlots) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape shape;
    shape.index_space = index_space;
    shape.top_k = 4;
    shape.hot_rows = 8;
    ResolveCase c(shape);
    for (const int32_t slot : {6, 3, 5}) c.Hold(0, slot, 40);
    c.Hold(0, 0, 41);
    c.SetEntries(0, {40, 40, 41, 42});
    ASSERT_TRUE(c.Step(bench(), /*consistent=*/false));
    EXPECT_THAT(c.hot_rows(0), ElementsAre(3, 3, 0, 1));
    EXPECT_THAT(c.counts(0), ElementsAre(2, 0, 0, 1, 1, 0));
  }
}

// Keys that a table of few places, or of low bits alone, would confuse: in slots, as hits and as misses, repeated.
TEST_P(ResolveTest, KeysThatAgreeInTheirLowBits) {
  std::mt19937_64 rng(8);
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    for (const int32_t stride : {1 << 8, 1 << 12, 1 << 13, 1 << 15, 1 << 16, 1 << 17}) {
      SCOPED_TRACE(testing::Message() << "stride " << stride << " index space " << static_cast<int>(index_space));
      constexpr int32_t kFamilies = 24;
      ResolveShape shape = ShapeFor(index_space, 48, 96, stride * kFamilies);
      shape.rows = 2;
      ResolveCase c(shape);
      const auto draw = [&] {
        return static_cast<int32_t>(rng() % kFamilies) * stride + static_cast<int32_t>(rng() % 8);
      };
      std::set<int32_t> held;
      while (held.size() < 80) held.insert(draw());
      std::vector<int32_t> keys(held.begin(), held.end());
      std::shuffle(keys.begin(), keys.end(), rng);
      for (int32_t s = 0; s < 80; ++s) c.Hold(0, s, keys[s]);
      for (int32_t step = 0; step < 20; ++step) {
        for (int32_t r = 0; r < 2; ++r) {
          std::vector<int32_t> entries(48);
          std::generate(entries.begin(), entries.end(), draw);
          c.SetEntries(r, entries);
        }
        ASSERT_TRUE(c.Step(bench())) << "step " << step;
      }
    }
  }
}

// Both seeds lose a repeated miss one step later: its second copy is counted as in a slot that the first one never
// filled.
TEST_P(ResolveTest, RepeatsOfEveryOutcome) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape shape;
    shape.index_space = index_space;
    shape.top_k = 16;
    shape.hot_rows = 16;
    shape.newest_pool_rows = index_space == IndexSpace::kPoolRow;
    ResolveCase c(shape);
    c.Hold(0, 9, 7);
    c.SetLength(0, 401);
    if (shape.newest_pool_rows) c.newest_pool_rows()[0] = 400;
    c.SetEntries(0, {7, 7, 8, 8, 7, 8, 400, 400, -1, -1, 2000, 2000, 9, 8, 400, -5});
    ASSERT_TRUE(c.Step(bench()));
    EXPECT_THAT(c.counts(0), ElementsAre(1, 3, 0, 2, 5, 2));
    EXPECT_EQ(c.misses(0).size(), 2);
    c.SetEntries(0, {8, 9, 8});
    ASSERT_TRUE(c.Step(bench()));
    EXPECT_THAT(c.counts(0), ElementsAre(2, 0, 0, 0, 1, 0));
  }
}

TEST_P(ResolveTest, QueryRowsOfOneSequence) {
  std::mt19937_64 rng(4);
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    for (const int32_t rise : {0, 1, 2}) {
      ResolveShape shape;
      shape.index_space = index_space;
      shape.state_rows = 3;
      shape.rows = 9;
      shape.top_k = 20;
      shape.hot_rows = 80;
      shape.newest_pool_rows = index_space == IndexSpace::kPoolRow;
      ResolveCase c(shape);
      c.FillState(rng, 200, 0.8);
      const std::vector<int64_t> states = {2, 2, 2, 2, 0, 0, -1, 1, 1};
      for (int32_t step = 0; step < 20; ++step) {
        for (int32_t r = 0; r < 9; ++r) {
          c.SetStateRow(r, states[r]);
          const int32_t base = 150 + step;
          c.SetLength(r, base + r * rise);
          if (shape.newest_pool_rows) c.newest_pool_rows()[r] = base + r;
          std::vector<int32_t> entries = ShuffledRange(step * 3, 160, rng);
          entries.resize(20);
          entries[3] = entries[5];
          entries[7] = base + r * rise - 1;
          entries[8] = base - 1;
          c.SetEntries(r, entries);
        }
        ASSERT_TRUE(c.Step(bench())) << "step " << step << " rise " << rise;
      }
    }
  }
}

// Positions of all query rows that are not in the pool yet lie one after the other behind the hot buffer; beyond the
// block of newest rows there is nothing.
TEST_P(ResolveTest, NewestRowsOfSeveralQueryRows) {
  ResolveShape shape;
  shape.rows = 3;
  shape.top_k = 4;
  shape.hot_rows = 16;
  shape.newest_capacity = 2;
  ResolveCase c(shape);
  for (int32_t r = 0; r < 3; ++r) {
    c.SetLength(r, 100 + r);
    c.SetEntries(r, {99, 100, 101, 98});
  }
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.hot_rows(0), ElementsAre(16, -1, -1, 0));
  EXPECT_THAT(c.hot_rows(1), ElementsAre(16, 17, -1, 0));
  EXPECT_THAT(c.hot_rows(2), ElementsAre(16, 17, -1, 0));
  EXPECT_THAT(c.counts(2), ElementsAre(0, 2, 0, 0, 1, 1));
}

TEST_P(ResolveTest, UnionThatAsksForMoreThanTheHotBuffer) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape shape;
    shape.index_space = index_space;
    shape.rows = 4;
    shape.top_k = 16;
    shape.hot_rows = 20;
    ResolveCase c(shape);
    c.Hold(0, 3, 60);
    for (int32_t r = 0; r < 4; ++r) c.SetEntries(r, Range(15 * r, 16));
    ASSERT_TRUE(c.Step(bench()));
    // 60 is the last entry of the last row and hot; 19 others find a victim, the rest do not.
    EXPECT_EQ(c.hot_rows(3)[15], 3);
    EXPECT_THAT(c.counts(0), ElementsAre(0, 0, 0, 16, 0, 0));
    EXPECT_THAT(c.counts(1), ElementsAre(0, 0, 0, 3, 1, 12));
    EXPECT_THAT(c.counts(2), ElementsAre(0, 0, 0, 0, 0, 16)) << "its first entry repeats one without a victim";
    EXPECT_THAT(c.counts(3), ElementsAre(1, 0, 0, 0, 0, 15));
  }
}

TEST_P(ResolveTest, BlocksThatAreNotThere) {
  ResolveShape shape;
  shape.top_k = 64;
  shape.blocks = 40;
  shape.block_rows = 12;  // no power of two
  shape.table_columns = 20;
  shape.null_block = 3;
  ResolveCase c(shape);
  c.SetBlock(0, 2, -1);
  c.SetBlock(0, 4, 3);
  c.SetBlock(0, 5, 39);
  c.SetBlock(0, 6, 40);
  c.SetBlock(0, 7, std::numeric_limits<int32_t>::max());
  c.SetBlock(0, 8, std::numeric_limits<int32_t>::min());
  std::vector<int32_t> entries;
  for (int32_t block = 0; block <= 24; ++block) {
    entries.push_back(block * 12);
    entries.push_back(block * 12 + 11);
  }
  c.SetEntries(0, entries);
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.counts(0), ElementsAre(0, 0, 0, 30, 0, 20));
  EXPECT_EQ(c.resolved(0)[10], 39 * 12);
}

TEST_P(ResolveTest, PositionsBeyondTheTable) {
  ResolveShape shape;
  shape.table_columns = 32;
  shape.resident_table = true;
  ResolveCase c(shape);
  c.SetLength(0, 600);
  c.SetResidentPage(0, 12, 9);
  c.SetResidentPage(0, 13, 0);  // the resident null block
  c.SetBlock(0, 12, -1);
  c.SetEntries(0, {0, 99, 12 * 16, 12 * 16 + 15, 13 * 16, 511, 512, 599});
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.counts(0), ElementsAre(0, 0, 2, 4, 0, 2));
  EXPECT_EQ(c.hot_rows(0)[3], 9 * 16 + 15);
  EXPECT_EQ(c.resolved(0)[3], -1) << "a page of the engine needs no pool block";
}

TEST_P(ResolveTest, ValuesThatDoNotFitARow) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  ResolveShape shape;
  shape.top_k = 6;
  shape.resident_table = true;
  shape.hot_block_table = true;
  shape.attention_block_stride = 1 << 26;
  ResolveCase c(shape);
  c.SetResidentPage(0, 1, kMax);
  c.SetResidentPage(0, 2, kMax / 16);
  c.SetResidentPage(0, 3, std::numeric_limits<int32_t>::min());
  c.hot_block_table()[0] = kMax;
  c.hot_block_table()[1] = -1;
  c.hot_block_table()[2] = kMax / 16;
  c.hot_block_table()[4] = -9;  // of the newest rows
  for (int32_t s = 0; s < 64; ++s) c.Hold(0, s, 200 + s);
  c.SetEntries(0, {16, 32, 48, 200, 217, 511});
  ASSERT_TRUE(c.Step(bench()));
  c.SetEntries(0, {230, 231, 232, 233, 248, 249});
  ASSERT_TRUE(c.Step(bench()));
}

TEST_P(ResolveTest, AllowedBlocks) {
  ResolveShape shape;
  shape.index_space = IndexSpace::kPoolRow;
  shape.state_rows = 2;
  shape.rows = 2;
  shape.blocks = 130;
  shape.allowed_blocks = true;
  ResolveCase c(shape);
  c.SetAllowed(0, 1, false);
  c.SetAllowed(0, 64, false);
  c.SetAllowed(1, 129, false);
  for (int32_t r = 0; r < 2; ++r) {
    c.SetEntries(r, {0, 15, 16, 31, 32, 63 * 16 + 15, 64 * 16, 65 * 16, 129 * 16 + 3, 130 * 16, 131 * 16});
  }
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_THAT(c.counts(0), ElementsAre(0, 0, 0, 6, 0, 5));
  EXPECT_THAT(c.counts(1), ElementsAre(0, 0, 0, 8, 0, 3));
}

// Each optional input and output alone, present and absent.
TEST_P(ResolveTest, OptionalInputsAndOutputs) {
  std::mt19937_64 rng(5);
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape plain;
    plain.index_space = index_space;
    plain.state_rows = 3;
    plain.rows = 4;
    plain.table_rows = 5;
    plain.attention_indices = plain.resolved_pool_rows = plain.valid_counts = plain.miss_mask = false;
    plain.compact_list = plain.counts = plain.stats = false;
    std::vector<bool ResolveShape::*> flags = {
        &ResolveShape::int64_lengths,      &ResolveShape::int64_state_rows, &ResolveShape::real_rows,
        &ResolveShape::request_states,     &ResolveShape::hot_block_table,  &ResolveShape::attention_indices,
        &ResolveShape::resolved_pool_rows, &ResolveShape::valid_counts,     &ResolveShape::miss_mask,
        &ResolveShape::compact_list,       &ResolveShape::counts,           &ResolveShape::stats};
    if (index_space == IndexSpace::kPosition) {
      flags.push_back(&ResolveShape::resident_table);
    } else {
      flags.push_back(&ResolveShape::allowed_blocks);
      flags.push_back(&ResolveShape::newest_pool_rows);
    }
    ResolveShape all = plain;
    for (const auto flag : flags) all.*flag = true;
    std::vector<ResolveShape> shapes = {plain, all};
    for (const auto flag : flags) {
      shapes.push_back(plain);
      shapes.back().*flag = true;
      shapes.push_back(all);
      shapes.back().*flag = false;
      shapes.back().stride_padding = 5;
    }
    for (size_t i = 0; i < shapes.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "shape " << i << " index space " << static_cast<int>(index_space));
      ResolveCase c(shapes[i]);
      c.FillState(rng, 300, 0.5);
      for (int32_t step = 0; step < 3; ++step) {
        for (int32_t r = 0; r < 4; ++r) {
          // With requests, two of them share a state row; rows of one state row are adjacent.
          constexpr int32_t kRequests[] = {3, 0, 4, 2};
          c.SetStateRow(r, shapes[i].request_states ? kRequests[r] : r - 1);
          c.SetLength(r, 340);
          c.SetEntries(r, ShuffledRange(310 - 40 * r, 32, rng));
          if (shapes[i].newest_pool_rows) c.newest_pool_rows()[r] = 320;
          if (shapes[i].resident_table) c.SetResidentPage(r, 17, 3 + r);
        }
        if (shapes[i].real_rows) *c.real_rows() = 4 - step;
        ASSERT_TRUE(c.Step(bench()));
      }
    }
  }
}

TEST_P(ResolveTest, RequestIdsOfEveryKind) {
  ResolveShape shape;
  shape.state_rows = 3;
  shape.rows = 6;
  shape.table_rows = 4;
  shape.request_states = true;
  ResolveCase c(shape);
  c.request_states()[0] = 2;
  c.request_states()[1] = -1;
  c.request_states()[2] = 3;  // no such state row
  c.request_states()[3] = 0;
  for (const std::vector<int64_t>& requests :
       {std::vector<int64_t>{0, 1, 2, 3, 4, -1}, {3, 3, 3, 0, 0, 100}, {2, 2, 1, 1, 0, 3}}) {
    for (int32_t r = 0; r < 6; ++r) {
      c.SetStateRow(r, requests[r]);
      c.SetEntries(r, Range(r * 10, 32));
    }
    ASSERT_TRUE(c.Step(bench()));
  }
}

}  // namespace
}  // namespace stoker::kernels
