// Kernels of an engine that hands its work over in order: what it writes it writes last, and what it writes first is
// wrong, so that whoever does not wait is found out.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace stoker::gpu_test {

inline constexpr int kMostLayers = 8;

// Rows of each layer, one behind the other.
struct LayerRows {
  uint32_t* layer[kMostLayers] = {};
  int layers = 0;
  int row_words = 0;
  int64_t row_stride_words = 0;
};

struct RowCounts {
  unsigned long long compared = 0;
  unsigned long long wrong = 0;
};

// After `work_ns` of work: rows[...][row + i] of `count` positions from `first` on and, where `entries` is not null, a
// batch row of `top_k` of them: the newest position, `length` - 1, and others. Then *told (pinned) is `number`. Before,
// all of it is poisoned.
struct ProduceArgs {
  uint64_t work_ns = 0;
  LayerRows rows;
  int64_t row = 0;
  int64_t first = 0;
  int64_t count = 0;
  int32_t* entries = nullptr;
  int top_k = 0;
  int64_t length = 0;
  uint32_t* told = nullptr;
  uint32_t number = 0;
};
cudaError_t LaunchProduce(const ProduceArgs& args, cudaStream_t stream);

// Compares the rows that `hot_rows` names with those that `entries` asks for; a row that is none is wrong.
cudaError_t LaunchCheck(const LayerRows& rows, const int32_t* entries, const int32_t* hot_rows, int top_k,
                        RowCounts* counts, cudaStream_t stream);
// Compares rows[...][row + i] with those of `count` positions from `first` on.
cudaError_t LaunchCheckRange(const LayerRows& rows, int64_t row, int64_t first, int64_t count, RowCounts* counts,
                             cudaStream_t stream);

}  // namespace stoker::gpu_test
