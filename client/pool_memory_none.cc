#include "absl/strings/str_cat.h"
#include "client/pool_memory.h"

namespace stoker::client {
namespace {

absl::Status WithoutCuda(absl::string_view device) {
  return absl::UnimplementedError(absl::StrCat("the session is on ", device,
                                               ", whose direct plane this build of the client cannot use: it was built "
                                               "without CUDA"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Buffer>> MapPoolForDevice(const kernels::ExportedMemory&,
                                                                  absl::string_view device) {
  return WithoutCuda(device);
}

absl::StatusOr<DeviceStream> WrapDeviceStream(CUstream_st*, absl::string_view device) { return WithoutCuda(device); }

}  // namespace stoker::client
