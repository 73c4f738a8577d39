#include "client/pool_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::client {
namespace {

constexpr uint64_t kMaxPageBytes = uint64_t{1} << 30;

// Owns a range of addresses with whatever is mapped there.
class MappedFiles final : public kernels::Buffer {
 public:
  MappedFiles(std::byte* range, size_t range_bytes, std::byte* data, size_t bytes)
      : range_(range), range_bytes_(range_bytes), data_(data), bytes_(bytes) {}
  ~MappedFiles() override { munmap(range_, range_bytes_); }
  std::byte* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  std::byte* const range_;
  const size_t range_bytes_;
  std::byte* const data_;
  const size_t bytes_;
};

absl::Status MapError(int error, uint64_t bytes) {
  const std::string what = absl::StrCat("the pool's memory, ", bytes, " bytes");
  return error == ENOMEM ? absl::ResourceExhaustedError(absl::StrCat(what, ": no address space"))
                         : absl::ErrnoToStatus(error, what);
}

}  // namespace

absl::Status CheckPoolFiles(const kernels::ExportedMemory& exported) {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t bytes = 0;
  for (size_t i = 0; i < exported.parts.size(); ++i) {
    const kernels::ExportedMemory::Part& part = exported.parts[i];
    struct stat file {};
    if (fstat(part.descriptor, &file) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("pool descriptor ", i));
    // A page behind the end of its file cannot be touched.
    if (file.st_size < 0 || static_cast<uint64_t>(file.st_size) < part.bytes) {
      return absl::InternalError(absl::StrCat("direct.part_bytes[", i, "] ", part.bytes, " is more than the ",
                                              file.st_size, " bytes behind the descriptor"));
    }
    if (part.bytes == 0 || part.bytes % page_bytes != 0) {
      return absl::InternalError(absl::StrCat("direct.part_bytes[", i, "] ", part.bytes,
                                              " is no whole number of pages of ", page_bytes, " bytes"));
    }
    if (__builtin_add_overflow(bytes, part.bytes, &bytes)) {
      return absl::InternalError(absl::StrCat("direct.part_bytes[", i, "] ", part.bytes, ": the sum overflows"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kernels::Buffer>> MapPoolFiles(const kernels::ExportedMemory& exported) {
  if (absl::Status status = CheckPoolFiles(exported); !status.ok()) return status;
  // Of huge pages, addresses must be multiples.
  auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t bytes = 0;
  for (const kernels::ExportedMemory::Part& part : exported.parts) {
    struct stat file {};
    if (fstat(part.descriptor, &file) != 0) return absl::ErrnoToStatus(errno, "pool descriptor");
    const auto block_bytes = static_cast<uint64_t>(std::max<int64_t>(file.st_blksize, 1));
    if (std::has_single_bit(block_bytes) && block_bytes <= kMaxPageBytes) {
      page_bytes = std::max(page_bytes, block_bytes);
    }
    bytes += part.bytes;
  }
  uint64_t range_bytes = 0;
  if (bytes == 0 || __builtin_add_overflow(bytes, page_bytes, &range_bytes) ||
      range_bytes > static_cast<uint64_t>(std::numeric_limits<ptrdiff_t>::max())) {
    return absl::InternalError(absl::StrCat("direct.part_bytes: ", bytes, " bytes in all are not 1 to 2^63 - 1"));
  }
  // One range for all parts first, so that nothing else comes between them.
  void* const range = mmap(nullptr, range_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return MapError(errno, bytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(range);
  const uint64_t skipped = (page_bytes - begin % page_bytes) % page_bytes;
  auto* const data = static_cast<std::byte*>(range) + skipped;
  auto files = std::make_unique<MappedFiles>(static_cast<std::byte*>(range), range_bytes, data, bytes);
  std::byte* at = data;
  for (const kernels::ExportedMemory::Part& part : exported.parts) {
    if (mmap(at, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, part.descriptor, 0) == MAP_FAILED) {
      return MapError(errno, part.bytes);
    }
    at += part.bytes;
  }
  return files;
}

}  // namespace stoker::client
