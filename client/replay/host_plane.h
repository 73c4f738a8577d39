// StepPlane of a session whose arena is in host memory: ServerPlane or DirectPlane of the client library.
//
// Thread safety: free function; any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/plane.h"
#include "client/replay/step_plane.h"
#include "client/session.h"

namespace stoker::replay {

// `plane`: kServer or kDirect. The session must outlive what is returned. Errors as ServerPlane::Arm and
// DirectPlane::Open.
absl::StatusOr<std::unique_ptr<StepPlane>> MakeHostPlane(client::Session& session, client::Plane plane, uint32_t top_k);

}  // namespace stoker::replay
