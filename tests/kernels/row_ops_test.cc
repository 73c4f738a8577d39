// Gather and transfer against the oracle: every layout and row size, bad rows, bad counts, every optional argument.
#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/transfer.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/row_store_case.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int32_t kMinInt32 = std::numeric_limits<int32_t>::min();

class RowOpsTest : public BackendTest {
 protected:
  // Runs the operation on both sides and compares all bytes of both images. `args` gives the arguments for two bases.
  template <typename MakeArgs>
  testing::AssertionResult RunBoth(Image& device, Image& pool, const MakeArgs& make_args) {
    Image want_device = device;
    Image want_pool = pool;
    const auto want_args = make_args(want_device.data(), want_pool.data());
    if (const absl::Status status = Validate(want_args); !status.ok()) return testing::AssertionFailure() << status;
    Apply(want_args);
    const absl::Status status =
        bench().Run(device, pool, [&](Stream& stream, std::byte* device_base, std::byte* pool_base) {
          return Enqueue(stream, make_args(device_base, pool_base));
        });
    if (!status.ok()) return testing::AssertionFailure() << status;
    if (testing::AssertionResult same = device.Equals(want_device); !same) return same;
    return pool.Equals(want_pool);
  }

 private:
  template <typename Args>
  static void Apply(const Args& args) {
    if constexpr (std::is_same_v<Args, TransferArgs>) {
      reference::Transfer(args);
    } else {
      reference::Gather(args);
    }
  }
  template <typename Args>
  static absl::Status Enqueue(Stream& stream, const Args& args) {
    if constexpr (std::is_same_v<Args, TransferArgs>) {
      return stream.Transfer(args);
    } else {
      return stream.Gather(args);
    }
  }
};
STOKER_FOR_EVERY_BACKEND(RowOpsTest);

// Distinct hot rows, so that the order of the copies does not matter, with bad ones among them.
std::vector<int32_t> Distinct(int32_t limit, size_t count, std::mt19937_64& rng) {
  std::vector<int32_t> rows(limit);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), rng);
  while (rows.size() < count) rows.push_back(-1);
  rows.resize(count);
  return rows;
}

struct GatherCase {
  GatherCase(const RowFormat& format, int32_t batch_rows, int32_t entries, std::mt19937_64& rng)
      : rows(batch_rows),
        top_k(entries),
        pool_rows(format.row_bytes > 10000 ? 20 : 150),
        hot_rows(format.row_bytes > 10000 ? 25 : 130),
        pool_store(pool, "pool", RowLayout::Make(format, pool_rows + 2).value(), 3, 64, rng),
        hot_store(device, "hot", RowLayout::Make(format, hot_rows + 3).value(), 3, 32, rng) {
    std::vector<int32_t> from(size_t{1} * rows * top_k);
    for (int32_t& row : from) row = static_cast<int32_t>(rng() % pool_rows);
    std::vector<int32_t> to = Distinct(hot_rows, from.size(), rng);
    // Beyond the rows, but inside the memory: what is written there is seen.
    const std::vector<int32_t> bad_from = {-1, pool_rows, pool_rows + 1, kMaxInt32, kMinInt32};
    const std::vector<int32_t> bad_to = {-1, hot_rows, hot_rows + 2, kMaxInt32, kMinInt32};
    for (size_t i = 3; i < from.size(); i += 7) from[i] = bad_from[i / 7 % bad_from.size()];
    for (size_t i = 5; i < to.size(); i += 11) to[i] = bad_to[i / 11 % bad_to.size()];
    miss_pool_rows = device.Add("miss_pool_rows", from);
    miss_hot_rows = device.Add("miss_hot_rows", to);
    gathered = device.Add("gathered_bytes", std::vector<uint64_t>{77});
  }

  int32_t rows;
  int32_t top_k;
  int32_t pool_rows;
  int32_t hot_rows;
  Image pool;
  Image device;
  StoreCase pool_store;
  StoreCase hot_store;
  Region<int32_t> miss_pool_rows;
  Region<int32_t> miss_hot_rows;
  Region<uint64_t> gathered;
};

