#include "server/core/background.h"

#include <utility>

#include "absl/time/clock.h"

namespace stoker::core {

Background::Background(absl::Duration period, absl::AnyInvocable<void()> tick)
    : period_(period), tick_(std::move(tick)), thread_([this] { Run(); }) {}

Background::~Background() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void Background::Post(absl::AnyInvocable<void() &&> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void Background::Run() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !tasks_.empty(); };
  absl::Time next_tick = absl::Now() + period_;
  for (;;) {
    absl::AnyInvocable<void() &&> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithDeadline(absl::Condition(&ready), next_tick);
      if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      } else if (stopping_) {
        return;
      }
    }
    if (task) std::move(task)();
    if (absl::Now() >= next_tick) {
      tick_();
      next_tick = absl::Now() + period_;
    }
  }
}

}  // namespace stoker::core
