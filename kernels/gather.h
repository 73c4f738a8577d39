// Gather: copies a plan's missed rows from the pool into the hot cache. Seed kernels: vLLM hisparse_gather_plan and
// hisparse_gather_compact.
//
// A pool row outside [0, pool_rows) zero-fills its hot row; a hot row outside [0, hot_rows) is skipped.
// The hot rows of one plan differ from each other.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/copy_limits.h"
#include "kernels/row_layout.h"

namespace stoker::kernels {

// From the compact list. All pointers are device memory except pool.base, which is host memory that the device reads.
struct GatherCompactArgs {
  RowStore pool;
  RowStore hot;
  int64_t pool_rows = 0;
  int64_t hot_rows = 0;
  const int32_t* layers = nullptr;  // host memory, read before the call returns: the layers to gather
  int32_t layer_count = 0;
  const int32_t* miss_pool_rows = nullptr;  // [rows][top_k]
  const int32_t* miss_hot_rows = nullptr;   // [rows][top_k]
  const int32_t* miss_counts = nullptr;     // [rows]: clamped to [0, top_k]
  int32_t rows = 0;
  int32_t top_k = 0;
  uint64_t* gathered_bytes = nullptr;  // optional [1]: bytes copied, not zero-filled, are added atomically
  CopyLimits limits = {};
};

// From the dense plan: every entry whose miss_mask is not 0.
struct GatherDenseArgs {
  RowStore pool;
  RowStore hot;
  int64_t pool_rows = 0;
  int64_t hot_rows = 0;
  const int32_t* layers = nullptr;  // host memory, read before the call returns
  int32_t layer_count = 0;
  const int32_t* entry_pool_rows = nullptr;  // [rows][top_k]
  const int32_t* entry_hot_rows = nullptr;   // [rows][top_k]
  const int32_t* miss_mask = nullptr;        // [rows][top_k]
  const int32_t* state_rows = nullptr;       // optional [rows]: negative is padding
  int32_t rows = 0;
  int32_t top_k = 0;
  int32_t* attention_indices = nullptr;  // optional [rows][top_k], as in ResolveArgs
  int64_t attention_block_stride = 0;
  int32_t hot_block_rows = 64;
  uint64_t* gathered_bytes = nullptr;
};

absl::Status Validate(const GatherCompactArgs& args);
absl::Status Validate(const GatherDenseArgs& args);

}  // namespace stoker::kernels
