#include "kernels/cuda/cuda_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace stoker::kernels::cuda {
namespace {

constexpr size_t kAlignment = 256;
// Idle slabs that a stream keeps for its next work; the rest goes back to the device's.
constexpr size_t kIdleSlabs = 2;

class CudaEvent final : public Event {
 public:
  CudaEvent(int device, EventHandle event) : device_(device), event_(std::move(event)) {}
  bool Done() const override {
    const CurrentDevice current(device_);
    if (cudaEventQuery(event_.get()) != cudaErrorNotReady) return true;
    cudaGetLastError();  // no error: the next launch of this thread must not find it
    return false;
  }
  cudaEvent_t get() const { return event_.get(); }

 private:
  const int device_;
  const EventHandle event_;
};

class CudaProgram final : public Program {
 public:
  CudaProgram(int device, DeviceHealth* health, cudaStream_t stream, GraphExecHandle exec)
      : device_(device), health_(health), stream_(stream), exec_(std::move(exec)) {}

  absl::Status Enqueue() override {
    const CurrentDevice current(device_);
    return health_->Check(cudaGraphLaunch(exec_.get(), stream_), "a program cannot be enqueued");
  }

 private:
  const int device_;
  DeviceHealth* const health_;
  const cudaStream_t stream_;
  const GraphExecHandle exec_;
};

// Whether the device, and an asynchronous copy, can use the address as it is.
bool IsPinnedOrDevice(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type != cudaMemoryTypeUnregistered;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Stream>> CudaStream::Create(int device, const DeviceLimits& limits,
                                                           const DeviceShared& shared) {
  const CurrentDevice current(device);
  absl::StatusOr<StreamHandle> stream = MakeStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<Stream>(new CudaStream(device, limits, shared, *std::move(stream), nullptr));
}

std::unique_ptr<Stream> CudaStream::Wrap(int device, const DeviceLimits& limits, const DeviceShared& shared,
                                         cudaStream_t stream, std::shared_ptr<const void> alone) {
  return std::unique_ptr<Stream>(new CudaStream(device, limits, shared, StreamHandle(stream), std::move(alone)));
}

CudaStream::~CudaStream() {
  if (wrapped()) {
    stream_.Release();  // no memory is staged, so that nothing of ours is under way
    return;
  }
  const CurrentDevice current(device_);
  // Whatever was enqueued behind the last Notify, too.
  ReportLoss(cudaStreamSynchronize(stream_.get()), "a stream ends with an error");
  if (waits_) shared_.waits->Remove();
  // Those of copies that no Notify came for.
  for (const std::shared_ptr<Slab>& slab : batch_.slabs) slab->users.fetch_sub(1, std::memory_order_release);
  // Callbacks of this stream have run when the slabs that they hold are free.
  for (const std::shared_ptr<Slab>& slab : slabs_) {
    int users;
    while ((users = slab->users.load(std::memory_order_acquire)) > 0) slab->users.wait(users);
  }
}

absl::StatusOr<void*> CudaStream::Stage(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::shared_ptr<Slab> chosen;
  for (const std::shared_ptr<Slab>& slab : slabs_) {
    const bool in_batch = std::find(batch_.slabs.begin(), batch_.slabs.end(), slab) != batch_.slabs.end();
    if (!in_batch && slab->users.load(std::memory_order_acquire) == 0) slab->used = 0;
    if (PinnedSlabs::kSlabBytes - slab->used >= rounded) {
      chosen = slab;
      break;
    }
  }
  if (chosen == nullptr) {
    absl::StatusOr<PinnedMemory> memory = shared_.slabs->Take(PinnedSlabs::kSlabBytes);
    if (!memory.ok()) return memory.status();
    chosen = std::make_shared<Slab>(shared_.slabs);
    chosen->memory = *std::move(memory);
    slabs_.push_back(chosen);
  }
  void* const staged = static_cast<char*>(chosen->memory.get()) + chosen->used;
  chosen->used += rounded;
  if (std::find(batch_.slabs.begin(), batch_.slabs.end(), chosen) == batch_.slabs.end()) {
    batch_.slabs.push_back(chosen);
    chosen->users.fetch_add(1, std::memory_order_relaxed);
  }
  return staged;
}

void CudaStream::Notify(absl::AnyInvocable<void(absl::Status) &&> done) {
  const CurrentDevice current(device_);
  auto finish = [batch = std::move(batch_), done = std::move(done), ended = ended_,
                 enqueued = enqueued_](absl::Status status) mutable {
    ended->store(enqueued, std::memory_order_relaxed);
    if (status.ok()) status = batch.error;
    if (status.ok()) {
      for (const Download& download : batch.downloads) std::memcpy(download.target, download.staged, download.bytes);
    }
    std::move(done)(std::move(status));
    for (const std::shared_ptr<Slab>& slab : batch.slabs) {
      slab->users.fetch_sub(1, std::memory_order_release);
      slab->users.notify_all();
    }
  };
  batch_ = Batch();
  size_t idle = 0;
  std::erase_if(slabs_, [&idle](const std::shared_ptr<Slab>& slab) {
    return slab->users.load(std::memory_order_acquire) == 0 && ++idle > kIdleSlabs;
  });
  absl::StatusOr<EventHandle> event = MakeEvent();
  absl::Status status = event.status();
  if (status.ok()) status = Check(cudaEventRecord(event->get(), stream_.get()), "an event cannot be recorded");
  if (!status.ok()) {
    // The device is lost: nothing will come after this. Told by the same thread as ever, since the caller may hold
    // locks.
    shared_.completions->Fail(std::move(status), std::move(finish));
    return;
  }
  shared_.completions->Add(stream_.get(), *std::move(event), std::move(finish));
}

std::shared_ptr<Event> CudaStream::Record() {
  const CurrentDevice current(device_);
  absl::StatusOr<EventHandle> event = MakeEvent();
  if (event.ok()) {
    event = [&]() -> absl::StatusOr<EventHandle> {
      const cudaError_t error = cudaEventRecord(event->get(), stream_.get());
      if (error != cudaSuccess) return Check(error, "an event cannot be recorded");
      return *std::move(event);
    }();
  }
  if (!event.ok()) {
    batch_.error.Update(event.status());
    return std::make_shared<CudaEvent>(device_, EventHandle());
  }
  return std::make_shared<CudaEvent>(device_, *std::move(event));
}

void CudaStream::Wait(std::shared_ptr<Event> event) {
  const CurrentDevice current(device_);
  const cudaEvent_t handle = static_cast<const CudaEvent&>(*event).get();
  if (handle == nullptr) return;
  batch_.error.Update(Check(cudaStreamWaitEvent(stream_.get(), handle, 0), "a stream cannot wait for an event"));
}

void CudaStream::Timestamp(uint64_t* ns) {
  const CurrentDevice current(device_);
  batch_.error.Update(Check(LaunchTimestamp(ns, stream_.get()), "the device's time cannot be read"));
}

absl::Status CudaStream::Copy(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const CurrentDevice current(device_);
  if (wrapped()) return CopyPiece(dst, src, bytes, false, false);
  const bool stage_source = !IsPinnedOrDevice(src);
  const bool stage_target = !IsPinnedOrDevice(dst);
  if (captures_ && (stage_source || stage_target)) {
    return absl::InvalidArgumentError(
        absl::StrCat("copy.", stage_source ? "src" : "dst", ": is pageable memory, which a program cannot copy"));
  }
  if (!stage_source && !stage_target) return CopyPiece(dst, src, bytes, false, false);
  for (size_t begin = 0; begin < bytes; begin += PinnedSlabs::kSlabBytes) {
    const size_t piece = std::min(PinnedSlabs::kSlabBytes, bytes - begin);
    if (absl::Status status = CopyPiece(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin, piece,
                                        stage_source, stage_target);
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status CudaStream::CopyPiece(void* dst, const void* src, size_t bytes, bool stage_source, bool stage_target) {
  const void* from = src;
  void* to = dst;
  if (stage_source || stage_target) {
    absl::StatusOr<void*> staged = Stage(bytes);
    if (!staged.ok()) return staged.status();
    if (stage_source) {
      std::memcpy(*staged, src, bytes);
      from = *staged;
    }
    if (stage_target) {
      batch_.downloads.push_back({dst, *staged, bytes});
      to = *staged;
    }
    if (from == to) return absl::OkStatus();
  }
  return Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()), "a copy cannot be enqueued");
}

template <typename T>
absl::Status CudaStream::WriteWord(T* target, T value) {
  if (target == nullptr) return absl::InvalidArgumentError("write.target: is null");
  const CurrentDevice current(device_);
  return Check(LaunchWrite(target, value, stream_.get()), "a kernel cannot be launched");
}
template absl::Status CudaStream::WriteWord(uint64_t* target, uint64_t value);
template absl::Status CudaStream::WriteWord(int32_t* target, int32_t value);

template <typename Args, typename Launch>
absl::Status CudaStream::Enqueue(const Args& args, Launch launch) {
  if (absl::Status status = Validate(args); !status.ok()) return status;
  const CurrentDevice current(device_);
  return Check(launch(), "a kernel cannot be launched");
}

absl::Status CudaStream::Resolve(const ResolveArgs& args) {
  return Enqueue(args, [&] { return LaunchResolve(args, limits_, stream_.get()); });
}

absl::Status CudaStream::ResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather) {
  if (absl::Status status = Validate(args, gather); !status.ok()) return status;
  CountLaunches(gather);
  const CurrentDevice current(device_);
  return Check(LaunchResolveGather(args, gather, nullptr, limits_, stream_.get()), "a kernel cannot be launched");
}

absl::Status CudaStream::ResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather,
                                       const RingDoorbellArgs& ring) {
  if (absl::Status status = Validate(args, gather); !status.ok()) return status;
  if (absl::Status status = Validate(ring); !status.ok()) return status;
  const CurrentDevice current(device_);
  return Check(LaunchResolveGather(args, gather, &ring, limits_, stream_.get()), "a kernel cannot be launched");
}

void CudaStream::CountLaunches(const GatherCompactArgs& args) {
  const int32_t layers =
      GatherLayers(args.rows, args.top_k, args.pool.layout.row_bytes(), args.limits, kMaxLaunchLayers);
  enqueued_ += std::max((args.layer_count + layers - 1) / layers - 1, 0);
}

absl::Status CudaStream::Gather(const GatherCompactArgs& args) {
  CountLaunches(args);
  return Enqueue(args, [&] { return LaunchGather(args, stream_.get()); });
}

absl::Status CudaStream::Gather(const GatherDenseArgs& args) {
  return Enqueue(args, [&] { return LaunchGather(args, stream_.get()); });
}

absl::Status CudaStream::Transfer(const TransferArgs& args) {
  // Check counts one of them.
  enqueued_ += TransferParts(args.count, args.layer_count, args.src.layout.row_bytes(), args.limits, kMaxLaunchPairs,
                             kMaxLaunchLayers) -
               1;
  return Enqueue(args, [&] { return LaunchTransfer(args, stream_.get()); });
}

absl::Status CudaStream::Invalidate(const InvalidateArgs& args) {
  return Enqueue(args, [&] { return LaunchInvalidate(args, stream_.get()); });
}

absl::Status CudaStream::Reset(const ResetArgs& args) {
  return Enqueue(args, [&] { return LaunchReset(args, stream_.get()); });
}

absl::Status CudaStream::Place(const PlaceArgs& args) {
  return Enqueue(args, [&] { return LaunchPlace(args, stream_.get()); });
}

void CudaStream::BeginToWait() {
  if (waits_ || shared_.waits == nullptr) return;
  shared_.waits->Add();
  waits_ = true;
}

absl::Status CudaStream::AwaitDoorbell(const AwaitDoorbellArgs& args) {
  BeginToWait();
  return Enqueue(args, [&] { return LaunchAwaitDoorbell(args, limits_, stream_.get()); });
}

absl::Status CudaStream::RingDoorbell(const RingDoorbellArgs& args) {
  return Enqueue(args, [&] { return LaunchRingDoorbell(args, stream_.get()); });
}

absl::Status CudaStream::AwaitQuiet(const AwaitQuietArgs& args) {
  return Enqueue(args, [&] { return LaunchAwaitQuiet(args, stream_.get()); });
}

absl::Status CudaStream::BeginBatch(const BatchArgs& args) {
  return Enqueue(args, [&] { return LaunchBeginBatch(args, stream_.get()); });
}

absl::Status CudaStream::PlanCommits(const BatchArgs& args) {
  return Enqueue(args, [&] { return LaunchPlanCommits(args, stream_.get()); });
}

absl::Status CudaStream::EndBatch(const BatchArgs& args) {
  return Enqueue(args, [&] { return LaunchEndBatch(args, stream_.get()); });
}

absl::Status CudaStream::AwaitOrder(const AwaitOrderArgs& args) {
  if (absl::Status status = Validate(args); !status.ok()) return status;
  if (shared_.words == nullptr) return absl::UnimplementedError("await_order: this stream waits for no order words");
  BeginToWait();
  const CurrentDevice current(device_);
  absl::Status status = Check(shared_.words->Await(args.word, args.number, stream_.get()), "a wait cannot be enqueued");
  if (!status.ok()) return status;
  return Check(LaunchLookAtAbort(args, stream_.get()), "a kernel cannot be launched");
}

absl::Status CudaStream::SignalOrder(const SignalOrderArgs& args) {
  return Enqueue(args, [&] { return LaunchSignalOrder(args, stream_.get()); });
}

absl::StatusOr<std::unique_ptr<Program>> CudaStream::MakeProgram(std::function<absl::Status(Stream&)> body) {
  if (body == nullptr) return absl::InvalidArgumentError("program.body: is null");
  const CurrentDevice current(device_);
  // Of this thread alone: other threads go on with calls that a capture does not allow, on other streams.
  absl::Status status =
      Check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "a program cannot be recorded");
  if (!status.ok()) return status;
  captures_ = true;
  status = body(*this);
  captures_ = false;
  cudaGraph_t captured = nullptr;
  const cudaError_t recorded = cudaStreamEndCapture(stream_.get(), &captured);
  const GraphHandle graph(captured);
  if (recorded != cudaSuccess) cudaGetLastError();  // told here: the next launch of this thread must not find it
  if (!status.ok()) return status;
  if (recorded != cudaSuccess) return Check(recorded, "a program cannot be recorded");
  cudaGraphExec_t instantiated = nullptr;
  cudaError_t error = cudaGraphInstantiate(&instantiated, graph.get(), 0);
  if (error != cudaSuccess) return Check(error, "a program cannot be made");
  GraphExecHandle exec(instantiated);
  // Now, and not within the first Enqueue, when streams may wait.
  error = cudaGraphUpload(exec.get(), stream_.get());
  if (error != cudaSuccess) return Check(error, "a program cannot be made");
  return std::make_unique<CudaProgram>(device_, shared_.health, stream_.get(), std::move(exec));
}

}  // namespace stoker::kernels::cuda
