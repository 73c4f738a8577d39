// Serial queues of work ("strands") on a few threads.
//
// A strand's work runs in order, on any thread of its pool, never on two at once. A strand that waits for an event
// holds no thread: it is parked with the event and put back into the pool's queue when the event fires.
//
// Invariants:
//   1. a strand is in the pool's queue, on a thread, or parked with one event, and in one of them only, exactly while
//      `scheduled_` is true; work is added without a wake-up then. A strand that is not has work only while it is held;
//   2. an event fires once, when the work before it on its strand is done;
//   3. a thread sleeps only after it saw the pool's queue empty under the pool's lock;
//   4. at most one thread that is not the pool's runs a strand at a time, for one turn: of the threads of a server that
//      lend themselves, all but one stay free for other calls.
//
// Thread safety: every class here may be used by any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kernels/backend.h"

namespace stoker::kernels::cpu {

class Strand;

// Runs strands. The destructor waits for its threads; strands must be idle by then.
class StrandPool {
 public:
  explicit StrandPool(int threads);
  ~StrandPool();
  StrandPool(const StrandPool&) = delete;
  StrandPool& operator=(const StrandPool&) = delete;

  // Puts a strand at the end of the queue.
  void Submit(std::shared_ptr<Strand> strand);
  // Runs one turn of the strand on the calling thread, or submits it where another caller is lending its thread.
  void RunHereOrSubmit(std::shared_ptr<Strand> strand);

 private:
  void RunThread();
  // Watches for work without sleeping, for a short time.
  void Spin() const;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Strand>> ready_;  // guarded by mutex_
  int sleeping_ = 0;                           // guarded by mutex_
  bool spinning_ = false;                      // guarded by mutex_: one thread at most spins
  bool stopping_ = false;                      // guarded by mutex_
  std::atomic<bool> lent_ = false;             // a caller's thread runs a strand
  std::atomic<int> pending_ = 0;               // ready_.size() plus one when stopping, for the thread that spins
  std::vector<std::thread> threads_;
};

// A point in a strand's work.
class StrandEvent : public Event {
 public:
  bool Done() const override { return done_.load(std::memory_order_acquire); }
  void Fire();
  // Parks the strand until the event fires. False where it has fired already: the strand goes on.
  bool Park(std::shared_ptr<Strand> strand);

 private:
  std::atomic<bool> done_ = false;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Strand>> parked_;  // guarded by mutex_
};

class Strand : public std::enable_shared_from_this<Strand> {
 public:
  using Work = absl::AnyInvocable<absl::Status() &&>;

  // `pool` must outlive the strand's work.
  explicit Strand(StrandPool* pool) : pool_(pool) {}

  // Whether a strand goes on after a piece of work, or lets the others of its pool have their turn first.
  enum class Then : uint8_t { kGoOn, kLetOthers };

  // Enqueues work. The first error since the last Notify is what the next Notify tells.
  void Run(Work work, Then then = Then::kGoOn);
  void Notify(absl::AnyInvocable<void(absl::Status) &&> done);
  std::shared_ptr<Event> Record();
  void Wait(std::shared_ptr<Event> event);
  // Work that is enqueued between the two waits for Release, unless the strand is running already. Release may run a
  // turn of it on the calling thread.
  void Hold();
  void Release();

  StrandPool* pool() const { return pool_; }

  // Blocks until all work is done.
  void Drain();

 private:
  friend class StrandPool;

  struct Item {
    Work work;                    // or, where empty,
    std::shared_ptr<Event> wait;  // an event to wait for
    Then then = Then::kGoOn;
  };

  void Enqueue(Item item);
  // Runs work on the calling thread until none is left, the strand is parked or its turn is over: behind kTurnItems
  // pieces, or one that lets others.
  void RunTurn();

  StrandPool* const pool_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Item> items_;  // guarded by mutex_
  bool scheduled_ = false;  // guarded by mutex_
  int holds_ = 0;           // guarded by mutex_
  absl::Status error_;      // used by the thread that runs the strand
};

}  // namespace stoker::kernels::cpu
