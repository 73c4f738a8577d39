// What the mock engine does on a GPU: writes rows, brings entries to the mailbox, compares rows.
//
// All words are of 4 bytes, since rows have no more alignment than that.
//
// Thread safety: the launchers may be called by any thread; they only enqueue work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "client/replay/row_words.h"

namespace stoker::replay {

// One part of one layer's hot cache, as client::HotPartView. A page has 1 << page_shift rows.
struct DevicePart {
  char* data = nullptr;
  uint64_t page_stride_bytes = 0;
  uint64_t row_stride_bytes = 0;
  uint32_t page_shift = 0;
  uint32_t words = 0;  // of a row; 0: the layout has no such part
};
inline constexpr int kDeviceParts = 2;  // of a layer: [layer][part]

// One row of a batch.
struct DeviceRow {
  RequestTokens tokens;  // ids in device memory
  HotRegion region;
  uint32_t length = 0;        // the newest row is that of position length - 1; 0: padding
  uint32_t newest_index = 0;  // rows of the sequence before this one in the batch
};

// One group's mailbox and layers.
struct DeviceGroup {
  int32_t* indices = nullptr;
  const int32_t* hot_rows = nullptr;
  uint64_t indices_stride = 0;   // elements from one batch row to the next
  uint64_t hot_rows_stride = 0;  // likewise
  uint32_t first_layer = 0;
  uint32_t end_layer = 0;
};

// The entries of a step.
struct DeviceEntries {
  const DeviceGroup* groups = nullptr;
  // The engine's own copy of what it asked for, [group][max_rows][top_k].
  const int32_t* positions = nullptr;
  const int32_t* names = nullptr;  // what the mailbox gets, likewise: the positions, or pool rows
  uint32_t group_count = 0;
  uint32_t rows = 0;
  uint32_t max_rows = 0;
  uint32_t top_k = 0;
};

// Where a comparison adds up what it finds.
struct CheckTotals {
  unsigned long long checked = 0;  // rows compared
  unsigned long long wrong = 0;
  // The least ((group x rows + row) x top_k + entry) x kMaxLayersOfAGroup + layer of the group, of the wrong ones. An
  // answer that cannot be right is wrong in the group's first layer.
  unsigned long long first = ~0ULL;
};
inline constexpr uint32_t kMaxLayersOfAGroup = 1024;

// Blocks of a grid that fills a GPU of so many multiprocessors; what there is more of is done in turn.
inline uint32_t GridLimit(int multiprocessors) { return static_cast<uint32_t>(multiprocessors) * 32; }

// Rows [first, first + count) of all layers, dense, [layer][row][part 0, part 1], at `out`. The ids of `tokens` are in
// device memory; layers x count is below 2^31.
struct FillArgs {
  RequestTokens tokens;
  uint32_t words[kDeviceParts] = {0, 0};  // of a row's parts
  uint32_t layers = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  uint32_t* out = nullptr;
};
cudaError_t LaunchFill(const FillArgs& args, uint32_t grid_limit, cudaStream_t stream);

// The newest row of each of `count` batch rows, in all layers.
cudaError_t LaunchNewest(const DevicePart* parts, uint32_t layers, const DeviceRow* rows, uint32_t count,
                         uint32_t grid_limit, cudaStream_t stream);

// Copies the names into the mailbox.
cudaError_t LaunchEntries(const DeviceEntries& entries, uint32_t grid_limit, cudaStream_t stream);

// Compares every row that the mailbox's hot rows name. `totals` is added to.
cudaError_t LaunchCheck(const DevicePart* parts, const DeviceEntries& entries, const DeviceRow* rows,
                        CheckTotals* totals, uint32_t grid_limit, cudaStream_t stream);

}  // namespace stoker::replay
