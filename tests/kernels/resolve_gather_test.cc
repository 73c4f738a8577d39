// Resolve and gather as one operation, against the two oracles one after the other.
#include "kernels/resolve_gather.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/resolve_gather_case.h"
#include "tests/kernels/resolve_random.h"
#include "tests/kernels/row_store_case.h"

namespace stoker::kernels {
namespace {

class ResolveGatherTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(ResolveGatherTest);

ResolveShape Shape(IndexSpace index_space) {
  ResolveShape shape;
  shape.index_space = index_space;
  shape.state_rows = 3;
  shape.rows = 3;
  shape.top_k = 40;
  shape.hot_rows = 100;
  return shape;
}

TEST_P(ResolveGatherTest, EqualsTheTwoOneAfterTheOther) {
  std::mt19937_64 rng(41);
  for (const FormatCase& format : FormatCases()) {
    if (format.format.row_bytes > 10000) continue;
    for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
      for (const bool plain : {false, true}) {
        SCOPED_TRACE(format.name);
        const ResolveShape shape = Shape(index_space);
        // The pool ends before the rows that resolve may name do.
        ResolveGatherCase c(plain ? Plain(shape) : shape, format.format, {1, 0, 2}, 480, rng);
        c.resolve().FillState(rng, 500, 0.8);
        for (int32_t step = 0; step < 2; ++step) {
          for (int32_t r = 0; r < 3; ++r) {
            std::vector<int32_t> entries(40);
            for (int32_t& entry : entries) entry = static_cast<int32_t>(rng() % 510) - 1;
            c.resolve().SetEntries(r, entries);
          }
          ASSERT_TRUE(c.Step(bench()));
        }
      }
    }
  }
}

struct BatchKind {
  std::string name;
  IndexSpace index_space = IndexSpace::kPosition;
  int32_t top_k = 64;
  int32_t hot_rows = 128;
  bool plain = false;
  bool unions = false;  // query rows in runs of one to four, and padding
  int32_t slot_key_offset = 0;
};

// Batches of the sizes at which the CUDA backend gives a sequence more blocks or fewer; and those in which, on 132
// multiprocessors, it gives none beside its own, and sequences take turns.
const std::vector<int32_t> kBatchSizes = {1, 2, 8, 9, 16, 17, 33, 64, 66};
const std::vector<int32_t> kLargeBatchSizes = {67, 131, 132, 200};

const RowFormat kBatchFormats[] = {
    {.row_bytes = 16},
    {.row_bytes = 20},
    {.row_bytes = 24},
    {.kind = RowLayoutKind::kSplitKv, .row_bytes = 16, .v_row_bytes = 8},
    {.kind = RowLayoutKind::kDsv4Paged, .row_bytes = 584},
};

// Fills one step's batch: sequences in runs, each on a state row of its own.
void SetBatch(ResolveCase& c, const BatchKind& kind, int32_t limit, int32_t step, std::mt19937_64& rng) {
  const int32_t rows = c.shape().rows;
  int32_t state_row = 0;
  for (int32_t r = 0; r < rows;) {
    const int32_t run = kind.unions ? Draw(rng, 1, 4) : 1;
    const bool padding = kind.unions && Chance(rng, 0.1);
    const int32_t length = Draw(rng, limit / 2, limit);
    for (int32_t q = 0; q < run && r < rows; ++q, ++r) {
      c.SetStateRow(r, padding ? -1 : rows - 1 - state_row);
      c.SetLength(r, length + q);
      if (c.shape().newest_pool_rows) c.newest_pool_rows()[r] = length + q - 1;
      std::vector<int32_t> entries(kind.top_k);
      // Many misses, few, and in some rows none.
      const int32_t range = step == 1 && r % 3 == 0 ? kind.hot_rows / 2 : limit;
      for (int32_t& entry : entries) entry = Draw(rng, -1, range);
      if (step == 1 && r % 5 == 0) entries = {c.slot_key(rows - 1 - state_row)[3]};
      c.SetEntries(r, entries);
    }
    ++state_row;
  }
  if (c.shape().real_rows) *c.real_rows() = step == 0 ? rows : Draw(rng, 0, rows);
}

void RunBatches(Bench& bench, const BatchKind& kind, const std::vector<int32_t>& batches, int32_t steps) {
  std::mt19937_64 rng(43);
  for (size_t b = 0; b < batches.size(); ++b) {
    SCOPED_TRACE(testing::Message() << kind.name << ", batch " << batches[b]);
    const int32_t limit = 4 * kind.hot_rows;
    ResolveShape shape;
    shape.index_space = kind.index_space;
    shape.state_rows = shape.rows = batches[b];
    shape.top_k = kind.top_k;
    shape.hot_rows = kind.hot_rows;
    shape.positions = limit + 8;
    shape.blocks = limit / shape.block_rows + 3;
    shape.real_rows = kind.unions;
    shape.newest_pool_rows = kind.index_space == IndexSpace::kPoolRow;
    shape.slot_key_offset = kind.slot_key_offset;
    if (kind.plain) shape = Plain(shape);
    const std::vector<int32_t> layers = b % 2 == 0 ? std::vector<int32_t>{1, 0} : std::vector<int32_t>{0};
    ResolveGatherCase c(shape, kBatchFormats[b % std::size(kBatchFormats)], layers, limit - 20, rng);
    c.resolve().FillState(rng, limit, 0.8);
    for (int32_t step = 0; step < steps; ++step) {
      SetBatch(c.resolve(), kind, limit, step, rng);
      ASSERT_TRUE(c.Step(bench)) << "step " << step;
    }
  }
}

void RunBatchesOfEveryKind(Bench& bench, const std::vector<int32_t>& batches) {
  for (const BatchKind& kind : {
           BatchKind{.name = "plain", .plain = true},
           BatchKind{.name = "plain unions", .plain = true, .unions = true},
           BatchKind{.name = "position unions", .unions = true},
           BatchKind{.name = "pool row", .index_space = IndexSpace::kPoolRow},
           BatchKind{.name = "pool row unions", .index_space = IndexSpace::kPoolRow, .unions = true},
           BatchKind{.name = "odd", .hot_rows = 129, .plain = true},
       }) {
    ASSERT_NO_FATAL_FAILURE(RunBatches(bench, kind, batches, 2));
  }
}

TEST_P(ResolveGatherTest, BatchesOfEverySize) {
  RunBatchesOfEveryKind(bench(), Cases(1000, 1000) < 100 ? std::vector<int32_t>{1, 9, 17} : kBatchSizes);
}

TEST_P(ResolveGatherTest, BatchesThatTakeTurns) {
  RunBatchesOfEveryKind(bench(), Cases(1000, 1000) < 100 ? std::vector<int32_t>{67} : kLargeBatchSizes);
}

TEST_P(ResolveGatherTest, BatchesOfCommonShapes) {
  const int32_t steps = Cases(1, 3);
  for (const bool plain : {true, false}) {
    const std::string name = plain ? "plain" : "with options";
    ASSERT_NO_FATAL_FAILURE(
        RunBatches(bench(), {.name = name, .top_k = 512, .hot_rows = 1024, .plain = plain}, {1, 9, 17, 33, 67}, steps));
    ASSERT_NO_FATAL_FAILURE(
        RunBatches(bench(), {.name = name, .top_k = 1024, .hot_rows = 2048, .plain = plain}, {2, 16, 33}, steps));
    ASSERT_NO_FATAL_FAILURE(
        RunBatches(bench(), {.name = name, .top_k = 2048, .hot_rows = 4096, .plain = plain}, {1, 9, 17}, steps));
  }
  ASSERT_NO_FATAL_FAILURE(
      RunBatches(bench(), {.name = "large", .top_k = 3000, .hot_rows = 8192, .plain = true}, {1, 9}, steps));
}

// One query row whose kernel copies by itself, at the largest sizes.
TEST_P(ResolveGatherTest, LargeBatchOfTheLargestShape) {
  if (Cases(1, 1000) < 2) return;
  RunBatches(bench(), {.name = "plain", .top_k = 2048, .hot_rows = 4096, .plain = true}, {67}, 1);
  RunBatches(bench(), {.name = "plain", .top_k = 1024, .hot_rows = 2048, .plain = true}, {132}, 1);
}

// The keys of the slots need the alignment of an integer, no more.
TEST_P(ResolveGatherTest, SlotKeysAtAnyAddress) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    BatchKind kind{.name = "off by one", .index_space = index_space, .plain = true, .slot_key_offset = 1};
    ASSERT_NO_FATAL_FAILURE(RunBatches(bench(), kind, {1, 9, 17, 67}, 2));
    kind.top_k = 2048;
    kind.hot_rows = 4096;
    ASSERT_NO_FATAL_FAILURE(RunBatches(bench(), kind, {1, 9}, 1));
    kind.hot_rows = 8192;
    ASSERT_NO_FATAL_FAILURE(RunBatches(bench(), kind, {1}, 2));
  }
}

