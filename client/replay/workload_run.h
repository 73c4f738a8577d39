// Workload files: made from a model, and driven through a daemon.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/replay/engine.h"
#include "client/replay/options.h"
#include "client/replay/rank_report.h"
#include "client/replay/workload_file.h"

namespace stoker::replay {

// Selects the entries of options.rows sequences in options.steps steps. The newest token never occurs. Errors as
// ValidateWorkloadHeader.
absl::StatusOr<Workload> MakeWorkload(const Options& options);

// The plan of a drive: one request for each row of the workload, its rows private, and the model's figures taken from
// the file.
ReplayPlan WorkloadPlan(const Options& options, const Workload& workload);

// Opens the workload's sequences with all their rows stored, does one step of all rows for each of the workload's,
// checks every row, and writes the slots and misses to options.dump_slots where that is not empty.
absl::Status DriveWorkload(const ReplayPlan& plan, const Workload& workload, RankReport* report);

}  // namespace stoker::replay
