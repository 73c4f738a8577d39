// Random numbers of the replay tool: small, seeded, the same on every machine.
//
// Thread safety: a generator belongs to one thread.
#pragma once

#include <cstdint>

#include "client/replay/row_words.h"

namespace stoker::replay {

// Generates SplitMix64: one addition and one Mix64 a word, any seed is good.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix64(seed)) {}

  uint64_t Next() { return Mix64(state_ += kGoldenGamma); }

  // Uniform in [0, bound); bound is not 0. The bias is below bound / 2^32.
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(((Next() >> 32) * bound) >> 32); }

  // Uniform in [0, 1), 24 bits.
  float Unit() { return static_cast<float>(Next() >> 40) * 0x1p-24f; }

 private:
  uint64_t state_;
};

}  // namespace stoker::replay
