#include "kernels/cuda/driver_allocation.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::kernels::cuda {
namespace {

std::string NameOf(const PoolDriver& driver, CUresult result) {
  const char* name = nullptr;
  if (driver.get_error_name == nullptr || driver.get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return absl::StrCat("error ", static_cast<int>(result));
  }
  return name;
}

}  // namespace

CUmemAllocationProp Shareable(CUmemLocationType type, int id) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = type;
  properties.location.id = id;
  return properties;
}

CUmemAccessDesc ReadWrite(CUmemLocationType type, int id) {
  CUmemAccessDesc access = {};
  access.location.type = type;
  access.location.id = id;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

absl::Status ToStatus(const PoolDriver& driver, CUresult result, absl::string_view call, size_t bytes) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " of ", bytes, " bytes: ", NameOf(driver, result));
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(message) : absl::InternalError(message);
}

absl::Status CheckFunctions(const PoolDriver& driver) {
  const std::pair<const char*, bool> functions[] = {
      {"cuDeviceGetAttribute", driver.device_get_attribute != nullptr},
      {"cuMemGetAllocationGranularity", driver.get_allocation_granularity != nullptr},
      {"cuMemAddressReserve", driver.address_reserve != nullptr},
      {"cuMemAddressFree", driver.address_free != nullptr},
      {"cuMemCreate", driver.create != nullptr},
      {"cuMemRelease", driver.release != nullptr},
      {"cuMemMap", driver.map != nullptr},
      {"cuMemUnmap", driver.unmap != nullptr},
      {"cuMemSetAccess", driver.set_access != nullptr},
      {"cuMemExportToShareableHandle", driver.export_handle != nullptr},
      {"cuMemImportFromShareableHandle", driver.import_handle != nullptr}};
  for (const auto& [name, found] : functions) {
    if (!found) return absl::FailedPreconditionError(absl::StrCat("the driver has no ", name));
  }
  return absl::OkStatus();
}

absl::Status CheckSupport(const PoolDriver& driver, int device, CUdevice_attribute attribute, absl::string_view what) {
  const std::pair<absl::string_view, CUdevice_attribute> needed[] = {
      {what, attribute},
      {"descriptors of allocations", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}};
  for (const auto& [name, number] : needed) {
    int supported = 0;
    if (driver.device_get_attribute(&supported, number, device) != CUDA_SUCCESS || supported == 0) {
      return absl::FailedPreconditionError(absl::StrCat("cuda:", device, " has no ", name));
    }
  }
  return absl::OkStatus();
}

void Owned::Reset() {
  if (give_back_ == nullptr) return;
  const CUresult result = std::exchange(give_back_, nullptr)();
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) {
    std::fprintf(stderr, "stoker: %s cannot be given back: error %d\n", what_, static_cast<int>(result));
  }
}

AllocationBuffer::AllocationBuffer(std::shared_ptr<const PoolDriver> driver, size_t bytes, size_t chunk_bytes,
                                   size_t mapped_bytes)
    : driver_(std::move(driver)),
      bytes_(bytes),
      chunk_bytes_(chunk_bytes),
      mapped_bytes_(mapped_bytes),
      chunks_((mapped_bytes + chunk_bytes - 1) / chunk_bytes) {}

ExportedMemory AllocationBuffer::exported() const {
  if (chunks_.front().file.get() < 0) return {};  // imported
  ExportedMemory exported{ExportedMemory::Kind::kCudaAllocation, {}};
  for (size_t i = 0; i < chunks_.size(); ++i) {
    exported.parts.push_back({chunks_[i].file.get(), std::min(chunk_bytes_, mapped_bytes_ - i * chunk_bytes_)});
  }
  return exported;
}

absl::Status AllocationBuffer::Reserve() {
  const CUresult result = driver_->address_reserve(&address_, mapped_bytes_, 0, 0, 0);
  if (result != CUDA_SUCCESS) return ToStatus(*driver_, result, "cuMemAddressReserve", mapped_bytes_);
  range_ = Owned("an address range", [this] { return driver_->address_free(address_, mapped_bytes_); });
  return absl::OkStatus();
}

absl::Status AllocationBuffer::Create(size_t offset, size_t bytes, const CUmemAllocationProp& properties) {
  Chunk& chunk = chunks_[offset / chunk_bytes_];
  CUresult result = driver_->create(&chunk.handle, bytes, &properties, 0);
  if (result != CUDA_SUCCESS) return ToStatus(*driver_, result, "cuMemCreate", bytes);
  Own(&chunk);
  int descriptor = -1;
  result = driver_->export_handle(&descriptor, chunk.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != CUDA_SUCCESS) return ToStatus(*driver_, result, "cuMemExportToShareableHandle", bytes);
  chunk.file = FileDescriptor(descriptor);
  if (fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("fcntl of an allocation's descriptor: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status AllocationBuffer::Import(size_t offset, int descriptor, size_t bytes) {
  Chunk& chunk = chunks_[offset / chunk_bytes_];
  const CUresult result =
      driver_->import_handle(&chunk.handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) return ToStatus(*driver_, result, "cuMemImportFromShareableHandle", bytes);
  Own(&chunk);
  return absl::OkStatus();
}

absl::Status AllocationBuffer::Map(size_t offset, size_t bytes, const std::vector<CUmemAccessDesc>& access) {
  Chunk& chunk = chunks_[offset / chunk_bytes_];
  const CUdeviceptr address = address_ + offset;
  CUresult result = driver_->map(address, bytes, 0, chunk.handle, 0);
  if (result != CUDA_SUCCESS) return ToStatus(*driver_, result, "cuMemMap", bytes);
  chunk.mapping = Owned("a mapping", [this, address, bytes] { return driver_->unmap(address, bytes); });
  chunk.allocation.Reset();
  result = driver_->set_access(address, bytes, access.data(), access.size());
  return ToStatus(*driver_, result, "cuMemSetAccess", bytes);
}

void AllocationBuffer::Own(Chunk* chunk) {
  chunk->allocation =
      Owned("an allocation", [driver = driver_.get(), handle = chunk->handle] { return driver->release(handle); });
}

}  // namespace stoker::kernels::cuda
