// Follows the making of pools for the log: when a line is due and what it says, and how long each phase took.
//
// Thread safety: any thread.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/engine.h"

namespace stoker::server {

class PoolMeter {
 public:
  struct Line {
    absl::string_view phase;  // "fault" or "pin"
    int64_t bytes = 0;
    int64_t total_bytes = 0;
    double percent = 0;
    double gb_per_second = 0;  // of the phase so far
  };
  struct Summary {
    double fault_seconds = 0;
    double pin_seconds = 0;
    std::string memory;  // empty: the pool was not populated
    std::string reason;
  };

  // At most one line a pool in every `period`.
  PoolMeter(std::function<absl::Time()> now, absl::Duration period) : now_(std::move(now)), period_(period) {}

  // What is to be logged now, if anything.
  std::optional<Line> Observe(const std::string& pool, const core::PoolProgress& progress);
  // Forgets the pool.
  Summary Finish(const std::string& pool);

 private:
  struct Pool {
    absl::Time phase_begin;
    absl::Time last_line;
    Summary summary;
  };

  const std::function<absl::Time()> now_;
  const absl::Duration period_;
  absl::Mutex mutex_;
  std::map<std::string, Pool> pools_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stoker::server
