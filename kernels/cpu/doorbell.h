// Waits of streams for words that others write: doorbells, order words, and the end of a step.
//
// A strand that waits holds no thread of its pool. It is parked with an event, and the poller's one thread, which all
// streams of a backend share, looks at the words and fires the event.
//
// Thread safety: any thread may call Await. A wait is used by one thread at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "kernels/cpu/strand.h"
#include "kernels/order_word.h"
#include "kernels/plane.h"

namespace stoker::kernels::cpu {

// An AwaitDoorbell. Begin, then Over until it is true.
class DoorbellWait {
 public:
  explicit DoorbellWait(const AwaitDoorbellArgs& args) : args_(args) {}
  void Begin();
  // Whether the request has come, or the plane has ended, which it ends where that is due.
  bool Over();

 private:
  void End(PlaneOutcome outcome);

  AwaitDoorbellArgs args_;
  uint64_t step_ = 0;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::time_point::max();
};

// An AwaitQuiet, likewise.
class QuietWait {
 public:
  explicit QuietWait(const AwaitQuietArgs& args) : args_(args) {}
  void Begin();
  bool Over();

 private:
  AwaitQuietArgs args_;
  uint64_t accepted_ = 0;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::time_point::max();
};

// An AwaitOrder, likewise.
class OrderWait {
 public:
  explicit OrderWait(const AwaitOrderArgs& args) : args_(args) {}
  void Begin() {}
  bool Over();

 private:
  AwaitOrderArgs args_;
};

// Sets the doorbell, on the calling thread.
void RingDoorbell(const RingDoorbellArgs& args);
// Raises the word, likewise.
void SignalOrder(const SignalOrderArgs& args);
void ReleaseOrder(uint64_t* word);

class DoorbellPoller {
 public:
  DoorbellPoller() = default;
  // Every wait must be over.
  ~DoorbellPoller();
  DoorbellPoller(const DoorbellPoller&) = delete;
  DoorbellPoller& operator=(const DoorbellPoller&) = delete;

  // Fires the event soon after `over` returns true. It is called on the poller's thread, which the first call starts.
  void Await(absl::AnyInvocable<bool()> over, std::shared_ptr<StrandEvent> event);

 private:
  struct Waiting {
    absl::AnyInvocable<bool()> over;
    std::shared_ptr<StrandEvent> event;
  };

  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Waiting> incoming_;  // guarded by mutex_
  bool stopping_ = false;          // guarded by mutex_
  std::thread thread_;             // guarded by mutex_ until it stops
};

}  // namespace stoker::kernels::cpu
