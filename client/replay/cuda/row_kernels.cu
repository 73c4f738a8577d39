// One warp does one row at a time, its lanes the row's 4-byte words: loads and stores of a row are whole segments, and
// nothing is assumed about alignment. Each 64-bit word of the oracle is computed by the two lanes that hold its halves,
// which costs less than a shuffle's constraints on odd row sizes.
//
// Bound: memory. A step of 16 sequences x 2048 entries x 61 layers of 656 bytes compares 1.3 GB; some 20 instructions a
// word are 0.2 ms of an H200's issue slots, the bytes 0.3 ms of its memory.
#include "client/replay/cuda/row_kernels.h"

namespace stoker::replay {
namespace {

constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kBlockThreads = 256;
constexpr uint32_t kBlockWarps = kBlockThreads / kWarpLanes;
static_assert(kBlockThreads % kWarpLanes == 0);

__device__ uint32_t Lane() { return threadIdx.x % kWarpLanes; }
__device__ uint64_t Warp() { return uint64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarpLanes; }
__device__ uint64_t Warps() { return uint64_t{gridDim.x} * kBlockWarps; }

// A row of a part. `hot_row` is one of the hot cache, so not negative.
__device__ uint32_t* RowOf(const DevicePart& part, int64_t hot_row) {
  const uint64_t row = static_cast<uint64_t>(hot_row);
  const uint64_t page = row >> part.page_shift, in_page = row & ((uint64_t{1} << part.page_shift) - 1);
  return reinterpret_cast<uint32_t*>(part.data + page * part.page_stride_bytes + in_page * part.row_stride_bytes);
}

__device__ void WriteStream(uint64_t stream, uint32_t words, uint32_t* out) {
  for (uint32_t i = Lane(); i < words; i += kWarpLanes) out[i] = RowHalfWord(stream, i);
}

__global__ void __launch_bounds__(kBlockThreads) FillKernel(FillArgs args) {
  const uint64_t rows = uint64_t{args.layers} * args.count;
  const uint64_t row_words = uint64_t{args.words[0]} + args.words[1];
  for (uint64_t i = Warp(); i < rows; i += Warps()) {
    const uint32_t layer = static_cast<uint32_t>(i) / args.count, row = static_cast<uint32_t>(i) % args.count;
    const uint64_t key = RowKey(layer, args.tokens[args.first + row]);
    uint32_t* const out = args.out + i * row_words;
    WriteStream(RowStream(key, 0), args.words[0], out);
    WriteStream(RowStream(key, 1), args.words[1], out + args.words[0]);
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    NewestKernel(const DevicePart* parts, uint32_t layers, const DeviceRow* rows, uint32_t count) {
  const uint64_t units = uint64_t{layers} * count;
  for (uint64_t i = Warp(); i < units; i += Warps()) {
    const uint32_t layer = static_cast<uint32_t>(i / count);
    const DeviceRow& row = rows[i % count];
    const uint64_t key = RowKey(layer, row.tokens[row.length - 1]);
    for (int p = 0; p < kDeviceParts; ++p) {
      const DevicePart& part = parts[uint64_t{layer} * kDeviceParts + p];
      if (part.words == 0) continue;
      WriteStream(RowStream(key, p), part.words,
                  RowOf(part, row.region.begin + row.region.newest_row + row.newest_index));
    }
  }
}

__global__ void __launch_bounds__(kBlockThreads) EntriesKernel(DeviceEntries entries) {
  const uint64_t units = uint64_t{entries.group_count} * entries.rows * entries.top_k;
  const uint64_t step = uint64_t{gridDim.x} * kBlockThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < units; i += step) {
    const uint64_t entry = i % entries.top_k, batch = i / entries.top_k;
    const uint64_t row = batch % entries.rows, group = batch / entries.rows;
    const DeviceGroup& to = entries.groups[group];
    to.indices[row * to.indices_stride + entry] =
        entries.names[(group * entries.max_rows + row) * entries.top_k + entry];
  }
}

// Whether the row holds the stream, for all lanes of the warp.
__device__ bool Holds(const uint32_t* row, uint64_t stream, uint32_t words) {
  uint32_t difference = 0;
  for (uint32_t i = Lane(); i < words; i += kWarpLanes) difference |= row[i] ^ RowHalfWord(stream, i);
  return !__any_sync(~0u, difference != 0);
}

__global__ void __launch_bounds__(kBlockThreads)
    CheckKernel(const DevicePart* parts, DeviceEntries entries, const DeviceRow* rows, CheckTotals* totals) {
  unsigned long long checked = 0, wrong = 0, first = ~0ULL;
  const uint64_t units = uint64_t{entries.group_count} * entries.rows * entries.top_k;
  // The whole warp has one entry, so that it stays together at every branch.
  for (uint64_t i = Warp(); i < units; i += Warps()) {
    const uint64_t entry = i % entries.top_k, batch = i / entries.top_k;
    const uint64_t batch_row = batch % entries.rows, g = batch / entries.rows;
    const DeviceGroup& group = entries.groups[g];
    const DeviceRow& row = rows[batch_row];
    const int32_t position = entries.positions[(g * entries.max_rows + batch_row) * entries.top_k + entry];
    const int32_t hot_row = group.hot_rows[batch_row * group.hot_rows_stride + entry];
    const unsigned long long place = i * kMaxLayersOfAGroup;
    // A possible answer lies in the sequence's region, so that every address below is one of the arena.
    if (!row.region.CanAnswer(position, row.length, row.newest_index, hot_row)) {
      ++wrong;
      if (place < first) first = place;
      continue;
    }
    if (hot_row < 0) continue;
    const uint64_t token = row.tokens[static_cast<uint32_t>(position)];
    checked += group.end_layer - group.first_layer;
    for (uint32_t layer = group.first_layer; layer < group.end_layer; ++layer) {
      const uint64_t key = RowKey(layer, token);
      bool right = true;
      for (int p = 0; p < kDeviceParts; ++p) {
        const DevicePart& part = parts[uint64_t{layer} * kDeviceParts + p];
        if (part.words != 0) right &= Holds(RowOf(part, hot_row), RowStream(key, p), part.words);
      }
      if (right) continue;
      ++wrong;
      if (place + (layer - group.first_layer) < first) first = place + (layer - group.first_layer);
    }
  }
  if (Lane() != 0) return;
  if (checked != 0) atomicAdd(&totals->checked, checked);
  if (wrong == 0) return;
  atomicAdd(&totals->wrong, wrong);
  atomicMin(&totals->first, first);
}

uint32_t Blocks(uint64_t units, uint32_t units_of_a_block, uint32_t grid_limit) {
  const uint64_t blocks = (units + units_of_a_block - 1) / units_of_a_block;
  return blocks < grid_limit ? static_cast<uint32_t>(blocks) : grid_limit;
}

}  // namespace

cudaError_t LaunchFill(const FillArgs& args, uint32_t grid_limit, cudaStream_t stream) {
  const uint64_t rows = uint64_t{args.layers} * args.count;
  if (rows == 0) return cudaSuccess;
  if (rows >= uint64_t{1} << 31 || reinterpret_cast<uintptr_t>(args.out) % 4 != 0) return cudaErrorInvalidValue;
  FillKernel<<<Blocks(rows, kBlockWarps, grid_limit), kBlockThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchNewest(const DevicePart* parts, uint32_t layers, const DeviceRow* rows, uint32_t count,
                         uint32_t grid_limit, cudaStream_t stream) {
  const uint64_t units = uint64_t{layers} * count;
  if (units == 0) return cudaSuccess;
  NewestKernel<<<Blocks(units, kBlockWarps, grid_limit), kBlockThreads, 0, stream>>>(parts, layers, rows, count);
  return cudaGetLastError();
}

cudaError_t LaunchEntries(const DeviceEntries& entries, uint32_t grid_limit, cudaStream_t stream) {
  const uint64_t units = uint64_t{entries.group_count} * entries.rows * entries.top_k;
  if (units == 0) return cudaSuccess;
  EntriesKernel<<<Blocks(units, kBlockThreads, grid_limit), kBlockThreads, 0, stream>>>(entries);
  return cudaGetLastError();
}

cudaError_t LaunchCheck(const DevicePart* parts, const DeviceEntries& entries, const DeviceRow* rows,
                        CheckTotals* totals, uint32_t grid_limit, cudaStream_t stream) {
  const uint64_t units = uint64_t{entries.group_count} * entries.rows * entries.top_k;
  if (units == 0) return cudaSuccess;
  CheckKernel<<<Blocks(units, kBlockWarps, grid_limit), kBlockThreads, 0, stream>>>(parts, entries, rows, totals);
  return cudaGetLastError();
}

}  // namespace stoker::replay
