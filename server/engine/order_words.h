// What a session with ordered calls needs beside its stream: the flag by which its waits are aborted, and the engine's
// word, which releases them.
//
// Thread safety: any thread. The session has it as well as the storage, and calls it also when the storage is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/core/engine.h"

namespace stoker::engine {

static_assert(core::kMaxOrder == kernels::kMaxOrder);

class OrderWords final : public core::OrderAbort {
 public:
  // `flag`: host memory of a uint32_t, 0. `engine_word` is memory of the backend, and both live until Close.
  OrderWords(kernels::Backend* backend, std::unique_ptr<kernels::Buffer> flag, uint64_t* engine_word)
      : backend_(backend), flag_(std::move(flag)), engine_word_(engine_word) {}

  const uint32_t* flag() const {
    absl::MutexLock lock(&mutex_);
    return reinterpret_cast<const uint32_t*>(flag_->data());
  }
  uint64_t* engine_word() const { return engine_word_; }

  void Abort() override {
    absl::MutexLock lock(&mutex_);
    if (flag_ == nullptr) return;
    // First: who finds the word released looks at the flag.
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(flag_->data())).store(1, std::memory_order_release);
    // An error is the device's, which the session's other work tells.
    backend_->ReleaseOrder(engine_word_).IgnoreError();
  }

  // Nothing waits any more; backend and memory may go.
  void Close() {
    absl::MutexLock lock(&mutex_);
    // An error is the device's: nothing is written any more.
    backend_->AwaitReleases().IgnoreError();
    flag_ = nullptr;
  }

 private:
  kernels::Backend* const backend_;
  mutable absl::Mutex mutex_;
  std::unique_ptr<kernels::Buffer> flag_ ABSL_GUARDED_BY(mutex_);
  uint64_t* const engine_word_;
};

}  // namespace stoker::engine
