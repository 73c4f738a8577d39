// The events of a session on a GPU, between the engine's streams and the daemon's: session_events_cuda.cc, or
// session_events_none.cc in a build without CUDA. Internal to the library.
//
// Thread safety: any thread.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "stoker/v1/sessions.pb.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

class SessionEvents {
 public:
  // Makes the engine's event, on the GPU with the UUID `device`. FAILED_PRECONDITION: it is none. NOT_FOUND: this
  // process does not see the GPU. UNIMPLEMENTED: this build of the client has no CUDA.
  static absl::StatusOr<std::unique_ptr<SessionEvents>> Make(absl::string_view device);
  // The daemon's session is gone by then, or it still waits for work of the engine's: then the engine's event is not
  // destroyed, but left to the end of the process.
  virtual ~SessionEvents() = default;

  // For AttachRequest.
  virtual const v1::CudaIpcEvent& engine_event() const = 0;
  // Opens Attached.event_handle of an attachment. That of the one before stays open until the end: streams may still be
  // about to look at it.
  virtual absl::Status Open(absl::string_view event_handle) = 0;
  // Ends the waits for the daemon's event: it may have died before it was complete.
  virtual void Release() = 0;
  // Records the engine's event on the stream.
  virtual absl::Status Record(CUstream_st* stream) = 0;
  // Lets the stream wait for the daemon's event, as it is recorded now.
  virtual absl::Status Await(CUstream_st* stream) = 0;
};

}  // namespace stoker::client
