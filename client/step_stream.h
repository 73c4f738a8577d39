// StepStream: steps of a session as messages of one call.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "stoker/v1/residency.pb.h"

namespace stoker::client {

class Connection;

// One RunSteps stream: steps go out and replies come back in order, with no per-call set-up.
//
// Thread safety: one thread may write while another one reads; not two of a kind, and Finish is of both. Belongs to the
// generation in which it was opened: after a re-attach open another one. May outlive its session; then it fails.
class StepStream {
 public:
  // Cancels what is unfinished.
  ~StepStream();
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Sends a step. `request` may be changed or freed when the call returns. A timeout (DEADLINE_EXCEEDED) ends the
  // stream. UNAVAILABLE: the stream has ended, and Read gives the replies that came before, then the reason.
  absl::Status Write(const v1::RunStepsRequest& request, absl::Duration timeout = absl::ZeroDuration());
  // Waits for the next reply. OUT_OF_RANGE: the stream ended with OK, there are no more. DEADLINE_EXCEEDED with the
  // stream still open: the reply can be read later. Any other error is the one with which the stream ended.
  absl::Status Read(v1::RunStepsResponse* response, absl::Duration timeout = absl::ZeroDuration());
  // Write, then Read.
  absl::Status Run(const v1::RunStepsRequest& request, v1::RunStepsResponse* response,
                   absl::Duration timeout = absl::ZeroDuration());
  // Says that no more steps follow, waits for the end and returns its status. Replies not yet read are dropped.
  absl::Status Finish(absl::Duration timeout = absl::ZeroDuration());

 private:
  friend class Session;
  class Reactor;
  static std::unique_ptr<StepStream> Open(std::shared_ptr<Connection> connection, const std::string& token,
                                          absl::Duration default_timeout);
  StepStream(std::shared_ptr<Reactor> reactor, absl::Duration default_timeout);
  absl::Time Deadline(absl::Duration timeout) const;

  const std::shared_ptr<Reactor> reactor_;
  const absl::Duration default_timeout_;
};

}  // namespace stoker::client
