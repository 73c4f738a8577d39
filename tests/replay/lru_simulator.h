// A slow, obvious model of one hot buffer: which of a step's entries an LRU of hot_rows rows misses.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace stoker::replay {

class LruSimulator {
 public:
  LruSimulator(uint32_t hot_rows, uint32_t positions);

  // Takes one step's entries, distinct and at most hot_rows of them; returns the number of misses. Afterwards the order
  // is [stale][misses][hits], as kernels/README.md has it.
  uint32_t Step(absl::Span<const int32_t> entries);

 private:
  const uint32_t hot_rows_;
  std::vector<int32_t> order_;  // resident positions, least recent first
  std::vector<uint8_t> wanted_, resident_;
};

}  // namespace stoker::replay
