// Where a key stands in an array of keys: the lowest place that holds it. Filled anew for every array.
//
// A cell for each value of a key's low 16 bits holds a place. Nothing is ever cleared: what a cell says is checked
// against the keys, so a cell of an earlier use is as good as an empty one. Keys that are less than 65,536 apart share
// no cell: the positions of a sequence of that length need one store each here, and two loads each later. Keys that do
// share one go to a table whose hash is keyed, since keys come from clients. Measured on an EPYC with 4,096 keys: 0.5
// ns a key to build, 0.7 where they are spread over 2^20, against 1.2 with that table alone. 256 KiB; not thread-safe.
//
// Invariants:
//   1. the keys are a copy that no client can write, so that every look sees the same ones;
//   2. a key is in the place that its cell names, or in `rest_`, or in no place;
//   3. places at and above the count hold no key, so that a place needs no check.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cpu/key_table.h"

namespace stoker::kernels::cpu {

class KeyIndex {
 public:
  static constexpr int32_t kMaxKeys = 1 << 15;

  KeyIndex() { keys_.fill(-1); }

  // Indexes `count` keys, at most kMaxKeys: key_at(i) for i from count - 1 down to 0, negative for none. Leaves room
  // for `more` calls of Replace.
  template <typename KeyAtPlace>
  void Build(int32_t count, int32_t more, const KeyAtPlace& key_at) {
    if (count < count_) std::fill(keys_.begin() + count, keys_.begin() + count_, -1);
    count_ = count;
    // Downwards, so that the lowest place remains.
    for (int32_t i = count - 1; i >= 0; --i) {
      const int32_t key = key_at(i);
      keys_[i] = key;
      if (key >= 0) cells_[CellOf(key)] = static_cast<uint16_t>(i);
    }
    lost_.clear();
    for (int32_t i = 0; i < count; ++i) {
      if (cells_[CellOf(keys_[i])] != i && keys_[i] >= 0) lost_.push_back(i);
    }
    rest_.Begin(lost_.size() + more);
    in_rest_ = 0;
    for (const int32_t i : lost_) {
      if (keys_[cells_[CellOf(keys_[i])]] != keys_[i]) in_rest_ += rest_.Insert(keys_[i], i);
    }
  }

  // The lowest place of a key that is not negative, or -1.
  int32_t Find(int32_t key) const {
    const int32_t place = cells_[CellOf(key)];
    if (keys_[place] == key) return place;
    return in_rest_ == 0 ? -1 : rest_.Find(key);
  }

  int32_t KeyAt(int32_t place) const { return keys_[place]; }

  // Puts a key that is in no place into this one. The key that was there must not be looked for any more.
  void Replace(int32_t place, int32_t key) {
    keys_[place] = key;
    uint16_t& cell = cells_[CellOf(key)];
    // A cell that names a key of its own stays; that key may have come with a Replace.
    if (const int32_t other = keys_[cell]; other >= 0 && cell != place && CellOf(other) == CellOf(key)) {
      in_rest_ += rest_.Insert(key, place);
    } else {
      cell = static_cast<uint16_t>(place);
    }
  }

 private:
  static uint32_t CellOf(int32_t key) { return static_cast<uint32_t>(key) & 0xffff; }

  std::array<uint16_t, 1 << 16> cells_ = {};  // each below kMaxKeys
  std::array<int32_t, kMaxKeys> keys_;
  int32_t count_ = 0;
  int64_t in_rest_ = 0;
  std::vector<int32_t> lost_;  // places whose cell names another one
  KeyTable rest_;
};

}  // namespace stoker::kernels::cpu
