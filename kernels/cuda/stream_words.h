// Order words (kernels/order_word.h) on streams of a GPU: the driver's stream memory operations on 64-bit words.
//
// A write is behind all work before it on its stream, and what that has written is visible to whoever sees the word.
// What is enqueued behind a wait begins when the word has come. Neither may be captured: a number is of one call.
//
// Thread safety: any thread.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {

// The CUDA functions that it takes, as a table: tests put others in their place. Members are empty where the driver
// lacks the function.
struct StreamWordDriver {
  std::function<decltype(cuDeviceGetAttribute)> device_get_attribute;
  std::function<decltype(cuStreamWriteValue64)> write;
  std::function<decltype(cuStreamWaitValue64)> wait;
};

// This machine's. Initializes the driver.
StreamWordDriver LoadStreamWordDriver();

class StreamWords {
 public:
  explicit StreamWords(StreamWordDriver driver) : driver_(std::move(driver)) {}

  // Whether streams of the device, an ordinal, can do it. FAILED_PRECONDITION: the message says what is missing.
  absl::Status CheckSupport(int device) const;

  // The word is memory of the stream's device, which is current. The streams' other calls may be made meanwhile.
  cudaError_t Write(uint64_t* word, uint64_t value, cudaStream_t stream) const;
  cudaError_t Await(const uint64_t* word, uint64_t number, cudaStream_t stream) const;

 private:
  const StreamWordDriver driver_;
};

// A stream for releases, on the current device. Of the highest priority, so that it shares no connection to the device
// with streams that wait, which have none: behind one of them its write would wait as well.
absl::StatusOr<StreamHandle> MakeReleasingStream();

}  // namespace stoker::kernels::cuda
