// The promises of row_layout.h: bounds, no overlap, alignment, and the messages of what is refused.
#include "kernels/row_layout.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/transfer.h"
#include "tests/kernels/row_store_case.h"

namespace stoker::kernels {
namespace {

using testing::HasSubstr;

// First and last byte of every part of every row, in order.
std::vector<std::pair<int64_t, int64_t>> Extents(const RowLayout& layout) {
  std::vector<std::pair<int64_t, int64_t>> extents;
  for (int64_t row = 0; row < layout.rows; ++row) {
    for (int32_t p = 0; p < layout.part_count; ++p) {
      const int64_t first = layout.Offset(p, row);
      extents.emplace_back(first, first + layout.part[p].bytes);
    }
  }
  std::sort(extents.begin(), extents.end());
  return extents;
}

void ExpectSound(const RowLayout& layout) {
  int64_t end = 0;
  for (const auto& [first, last] : Extents(layout)) {
    ASSERT_GE(first, end) << "rows overlap";
    ASSERT_EQ(first % 4, 0);
    ASSERT_LE(last, layout.layer_bytes);
    end = last;
  }
}

TEST(RowLayoutTest, RowsDoNotOverlapAndLieInTheLayer) {
  for (const FormatCase& format : FormatCases()) {
    for (const int64_t rows : {0, 1, 2, 63, 64, 65, 127, 128, 129, 1000}) {
      SCOPED_TRACE(testing::Message() << format.name << ", " << rows << " rows");
      const absl::StatusOr<RowLayout> layout = RowLayout::Make(format.format, rows);
      ASSERT_TRUE(layout.ok()) << layout.status();
      EXPECT_EQ(layout->rows, rows);
      EXPECT_EQ(layout->kind, format.format.kind);
      EXPECT_EQ(layout->row_bytes(), format.format.row_bytes + format.format.v_row_bytes);
      ExpectSound(*layout);
      const RowLayout dense = DenseLayout(*layout, rows);
      EXPECT_EQ(dense.layer_bytes, rows * layout->row_bytes());
      EXPECT_EQ(dense.rows, rows);
      ExpectSound(dense);
      for (int64_t row = 0; row < rows; ++row) {
        ASSERT_EQ(dense.Offset(0, row), row * layout->row_bytes());
        if (dense.part_count == 2) {
          ASSERT_EQ(dense.Offset(1, row), row * layout->row_bytes() + layout->part[0].bytes);
        }
      }
    }
  }
}

TEST(RowLayoutTest, KnownPlaces) {
  const RowLayout linear = RowLayout::Make({.row_bytes = 656, .row_stride = 672}, 10).value();
  EXPECT_EQ(linear.Offset(0, 9), 9 * 672);
  const RowLayout split =
      RowLayout::Make({.kind = RowLayoutKind::kSplitKv, .row_bytes = 1040, .v_row_bytes = 656}, 10).value();
  EXPECT_EQ(split.Offset(0, 3), 3 * 1040);
  EXPECT_EQ(split.Offset(1, 3), 10 * 1040 + 3 * 656);
  const RowLayout paged = RowLayout::Make({.kind = RowLayoutKind::kDsv4Paged, .row_bytes = 584}, 65).value();
  EXPECT_EQ(paged.layer_bytes, 2 * 37440);
  EXPECT_EQ(paged.Offset(0, 63), 63 * 576);
  EXPECT_EQ(paged.Offset(1, 63), 64 * 576 + 63 * 8);
  EXPECT_EQ(paged.Offset(0, 64), 37440);
  EXPECT_EQ(paged.Offset(1, 64), 37440 + 64 * 576);
}

TEST(RowLayoutTest, LargestLayoutDoesNotOverflow) {
  const RowLayout layout =
      RowLayout::Make({.row_bytes = kMaxRowPartBytes}, std::numeric_limits<int32_t>::max()).value();
  EXPECT_EQ(layout.layer_bytes, int64_t{kMaxRowPartBytes} * std::numeric_limits<int32_t>::max());
  RowStore store{.base = nullptr, .layer_stride = layout.layer_bytes, .layers = 1024, .layout = layout};
  EXPECT_GT(1023 * store.layer_stride + store.layout.Offset(0, layout.rows - 1), 0);
}

TEST(RowLayoutTest, RefusesWithFieldValueAndLimit) {
  struct Case {
    RowFormat format;
    int64_t rows;
    std::string message;
  };
  const RowFormat split{.kind = RowLayoutKind::kSplitKv, .row_bytes = 16, .v_row_bytes = 16};
  const RowFormat paged{.kind = RowLayoutKind::kDsv4Paged, .row_bytes = 584};
  const auto with = [](RowFormat format, auto member, int64_t value) {
    format.*member = static_cast<std::decay_t<decltype(format.*member)>>(value);
    return format;
  };
  const std::vector<Case> cases = {
      {{.row_bytes = 0}, 1, "row_format.row_bytes: 0 is outside [4, 65536]"},
      {{.row_bytes = -4}, 1, "row_format.row_bytes: -4 is outside [4, 65536]"},
      {{.row_bytes = 6}, 1, "row_format.row_bytes: 6 is not a multiple of 4"},
      {{.row_bytes = 65540}, 1, "row_format.row_bytes: 65540 is outside [4, 65536]"},
      {{.row_bytes = 16}, -1, "row_format.rows: -1 is outside [0, 2147483647]"},
      {{.row_bytes = 16}, int64_t{1} << 31, "row_format.rows: 2147483648 is outside"},
      {{.row_bytes = 16, .v_row_bytes = 4}, 1, "row_format.v_row_bytes: 4 is outside [0, 0]"},
      {{.row_bytes = 16, .row_stride = 12}, 1, "row_format.row_stride: 12 is below row_bytes = 16"},
      {{.row_bytes = 16, .row_stride = 18}, 1, "row_format.row_stride: 18 is not a multiple of 4"},
      {{.row_bytes = 16, .row_stride = int64_t{1} << 40}, 1, "row_format.row_stride: 1099511627776 is outside"},
      {{.row_bytes = 16, .row_stride = -16}, 1, "row_format.row_stride: -16 is below"},
      {with(split, &RowFormat::v_row_bytes, 0), 1, "row_format.v_row_bytes: 0 is outside [4, 65536]"},
      {with(split, &RowFormat::v_row_bytes, 10), 1, "row_format.v_row_bytes: 10 is not a multiple of 4"},
      {with(split, &RowFormat::row_stride, 16), 1, "row_format.row_stride: 16 is outside [0, 0]"},
      {with(paged, &RowFormat::row_bytes, 576), 1, "row_format.row_bytes: 576 is outside [584, 584]"},
      {{.kind = static_cast<RowLayoutKind>(0), .row_bytes = 16}, 1, "row_format.kind: 0 is outside [1, 3]"},
      {{.kind = static_cast<RowLayoutKind>(9), .row_bytes = 16}, 1, "row_format.kind: 9 is outside [1, 3]"},
  };
  for (const Case& c : cases) {
    const absl::StatusOr<RowLayout> layout = RowLayout::Make(c.format, c.rows);
    ASSERT_FALSE(layout.ok()) << c.message;
    EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(layout.status().message()), HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace stoker::kernels
