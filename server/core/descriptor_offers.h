// Keeps descriptors that a session's engine has handed over, until a call names them.
//
// Thread safety: one thread at a time (the session's mutex).
//
// Invariants:
//  1. At most kMaxWaiting wait, each for at most kTimeToTake: one that is too old is refused, and closed at the next
//  call.
//  2. Each number is given once.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/core/file_descriptor.h"

namespace stoker::core {

class DescriptorOffers {
 public:
  static constexpr int kMaxWaiting = 16;
  static constexpr absl::Duration kTimeToTake = absl::Seconds(10);

  // The number by which Take finds it. RESOURCE_EXHAUSTED: kMaxWaiting wait.
  absl::StatusOr<uint64_t> Add(FileDescriptor descriptor, absl::Time now);
  // NOT_FOUND: never given, taken before, or too old.
  absl::StatusOr<FileDescriptor> Take(uint64_t number, absl::Time now);
  // Closes those that are too old.
  void Expire(absl::Time now);

 private:
  struct Offer {
    uint64_t number = 0;
    absl::Time added;
    FileDescriptor descriptor;
  };

  std::deque<Offer> offers_;  // the oldest first
  uint64_t last_number_ = 0;
};

}  // namespace stoker::core
