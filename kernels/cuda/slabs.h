// Memory that is kept and given out again, because to free it would wait: cudaFree and cudaFreeHost return when all
// work of the device is done, that of other sessions too.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_waits.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {

// One allocation of device memory.
struct DeviceSlab {
  DeviceMemory memory;
  size_t bytes = 0;
  std::string ipc_handle;  // of the whole allocation; empty where it cannot be exported
};

// A refusal for want of memory, with what is kept and could not be freed.
absl::Status RefusedBesideKept(const absl::Status& refused, size_t kept_bytes);

// Device memory in slabs, each an allocation of its own and a multiple of 2 MiB, so that a handle of one never shows a
// neighbour.
//
// Invariants:
//  1. At most max_kept_bytes are kept. Beyond that the oldest are freed, which waits for the device's running work.
//  2. Before a request fails for want of memory, all that is kept has been freed.
//  Neither holds while a stream may wait for a doorbell: then nothing is freed.
//  3. A list gives out either memory that is exported or memory that never was: who once had a handle of a slab may
//     still write to it.
class DeviceSlabs {
 public:
  // `waits`, of the device, outlives it.
  DeviceSlabs(int device, bool exported, size_t max_kept_bytes, DeviceWaits* waits)
      : device_(device), exported_(exported), max_kept_bytes_(max_kept_bytes), waits_(waits) {}
  ~DeviceSlabs();
  DeviceSlabs(const DeviceSlabs&) = delete;
  DeviceSlabs& operator=(const DeviceSlabs&) = delete;

  // A slab of at least `bytes`, at most an eighth more or so, with whatever was in it. RESOURCE_EXHAUSTED.
  absl::StatusOr<DeviceSlab> Take(size_t bytes);
  // No work may use the slab any more.
  void Give(DeviceSlab slab);
  // Frees all that is kept, which waits for the device's running work. False: nothing was, or a stream may wait.
  bool FreeKept();

  size_t kept_bytes();

  // The size of a slab for so many bytes: few sizes, so that a slab that was given back fits the next request.
  static size_t SlabBytes(size_t bytes);

 private:
  const int device_;
  const bool exported_;
  const size_t max_kept_bytes_;
  DeviceWaits* const waits_;
  std::mutex mutex_;
  std::deque<DeviceSlab> kept_;  // guarded by mutex_; the oldest first
  size_t kept_bytes_ = 0;        // guarded by mutex_
};

// Pinned memory in slabs, up to kSlabBytes of sizes that are powers of 2, above of exactly the size that is asked for
// (the daemon asks for one, once). All are kept: as many of a size as were once in use at a time.
class PinnedSlabs {
 public:
  // Of staging.
  static constexpr size_t kSlabBytes = size_t{1} << 20;

  // A slab of at least `bytes`, with whatever was in it. RESOURCE_EXHAUSTED.
  absl::StatusOr<PinnedMemory> Take(size_t bytes);
  // What Take gave for so many bytes. No work may use it any more.
  void Give(PinnedMemory memory, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<PinnedMemory>> kept_;  // by size; guarded by mutex_
};

}  // namespace stoker::kernels::cuda
