#include "server/core/tensor.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace stoker::core {
namespace {

constexpr uint64_t kAlignment = 4;
constexpr uint64_t kMaxStride = uint64_t{1} << 40;
constexpr int64_t kMaxRows = INT32_MAX;
constexpr int64_t kMaxPageRows = 65536;
constexpr int64_t kDsv4ScaleBytes = 8;

absl::Status Given(absl::string_view field, uint64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, " given, ", limit));
}

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Given(field, value, absl::StrCat("limits ", low, " and ", high));
}

absl::Status CheckAligned(absl::string_view field, uint64_t value) {
  if (value % kAlignment == 0) return absl::OkStatus();
  return Given(field, value, absl::StrCat("not a multiple of ", kAlignment));
}

// A stride between `count` things of `bytes` each.
absl::Status CheckStride(absl::string_view field, uint64_t stride, int64_t count, uint64_t bytes) {
  if (absl::Status status = CheckRange(field, stride, count > 1 ? bytes : 0, kMaxStride); !status.ok()) return status;
  return CheckAligned(field, stride);
}

// a + count x stride, or nothing beyond 64 bits.
std::optional<uint64_t> Advance(std::optional<uint64_t> a, uint64_t count, uint64_t stride) {
  uint64_t product = 0;
  uint64_t sum = 0;
  if (!a.has_value() || __builtin_mul_overflow(count, stride, &product) || __builtin_add_overflow(*a, product, &sum)) {
    return std::nullopt;
  }
  return sum;
}

}  // namespace

int64_t PartCount(const PoolSpec& pool) { return pool.row_layout == RowLayout::kLinear ? 1 : 2; }

int64_t PartBytes(const PoolSpec& pool, int64_t part) {
  switch (pool.row_layout) {
    case RowLayout::kSplitKv:
      return part == 0 ? pool.row_bytes : pool.v_row_bytes;
    case RowLayout::kDsv4Paged:
      return part == 0 ? pool.row_bytes - kDsv4ScaleBytes : kDsv4ScaleBytes;
    case RowLayout::kLinear:
    case RowLayout::kUnspecified:
      break;
  }
  return pool.row_bytes;
}

