// Invalidate, reset and place against the oracle, alone and between resolves.
#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/invalidate.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

class ResidencyOpsTest : public BackendTest {
 protected:
  // Runs `run` on the backend and `oracle` on a copy, each with the case's residency there, and compares all bytes.
  template <typename MakeArgs>
  testing::AssertionResult RunBoth(ResolveCase& c, const MakeArgs& make_args) {
    Image want = c.image();
    const auto want_args = make_args(want.data());
    if (const absl::Status status = Validate(want_args); !status.ok()) return testing::AssertionFailure() << status;
    Apply(want_args);
    const absl::Status status = bench().Run(
        c.image(), [&](Stream& stream, std::byte* base, std::byte*) { return Enqueue(stream, make_args(base)); });
    if (!status.ok()) return testing::AssertionFailure() << status;
    return c.image().Equals(want);
  }

 private:
  static void Apply(const InvalidateArgs& args) { reference::Invalidate(args); }
  static void Apply(const ResetArgs& args) { reference::Reset(args); }
  static void Apply(const PlaceArgs& args) { reference::Place(args); }
  static absl::Status Enqueue(Stream& stream, const InvalidateArgs& args) { return stream.Invalidate(args); }
  static absl::Status Enqueue(Stream& stream, const ResetArgs& args) { return stream.Reset(args); }
  static absl::Status Enqueue(Stream& stream, const PlaceArgs& args) { return stream.Place(args); }
};
STOKER_FOR_EVERY_BACKEND(ResidencyOpsTest);

ResolveShape Shape(IndexSpace index_space) {
  ResolveShape shape;
  shape.index_space = index_space;
  shape.state_rows = 4;
  shape.rows = 4;
  shape.hot_rows = 70;
  return shape;
}

// A run of keys of one state row after another, of every length: of one key, as many as a backend takes at once, and
// more.
TEST_P(ResidencyOpsTest, Invalidate) {
  std::mt19937_64 rng(21);
  struct Keys {
    int32_t count;
    int32_t turns;  // the state row changes after as many keys, on average
  };
  for (const Keys shape : {Keys{0, 1}, {1, 1}, {5, 1}, {300, 1}, {300, 50}, {5000, 3}, {20000, 50}, {40000, 100000}}) {
    for (const bool corrupt : {false, true}) {
      SCOPED_TRACE(testing::Message() << shape.count << " keys, " << shape.turns << " of a state row, corrupt "
                                      << corrupt);
      ResolveCase c(Shape(IndexSpace::kPosition));
      c.FillState(rng, 100000, 0.8);
      for (int32_t i = 0; corrupt && i < 40; ++i) c.slot_key(i % 4)[rng() % 70] = c.slot_key(i % 4)[rng() % 70];
      std::vector<int32_t> states;
      std::vector<int64_t> keys;
      int32_t state = 1;
      for (int32_t i = 0; i < shape.count; ++i) {
        if (rng() % shape.turns == 0) state = static_cast<int32_t>(rng() % 7) - 1;
        states.push_back(state);
        const int64_t bad[] = {-1,
                               std::numeric_limits<int64_t>::min(),
                               std::numeric_limits<int64_t>::max(),
                               (int64_t{1} << 32) + 3,
                               (int64_t{1} << 32) + c.slot_key(1)[5],
                               int64_t{1} << 31};
        const int64_t kind = static_cast<int64_t>(rng() % 10);
        keys.push_back(kind == 0                              ? bad[rng() % 6]
                       : kind == 1 && state >= 0 && state < 4 ? c.slot_key(state)[rng() % 70]
                       : kind == 2 && state >= 0 && state < 4 ? c.slot_key(state)[rng() % 70] ^ 0x10000
                                                              : static_cast<int64_t>(rng() % 100000));
      }
      const auto state_rows = c.image().Add("states", states);
      const auto key_region = c.image().Add("keys", keys);
      ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
        return InvalidateArgs{.residency = c.Args(base).residency,
                              .state_rows = state_rows.In(base),
                              .keys = key_region.In(base),
                              .count = shape.count};
      }));
      if (!corrupt) {
        EXPECT_TRUE(c.CheckResidency());
      }
    }
  }
}

TEST_P(ResidencyOpsTest, InvalidateEmptiesEverySlotThatHoldsTheKey) {
  ResolveCase c(Shape(IndexSpace::kPosition));
  for (const int32_t slot : {69, 0, 31, 32}) c.Hold(2, slot, 7);
  c.Hold(2, 33, 8);
  c.Hold(1, 5, 7);
  const auto state_rows = c.image().Add("states", std::vector<int32_t>{2});
  const auto keys = c.image().Add("keys", std::vector<int64_t>{7});
  ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
    return InvalidateArgs{
        .residency = c.Args(base).residency, .state_rows = state_rows.In(base), .keys = keys.In(base), .count = 1};
  }));
  EXPECT_EQ(std::count(c.slot_key(2), c.slot_key(2) + 70, 7), 0);
  EXPECT_EQ(c.slot_key(2)[33], 8);
  EXPECT_EQ(c.slot_key(1)[5], 7) << "another state row";
}

