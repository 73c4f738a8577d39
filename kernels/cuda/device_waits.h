// How many streams of a device may wait for doorbells or order words. While one does, cudaFree returns only when it has
// ended (measured on an H200), which may be never: memory is then kept instead.
//
// Thread safety: any thread.
#pragma once

#include <mutex>

namespace stoker::kernels::cuda {

class DeviceWaits {
 public:
  // Before a stream's first wait, and when the stream has ended. Waits while something is freed.
  void Add() {
    const std::lock_guard lock(mutex_);
    ++streams_;
  }
  void Remove() {
    const std::lock_guard lock(mutex_);
    --streams_;
  }

  // Calls `free` unless a stream may wait; none begins to meanwhile. Whether it did.
  template <typename Free>
  bool UnlessAny(Free free) {
    const std::lock_guard lock(mutex_);
    if (streams_ > 0) return false;
    free();
    return true;
  }

 private:
  std::mutex mutex_;
  int streams_ = 0;  // guarded by mutex_
};

}  // namespace stoker::kernels::cuda
