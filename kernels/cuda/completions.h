// Tells when work of streams is done: one thread for all streams of a device, none for each call.
//
// The thread asks for the oldest event of each stream by cudaEventQuery, at first without pause, then with growing
// pauses: an event that a kernel ends is seen within some 10 us, and an idle device costs nothing. (A host function
// enqueued on the stream would not be called after a sticky error; an event's query returns the error.)
//
// Thread safety: any thread may call Add.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kernels/cuda/device_health.h"
#include "kernels/cuda/handles.h"

namespace stoker::kernels::cuda {

class Completions {
 public:
  // `health`, which outlives this, sees every error.
  Completions(int device, DeviceHealth* health);
  // Waits for all that was added.
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Calls `done` on this object's thread when `event`, which was recorded on `stream` already, has happened, with its
  // error. Events of one stream come in the order in which they were recorded.
  void Add(cudaStream_t stream, EventHandle event, absl::AnyInvocable<void(absl::Status) &&> done);
  // Calls `done` on this object's thread, soon, with an error.
  void Fail(absl::Status error, absl::AnyInvocable<void(absl::Status) &&> done);

 private:
  struct Waiting {
    cudaStream_t stream = nullptr;
    EventHandle event;
    absl::AnyInvocable<void(absl::Status) &&> done;
    absl::Status error;  // if there is no event
  };

  void Run();

  const int device_;
  DeviceHealth* const health_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Waiting> incoming_;  // guarded by mutex_
  bool stopping_ = false;         // guarded by mutex_
  std::thread thread_;
};

}  // namespace stoker::kernels::cuda
