// Shared memory of a resolve: what lies where, and the hash table and scans on it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace stoker::kernels::cuda {

inline constexpr int kResolveThreads = 1024;
inline constexpr int kResolveWarps = kResolveThreads / 32;

// Hands out 16-byte aligned parts of a block's shared memory.
class SharedCursor {
 public:
  int32_t Take(int64_t bytes) {
    const int32_t offset = used_;
    used_ += static_cast<int32_t>((bytes + 15) / 16 * 16);
    return offset;
  }
  int32_t used() const { return used_; }

 private:
  int32_t used_ = 0;
};

// For one batch row of a state row, hot_rows n up to kMaxHotRows and top_k k up to kMaxTopK. Byte offsets, computed on
// the host.
struct SingleShared {
  static constexpr int32_t kMaxHotRows = 8192;
  static constexpr int32_t kMaxTopK = 2048;
  static constexpr int32_t kMaxColumns = 2048;
  static constexpr int32_t kMaxIndexBits = 16;
  static constexpr int32_t kMinIndexBits = 13;
  static constexpr int32_t kSecondBits = 13;

  int32_t keys = 0;     // i32 [n]: key in each slot
  int32_t flags = 0;    // u32 [n]: whether the slot was hit, then whether it stands in the order
  int32_t table = 0;    // i32 [columns]: the row's block table, as far as it is kept here
  int32_t list = 0;     // i32 [k + 1][2]: header; pool row of the misses that this block copies
  int32_t victims = 0;  // i16 [k]: slot of each miss
  int32_t work = 0;     // i32 [k]: for repeats among the misses
  int32_t first = 0;    // u16 [1 << index_bits]: index of the slots, first level
  int32_t second = 0;   // u16 [1 << kSecondBits]: its second level; then a table of repeats; then i32 [k][2], the hot
                        // row of the misses that this block copies
  int32_t rest = 0;     // u16 [n]: slots that neither level holds; shares the list's place
  int32_t bytes = 0;
  int32_t columns = 0;
  int32_t index_bits = 0;

  // Bytes are 0 where the shape, or the device, has no room for it.
  static SingleShared Make(int32_t n, int32_t k, int32_t table_columns, int32_t max_bytes) {
    SingleShared s;
    if (n > kMaxHotRows || n % 4 != 0 || k > kMaxTopK) return s;
    SharedCursor cursor;
    s.columns = table_columns < kMaxColumns ? table_columns : kMaxColumns;
    s.keys = cursor.Take(4 * int64_t{n});
    s.flags = cursor.Take(4 * int64_t{n});
    s.table = cursor.Take(4 * int64_t{s.columns});
    s.list = cursor.Take(std::max<int64_t>(2 * int64_t{n}, 8 * (int64_t{k} + 1)));
    s.rest = s.list;
    s.victims = cursor.Take(2 * int64_t{k});
    s.work = cursor.Take(4 * int64_t{k});
    s.second = cursor.Take(std::max(int64_t{2} << kSecondBits, 8 * int64_t{k}));
    s.first = cursor.used();
    for (s.index_bits = kMaxIndexBits; s.index_bits >= kMinIndexBits; --s.index_bits) {
      s.bytes = s.first + (2 << s.index_bits);
      if (s.bytes <= max_bytes) return s;
    }
    s.bytes = 0;
    return s;
  }
};

// For unions of several batch rows, and for shapes that SingleShared has no room for.
struct UnionShared {
  int32_t lru = 0;           // i16 [n]: the order as read
  int32_t stale = 0;         // i16 [n]: slot of each stale rank
  int32_t key = 0;           // i32 [k]: key of each entry, with kFinal where it has its output
  int32_t found = 0;         // u16 [k]: at the first entry of a key, its slot
  int32_t table = 0;         // u16 [table_mask + 1]: first entry of each key
  int32_t hit_bits = 0;      // u32 [n / 32]
  int32_t seen_bits = 0;     // u32 [n / 32]
  int32_t slot_counts = 0;   // i32 [warps of n]: stale slots of each 32
  int32_t entry_counts = 0;  // i32 [warps of k]: misses of each 32
  int32_t bytes = 0;
  uint32_t table_mask = 0;

