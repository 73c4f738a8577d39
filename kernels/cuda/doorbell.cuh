// Rings a doorbell of a plane, from a kernel of its own or at the end of the one whose results it announces.
#pragma once

#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/system_memory.cuh"
#include "kernels/plane.h"

namespace stoker::kernels::cuda {

__device__ inline bool Ended(const PlaneState* state) {
  return Load(&state->outcome) != static_cast<uint32_t>(PlaneOutcome::kRunning);
}

// What to ring with. Only earlier operations of the stream write it: it can be read before what is announced has
// happened, where it costs nothing.
struct RingWords {
  uint32_t outcome;
  uint64_t step;
  __device__ bool running() const { return outcome == static_cast<uint32_t>(PlaneOutcome::kRunning); }
};
__device__ inline RingWords ReadRing(const RingDoorbellArgs& args) {
  return {Load(&args.state->outcome), Load(&args.state->step)};
}

// By every thread of every block of a kernel of `clusters` clusters, as the last thing that it does, behind
// WaitForEarlier: the last cluster rings.
// It has seen the others' arrivals, each of which is behind a barrier of its cluster, so that what it releases is all
// that the kernel has written to memory of the device.
__device__ inline void RingAtEnd(const RingDoorbellArgs& args, const Cluster& cluster, uint32_t clusters) {
  RingWords words = {};
  if (threadIdx.x == 0) words = ReadRing(args);
  if (!cluster.ComesLast()) return;
  if (clusters > 1) {
    ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> arrived(args.state->arrived);
    if (arrived.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 != clusters) return;
    arrived.store(0, ::cuda::memory_order_relaxed);
  }
  if (words.running()) StoreRelease<kOnDevice>(args.done, words.step);
}

}  // namespace stoker::kernels::cuda
