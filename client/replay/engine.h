// The mock engine: what each rank process does with its share of the requests.
//
// Thread safety: each function belongs to the one thread of its process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/replay/engine_session.h"
#include "client/replay/options.h"
#include "client/replay/rank_link.h"
#include "client/replay/rank_report.h"
#include "client/replay/trace.h"

namespace stoker::replay {

// What the processes of one replay share.
struct ReplayPlan {
  Options options;
  std::vector<Request> requests;
  std::string address;
  // Begins the names of sessions and sequences, so that two replays through one daemon do not meet.
  std::string run_id;
  uint32_t max_sequence_rows = 1;
  uint32_t pool_blocks = 1;  // blocks of options.block_rows rows
  // What the progress is measured in.
  Counter RankReport::*progress = &RankReport::requests;
  const char* progress_unit = "requests";
  uint64_t progress_all = 0;
};

// Rank 0: takes requests `engine`, `engine + engines`, ... in order, up to options.concurrency at a time; admits,
// stores, decodes and releases them, and has `followers` do the same.
absl::Status RunEngine(const ReplayPlan& plan, uint32_t engine, FollowerLinks followers, RankReport* report);

// Any other rank: does what rank 0 says, without storing rows.
absl::Status RunFollower(const ReplayPlan& plan, uint32_t engine, uint32_t rank, LeaderLink leader, RankReport* report);

// --prefix-only: admits, stores and releases the requests one after the other.
absl::Status RunPrefixOnly(const ReplayPlan& plan, RankReport* report);

}  // namespace stoker::replay
