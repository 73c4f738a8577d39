// Top-k entries of one sequence, step after step, with a chosen share of misses: the easy, exact case. (The realistic
// model of client/replay gives the misses that a model gives; benchmarks of cost per miss need them to be known.)
//
// Each step replaces `misses` entries, at random places, by the positions that have not been used for the longest time.
// With hot_rows = 2 x top_k and at least 4 x top_k positions, each of those is a miss in the LRU order, and every other
// entry a hit.
//
// Thread safety: one thread. Equal seeds give equal entries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace stoker::bench {

class EntryStream {
 public:
  // Entries are in [0, positions).
  EntryStream(int64_t positions, int32_t top_k, int32_t misses, uint64_t seed) : misses_(misses), random_(seed) {
    std::vector<int32_t> all(static_cast<size_t>(positions));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    entries_.assign(all.begin(), all.begin() + top_k);
    places_.resize(entries_.size());
    std::iota(places_.begin(), places_.end(), 0);
    waiting_.assign(all.begin() + top_k, all.end());
  }

  // The entries of the next step. The first step's all miss.
  const std::vector<int32_t>& Next() {
    if (std::exchange(begun_, true)) {
      for (int32_t i = 0; i < misses_; ++i) {
        // A partial shuffle: the first `misses_` places are a random choice.
        const size_t last = places_.size() - 1;
        std::swap(places_[i], places_[std::uniform_int_distribution<size_t>(static_cast<size_t>(i), last)(random_)]);
        int32_t& entry = entries_[places_[i]];
        waiting_.push_back(std::exchange(entry, waiting_.front()));
        waiting_.pop_front();
      }
    }
    return entries_;
  }

 private:
  const int32_t misses_;
  std::mt19937_64 random_;
  bool begun_ = false;
  std::vector<int32_t> entries_;
  std::vector<int32_t> places_;
  std::deque<int32_t> waiting_;
};

}  // namespace stoker::bench
