// StepPlane of a session whose arena is on a GPU: DevicePlane (server) or DirectPlane of the client library with a
// stream, and two graphs of a step, made once for the largest batch: one of the batch and all index groups, one of the
// commits. Sequences join and leave between steps without another capture. gpu_plane.cc, or gpu_plane_none.cc in a
// build without CUDA.
//
// Between the two the host compares rows (row_device.h), which a decoder would do on the GPU: steps are not enqueued
// ahead.
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

// `plane`: kServer or kDirect. The session must outlive what is returned. UNIMPLEMENTED: this build has no CUDA; errors
// as DevicePlane::Arm and DirectPlane::Open.
absl::StatusOr<std::unique_ptr<StepPlane>> MakeGpuPlane(client::Session& session, client::Plane plane, uint32_t top_k);

}  // namespace stoker::replay
