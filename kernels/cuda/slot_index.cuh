// Which slot holds a key: an index that a block builds in shared memory from the slots' keys, for one resolve.
//
// A slot writes its number to the place of its key, without looking: of several slots with one place any wins. Those
// that lost find out by reading back, and go to a second level with another hash, and from there to a list. A place
// that nobody wrote holds anything, so nothing is cleared: whoever reads a place compares the slot's key. With
// positions below the number of places a key is its own place, nothing is lost, and the index costs one write and one
// read a slot and one read an entry. Against a map of all positions in device memory: 3.8 to 4.2 us for 2,048 entries
// of one sequence, 5.3 to 6.2 for 128 (H200, everything hot), and no device memory.
//
// All functions are called by all threads of a block; a barrier stands between two steps.
#pragma once

#include <cstdint>

#include "kernels/cuda/resolve_shared.cuh"

namespace stoker::kernels::cuda {

class SlotIndex {
 public:
  // `keys` are the slots' keys, negative for none; `rest_count` is 0.
  __device__ SlotIndex(const SingleShared& layout, char* shared, int32_t* rest_count, int32_t slots, bool identity)
      : keys_(reinterpret_cast<int32_t*>(shared + layout.keys)),
        first_(reinterpret_cast<uint16_t*>(shared + layout.first)),
        second_(reinterpret_cast<uint16_t*>(shared + layout.second)),
        rest_(reinterpret_cast<uint16_t*>(shared + layout.rest)),
        rest_count_(rest_count),
        slots_(static_cast<uint32_t>(slots)),
        multiplier_(identity ? 1u << (32 - layout.index_bits) : kFibonacci),
        bits_(layout.index_bits) {}

  // Place of a key in the first level. Step 1: every slot writes its number there (one without a key may, too). Step 2:
  // a slot with a key that finds another number there has lost. Misses may leave a mark once all keys have been looked
  // up.
  __device__ uint16_t* First(int32_t key) const { return first_ + Hash(key, multiplier_, bits_); }

  // Slot of the key whose place is `first`, or -1; final when no slot has lost. The key must not be negative.
  __device__ int32_t FindFirst(const uint16_t* first, int32_t key) const { return Checked(*first, key); }

  // Step 3. Of slots with one key (which only a corrupt residency has) the lowest counts.
  __device__ void WriteSecond(int32_t slot, int32_t key) const {
    const uint16_t there = *First(key);
    if (there == slot) return;
    if (keys_[there] == key) {
      AtomicMin(First(key), static_cast<uint16_t>(slot));
    } else {
      *Second(key) = static_cast<uint16_t>(slot);
    }
  }

  // Step 4.
  __device__ void WriteRest(int32_t slot, int32_t key) const {
    if (keys_[*First(key)] == key) return;
    const uint16_t there = *Second(key);
    if (there == slot) return;
    if (keys_[there] == key) {
      AtomicMin(Second(key), static_cast<uint16_t>(slot));
    } else {
      rest_[atomicAdd(rest_count_, 1)] = static_cast<uint16_t>(slot);
    }
  }

  __device__ int32_t Find(int32_t key) const {
    int32_t slot = FindFirst(First(key), key);
    if (slot < 0) slot = Checked(*Second(key), key);
    if (slot >= 0) return slot;
    const int32_t count = *rest_count_;
    for (int32_t i = 0; i < count; ++i) {
      const uint16_t there = rest_[i];
      if (keys_[there] == key && (slot < 0 || there < slot)) slot = there;
    }
    return slot;
  }

 private:
  __device__ uint16_t* Second(int32_t key) const { return second_ + Hash(key, kSecondHash, SingleShared::kSecondBits); }
  __device__ int32_t Checked(uint16_t slot, int32_t key) const {
    return slot < slots_ && keys_[slot] == key ? slot : -1;
  }

  static constexpr uint32_t kSecondHash = 2246822519u;

  int32_t* const keys_;
  uint16_t* const first_;
  uint16_t* const second_;
  uint16_t* const rest_;
  int32_t* const rest_count_;
  const uint32_t slots_;
  const uint32_t multiplier_;
  const int bits_;
};

}  // namespace stoker::kernels::cuda
