#include "kernels/available_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stoker::kernels {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

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

// Lowers *available to what the cgroup in `folder` allows.
void ApplyCgroup(const std::string& root, const std::string& folder, const CgroupFiles& files,
                 AvailableMemory* available) {
  const std::string limit_file = absl::StrCat(folder, "/", files.limit);
  const std::optional<uint64_t> limit = ReadNumber(root + limit_file);  // "max" is no number
  const std::optional<uint64_t> usage = ReadNumber(absl::StrCat(root, folder, "/", files.usage));
  if (!limit || !usage) return;
  const uint64_t cache = ReadField(absl::StrCat(root, folder, "/memory.stat"), files.cache).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  const uint64_t bytes = *limit - std::min(*limit, used);
  if (bytes < available->bytes) *available = {bytes, limit_file};
}

// The least that the cgroup at `path` below `mount` and those above it allow. In a container the path may be that of
// the host and lie outside the mount; then the mount itself, which ends every walk, is the container's own cgroup.
void WalkCgroups(const std::string& root, const std::string& mount, absl::string_view path, const CgroupFiles& files,
                 AvailableMemory* available) {
  while (true) {
    path = absl::StripSuffix(path, "/");
    ApplyCgroup(root, absl::StrCat(mount, path), files, available);
    if (path.empty()) return;
    path = path.substr(0, path.rfind('/'));
  }
}

}  // namespace

AvailableMemory ReadAvailableMemory(const std::string& root) {
  AvailableMemory available;
  if (const auto kib = ReadField(root + "/proc/meminfo", "MemAvailable:")) available = {*kib * 1024, "MemAvailable"};
  // Lines are "number:controllers:path"; version 2 has no controllers.
  for (const std::string& line : ReadLines(root + "/proc/self/cgroup")) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[1].empty()) {
      WalkCgroups(root, "/sys/fs/cgroup", parts[2], kV2, &available);
      continue;
    }
    for (const absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller == "memory") WalkCgroups(root, "/sys/fs/cgroup/memory", parts[2], kV1, &available);
    }
  }
  return available;
}

uint64_t ReadResidentBytes(const std::string& root) {
  const std::string path = root + "/proc/self/status";
  return (ReadField(path, "RssAnon:").value_or(0) + ReadField(path, "RssShmem:").value_or(0)) * 1024;
}

uint64_t ReadFreeHugePageBytes(const std::string& root) {
  const std::string folder = root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const uint64_t free = ReadNumber(folder + "free_hugepages").value_or(0);
  const uint64_t promised = ReadNumber(folder + "resv_hugepages").value_or(0);
  return (free - std::min(free, promised)) * kHugePageBytes;
}

absl::Status CheckAvailableMemory(absl::string_view name, uint64_t bytes, uint64_t untouched_bytes,
                                  const std::string& root) {
  const AvailableMemory available = ReadAvailableMemory(root);
  const uint64_t free = available.bytes - std::min(available.bytes, untouched_bytes);
  if (bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("memory for ", name, ": asked for ", bytes, " bytes, available ", free, ", limit ", available.limit,
                   " (", untouched_bytes, " bytes allocated earlier and not touched yet are counted as used)"));
}

}  // namespace stoker::kernels
