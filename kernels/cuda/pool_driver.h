// The CUDA functions that make memory of pools, and of arenas with a descriptor, as a table: the driver's are looked up
// when the process runs, so that a program starts where there is no driver, and tests put others in their place.
//
// Thread safety: the functions of the table may be called by any thread.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

namespace stoker::kernels::cuda {

// Members are empty where the driver lacks the function.
struct PoolDriver {
  std::function<decltype(cuGetErrorName)> get_error_name;
  std::function<decltype(cuDeviceGetAttribute)> device_get_attribute;
  std::function<decltype(cuMemGetAllocationGranularity)> get_allocation_granularity;
  std::function<decltype(cuMemAddressReserve)> address_reserve;
  std::function<decltype(cuMemAddressFree)> address_free;
  std::function<decltype(cuMemCreate)> create;
  std::function<decltype(cuMemRelease)> release;
  std::function<decltype(cuMemMap)> map;
  std::function<decltype(cuMemUnmap)> unmap;
  std::function<decltype(cuMemSetAccess)> set_access;
  std::function<decltype(cuMemExportToShareableHandle)> export_handle;
  std::function<decltype(cuMemImportFromShareableHandle)> import_handle;

  std::function<cudaError_t(int device)> set_device;
  std::function<cudaError_t(void* data, size_t bytes, unsigned flags)> host_register;
  std::function<cudaError_t(void* data)> host_unregister;
};

// This machine's. Initializes the driver.
std::shared_ptr<const PoolDriver> LoadPoolDriver();

}  // namespace stoker::kernels::cuda
