#include "kernels/cuda/pool_driver.h"

#include "kernels/cuda/driver_function.h"

namespace stoker::kernels::cuda {

std::shared_ptr<const PoolDriver> LoadPoolDriver() {
  auto driver = std::make_shared<PoolDriver>();
  FindDriverFunction("cuGetErrorName", &driver->get_error_name);
  FindDriverFunction("cuDeviceGetAttribute", &driver->device_get_attribute);
  FindDriverFunction("cuMemGetAllocationGranularity", &driver->get_allocation_granularity);
  FindDriverFunction("cuMemAddressReserve", &driver->address_reserve);
  FindDriverFunction("cuMemAddressFree", &driver->address_free);
  FindDriverFunction("cuMemCreate", &driver->create);
  FindDriverFunction("cuMemRelease", &driver->release);
  FindDriverFunction("cuMemMap", &driver->map);
  FindDriverFunction("cuMemUnmap", &driver->unmap);
  FindDriverFunction("cuMemSetAccess", &driver->set_access);
  FindDriverFunction("cuMemExportToShareableHandle", &driver->export_handle);
  FindDriverFunction("cuMemImportFromShareableHandle", &driver->import_handle);
  driver->set_device = [](int device) { return cudaSetDevice(device); };
  driver->host_register = [](void* data, size_t bytes, unsigned flags) { return cudaHostRegister(data, bytes, flags); };
  driver->host_unregister = [](void* data) { return cudaHostUnregister(data); };
  return driver;
}

}  // namespace stoker::kernels::cuda
