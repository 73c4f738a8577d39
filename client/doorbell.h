// What kernels of an engine on the server plane need to know of it: the doorbells of an arena on a GPU, and words of
// the engine's own that go with them. Values for kernels; doorbell.cuh has what is done with them, DevicePlane
// (device_plane.h) makes them.
//
// Thread safety: plain values. The memory behind them is for the functions of doorbell.cuh.
#pragma once

#include <cstdint>

namespace stoker::client {

// How a wait for the daemon's answer ended.
enum class WaitOutcome : uint32_t {
  kDone = 0,
  kEnded = 1,     // the daemon has ended the plane: `ended` of the arena
  kAborted = 2,   // *abort was set: the session is over, or the plane was
  kTimedOut = 3,  // not within limit_ns
  kBadStep = 4,   // `done` had a number that cannot be: the daemon does not keep to the protocol
};

// Words of the engine's, in device memory. Raised and written by kernels alone, in the order of the engine's stream.
struct DoorbellState {
  uint64_t step = 0;     // the step that runs, or ran last
  uint32_t outcome = 0;  // WaitOutcome; not kDone: nothing is rung or waited for any more
  int32_t rows = 0;      // of the step's batch
  uint32_t arrived = 0;  // blocks of a kernel that rings when the last of them has come; 0 between kernels
  uint32_t reserved = 0;
};

// What kernels leave in pinned host memory. `outcome` is written last, with release order.
struct DoorbellReport {
  uint64_t finished = 0;  // the last step whose commits were answered
  uint64_t step = 0;      // in which a wait failed, where outcome is not kDone
  uint32_t doorbell = 0;  //   the one it waited for
  int32_t ended = 0;      //   v1::PlaneEnd
  uint32_t outcome = 0;   // WaitOutcome
  uint32_t reserved = 0;
};

// The doorbells: number g is of group g, the last one of the commits.
struct DoorbellView {
  char* request = nullptr;  // u64 each, request_stride bytes apart
  const char* done = nullptr;
  uint64_t request_stride = 0;
  uint64_t done_stride = 0;
  const int32_t* ended = nullptr;
  const uint32_t* abort = nullptr;  // host memory
  uint64_t limit_ns = 0;            // of each wait; 0: none
  DoorbellState* state = nullptr;
  DoorbellReport* report = nullptr;  // host memory
};

}  // namespace stoker::client
