// Owners of CUDA handles: each frees what it holds when it goes, and reports what that call says.
//
// Thread safety: none of their own. All are move-only values.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/cuda/error.h"

namespace stoker::kernels::cuda {

// Destructors cannot return a status; they do not stay silent either. After a sticky error everything fails: said once
// each.
inline void ReportLoss(cudaError_t error, const char* what) {
  if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
    std::fprintf(stderr, "stoker: %s: %s\n", what, cudaGetErrorString(error));
  }
}

// Makes a device current for a scope, and the one that was afterwards.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&previous_);
    if (previous_ != device) cudaSetDevice(device);
  }
  ~CurrentDevice() { cudaSetDevice(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
};

// A handle of type T that Destroy gives back.
template <typename T, cudaError_t (*Destroy)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T handle) : handle_(handle) {}
  ~Handle() { Reset(); }
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      Reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }

  T get() const { return handle_; }
  // Somebody else gives it back.
  T Release() { return std::exchange(handle_, nullptr); }

 private:
  void Reset() {
    if (handle_ != nullptr) ReportLoss(Destroy(handle_), "a handle cannot be given back");
    handle_ = nullptr;
  }

  T handle_ = nullptr;
};

using StreamHandle = Handle<cudaStream_t, cudaStreamDestroy>;
using EventHandle = Handle<cudaEvent_t, cudaEventDestroy>;
using GraphHandle = Handle<cudaGraph_t, cudaGraphDestroy>;
using GraphExecHandle = Handle<cudaGraphExec_t, cudaGraphExecDestroy>;
using DeviceMemory = Handle<void*, cudaFree>;
using PinnedMemory = Handle<void*, cudaFreeHost>;

inline absl::StatusOr<StreamHandle> MakeStream() {
  cudaStream_t stream;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return ToStatus(error, "a stream cannot be made");
  return StreamHandle(stream);
}

inline absl::StatusOr<EventHandle> MakeEvent() {
  cudaEvent_t event;
  const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return ToStatus(error, "an event cannot be made");
  return EventHandle(event);
}

inline absl::StatusOr<DeviceMemory> MakeDeviceMemory(size_t bytes) {
  void* memory;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) return ToStatus(error, absl::StrCat(bytes, " bytes of device memory cannot be had"));
  return DeviceMemory(memory);
}

inline absl::StatusOr<PinnedMemory> MakePinnedMemory(size_t bytes) {
  void* memory;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) return ToStatus(error, absl::StrCat(bytes, " bytes of pinned memory cannot be had"));
  return PinnedMemory(memory);
}

// A file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  ~FileDescriptor() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  FileDescriptor(FileDescriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

}  // namespace stoker::kernels::cuda
