#include "client/replay/cuda/gpu_rows.h"

namespace stoker::replay {

bool HasGpuRows() { return false; }

absl::StatusOr<std::unique_ptr<RowDevice>> MakeGpuRows(const RowDeviceSpec&, std::shared_ptr<const client::Arena>) {
  return absl::UnimplementedError("the arena is memory of a GPU; this build of stoker-replay has no CUDA");
}

}  // namespace stoker::replay
