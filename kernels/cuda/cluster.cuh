// Clusters: blocks that run at one time and write to each other's shared memory. Before compute capability 9.0 a block
// is alone.
#pragma once

#include <cstdint>

namespace stoker::kernels::cuda {

#ifdef __CUDACC__

// Where a block gets a message from the first block of its cluster: words in its shared memory, and a barrier that
// counts their bytes. No fence is needed, which would wait for all that the sender has written to global memory.
//
// Life: the block's first thread calls Open, all threads Cluster::Arrive and Wait; then the sender may call Send any
// number of times and Close or CloseAndRelease once; AwaitClosed returns when all is there.
struct Inbox {
  uint64_t barrier;

  __device__ void Open() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Address(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Writes `value` to what is at `target` in the shared memory of another block of the cluster.
  __device__ void Send(uint32_t block, int2* target, int2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%0], {%1, %2}, [%3];" ::"r"(In(block, target)),
        "r"(value.x), "r"(value.y), "r"(In(block, &barrier))
        : "memory");
#endif
  }

  // `count` values are sent to the block in all. They alone are there when it has awaited this: a release would first
  // wait for all that the thread has written to global memory (0.7 us of a step).
  __device__ void Close(uint32_t block, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(In(block, &barrier)),
        "r"(count * static_cast<uint32_t>(sizeof(int2)))
        : "memory");
#endif
  }

  // As Close, and the block then sees what this thread has written, or has seen, in global memory.
  __device__ void CloseAndRelease(uint32_t block, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(In(block, &barrier)),
        "r"(count * static_cast<uint32_t>(sizeof(int2)))
        : "memory");
#endif
  }

  __device__ void AwaitClosed() {
#if __CUDA_ARCH__ >= 900
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(Address(&barrier))
          : "memory");
    }
#endif
  }

 private:
  __device__ static uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
#if __CUDA_ARCH__ >= 900
  __device__ static uint32_t In(uint32_t block, const void* shared) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(Address(shared)), "r"(block));
    return mapped;
  }
#endif
};

struct Cluster {
  uint32_t rank = 0;
  uint32_t blocks = 1;

  // The barrier at which the blocks know of each other that they have started and opened their inboxes.
  __device__ void Arrive() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  __device__ void Wait() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // The last thing that the blocks do, by all their threads, behind the barrier above. True in one thread, which then
  // sees all that they have written. A cluster of one block may be part of one by which batch rows take turns.
  __device__ bool ComesLast() const {
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      // The first warp for the others, behind that barrier: each release waits for what has been written.
      if (threadIdx.x >= 32) {
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        return false;
      }
      asm volatile("barrier.cluster.arrive.release;" ::: "memory");
      if (rank > 0) return false;
      asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    }
#endif
    return threadIdx.x == 0;
  }
};

// In a cluster of two blocks: the second one waits here until the first has ended. All threads of both call it. The
// first one does not arrive at the barrier: threads that have ended count as arrived.
__device__ inline void AwaitEndOfFirstBlock() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (rank == 0) return;
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The kernel may be launched while the one before it still runs: its results are there after WaitForEarlier. The next
// one may be launched from now on, and waits in the same way.
__device__ inline void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void WaitForEarlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace stoker::kernels::cuda
