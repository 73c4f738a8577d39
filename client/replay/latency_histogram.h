// Counts durations in buckets whose width grows with the value: 32 of them for each power of two, so that a percentile
// is at most 3 % too high.
//
// Trivially copyable and all zero when new, so that it may lie in memory that processes share. Thread safety: one
// writer; read it when the writer is done.
#pragma once

#include <bit>
#include <cstdint>

namespace stoker::replay {

class LatencyHistogram {
 public:
  void Add(uint64_t ns) {
    ++buckets_[Bucket(ns)];
    ++count_;
  }
  void Merge(const LatencyHistogram& other) {
    for (int i = 0; i < kBuckets; ++i) buckets_[i] += other.buckets_[i];
    count_ += other.count_;
  }

  uint64_t count() const { return count_; }
  // Upper end of the bucket in which the smallest value lies that is not below `fraction` of all values; 0 when empty.
  uint64_t PercentileNs(double fraction) const {
    if (count_ == 0) return 0;
    uint64_t rank = static_cast<uint64_t>(fraction * static_cast<double>(count_));
    if (rank >= count_) rank = count_ - 1;
    int bucket = 0;
    for (uint64_t below = buckets_[0]; below <= rank; below += buckets_[bucket]) ++bucket;
    return UpperEnd(bucket);
  }

 private:
  static constexpr int kLinearBits = 5;
  static constexpr int kLinear = 1 << kLinearBits;
  static constexpr int kMaxBits = 45;  // 9.7 hours in nanoseconds; longer ones are counted there
  static constexpr int kBuckets = (kMaxBits - kLinearBits + 1) * kLinear;

  // Values below 32 have a bucket of their own; then bucket = (bits - 5) x 32 + the five bits below the highest one.
  static int Bucket(uint64_t ns) {
    if (ns < kLinear) return static_cast<int>(ns);
    if (ns >> kMaxBits != 0) return kBuckets - 1;
    const int shift = std::bit_width(ns) - kLinearBits - 1;
    return (shift + 1) * kLinear + static_cast<int>((ns >> shift) - kLinear);
  }
  static uint64_t UpperEnd(int bucket) {
    if (bucket < kLinear) return static_cast<uint64_t>(bucket);
    const int shift = bucket / kLinear - 1;
    return ((static_cast<uint64_t>(bucket % kLinear + kLinear) + 1) << shift) - 1;
  }

  uint64_t buckets_[kBuckets] = {};
  uint64_t count_ = 0;
};

}  // namespace stoker::replay
