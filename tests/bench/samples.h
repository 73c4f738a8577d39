// Durations of one kind of call, and calls that take turns.
//
// Thread safety: one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace stoker::bench {

class Stopwatch {
 public:
  double us() const {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class Samples {
 public:
  void Add(double us) { us_.push_back(us); }
  size_t count() const { return us_.size(); }
  const std::vector<double>& values() const { return us_; }
  // Nearest rank; 0 when empty.
  double Percentile(double fraction) const {
    if (us_.empty()) return 0;
    std::vector<double> sorted = us_;
    const size_t rank = std::min(sorted.size() - 1, static_cast<size_t>(fraction * static_cast<double>(sorted.size())));
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(rank), sorted.end());
    return sorted[rank];
  }
  double p50() const { return Percentile(0.50); }
  double p99() const { return Percentile(0.99); }

 private:
  std::vector<double> us_;
};

// What takes turns with others: `run` returns the microseconds of one call.
struct Contender {
  std::function<double()> run;
  Samples samples;
};

// Lets contenders take turns of `batch` calls, so that a noisy moment of the machine meets all of them. The first call
// of a turn finds the others' data in the caches and is not counted, where a turn has more than one.
inline void TakeTurns(int rounds, int batch, std::vector<Contender>& contenders) {
  for (int round = 0; round < rounds; ++round) {
    for (Contender& contender : contenders) {
      for (int i = 0; i < batch; ++i) {
        const double us = contender.run();
        if (i > 0 || batch == 1) contender.samples.Add(us);
      }
    }
  }
}

}  // namespace stoker::bench