TEST_P(RowOpsTest, GatherFromTheCompactList) {
  std::mt19937_64 rng(11);
  for (const FormatCase& format : FormatCases()) {
    for (const bool bytes : {false, true}) {
      SCOPED_TRACE(format.name);
      GatherCase c(format.format, 5, 30, rng);
      const auto counts = c.device.Add("miss_counts", std::vector<int32_t>{30, 0, kMaxInt32, kMinInt32, -3});
      const std::vector<int32_t> layers = {2, 0};
      ASSERT_TRUE(RunBoth(c.device, c.pool, [&](std::byte* device, std::byte* pool) {
        GatherCompactArgs args;
        args.pool = c.pool_store.In(pool);
        args.hot = c.hot_store.In(device);
        args.pool_rows = c.pool_rows;
        args.hot_rows = c.hot_rows;
        args.layers = layers.data();
        args.layer_count = 2;
        args.miss_pool_rows = c.miss_pool_rows.In(device);
        args.miss_hot_rows = c.miss_hot_rows.In(device);
        args.miss_counts = counts.In(device);
        args.rows = c.rows;
        args.top_k = c.top_k;
        args.gathered_bytes = bytes ? c.gathered.In(device) : nullptr;
        return args;
      }));
    }
  }
}

TEST_P(RowOpsTest, GatherFromTheDensePlan) {
  std::mt19937_64 rng(12);
  for (const FormatCase& format : FormatCases()) {
    for (const bool optional : {false, true}) {
      SCOPED_TRACE(format.name);
      GatherCase c(format.format, 4, 30, rng);
      std::vector<int32_t> mask(120);
      for (int32_t& m : mask) m = static_cast<int32_t>(rng() % 3) - 1;
      const auto miss_mask = c.device.Add("miss_mask", mask);
      const auto states = c.device.Add("state_rows", std::vector<int32_t>{0, -1, 7, kMinInt32});
      const auto attention = c.device.Add<int32_t>("attention", 120);
      const std::vector<int32_t> layers = {1};
      ASSERT_TRUE(RunBoth(c.device, c.pool, [&](std::byte* device, std::byte* pool) {
        GatherDenseArgs args;
        args.pool = c.pool_store.In(pool);
        args.hot = c.hot_store.In(device);
        args.pool_rows = c.pool_rows;
        args.hot_rows = c.hot_rows;
        args.layers = layers.data();
        args.layer_count = 1;
        args.entry_pool_rows = c.miss_pool_rows.In(device);
        args.entry_hot_rows = c.miss_hot_rows.In(device);
        args.miss_mask = miss_mask.In(device);
        args.rows = c.rows;
        args.top_k = c.top_k;
        args.hot_block_rows = 16;
        args.attention_block_stride = 1000000000;
        if (optional) {
          args.state_rows = states.In(device);
          args.attention_indices = attention.In(device);
          args.gathered_bytes = c.gathered.In(device);
        }
        return args;
      }));
    }
  }
}

// More misses than the kernels take at once.
TEST_P(RowOpsTest, LargeGather) {
  std::mt19937_64 rng(13);
  Image pool;
  Image device;
  const RowLayout pool_layout = RowLayout::Make({.row_bytes = 16}, 9000).value();
  const StoreCase from(pool, "pool", pool_layout, 2, 0, rng);
  const StoreCase to(device, "hot", RowLayout::Make({.row_bytes = 16}, 9000).value(), 2, 0, rng);
  std::vector<int32_t> pool_rows(8192);
  for (int32_t& row : pool_rows) row = static_cast<int32_t>(rng() % 9100);
  const auto miss_pool_rows = device.Add("miss_pool_rows", pool_rows);
  const auto miss_hot_rows = device.Add("miss_hot_rows", Distinct(9000, 8192, rng));
  const auto counts = device.Add("miss_counts", std::vector<int32_t>{8192});
  const auto gathered = device.Add("gathered_bytes", std::vector<uint64_t>{0});
  const std::vector<int32_t> layers = {0, 1};
  ASSERT_TRUE(RunBoth(device, pool, [&](std::byte* device_base, std::byte* pool_base) {
    return GatherCompactArgs{.pool = from.In(pool_base),
                             .hot = to.In(device_base),
                             .pool_rows = 9000,
                             .hot_rows = 9000,
                             .layers = layers.data(),
                             .layer_count = 2,
                             .miss_pool_rows = miss_pool_rows.In(device_base),
                             .miss_hot_rows = miss_hot_rows.In(device_base),
                             .miss_counts = counts.In(device_base),
                             .rows = 1,
                             .top_k = 8192,
                             .gathered_bytes = gathered.In(device_base)};
  }));
  EXPECT_GT(device.Values(gathered)[0], 0);
}

