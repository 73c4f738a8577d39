// Access to memory that the host, other devices and other processes use while a kernel runs.
//
// Invariant that every user keeps: what somebody else may write is read once, into a variable of its own, and checked
// before it is followed. No access here is cached near a multiprocessor, or left out or doubled by the compiler.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace stoker::kernels::cuda {

template <typename T>
using SystemRef = ::cuda::atomic_ref<T, ::cuda::thread_scope_system>;

template <typename T>
__device__ T Load(const T* address) {
  return SystemRef<T>(*const_cast<T*>(address)).load(::cuda::memory_order_relaxed);
}

template <typename T>
__device__ void Store(T* address, T value) {
  SystemRef<T>(*address).store(value, ::cuda::memory_order_relaxed);
}

// How far a release reaches. On the device: between kernels of one device, of whatever processes, about memory of that
// device: all of them find it in its L2 cache. At system scope the writer waits for the link as well (0.7 us, and more
// while others read host memory).
inline constexpr auto kSystem = ::cuda::thread_scope_system;
inline constexpr auto kOnDevice = ::cuda::thread_scope_device;

// Reads what tells that other memory was written, and the other way round. What is released is all that happened
// before: other kernels of the stream, too, and other threads of the block before a barrier.
template <::cuda::thread_scope kScope = kSystem, typename T>
__device__ T LoadAcquire(const T* address) {
  return ::cuda::atomic_ref<T, kScope>(*const_cast<T*>(address)).load(::cuda::memory_order_acquire);
}

template <::cuda::thread_scope kScope = kSystem, typename T>
__device__ void StoreRelease(T* address, T value) {
  ::cuda::atomic_ref<T, kScope>(*address).store(value, ::cuda::memory_order_release);
}

// Of two threads that each write one word, pass this fence and read the other's word, one sees what was written.
__device__ inline void FenceSequential() {
  ::cuda::atomic_thread_fence(::cuda::memory_order_seq_cst, ::cuda::thread_scope_system);
}

}  // namespace stoker::kernels::cuda
