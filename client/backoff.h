// Backoff: how long to wait before each attempt.
//
// Thread safety: none. Invariant: every wait lies in [step / 2, step], where step begins at `initial` and doubles to
// `max`.
#pragma once

#include <algorithm>

#include "absl/random/random.h"
#include "absl/time/time.h"

namespace stoker::client {

class Backoff {
 public:
  Backoff(absl::Duration initial, absl::Duration max) : step_(std::min(initial, max)), max_(max) {}

  // The jitter keeps the ranks of one engine, which lose their sessions at one instant, from coming back at one.
  template <typename BitGen>
  absl::Duration Next(BitGen& random) {
    const absl::Duration wait = step_ * absl::Uniform(absl::IntervalClosed, random, 0.5, 1.0);
    step_ = std::min(step_ * 2, max_);
    return wait;
  }

 private:
  absl::Duration step_;
  const absl::Duration max_;
};

}  // namespace stoker::client