  static UnionShared Make(int32_t n, int32_t k) {
    UnionShared s;
    SharedCursor cursor;
    uint32_t table = 64;
    while (table < 2u * static_cast<uint32_t>(k)) table *= 2;
    s.table_mask = table - 1;
    s.lru = cursor.Take(2 * int64_t{n} + 16);
    s.stale = cursor.Take(2 * int64_t{n});
    s.key = cursor.Take(4 * int64_t{k});
    s.found = cursor.Take(2 * int64_t{k});
    s.table = cursor.Take(2 * int64_t{table});
    s.hit_bits = cursor.Take((n + 31) / 32 * 4);
    s.seen_bits = cursor.Take((n + 31) / 32 * 4);
    s.slot_counts = cursor.Take((n + 31) / 32 * 4);
    s.entry_counts = cursor.Take((k + 31) / 32 * 4);
    s.bytes = cursor.used();
    return s;
  }
};

#ifdef __CUDACC__

inline constexpr uint16_t kEmpty = 0xffff;
inline constexpr uint16_t kNoSlot = 0xffff;
inline constexpr int32_t kFinal = INT32_MIN;  // sign bit of a key: the entry needs no slot any more
static_assert(kEmpty >= 8192, "no entry has the number of an empty place");
static_assert(kNoSlot >= 32768, "no slot has the number of none");

__device__ inline uint32_t Hash(int32_t key, uint32_t multiplier, int bits) {
  return (static_cast<uint32_t>(key) * multiplier) >> (32 - bits);
}
inline constexpr uint32_t kFibonacci = 2654435769u;

// Lowers *address to the value. Returns what was there.
__device__ inline uint16_t AtomicMin(uint16_t* address, uint16_t value) {
  uint16_t there = *const_cast<volatile uint16_t*>(address);
  while (value < there) {
    const uint16_t seen = atomicCAS(address, there, value);
    if (seen == there) break;
    there = seen;
  }
  return there;
}

// Open addressing on the numbers of entries: a place holds the first entry with its key. `key` is the keys of the
// entries, of which the sign bit does not count.
class EntryTable {
 public:
  __device__ EntryTable(uint16_t* table, int32_t* key, uint32_t mask) : table_(table), key_(key), mask_(mask) {}

  __device__ void Clear() {
    uint32_t* const words = reinterpret_cast<uint32_t*>(table_);
    for (uint32_t i = threadIdx.x; i < (mask_ + 1) / 2; i += kResolveThreads) words[i] = 0xffffffffu;
  }

  // key[i] must be set. Afterwards, and a barrier, First gives the lowest entry with the key.
  __device__ void Insert(int32_t i) {
    const int32_t key = key_[i];
    __threadfence_block();
    uint32_t h = Place(key);
    for (;;) {
      const uint16_t there = atomicCAS(table_ + h, kEmpty, static_cast<uint16_t>(i));
      if (there == kEmpty) return;
      if (KeyOf(there) == key) {
        AtomicMin(table_ + h, static_cast<uint16_t>(i));
        return;
      }
      h = (h + 1) & mask_;
    }
  }

  // The lowest entry with the key, or -1.
  __device__ int32_t First(int32_t key) const {
    uint32_t h = Place(key);
    for (;;) {
      const uint16_t there = table_[h];
      if (there == kEmpty) return -1;
      if (KeyOf(there) == key) return there;
      h = (h + 1) & mask_;
    }
  }

 private:
  // The upper bits are the mixed ones.
  __device__ uint32_t Place(int32_t key) const { return (static_cast<uint32_t>(key) * kFibonacci) >> 15 & mask_; }
  __device__ int32_t KeyOf(uint16_t entry) const { return *const_cast<volatile int32_t*>(key_ + entry) & ~kFinal; }

  uint16_t* const table_;
  int32_t* const key_;
  const uint32_t mask_;
};

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
