// The driver's functions are looked up at run time: the client library starts where there is no driver.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "client/tensor_memory.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"

namespace stoker::client {
namespace {

constexpr char kHowTo[] = "allocate it with cudaMalloc (PyTorch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)";

template <typename Function>
Function* FindDriverFunction(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
#else
  static_cast<void>(version);
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function)
                                                                       : nullptr;
}

// OK, or why memory has no handle.
absl::Status CheckExportable(CUdeviceptr address) {
  const auto get = FindDriverFunction<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute", 12000);
  if (get == nullptr) return absl::OkStatus();  // the driver's own error must do
  CUmemoryPool pool = nullptr;
  if (get(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) == CUDA_SUCCESS && pool != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("memory: is from a memory pool (cudaMallocAsync), which has no cudaIpcMemHandle_t; ", kHowTo));
  }
  int capable = 1;
  if (get(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address) == CUDA_SUCCESS && capable == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "memory: is mapped by cuMemCreate and cuMemMap (virtual memory management), which has no cudaIpcMemHandle_t; ",
        kHowTo));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DescribeDeviceMemory(const void* memory, uint64_t size_bytes, v1::RegisterTensorRequest* request) {
  cudaPointerAttributes attributes{};
  cudaError_t error = cudaPointerGetAttributes(&attributes, memory);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return kernels::cuda::ToStatus(error, "memory: cannot be looked at");
  }
  if (attributes.type != cudaMemoryTypeDevice) {
    return absl::InvalidArgumentError("memory: is not memory of a GPU");
  }
  const kernels::cuda::CurrentDevice current(attributes.device);
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  if (absl::Status status = CheckExportable(address); !status.ok()) return status;
  const auto range = FindDriverFunction<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange", 12000);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (range == nullptr || range(&base, &bytes, address) != CUDA_SUCCESS) {
    return absl::InternalError("memory: the driver does not tell in which allocation it is");
  }
  const uint64_t offset = address - base;
  if (size_bytes > bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat("size_bytes: ", size_bytes, " given, ", bytes - offset,
                                                   " are behind the address in its allocation of ", bytes));
  }
  cudaIpcMemHandle_t handle;
  error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base));
  if (error != cudaSuccess) {
    cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrCat("memory: has no cudaIpcMemHandle_t (", cudaGetErrorName(error),
                                                      ", ", cudaGetErrorString(error), "); ", kHowTo));
  }
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, attributes.device);
  if (error != cudaSuccess) return kernels::cuda::ToStatus(error, "memory: its GPU cannot be looked at");
  request->mutable_cuda_ipc()->set_handle(handle.reserved, sizeof handle.reserved);
  request->mutable_cuda_ipc()->set_device(kernels::cuda::UuidOf(properties));
  request->set_offset_bytes(offset);
  request->set_size_bytes(size_bytes);
  return absl::OkStatus();
}

}  // namespace stoker::client
