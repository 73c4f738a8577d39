#include "kernels/cuda/slabs.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::kernels::cuda {
namespace {

constexpr size_t kGranule = size_t{2} << 20;
// Of pinned memory: a page.
constexpr size_t kSmallestPinned = 4096;

size_t PinnedSize(size_t bytes) {
  return bytes > PinnedSlabs::kSlabBytes ? bytes : std::bit_ceil(std::max(bytes, kSmallestPinned));
}

}  // namespace

absl::Status RefusedBesideKept(const absl::Status& refused, size_t kept_bytes) {
  if (kept_bytes == 0 || !absl::IsResourceExhausted(refused)) return refused;
  return absl::Status(refused.code(),
                      absl::StrCat(refused.message(), "; ", kept_bytes,
                                   " bytes of sessions that have ended are kept, and cannot be freed while a session "
                                   "waits for its engine"));
}

size_t DeviceSlabs::SlabBytes(size_t bytes) {
  const size_t step = std::max(kGranule, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

DeviceSlabs::~DeviceSlabs() {
  const CurrentDevice current(device_);
  kept_.clear();
}

absl::StatusOr<DeviceSlab> DeviceSlabs::Take(size_t bytes) {
  const CurrentDevice current(device_);
  DeviceSlab slab;
  slab.bytes = SlabBytes(bytes);
  {
    const std::lock_guard lock(mutex_);
    const auto it =
        std::find_if(kept_.begin(), kept_.end(), [&](const DeviceSlab& kept) { return kept.bytes == slab.bytes; });
    if (it != kept_.end()) {
      slab = std::move(*it);
      kept_.erase(it);
      kept_bytes_ -= slab.bytes;
      return slab;
    }
  }
  absl::StatusOr<DeviceMemory> memory = MakeDeviceMemory(slab.bytes);
  if (absl::IsResourceExhausted(memory.status())) {
    cudaGetLastError();
    if (!FreeKept()) return RefusedBesideKept(memory.status(), kept_bytes());
    memory = MakeDeviceMemory(slab.bytes);
    if (!memory.ok()) cudaGetLastError();
  }
  if (!memory.ok()) return memory.status();
  slab.memory = *std::move(memory);
  if (exported_) {
    cudaIpcMemHandle_t handle;
    if (cudaIpcGetMemHandle(&handle, slab.memory.get()) == cudaSuccess) {
      slab.ipc_handle.assign(handle.reserved, sizeof handle.reserved);
    } else {
      // Not every system has them. Sessions then work without a mapping.
      cudaGetLastError();
    }
  }
  return slab;
}

bool DeviceSlabs::FreeKept() {
  const CurrentDevice current(device_);
  bool any = false;
  waits_->UnlessAny([&] {
    std::deque<DeviceSlab> freed;  // without the lock: to free one waits
    const std::lock_guard lock(mutex_);
    freed.swap(kept_);
    kept_bytes_ = 0;
    any = !freed.empty();
  });
  return any;
}

size_t DeviceSlabs::kept_bytes() {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

void DeviceSlabs::Give(DeviceSlab slab) {
  const CurrentDevice current(device_);
  {
    const std::lock_guard lock(mutex_);
    kept_bytes_ += slab.bytes;
    kept_.push_back(std::move(slab));
    if (kept_bytes_ <= max_kept_bytes_) return;
  }
  waits_->UnlessAny([&] {
    std::deque<DeviceSlab> freed;  // without the lock: to free one waits
    const std::lock_guard lock(mutex_);
    while (kept_bytes_ > max_kept_bytes_) {
      kept_bytes_ -= kept_.front().bytes;
      freed.push_back(std::move(kept_.front()));
      kept_.pop_front();
    }
  });
}

absl::StatusOr<PinnedMemory> PinnedSlabs::Take(size_t bytes) {
  const size_t size = PinnedSize(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (std::vector<PinnedMemory>& kept = kept_[size]; !kept.empty()) {
      PinnedMemory memory = std::move(kept.back());
      kept.pop_back();
      return memory;
    }
  }
  return MakePinnedMemory(size);
}

void PinnedSlabs::Give(PinnedMemory memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  kept_[PinnedSize(bytes)].push_back(std::move(memory));
}

}  // namespace stoker::kernels::cuda
