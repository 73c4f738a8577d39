#include "server/pool_meter.h"

#include <utility>

namespace stoker::server {

using Phase = core::PoolProgress::Phase;

std::optional<PoolMeter::Line> PoolMeter::Observe(const std::string& pool, const core::PoolProgress& progress) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  const auto [it, inserted] = pools_.try_emplace(pool);
  Pool& p = it->second;
  if (inserted) p.last_line = now;
  if (progress.done_bytes == 0) {
    p.phase_begin = now;
    // A kind of memory that could not be had took no part in the pool that was made.
    if (progress.phase == Phase::kFault) p.summary = {};
    p.summary.memory = std::string(progress.memory);
    p.summary.reason = std::string(progress.reason);
  }
  const double seconds = absl::ToDoubleSeconds(now - p.phase_begin);
  (progress.phase == Phase::kPin ? p.summary.pin_seconds : p.summary.fault_seconds) = seconds;
  if (now - p.last_line < period_) return std::nullopt;
  p.last_line = now;
  Line line;
  line.phase = progress.phase == Phase::kPin ? "pin" : "fault";
  line.bytes = progress.done_bytes;
  line.total_bytes = progress.total_bytes;
  line.percent = 100.0 * static_cast<double>(progress.done_bytes) / static_cast<double>(progress.total_bytes);
  if (seconds > 0) line.gb_per_second = static_cast<double>(progress.done_bytes) / 1e9 / seconds;
  return line;
}

PoolMeter::Summary PoolMeter::Finish(const std::string& pool) {
  absl::MutexLock lock(&mutex_);
  const auto node = pools_.extract(pool);
  return node.empty() ? Summary() : std::move(node.mapped().summary);
}

}  // namespace stoker::server
