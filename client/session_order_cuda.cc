#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "client/session_order.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/stream_words.h"
#include "kernels/order_word.h"

namespace stoker::client {
namespace {

using kernels::cuda::CurrentDevice;
using kernels::cuda::EventHandle;
using kernels::cuda::StreamHandle;
using kernels::cuda::ToStatus;

// How long the destructor waits for the streams: as long as the destructor of a session for the daemon.
constexpr absl::Duration kIdleTimeout = absl::Seconds(5);
constexpr absl::Duration kIdlePeriod = absl::Milliseconds(1);

// Whether all work before the event has ended, be it with an error.
bool IsDone(const EventHandle& event) {
  if (event.get() == nullptr || cudaEventQuery(event.get()) != cudaErrorNotReady) return true;
  cudaGetLastError();  // no error: the next launch of this thread must not find it
  return false;
}

class CudaOrder final : public SessionOrder {
 public:
  CudaOrder(std::shared_ptr<const Arena> arena, int ordinal, uint64_t* engine, uint64_t* daemon, StreamHandle releasing,
            EventHandle signalled)
      : arena_(std::move(arena)),
        ordinal_(ordinal),
        engine_(engine),
        daemon_(daemon),
        releasing_(std::move(releasing)),
        signalled_(std::move(signalled)) {}

  ~CudaOrder() override {
    const CurrentDevice current(ordinal_);
    Release();
    for (const absl::Time end = absl::Now() + kIdleTimeout; !Idle() && absl::Now() < end;) absl::SleepFor(kIdlePeriod);
    if (!Idle()) {
      // A stream that still is to write or read the words would find no memory there.
      std::fprintf(stderr, "stoker: an arena stays mapped: a stream with calls of its session is still at work\n");
      new std::shared_ptr<const Arena>(std::move(arena_));
    }
    awaits_.clear();
    signalled_ = {};
    releasing_ = {};
  }

  uint64_t Next() override {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }

  absl::StatusOr<uint64_t> Signal(CUstream_st* stream) override {
    if (absl::Status status = CheckStream(stream); !status.ok()) return status;
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    cudaError_t error = cudaSuccess;
    // One word, one order: what another stream sets comes behind what was set before.
    if (last_stream_ != nullptr && last_stream_ != stream) error = cudaStreamWaitEvent(stream, signalled_.get(), 0);
    if (error == cudaSuccess) error = words_.Write(engine_, last_ + 1, stream);
    if (error == cudaSuccess) {
      ++last_;
      last_stream_ = stream;
      error = cudaEventRecord(signalled_.get(), stream);
    }
    if (error != cudaSuccess) return ToStatus(error, "order.wait: the engine word cannot be set");
    return last_;
  }

  absl::Status Await(uint64_t number, CUstream_st* stream, absl::Time) override {
    if (absl::Status status = CheckStream(stream); !status.ok()) return status;
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    EventHandle& event = awaits_[stream];
    if (event.get() == nullptr) {
      absl::StatusOr<EventHandle> made = kernels::cuda::MakeEvent();
      if (!made.ok()) return made.status();
      event = *std::move(made);
    }
    cudaError_t error = words_.Await(daemon_, number, stream);
    if (error == cudaSuccess) error = cudaEventRecord(event.get(), stream);
    return ToStatus(error, "order.signal: the stream cannot wait for the daemon word");
  }

  void Release() override {
    const CurrentDevice current(ordinal_);
    // An error is the device's, which tells all that use it.
    words_.Write(daemon_, kernels::kReleasedOrder, releasing_.get());
  }

  bool Idle() override {
    const CurrentDevice current(ordinal_);
    const std::lock_guard lock(mutex_);
    if (last_stream_ != nullptr && !IsDone(signalled_)) return false;
    for (const auto& [stream, event] : awaits_) {
      if (!IsDone(event)) return false;
    }
    if (cudaStreamQuery(releasing_.get()) != cudaErrorNotReady) return true;
    cudaGetLastError();
    return false;
  }

  absl::Status CheckSupport() const { return words_.CheckSupport(ordinal_); }

 private:
  static absl::Status CheckStream(CUstream_st* stream) {
    if (stream != nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "stream: null in CallOptions, with an order in the request (the default stream is cudaStreamLegacy)");
  }

  std::shared_ptr<const Arena> arena_;
  const int ordinal_;
  uint64_t* const engine_;
  uint64_t* const daemon_;
  const kernels::cuda::StreamWords words_ = kernels::cuda::StreamWords(kernels::cuda::LoadStreamWordDriver());
  StreamHandle releasing_;
  std::mutex mutex_;
  // Guarded by mutex_.
  uint64_t last_ = 0;
  CUstream_st* last_stream_ = nullptr;          // that the engine word was set by,
  EventHandle signalled_;                       //   and behind that
  std::map<CUstream_st*, EventHandle> awaits_;  // behind each stream's last wait
};

}  // namespace

absl::StatusOr<std::shared_ptr<SessionOrder>> SessionOrder::MakeOnDevice(std::shared_ptr<const Arena> arena,
                                                                         const Words& words) {
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, arena->bytes().data()); error != cudaSuccess) {
    return ToStatus(error, "the arena's GPU cannot be had");
  }
  const CurrentDevice current(attributes.device);
  absl::StatusOr<StreamHandle> releasing = kernels::cuda::MakeReleasingStream();
  if (!releasing.ok()) return releasing.status();
  absl::StatusOr<EventHandle> signalled = kernels::cuda::MakeEvent();
  if (!signalled.ok()) return signalled.status();
  auto order = std::make_shared<CudaOrder>(std::move(arena), attributes.device, words.engine, words.daemon,
                                           *std::move(releasing), *std::move(signalled));
  if (absl::Status status = order->CheckSupport(); !status.ok()) return status;
  return order;
}

}  // namespace stoker::client
