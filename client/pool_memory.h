// The pool's memory for kernels of this process: host memory anywhere, and what a GPU reaches in builds with CUDA
// (pool_memory_cuda.cc, or pool_memory_none.cc). Internal to the library.
//
// Thread safety: any thread.
#pragma once

#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

// Maps the parts, which are files, side by side. The descriptors stay the caller's. INTERNAL: a part is larger than its
// file, or no whole number of its pages; RESOURCE_EXHAUSTED: no address space.
absl::StatusOr<std::unique_ptr<kernels::Buffer>> MapPoolFiles(const kernels::ExportedMemory& exported);

// What MapPoolFiles says of sizes.
absl::Status CheckPoolFiles(const kernels::ExportedMemory& exported);

// Maps the parts for the host and for the GPU with the UUID `device`. UNIMPLEMENTED: this build of the client has no
// CUDA; NOT_FOUND: this process does not see the GPU; FAILED_PRECONDITION: the driver cannot; INTERNAL: the memory
// cannot be mapped.
absl::StatusOr<std::unique_ptr<kernels::Buffer>> MapPoolForDevice(const kernels::ExportedMemory& exported,
                                                                  absl::string_view device);

// A stream of an engine's.
struct DeviceStream {
  std::unique_ptr<kernels::Stream> stream;  // as kernels::cuda::WrapStream has it
  absl::AnyInvocable<absl::Status()> wait;  // for all that was enqueued there
};

// The engine's stream on the GPU with that UUID, which must outlive what is returned. UNIMPLEMENTED and NOT_FOUND as
// above.
absl::StatusOr<DeviceStream> WrapDeviceStream(CUstream_st* stream, absl::string_view device);

}  // namespace stoker::client
