// Shared memory of another process, mapped here.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stoker::kernels::cpu {

// Maps [offset_bytes, offset_bytes + size_bytes) of a memfd for reading and writing; data() is where offset_bytes are,
// bytes() is size_bytes. The descriptor may be closed afterwards.
//
// To touch memory behind the end of a file kills the process that does so, and a client may do as it likes with its
// file at any time: so the file must be sealed against shrinking. For the same reason it must not have huge pages, of
// which there may be none left for a hole that the client has punched.
//
// INVALID_ARGUMENT: no such memory (a file that cannot be sealed), or less of it, with field, value and limit.
// FAILED_PRECONDITION: memory that can be shrunk, or that cannot be written here. RESOURCE_EXHAUSTED: no address space.
absl::StatusOr<std::unique_ptr<Buffer>> MapSealedFile(int descriptor, uint64_t offset_bytes, uint64_t size_bytes);

}  // namespace stoker::kernels::cpu
