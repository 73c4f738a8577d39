#include "kernels/cpu/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace stoker::kernels::cpu {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
// From this size on, huge pages are asked for: a gather of scattered rows otherwise misses the TLB at every row.
constexpr size_t kHugePageBytes = size_t{2} << 20;

std::vector<std::string> ReadLines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(std::move(line));
  return lines;
}

// The number behind `key` in lines of the form "key number ...", between them blanks or a tab.
std::optional<uint64_t> ReadField(const std::string& path, absl::string_view key) {
  for (const std::string& line : ReadLines(path)) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    uint64_t value;
    if (words.size() >= 2 && words[0] == key && absl::SimpleAtoi(words[1], &value)) return value;
  }
  return std::nullopt;
}

std::optional<uint64_t> ReadNumber(const std::string& path) {
  const std::vector<std::string> lines = ReadLines(path);
  uint64_t value;
  if (lines.empty() || !absl::SimpleAtoi(lines[0], &value)) return std::nullopt;
  return value;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* cache;  // field of memory.stat: page cache that is dropped first
};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file"};

uint64_t CgroupAvailable(const std::string& folder, const CgroupFiles& files) {
  const std::optional<uint64_t> limit = ReadNumber(absl::StrCat(folder, "/", files.limit));
  const std::optional<uint64_t> usage = ReadNumber(absl::StrCat(folder, "/", files.usage));
  if (!limit || !usage) return kUnlimited;
  const uint64_t cache = ReadField(absl::StrCat(folder, "/memory.stat"), files.cache).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, used);
}

// The least that the cgroup at `path` below `mount` and those above it allow. In a container the path may be that of
// the host and lie outside the mount; then the mount itself, which ends every walk, is the container's own cgroup.
uint64_t WalkCgroups(const std::string& mount, absl::string_view path, const CgroupFiles& files) {
  uint64_t available = kUnlimited;
  while (true) {
    path = absl::StripSuffix(path, "/");
    available = std::min(available, CgroupAvailable(absl::StrCat(mount, path), files));
    if (path.empty()) return available;
    path = path.substr(0, path.rfind('/'));
  }
}

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
  int Release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

absl::Status Exhausted(const char* name, size_t bytes, uint64_t available, absl::string_view call, int error) {
  return absl::ResourceExhaustedError(absl::StrCat("memory for ", name, ": asked for ", bytes, " bytes, available ",
                                                   available, "; ", call, " failed with error ", error));
}

}  // namespace

uint64_t AvailableMemoryBytes(const std::string& root) {
  uint64_t available = kUnlimited;
  if (const auto kib = ReadField(root + "/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  // Lines are "number:controllers:path"; version 2 has no controllers.
  for (const std::string& line : ReadLines(root + "/proc/self/cgroup")) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[1].empty()) {
      available = std::min(available, WalkCgroups(root + "/sys/fs/cgroup", parts[2], kV2));
      continue;
    }
    for (const absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller == "memory") {
        available = std::min(available, WalkCgroups(root + "/sys/fs/cgroup/memory", parts[2], kV1));
      }
    }
  }
  return available;
}

uint64_t ResidentBytes(const std::string& root) {
  const std::string path = root + "/proc/self/status";
  return (ReadField(path, "RssAnon:").value_or(0) + ReadField(path, "RssShmem:").value_or(0)) * 1024;
}

absl::StatusOr<std::unique_ptr<Buffer>> MemoryBank::Allocate(const char* name, size_t bytes, Sharing sharing) {
  if (bytes == 0) return absl::InvalidArgumentError(absl::StrCat("memory for ", name, ": bytes is 0, at least 1"));
  const uint64_t available = AvailableMemoryBytes();
  const uint64_t allocated = *allocated_bytes_;
  const uint64_t untouched = allocated - std::min(allocated, ResidentBytes());
  const uint64_t free = available - std::min(available, untouched);
  if (bytes > free) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory for ", name, ": asked for ", bytes, " bytes, available ", free, " (", untouched,
                     " bytes allocated earlier and not touched yet are counted as used)"));
  }
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped_bytes = (bytes + page_bytes - 1) / page_bytes * page_bytes;

  const bool shared = sharing == Sharing::kShared;
  DescriptorGuard file(shared ? memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING) : -1);
  if (shared) {
    if (file.get() < 0) return Exhausted(name, bytes, free, "memfd_create", errno);
    if (ftruncate(file.get(), static_cast<off_t>(mapped_bytes)) != 0) {
      return Exhausted(name, bytes, free, "ftruncate", errno);
    }
    if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      return Exhausted(name, bytes, free, "fcntl(F_ADD_SEALS)", errno);
    }
  }
  const int flags = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* data = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (data == MAP_FAILED) return Exhausted(name, bytes, free, "mmap", errno);
  // Advice alone: without huge pages everything works, only slower.
  if (bytes >= kHugePageBytes) (void)madvise(data, mapped_bytes, MADV_HUGEPAGE);
  return std::make_unique<MappedBuffer>(data, bytes, mapped_bytes, file.Release(), allocated_bytes_);
}

}  // namespace stoker::kernels::cpu
