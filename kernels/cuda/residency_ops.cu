// Invalidate, reset and place, and the device clock. All are bound by launch latency; none is on the path of a step.
#include <algorithm>

#include "kernels/cuda/launch.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct StateRow {
  __device__ StateRow(const Residency& residency, int64_t state_row)
      : slot_key(residency.slot_key + state_row * residency.hot_rows),
        lru(residency.lru + state_row * residency.hot_rows),
        slot_of(residency.slot_of == nullptr ? nullptr : residency.slot_of + state_row * residency.slot_of_stride),
        hot_rows(residency.hot_rows),
        positions(residency.slot_of_stride) {}

  // Slot of a position, or -1.
  __device__ int32_t SlotOf(int64_t position) const {
    const int32_t slot = slot_of[position];
    return slot >= 0 && slot < hot_rows && slot_key[slot] == position ? slot : -1;
  }

  int32_t* slot_key;
  int16_t* lru;
  int16_t* slot_of;
  int32_t hot_rows;
  int64_t positions;
};

// One key a thread.
__global__ void InvalidatePositions(const __grid_constant__ InvalidateArgs args) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= args.count) return;
  const int32_t row = args.state_rows[i];
  const int64_t key = args.keys[i];
  if (row < 0 || row >= args.residency.state_rows || key < 0 || key >= args.residency.slot_of_stride) return;
  const StateRow state(args.residency, row);
  const int32_t slot = state.SlotOf(key);
  if (slot < 0) return;
  state.slot_key[slot] = -1;
  state.slot_of[key] = -1;
}

// One key a block: its threads look through the slots.
__global__ void InvalidatePoolRows(const __grid_constant__ InvalidateArgs args) {
  for (int64_t i = blockIdx.x; i < args.count; i += gridDim.x) {
    const int32_t row = args.state_rows[i];
    const int64_t key = args.keys[i];
    if (row < 0 || row >= args.residency.state_rows || key < 0 || key > INT32_MAX) continue;
    const StateRow state(args.residency, row);
    for (int32_t s = static_cast<int32_t>(threadIdx.x); s < state.hot_rows; s += kThreads) {
      if (state.slot_key[s] == key) state.slot_key[s] = -1;
    }
  }
}

__global__ void ResetKernel(const __grid_constant__ ResetArgs args) {
  const int32_t row = args.state_rows[blockIdx.y];
  if (row < 0 || row >= args.residency.state_rows) return;
  const StateRow state(args.residency, row);
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t s = first; s < state.hot_rows; s += stride) {
    state.slot_key[s] = -1;
    state.lru[s] = static_cast<int16_t>(s);
  }
  if (args.index_space != IndexSpace::kPosition) return;
  for (int64_t p = first; p < state.positions; p += stride) state.slot_of[p] = -1;
}

// One block, in three phases: what was in the slots leaves, what was elsewhere leaves there, the positions arrive.
__global__ void PlaceKernel(const __grid_constant__ PlaceArgs args) {
  const StateRow state(args.residency, args.state_row);
  const int32_t end = args.first_position + args.count;
  const int32_t first = args.first_position + static_cast<int32_t>(threadIdx.x);
  for (int32_t p = first; p < end; p += kThreads) {
    const int32_t old_key = state.slot_key[p];
    if (old_key >= 0 && old_key < state.positions && state.slot_of[old_key] == p) state.slot_of[old_key] = -1;
  }
  __syncthreads();
  for (int32_t p = first; p < end; p += kThreads) {
    if (const int32_t slot = state.SlotOf(p); slot >= 0) state.slot_key[slot] = -1;
  }
  __syncthreads();
  for (int32_t p = first; p < end; p += kThreads) {
    state.slot_key[p] = p;
    state.slot_of[p] = static_cast<int16_t>(p);
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
  if (args.index_space == IndexSpace::kPosition) {
    InvalidatePositions<<<static_cast<unsigned>((args.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  } else {
    InvalidatePoolRows<<<static_cast<unsigned>(std::min<int64_t>(args.count, 1024)), kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t LaunchReset(const ResetArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  const int64_t work = std::max<int64_t>(args.residency.hot_rows, args.residency.slot_of_stride);
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(work / kThreads / 8, 1, 64)),
                  static_cast<unsigned>(args.count));
  ResetKernel<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchPlace(const PlaceArgs& args, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  PlaceKernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchTimestamp(uint64_t* ns, cudaStream_t stream) {
  TimestampKernel<<<1, 1, 0, stream>>>(ns);
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
