// What one launch that copies rows may take of a device, so that work of others gets in between: an engine's own
// kernels, or the steps of another session.
//
// Blocks bound how many reads are under way at one time, and with that the share of the link, and how many
// multiprocessors are taken: a resolve needs one for each of its blocks alone. Bytes bound how long the launch holds
// them. Results are the same, bit for bit, whatever the limits are.
//
// Thread safety: values, and functions without state.
#pragma once

#include <algorithm>
#include <cstdint>

namespace stoker::kernels {

struct CopyLimits {
  // Thread blocks that copy; 0: as many as the backend finds best. The CPU backend has none.
  int32_t max_blocks = 0;
  // Bytes of a launch, counted as if each row that it names were copied; 0: no limit. What is longer becomes several
  // launches: a transfer of fewer layers, then of fewer rows, one at least; a gather of fewer layers, one at least. On
  // the CPU backend other streams have their turn between them.
  int64_t max_bytes = 0;
};

// A part of a transfer: some of its pairs of rows, in some of its layers.
struct TransferPart {
  int64_t first_pair = 0;
  int64_t pairs = 0;
  int32_t first_layer = 0;
  int32_t layers = 0;
};

// Calls `copy` for parts of at most max_bytes, max_pairs and max_layers, which make up `count` pairs in `layer_count`
// layers. One layer's rows lie close together, and address translation limits: a part has few layers rather than few
// rows.
template <typename Copy>
void ForTransferParts(int64_t count, int32_t layer_count, int64_t row_bytes, const CopyLimits& limits,
                      int64_t max_pairs, int32_t max_layers, Copy copy) {
  for (int64_t first = 0; first < count; first += max_pairs) {
    const int64_t chunk = std::min(max_pairs, count - first);
    int64_t pairs = chunk;
    int32_t layers = max_layers;
    if (limits.max_bytes > 0) {
      const int64_t rows = std::max<int64_t>(limits.max_bytes / std::max<int64_t>(row_bytes, 1), 1);
      pairs = std::min(chunk, rows);
      layers = static_cast<int32_t>(std::clamp<int64_t>(rows / chunk, 1, max_layers));
    }
    for (int32_t layer = 0; layer < layer_count; layer += layers) {
      for (int64_t begin = 0; begin < chunk; begin += pairs) {
        copy(TransferPart{first + begin, std::min(pairs, chunk - begin), layer, std::min(layers, layer_count - layer)});
      }
    }
  }
}

// How many parts that are.
inline int64_t TransferParts(int64_t count, int32_t layer_count, int64_t row_bytes, const CopyLimits& limits,
                             int64_t max_pairs, int32_t max_layers) {
  int64_t parts = 0;
  ForTransferParts(count, layer_count, row_bytes, limits, max_pairs, max_layers, [&](const TransferPart&) { ++parts; });
  return parts;
}

// Layers that one launch gathers: max_layers, or fewer where rows x top_k rows of each would be more than max_bytes.
inline int32_t GatherLayers(int32_t rows, int32_t top_k, int64_t row_bytes, const CopyLimits& limits,
                            int32_t max_layers) {
  if (limits.max_bytes == 0) return max_layers;
  const int64_t layer_bytes = std::max<int64_t>(int64_t{rows} * top_k * row_bytes, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(limits.max_bytes / layer_bytes, 1, max_layers));
}

}  // namespace stoker::kernels
