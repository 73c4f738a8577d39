// Resolve and gather as one operation, against the two oracles one after the other.
#include "kernels/resolve_gather.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/row_store_case.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

class ResolveGatherTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(ResolveGatherTest);

constexpr int32_t kLayers[] = {1, 0, 2};

ResolveShape Shape(IndexSpace index_space) {
  ResolveShape shape;
  shape.index_space = index_space;
  shape.state_rows = 3;
  shape.rows = 3;
  shape.top_k = 40;
  shape.hot_rows = 100;
  return shape;
}

GatherCompactArgs GatherOf(const ResolveArgs& resolve, const RowStore& pool, const RowStore& hot) {
  return {.pool = pool,
          .hot = hot,
          .pool_rows = pool.layout.rows,
          .hot_rows = hot.layout.rows,
          .layers = kLayers,
          .layer_count = 3,
          .miss_pool_rows = resolve.miss_pool_rows,
          .miss_hot_rows = resolve.miss_hot_rows,
          .miss_counts = resolve.miss_counts,
          .rows = resolve.rows,
          .top_k = resolve.top_k,
          .gathered_bytes = nullptr};
}

TEST_P(ResolveGatherTest, EqualsTheTwoOneAfterTheOther) {
  std::mt19937_64 rng(41);
  for (const FormatCase& format : FormatCases()) {
    if (format.format.row_bytes > 10000) continue;
    for (const IndexSpace index_space : {IndexSpace::kPosition, IndexSpace::kPoolRow}) {
      SCOPED_TRACE(format.name);
      ResolveCase c(Shape(index_space));
      c.FillState(rng, 500, 0.8);
      Image pool;
      // The pool ends before the rows that resolve may name do: those beyond it are zero-filled.
      const StoreCase from(pool, "pool", RowLayout::Make(format.format, 480).value(), 3, 0, rng);
      const StoreCase to(c.image(), "hot", RowLayout::Make(format.format, 3 * 108).value(), 3, 0, rng);
      for (int32_t step = 0; step < 2; ++step) {
        for (int32_t r = 0; r < 3; ++r) {
          std::vector<int32_t> entries(40);
          for (int32_t& entry : entries) entry = static_cast<int32_t>(rng() % 510) - 1;
          c.SetEntries(r, entries);
        }
        c.PoisonOutputs();
        Image want = c.image();
        const ResolveArgs want_resolve = c.Args(want.data());
        const GatherCompactArgs want_gather = GatherOf(want_resolve, from.In(pool.data()), to.In(want.data()));
        ASSERT_TRUE(Validate(want_resolve, want_gather).ok()) << Validate(want_resolve, want_gather);
        reference::Resolve(want_resolve);
        reference::Gather(want_gather);
        const absl::Status status =
            bench().Run(c.image(), pool, [&](Stream& stream, std::byte* device, std::byte* pool_base) {
              const ResolveArgs resolve = c.Args(device);
              return stream.ResolveGather(resolve, GatherOf(resolve, from.In(pool_base), to.In(device)));
            });
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(c.image().Equals(want));
      }
    }
  }
}

TEST(ValidateResolveGatherTest, RefusesWhatDoesNotBelongTogether) {
  std::mt19937_64 rng(42);
  ResolveCase c(Shape(IndexSpace::kPosition));
  Image stores;
  const StoreCase store(stores, "rows", RowLayout::Make({.row_bytes = 16}, 400).value(), 3, 0, rng);
  const ResolveArgs resolve = c.Args(c.image().data());
  const GatherCompactArgs good = GatherOf(resolve, store.In(stores.data()), store.In(stores.data()));
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
