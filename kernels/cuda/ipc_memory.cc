#include "kernels/cuda/ipc_memory.h"

#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {
namespace {

// What a handle that cannot be opened may be.
constexpr char kWhyNot[] =
    "The memory must be from cudaMalloc of another process on the same machine, and still be there: a handle of the "
    "daemon's own memory (an arena) cannot be opened, and memory from cuMemCreate or cudaMallocAsync has none "
    "(PyTorch: "
    "expandable_segments:False)";

}  // namespace

IpcDriver LoadIpcDriver() {
  IpcDriver driver;
  driver.set_device = [](int device) { return cudaSetDevice(device); };
  driver.open = [](void** memory, cudaIpcMemHandle_t handle) {
    return cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
  };
  driver.close = [](void* memory) { return cudaIpcCloseMemHandle(memory); };
  driver.device_of = [](int* device, void* memory) {
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, memory);
    if (error == cudaSuccess) *device = attributes.device;
    return error;
  };
  // The runtime has no call for it.
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuMemGetAddressRange", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess && function != nullptr) {
    driver.bytes_behind = [range = reinterpret_cast<decltype(&cuMemGetAddressRange)>(function)](size_t* bytes,
                                                                                                void* memory) {
      const auto address = reinterpret_cast<CUdeviceptr>(memory);
      CUdeviceptr base = 0;
      size_t size = 0;
      if (range(&base, &size, address) != CUDA_SUCCESS) return cudaErrorInvalidValue;
      *bytes = static_cast<size_t>(base + size - address);
      return cudaSuccess;
    };
  }
  return driver;
}

// A tensor's part of an open handle.
class IpcMemory::Part final : public Buffer {
 public:
  Part(IpcMemory* memory, Handles::iterator handle, std::byte* data, size_t bytes)
      : memory_(memory), handle_(handle), data_(data), bytes_(bytes) {}
  ~Part() override { memory_->Leave(handle_); }
  std::byte* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  IpcMemory* const memory_;
  const Handles::iterator handle_;
  std::byte* const data_;
  const size_t bytes_;
};

IpcMemory::IpcMemory(int device, std::string uuid, IpcDriver driver)
    : device_(device), uuid_(std::move(uuid)), driver_(std::move(driver)) {}

IpcMemory::~IpcMemory() = default;

size_t IpcMemory::open_handles() const {
  const std::lock_guard lock(mutex_);
  return handles_.size();
}

void IpcMemory::CloseHandle(void* memory) {
  driver_.set_device(device_);
  ReportLoss(driver_.close(memory), "a client's memory cannot be unmapped");
}

void IpcMemory::Leave(Handles::iterator handle) {
  const std::lock_guard lock(mutex_);
  if (--handle->second.users > 0) return;
  CloseHandle(handle->second.memory);
  handles_.erase(handle);
}

absl::StatusOr<IpcMemory::Opened> IpcMemory::OpenHandle(std::string_view bytes) {
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof handle.reserved) {
    return absl::InvalidArgumentError(absl::StrCat("cuda_ipc.handle: ", bytes.size(), " bytes given, limit ",
                                                   sizeof handle.reserved, ", those of a cudaIpcMemHandle_t"));
  }
  std::memcpy(handle.reserved, bytes.data(), bytes.size());
  Opened opened;
  cudaError_t error = driver_.set_device(device_);
  if (error == cudaSuccess) error = driver_.open(&opened.memory, handle);
  if (error != cudaSuccess) {
    cudaGetLastError();
    absl::Status status = ToStatus(error, "cuda_ipc.handle: cannot be opened");
    if (absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) return status;
    return absl::InvalidArgumentError(absl::StrCat(status.message(), ". ", kWhyNot));
  }
  int device = -1;
  error = driver_.device_of(&device, opened.memory);
  absl::Status status = ToStatus(error, "cuda_ipc.handle: the device of the memory cannot be found");
  if (status.ok() && device != device_) {
    status = absl::InvalidArgumentError(absl::StrCat("cuda_ipc.handle: is of memory of the GPU with ordinal ", device,
                                                     " here, the session is on ", uuid_));
  }
  if (status.ok() && driver_.bytes_behind == nullptr) {
    status = absl::UnimplementedError("cuda_ipc.handle: this driver does not tell how large its memory is");
  }
  size_t size = 0;
  if (status.ok()) {
    status =
        ToStatus(driver_.bytes_behind(&size, opened.memory), "cuda_ipc.handle: the size of the memory cannot be found");
  }
  if (!status.ok()) {
    cudaGetLastError();
    CloseHandle(opened.memory);
    return status;
  }
  opened.bytes = size;
  return opened;
}

absl::StatusOr<std::unique_ptr<Buffer>> IpcMemory::Open(const ClientMemory& memory) {
  if (memory.ipc_handle.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("offered_descriptor: given, the session is on ", uuid_, ", where memory is named by cuda_ipc"));
  }
  const std::lock_guard lock(mutex_);
  auto handle = handles_.find(std::string(memory.ipc_handle));
  if (handle == handles_.end()) {
    absl::StatusOr<Opened> opened = OpenHandle(memory.ipc_handle);
    if (!opened.ok()) return opened.status();
    handle = handles_.emplace(std::string(memory.ipc_handle), *opened).first;
  }
  const Opened& opened = handle->second;
  if (memory.size_bytes == 0 || memory.offset_bytes > opened.bytes ||
      memory.size_bytes > opened.bytes - memory.offset_bytes) {
    absl::Status status =
        absl::InvalidArgumentError(absl::StrCat("size_bytes: ", memory.size_bytes, " given with offset_bytes ",
                                                memory.offset_bytes, ", the memory has ", opened.bytes, " bytes"));
    if (opened.users == 0) {
      CloseHandle(opened.memory);
      handles_.erase(handle);
    }
    return status;
  }
  ++handle->second.users;
  return std::make_unique<Part>(this, handle, static_cast<std::byte*>(opened.memory) + memory.offset_bytes,
                                static_cast<size_t>(memory.size_bytes));
}

}  // namespace stoker::kernels::cuda