TEST_P(ResidencyOpsTest, AnInvalidatedKeyMissesInItsTurn) {
  for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
    ResolveShape shape;
    shape.index_space = index_space;
    shape.top_k = 4;
    shape.hot_rows = 4;
    ResolveCase c(shape);
    c.SetEntries(0, {10, 11, 12, 13});
    ASSERT_TRUE(c.Step(bench()));
    const auto state_rows = c.image().Add("states", std::vector<int32_t>{0});
    const auto keys = c.image().Add("keys", std::vector<int64_t>{12});
    ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
      return InvalidateArgs{
          .residency = c.Args(base).residency, .state_rows = state_rows.In(base), .keys = keys.In(base), .count = 1};
    }));
    EXPECT_EQ(c.slot_key(0)[2], -1);
    const uint64_t evictions = c.stats()[kEvictions];
    ASSERT_TRUE(c.Step(bench()));
    EXPECT_EQ(c.counts(0)[kHot], 3);
    EXPECT_EQ(c.counts(0)[kMiss], 1);
    EXPECT_EQ(c.hot_rows(0)[2], 2) << "the empty slot is the only one that is stale";
    EXPECT_EQ(c.stats()[kEvictions], evictions) << "an empty slot is not evicted";
  }
}

TEST_P(ResidencyOpsTest, Reset) {
  std::mt19937_64 rng(22);
  for (const std::vector<int32_t>& states :
       {std::vector<int32_t>{}, {2}, {0, 3, -1, 4, 3, std::numeric_limits<int32_t>::max()}}) {
    ResolveCase c(Shape(IndexSpace::kPosition));
    c.FillState(rng, 400, 0.8);
    const auto state_rows = c.image().Add("states", states);
    ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
      return ResetArgs{.residency = c.Args(base).residency,
                       .state_rows = state_rows.In(base),
                       .count = static_cast<int32_t>(states.size())};
    }));
    EXPECT_TRUE(c.CheckResidency());
    for (const int32_t s : states) {
      if (s < 0 || s >= 4) continue;
      EXPECT_EQ(std::count(c.slot_key(s), c.slot_key(s) + 70, -1), 70);
      EXPECT_EQ(c.lru(s)[69], 69);
    }
  }
}

// More than a grid's second dimension has.
TEST_P(ResidencyOpsTest, ResetOfManyStateRows) {
  std::mt19937_64 rng(24);
  ResolveCase c(Shape(IndexSpace::kPosition));
  c.FillState(rng, 400, 0.8);
  std::vector<int32_t> states(70000, -1);
  states[65535] = 1;
  states[69999] = 3;
  const auto state_rows = c.image().Add("states", states);
  ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
    return ResetArgs{.residency = c.Args(base).residency, .state_rows = state_rows.In(base), .count = 70000};
  }));
}

TEST_P(ResidencyOpsTest, Place) {
  std::mt19937_64 rng(23);
  for (const auto& [first, count] :
       std::vector<std::pair<int32_t, int32_t>>{{0, 0}, {0, 1}, {0, 70}, {69, 1}, {70, 0}, {20, 30}, {1, 69}}) {
    for (const bool corrupt : {false, true}) {
      SCOPED_TRACE(testing::Message() << first << " + " << count);
      ResolveCase c(Shape(IndexSpace::kPosition));
      // Many of the placed positions are in other slots already.
      c.FillState(rng, 90, 0.9);
      for (int32_t i = 0; corrupt && i < 30; ++i) {
        c.slot_key(1)[rng() % 70] = static_cast<int32_t>(rng() % 600) - 2;
      }
      ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
        return PlaceArgs{.residency = c.Args(base).residency, .state_row = 1, .first_position = first, .count = count};
      }));
      for (int32_t p = first; p < first + count; ++p) ASSERT_EQ(c.slot_key(1)[p], p);
      if (!corrupt) {
        EXPECT_TRUE(c.CheckResidency());
      }
    }
  }
}

TEST_P(ResidencyOpsTest, PlacedPositionsAreHot) {
  ResolveShape shape;
  shape.top_k = 32;
  shape.hot_rows = 64;
  ResolveCase c(shape);
  ASSERT_TRUE(RunBoth(c, [&](std::byte* base) {
    return PlaceArgs{.residency = c.Args(base).residency, .state_row = 0, .first_position = 0, .count = 40};
  }));
  std::vector<int32_t> entries;
  for (int32_t i = 0; i < 32; ++i) entries.push_back(39 - i);
  c.SetLength(0, 41);
  c.SetEntries(0, entries);
  ASSERT_TRUE(c.Step(bench()));
  EXPECT_EQ(c.hot_rows(0), entries);
  EXPECT_EQ(c.counts(0)[kHot], 32);
}

}  // namespace
}  // namespace stoker::kernels
