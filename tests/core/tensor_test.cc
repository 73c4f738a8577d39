// Which tensors are taken: against an oracle that looks at every row, and at the edges of every field.
#include "server/core/tensor.h"

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::core {
namespace {

using ::testing::HasSubstr;

PoolSpec Pool(RowLayout layout, int64_t layers = 3) {
  PoolSpec pool;
  pool.name = "p";
  pool.layers = layers;
  pool.row_layout = layout;
  pool.row_bytes = layout == RowLayout::kDsv4Paged ? 584 : 16;
  pool.v_row_bytes = layout == RowLayout::kSplitKv ? 8 : 0;
  pool.blocks = 4;
  EXPECT_EQ(pool.Normalize(), absl::OkStatus());
  return pool;
}

// Three layers of 10 rows of 16 bytes, one behind the other, after 64 bytes.
TensorSpec Good() {
  TensorSpec spec;
  spec.offset_bytes = 4096;
  spec.size_bytes = 64 + 3 * 160;
  spec.layer_stride_bytes = 160;
  spec.rows = 10;
  spec.parts = {{.part = 0, .offset_bytes = 64, .row_stride_bytes = 16}};
  return spec;
}

TEST(TensorTest, FillsInDefaults) {
  TensorSpec spec = Good();
  ASSERT_EQ(spec.Normalize(Pool(RowLayout::kLinear)), absl::OkStatus());
  EXPECT_EQ(spec.layers, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(spec.page_rows, 1);
  EXPECT_EQ(spec.parts[0].page_stride_bytes, 16u);
  TensorSpec again = spec;
  again.parts[0].page_stride_bytes = 0;
  EXPECT_EQ(again.Normalize(Pool(RowLayout::kLinear)), absl::OkStatus());
}

TEST(TensorTest, KnowsTheBytesOfEachPart) {
  const auto parts = [](RowLayout layout) {
    const PoolSpec pool = Pool(layout);
    std::vector<int64_t> bytes;
    int64_t sum = 0;
    for (int64_t p = 0; p < PartCount(pool); ++p) sum += bytes.emplace_back(PartBytes(pool, p));
    EXPECT_EQ(sum, pool.bytes_per_row());
    return bytes;
  };
  EXPECT_EQ(parts(RowLayout::kLinear), (std::vector<int64_t>{16}));
  EXPECT_EQ(parts(RowLayout::kSplitKv), (std::vector<int64_t>{16, 8}));
  EXPECT_EQ(parts(RowLayout::kDsv4Paged), (std::vector<int64_t>{576, 8}));
}

// Each field at its limit, and one beyond.
TEST(TensorTest, RefusesEachFieldBeyondItsLimit) {
  constexpr uint64_t kHuge = uint64_t{1} << 63;
  constexpr uint64_t kMax = UINT64_MAX;
  constexpr uint64_t kMaxStride = uint64_t{1} << 40;
  struct Case {
    const char* what;
    std::function<void(TensorSpec*)> change;
    std::vector<std::string> message;  // none: it is taken
  };
  const std::vector<Case> cases = {
      {"good", [](TensorSpec*) {}, {}},
      {"offset", [](TensorSpec* t) { t->offset_bytes = 4098; }, {"offset_bytes: 4098", "multiple of 4"}},
      {"offset's limit is the memory's", [](TensorSpec* t) { t->offset_bytes = kMax - 3; }, {}},
      {"size 0", [](TensorSpec* t) { t->size_bytes = 0; }, {"size_bytes: 0", "limit 4"}},
      {"size one less", [](TensorSpec* t) { t->size_bytes -= 1; }, {"row 9 of layer 2", "byte 544", "size_bytes 543"}},
      {"size more", [](TensorSpec* t) { t->size_bytes = kMax; }, {}},
      {"one layer", [](TensorSpec* t) { t->layers = {2}, t->layer_stride_bytes = 0; }, {}},
      {"layer",
       [](TensorSpec* t) {
         t->layers = {0, 3};
       },
       {"layers: 3 given, limit 2"}},
      {"negative layer", [](TensorSpec* t) { t->layers = {-1}; }, {"layers: -1 given"}},
      {"twice",
       [](TensorSpec* t) {
         t->layers = {1, 1};
       },
       {"layers: 1 given twice"}},
      {"too many layers",
       [](TensorSpec* t) {
         t->layers = {0, 1, 2, 0};
       },
       {"layers: 4 given, limit the pool's layers 3"}},
      {"layer stride", [](TensorSpec* t) { t->layer_stride_bytes = 164; }, {"row 9 of layer 2", "byte 552"}},
      {"unaligned layer stride", [](TensorSpec* t) { t->layer_stride_bytes = 158; }, {"layer_stride_bytes: 158"}},
      {"interleaved layers", [](TensorSpec* t) { t->layer_stride_bytes = 16; }, {}},
      {"overlapping layers",
       [](TensorSpec* t) { t->layer_stride_bytes = 12; },
       {"layer_stride_bytes: 12", "limits 16"}},
      {"layer stride 0", [](TensorSpec* t) { t->layer_stride_bytes = 0; }, {"layer_stride_bytes: 0"}},
      {"layer stride 2^40", [](TensorSpec* t) { t->layer_stride_bytes = kMaxStride; }, {"size_bytes 544"}},
      {"layer stride more",
       [](TensorSpec* t) { t->layer_stride_bytes = kMaxStride + 4; },
       {"layer_stride_bytes: 1099511627780"}},
      {"layer stride 2^63",
       [](TensorSpec* t) { t->layer_stride_bytes = kHuge; },
       {"layer_stride_bytes: 9223372036854775808"}},
      {"no rows", [](TensorSpec* t) { t->rows = 0; }, {"rows: 0 given, limits 1 and 2147483647"}},
      {"a row more", [](TensorSpec* t) { t->rows = 11; }, {"row 10 of layer 2", "byte 560"}},
      {"most rows", [](TensorSpec* t) { t->rows = INT32_MAX; }, {"row 2147483646 of layer 2"}},
      {"more rows", [](TensorSpec* t) { t->rows = int64_t{INT32_MAX} + 1; }, {"rows: 2147483648"}},
      {"page rows", [](TensorSpec* t) { t->page_rows = 65537; }, {"page_rows: 65537 given, limits 1 and 65536"}},
      {"negative page rows", [](TensorSpec* t) { t->page_rows = -1; }, {"page_rows: "}},
      {"pages", [](TensorSpec* t) { t->page_rows = 4, t->parts[0].page_stride_bytes = 64; }, {}},
      {"pages too near",
       [](TensorSpec* t) { t->page_rows = 4, t->parts[0].page_stride_bytes = 60; },
       {"parts.page_stride_bytes: 60", "limits 64"}},
      {"pages too far", [](TensorSpec* t) { t->page_rows = 4, t->parts[0].page_stride_bytes = 68; }, {"byte 552"}},
      {"page stride 2^63",
       [](TensorSpec* t) { t->page_rows = 4, t->parts[0].page_stride_bytes = kHuge; },
       {"parts.page_stride_bytes: 9223372036854775808"}},
      {"page stride without pages",
       [](TensorSpec* t) { t->parts[0].page_stride_bytes = 64; },
       {"parts.page_stride_bytes: 64", "limit 0"}},
      {"one page", [](TensorSpec* t) { t->page_rows = 10, t->parts[0].page_stride_bytes = 0; }, {}},
      {"no parts", [](TensorSpec* t) { t->parts.clear(); }, {"parts: 0 given, limits 1 and 1"}},
      {"two parts", [](TensorSpec* t) { t->parts.push_back(t->parts[0]); }, {"parts: 2 given"}},
      {"part", [](TensorSpec* t) { t->parts[0].part = 1; }, {"parts.part: 1 given, limit 0"}},
      {"part's offset", [](TensorSpec* t) { t->parts[0].offset_bytes = 68; }, {"byte 548"}},
      {"part's offset unaligned", [](TensorSpec* t) { t->parts[0].offset_bytes = 62; }, {"parts.offset_bytes: 62"}},
      {"part's offset 2^63", [](TensorSpec* t) { t->parts[0].offset_bytes = kHuge; }, {"size_bytes 544"}},
      {"part's offset 2^64", [](TensorSpec* t) { t->parts[0].offset_bytes = kMax - 3; }, {"2^64 or more"}},
      {"row stride", [](TensorSpec* t) { t->parts[0].row_stride_bytes = 20; }, {"byte 580"}},
      {"row stride less than a row",
       [](TensorSpec* t) { t->parts[0].row_stride_bytes = 12; },
       {"parts.row_stride_bytes: 12", "limits 16"}},
      {"row stride 2^63",
       [](TensorSpec* t) { t->parts[0].row_stride_bytes = kHuge; },
       {"parts.row_stride_bytes: 9223372036854775808"}},
      {"rows and stride beyond 2^64",
       [](TensorSpec* t) { t->rows = INT32_MAX, t->parts[0].row_stride_bytes = kMaxStride, t->size_bytes = kMax; },
       {"2^64 or more", "limit size_bytes 18446744073709551615"}},
      {"one row needs no stride", [](TensorSpec* t) { t->rows = 1, t->parts[0].row_stride_bytes = 0; }, {}},
  };
  const PoolSpec pool = Pool(RowLayout::kLinear);
  for (const Case& c : cases) {
    TensorSpec spec = Good();
    c.change(&spec);
    const absl::Status status = spec.Normalize(pool);
    EXPECT_EQ(status.code(), c.message.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << c.what << ": " << status;
    for (const std::string& part : c.message) EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << c.what;
  }
}

TEST(TensorTest, TakesThePartsOfTheRowLayout) {
  const PoolSpec pool = Pool(RowLayout::kSplitKv, 1);
  TensorSpec spec;
  spec.size_bytes = 10 * 24;
  spec.rows = 10;
  const TensorPart k = {.part = 0, .offset_bytes = 0, .row_stride_bytes = 24};
  const TensorPart v = {.part = 1, .offset_bytes = 16, .row_stride_bytes = 24};
  for (const std::vector<TensorPart>& parts : {std::vector{k}, std::vector{v}, std::vector{k, v}, std::vector{v, k}}) {
    TensorSpec each = spec;
    each.parts = parts;
    EXPECT_EQ(each.Normalize(pool), absl::OkStatus());
    EXPECT_TRUE(std::is_sorted(each.parts.begin(), each.parts.end(),
                               [](const TensorPart& a, const TensorPart& b) { return a.part < b.part; }));
  }
  spec.parts = {v, v};
  EXPECT_THAT(std::string(spec.Normalize(pool).message()), HasSubstr("part 1 given twice"));
  // V's last row ends one byte behind the tensor.
  spec.parts = {k, v};
  spec.size_bytes -= 4;
  EXPECT_THAT(std::string(spec.Normalize(pool).message()), HasSubstr("its part 1 end at byte 240"));
}

// Whether every byte of every row is inside, and rows of one part and layer do not overlap: by looking at all of them.
bool Fits(const TensorSpec& spec, const PoolSpec& pool) {
  const int64_t page_rows = spec.page_rows == 0 ? 1 : spec.page_rows;
  for (size_t l = 0; l < spec.layers.size(); ++l) {
    for (const TensorPart& part : spec.parts) {
      const uint64_t bytes = static_cast<uint64_t>(PartBytes(pool, part.part));
      std::vector<uint64_t> begins;
      for (int64_t row = 0; row < spec.rows; ++row) {
        const uint64_t begin = part.offset_bytes + l * spec.layer_stride_bytes +
                               (page_rows == 1 ? static_cast<uint64_t>(row) * part.row_stride_bytes
                                               : static_cast<uint64_t>(row / page_rows) * part.page_stride_bytes +
                                                     static_cast<uint64_t>(row % page_rows) * part.row_stride_bytes);
        if (begin + bytes > spec.size_bytes) return false;
        begins.push_back(begin);
      }
      std::sort(begins.begin(), begins.end());
      for (size_t i = 1; i < begins.size(); ++i) {
        if (begins[i] - begins[i - 1] < bytes) return false;
      }
    }
  }
  return true;
}

TEST(TensorTest, TakesNothingThatAnOracleFindsOutside) {
  constexpr int kCases = 200000;
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const auto pick = [&](uint64_t low, uint64_t high) { return low + random() % (high - low + 1); };
  int taken = 0;
  for (int i = 0; i < kCases; ++i) {
    const RowLayout layout = static_cast<RowLayout>(pick(1, 3));
    const PoolSpec pool = Pool(layout, static_cast<int64_t>(pick(1, 4)));
    TensorSpec spec;
    for (int64_t layer = 0; layer < pool.layers; ++layer) {
      if (spec.layers.empty() || random() % 2 == 0) spec.layers.push_back(layer);
    }
    spec.rows = static_cast<int64_t>(pick(1, 12));
    spec.page_rows = static_cast<int64_t>(pick(0, 5));
    uint64_t end = 0;
    for (int64_t p = 0; p < PartCount(pool); ++p) {
      if (p > 0 && random() % 3 == 0) continue;
      const uint64_t bytes = static_cast<uint64_t>(PartBytes(pool, p));
      TensorPart part;
      part.part = p;
      part.offset_bytes = 4 * pick(0, 20);
      part.row_stride_bytes = bytes + 4 * pick(0, 3) - (random() % 8 == 0 ? 4 : 0);
      if (spec.page_rows > 1) {
        part.page_stride_bytes = static_cast<uint64_t>(spec.page_rows - 1) * part.row_stride_bytes + bytes +
                                 4 * pick(0, 5) - (random() % 8 == 0 ? 4 : 0);
      }
      end = std::max(end, part.offset_bytes + static_cast<uint64_t>(spec.rows) * part.row_stride_bytes);
      spec.parts.push_back(part);
    }
    // Far enough for each part: layers that meet are the engine's matter.
    spec.layer_stride_bytes = 576 + 4 * pick(0, 200);
    spec.size_bytes = end + (spec.layers.size() - 1) * spec.layer_stride_bytes + 4 * pick(0, 30);
    if (random() % 2 == 0) spec.size_bytes -= pick(0, std::min<uint64_t>(spec.size_bytes - 4, 100));
    TensorSpec normalized = spec;
    const absl::Status status = normalized.Normalize(pool);
    ASSERT_EQ(status.ok(), Fits(spec, pool)) << status << " case " << i;
    taken += status.ok() ? 1 : 0;
  }
  EXPECT_GT(taken, kCases / 10);
  EXPECT_LT(taken, kCases * 9 / 10);
}

TEST(TensorTest, TensorsOfAnItemHaveEachPartOfEachLayerOnce) {
  const PoolSpec pool = Pool(RowLayout::kSplitKv, 2);
  const auto tensor = [](std::vector<int64_t> layers, std::vector<int64_t> parts) {
    Tensor made;
    made.spec.layers = std::move(layers);
    for (const int64_t part : parts) made.spec.parts.push_back({.part = part});
    return made;
  };
  const Tensor all = tensor({0, 1}, {0, 1}), k = tensor({1, 0}, {0}), v = tensor({0, 1}, {1}), v0 = tensor({0}, {1}),
               v1 = tensor({1}, {1});
  EXPECT_EQ(CheckCoverage(pool, {&all}), absl::OkStatus());
  EXPECT_EQ(CheckCoverage(pool, {&v, &k}), absl::OkStatus());
  EXPECT_EQ(CheckCoverage(pool, {&k, &v1, &v0}), absl::OkStatus());
  EXPECT_THAT(std::string(CheckCoverage(pool, {&k, &v1}).message()),
              HasSubstr("layer 0, part 1 of the pool is in none"));
  EXPECT_THAT(std::string(CheckCoverage(pool, {&k, &v, &v1}).message()), HasSubstr("layer 1, part 1 is in two"));
  EXPECT_THAT(std::string(CheckCoverage(pool, {&all, &all}).message()), HasSubstr("layer 0, part 0 is in two"));
  EXPECT_EQ(CheckCoverage(pool, {}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stoker::core
