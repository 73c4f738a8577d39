// Resolve against the oracle on many random shapes and states.
#include "tests/kernels/resolve_random.h"

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

void RunRandomCase(Bench& bench, uint64_t seed, RandomSize size, bool corrupt) {
  std::mt19937_64 rng(seed);
  ResolveCase c(RandomShape(rng, size));
  RandomTables(c, rng);
  c.FillState(rng, KeyLimit(c.shape()), 0.7);
  for (int32_t step = 0; step < 3; ++step) {
    RandomInputs(c, rng);
    if (corrupt) CorruptState(c, rng);
    ASSERT_TRUE(c.Step(bench, !corrupt)) << "seed " << seed << " step " << step;
  }
}

TEST_P(ResolveRandomTest, TwoThousandCases) {
  for (int32_t i = 0; i < Cases(2000, 2000); ++i) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(bench(), 1 + i, RandomSize::kSmall, /*corrupt=*/false));
  }
}

TEST_P(ResolveRandomTest, FiveHundredCorruptCases) {
  for (int32_t i = 0; i < Cases(500, 500); ++i) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(bench(), 10001 + i, RandomSize::kSmall, /*corrupt=*/true));
  }
}

TEST_P(ResolveRandomTest, LargeCases) {
  for (int32_t i = 0; i < Cases(15, 120); ++i) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(bench(), 20001 + i, RandomSize::kLarge, /*corrupt=*/i % 3 == 2));
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
