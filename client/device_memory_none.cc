#include "client/tensor_memory.h"

namespace stoker::client {

absl::Status DescribeDeviceMemory(const void*, uint64_t, v1::RegisterTensorRequest*) {
  return absl::UnimplementedError(
      "memory of a GPU cannot be registered by this build of the client: it was built without CUDA");
}

}  // namespace stoker::client
