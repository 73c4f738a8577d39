#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/memory.h"
#include "kernels/cuda/arena_memory.h"
#include "kernels/cuda/completions.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/device_health.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/ipc_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pool_memory.h"
#include "kernels/cuda/prepare_device.h"
#include "kernels/cuda/slabs.h"
#include "kernels/cuda/stream_words.h"

namespace stoker::kernels::cuda {
namespace {

// Of the device's memory: what sessions that have ended may leave for those that come, of each kind.
constexpr size_t kKeptShare = 8;

constexpr char kConnections[] = "CUDA_DEVICE_MAX_CONNECTIONS";

// For streams that wait. Read when the driver starts; what the environment says goes first.
void SetUpDriver() {
  // A kernel that is loaded at its first launch waits for all streams: see PrepareKernels.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // Under MPS a process has 2 connections, and the second stream that waits stops all others. 32, the most there can
  // be, carried 16 waiting streams (measured), not 24.
  setenv(kConnections, "32", 0);
}

// What the driver was told, which takes 1 to 32.
int64_t Connections() {
  const char* const value = std::getenv(kConnections);
  int64_t connections = 0;
  if (value == nullptr || !absl::SimpleAtoi(value, &connections)) return 0;
  return std::clamp(connections, int64_t{0}, int64_t{32});
}

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(DeviceSlabs* slabs, DeviceSlab slab, size_t bytes)
      : slabs_(slabs), slab_(std::move(slab)), bytes_(bytes) {}
  ~DeviceBuffer() override { slabs_->Give(std::move(slab_)); }
  std::byte* data() const override { return static_cast<std::byte*>(slab_.memory.get()); }
  size_t bytes() const override { return bytes_; }
  std::string_view ipc_handle() const override { return slab_.ipc_handle; }

 private:
  DeviceSlabs* const slabs_;
  DeviceSlab slab_;
  const size_t bytes_;
};

class PinnedBuffer final : public Buffer {
 public:
  PinnedBuffer(PinnedSlabs* slabs, PinnedMemory memory, size_t bytes)
      : slabs_(slabs), memory_(std::move(memory)), bytes_(bytes) {}
  ~PinnedBuffer() override { slabs_->Give(std::move(memory_), bytes_); }
  std::byte* data() const override { return static_cast<std::byte*>(memory_.get()); }
  size_t bytes() const override { return bytes_; }

 private:
  PinnedSlabs* const slabs_;
  PinnedMemory memory_;
  const size_t bytes_;
};

bool IsMpsEnabled(int device) {
  int enabled = 0;
  if (cudaDeviceGetAttribute(&enabled, cudaDevAttrMpsEnabled, device) == cudaSuccess) return enabled != 0;
  cudaGetLastError();  // a driver that does not know the attribute
  return false;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, std::string uuid, const DeviceLimits& limits, size_t memory_bytes, StreamHandle releasing)
      : device_(device),
        uuid_(std::move(uuid)),
        limits_(limits),
        mps_(IsMpsEnabled(device)),
        health_(uuid_),
        shared_(device, /*exported=*/true, memory_bytes / kKeptShare, &waits_),
        private_(device, /*exported=*/false, memory_bytes / kKeptShare, &waits_),
        client_memory_(device, uuid_, LoadIpcDriver()),
        releasing_(std::move(releasing)),
        completions_(device, &health_) {}

  std::string_view device() const override { return uuid_; }
  bool reaches_pageable_memory() const override { return false; }
  std::string_view no_doorbells() const override {
    return mps_ ? ""
                : "MPS does not run, and without it a kernel that waits for a doorbell holds whole time slices of the "
                  "GPU";
  }
  std::string_view no_order_words() const override {
    const absl::string_view reason = no_order_words_.message();
    return std::string_view(reason.data(), reason.size());
  }
  bool recycles_shared_memory() const override { return true; }
  bool shares_contexts() const override { return mps_; }
  std::optional<WaitingLimit> waiting_limit() const override {
    const int64_t connections = Connections();
    return WaitingLimit{connections / 2, absl::StrCat("half of ", kConnections, "=", connections)};
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes, const PoolOptions& options) override {
    const CurrentDevice current(device_);
    std::vector<int> devices = {device_};
    for (const Backend* peer : options.peers) devices.push_back(static_cast<const CudaBackend*>(peer)->device_);
    return AllocatePinnedPool(pool_driver_, &bank_, devices, bytes, options);
  }

