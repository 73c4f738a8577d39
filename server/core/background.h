// Runs tasks one after the other on a thread of its own: what takes memory or waits for work, and so must not run in a
// handler or in a completion.
//
// Thread safety: any thread may call Post. The destructor runs what was posted, then ends the thread.
#pragma once

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace stoker::core {

class Background {
 public:
  // Calls `tick` about every `period` between tasks.
  Background(absl::Duration period, absl::AnyInvocable<void()> tick);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void Post(absl::AnyInvocable<void() &&> task);

 private:
  void Run();

  const absl::Duration period_;
  absl::AnyInvocable<void()> tick_;
  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void() &&>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace stoker::core
