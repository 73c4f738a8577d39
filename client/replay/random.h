// Random numbers of the replay tool: small, seeded, the same on every machine.
//
// Thread safety: a generator belongs to one thread.
#pragma once

#include <cstdint>

namespace stoker::replay {

inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

// A bijection of 64-bit words in which every input bit reaches every output bit (the finalizer of SplitMix64).
constexpr uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

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