struct TransferCase {
  std::vector<int32_t> src_rows;
  std::vector<int32_t> dst_rows;
};

// Runs, single rows, backward runs and pairs that are skipped.
TransferCase MakePairs(int32_t src_limit, int32_t dst_limit, std::mt19937_64& rng) {
  TransferCase pairs;
  const int32_t half = dst_limit / 2;
  for (int32_t i = 0; i < half; ++i) {
    pairs.src_rows.push_back(i % src_limit);
    pairs.dst_rows.push_back(i);
  }
  for (const int32_t row : Distinct(dst_limit - half, dst_limit - half, rng)) {
    pairs.src_rows.push_back(static_cast<int32_t>(rng() % src_limit));
    pairs.dst_rows.push_back(half + row);
  }
  const std::vector<std::pair<int32_t, int32_t>> skipped = {
      {-1, 0}, {0, -1}, {src_limit, 0}, {0, dst_limit}, {kMaxInt32, 1}, {1, kMaxInt32}, {kMinInt32, 2}};
  for (const auto& [src, dst] : skipped) {
    const size_t at = rng() % pairs.src_rows.size();
    pairs.src_rows.insert(pairs.src_rows.begin() + at, src);
    pairs.dst_rows.insert(pairs.dst_rows.begin() + at, dst);
  }
  return pairs;
}

TEST_P(RowOpsTest, TransferInBothDirections) {
  std::mt19937_64 rng(14);
  for (const FormatCase& format : FormatCases()) {
    const int32_t pool_rows = format.format.row_bytes > 10000 ? 12 : 140;
    const int32_t device_rows = format.format.row_bytes > 10000 ? 10 : 100;
    for (const bool to_pool : {false, true}) {
      for (const bool dense : {false, true}) {
        SCOPED_TRACE(format.name);
        Image pool;
        Image device;
        const RowLayout layout = RowLayout::Make(format.format, pool_rows + 1).value();
        const RowLayout device_layout =
            dense ? DenseLayout(layout, device_rows + 1) : RowLayout::Make(format.format, device_rows + 1).value();
        const StoreCase pool_store(pool, "pool", layout, 4, 16, rng);
        const StoreCase device_store(device, "device", device_layout, 3, dense ? 0 : 8, rng);
        const int32_t src_limit = to_pool ? device_rows : pool_rows;
        const int32_t dst_limit = to_pool ? pool_rows : device_rows;
        const TransferCase pairs = MakePairs(src_limit, dst_limit, rng);
        const auto src_rows = device.Add("src_rows", pairs.src_rows);
        const auto dst_rows = device.Add("dst_rows", pairs.dst_rows);
        const auto moved = device.Add("transferred_bytes", std::vector<uint64_t>{5});
        const std::vector<int32_t> pool_layers = {3, 1};
        const std::vector<int32_t> device_layers = {0, 2};
        ASSERT_TRUE(RunBoth(device, pool, [&](std::byte* device_base, std::byte* pool_base) {
          TransferArgs args;
          args.src = to_pool ? device_store.In(device_base) : pool_store.In(pool_base);
          args.dst = to_pool ? pool_store.In(pool_base) : device_store.In(device_base);
          args.src_row_limit = src_limit;
          args.dst_row_limit = dst_limit;
          args.src_layers = to_pool ? device_layers.data() : pool_layers.data();
          args.dst_layers = to_pool ? pool_layers.data() : device_layers.data();
          args.layer_count = 2;
          args.src_rows = src_rows.In(device_base);
          args.dst_rows = dst_rows.In(device_base);
          args.count = std::ssize(pairs.src_rows);
          args.transferred_bytes = dense ? moved.In(device_base) : nullptr;
          return args;
        }));
      }
    }
  }
}

