#include "absl/strings/str_cat.h"
#include "client/device_mapping.h"

namespace stoker::client {
namespace {

absl::Status WithoutCuda(absl::string_view device) {
  return absl::UnimplementedError(absl::StrCat(
      "the arena is memory of ", device, ", which this build of the client cannot map: it was built without CUDA"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Open(absl::string_view, absl::string_view device,
                                                                   uint64_t) {
  return WithoutCuda(device);
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Import(int, absl::string_view device, uint64_t) {
  return WithoutCuda(device);
}

}  // namespace stoker::client
