#include "kernels/cuda/completions.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>
#include <vector>

namespace stoker::kernels::cuda {
namespace {

// Queries without a pause after something was added or has happened, then pauses up to kLongestPause.
constexpr int kEagerRounds = 200;
constexpr std::chrono::microseconds kShortPause(5);
constexpr std::chrono::microseconds kLongestPause(200);

}  // namespace

Completions::Completions(int device, DeviceHealth* health)
    : device_(device), health_(health), thread_([this] { Run(); }) {}

Completions::~Completions() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  added_.notify_one();
  thread_.join();
}

void Completions::Add(cudaStream_t stream, EventHandle event, absl::AnyInvocable<void(absl::Status) &&> done) {
  {
    const std::lock_guard lock(mutex_);
    incoming_.push_back({stream, std::move(event), std::move(done), absl::OkStatus()});
  }
  added_.notify_one();
}

void Completions::Fail(absl::Status error, absl::AnyInvocable<void(absl::Status) &&> done) {
  {
    const std::lock_guard lock(mutex_);
    incoming_.push_back({nullptr, EventHandle(), std::move(done), std::move(error)});
  }
  added_.notify_one();
}

void Completions::Run() {
  const CurrentDevice current(device_);
  std::deque<Waiting> waiting;  // of several streams: in the order of Add, which for one stream is its own
  // Those whose oldest event has not happened in this round: each query is a call into the driver, and an armed session
  // that is idle has two that do not happen.
  std::vector<cudaStream_t> busy;
  int idle_rounds = 0;
  std::chrono::microseconds pause = kShortPause;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (waiting.empty()) added_.wait(lock, [this] { return stopping_ || !incoming_.empty(); });
      if (waiting.empty() && incoming_.empty()) return;  // stopping
      if (!incoming_.empty()) idle_rounds = 0;
      std::move(incoming_.begin(), incoming_.end(), std::back_inserter(waiting));
      incoming_.clear();
    }
    busy.clear();
    for (auto it = waiting.begin(); it != waiting.end();) {
      absl::Status status = std::move(it->error);
      if (it->event.get() != nullptr) {
        if (std::find(busy.begin(), busy.end(), it->stream) != busy.end()) {
          ++it;
          continue;
        }
        const cudaError_t state = cudaEventQuery(it->event.get());
        if (state == cudaErrorNotReady) {
          busy.push_back(it->stream);
          ++it;
          continue;
        }
        status = health_->Check(state, "work on the device");
      }
      absl::AnyInvocable<void(absl::Status)&&> done = std::move(it->done);
      it = waiting.erase(it);
      std::move(done)(std::move(status));
      idle_rounds = 0;
    }
    if (waiting.empty()) continue;
    if (++idle_rounds < kEagerRounds) {
      pause = kShortPause;
      continue;
    }
    std::unique_lock lock(mutex_);
    added_.wait_for(lock, pause, [this] { return stopping_ || !incoming_.empty(); });
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace stoker::kernels::cuda
