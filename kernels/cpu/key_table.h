// A hash table key -> slot that is filled anew for every use.
//
// Open addressing, at most half full. Entries of earlier uses are told apart by a generation, so that a use costs no
// clearing. Keys come from clients, so the hash is keyed with a number that they do not know: a crafted set of keys
// cannot make long probe sequences. Not thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace stoker::kernels::cpu {

class KeyTable {
 public:
  KeyTable() {
    std::random_device random;
    multiplier_ = (uint64_t{random()} << 32 | random()) | 1;
    mask_ = uint64_t{random()} << 32 | random();
  }

  // Empties the table and makes room for `keys` keys.
  void Begin(size_t keys) {
    const size_t capacity = std::bit_ceil(keys * 2 + 2);
    if (capacity > cells_.size()) {
      cells_.assign(capacity, Cell{});
      generation_ = 0;
    }
    if (++generation_ == 0) {
      cells_.assign(cells_.size(), Cell{});
      generation_ = 1;
    }
    // Uses the front of a larger table: small shapes stay in the first-level cache after a large one.
    index_mask_ = capacity - 1;
  }

  // Slot of the key, or -1.
  int32_t Find(int32_t key) const {
    for (size_t i = Hash(key) & index_mask_;; i = (i + 1) & index_mask_) {
      const Cell& cell = cells_[i];
      if (cell.generation != generation_) return -1;
      if (cell.key == key) return cell.slot;
    }
  }

  // Inserts the key unless it is present. Returns whether it was inserted.
  bool Insert(int32_t key, int32_t slot) {
    for (size_t i = Hash(key) & index_mask_;; i = (i + 1) & index_mask_) {
      Cell& cell = cells_[i];
      if (cell.generation != generation_) {
        cell = Cell{key, static_cast<int16_t>(slot), generation_};
        return true;
      }
      if (cell.key == key) return false;
    }
  }

  size_t bytes() const { return cells_.capacity() * sizeof(Cell); }

 private:
  struct Cell {
    int32_t key = 0;
    int16_t slot = 0;
    uint16_t generation = 0;
  };

  // Folded 64 x 64 multiplication: the high half depends on every bit of the key.
  size_t Hash(int32_t key) const {
    const unsigned __int128 product = static_cast<unsigned __int128>(static_cast<uint32_t>(key) ^ mask_) * multiplier_;
    return static_cast<size_t>(static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product));
  }

  std::vector<Cell> cells_;
  size_t index_mask_ = 0;
  uint16_t generation_ = 0;
  uint64_t multiplier_;
  uint64_t mask_;
};

}  // namespace stoker::kernels::cpu
