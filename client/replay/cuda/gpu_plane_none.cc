#include "client/replay/cuda/gpu_plane.h"

namespace stoker::replay {

absl::StatusOr<std::unique_ptr<StepPlane>> MakeGpuPlane(client::Session&, client::Plane, uint32_t) {
  return absl::UnimplementedError("the arena is memory of a GPU; this build of stoker-replay has no CUDA");
}

}  // namespace stoker::replay
