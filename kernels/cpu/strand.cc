#include "kernels/cpu/strand.h"

#include <chrono>
#include <utility>

namespace stoker::kernels::cpu {
namespace {

// How long a thread that ran out of work watches for more before it sleeps. The operations of a step are enqueued
// within a few microseconds of each other, and the time bridges the gaps between them. Four operations a microsecond
// apart and a Notify, after 500 us of idleness on a machine of two cores, from the first call to the woken caller: 10
// us with 20 us, 13 to 20 us without, and no better with 50 us.
constexpr std::chrono::microseconds kSpinTime(20);

// Operations that a strand runs before others have their turn.
constexpr int kTurnItems = 32;

}  // namespace

StrandPool::StrandPool(int threads) {
  threads_.reserve(threads);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { RunThread(); });
}

StrandPool::~StrandPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    ++pending_;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void StrandPool::Submit(std::shared_ptr<Strand> strand) {
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    ready_.push_back(std::move(strand));
    ++pending_;
    // The thread that spins takes the first strand without being woken.
    wake = sleeping_ > 0 && ready_.size() > (spinning_ ? 1u : 0u);
  }
  if (wake) wake_.notify_one();
}

void StrandPool::RunHereOrSubmit(std::shared_ptr<Strand> strand) {
  if (lent_.exchange(true, std::memory_order_acquire)) {
    Submit(std::move(strand));
    return;
  }
  strand->RunTurn();
  lent_.store(false, std::memory_order_release);
}

void StrandPool::Spin() const {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (pending_.load(std::memory_order_relaxed) == 0 && std::chrono::steady_clock::now() < end) {
    // The woken thread may have displaced its caller, which has more to enqueue: 35 us in the same test with a pause
    // here.
    std::this_thread::yield();
  }
}

void StrandPool::RunThread() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (!ready_.empty()) {
      const std::shared_ptr<Strand> strand = std::move(ready_.front());
      ready_.pop_front();
      --pending_;
      lock.unlock();
      strand->RunTurn();
      lock.lock();
    } else if (stopping_) {
      return;
    } else if (!spinning_) {
      spinning_ = true;
      lock.unlock();
      Spin();
      lock.lock();
      spinning_ = false;
      if (!ready_.empty() || stopping_) continue;
      ++sleeping_;
      wake_.wait(lock);
      --sleeping_;
    } else {
      ++sleeping_;
      wake_.wait(lock);
      --sleeping_;
    }
  }
}

void StrandEvent::Fire() {
  std::vector<std::shared_ptr<Strand>> parked;
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    parked.swap(parked_);
  }
  for (std::shared_ptr<Strand>& strand : parked) {
    StrandPool* const pool = strand->pool();
    pool->Submit(std::move(strand));
  }
}

bool StrandEvent::Park(std::shared_ptr<Strand> strand) {
  const std::lock_guard lock(mutex_);
  if (Done()) return false;
  parked_.push_back(std::move(strand));
  return true;
}

void Strand::Enqueue(Item item) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    if (holds_ > 0 || std::exchange(scheduled_, true)) return;
  }
  pool_->Submit(shared_from_this());
}

void Strand::Hold() {
  const std::lock_guard lock(mutex_);
  ++holds_;
}

void Strand::Release() {
  {
    const std::lock_guard lock(mutex_);
    --holds_;
    if (items_.empty() || std::exchange(scheduled_, true)) return;
  }
  pool_->RunHereOrSubmit(shared_from_this());
}

void Strand::Run(Work work, Then then) { Enqueue({.work = std::move(work), .wait = nullptr, .then = then}); }

void Strand::Notify(absl::AnyInvocable<void(absl::Status) &&> done) {
  Run([this, done = std::move(done)]() mutable {
    std::move(done)(std::exchange(error_, absl::OkStatus()));
    return absl::OkStatus();
  });
}

std::shared_ptr<Event> Strand::Record() {
  auto event = std::make_shared<StrandEvent>();
  {
    const std::lock_guard lock(mutex_);
    if (!scheduled_ && items_.empty()) {
      event->Fire();  // nothing is before it
      return event;
    }
  }
  Run([event] {
    event->Fire();
    return absl::OkStatus();
  });
  return event;
}

void Strand::Wait(std::shared_ptr<Event> event) {
  if (event == nullptr || event->Done()) return;
  Enqueue({.work = nullptr, .wait = std::move(event), .then = Then::kGoOn});
}

void Strand::Drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return !scheduled_ && items_.empty(); });
}

void Strand::RunTurn() {
  for (int i = 0; i < kTurnItems; ++i) {
    Item item;
    {
      const std::lock_guard lock(mutex_);
      if (items_.empty()) {
        scheduled_ = false;
        idle_.notify_all();
        return;
      }
      item = std::move(items_.front());
      items_.pop_front();
    }
    if (item.work != nullptr) {
      absl::Status status = std::move(item.work)();
      if (error_.ok()) error_ = std::move(status);
      if (item.then == Then::kLetOthers) break;
    } else if (auto* event = dynamic_cast<StrandEvent*>(item.wait.get()); event != nullptr) {
      // Once parked, the strand may run on another thread: nothing of it is touched here any more.
      if (event->Park(shared_from_this())) return;
    } else if (!item.wait->Done()) {
      // Another backend's event cannot call back; it is looked at again after the others had their turn.
      const std::lock_guard lock(mutex_);
      items_.push_front(std::move(item));
      break;
    }
  }
  pool_->Submit(shared_from_this());
}

}  // namespace stoker::kernels::cpu