  std::string_view NoSharing(Sharing sharing) const override {
    const absl::string_view reason = no_descriptors_.message();
    return sharing == Sharing::kDescriptor ? std::string_view(reason.data(), reason.size()) : "";
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes, Sharing sharing) override {
    if (sharing != Sharing::kDescriptor) return Allocate(&shared_, bytes);
    const CurrentDevice current(device_);
    absl::StatusOr<std::unique_ptr<Buffer>> arena = AllocateArena(pool_driver_, device_, bytes);
    if (absl::IsResourceExhausted(arena.status())) {
      const bool shared_freed = shared_.FreeKept(), private_freed = private_.FreeKept();
      if (shared_freed || private_freed) arena = AllocateArena(pool_driver_, device_, bytes);
    }
    if (!arena.ok()) {
      // The driver's functions do not say of a lost device that it is lost; this one does, and waits for nothing.
      size_t free = 0, total = 0;
      absl::Status lost = health_.Check(cudaMemGetInfo(&free, &total), "device memory cannot be had");
      if (!lost.ok()) return lost;
      return RefusedBesideKept(arena.status(), shared_.kept_bytes() + private_.kept_bytes());
    }
    absl::Status status = Zero((*arena)->data(), (*arena)->exported().parts.front().bytes);
    if (!status.ok()) return status;
    return arena;
  }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePrivate(size_t bytes) override { return Allocate(&private_, bytes); }

  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
    const CurrentDevice current(device_);
    absl::StatusOr<PinnedMemory> memory = pinned_.Take(bytes);
    if (!memory.ok()) return memory.status();
    std::memset(memory->get(), 0, bytes);
    return std::make_unique<PinnedBuffer>(&pinned_, *std::move(memory), bytes);
  }

  absl::StatusOr<std::unique_ptr<Buffer>> MapClientMemory(const ClientMemory& memory) override {
    const CurrentDevice current(device_);
    return client_memory_.Open(memory);
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    return CudaStream::Create(device_, limits_, {&health_, &pinned_, &completions_, &waits_, &words_});
  }

  absl::Status ReleaseOrder(uint64_t* word) override {
    const CurrentDevice current(device_);
    return health_.Check(words_.Write(word, kReleasedOrder, releasing_.get()), "an order word cannot be released");
  }
  absl::Status AwaitReleases() override {
    const CurrentDevice current(device_);
    return health_.Check(cudaStreamSynchronize(releasing_.get()), "an order word cannot be released");
  }

  void OnLost(absl::AnyInvocable<void(absl::Status) &&> lost) override { health_.OnLost(std::move(lost)); }

 private:
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(DeviceSlabs* slabs, size_t bytes) {
    if (bytes == 0) return absl::InvalidArgumentError("bytes: 0 given, limit 1");
    const CurrentDevice current(device_);
    absl::StatusOr<DeviceSlab> slab = slabs->Take(bytes);
    if (!slab.ok()) return slab.status();
    auto buffer = std::make_unique<DeviceBuffer>(slabs, *std::move(slab), bytes);
    // All of it: an exported slab is seen as a whole.
    if (absl::Status status = Zero(buffer->data(), DeviceSlabs::SlabBytes(bytes)); !status.ok()) return status;
    return buffer;
  }

  // Waits for it, on a stream of its own: no other stream is waited for. The device is current.
  absl::Status Zero(void* memory, size_t bytes) {
    absl::StatusOr<StreamHandle> stream = MakeStream();
    if (!stream.ok()) return stream.status();
    cudaError_t error = cudaMemsetAsync(memory, 0, bytes, stream->get());
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream->get());
    return health_.Check(error, "device memory cannot be zeroed");
  }

  const int device_;
  const std::string uuid_;
  const DeviceLimits limits_;
  const bool mps_;
  const std::shared_ptr<const PoolDriver> pool_driver_ = LoadPoolDriver();
  const absl::Status no_descriptors_ = CheckArenaSupport(*pool_driver_, device_);  // why; OK where there are some
  const StreamWords words_ = StreamWords(LoadStreamWordDriver());
  const absl::Status no_order_words_ = words_.CheckSupport(device_);  // likewise
  cpu::MemoryBank bank_;
  DeviceHealth health_;
  PinnedSlabs pinned_;
  DeviceWaits waits_;
  DeviceSlabs shared_;
  DeviceSlabs private_;
  IpcMemory client_memory_;
  const StreamHandle releasing_;  // of order words
  Completions completions_;       // last: what it calls uses the rest
};

}  // namespace

absl::StatusOr<std::vector<DeviceInfo>> ListDevices() {
  SetUpDriver();
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
      return absl::NotFoundError("there is no NVIDIA driver (libcuda.so.1)");
    }
    return absl::NotFoundError(cudaGetErrorString(error));
  }
  std::vector<DeviceInfo> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) continue;
    devices.push_back({ordinal, UuidOf(properties), properties.name});
  }
  if (devices.empty()) return absl::NotFoundError("the driver lists no GPU");
  return devices;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int ordinal, bool clusters) {
  SetUpDriver();
  absl::StatusOr<PreparedDevice> device = PrepareDevice(ordinal);
  if (!device.ok()) return device.status();
  device->limits.clusters = device->limits.clusters && clusters;
  const CurrentDevice current(ordinal);
  absl::StatusOr<StreamHandle> releasing = MakeReleasingStream();
  if (!releasing.ok()) return releasing.status();
  return std::make_unique<CudaBackend>(ordinal, device->uuid, device->limits, device->memory_bytes,
                                       *std::move(releasing));
}

}  // namespace stoker::kernels::cuda
