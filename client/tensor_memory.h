// Memory of the engine's own, for Session::RegisterTensor.
//
// Thread safety: functions without state.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/arena.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// Shared memory that the daemon takes: a memfd of `bytes` (at least 1) whose size is sealed. Map it with MAP_SHARED,
// and hand the descriptor to Session::RegisterTensor.
absl::StatusOr<FileDescriptor> MakeTensorMemory(uint64_t bytes);

// Fills in cuda_ipc, offset_bytes and size_bytes of a request for `size_bytes` from the device address `memory` on.
//
// UNIMPLEMENTED: this build of the client has no CUDA. INVALID_ARGUMENT: no device memory, or fewer bytes behind the
// address in its allocation. FAILED_PRECONDITION: memory that has no cudaIpcMemHandle_t, with the reason and what to
// do.
absl::Status DescribeDeviceMemory(const void* memory, uint64_t size_bytes, v1::RegisterTensorRequest* request);

}  // namespace stoker::client
