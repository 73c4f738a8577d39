// Order words: words in memory that two processes share, by which work on a stream of one begins after work of the
// other's. Calls between the two have numbers, which rise. When the work that call n builds on is done, its stream sets
// the word to n; a stream of the other process waits until the word is n or more. Nothing is reset.
//
// Whoever waits can let its own stream go on, when the other process is gone or out of use: it sets the word to
// kReleasedOrder. What it then finds was perhaps never written, so that it raises a flag before it does so, and its
// stream looks at the flag when the wait is over.
//
// On a GPU waits and, where nothing is asked before, writes are stream memory operations: they take no multiprocessor
// and no time slice, but a waiting stream holds one of the process's connections to the GPU, as a waiting kernel does.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace stoker::kernels {

// The largest number that a call may have.
inline constexpr uint64_t kMaxOrder = uint64_t{1} << 62;
// Every number has come.
inline constexpr uint64_t kReleasedOrder = (uint64_t{1} << 63) - 1;

// As the GPU compares (CU_STREAM_WAIT_VALUE_GEQ): in a cycle, where what is less than 2^63 ahead has come.
constexpr bool HasCome(uint64_t word, uint64_t number) { return static_cast<int64_t>(word - number) >= 0; }
static_assert(HasCome(1, 1) && HasCome(2, 1) && !HasCome(0, 1) && !HasCome(0, kMaxOrder));
static_assert(HasCome(kReleasedOrder, 1) && HasCome(kReleasedOrder, kMaxOrder) && !HasCome(UINT64_MAX, 1));

// Waits until *word has come to `number`, and acquires what was written before it was set. Then *aborted becomes 1
// where *abort is not 0, and otherwise stays what it is. On the CPU *abort ends the wait, too.
struct AwaitOrderArgs {
  const uint64_t* word = nullptr;   // the other process's
  uint64_t number = 0;              // 1 to kMaxOrder
  const uint32_t* abort = nullptr;  // host memory
  uint32_t* aborted = nullptr;
};

// Raises *word to `number` when all work before it is visible to other processes; never lowers it. Nothing where
// *aborted is not 0.
struct SignalOrderArgs {
  uint64_t* word = nullptr;
  uint64_t number = 0;                // 1 to kMaxOrder
  const uint32_t* aborted = nullptr;  // optional
};

// INVALID_ARGUMENT names field, value and limit. Every backend calls them before it enqueues.
absl::Status Validate(const AwaitOrderArgs& args);
absl::Status Validate(const SignalOrderArgs& args);

}  // namespace stoker::kernels
