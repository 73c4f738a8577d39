#include "tests/replay/lru_simulator.h"

namespace stoker::replay {

LruSimulator::LruSimulator(uint32_t hot_rows, uint32_t positions)
    : hot_rows_(hot_rows), wanted_(positions, 0), resident_(positions, 0) {}

uint32_t LruSimulator::Step(absl::Span<const int32_t> entries) {
  std::vector<int32_t> misses;
  for (const int32_t position : entries) {
    wanted_[position] = 1;
    if (!resident_[position]) misses.push_back(position);
  }
  std::vector<int32_t> stale, hits;
  for (const int32_t position : order_) (wanted_[position] ? hits : stale).push_back(position);

  const size_t all = stale.size() + misses.size() + hits.size();
  const size_t evicted = all > hot_rows_ ? all - hot_rows_ : 0;
  for (size_t i = 0; i < evicted; ++i) resident_[stale[i]] = 0;
  order_.assign(stale.begin() + static_cast<std::ptrdiff_t>(evicted), stale.end());
  order_.insert(order_.end(), misses.begin(), misses.end());
  order_.insert(order_.end(), hits.begin(), hits.end());
  for (const int32_t position : misses) resident_[position] = 1;
  for (const int32_t position : entries) wanted_[position] = 0;
  return static_cast<uint32_t>(misses.size());
}

}  // namespace stoker::replay
