// Memory of other processes, opened by cudaIpcMemHandle_t: each handle once, however many tensors lie in it.
//
// cudaIpcOpenMemHandle of a handle that is open here already fails with some drivers, and gives the same address with
// others, which one cudaIpcCloseMemHandle then takes from all. So openings are counted here.
//
// Thread safety: any thread. Opening and closing wait for each other.
//
// Invariants:
//  1. A handle is open while a buffer of it lives, and only then; it is opened and closed once each time.
//  2. Nothing that was opened stays open when Open fails.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stoker::kernels::cuda {

// The CUDA functions that it takes, as a table: tests put others in their place.
struct IpcDriver {
  std::function<cudaError_t(int device)> set_device;
  std::function<cudaError_t(void** memory, cudaIpcMemHandle_t handle)> open;
  std::function<cudaError_t(void* memory)> close;
  // Bytes from `memory` to the end of the allocation that it is in. Empty where the driver cannot tell.
  std::function<cudaError_t(size_t* bytes, void* memory)> bytes_behind;
  // The ordinal of the device that it is on.
  std::function<cudaError_t(int* device, void* memory)> device_of;
};

// This machine's.
IpcDriver LoadIpcDriver();

class IpcMemory {
 public:
  // Memory for work on the device with the ordinal `device`, whose UUID is `uuid`.
  IpcMemory(int device, std::string uuid, IpcDriver driver);
  // All buffers are gone.
  ~IpcMemory();
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  // Backend::MapClientMemory. The handle must be of memory on the device. UNAVAILABLE: the device is lost.
  absl::StatusOr<std::unique_ptr<Buffer>> Open(const ClientMemory& memory);

  // Handles that are open now.
  size_t open_handles() const;

 private:
  class Part;
  struct Opened {
    void* memory = nullptr;
    uint64_t bytes = 0;
    int64_t users = 0;
  };
  using Handles = std::map<std::string, Opened>;

  // A handle's first use.
  absl::StatusOr<Opened> OpenHandle(std::string_view handle);
  void CloseHandle(void* memory);
  void Leave(Handles::iterator handle);

  const int device_;
  const std::string uuid_;
  const IpcDriver driver_;
  mutable std::mutex mutex_;
  Handles handles_;  // guarded by mutex_
};

}  // namespace stoker::kernels::cuda
