// A CUDA stream with the operations of kernels::Stream, and the staging of copies from and to pageable memory.
//
// cudaMemcpyAsync from or to pageable host memory makes the caller wait. So bytes from such memory are copied into
// pinned memory at once and go on from there, and bytes to such memory go to pinned memory and from there to their
// target when the next Notify completes, before its callback. A program has no such copies. Pinned memory is lent by
// the backend: to allocate or free it could wait for other streams' work.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/completions.h"
#include "kernels/cuda/device_health.h"
#include "kernels/cuda/device_waits.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/slabs.h"
#include "kernels/cuda/stream_words.h"

namespace stoker::kernels::cuda {

// What the streams of a device share. Outlives them.
struct DeviceShared {
  DeviceHealth* health = nullptr;
  PinnedSlabs* slabs = nullptr;
  Completions* completions = nullptr;
  // Null for streams that never wait for a doorbell or an order word.
  DeviceWaits* waits = nullptr;
  const StreamWords* words = nullptr;
};

class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create(int device, const DeviceLimits& limits,
                                                        const DeviceShared& shared);
  // A stream that stays its owner's, see wrapped_stream.h. `alone` holds what `shared` points to.
  static std::unique_ptr<Stream> Wrap(int device, const DeviceLimits& limits, const DeviceShared& shared,
                                      cudaStream_t stream, std::shared_ptr<const void> alone);
  ~CudaStream() override;

  void Notify(absl::AnyInvocable<void(absl::Status) &&> done) override;
  std::shared_ptr<Event> Record() override;
  void Wait(std::shared_ptr<Event> event) override;
  void Timestamp(uint64_t* ns) override;
  absl::Status Copy(void* dst, const void* src, size_t bytes) override;
  absl::Status Write(uint64_t* target, uint64_t value) override { return WriteWord(target, value); }
  absl::Status Write(int32_t* target, int32_t value) override { return WriteWord(target, value); }
  absl::Status Resolve(const ResolveArgs& args) override;
  absl::Status ResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather) override;
  absl::Status ResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather,
                             const RingDoorbellArgs& ring) override;
  absl::Status Gather(const GatherCompactArgs& args) override;
  absl::Status Gather(const GatherDenseArgs& args) override;
  absl::Status Transfer(const TransferArgs& args) override;
  absl::Status Invalidate(const InvalidateArgs& args) override;
  absl::Status Reset(const ResetArgs& args) override;
  absl::Status Place(const PlaceArgs& args) override;
  absl::Status AwaitDoorbell(const AwaitDoorbellArgs& args) override;
  absl::Status RingDoorbell(const RingDoorbellArgs& args) override;
  absl::Status AwaitQuiet(const AwaitQuietArgs& args) override;
  absl::Status BeginBatch(const BatchArgs& args) override;
  absl::Status PlanCommits(const BatchArgs& args) override;
  absl::Status EndBatch(const BatchArgs& args) override;
  absl::Status AwaitOrder(const AwaitOrderArgs& args) override;
  absl::Status SignalOrder(const SignalOrderArgs& args) override;
  int64_t backlog() const override { return enqueued_ - ended_->load(std::memory_order_relaxed); }
  // A CUDA graph, of which `body` is the capture.
  absl::StatusOr<std::unique_ptr<Program>> MakeProgram(std::function<absl::Status(Stream&)> body) override;

  cudaStream_t get() const { return stream_.get(); }

 private:
  // Pinned memory, handed out from the front and used from the front again when nothing in it is under way.
  struct Slab {
    explicit Slab(PinnedSlabs* slabs) : owner(slabs) {}
    ~Slab() { owner->Give(std::move(memory), PinnedSlabs::kSlabBytes); }
    PinnedSlabs* const owner;
    PinnedMemory memory;
    size_t used = 0;
    std::atomic<int> users{0};  // notifications that have bytes in it
  };
  // Bytes to take to pageable memory.
  struct Download {
    void* target;
    const void* staged;
    size_t bytes;
  };
  // What the next Notify ends.
  struct Batch {
    std::vector<Download> downloads;
    std::vector<std::shared_ptr<Slab>> slabs;
    absl::Status error;
  };

  CudaStream(int device, const DeviceLimits& limits, const DeviceShared& shared, StreamHandle stream,
             std::shared_ptr<const void> alone)
      : alone_(std::move(alone)), device_(device), limits_(limits), shared_(shared), stream_(std::move(stream)) {}

  absl::Status Check(cudaError_t error, absl::string_view what) {
    ++enqueued_;
    return shared_.health->Check(error, what);
  }
  // Those of a gather, but for the one that Check counts.
  void CountLaunches(const GatherCompactArgs& args);
  // DeviceWaits knows from now on that this stream may wait.
  void BeginToWait();
  // Pinned memory, at most a slab of it, that stays until the next Notify has completed.
  absl::StatusOr<void*> Stage(size_t bytes);
  absl::Status CopyPiece(void* dst, const void* src, size_t bytes, bool stage_source, bool stage_target);
  template <typename T>
  absl::Status WriteWord(T* target, T value);
  // Checks the arguments, makes the device current and launches.
  template <typename Args, typename Launch>
  absl::Status Enqueue(const Args& args, Launch launch);

  bool wrapped() const { return alone_ != nullptr; }

  const std::shared_ptr<const void> alone_;  // of a wrapped stream; first, so that it goes last
  const int device_;
  const DeviceLimits limits_;
  const DeviceShared shared_;
  StreamHandle stream_;
  Batch batch_;
  std::vector<std::shared_ptr<Slab>> slabs_;
  bool captures_ = false;  // a program's body runs
  bool waits_ = false;     // has, or may have, a wait: DeviceWaits knows
  int64_t enqueued_ = 0;
  // Of them, those before the last Notify that has called back. The callback may come when the stream is gone.
  const std::shared_ptr<std::atomic<int64_t>> ended_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace stoker::kernels::cuda
