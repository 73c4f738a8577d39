#include "kernels/cpu/doorbell.h"

#include <atomic>
#include <iterator>
#include <utility>

#include "kernels/cpu/client_memory.h"

namespace stoker::kernels::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// The poller looks without a pause for the first of these times after something came, then with the short pause, and
// after kIdleAfter with the long one. From a request to its doorbell's ring, p50, on 2 vCPUs that others used as well:
// 4 us where the stream waits just then, 8 us with 300 us between steps, 14 us with 3 ms, 270 us with 30 ms. A stream
// that waits for nothing costs 3 % of one of them.
constexpr std::chrono::microseconds kSpinTime(20);
constexpr std::chrono::microseconds kShortPause(50);
constexpr std::chrono::milliseconds kIdleAfter(10);
constexpr std::chrono::microseconds kLongPause(500);

// When a wait with this limit, which begins now, is over.
Clock::time_point EndOf(uint64_t limit_ns) {
  const Clock::time_point now = Clock::now();
  const auto longest = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::time_point::max() - now);
  return limit_ns > 0 && limit_ns < static_cast<uint64_t>(longest.count())
             ? now + std::chrono::nanoseconds(static_cast<int64_t>(limit_ns))
             : Clock::time_point::max();
}

bool Ended(const PlaneState& state) { return Load(&state.outcome) != static_cast<uint32_t>(PlaneOutcome::kRunning); }

}  // namespace

void DoorbellWait::Begin() {
  PlaneState& state = *args_.state;
  if (Ended(state)) return;
  step_ = Load(&state.step);
  if (args_.begins_step) {
    Store(&state.step, ++step_);
  } else {
    end_ = EndOf(args_.limit_ns);
  }
}

bool DoorbellWait::Over() {
  if (Ended(*args_.state)) return true;
  // Before the request is read: one that came within the limit is found, however late this looks.
  const bool late = end_ != Clock::time_point::max() && Clock::now() >= end_;
  const uint64_t request = LoadAcquire(args_.request);
  if (request == step_) return true;
  if (LoadAcquire(args_.abort) != 0) {
    End(PlaneOutcome::kAborted);
  } else if (request != step_ - 1) {
    End(PlaneOutcome::kBadStep);
  } else if (late) {
    End(PlaneOutcome::kTimedOut);
  } else {
    return false;
  }
  return true;
}

void DoorbellWait::End(PlaneOutcome outcome) { Store(&args_.state->outcome, static_cast<uint32_t>(outcome)); }

void QuietWait::Begin() {
  accepted_ = LoadInTurn(&args_.state->accepted);
  end_ = EndOf(args_.limit_ns);
}

bool QuietWait::Over() {
  if (LoadAcquire(&args_.state->finished) >= accepted_) return true;
  if (args_.abort != nullptr && LoadAcquire(args_.abort) != 0) return true;
  return end_ != Clock::time_point::max() && Clock::now() >= end_;
}

bool OrderWait::Over() {
  const bool came = HasCome(LoadAcquire(args_.word), args_.number);
  // Behind the word: who has released it has set this before.
  const bool aborted = LoadAcquire(args_.abort) != 0;
  if (aborted) Store(args_.aborted, uint32_t{1});
  return came || aborted;
}

void SignalOrder(const SignalOrderArgs& args) {
  if (args.aborted != nullptr && Load(args.aborted) != 0) return;
  const std::atomic_ref<uint64_t> word(*args.word);
  uint64_t now = word.load(std::memory_order_relaxed);
  while (now < args.number && !word.compare_exchange_weak(now, args.number, std::memory_order_release)) {
  }
}

void ReleaseOrder(uint64_t* word) { StoreRelease(word, kReleasedOrder); }

void RingDoorbell(const RingDoorbellArgs& args) {
  if (!Ended(*args.state)) StoreRelease(args.done, Load(&args.state->step));
}

DoorbellPoller::~DoorbellPoller() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void DoorbellPoller::Await(absl::AnyInvocable<bool()> over, std::shared_ptr<StrandEvent> event) {
  {
    const std::lock_guard lock(mutex_);
    incoming_.push_back({std::move(over), std::move(event)});
    if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  }
  changed_.notify_one();
}

void DoorbellPoller::Run() {
  std::vector<Waiting> waiting;
  Clock::time_point came = Clock::now();
  std::unique_lock lock(mutex_);
  while (true) {
    if (!incoming_.empty()) {
      std::move(incoming_.begin(), incoming_.end(), std::back_inserter(waiting));
      incoming_.clear();
      came = Clock::now();
    }
    if (waiting.empty()) {
      if (stopping_) return;
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    const size_t before = waiting.size();
    for (size_t i = 0; i < waiting.size();) {
      if (!waiting[i].over()) {
        ++i;
        continue;
      }
      waiting[i].event->Fire();
      std::swap(waiting[i], waiting.back());
      waiting.pop_back();
    }
    const Clock::time_point now = Clock::now();
    if (waiting.size() < before) came = now;
    const Clock::duration idle = now - came;
    if (idle < kSpinTime) std::this_thread::yield();
    lock.lock();
    if (idle >= kSpinTime && !waiting.empty() && incoming_.empty()) {
      changed_.wait_for(lock, idle < kIdleAfter ? kShortPause : kLongPause);
    }
  }
}

}  // namespace stoker::kernels::cpu
