#include "kernels/cuda/pool_driver.h"

namespace stoker::kernels::cuda {
namespace {

// The interface of this version is asked for: with it came cuMemCreate on a host NUMA node.
constexpr unsigned kDriverVersion = 12020;

template <typename Function>
void Find(const char* name, std::function<Function>* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kDriverVersion, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess && address != nullptr) {
    *function = reinterpret_cast<Function*>(address);
  }
}

}  // namespace

std::shared_ptr<const PoolDriver> LoadPoolDriver() {
  auto driver = std::make_shared<PoolDriver>();
  Find("cuGetErrorName", &driver->get_error_name);
  Find("cuDeviceGetAttribute", &driver->device_get_attribute);
  Find("cuMemGetAllocationGranularity", &driver->get_allocation_granularity);
  Find("cuMemAddressReserve", &driver->address_reserve);
  Find("cuMemAddressFree", &driver->address_free);
  Find("cuMemCreate", &driver->create);
  Find("cuMemRelease", &driver->release);
  Find("cuMemMap", &driver->map);
  Find("cuMemUnmap", &driver->unmap);
  Find("cuMemSetAccess", &driver->set_access);
  Find("cuMemExportToShareableHandle", &driver->export_handle);
  Find("cuMemImportFromShareableHandle", &driver->import_handle);
  driver->set_device = [](int device) { return cudaSetDevice(device); };
  driver->host_register = [](void* data, size_t bytes, unsigned flags) { return cudaHostRegister(data, bytes, flags); };
  driver->host_unregister = [](void* data) { return cudaHostUnregister(data); };
  return driver;
}

}  // namespace stoker::kernels::cuda