// More layers than one launch takes.
TEST_P(ResolveGatherTest, ManyLayers) {
  std::mt19937_64 rng(44);
  std::vector<int32_t> layers(150);
  std::iota(layers.rbegin(), layers.rend(), 0);
  for (const bool plain : {true, false}) {
    ResolveGatherCase c(plain ? Plain(Shape(IndexSpace::kPosition)) : Shape(IndexSpace::kPosition), {.row_bytes = 8},
                        layers, 480, rng);
    for (int32_t step = 0; step < 2; ++step) {
      for (int32_t r = 0; r < 3; ++r) {
        std::vector<int32_t> entries(40);
        for (int32_t& entry : entries) entry = Draw(rng, 0, 500);
        c.resolve().SetStateRow(r, step == 0 ? r : r / 2);
        c.resolve().SetEntries(r, entries);
      }
      ASSERT_TRUE(c.Step(bench())) << "step " << step;
    }
  }
}

// Whatever the limits of a launch are: fewer blocks than sequences, an odd number, more than are needed; launches of
// one layer, of some, of all.
TEST_P(ResolveGatherTest, LimitsChangeNothing) {
  std::mt19937_64 rng(45);
  for (const int32_t batch : {1, 3, 9, 40}) {
    ResolveShape shape;
    shape.state_rows = shape.rows = batch;
    shape.top_k = 64;
    shape.hot_rows = 128;
    shape.positions = 520;
    shape.blocks = 512 / shape.block_rows + 3;
    ResolveGatherCase c(Plain(shape), {.row_bytes = 48}, {4, 1, 0, 3, 2}, 490, rng);
    const int64_t layer_bytes = int64_t{batch} * 64 * 48;
    for (const int32_t blocks : {0, 1, 2, 3, 7, 39, 40, 1000}) {
      for (const int64_t bytes : {int64_t{0}, int64_t{1}, 2 * layer_bytes, 1000 * layer_bytes}) {
        SCOPED_TRACE(testing::Message() << "batch " << batch << ", " << blocks << " blocks, " << bytes << " bytes");
        c.SetLimits({.max_blocks = blocks, .max_bytes = bytes});
        for (int32_t r = 0; r < batch; ++r) {
          std::vector<int32_t> entries(64);
          for (int32_t& entry : entries) entry = Draw(rng, -1, 511);
          c.resolve().SetStateRow(r, batch - 1 - r);
          c.resolve().SetLength(r, Draw(rng, 256, 512));
          c.resolve().SetEntries(r, entries);
        }
        ASSERT_TRUE(c.Step(bench()));
      }
    }
  }
}

