// Shared memory of a resolve: what lies where, and the hash table and scans on it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stoker::kernels::cuda {

inline constexpr int kResolveThreads = 512;
inline constexpr int kResolveWarps = kResolveThreads / 32;

// Byte offsets of the arrays, computed on the host. n is hot_rows, k is top_k.
struct ResolveShared {
  int32_t lru = 0;           // i16 [n]: the order as read
  int32_t stale = 0;         // i16 [n]: slot of each stale rank
  int32_t key = 0;           // i32 [k]: key of each entry, with kFinal where it has its output
  int32_t found = 0;         // u16 [k]: at the first entry of a key, its slot
  int32_t table = 0;         // u16 [table_mask + 1]: first entry of each key
  int32_t hit_bits = 0;      // u32 [n / 32]
  int32_t seen_bits = 0;     // u32 [n / 32]
  int32_t slot_counts = 0;   // i32 [warps of n]: stale slots of each 32
  int32_t entry_counts = 0;  // i32 [warps of k]: misses of each 32
  // Only where every block of a cluster resolves: i32 [k] each. entry_pool is by entry, the others by miss rank.
  int32_t entry_pool = 0;
  int32_t miss_key = 0;
  int32_t miss_pool = 0;
  int32_t miss_hot = 0;
  int32_t bytes = 0;
  uint32_t table_mask = 0;

  static ResolveShared Make(int32_t n, int32_t k, bool lists) {
    ResolveShared s;
    int32_t at = 0;
    const auto take = [&at](int64_t bytes) {
      const int32_t offset = at;
      at += static_cast<int32_t>((bytes + 15) / 16 * 16);
      return offset;
    };
    uint32_t table = 64;
    while (table < 2u * static_cast<uint32_t>(k)) table *= 2;
    s.table_mask = table - 1;
    s.lru = take(2 * int64_t{n} + 16);
    s.stale = take(2 * int64_t{n});
    s.key = take(4 * int64_t{k});
    s.found = take(2 * int64_t{k});
    s.table = take(2 * int64_t{table});
    s.hit_bits = take((n + 31) / 32 * 4);
    s.seen_bits = take((n + 31) / 32 * 4);
    s.slot_counts = take((n + 31) / 32 * 4);
    s.entry_counts = take((k + 31) / 32 * 4);
    if (lists) {
      s.entry_pool = take(4 * int64_t{k});
      s.miss_key = take(4 * int64_t{k});
      s.miss_pool = take(4 * int64_t{k});
      s.miss_hot = take(4 * int64_t{k});
    }
    s.bytes = at;
    return s;
  }
};

#ifdef __CUDACC__

inline constexpr uint16_t kEmpty = 0xffff;
inline constexpr uint16_t kNoSlot = 0xffff;
inline constexpr int32_t kFinal = INT32_MIN;  // sign bit of key: the entry needs no slot any more
static_assert(kEmpty >= 8192, "no entry has the number of an empty place");
static_assert(kNoSlot >= 32768, "no slot has the number of none");

// Open addressing on the numbers of entries: a place holds the first entry with its key.
class EntryTable {
 public:
  __device__ EntryTable(char* shared, const ResolveShared& layout)
      : table_(reinterpret_cast<uint16_t*>(shared + layout.table)),
        key_(reinterpret_cast<int32_t*>(shared + layout.key)),
        mask_(layout.table_mask) {}

  __device__ void Clear() {
    uint32_t* const words = reinterpret_cast<uint32_t*>(table_);
    for (uint32_t i = threadIdx.x; i < (mask_ + 1) / 2; i += kResolveThreads) words[i] = 0xffffffffu;
  }

  // key[i] must be set. Afterwards, and a barrier, First gives the lowest entry with the key.
  __device__ void Insert(int32_t i) {
    const int32_t key = key_[i];
    __threadfence_block();
    uint32_t h = Hash(key);
    for (;;) {
      uint16_t there = atomicCAS(table_ + h, kEmpty, static_cast<uint16_t>(i));
      if (there == kEmpty) return;
      if (KeyOf(there) != key) {
        h = (h + 1) & mask_;
        continue;
      }
      while (i < there) {
        const uint16_t seen = atomicCAS(table_ + h, there, static_cast<uint16_t>(i));
        if (seen == there) return;
        there = seen;  // a lower entry of the same key
      }
      return;
    }
  }

  // The lowest entry with the key, or -1.
  __device__ int32_t First(int32_t key) const {
    uint32_t h = Hash(key);
    for (;;) {
      const uint16_t there = table_[h];
      if (there == kEmpty) return -1;
      if (KeyOf(there) == key) return there;
      h = (h + 1) & mask_;
    }
  }

 private:
  // Fibonacci hashing; the upper bits are the mixed ones.
  __device__ uint32_t Hash(int32_t key) const { return (static_cast<uint32_t>(key) * 2654435769u) >> 15 & mask_; }
  __device__ int32_t KeyOf(uint16_t entry) const { return *const_cast<volatile int32_t*>(key_ + entry) & ~kFinal; }

  uint16_t* const table_;
  int32_t* const key_;
  const uint32_t mask_;
};

__device__ inline void AtomicMin(uint16_t* address, uint16_t value) {
  uint16_t there = *const_cast<volatile uint16_t*>(address);
  while (value < there) {
    const uint16_t seen = atomicCAS(address, there, value);
    if (seen == there) return;
    there = seen;
  }
}

// One warp turns counts[0, n) into the sums before each of them and returns the sum of all.
__device__ inline int32_t WarpExclusiveScan(int32_t* counts, int32_t n) {
  const int lane = threadIdx.x % 32;
  int32_t total = 0;
  for (int32_t begin = 0; begin < n; begin += 32) {
    const int32_t i = begin + lane;
    const int32_t own = i < n ? counts[i] : 0;
    int32_t sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (i < n) counts[i] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
  return total;
}

__device__ inline int32_t WarpPopcount(const uint32_t* bits, int32_t words) {
  int32_t count = 0;
  for (int32_t i = threadIdx.x % 32; i < words; i += 32) count += __popc(bits[i]);
  return __reduce_add_sync(~0u, count);
}

#endif  // __CUDACC__

}  // namespace stoker::kernels::cuda
