#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu/memory.h"
#include "kernels/cuda/completions.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pool_memory.h"

namespace stoker::kernels::cuda {
namespace {

// Exported allocations are whole multiples of this, so that a handle never shows a neighbour.
constexpr size_t kArenaAlignment = size_t{2} << 20;
constexpr int kMinCapability = 8;

std::string UuidOf(const cudaDeviceProp& properties) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  std::string uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    absl::StrAppendFormat(&uuid, "%02x", bytes[i]);
  }
  return uuid;
}

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(int device, DeviceMemory memory, size_t bytes)
      : device_(device), memory_(std::move(memory)), bytes_(bytes) {}
  ~DeviceBuffer() override {
    const CurrentDevice current(device_);
    memory_ = DeviceMemory();
  }
  std::byte* data() const override { return static_cast<std::byte*>(memory_.get()); }
  size_t bytes() const override { return bytes_; }

 private:
  const int device_;
  DeviceMemory memory_;
  const size_t bytes_;
};

class PinnedBuffer final : public Buffer {
 public:
  PinnedBuffer(PinnedMemory memory, size_t bytes) : memory_(std::move(memory)), bytes_(bytes) {}
  std::byte* data() const override { return static_cast<std::byte*>(memory_.get()); }
  size_t bytes() const override { return bytes_; }

 private:
  PinnedMemory memory_;
  const size_t bytes_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, std::string uuid, const DeviceLimits& limits)
      : device_(device), uuid_(std::move(uuid)), limits_(limits), completions_(device) {}

  std::string_view device() const override { return uuid_; }
  bool reaches_pageable_memory() const override { return false; }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes, const PoolOptions& options) override {
    const CurrentDevice current(device_);
    std::vector<int> devices = {device_};
    for (const Backend* peer : options.peers) devices.push_back(static_cast<const CudaBackend*>(peer)->device_);
    return AllocatePinnedPool(pool_driver_, &bank_, devices, bytes, options);
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes) override {
    return Allocate((bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment);
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePrivate(size_t bytes) override { return Allocate(bytes); }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
    const CurrentDevice current(device_);
    absl::StatusOr<PinnedMemory> memory = MakePinnedMemory(bytes);
    if (!memory.ok()) return memory.status();
    std::memset(memory->get(), 0, bytes);
    return std::make_unique<PinnedBuffer>(*std::move(memory), bytes);
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    return CudaStream::Create(device_, limits_, &completions_);
  }

 private:
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) {
    if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
    const CurrentDevice current(device_);
    absl::StatusOr<DeviceMemory> memory = MakeDeviceMemory(bytes);
    if (!memory.ok()) return memory.status();
    // On a stream of its own: no other stream is waited for.
    absl::StatusOr<StreamHandle> stream = MakeStream();
    if (!stream.ok()) return stream.status();
    cudaError_t error = cudaMemsetAsync(memory->get(), 0, bytes, stream->get());
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream->get());
    if (error != cudaSuccess) return ToStatus(error, "device memory cannot be zeroed");
    return std::make_unique<DeviceBuffer>(device_, *std::move(memory), bytes);
  }

  const int device_;
  const std::string uuid_;
  const DeviceLimits limits_;
  const std::shared_ptr<const PoolDriver> pool_driver_ = LoadPoolDriver();
  cpu::MemoryBank bank_;
  Completions completions_;
};

}  // namespace

std::vector<DeviceInfo> ListDevices() {
  std::vector<DeviceInfo> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return devices;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) continue;
    devices.push_back({ordinal, UuidOf(properties), properties.name});
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int ordinal) {
  // Kernels must be loaded before any stream can wait: see PrepareKernels. Read when the first context is made.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || ordinal < 0 || ordinal >= count) {
    cudaGetLastError();
    return absl::NotFoundError(
        absl::StrCat("device: cuda:", ordinal, " given, ", error == cudaSuccess ? count : 0, " GPUs found",
                     error == cudaSuccess ? "" : absl::StrCat(" (", cudaGetErrorString(error), ")")));
  }
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) return ToStatus(error, absl::StrCat("device: cuda:", ordinal));
  if (properties.major < kMinCapability) {
    return absl::FailedPreconditionError(absl::StrCat("device: cuda:", ordinal, " has compute capability ",
                                                      properties.major, ".", properties.minor, ", limit ",
                                                      kMinCapability, ".0"));
  }
  const CurrentDevice current(ordinal);
  DeviceLimits limits;
  limits.multiprocessors = properties.multiProcessorCount;
  limits.max_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  limits.clusters = properties.major >= 9;
  // Blocks have some static shared memory beside what they ask for.
  constexpr int kStaticSharedBytes = 1024;
  limits.max_shared_bytes -= kStaticSharedBytes;
  error = PrepareKernels(limits);
  if (error != cudaSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("device: cuda:", ordinal, ": the kernels cannot be loaded: ", cudaGetErrorString(error)));
  }
  return std::make_unique<CudaBackend>(ordinal, UuidOf(properties), limits);
}

}  // namespace stoker::kernels::cuda