TEST_P(ResolveGatherTest, RandomCases) {
  for (int32_t i = 0; i < Cases(200, 500); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    std::mt19937_64 rng(30001 + i);
    ResolveShape shape = RandomShape(rng, i % 40 == 39 ? RandomSize::kLarge : RandomSize::kSmall);
    shape.compact_list = true;
    const int64_t pool_rows = std::max(1, KeyLimit(shape) - Draw(rng, 0, 9));
    ResolveGatherCase c(shape, kBatchFormats[i % std::size(kBatchFormats)], {0}, std::min<int64_t>(pool_rows, 20000),
                        rng);
    RandomTables(c.resolve(), rng);
    c.resolve().FillState(rng, KeyLimit(shape), 0.7);
    for (int32_t step = 0; step < 3; ++step) {
      RandomInputs(c.resolve(), rng);
      if (i % 4 == 3) CorruptState(c.resolve(), rng);
      ASSERT_TRUE(c.Step(bench())) << "step " << step;
    }
  }
}

TEST(ValidateResolveGatherTest, RefusesWhatDoesNotBelongTogether) {
  std::mt19937_64 rng(42);
  ResolveGatherCase c(Shape(IndexSpace::kPosition), {.row_bytes = 16}, {1, 0, 2}, 400, rng);
  const ResolveArgs resolve = c.resolve().Args(c.resolve().image().data());
  const GatherCompactArgs good = c.GatherArgs(c.resolve().image().data(), c.pool().data());
  ASSERT_TRUE(Validate(resolve, good).ok());
  const auto expect = [&](const GatherCompactArgs& gather, const std::string& message) {
    EXPECT_EQ(Validate(resolve, gather).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(Validate(resolve, gather).message()), testing::HasSubstr(message));
  };
  GatherCompactArgs gather = good;
  gather.rows = 2;
  expect(gather, "resolve_gather.gather.rows: 2 is outside [3, 3]");
  gather = good;
  gather.top_k = 41;
  expect(gather, "resolve_gather.gather.top_k: 41 is outside [40, 40]");
  gather = good;
  gather.miss_hot_rows = resolve.miss_pool_rows;
  expect(gather, "must be the lists that the resolve writes");
  gather = good;
  gather.layer_count = 5000;
  expect(gather, "gather.layer_count: 5000");
  ResolveArgs bad = resolve;
  bad.top_k = 0;
  EXPECT_EQ(Validate(bad, good).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stoker::kernels
