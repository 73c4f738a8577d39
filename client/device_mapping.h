// Memory on a GPU that another process owns, mapped into this one: device_mapping_cuda.cc, or device_mapping_none.cc in
// a build without CUDA.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stoker::client {

class DeviceMapping {
 public:
  // Opens `ipc_handle`, the 64 bytes of a cudaIpcMemHandle_t of another process, on the GPU with the UUID `device`.
  //
  // UNIMPLEMENTED: this build of the client has no CUDA. NOT_FOUND: this process does not see the GPU. INTERNAL: no
  // such handle, or less than `bytes` behind it. Otherwise the runtime's error.
  static absl::StatusOr<std::unique_ptr<DeviceMapping>> Open(absl::string_view ipc_handle, absl::string_view device,
                                                             uint64_t bytes);
  // Maps an allocation of another process, all `allocation_bytes` of it, by its descriptor, which stays the caller's.
  //
  // UNIMPLEMENTED and NOT_FOUND as above. FAILED_PRECONDITION: the driver cannot. INTERNAL: the descriptor is of no
  // allocation, or of one of another size. RESOURCE_EXHAUSTED: no address space.
  static absl::StatusOr<std::unique_ptr<DeviceMapping>> Import(int descriptor, absl::string_view device,
                                                               uint64_t allocation_bytes);
  // Closes the handle, or unmaps the allocation.
  virtual ~DeviceMapping() = default;

  // Device address.
  virtual std::byte* data() const = 0;
  // Copies between this memory and host memory, and waits for that.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) const = 0;
};

}  // namespace stoker::client
