// The two things that an engine's kernels do on the server plane: say that something is there (ring), and wait for the
// daemon's answer. For one thread; what other threads wrote is announced by it behind a barrier, or from a later
// kernel.
//
//   indexer<<<...>>>:  write the group's entries into the mailbox;
//                      the last thread to come:  RingDoorbell(view, group);
//   attention<<<...>>>:  if (threadIdx.x == 0) there = AwaitDoorbell(view, group);
//                        __syncthreads(); read the rows that the hot rows name, where `there`.
//
// A wait inside the kernel that needs the answer is fastest (kernels/README.md, Planes) and holds that kernel's blocks
// on their multiprocessors while the daemon works; DevicePlane has kernels of one warp that only wait.
//
// Engine and daemon are on one GPU, and what doorbells announce is in its memory: mailbox and hot buffer. So they are
// rung at device scope (deploy/adr/0007-planes.md); what an engine has written to host memory they do not announce.
//
// Bound of a wait: one trip to the L2 cache behind the daemon's answer.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "client/doorbell.h"

namespace stoker::client {

// Between two looks at `done`: leaves the memory system to others.
inline constexpr unsigned kDoorbellPauseNs = 64;
// Between two looks at the abort word, which is behind the link, a trip of 1 to 2 us, and at `ended`. A wait that is
// answered sooner never looks at them.
inline constexpr uint64_t kAbortPauseNs = 20'000;

namespace doorbell_detail {

template <typename T>
using SystemRef = ::cuda::atomic_ref<T, ::cuda::thread_scope_system>;

// Between kernels of one GPU, about its memory: at system scope the writer waits for the link as well.
inline constexpr auto kOnDevice = ::cuda::thread_scope_device;

template <::cuda::thread_scope kScope = ::cuda::thread_scope_system, typename T>
__device__ inline T LoadAcquire(const T* address) {
  return ::cuda::atomic_ref<T, kScope>(*const_cast<T*>(address)).load(::cuda::memory_order_acquire);
}
template <typename T>
__device__ inline T Load(const T* address) {
  return SystemRef<T>(*const_cast<T*>(address)).load(::cuda::memory_order_relaxed);
}
template <typename T>
__device__ inline void Store(T* address, T value) {
  SystemRef<T>(*address).store(value, ::cuda::memory_order_relaxed);
}
template <::cuda::thread_scope kScope = ::cuda::thread_scope_system, typename T>
__device__ inline void StoreRelease(T* address, T value) {
  ::cuda::atomic_ref<T, kScope>(*address).store(value, ::cuda::memory_order_release);
}
__device__ inline uint64_t NowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace doorbell_detail

// Sets *request, of the arena, to the number of the step: all that was written to the GPU's memory before is there.
__device__ inline void RingRequest(uint64_t* request, uint64_t step) {
  doorbell_detail::StoreRelease<doorbell_detail::kOnDevice>(request, step);
}

// Waits until *done, of the arena, is the number of the step; then what the daemon wrote before can be read. Ends as
// well when *ended or *abort is not 0, both of which are looked at every kAbortPauseNs, and limit_ns after it began (0:
// never). An answer that is there is taken, whatever they say.
__device__ inline WaitOutcome AwaitDone(const uint64_t* done, uint64_t step, const int32_t* ended,
                                        const uint32_t* abort, uint64_t limit_ns) {
  using namespace doorbell_detail;
  const uint64_t begin_ns = NowNs();
  uint64_t looked_ns = begin_ns;
  while (true) {
    const uint64_t now_ns = NowNs();
    const bool late = limit_ns > 0 && now_ns - begin_ns >= limit_ns;
    WaitOutcome outcome = late ? WaitOutcome::kTimedOut : WaitOutcome::kDone;
    // Before `done` is read: what was not answered when the plane had ended never will be.
    if (late || now_ns - looked_ns >= kAbortPauseNs) {
      looked_ns = now_ns;
      if (LoadAcquire<kOnDevice>(ended) != 0) {
        outcome = WaitOutcome::kEnded;
      } else if (LoadAcquire(abort) != 0) {
        outcome = WaitOutcome::kAborted;
      }
    }
    const uint64_t answer = LoadAcquire<kOnDevice>(done);
    if (answer == step) return WaitOutcome::kDone;
    if (answer != step - 1) return WaitOutcome::kBadStep;
    if (outcome != WaitOutcome::kDone) return outcome;
    __nanosleep(kDoorbellPauseNs);
  }
}

// Whether the plane still runs, as far as this kernel's stream knows.
__device__ inline bool IsRunning(const DoorbellView& view) { return doorbell_detail::Load(&view.state->outcome) == 0; }

// Rings a doorbell of the step that runs; nothing after a wait that failed. For one thread of each block of a kernel,
// behind a barrier of the block: rings when the last of `blocks` has come.
__device__ inline void RingDoorbellLast(const DoorbellView& view, uint32_t doorbell, uint32_t blocks) {
  // Asked for before the other blocks have come, where it costs nothing. Whether a wait has failed is not: a block of
  // this kernel may have waited before it came.
  const uint64_t step = doorbell_detail::Load(&view.state->step);
  if (blocks > 1) {
    ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> arrived(view.state->arrived);
    if (arrived.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 != blocks) return;
    arrived.store(0, ::cuda::memory_order_relaxed);
  }
  if (!IsRunning(view)) return;
  RingRequest(reinterpret_cast<uint64_t*>(view.request + doorbell * view.request_stride), step);
}

// The same by one thread alone.
__device__ inline void RingDoorbell(const DoorbellView& view, uint32_t doorbell) {
  RingDoorbellLast(view, doorbell, 1);
}

// Waits for the answer to a doorbell of the step that runs. False: it did not come, or a wait before has failed; then
// every later wait returns at once, and the host finds the first reason in the report.
__device__ inline bool AwaitDoorbell(const DoorbellView& view, uint32_t doorbell) {
  using namespace doorbell_detail;
  if (!IsRunning(view)) return false;
  const uint64_t step = Load(&view.state->step);
  const WaitOutcome outcome = AwaitDone(reinterpret_cast<const uint64_t*>(view.done + doorbell * view.done_stride),
                                        step, view.ended, view.abort, view.limit_ns);
  if (outcome == WaitOutcome::kDone) return true;
  uint32_t expected = static_cast<uint32_t>(WaitOutcome::kDone);
  const bool first =
      SystemRef<uint32_t>(view.state->outcome)
          .compare_exchange_strong(expected, static_cast<uint32_t>(outcome), ::cuda::memory_order_relaxed);
  if (first) {
    Store(&view.report->step, step);
    Store(&view.report->doorbell, doorbell);
    Store(&view.report->ended, LoadAcquire<kOnDevice>(view.ended));
    StoreRelease(&view.report->outcome, static_cast<uint32_t>(outcome));
  }
  return false;
}

}  // namespace stoker::client
