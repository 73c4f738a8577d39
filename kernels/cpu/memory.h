// Mapped host memory: all memory of the CPU backend, and what the CUDA backend pins where it has nothing better.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stoker::kernels::cpu {

// Hands out mapped memory and keeps account of it: what was allocated but not touched yet is not in the kernel's
// figures.
class MemoryBank {
 public:
  enum class Sharing { kPrivate, kShared };

  // `root` is prefixed to the paths of /proc and /sys that are read.
  explicit MemoryBank(std::string root = "") : root_(std::move(root)) {}

  // Zeroed memory at a page boundary. Shared memory is a memfd named `name`, sealed against shrinking and growing.
  // RESOURCE_EXHAUSTED names asked and available bytes, and the limit. INVALID_ARGUMENT: 0 bytes.
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(const char* name, size_t bytes, Sharing sharing);
  // Shared memory of 2 MiB pages that an administrator has reserved. RESOURCE_EXHAUSTED: there are too few.
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHugePages(const char* name, size_t bytes);

  // Whether so much memory is there beside what was handed out: the status of Allocate.
  absl::Status Check(const char* name, size_t bytes) const;

 private:
  const std::string root_;
  // Outlives the bank while buffers do.
  std::shared_ptr<std::atomic<uint64_t>> allocated_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace stoker::kernels::cpu
