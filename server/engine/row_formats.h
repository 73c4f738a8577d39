// How core's pool specs look to the kernels.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/row_layout.h"
#include "server/core/pool_spec.h"

namespace stoker::engine {

inline kernels::RowFormat FormatOf(const core::PoolSpec& spec) {
  kernels::RowFormat format;
  format.kind = static_cast<kernels::RowLayoutKind>(spec.row_layout);
  format.row_bytes = static_cast<int32_t>(spec.row_bytes);
  format.v_row_bytes = static_cast<int32_t>(spec.v_row_bytes);
  return format;
}
static_assert(static_cast<int>(kernels::RowLayoutKind::kLinear) == static_cast<int>(core::RowLayout::kLinear));
static_assert(static_cast<int>(kernels::RowLayoutKind::kSplitKv) == static_cast<int>(core::RowLayout::kSplitKv));
static_assert(static_cast<int>(kernels::RowLayoutKind::kDsv4Paged) == static_cast<int>(core::RowLayout::kDsv4Paged));

inline int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Layers begin at multiples of it, so that rows keep the alignment that their layout gives them.
inline constexpr int64_t kLayerAlignment = 256;

}  // namespace stoker::engine
