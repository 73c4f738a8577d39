// Access to memory that a client may write at any time.
//
// Invariants that every user keeps: a value is read once, into a variable of its own, and checked before it is
// followed. The accesses are relaxed atomics, which compile to plain moves, so that a concurrent writer is no data
// race; the compiler may then neither read a value twice nor tear it.
#pragma once

#include <atomic>

namespace stoker::kernels::cpu {

template <typename T>
inline T Load(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_relaxed);
}

template <typename T>
inline void Store(T* address, T value) {
  std::atomic_ref<T>(*address).store(value, std::memory_order_relaxed);
}

// Reads what tells that other memory was written, and the other way round.
template <typename T>
inline T LoadAcquire(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_acquire);
}

template <typename T>
inline void StoreRelease(T* address, T value) {
  std::atomic_ref<T>(*address).store(value, std::memory_order_release);
}

// Adds to a counter that other threads add to. Skips the locked instruction for 0.
template <typename T>
inline void Add(T* address, T value) {
  if (address != nullptr && value != 0) std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace stoker::kernels::cpu
