// How many blocks a launch has. Plain arithmetic: no header of CUDA's is needed to include this one.
//
// Thread safety: values, and functions without state.
#pragma once

#include <algorithm>
#include <cstdint>

namespace stoker::kernels::cuda {

// What the launchers need to know of a device. Read once, when the backend is made.
struct DeviceLimits {
  int multiprocessors = 0;
  int max_shared_bytes = 0;  // of one block, opted in
  bool clusters = false;     // compute capability 9.0 and above
};

// About 16 blocks saturate the link (measurements: 16 blocks 41.0 GB/s, 132 blocks 41.2); a few more make up for those
// that resolve, and more still only keep multiprocessors from neighbours. Each sequence of a small batch gets several.
inline constexpr int kTargetBlocks = 64;

// A cluster of sixteen starts 2 us later than one of eight.
inline constexpr int kMaxCluster = 8;

// Blocks that copy, as CopyLimits::max_blocks has it: `wanted`, or fewer.
inline int CappedBlocks(int wanted, int32_t max_blocks) {
  return max_blocks == 0 ? wanted : std::min(wanted, static_cast<int>(max_blocks));
}

// How resolve and gather are launched.
struct ResolveGatherShape {
  // Blocks of a sequence, of which all but one copy; with one it copies what it has resolved.
  int cluster = 1;
  // False: a resolve with one block for each row, which copies nothing, and then a gather. Only where so many blocks
  // may not copy as there are rows.
  bool fused = true;

  int copying_blocks(int32_t rows) const { return !fused ? 0 : rows * std::max(cluster - 1, 1); }
};

inline ResolveGatherShape ShapeOfResolveGather(int32_t rows, const DeviceLimits& limits, int32_t max_blocks) {
  ResolveGatherShape shape;
  if (limits.clusters) {
    while (shape.cluster < kMaxCluster && rows * shape.cluster * 2 <= kTargetBlocks) shape.cluster *= 2;
    // The whole batch on the device at once.
    if (shape.cluster == 1 && rows * 2 <= limits.multiprocessors) shape.cluster = 2;
  }
  if (max_blocks == 0) return shape;
  while (shape.cluster > 2 && shape.copying_blocks(rows) > max_blocks) shape.cluster /= 2;
  if (shape.copying_blocks(rows) > max_blocks) shape = {.cluster = 1, .fused = false};
  return shape;
}

// The blocks of a gather from compact lists: `shares` for each of `rows` rows that are under way at one time.
struct GatherShape {
  int shares = 1;
  int rows = 1;
};

inline GatherShape ShapeOfGather(int32_t rows, int32_t max_blocks) {
  GatherShape shape;
  shape.rows = CappedBlocks(rows, max_blocks);
  shape.shares = std::clamp(CappedBlocks(kTargetBlocks, max_blocks) / rows, 1, 16);
  return shape;
}

// The blocks of a transfer: `shares` of a layer's bytes for each of `layers` layers that are under way at one time.
struct TransferShape {
  int shares = 1;
  int layers = 1;
};

// `layer_bytes` are moved in each of `layer_count` layers, with blocks of `threads` threads, each of which moves 16
// bytes at a time. Rows that do not give a layer many blocks have their layers side by side: a commit of one row would
// else take as many trips as there are layers.
inline TransferShape ShapeOfTransfer(int64_t layer_bytes, int32_t layer_count, int threads, int32_t max_blocks) {
  const int blocks = CappedBlocks(kTargetBlocks, max_blocks);
  TransferShape shape;
  shape.shares = static_cast<int>(std::clamp<int64_t>(layer_bytes / 16 / threads, 1, blocks));
  shape.layers = std::clamp(blocks / shape.shares, 1, std::max(static_cast<int>(layer_count), 1));
  return shape;
}

}  // namespace stoker::kernels::cuda
