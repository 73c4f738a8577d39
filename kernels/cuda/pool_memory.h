// Host memory of pools that GPUs read and write.
//
// Preferred: allocations of the driver on the host NUMA node nearest to the GPU, which another process maps by their
// descriptors within milliseconds a GiB, and which can be unmapped while a stream waits. Where the driver has none, or
// fails: a sealed file in memory, faulted in by several threads and registered; cudaHostUnregister then blocks until no
// stream waits.
//
// The driver's allocations are made in chunks that lie one behind the other in one address range, so that progress can
// be told and the work stopped: one descriptor each, at most kMaxParts.
//
// Thread safety: any thread. Devices are ordinals, at least one; the first is the nearest.
//
// Invariants:
//  1. Whatever fails, everything that was acquired before is given back before the call returns.
//  2. Memory that is handed out is zero, faulted in, and accessible to the CPU and to all devices.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/memory.h"
#include "kernels/cuda/pool_driver.h"

namespace stoker::kernels::cuda {

// How many descriptors one message may carry is 253, and one process may have 1,024 by default.
inline constexpr size_t kMaxParts = 64;

// How the work is cut up.
struct PoolPlan {
  size_t chunk_bytes = 0;  // of allocations or registrations
  int fault_threads = 1;
  int pin_threads = 1;
};

PoolPlan PlanNumaPool(size_t bytes);
PoolPlan PlanRegisteredPool(size_t bytes);

using PhaseProgress = std::function<bool(PoolPhase phase, size_t done_bytes)>;

// FAILED_PRECONDITION: the driver or a device cannot; the message says what is missing. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<Buffer>> AllocateNumaPool(std::shared_ptr<const PoolDriver> driver,
                                                         const std::vector<int>& devices, size_t bytes,
                                                         const PoolPlan& plan, const PhaseProgress& progress);

// Faults in and registers memory that nobody has touched. RESOURCE_EXHAUSTED names RLIMIT_MEMLOCK where that is too
// small.
absl::StatusOr<std::unique_ptr<Buffer>> RegisterPool(std::shared_ptr<const PoolDriver> driver,
                                                     const std::vector<int>& devices, std::unique_ptr<Buffer> memory,
                                                     const PoolPlan& plan, const PhaseProgress& progress);

// The best of these that this machine can give. `bank` has the last word on how much that is.
absl::StatusOr<std::unique_ptr<Buffer>> AllocatePinnedPool(const std::shared_ptr<const PoolDriver>& driver,
                                                           cpu::MemoryBank* bank, const std::vector<int>& devices,
                                                           size_t bytes, const PoolOptions& options);

// Maps what another process has exported. The descriptors stay the caller's. A file is registered, as a whole.
absl::StatusOr<std::unique_ptr<Buffer>> ImportPool(std::shared_ptr<const PoolDriver> driver,
                                                   const std::vector<int>& devices, const ExportedMemory& exported);

}  // namespace stoker::kernels::cuda
