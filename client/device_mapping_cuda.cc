#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/device_mapping.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::ToStatus;

using IpcMemory = kernels::cuda::Handle<void*, cudaIpcCloseMemHandle>;

class CudaMapping final : public DeviceMapping {
 public:
  CudaMapping(int ordinal, IpcMemory memory, kernels::cuda::StreamHandle stream)
      : ordinal_(ordinal), memory_(std::move(memory)), stream_(std::move(stream)) {}
  ~CudaMapping() override {
    const CurrentDevice current(ordinal_);
    stream_ = {};
    memory_ = {};
  }
  std::byte* data() const override { return static_cast<std::byte*>(memory_.get()); }
  absl::Status Copy(void* to, const void* from, size_t bytes) const override {
    const CurrentDevice current(ordinal_);
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get());
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_.get());
    return ToStatus(error, "arena: a copy failed");
  }

 private:
  const int ordinal_;
  IpcMemory memory_;
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

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Open(absl::string_view ipc_handle,
                                                                   absl::string_view device, uint64_t bytes) {
  cudaIpcMemHandle_t handle;
  if (ipc_handle.size() != sizeof handle.reserved) return absl::InternalError("arena: not a handle");
  std::memcpy(handle.reserved, ipc_handle.data(), ipc_handle.size());
  const absl::StatusOr<int> ordinal = kernels::cuda::FindDevice(device);
  if (!ordinal.ok()) {
    return absl::NotFoundError(absl::StrCat("the arena is memory of ", device, "; ", ordinal.status().message()));
  }
  const CurrentDevice current(*ordinal);
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
  absl::StatusOr<kernels::cuda::StreamHandle> stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  return std::make_unique<CudaMapping>(*ordinal, std::move(memory), *std::move(stream));
}

}  // namespace stoker::client
