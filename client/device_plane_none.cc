#include "client/device_plane.h"

namespace stoker::client {

void DevicePlane::SetUpProcess() {}

absl::StatusOr<std::unique_ptr<DevicePlane>> DevicePlane::Arm(Session&, uint32_t, const DevicePlaneOptions&) {
  return absl::UnimplementedError(
      "the server plane of a session on a GPU cannot be used by this build of the client: it was built without CUDA");
}

}  // namespace stoker::client
