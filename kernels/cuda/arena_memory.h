// Device memory that another process maps by a descriptor: one allocation of the driver for each arena, which is never
// given to a second one. What an importer keeps mapped after the arena's end is that memory and no other.
//
// Thread safety: any thread. The device, an ordinal, must be current.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/pool_driver.h"

namespace stoker::kernels::cuda {

// Whether the device has such memory. FAILED_PRECONDITION: the message says what is missing.
absl::Status CheckArenaSupport(const PoolDriver& driver, int device);

// At least `bytes`, rounded up to the device's granularity and to 2 MiB: Buffer::exported is one part with the bytes
// that there are. Not zeroed. RESOURCE_EXHAUSTED: no memory; FAILED_PRECONDITION as of CheckArenaSupport.
absl::StatusOr<std::unique_ptr<Buffer>> AllocateArena(std::shared_ptr<const PoolDriver> driver, int device,
                                                      size_t bytes);

// Maps what another process has allocated, all `bytes` of it. The descriptor stays the caller's. INTERNAL: it is of no
// allocation, or of one of another size.
absl::StatusOr<std::unique_ptr<Buffer>> ImportArena(std::shared_ptr<const PoolDriver> driver, int device,
                                                    int descriptor, size_t bytes);

}  // namespace stoker::kernels::cuda
