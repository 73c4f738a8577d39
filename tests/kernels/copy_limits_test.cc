// What limits make of a copy: the parts of a transfer, the layers of a gather, the blocks of a launch, and turns of
// other streams between parts.
#include "kernels/copy_limits.h"

#include <cstdint>
#include <numeric>
#include <semaphore>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/launch_shape.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

// How often each pair is copied in each layer, and the parts.
struct Parts {
  std::vector<int> copied;
  std::vector<TransferPart> parts;
};

Parts PartsOf(int64_t count, int32_t layers, int64_t row_bytes, int64_t max_bytes, int64_t max_pairs,
              int32_t max_layers) {
  Parts result;
  result.copied.resize(static_cast<size_t>(count) * static_cast<size_t>(layers));
  ForTransferParts(count, layers, row_bytes, {.max_blocks = 0, .max_bytes = max_bytes}, max_pairs, max_layers,
                   [&](const TransferPart& part) {
                     result.parts.push_back(part);
                     for (int32_t l = part.first_layer; l < part.first_layer + part.layers; ++l) {
                       for (int64_t i = part.first_pair; i < part.first_pair + part.pairs; ++i) {
                         ++result.copied.at(static_cast<size_t>(l * count + i));
                       }
                     }
                   });
  return result;
}

TEST(CopyLimitsTest, PartsMakeUpTheTransferAndKeepTheLimits) {
  constexpr int64_t kRowBytes = 24;
  for (const int64_t count : {1, 2, 7, 64, 65, 100}) {
    for (const int32_t layers : {1, 2, 5, 64, 65}) {
      for (const int64_t max_pairs : {64, 1000}) {
        for (const int64_t max_bytes : {int64_t{0}, int64_t{1}, kRowBytes, 2 * kRowBytes - 1, 3 * kRowBytes,
                                        7 * kRowBytes, 64 * kRowBytes, 150 * kRowBytes, int64_t{1} << 40}) {
          SCOPED_TRACE(testing::Message() << count << " x " << layers << ", " << max_bytes << " bytes");
          const Parts parts = PartsOf(count, layers, kRowBytes, max_bytes, max_pairs, 64);
          EXPECT_THAT(parts.copied, testing::Each(1));
          for (const TransferPart& part : parts.parts) {
            EXPECT_LE(part.pairs, max_pairs);
            EXPECT_LE(part.layers, 64);
            if (max_bytes == 0) continue;
            EXPECT_LE(part.pairs * part.layers * kRowBytes, std::max(max_bytes, kRowBytes));
          }
        }
      }
    }
  }
}

// What a part may have it has: a limit that is a little smaller than the transfer does not make hundreds of parts.
TEST(CopyLimitsTest, PartsAreAsLargeAsTheLimit) {
  const auto count_of = [](int64_t max_bytes) { return PartsOf(1000, 61, 656, max_bytes, 65536, 64).parts.size(); };
  EXPECT_EQ(count_of(0), 1u);
  EXPECT_EQ(count_of(int64_t{61} * 1000 * 656), 1u);
  EXPECT_EQ(count_of(int64_t{61} * 1000 * 656 - 1), 2u);
  EXPECT_EQ(count_of(int64_t{10} * 1000 * 656), 7u);
  EXPECT_EQ(count_of(int64_t{1000} * 656), 61u);
  EXPECT_EQ(count_of(int64_t{999} * 656), 122u);
}

TEST(CopyLimitsTest, LayersOfAGather) {
  const auto layers = [](int64_t max_bytes) {
    return GatherLayers(8, 2048, 656, {.max_blocks = 0, .max_bytes = max_bytes}, 64);
  };
  constexpr int64_t kLayer = int64_t{8} * 2048 * 656;
  EXPECT_EQ(layers(0), 64);
  EXPECT_EQ(layers(1), 1);
  EXPECT_EQ(layers(2 * kLayer - 1), 1);
  EXPECT_EQ(layers(2 * kLayer), 2);
  EXPECT_EQ(layers(int64_t{1} << 40), 64);
}

// One thread: a transfer that is cut into rows ends after the work of another stream that came later, a whole one
// before.
TEST(CopyLimitsTest, OtherStreamsHaveTheirTurnBetweenParts) {
  constexpr int32_t kRows = 8;  // fewer than a strand runs in one turn
  for (const bool cut : {false, true}) {
    SCOPED_TRACE(cut);
    const auto backend = cpu::MakeCpuBackend(1);
    std::vector<std::byte> source(kRows * 16, std::byte{1}), target(kRows * 16);
    std::vector<int32_t> rows(kRows);
    std::iota(rows.begin(), rows.end(), 0);
    const int32_t layer = 0;
    TransferArgs args;
    args.src.layout = args.dst.layout = RowLayout::Make({.row_bytes = 16}, kRows).value();
    args.src.base = source.data();
    args.dst.base = target.data();
    args.src.layers = args.dst.layers = 1;
    args.src_row_limit = args.dst_row_limit = kRows;
    args.src_layers = args.dst_layers = &layer;
    args.layer_count = 1;
    args.src_rows = args.dst_rows = rows.data();
    args.count = kRows;
    args.limits.max_bytes = cut ? 16 : 0;
    std::binary_semaphore entered(0), go_on(0);
    std::vector<std::string> order;  // written by the backend's only thread
    const auto gate = backend->CreateStream().value();
    const auto bulk = backend->CreateStream().value();
    const auto step = backend->CreateStream().value();
    gate->Notify([&](absl::Status) {
      entered.release();
      go_on.acquire();
    });
    entered.acquire();
    ASSERT_TRUE(bulk->Transfer(args).ok());
    bulk->Notify([&](absl::Status) { order.push_back("bulk"); });
    step->Notify([&](absl::Status) { order.push_back("step"); });
    go_on.release();
    EXPECT_TRUE(Finish(*bulk).ok());
    EXPECT_TRUE(Finish(*step).ok());
    EXPECT_EQ(order, cut ? std::vector<std::string>({"step", "bulk"}) : std::vector<std::string>({"bulk", "step"}));
    EXPECT_EQ(source, target);
  }
}

