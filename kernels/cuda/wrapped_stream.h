// The kernels on a stream of somebody else's. No header of CUDA's is needed to include this one.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

// The runtime's cudaStream_t is a pointer to it.
struct CUstream_st;

namespace stoker::kernels::cuda {

// Operations on `stream`, which belongs to the GPU with the ordinal `device` and outlives what is returned. Its
// destructor neither waits for the stream nor destroys it, and makes no call of CUDA's that the stream's other users
// would notice.
//
// The operations wait for nothing and, but for Notify, Record and MakeProgram, allocate nothing: while the stream is
// captured into a graph they become its nodes. They take every address to be one that the device reaches: Copy from or
// to pageable memory makes the caller wait, or fails in a capture.
//
// Loads the kernels: not to be called while a stream of the process waits for another one. Errors as MakeCudaBackend.
absl::StatusOr<std::unique_ptr<Stream>> WrapStream(CUstream_st* stream, int device);

}  // namespace stoker::kernels::cuda
