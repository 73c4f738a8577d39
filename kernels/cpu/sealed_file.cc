#include "kernels/cpu/sealed_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace stoker::kernels::cpu {
namespace {

class MappedPart final : public Buffer {
 public:
  MappedPart(std::byte* mapping, size_t mapped_bytes, size_t skip, size_t bytes)
      : mapping_(mapping), mapped_bytes_(mapped_bytes), skip_(skip), bytes_(bytes) {}
  ~MappedPart() override { munmap(mapping_, mapped_bytes_); }
  MappedPart(const MappedPart&) = delete;
  MappedPart& operator=(const MappedPart&) = delete;

  std::byte* data() const override { return mapping_ + skip_; }
  size_t bytes() const override { return bytes_; }

 private:
  std::byte* const mapping_;
  const size_t mapped_bytes_;
  const size_t skip_;  // mappings begin at whole pages
  const size_t bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Buffer>> MapSealedFile(int descriptor, uint64_t offset_bytes, uint64_t size_bytes) {
  // First, because it asks the kernel alone: any other question may be put to a file system that the client serves, and
  // never be answered.
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("offered_descriptor: is no memory of memfd_create (F_GET_SEALS: ", std::strerror(errno), ")"));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError(
        "offered_descriptor: the memory can be shrunk, which would end the daemon when it reads what is gone; make it "
        "with "
        "memfd_create and MFD_ALLOW_SEALING, and add F_SEAL_SHRINK");
  }
  struct statfs system = {};
  struct stat file = {};
  if (fstatfs(descriptor, &system) != 0 || fstat(descriptor, &file) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("offered_descriptor: ", std::strerror(errno)));
  }
  if (system.f_type == HUGETLBFS_MAGIC) {
    return absl::FailedPreconditionError(
        "offered_descriptor: the memory has huge pages of its own (MFD_HUGETLB), and without a free one what was given "
        "back by "
        "its owner would end the daemon; use plain memory, with madvise(MADV_HUGEPAGE)");
  }
  const uint64_t file_bytes = static_cast<uint64_t>(file.st_size);
  if (size_bytes == 0 || offset_bytes > file_bytes || size_bytes > file_bytes - offset_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("size_bytes: ", size_bytes, " given with offset_bytes ",
                                                   offset_bytes, ", the memory has ", file_bytes, " bytes"));
  }
  const uint64_t skip = offset_bytes % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped_bytes = static_cast<size_t>(skip + size_bytes);
  void* const mapping = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                             static_cast<off_t>(offset_bytes - skip));
  if (mapping == MAP_FAILED) {
    const int error = errno;
    const std::string message = absl::StrCat("offered_descriptor: ", size_bytes,
                                             " bytes cannot be mapped for reading and writing: ", std::strerror(error));
    return error == ENOMEM ? absl::ResourceExhaustedError(message) : absl::FailedPreconditionError(message);
  }
  return std::make_unique<MappedPart>(static_cast<std::byte*>(mapping), mapped_bytes, static_cast<size_t>(skip),
                                      static_cast<size_t>(size_bytes));
}

}  // namespace stoker::kernels::cpu
