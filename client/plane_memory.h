// What the kernels of a plane are to know of a session on the direct plane: the daemon's own description of the same
// memory (server/engine), from the reply of Attach. Internal to the library.
//
// Thread safety: a function without state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/arena.h"
#include "client/pool_mapping.h"
#include "kernels/plane_step.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// For steps of `top_k` entries a batch row. `arena` and `pool` are of this reply, and must outlive the steps.
//
// INVALID_ARGUMENT: top_k is not 1 to max_top_k. INTERNAL: the arena has not what the direct plane needs; the message
// names tensor, field, value and limit.
absl::StatusOr<kernels::PlaneMemory> MakePlaneMemory(const v1::AttachRequest& request, const v1::Attached& attached,
                                                     const Arena& arena, const PoolMapping& pool, uint32_t top_k);

}  // namespace stoker::client