constexpr cuda::DeviceLimits kHopper{.multiprocessors = 132, .max_shared_bytes = 0, .clusters = true};
constexpr cuda::DeviceLimits kAmpere{.multiprocessors = 108, .max_shared_bytes = 0, .clusters = false};

TEST(LaunchShapeTest, WithoutALimitTheClusterIsWhatWasMeasuredBest) {
  const auto cluster = [](int32_t rows) { return cuda::ShapeOfResolveGather(rows, kHopper, 0).cluster; };
  for (const auto& [rows, blocks] : std::vector<std::pair<int32_t, int>>{
           {1, 8}, {8, 8}, {9, 4}, {16, 4}, {17, 2}, {32, 2}, {33, 2}, {66, 2}, {67, 1}, {4096, 1}}) {
    EXPECT_EQ(cluster(rows), blocks) << rows;
    EXPECT_EQ(cuda::ShapeOfResolveGather(rows, kAmpere, 0).cluster, 1) << rows;
  }
  const cuda::GatherShape one = cuda::ShapeOfGather(1, 0), eight = cuda::ShapeOfGather(8, 0);
  EXPECT_EQ(one.shares, 16);
  EXPECT_EQ(eight.shares, 8);
  EXPECT_EQ(cuda::ShapeOfGather(200, 0).rows, 200);
}

// A block has work for its threads, and as many layers are under way as blocks are left for.
TEST(LaunchShapeTest, LayersOfASmallTransferLieSideBySide) {
  const auto shape = [](int64_t layer_bytes, int32_t layers) {
    const cuda::TransferShape s = cuda::ShapeOfTransfer(layer_bytes, layers, 512, 0);
    return std::pair(s.shares, s.layers);
  };
  EXPECT_EQ(shape(656, 61), std::pair(1, 61));
  EXPECT_EQ(shape(656, 64), std::pair(1, 64));
  EXPECT_EQ(shape(64 * 656, 61), std::pair(5, 12));
  EXPECT_EQ(shape(16 * 512 * 3, 2), std::pair(3, 2));
  EXPECT_EQ(shape(int64_t{1} << 30, 61), std::pair(64, 1));
}

TEST(LaunchShapeTest, NoMoreBlocksCopyThanAllowed) {
  for (const cuda::DeviceLimits& device : {kHopper, kAmpere}) {
    for (int32_t rows = 1; rows <= 300; ++rows) {
      const int free = cuda::ShapeOfResolveGather(rows, device, 0).copying_blocks(rows);
      for (int32_t cap = 1; cap <= 320; ++cap) {
        const cuda::ResolveGatherShape shape = cuda::ShapeOfResolveGather(rows, device, cap);
        ASSERT_LE(shape.copying_blocks(rows), std::min(cap, free)) << rows << " rows, " << cap;
        // Apart only where one block a row is too much.
        ASSERT_EQ(shape.fused, rows <= cap) << rows << " rows, " << cap;
        if (cap >= free) {
          ASSERT_EQ(shape.copying_blocks(rows), free) << rows << " rows, " << cap;
        }
        const cuda::GatherShape gather = cuda::ShapeOfGather(rows, cap);
        ASSERT_LE(gather.shares * gather.rows, std::max(cap, 1)) << rows << " rows, " << cap;
        ASSERT_GE(gather.shares, 1);
        ASSERT_GE(gather.rows, 1);
        ASSERT_LE(gather.rows, rows);
      }
    }
  }
  for (int32_t cap = 1; cap <= 100; ++cap) {
    EXPECT_EQ(cuda::ShapeOfTransfer(1 << 30, 61, 512, cap).shares, std::min(cap, 64));
    for (const int64_t bytes : {656, 64 * 656, 1000 * 656}) {
      const cuda::TransferShape shape = cuda::ShapeOfTransfer(bytes, 61, 512, cap);
      EXPECT_LE(shape.shares * shape.layers, std::min(cap, 64)) << bytes << " bytes, " << cap;
      EXPECT_GE(shape.shares * shape.layers, std::min(cap, 64) / 2) << bytes << " bytes, " << cap;
    }
  }
}

}  // namespace
}  // namespace stoker::kernels
