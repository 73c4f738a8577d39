// Rings a doorbell of a plane, from a kernel of its own or at the end of the one whose results it announces.
#pragma once

#include <cstdint>

#include "kernels/cuda/system_memory.cuh"
#include "kernels/plane.h"

namespace stoker::kernels::cuda {

__device__ inline bool Ended(const PlaneState* state) {
  return Load(&state->outcome) != static_cast<uint32_t>(PlaneOutcome::kRunning);
}

// By one thread, when all that it announces has happened before.
__device__ inline void Ring(const RingDoorbellArgs& args) {
  if (!Ended(args.state)) StoreRelease(args.done, Load(&args.state->step));
}

// By every thread of every block of a kernel of `blocks` blocks, as the last thing that it does, behind
// WaitForEarlier: the last block rings.
// It has seen the others' arrivals, each of which is behind a barrier of its block, so that what it releases is all
// that the kernel has written.
__device__ inline void RingAtEnd(const RingDoorbellArgs& args, uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> arrived(args.state->arrived);
  if (arrived.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 != blocks) return;
  arrived.store(0, ::cuda::memory_order_relaxed);
  Ring(args);
}

}  // namespace stoker::kernels::cuda
