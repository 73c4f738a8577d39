// Waits of the library's threads on a condition variable, each with a deadline. Internal to the library.
//
// std::mutex rather than absl::Mutex: ThreadSanitizer sees into the one, but not into Debian's build of the other.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::client {

using Lock = std::unique_lock<std::mutex>;

// False at the deadline. Waits on the steady clock, which cannot be set back.
template <typename Condition>
bool WaitUntil(std::condition_variable& changed, Lock& lock, absl::Time deadline, Condition condition) {
  // Later than a day from now is "for ever" in steps, so that no clock arithmetic overflows.
  constexpr absl::Duration kLongest = absl::Hours(24);
  for (;;) {
    const absl::Duration left = deadline - absl::Now();
    if (changed.wait_for(lock, absl::ToChronoNanoseconds(std::clamp(left, absl::ZeroDuration(), kLongest)),
                         condition)) {
      return true;
    }
    if (left <= kLongest) return false;
  }
}

}  // namespace stoker::client
