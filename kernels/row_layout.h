// Where the bytes of a row lie: one description for the three row layouts.
//
// A row consists of one or two parts. Part p of row r of layer l lies at
//   base + l * layer_stride + part[p].offset + (r / page_rows) * part[p].page_stride + (r % page_rows) *
//   part[p].row_stride
// LINEAR has one part. SPLIT_KV has a K plane and behind it a V plane. DSV4_PAGED has 64 values of 576 bytes and behind
// them 64 scales of 8 bytes in each page of 37,440 bytes.
//
// Invariants of a RowLayout that Make returned: part sizes, strides and offsets are multiples of 4; no two rows
// overlap; every address of rows [0, rows) lies in [0, layer_bytes). Layers of one that an engine described may be
// interleaved; its layer_bytes are 0, and who made it has checked that all addresses are inside the engine's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace stoker::kernels {

enum class RowLayoutKind : uint8_t { kLinear = 1, kSplitKv = 2, kDsv4Paged = 3 };

inline constexpr int32_t kDsv4PageRows = 64;
inline constexpr int32_t kDsv4ValueBytes = 576;
inline constexpr int32_t kDsv4ScaleBytes = 8;
inline constexpr int32_t kDsv4PageBytes = 37440;
inline constexpr int32_t kMaxRowPartBytes = 65536;
static_assert(kDsv4PageRows * (kDsv4ValueBytes + kDsv4ScaleBytes) <= kDsv4PageBytes);

struct RowFormat {
  RowLayoutKind kind = RowLayoutKind::kLinear;
  int32_t row_bytes = 0;    // the row, or its K part; 584 for kDsv4Paged
  int32_t v_row_bytes = 0;  // kSplitKv only
  int64_t row_stride = 0;   // kLinear only: bytes between rows; 0 means row_bytes

  friend bool operator==(const RowFormat&, const RowFormat&) = default;
};

struct RowPart {
  int64_t offset = 0;  // of row 0, from the layer's base
  int64_t row_stride = 0;
  int64_t page_stride = 0;
  int32_t bytes = 0;
};

struct RowLayout {
  // Lays out `rows` rows of one layer. INVALID_ARGUMENT names the field, its value and its limit.
  static absl::StatusOr<RowLayout> Make(const RowFormat& format, int64_t rows);

  // Bytes of one row, all parts together, as they stand in a message.
  int32_t row_bytes() const { return part[0].bytes + (part_count > 1 ? part[1].bytes : 0); }

  int64_t Offset(int32_t p, int64_t row) const {
    return part[p].offset + row / page_rows * part[p].page_stride + row % page_rows * part[p].row_stride;
  }

  RowLayoutKind kind = RowLayoutKind::kLinear;
  int32_t part_count = 1;
  int32_t page_rows = 1;
  int64_t rows = 0;
  int64_t layer_bytes = 0;
  RowPart part[2];
};

// Rows of all layers in one piece of memory, which it does not own.
struct RowStore {
  std::byte* At(int32_t layer, int32_t p, int64_t row) const {
    return base + layer * layer_stride + layout.Offset(p, row);
  }

  std::byte* base = nullptr;
  int64_t layer_stride = 0;
  int32_t layers = 0;
  RowLayout layout;
};

}  // namespace stoker::kernels