// A block that is copied on write stays inside the pool.
TEST_P(RowOpsTest, TransferInsideThePool) {
  std::mt19937_64 rng(15);
  Image pool;
  Image device;
  const StoreCase store(pool, "pool", RowLayout::Make({.row_bytes = 20}, 200).value(), 2, 0, rng);
  std::vector<int32_t> from(64);
  std::iota(from.begin(), from.end(), 10);
  std::vector<int32_t> to(64);
  std::iota(to.begin(), to.end(), 100);
  to[5] = from[5];  // a row onto itself
  const auto src_rows = device.Add("src_rows", from);
  const auto dst_rows = device.Add("dst_rows", to);
  const std::vector<int32_t> layers = {0, 1};
  ASSERT_TRUE(RunBoth(device, pool, [&](std::byte* device_base, std::byte* pool_base) {
    return TransferArgs{.src = store.In(pool_base),
                        .dst = store.In(pool_base),
                        .src_row_limit = 200,
                        .dst_row_limit = 200,
                        .src_layers = layers.data(),
                        .dst_layers = layers.data(),
                        .layer_count = 2,
                        .src_rows = src_rows.In(device_base),
                        .dst_rows = dst_rows.In(device_base),
                        .count = 64,
                        .transferred_bytes = nullptr};
  }));
}

// By parts as well, and with a counter.
TEST_P(RowOpsTest, ATransferThatIsSkippedMovesNothing) {
  std::mt19937_64 rng(16);
  for (const uint32_t skip : {0u, 1u, 0x100u}) {
    SCOPED_TRACE(skip);
    Image pool;
    Image device;
    const StoreCase store(pool, "pool", RowLayout::Make({.row_bytes = 20}, 200).value(), 2, 0, rng);
    std::vector<int32_t> from(64);
    std::iota(from.begin(), from.end(), 10);
    std::vector<int32_t> to(64);
    std::iota(to.begin(), to.end(), 100);
    const auto src_rows = device.Add("src_rows", from);
    const auto dst_rows = device.Add("dst_rows", to);
    const auto moved = device.Add("transferred_bytes", std::vector<uint64_t>{5});
    const auto skipped = device.Add("skip", std::vector<uint32_t>{skip});
    const std::vector<int32_t> layers = {0, 1};
    ASSERT_TRUE(RunBoth(device, pool, [&](std::byte* device_base, std::byte* pool_base) {
      return TransferArgs{.src = store.In(pool_base),
                          .dst = store.In(pool_base),
                          .src_row_limit = 200,
                          .dst_row_limit = 200,
                          .src_layers = layers.data(),
                          .dst_layers = layers.data(),
                          .layer_count = 2,
                          .src_rows = src_rows.In(device_base),
                          .dst_rows = dst_rows.In(device_base),
                          .count = 64,
                          .transferred_bytes = moved.In(device_base),
                          .skip = skipped.In(device_base),
                          .limits = {.max_blocks = 1, .max_bytes = 400}};
    }));
    EXPECT_EQ(device.Values(moved)[0], skip != 0 ? 5u : 5u + 64 * 2 * 20);
  }
}

TEST_P(RowOpsTest, LongTransfer) {
  std::mt19937_64 rng(16);
  Image pool;
  Image device;
  const StoreCase src(pool, "pool", RowLayout::Make({.row_bytes = 4}, 70000).value(), 1, 0, rng);
  const StoreCase dst(device, "device", RowLayout::Make({.row_bytes = 4, .row_stride = 8}, 70000).value(), 1, 0, rng);
  const auto src_rows = device.Add("src_rows", Distinct(70000, 65537, rng));
  const auto dst_rows = device.Add("dst_rows", Distinct(70000, 65537, rng));
  const int32_t layer = 0;
  ASSERT_TRUE(RunBoth(device, pool, [&](std::byte* device_base, std::byte* pool_base) {
    return TransferArgs{.src = src.In(pool_base),
                        .dst = dst.In(device_base),
                        .src_row_limit = 70000,
                        .dst_row_limit = 70000,
                        .src_layers = &layer,
                        .dst_layers = &layer,
                        .layer_count = 1,
                        .src_rows = src_rows.In(device_base),
                        .dst_rows = dst_rows.In(device_base),
                        .count = 65537,
                        .transferred_bytes = nullptr};
  }));
}

