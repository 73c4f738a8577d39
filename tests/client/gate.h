// Holds a fake daemon's calls back until the test opens it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"

namespace stoker::client {

// Thread safety: any thread. The hook may outlive the gate: a held call returns some time after Open.
class Gate {
 public:
  ~Gate() { Open(); }

  // For FakeDaemon::SetHook: calls of that method wait.
  std::function<absl::Status(const std::string&)> Hook(std::string method) const {
    return [state = state_, method = std::move(method)](const std::string& called) {
      if (called != method) return absl::OkStatus();
      std::unique_lock lock(state->mutex);
      ++state->callers;
      state->changed.notify_all();
      state->changed.wait(lock, [&] { return state->open; });
      return absl::OkStatus();
    };
  }

  // False where none came within a time in which it must have.
  bool AwaitCaller() const {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, std::chrono::seconds(20), [&] { return state_->callers > 0; });
  }

  void Open() const {
    const std::lock_guard lock(state_->mutex);
    state_->open = true;
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int callers = 0;
    bool open = false;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace stoker::client