absl::Status TensorSpec::Normalize(const PoolSpec& pool) {
  TensorSpec spec = *this;
  if (spec.layers.empty()) {
    spec.layers.resize(static_cast<size_t>(pool.layers));
    std::iota(spec.layers.begin(), spec.layers.end(), 0);
  }
  if (spec.page_rows == 0) spec.page_rows = 1;

  if (absl::Status status = CheckAligned("offset_bytes", spec.offset_bytes); !status.ok()) return status;
  if (spec.size_bytes < kAlignment) return Given("size_bytes", spec.size_bytes, absl::StrCat("limit ", kAlignment));
  // Before anything is made of the number of layers.
  const int64_t layer_count = static_cast<int64_t>(spec.layers.size());
  if (layer_count > pool.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layers: ", layer_count, " given, limit the pool's layers ", pool.layers));
  }
  std::vector<bool> seen(static_cast<size_t>(pool.layers));
  for (const int64_t layer : spec.layers) {
    if (layer < 0 || layer >= pool.layers) {
      return absl::InvalidArgumentError(absl::StrCat("layers: ", layer, " given, limit ", pool.layers - 1));
    }
    if (seen[static_cast<size_t>(layer)]) {
      return absl::InvalidArgumentError(absl::StrCat("layers: ", layer, " given twice"));
    }
    seen[static_cast<size_t>(layer)] = true;
  }
  if (absl::Status status = CheckRange("rows", static_cast<uint64_t>(spec.rows), 1, kMaxRows); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckRange("page_rows", static_cast<uint64_t>(spec.page_rows), 1, kMaxPageRows);
      !status.ok()) {
    return status;
  }
  const int64_t part_count = PartCount(pool);
  if (spec.parts.empty() || static_cast<int64_t>(spec.parts.size()) > part_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("parts: ", spec.parts.size(), " given, limits 1 and ", part_count, ", the row layout's"));
  }
  std::sort(spec.parts.begin(), spec.parts.end(),
            [](const TensorPart& a, const TensorPart& b) { return a.part < b.part; });
  for (size_t i = 0; i < spec.parts.size(); ++i) {
    if (i > 0 && spec.parts[i].part == spec.parts[i - 1].part) {
      return absl::InvalidArgumentError(absl::StrCat("parts: part ", spec.parts[i].part, " given twice"));
    }
    TensorPart& part = spec.parts[i];
    if (part.part < 0 || part.part >= part_count) {
      return absl::InvalidArgumentError(
          absl::StrCat("parts.part: ", part.part, " given, limit ", part_count - 1, " with the pool's row layout"));
    }
    const uint64_t bytes = static_cast<uint64_t>(PartBytes(pool, part.part));
    if (absl::Status status = CheckAligned("parts.offset_bytes", part.offset_bytes); !status.ok()) return status;
    if (absl::Status status = CheckStride("layer_stride_bytes", spec.layer_stride_bytes, layer_count, bytes);
        !status.ok()) {
      return status;
    }
    const int64_t rows_of_a_page = spec.page_rows == 1 ? spec.rows : std::min(spec.rows, spec.page_rows);
    if (absl::Status status = CheckStride("parts.row_stride_bytes", part.row_stride_bytes, rows_of_a_page, bytes);
        !status.ok()) {
      return status;
    }
    if (spec.page_rows == 1) {
      if (part.page_stride_bytes != 0) {
        return Given("parts.page_stride_bytes", part.page_stride_bytes, "limit 0 without page_rows");
      }
      part.page_stride_bytes = part.row_stride_bytes;
    } else {
      const int64_t pages = (spec.rows - 1) / spec.page_rows + 1;
      // At most 2^16 x 2^40 + 2^16.
      const uint64_t page_bytes = static_cast<uint64_t>(spec.page_rows - 1) * part.row_stride_bytes + bytes;
      if (absl::Status status = CheckStride("parts.page_stride_bytes", part.page_stride_bytes, pages, page_bytes);
          !status.ok()) {
        return status;
      }
    }
    // The strides rise, so the last row of the last layer ends last.
    const uint64_t last_row = static_cast<uint64_t>(spec.rows - 1);
    const uint64_t rows_a_page = static_cast<uint64_t>(spec.page_rows);
    std::optional<uint64_t> end = Advance(bytes, 1, part.offset_bytes);
    end = Advance(end, static_cast<uint64_t>(layer_count - 1), spec.layer_stride_bytes);
    end = Advance(end, last_row / rows_a_page, part.page_stride_bytes);
    end = Advance(end, last_row % rows_a_page, part.row_stride_bytes);
    if (!end.has_value() || *end > spec.size_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parts: row ", last_row, " of layer ", spec.layers.back(), " has its part ", part.part, " end at byte ",
          end.has_value() ? absl::StrCat(*end) : "2^64 or more", ", limit size_bytes ", spec.size_bytes));
    }
  }
  *this = std::move(spec);
  return absl::OkStatus();
}

absl::Status CheckCoverage(const PoolSpec& pool, absl::Span<const Tensor* const> tensors) {
  const int64_t parts = PartCount(pool);
  std::vector<bool> seen(static_cast<size_t>(pool.layers * parts));
  for (const Tensor* tensor : tensors) {
    for (const int64_t layer : tensor->spec.layers) {
      for (const TensorPart& part : tensor->spec.parts) {
        const size_t at = static_cast<size_t>(layer * parts + part.part);
        if (seen[at]) {
          return absl::InvalidArgumentError(
              absl::StrCat("tensor_ids: layer ", layer, ", part ", part.part, " is in two of the tensors"));
        }
        seen[at] = true;
      }
    }
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing == seen.end()) return absl::OkStatus();
  const int64_t at = missing - seen.begin();
  return absl::InvalidArgumentError(absl::StrCat("tensor_ids: layer ", at / parts, ", part ", at % parts,
                                                 " of the pool is in none of the ", tensors.size(), " tensors given"));
}

}  // namespace stoker::core
