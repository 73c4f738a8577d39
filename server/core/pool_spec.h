// What a pool is made of.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace stoker::core {

enum class RowLayout : uint8_t { kUnspecified = 0, kLinear = 1, kSplitKv = 2, kDsv4Paged = 3 };

struct PoolSpec {
  std::string name;
  int64_t layers = 0;
  RowLayout row_layout = RowLayout::kUnspecified;
  int64_t row_bytes = 0;
  int64_t v_row_bytes = 0;
  int64_t block_rows = 0;   // 0: 64
  int64_t prefix_rows = 0;  // 0: block_rows
  int64_t blocks = 0;

  // Fills in defaults and checks every field against the limits of proto/stoker/v1/pools.proto. INVALID_ARGUMENT names
  // the field, its value and its limit.
  absl::Status Normalize();

  int64_t rows() const { return blocks * block_rows; }
  // Bytes of one row of one layer, all parts together.
  int64_t bytes_per_row() const { return row_bytes + v_row_bytes; }

  friend bool operator==(const PoolSpec&, const PoolSpec&) = default;
};

}  // namespace stoker::core
