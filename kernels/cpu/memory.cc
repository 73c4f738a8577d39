#include "kernels/cpu/memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/available_memory.h"

namespace stoker::kernels::cpu {
namespace {

// From this size on, huge pages are asked for: a gather of scattered rows otherwise misses the TLB at every row.
constexpr size_t kHugePageBytes = size_t{2} << 20;

class MappedBuffer : public Buffer {
 public:
  MappedBuffer(void* data, size_t bytes, size_t mapped_bytes, int descriptor,
               std::shared_ptr<std::atomic<uint64_t>> allocated_bytes)
      : data_(data),
        bytes_(bytes),
        mapped_bytes_(mapped_bytes),
        descriptor_(descriptor),
        allocated_bytes_(std::move(allocated_bytes)) {
    *allocated_bytes_ += mapped_bytes_;
  }
  ~MappedBuffer() override {
    munmap(data_, mapped_bytes_);
    if (descriptor_ >= 0) close(descriptor_);
    *allocated_bytes_ -= mapped_bytes_;
  }
  MappedBuffer(const MappedBuffer&) = delete;
  MappedBuffer& operator=(const MappedBuffer&) = delete;

  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  size_t bytes() const override { return bytes_; }
  int descriptor() const override { return descriptor_; }
  ExportedMemory exported() const override {
    if (descriptor_ < 0) return {};
    return {ExportedMemory::Kind::kFile, {{descriptor_, mapped_bytes_}}};
  }

 private:
  void* const data_;
  const size_t bytes_;
  const size_t mapped_bytes_;
  const int descriptor_;
  const std::shared_ptr<std::atomic<uint64_t>> allocated_bytes_;
};

// Closes a descriptor unless it was handed on.
class DescriptorGuard {
 public:
  explicit DescriptorGuard(int descriptor) : descriptor_(descriptor) {}
  ~DescriptorGuard() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  DescriptorGuard(const DescriptorGuard&) = delete;
  DescriptorGuard& operator=(const DescriptorGuard&) = delete;
  int get() const { return descriptor_; }
  void Reset(int descriptor) {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
  }
  int Release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

absl::Status Exhausted(const char* name, size_t bytes, absl::string_view call, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("memory for ", name, ": asked for ", bytes, " bytes; ", call, ": ", std::strerror(error)));
}

size_t RoundUp(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// A memfd that keeps its size.
absl::StatusOr<int> MakeSealedFile(const char* name, size_t bytes, unsigned flags) {
  DescriptorGuard file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (file.get() < 0) return Exhausted(name, bytes, "memfd_create", errno);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return Exhausted(name, bytes, "ftruncate", errno);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return Exhausted(name, bytes, "fcntl(F_ADD_SEALS)", errno);
  }
  return file.Release();
}

}  // namespace

absl::Status MemoryBank::Check(const char* name, size_t bytes) const {
  if (bytes == 0) return absl::InvalidArgumentError(absl::StrCat("memory for ", name, ": bytes is 0, at least 1"));
  const uint64_t allocated = *allocated_bytes_;
  return CheckAvailableMemory(name, bytes, allocated - std::min(allocated, ReadResidentBytes(root_)), root_);
}

absl::StatusOr<std::unique_ptr<Buffer>> MemoryBank::Allocate(const char* name, size_t bytes, Sharing sharing) {
  if (absl::Status status = Check(name, bytes); !status.ok()) return status;
  const size_t mapped_bytes = RoundUp(bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  const bool shared = sharing == Sharing::kShared;
  DescriptorGuard file(-1);
  if (shared) {
    const absl::StatusOr<int> made = MakeSealedFile(name, mapped_bytes, 0);
    if (!made.ok()) return made.status();
    file.Reset(*made);
  }
  const int flags = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* data = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (data == MAP_FAILED) return Exhausted(name, bytes, "mmap", errno);
  // Advice alone: without huge pages everything works, only slower.
  if (bytes >= kHugePageBytes) (void)madvise(data, mapped_bytes, MADV_HUGEPAGE);
  return std::make_unique<MappedBuffer>(data, bytes, mapped_bytes, file.Release(), allocated_bytes_);
}

absl::StatusOr<std::unique_ptr<Buffer>> MemoryBank::AllocateHugePages(const char* name, size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError(absl::StrCat("memory for ", name, ": bytes is 0, at least 1"));
  const uint64_t free = ReadFreeHugePageBytes(root_);
  if (bytes > free) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory for ", name, ": asked for ", bytes, " bytes of 2 MiB pages, available ", free));
  }
  const size_t mapped_bytes = RoundUp(bytes, kHugePageBytes);
  const absl::StatusOr<int> made = MakeSealedFile(name, mapped_bytes, MFD_HUGETLB | MFD_HUGE_2MB);
  if (!made.ok()) return made.status();
  DescriptorGuard file(*made);
  // Takes the pages out of the reserve, so that none is missing when it is touched.
  void* data = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return Exhausted(name, bytes, "mmap of 2 MiB pages", errno);
  // Not on the bank's account: MemAvailable and the resident memory leave these pages out as well.
  return std::make_unique<MappedBuffer>(data, bytes, mapped_bytes, file.Release(),
                                        std::make_shared<std::atomic<uint64_t>>(0));
}

}  // namespace stoker::kernels::cpu
