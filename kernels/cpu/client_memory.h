// Access to memory that a client may write at any time.
//
// Invariants that every user keeps: a value is read once, into a variable of its own, and checked before it is
// followed. The accesses are relaxed atomics, which compile to plain moves, so that a concurrent writer is no data
// race; the compiler may then neither read a value twice nor tear it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace stoker::kernels::cpu {

template <typename T>
inline T Load(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_relaxed);
}

template <typename T>
inline void Store(T* address, T value) {
  std::atomic_ref<T>(*address).store(value, std::memory_order_relaxed);
}

// Copies memory that other threads use meanwhile. Words of 8 bytes, or of 4, that are aligned on both sides are not
// torn.
inline void CopyShared(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const auto copy = [&]<typename T>(T) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % alignof(T) != 0) return;
    for (; bytes >= sizeof(T); bytes -= sizeof(T), to += sizeof(T), from += sizeof(T)) {
      Store(reinterpret_cast<T*>(to), Load(reinterpret_cast<const T*>(from)));
    }
  };
  copy(uint64_t{});
  copy(uint32_t{});
  copy(uint8_t{});
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

// Of two threads that go through these with one word, the later one sees all that the other wrote before, be it this
// word or another. (Fences would do, too, but ThreadSanitizer does not know them.)
template <typename T>
inline void StoreInTurn(T* address, T value) {
  std::atomic_ref<T>(*address).exchange(value, std::memory_order_acq_rel);
}

template <typename T>
inline T LoadInTurn(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).fetch_add(0, std::memory_order_acq_rel);
}

// Adds to a counter that other threads add to. Skips the locked instruction for 0.
template <typename T>
inline void Add(T* address, T value) {
  if (address != nullptr && value != 0) std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace stoker::kernels::cpu
