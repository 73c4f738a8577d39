// Planes: ways in which a session's steps reach the daemon, and the choice among them. client/README.md says which is
// for whom.
//
// Thread safety: functions without state; any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "client/session.h"
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

// The plane that the session can have: the wanted one, or of kAuto the first of direct, server and RPC; never kAuto. A
// session is on the direct plane when it has attached there, and then on no other. FAILED_PRECONDITION: the daemon does
// not offer the plane, and the message has its reason; or the session has attached otherwise.
absl::StatusOr<Plane> ChoosePlane(const v1::Attached& attached, Plane wanted);

// Attaches for the wanted plane: with AttachRequest.plane = PLANE_DIRECT for kDirect, without it for kRpc and kServer.
// For kAuto on the direct plane where that can be had, and otherwise without: FAILED_PRECONDITION, PERMISSION_DENIED,
// UNIMPLEMENTED, NOT_FOUND or RESOURCE_EXHAUSTED, since the daemon does not offer it, or does not hand its memory to
// this process, or this build has no CUDA, or this process does not see the GPU, or the pool has as many sessions there
// as may be. Then ChoosePlane(session->info(), wanted) says what the session has. An engine that does not use
// DirectPlane must not ask for kAuto here. Errors as Client::Attach.
absl::StatusOr<std::unique_ptr<Session>> AttachOnPlane(const Client& client, v1::AttachRequest request, Plane wanted,
                                                       const SessionOptions& options = {});

}  // namespace stoker::client
