#include "client/tensor_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::client {

absl::StatusOr<FileDescriptor> MakeTensorMemory(uint64_t bytes) {
  if (bytes == 0 || bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, " given, limits 1 and ", std::numeric_limits<off_t>::max()));
  }
  FileDescriptor memory(memfd_create("stoker-tensor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) return absl::ErrnoToStatus(errno, "tensor memory: memfd_create");
  if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("tensor memory: ftruncate to ", bytes, " bytes"));
  }
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return absl::ErrnoToStatus(errno, "tensor memory: F_ADD_SEALS");
  }
  return memory;
}

}  // namespace stoker::client
