// Core's Bounce in one piece of memory that the backends reach.
//
// Pieces are cut from the first gap that is large enough. The oldest request goes first even where a younger one would
// fit, so that none starves. One thread makes all copies: 64 MiB take it some 10 ms, and a device's link is no faster
// than one core.
//
// Thread safety: any thread. The destructor needs all pieces given back and waits for what was posted.
//
// Invariants:
//  1. Pieces that are out do not overlap; gaps are maximal.
//  2. The oldest request waits only while no gap is large enough for it, or the thread is about to take it up.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/core/engine.h"

namespace stoker::engine {

class BounceMemory final : public core::Bounce {
 public:
  // RESOURCE_EXHAUSTED as of Backend::AllocateHost.
  static absl::StatusOr<std::unique_ptr<BounceMemory>> Create(kernels::Backend& backend, int64_t capacity_bytes);
  ~BounceMemory() override;

  int64_t capacity_bytes() const override { return capacity_bytes_; }
  void Take(int64_t bytes, absl::AnyInvocable<void(Memory) &&> taken) override;
  void Post(absl::AnyInvocable<void() &&> copy) override;

 private:
  struct Request {
    int64_t bytes = 0;
    absl::AnyInvocable<void(Memory) &&> taken;
  };

  BounceMemory(std::unique_ptr<kernels::Buffer> buffer, int64_t capacity_bytes);
  // Offset of the first gap for the oldest request, or -1.
  int64_t FindGap() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Give(int64_t offset, int64_t bytes);
  void Run();

  const std::unique_ptr<kernels::Buffer> buffer_;
  const int64_t capacity_bytes_;
  absl::Mutex mutex_;
  std::map<int64_t, int64_t> gaps_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
  std::deque<Request> requests_ ABSL_GUARDED_BY(mutex_);
  std::deque<absl::AnyInvocable<void() &&>> copies_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace stoker::engine
