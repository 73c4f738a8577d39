#include "kernels/row_layout.h"

#include <limits>

#include "absl/strings/string_view.h"
#include "kernels/field_check.h"
#include "kernels/transfer.h"

namespace stoker::kernels {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
// Together with kMaxRows and kMaxLayers it keeps every offset below 2^63.
constexpr int64_t kMaxRowStride = int64_t{1} << 20;
static_assert(kMaxRowPartBytes <= kMaxRowStride);

FieldCheck& CheckPart(FieldCheck& check, absl::string_view field, int32_t bytes) {
  return check.InRange(field, bytes, 4, kMaxRowPartBytes).MultipleOf(field, bytes, 4);
}

// Part whose rows lie `stride` bytes apart without pages.
RowPart PlainPart(int64_t offset, int64_t stride, int32_t bytes) {
  return RowPart{.offset = offset, .row_stride = stride, .page_stride = stride, .bytes = bytes};
}

}  // namespace

absl::StatusOr<RowLayout> RowLayout::Make(const RowFormat& format, int64_t rows) {
  FieldCheck check("row_format");
  check.InRange("rows", rows, 0, kMaxRows);
  if (format.kind != RowLayoutKind::kSplitKv) check.InRange("v_row_bytes", format.v_row_bytes, 0, 0);
  if (format.kind != RowLayoutKind::kLinear) check.InRange("row_stride", format.row_stride, 0, 0);
  RowLayout layout;
  layout.kind = format.kind;
  layout.rows = rows;
  switch (format.kind) {
    case RowLayoutKind::kLinear: {
      CheckPart(check, "row_bytes", format.row_bytes);
      if (format.row_stride != 0) {
        check.AtLeast("row_stride", format.row_stride, format.row_bytes, "row_bytes")
            .InRange("row_stride", format.row_stride, 4, kMaxRowStride)
            .MultipleOf("row_stride", format.row_stride, 4);
      }
      const int64_t stride = format.row_stride == 0 ? format.row_bytes : format.row_stride;
      layout.part[0] = PlainPart(0, stride, format.row_bytes);
      if (check.ok()) layout.layer_bytes = rows * stride;
      break;
    }
    case RowLayoutKind::kSplitKv:
      CheckPart(check, "row_bytes", format.row_bytes);
      CheckPart(check, "v_row_bytes", format.v_row_bytes);
      layout.part_count = 2;
      if (check.ok()) {
        layout.part[0] = PlainPart(0, format.row_bytes, format.row_bytes);
        layout.part[1] = PlainPart(rows * format.row_bytes, format.v_row_bytes, format.v_row_bytes);
        layout.layer_bytes = rows * (int64_t{format.row_bytes} + format.v_row_bytes);
      }
      break;
    case RowLayoutKind::kDsv4Paged:
      check.InRange("row_bytes", format.row_bytes, kDsv4ValueBytes + kDsv4ScaleBytes,
                    kDsv4ValueBytes + kDsv4ScaleBytes);
      layout.part_count = 2;
      layout.page_rows = kDsv4PageRows;
      layout.part[0] =
          RowPart{.offset = 0, .row_stride = kDsv4ValueBytes, .page_stride = kDsv4PageBytes, .bytes = kDsv4ValueBytes};
      layout.part[1] = RowPart{.offset = kDsv4PageRows * kDsv4ValueBytes,
                               .row_stride = kDsv4ScaleBytes,
                               .page_stride = kDsv4PageBytes,
                               .bytes = kDsv4ScaleBytes};
      layout.layer_bytes = (rows + kDsv4PageRows - 1) / kDsv4PageRows * kDsv4PageBytes;
      break;
    default:
      check.InRange("kind", static_cast<int64_t>(format.kind), static_cast<int64_t>(RowLayoutKind::kLinear),
                    static_cast<int64_t>(RowLayoutKind::kDsv4Paged));
  }
  if (!check.ok()) return check.status();
  return layout;
}

RowLayout DenseLayout(const RowLayout& like, int64_t rows) {
  RowLayout layout;
  layout.kind = like.kind;
  layout.part_count = like.part_count;
  layout.rows = rows;
  layout.layer_bytes = rows * like.row_bytes();
  int64_t offset = 0;
  for (int32_t p = 0; p < like.part_count; ++p) {
    layout.part[p] = PlainPart(offset, like.row_bytes(), like.part[p].bytes);
    offset += like.part[p].bytes;
  }
  return layout;
}

}  // namespace stoker::kernels
