// The order words of one attachment, on the engine's side: session_order.cc for arenas in host memory, and for those on
// a GPU session_order_cuda.cc, or session_order_none.cc in a build without CUDA. Internal to the library.
//
// Thread safety: any thread.
//
// Invariants:
//  1. Numbers begin with 1 and rise by one.
//  2. The engine word is set in the order of the numbers, whatever streams it is set by.
//  3. The arena stays mapped until what was enqueued here is done.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/arena.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

class SessionOrder {
 public:
  // FAILED_PRECONDITION: the arena has no order words, or its GPU no operations on them. UNIMPLEMENTED: it is on a GPU,
  // and this build of the client has no CUDA. The arena's status where it is not mapped.
  static absl::StatusOr<std::shared_ptr<SessionOrder>> Make(std::shared_ptr<const Arena> arena);
  // On a GPU: releases, and waits, for a bounded time, for what was enqueued.
  virtual ~SessionOrder() = default;

  // Takes the next number.
  virtual uint64_t Next() = 0;
  // Takes the next number, and sets the engine word to it behind what `stream` has been given so far. In host memory
  // the caller is the stream, and `stream` is null.
  virtual absl::StatusOr<uint64_t> Signal(CUstream_st* stream) = 0;
  // Lets the stream wait until the daemon word has come to the number. In host memory it is the caller that waits:
  // DEADLINE_EXCEEDED.
  virtual absl::Status Await(uint64_t number, CUstream_st* stream, absl::Time deadline) = 0;
  // Ends the waits for the daemon, those that come later as well. Who calls it has told before that the session is
  // over.
  virtual void Release() = 0;
  // Nothing that was enqueued here is under way.
  virtual bool Idle() = 0;

 protected:
  struct Words {
    uint64_t* engine = nullptr;
    uint64_t* daemon = nullptr;
  };
  static absl::StatusOr<Words> FindWords(const Arena& arena);
  // Make, for an arena on a GPU.
  static absl::StatusOr<std::shared_ptr<SessionOrder>> MakeOnDevice(std::shared_ptr<const Arena> arena,
                                                                    const Words& words);
};

}  // namespace stoker::client
