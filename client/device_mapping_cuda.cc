#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/device_mapping.h"
#include "kernels/cuda/arena_memory.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/pool_driver.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::ToStatus;

using IpcMemory = kernels::cuda::Handle<void*, cudaIpcCloseMemHandle>;

// Memory behind a handle.
class IpcBuffer final : public kernels::Buffer {
 public:
  IpcBuffer(IpcMemory memory, size_t bytes) : memory_(std::move(memory)), bytes_(bytes) {}
  std::byte* data() const override { return static_cast<std::byte*>(memory_.get()); }
  size_t bytes() const override { return bytes_; }

 private:
  IpcMemory memory_;
  const size_t bytes_;
};

class CudaMapping final : public DeviceMapping {
 public:
  // The device is current.
  static absl::StatusOr<std::unique_ptr<DeviceMapping>> Make(int ordinal, std::unique_ptr<kernels::Buffer> memory) {
    absl::StatusOr<kernels::cuda::StreamHandle> stream = kernels::cuda::MakeStream();
    if (!stream.ok()) return stream.status();
    return std::unique_ptr<DeviceMapping>(new CudaMapping(ordinal, std::move(memory), *std::move(stream)));
  }
  ~CudaMapping() override {
    const CurrentDevice current(ordinal_);
    stream_ = {};
    memory_.reset();
  }
  std::byte* data() const override { return memory_->data(); }
  absl::Status Copy(void* to, const void* from, size_t bytes) const override {
    const CurrentDevice current(ordinal_);
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get());
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_.get());
    return ToStatus(error, "arena: a copy failed");
  }

 private:
  CudaMapping(int ordinal, std::unique_ptr<kernels::Buffer> memory, kernels::cuda::StreamHandle stream)
      : ordinal_(ordinal), memory_(std::move(memory)), stream_(std::move(stream)) {}

  const int ordinal_;
  std::unique_ptr<kernels::Buffer> memory_;
  kernels::cuda::StreamHandle stream_;
};

// Bytes of the allocation that begins at `memory`. The runtime has no call for it, and the driver is not linked.
absl::StatusOr<size_t> AllocationBytes(void* memory) {
  using GetAddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    return absl::InternalError("arena: the driver has no cuMemGetAddressRange");
  }
  unsigned long long base = 0;
  size_t bytes = 0;
  const int code =
      reinterpret_cast<GetAddressRange>(function)(&base, &bytes, reinterpret_cast<unsigned long long>(memory));
  if (code != 0 || base != reinterpret_cast<unsigned long long>(memory)) {
    return absl::InternalError(absl::StrCat("arena: the driver does not know the mapping (CUresult ", code, ")"));
  }
  return bytes;
}

absl::StatusOr<int> OrdinalOf(absl::string_view device) {
  absl::StatusOr<int> ordinal = kernels::cuda::FindDevice(device);
  if (ordinal.ok()) return ordinal;
  return absl::NotFoundError(absl::StrCat("the arena is memory of ", device, "; ", ordinal.status().message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Open(absl::string_view ipc_handle,
                                                                   absl::string_view device, uint64_t bytes) {
  cudaIpcMemHandle_t handle;
  if (ipc_handle.size() != sizeof handle.reserved) return absl::InternalError("arena: not a handle");
  std::memcpy(handle.reserved, ipc_handle.data(), ipc_handle.size());
  const absl::StatusOr<int> ordinal = OrdinalOf(device);
  if (!ordinal.ok()) return ordinal.status();
  const CurrentDevice current(*ordinal);
  if (absl::Status status = kernels::cuda::MakeContext(device); !status.ok()) return status;
  void* opened = nullptr;
  if (const cudaError_t error = cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess);
      error != cudaSuccess) {
    cudaGetLastError();
    return ToStatus(error, absl::StrCat("arena: its handle on ", device, " cannot be opened"));
  }
  IpcMemory memory(opened);
  const absl::StatusOr<size_t> size = AllocationBytes(memory.get());
  if (!size.ok()) return size.status();
  if (*size < bytes) {
    return absl::InternalError(
        absl::StrCat("arena size_bytes ", bytes, " is more than the ", *size, " bytes behind the handle"));
  }
  return CudaMapping::Make(*ordinal, std::make_unique<IpcBuffer>(std::move(memory), *size));
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Import(int descriptor, absl::string_view device,
                                                                     uint64_t allocation_bytes) {
  const absl::StatusOr<int> ordinal = OrdinalOf(device);
  if (!ordinal.ok()) return ordinal.status();
  const CurrentDevice current(*ordinal);
  if (absl::Status status = kernels::cuda::MakeContext(device); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
      kernels::cuda::ImportArena(kernels::cuda::LoadPoolDriver(), *ordinal, descriptor, allocation_bytes);
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("arena: its allocation on ", device, ": ", memory.status().message()));
  }
  return CudaMapping::Make(*ordinal, *std::move(memory));
}

}  // namespace stoker::client
