#include "kernels/cuda/wrapped_stream.h"

#include <utility>

#include "kernels/cuda/completions.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/device_health.h"
#include "kernels/cuda/prepare_device.h"
#include "kernels/cuda/slabs.h"

namespace stoker::kernels::cuda {
namespace {

// What the streams of a backend have in common, of a stream without a backend.
struct Alone {
  Alone(int device, std::string uuid) : health(std::move(uuid)), completions(device, &health) {}
  DeviceHealth health;
  PinnedSlabs slabs;
  Completions completions;  // last: what it calls uses the rest
};

}  // namespace

absl::StatusOr<std::unique_ptr<Stream>> WrapStream(CUstream_st* stream, int device) {
  absl::StatusOr<PreparedDevice> prepared = PrepareDevice(device);
  if (!prepared.ok()) return prepared.status();
  auto alone = std::make_shared<Alone>(device, prepared->uuid);
  const DeviceShared shared{&alone->health, &alone->slabs, &alone->completions};
  return CudaStream::Wrap(device, prepared->limits, shared, stream, std::move(alone));
}

}  // namespace stoker::kernels::cuda
