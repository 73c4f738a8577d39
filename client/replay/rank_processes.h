// The processes of a replay: one for each rank of each engine, forked from this one.
//
// They are forked and not executed anew because they need the requests that this process has read, and share memory for
// what they report. gRPC must not be in use before the fork; this process uses it only when they have ended.
//
// Thread safety: belongs to one thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/engine.h"
#include "client/replay/rank_report.h"

namespace stoker::replay {

class RankProcesses {
 public:
  // What a process does. Rank 0 has the links to its followers, the others the one to rank 0.
  using Body = std::function<absl::Status(uint32_t engine, uint32_t rank, FollowerLinks followers,
                                          std::optional<LeaderLink> leader, RankReport* report)>;

  static absl::StatusOr<std::unique_ptr<RankProcesses>> Start(uint32_t engines, uint32_t ranks, const Body& body);
  // Kills and reaps what is left.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Looks which processes have ended. When one has failed, ends the others. Returns whether any is left.
  bool Poll();
  // Sends SIGTERM to all that are left.
  void Terminate();
  // The failure that came first, or OK.
  const absl::Status& status() const { return status_; }

  size_t size() const { return processes_.size(); }
  const RankReport& report(size_t i) const { return *processes_[i].report; }

 private:
  struct Process {
    pid_t pid = -1;  // -1: has ended
    std::string name;
    RankReport* report = nullptr;
  };

  RankProcesses() = default;

  std::vector<Process> processes_;
  void* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  absl::Status status_;
};

}  // namespace stoker::replay
