// Planes: ways in which a session's steps reach the daemon, and the choice among them. client/README.md says which is
// for whom.
//
// Thread safety: functions without state; any thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

enum class Plane : uint8_t {
  kAuto,    // the best that there is
  kRpc,     // a call for each step
  kServer,  // the daemon's kernels, started by doorbells: ServerPlane
  kDirect,  // the client's kernels, on the engine's stream
};

// "auto", "rpc", "server", "direct".
absl::string_view PlaneName(Plane plane);
// The value of a command line's flag. INVALID_ARGUMENT names flag, value and what there is.
absl::StatusOr<Plane> ParsePlane(absl::string_view flag, absl::string_view text);

// The plane that the session can have: the wanted one, or of kAuto the first of direct, server and RPC that the daemon
// offers; never kAuto. FAILED_PRECONDITION: the daemon does not offer it; the message has the daemon's reason.
absl::StatusOr<Plane> ChoosePlane(const v1::Attached& attached, Plane wanted);

}  // namespace stoker::client
