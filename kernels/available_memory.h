// How much memory this process can still take, and which limit says so.
//
// Thread safety: all functions may be called by any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace stoker::kernels {

struct AvailableMemory {
  uint64_t bytes = std::numeric_limits<uint64_t>::max();  // the largest value where nothing tells
  // What leaves so little: "MemAvailable", or a file such as "/sys/fs/cgroup/a/memory.max".
  std::string limit = "none";
};

// Bytes that this process could still touch: MemAvailable, or less where a memory cgroup (v1 or v2, or one above it)
// allows less. Page cache that a cgroup could drop counts as free. `root` is prefixed to every path that is read.
AvailableMemory ReadAvailableMemory(const std::string& root = "");

// Bytes that this process has touched: its resident anonymous and shared memory.
uint64_t ReadResidentBytes(const std::string& root = "");

// Bytes of 2 MiB pages that an administrator has reserved and nobody has taken. MemAvailable does not count them.
uint64_t ReadFreeHugePageBytes(const std::string& root = "");

// RESOURCE_EXHAUSTED, with asked, available and which limit, where `bytes` more are not there. `untouched_bytes` were
// handed out earlier and are not in the kernel's figures yet.
absl::Status CheckAvailableMemory(absl::string_view name, uint64_t bytes, uint64_t untouched_bytes,
                                  const std::string& root = "");

}  // namespace stoker::kernels
