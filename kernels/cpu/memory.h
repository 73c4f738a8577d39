// Memory of the CPU backend, and how much of it the machine can still give.
//
// Thread safety: all functions may be called by any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stoker::kernels::cpu {

// Bytes that this process could still touch: MemAvailable, or less where a memory cgroup (v1 or v2, or one above it)
// allows less. Page cache that a cgroup could drop counts as free. `root` is prefixed to every path that is read. The
// largest value where nothing tells.
uint64_t AvailableMemoryBytes(const std::string& root = "");

// Bytes that this process has touched: its resident anonymous and shared memory.
uint64_t ResidentBytes(const std::string& root = "");

// Hands out mapped memory and keeps account of it: what was allocated but not touched yet is not in the kernel's
// figures.
class MemoryBank {
 public:
  enum class Sharing { kPrivate, kShared };

  // Zeroed memory at a page boundary. Shared memory is a memfd named `name`, sealed against shrinking and growing.
  // RESOURCE_EXHAUSTED names asked and available bytes. INVALID_ARGUMENT: 0 bytes.
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(const char* name, size_t bytes, Sharing sharing);

 private:
  // Outlives the bank while buffers do.
  std::shared_ptr<std::atomic<uint64_t>> allocated_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace stoker::kernels::cpu
