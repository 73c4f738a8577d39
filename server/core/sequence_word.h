// What a session's plane (kernels/plane.h) needs to know of a sequence, in memory that the devices reach.
//
// The pool writes all of it, under its mutex; the plane of the session that writes the sequence raises stored_rows when
// it has appended rows. The pool takes that in when it next looks at the sequence.
#pragma once

#include <atomic>
#include <cstdint>

namespace stoker::core {

struct alignas(16) SequenceWord {
  std::atomic<int32_t> stored_rows{0};  // rows [0, stored_rows) can be read by every session
  std::atomic<int32_t> max_rows{0};
  std::atomic<uint64_t> writer{0};  // SessionId; 0: none
};
static_assert(sizeof(SequenceWord) == 16 && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace stoker::core
