// Invalidate, reset and place, and the device clock. All are bound by launch latency; none is on the path of a step.
#include <algorithm>

#include "kernels/cuda/launch.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// The parts of one state row.
struct StateRow {
  __device__ StateRow(const Residency& residency, int64_t state_row)
      : slot_key(residency.slot_key + state_row * residency.hot_rows),
        lru(residency.lru + state_row * residency.hot_rows),
        hot_rows(residency.hot_rows) {}

  int32_t* slot_key;
  int16_t* lru;
  int32_t hot_rows;
};

// Blocks that share the keys of an Invalidate. With fewer keys each has one and scans the slots of its state row: 16
// KiB out of the L2 cache for 4,096 slots. With more, a block has several; those of one state row share a scan, those
// of different ones wait for each other.
constexpr int64_t kInvalidateBlocks = 1024;
// Bits by the low bits of the keys: of 32 keys in one scan, 1 of 256 other slots is looked at more closely.
constexpr int kFilterBits = 8192;
static_assert(kFilterBits / 32 == kThreads, "a thread clears one word");
// Slots that a thread loads before it looks at the first.
constexpr int kSlotsInFlight = 8;

// The keys of a block, up to one a thread.
struct InvalidateShared {
  int32_t state_row[kThreads];  // -1: none
  int32_t key[kThreads];        // -1: none
  uint32_t filter[kThreads];
};

// Empties the slots that hold one of the keys [first, end), which the filter has.
__device__ void Drop(const StateRow& state, const InvalidateShared& shared, int32_t first, int32_t end) {
  for (int32_t begin = static_cast<int32_t>(threadIdx.x); begin < state.hot_rows; begin += kThreads * kSlotsInFlight) {
    int32_t held[kSlotsInFlight];
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      const int32_t s = begin + i * kThreads;
      held[i] = s < state.hot_rows ? state.slot_key[s] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsInFlight; ++i) {
      if (held[i] < 0) continue;
      const uint32_t bit = static_cast<uint32_t>(held[i]) % kFilterBits;
      if ((shared.filter[bit / 32] >> (bit % 32) & 1) == 0) continue;
      for (int32_t k = first; k < end; ++k) {
        if (shared.key[k] == held[i]) {
          state.slot_key[begin + i * kThreads] = -1;
          break;
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    InvalidateKernel(const __grid_constant__ InvalidateArgs args, int32_t block_keys) {
  __shared__ InvalidateShared shared;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t begin = int64_t{blockIdx.x} * block_keys;
  const auto count = static_cast<int32_t>(min(int64_t{block_keys}, args.count - begin));
  if (thread < count) {
    const int32_t row = args.state_rows[begin + thread];
    const int64_t key = args.keys[begin + thread];
    shared.state_row[thread] = row >= 0 && row < args.residency.state_rows ? row : -1;
    shared.key[thread] = key >= 0 && key <= INT32_MAX ? static_cast<int32_t>(key) : -1;
  }
  __syncthreads();
  // A run of keys of one state row after another.
  for (int32_t first = 0, end; first < count; first = end) {
    const int32_t row = shared.state_row[first];
    end = first + 1;
    while (end < count && shared.state_row[end] == row) ++end;
    if (row < 0) continue;
    shared.filter[thread] = 0;
    __syncthreads();
    if (thread >= first && thread < end && shared.key[thread] >= 0) {
      const uint32_t bit = static_cast<uint32_t>(shared.key[thread]) % kFilterBits;
      atomicOr(&shared.filter[bit / 32], 1u << (bit % 32));
    }
    __syncthreads();
    Drop(StateRow(args.residency, row), shared, first, end);
    __syncthreads();
  }
}

__global__ void ResetKernel(const __grid_constant__ ResetArgs args) {
  for (int64_t i = blockIdx.y; i < args.count; i += gridDim.y) {
    const int32_t row = args.state_rows[i];
    if (row < 0 || row >= args.residency.state_rows) continue;
    const StateRow state(args.residency, row);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t s = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; s < state.hot_rows; s += stride) {
      state.slot_key[s] = -1;
      state.lru[s] = static_cast<int16_t>(s);
    }
  }
}

// One slot a thread.
__global__ void PlaceKernel(const __grid_constant__ PlaceArgs args) {
  const StateRow state(args.residency, args.state_row);
  const auto s = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (s >= state.hot_rows) return;
  const auto placed = [&](int32_t p) { return p >= args.first_position && p - args.first_position < args.count; };
  if (placed(s)) {
    state.slot_key[s] = s;
  } else if (placed(state.slot_key[s])) {
    state.slot_key[s] = -1;
  }
}

__global__ void TimestampKernel(uint64_t* ns) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  *ns = now;
}

}  // namespace

cudaError_t LaunchInvalidate(const InvalidateArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  const int64_t block_keys =
      std::min<int64_t>((args.count + kInvalidateBlocks - 1) / kInvalidateBlocks, int64_t{kThreads});
  const auto blocks = static_cast<unsigned>((args.count + block_keys - 1) / block_keys);
  InvalidateKernel<<<blocks, kThreads, 0, stream>>>(args, static_cast<int32_t>(block_keys));
  return cudaGetLastError();
}

cudaError_t LaunchReset(const ResetArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  constexpr int32_t kMaxGridRows = 65535;
  const dim3 grid(static_cast<unsigned>(std::clamp(args.residency.hot_rows / kThreads / 8, 1, 64)),
                  static_cast<unsigned>(std::min(args.count, kMaxGridRows)));
  ResetKernel<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchPlace(const PlaceArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  PlaceKernel<<<static_cast<unsigned>((args.residency.hot_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      args);
  return cudaGetLastError();
}

cudaError_t LaunchTimestamp(uint64_t* ns, cudaStream_t stream) {
  TimestampKernel<<<1, 1, 0, stream>>>(ns);
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