// Limits of a launch, for rows of `row_bytes` bytes of which a layer has `count`: blocks fewer than rows, an odd
// number, more than are needed; bytes of less than a row, of some rows, of some layers, and of more than all.
std::vector<CopyLimits> LimitCases(int64_t count, int64_t row_bytes) {
  std::vector<CopyLimits> cases;
  for (const int32_t blocks : {0, 1, 2, 3, 13, 1000}) {
    for (const int64_t rows : {int64_t{0}, int64_t{3}, count - 1, 2 * count, 1000 * count}) {
      cases.push_back({.max_blocks = blocks, .max_bytes = rows * row_bytes});
    }
    cases.push_back({.max_blocks = blocks, .max_bytes = 1});
  }
  return cases;
}

TEST_P(RowOpsTest, LimitsChangeNothingOfATransfer) {
  std::mt19937_64 rng(17);
  for (const FormatCase& format : FormatCases()) {
    if (format.format.row_bytes > 10000) continue;
    for (const int32_t layer_count : {5, 66}) {  // one launch has 64
      if (layer_count > 5 && format.format.row_bytes != 16) continue;
      // A row a launch is thousands of launches.
      if (Cases(1000, 1000) < 100 && (layer_count > 5 || format.format.row_bytes > 24)) continue;
      Image pool;
      Image device;
      const StoreCase pool_store(pool, "pool", RowLayout::Make(format.format, 80).value(), layer_count, 0, rng);
      const StoreCase device_store(device, "device", RowLayout::Make(format.format, 70).value(), layer_count, 8, rng);
      const TransferCase pairs = MakePairs(80, 70, rng);
      const auto src_rows = device.Add("src_rows", pairs.src_rows);
      const auto dst_rows = device.Add("dst_rows", pairs.dst_rows);
      const auto moved = device.Add("transferred_bytes", std::vector<uint64_t>{5});
      std::vector<int32_t> layers(static_cast<size_t>(layer_count));
      std::iota(layers.rbegin(), layers.rend(), 0);
      const int64_t count = std::ssize(pairs.src_rows);
      for (const CopyLimits& limits : LimitCases(count, pool_store.layout.row_bytes())) {
        SCOPED_TRACE(testing::Message() << format.name << ", " << layer_count << " layers, " << limits.max_blocks
                                        << " blocks, " << limits.max_bytes << " bytes");
        Image target = device;
        ASSERT_TRUE(RunBoth(target, pool, [&](std::byte* device_base, std::byte* pool_base) {
          return TransferArgs{.src = pool_store.In(pool_base),
                              .dst = device_store.In(device_base),
                              .src_row_limit = 79,
                              .dst_row_limit = 69,
                              .src_layers = layers.data(),
                              .dst_layers = layers.data(),
                              .layer_count = layer_count,
                              .src_rows = src_rows.In(device_base),
                              .dst_rows = dst_rows.In(device_base),
                              .count = count,
                              .transferred_bytes = moved.In(device_base),
                              .limits = limits};
        }));
      }
    }
  }
}

TEST_P(RowOpsTest, LimitsChangeNothingOfAGather) {
  std::mt19937_64 rng(18);
  for (const FormatCase& format : FormatCases()) {
    if (format.format.row_bytes > 10000) continue;
    GatherCase c(format.format, 5, 30, rng);
    const auto counts = c.device.Add("miss_counts", std::vector<int32_t>{30, 0, kMaxInt32, 17, -3});
    const std::vector<int32_t> layers = {2, 0, 1};
    for (const CopyLimits& limits : LimitCases(150, c.pool_store.layout.row_bytes())) {
      SCOPED_TRACE(testing::Message() << format.name << ", " << limits.max_blocks << " blocks, " << limits.max_bytes
                                      << " bytes");
      Image target = c.device;
      ASSERT_TRUE(RunBoth(target, c.pool, [&](std::byte* device, std::byte* pool) {
        return GatherCompactArgs{.pool = c.pool_store.In(pool),
                                 .hot = c.hot_store.In(device),
                                 .pool_rows = c.pool_rows,
                                 .hot_rows = c.hot_rows,
                                 .layers = layers.data(),
                                 .layer_count = 3,
                                 .miss_pool_rows = c.miss_pool_rows.In(device),
                                 .miss_hot_rows = c.miss_hot_rows.In(device),
                                 .miss_counts = counts.In(device),
                                 .rows = c.rows,
                                 .top_k = c.top_k,
                                 .gathered_bytes = c.gathered.In(device),
                                 .limits = limits};
      }));
    }
  }
}

}  // namespace
}  // namespace stoker::kernels
