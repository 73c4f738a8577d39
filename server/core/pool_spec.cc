#include "server/core/pool_spec.h"

#include <bit>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace stoker::core {
namespace {

constexpr int64_t kMaxNameBytes = 63;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxRowBytes = 65536;
constexpr int64_t kDefaultBlockRows = 64;
constexpr int64_t kMinBlockRows = 16;
constexpr int64_t kMaxBlockRows = 1024;
constexpr int64_t kMaxPrefixRows = 65536;
// Pool rows are int32 in every kernel.
constexpr int64_t kMaxPoolRows = int64_t{1} << 31;
constexpr int64_t kDsv4RowBytes = 584;
constexpr int64_t kDsv4BlockRows = 64;

absl::Status Invalid(const char* field, int64_t value, const std::string& limit) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", limit));
}

bool IsName(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes || name[0] < 'a' || name[0] > 'z') return false;
  for (const char c : name) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-')) return false;
  }
  return true;
}

absl::Status CheckRowBytes(const char* field, int64_t bytes) {
  if (bytes >= 4 && bytes <= kMaxRowBytes && bytes % 4 == 0) return absl::OkStatus();
  return Invalid(field, bytes, absl::StrCat("4 to ", kMaxRowBytes, " and a multiple of 4"));
}

absl::Status CheckLayout(const PoolSpec& spec) {
  switch (spec.row_layout) {
    case RowLayout::kLinear:
      if (spec.v_row_bytes != 0) return Invalid("v_row_bytes", spec.v_row_bytes, "0 with row_layout LINEAR");
      return absl::OkStatus();
    case RowLayout::kSplitKv:
      return CheckRowBytes("v_row_bytes", spec.v_row_bytes);
    case RowLayout::kDsv4Paged:
      if (spec.row_bytes != kDsv4RowBytes) {
        return Invalid("row_bytes", spec.row_bytes, absl::StrCat(kDsv4RowBytes, " with row_layout DSV4_PAGED"));
      }
      if (spec.v_row_bytes != 0) return Invalid("v_row_bytes", spec.v_row_bytes, "0 with row_layout DSV4_PAGED");
      if (spec.block_rows != kDsv4BlockRows) {
        return Invalid("block_rows", spec.block_rows, absl::StrCat(kDsv4BlockRows, " with row_layout DSV4_PAGED"));
      }
      return absl::OkStatus();
    case RowLayout::kUnspecified:
      break;
  }
  return Invalid("row_layout", static_cast<int64_t>(spec.row_layout), "LINEAR (1), SPLIT_KV (2) or DSV4_PAGED (3)");
}

}  // namespace

absl::Status PoolSpec::Normalize() {
  PoolSpec spec = *this;
  if (spec.block_rows == 0) spec.block_rows = kDefaultBlockRows;
  if (spec.prefix_rows == 0) spec.prefix_rows = spec.block_rows;

  if (!IsName(spec.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("name is \"", absl::CHexEscape(spec.name.substr(0, kMaxNameBytes + 1)), "\" (", spec.name.size(),
                     " bytes); it must be 1 to ", kMaxNameBytes, " characters of [a-z0-9_-], the first one a letter"));
  }
  if (spec.layers < 1 || spec.layers > kMaxLayers) {
    return Invalid("layers", spec.layers, absl::StrCat("1 to ", kMaxLayers));
  }
  if (absl::Status status = CheckRowBytes("row_bytes", spec.row_bytes); !status.ok()) return status;
  if (spec.block_rows < kMinBlockRows || spec.block_rows > kMaxBlockRows ||
      !std::has_single_bit(static_cast<uint64_t>(spec.block_rows))) {
    return Invalid("block_rows", spec.block_rows,
                   absl::StrCat("a power of two, ", kMinBlockRows, " to ", kMaxBlockRows));
  }
  if (absl::Status status = CheckLayout(spec); !status.ok()) return status;
  if (spec.prefix_rows < spec.block_rows || spec.prefix_rows > kMaxPrefixRows ||
      spec.prefix_rows % spec.block_rows != 0) {
    return Invalid("prefix_rows", spec.prefix_rows,
                   absl::StrCat("a multiple of block_rows (", spec.block_rows, "), at most ", kMaxPrefixRows));
  }
  const int64_t max_blocks = kMaxPoolRows / spec.block_rows - 1;
  if (spec.blocks < 1 || spec.blocks > max_blocks) {
    return Invalid("blocks", spec.blocks, absl::StrCat("1 to ", max_blocks, " with block_rows ", spec.block_rows));
  }
  *this = spec;
  return absl::OkStatus();
}

}  // namespace stoker::core
