#include "kernels/cuda/arena_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/driver_allocation.h"

namespace stoker::kernels::cuda {
namespace {

// As of slabs: what is exported never shows a neighbour, whatever the granularity.
constexpr size_t kGranule = size_t{2} << 20;
// More than any device has, and than a process can address.
constexpr size_t kMaxBytes = size_t{1} << 48;

absl::Status CheckBytes(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
  if (bytes <= kMaxBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("bytes: ", bytes, " given, limit ", kMaxBytes));
}

}  // namespace

absl::Status CheckArenaSupport(const PoolDriver& driver, int device) {
  if (absl::Status status = CheckFunctions(driver); !status.ok()) return status;
  return CheckSupport(driver, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                      "virtual memory management");
}

absl::StatusOr<std::unique_ptr<Buffer>> AllocateArena(std::shared_ptr<const PoolDriver> driver, int device,
                                                      size_t bytes) {
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  if (absl::Status status = CheckArenaSupport(*driver, device); !status.ok()) return status;
  const CUmemAllocationProp properties = Shareable(CU_MEM_LOCATION_TYPE_DEVICE, device);
  size_t granularity = 0;
  const CUresult result =
      driver->get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (result != CUDA_SUCCESS || granularity == 0) {
    return ToStatus(*driver, result == CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : result, "cuMemGetAllocationGranularity",
                    bytes);
  }
  const size_t mapped_bytes = RoundUp(RoundUp(bytes, kGranule), granularity);
  auto buffer = std::make_unique<AllocationBuffer>(std::move(driver), bytes, mapped_bytes, mapped_bytes);
  // In this order, so that more than there is fails for want of memory, and not of addresses.
  if (absl::Status status = buffer->Create(0, mapped_bytes, properties); !status.ok()) return status;
  if (absl::Status status = buffer->Reserve(); !status.ok()) return status;
  absl::Status status = buffer->Map(0, mapped_bytes, {ReadWrite(CU_MEM_LOCATION_TYPE_DEVICE, device)});
  if (!status.ok()) return status;
  return buffer;
}

absl::StatusOr<std::unique_ptr<Buffer>> ImportArena(std::shared_ptr<const PoolDriver> driver, int device,
                                                    int descriptor, size_t bytes) {
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  if (absl::Status status = CheckArenaSupport(*driver, device); !status.ok()) return status;
  auto buffer = std::make_unique<AllocationBuffer>(std::move(driver), bytes, bytes, bytes);
  if (absl::Status status = buffer->Reserve(); !status.ok()) return status;
  if (absl::Status status = buffer->Import(0, descriptor, bytes); !status.ok()) return status;
  absl::Status status = buffer->Map(0, bytes, {ReadWrite(CU_MEM_LOCATION_TYPE_DEVICE, device)});
  if (!status.ok()) return status;
  return buffer;
}

}  // namespace stoker::kernels::cuda
