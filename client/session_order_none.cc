#include "client/session_order.h"

namespace stoker::client {

absl::StatusOr<std::shared_ptr<SessionOrder>> SessionOrder::MakeOnDevice(std::shared_ptr<const Arena>, const Words&) {
  return absl::UnimplementedError("ordered_calls: the arena is on a GPU, and this client was built without CUDA");
}

}  // namespace stoker::client
