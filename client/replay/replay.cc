#include "client/replay/replay.h"

#include <grpc/grpc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/replay/daemon_process.h"
#include "client/replay/engine.h"
#include "client/replay/progress.h"
#include "client/replay/rank_processes.h"
#include "client/replay/report.h"
#include "client/replay/trace_generator.h"
#include "client/replay/workload_run.h"

namespace stoker::replay {
namespace {

constexpr uint32_t kGeneratedRequests = 100;
constexpr uint32_t kGeneratedIntervalMs = 200;
constexpr absl::Duration kPoll = absl::Milliseconds(20);
// A daemon notices within a second that a session has gone.
constexpr absl::Duration kDeletePoolTimeout = absl::Seconds(5);

volatile sig_atomic_t interrupted = 0;

void OnInterrupt(int) { interrupted = 1; }

int Fail(int exit_status, const absl::Status& status) {
  std::fprintf(stderr, "stoker-replay: %s\n", std::string(status.message()).c_str());
  return exit_status;
}

std::vector<Request> Generate(const Options& options) {
  return GenerateTrace({.requests = options.requests == 0 ? kGeneratedRequests : options.requests,
                        .input_rows = options.input_rows,
                        .output_rows = options.output_rows,
                        .interval_ms = kGeneratedIntervalMs,
                        .seed = options.seed});
}

// Blocks with which nothing is ever evicted: those of every prefix block once, and, for as many sequences as may be
// open at a time, those of the largest private part, with one more for a partial block that is copied before it is
// written.
uint64_t BlocksForEverything(const Options& options, const std::vector<Request>& requests) {
  const auto blocks = [&](uint64_t rows) { return (rows + options.block_rows - 1) / options.block_rows; };
  absl::flat_hash_set<uint64_t> seen;
  uint64_t shared = 0, largest = 0;
  for (const Request& request : requests) {
    for (size_t i = 0; i < request.hash_ids.size(); ++i) {
      if (seen.insert(request.hash_ids[i]).second) {
        shared += blocks(std::min<uint64_t>(kPrefixBlockRows, request.input_rows - i * kPrefixBlockRows));
      }
    }
    const uint64_t whole = std::min<uint64_t>(request.hash_ids.size(), request.input_rows / kPrefixBlockRows);
    largest = std::max(largest, blocks(request.total_rows() - whole * kPrefixBlockRows) + 1);
  }
  const uint64_t open = std::min<uint64_t>(uint64_t{options.engines} * options.concurrency, requests.size());
  return shared + open * largest;
}

absl::StatusOr<ReplayPlan> MakePlan(const Options& options, std::vector<Request> requests) {
  ReplayPlan plan;
  plan.options = options;
  plan.requests = std::move(requests);
  for (const Request& request : plan.requests) {
    plan.max_sequence_rows = std::max(plan.max_sequence_rows, request.total_rows());
  }
  const uint64_t blocks = options.pool_blocks == 0
                              ? BlocksForEverything(options, plan.requests)
                              : uint64_t{options.pool_blocks} * kPrefixBlockRows / options.block_rows;
  const uint64_t limit = (uint64_t{1} << 31) / options.block_rows - 1;
  if (blocks > limit) {
    return absl::InvalidArgumentError(absl::StrCat("the requests need ", blocks, " blocks of ", options.block_rows,
                                                   " rows; a pool has at most ", limit, ": give --pool-blocks"));
  }
  plan.pool_blocks = static_cast<uint32_t>(blocks);
  plan.progress_all = plan.requests.size();
  return plan;
}

// Keeps gRPC running until the process ends. gRPC 1.51 may otherwise wait up to ten seconds when its last channel is
// destroyed, for a thread that polls with that time limit.
void KeepGrpc() { grpc_init(); }

// Deletes the pool of a daemon that goes on running. The sessions may take a moment to end.
absl::Status DeletePool(const ReplayPlan& plan) {
  KeepGrpc();
  auto client = client::Client::Connect(plan.address);
  if (!client.ok()) return client.status();
  v1::DeletePoolRequest request;
  request.set_name(plan.options.pool);
  const absl::Time deadline = absl::Now() + kDeletePoolTimeout;
  for (;;) {
    const absl::Status status = client->DeletePool(request).status();
    if (!absl::IsFailedPrecondition(status) || absl::Now() > deadline) return status;
    absl::SleepFor(kPoll);
  }
}

// Runs `body` in the processes of the plan and shows how far they are. Fills in the result, also after a failure.
absl::Status RunProcesses(const ReplayPlan& plan, const RankProcesses::Body& body, ReplayResult* result) {
  const absl::Time start = absl::Now();
  auto processes = RankProcesses::Start(plan.options.engines, plan.options.ranks, body);
  if (!processes.ok()) return processes.status();
  RankProcesses& ranks = **processes;

  const auto figures = [&] {
    ProgressFigures sum;
    sum.all = plan.progress_all;
    sum.unit = plan.progress_unit;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const RankReport& report = ranks.report(i);
      sum.done += (report.*plan.progress).get();
      sum.input_rows += report.input_rows.get();
      sum.output_rows += report.output_rows.get();
      sum.moved_bytes += report.stored_bytes.get() + report.gathered_bytes.get();
    }
    return sum;
  };
  Progress progress(Progress::ChooseStyle(plan.options.progress), start);
  while (ranks.Poll()) {
    if (interrupted != 0) ranks.Terminate();
    progress.Show(figures(), absl::Now());
    absl::SleepFor(kPoll);
  }
  progress.Finish(figures(), absl::Now());
  result->seconds = absl::ToDoubleSeconds(absl::Now() - start);
  for (size_t i = 0; i < ranks.size(); ++i) AddReport(ranks.report(i), &result->totals);
  return ranks.status();
}

// What a process of the plan does, once the daemon's address is known.
using PlanBody =
    std::function<absl::Status(const ReplayPlan& plan, uint32_t engine, uint32_t rank, FollowerLinks followers,
                               std::optional<LeaderLink> leader, RankReport* report)>;

// What the private daemon must be told to have room for the sessions, and on the right device.
std::vector<std::string> DaemonFlags(const ReplayPlan& plan) {
  constexpr uint64_t kDefaultHotBytes = uint64_t{4} << 30;  // of --max-hot-bytes
  constexpr uint64_t kDefaultArmed = 8, kMostArmed = 16;    // of --max-armed-sessions
  const Options& o = plan.options;
  const uint64_t state_rows = o.action == Options::Action::kReplay       ? o.concurrency
                              : o.action == Options::Action::kPrefixOnly ? 1
                                                                         : plan.requests.size();
  const uint64_t region_rows = (o.hot_rows + o.block_rows - 1) / o.block_rows * o.block_rows + o.block_rows;
  const uint64_t rows = state_rows * region_rows * o.layers * o.row_shape().bytes();
  const uint64_t batch_rows = o.action == Options::Action::kReplay ? o.batch_rows() : state_rows;
  const uint64_t mailbox = batch_rows * o.groups * o.top_k * 2 * sizeof(int32_t);
  // A tenth for padding and the state that goes with the rows.
  const uint64_t sessions = uint64_t{o.engines} * o.ranks;
  const uint64_t bytes = sessions * ((rows + mailbox) / 10 * 11 + 2 * kGpuStagingPieceBytes);
  std::vector<std::string> flags = {absl::StrCat("--device=", o.device)};
  if (sessions > kDefaultArmed) {
    flags.push_back(absl::StrCat("--max-armed-sessions=", std::min(sessions, kMostArmed)));
  }
  if (bytes > kDefaultHotBytes) flags.push_back(absl::StrCat("--max-hot-bytes=", bytes));
  return flags;
}

// Finds or starts the daemon, runs the processes, stops or tidies up the daemon, prints the result.
int RunWithDaemon(ReplayPlan plan, const PlanBody& body) {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);

  std::unique_ptr<DaemonProcess> daemon;
  if (plan.options.server.empty()) {
    auto started = DaemonProcess::Start(plan.options.stokerd, DaemonFlags(plan));
    if (!started.ok()) return Fail(kExitFailed, started.status());
    daemon = *std::move(started);
    plan.address = daemon->address();
    std::fprintf(stderr, "stokerd (process %d) serves on %s\nscrape %s\n", static_cast<int>(daemon->pid()),
                 plan.address.c_str(), daemon->metrics_url().c_str());
  } else {
    plan.address = plan.options.server;
  }
  plan.run_id = absl::StrCat("replay-", getpid(), "-", absl::Hex(absl::ToUnixMicros(absl::Now())));

  ReplayResult result;
  result.row_bytes = uint64_t{plan.options.row_shape().bytes()} * plan.options.layers;
  result.distinct_rows = DistinctRows(plan.requests, !plan.options.prefix_only);
  result.index_space = plan.options.index_space;
  result.workload_model = plan.options.workload_model;
  const absl::Status status = RunProcesses(
      plan,
      [&](uint32_t engine, uint32_t rank, FollowerLinks followers, std::optional<LeaderLink> leader,
          RankReport* report) {
        KeepGrpc();
        return body(plan, engine, rank, std::move(followers), std::move(leader), report);
      },
      &result);

  absl::Status tidied;
  if (daemon != nullptr) {
    tidied = daemon->Stop();
  } else if (result.totals.created_pool) {
    tidied = DeletePool(plan);
  }
  if (interrupted != 0) return kExitInterrupted;

  std::printf("%s", FormatTable(result).c_str());
  std::fflush(stdout);
  int exit_status = 0;
  if (!tidied.ok()) exit_status = Fail(kExitFailed, tidied);
  if (!status.ok()) exit_status = Fail(kExitFailed, status);
  if (result.totals.wrong_rows.get() > 0) exit_status = kExitWrongRows;
  if (plan.options.json) std::printf("%s\n", FormatJson(result).c_str());
  return exit_status;
}

int DriveWorkloadFile(const Options& options) {
  auto workload = ReadWorkload(options.workload);
  if (!workload.ok()) return Fail(kExitUsage, workload.status());
  ReplayPlan plan = WorkloadPlan(options, *workload);
  return RunWithDaemon(std::move(plan),
                       [&](const ReplayPlan& ready, uint32_t, uint32_t, FollowerLinks, std::optional<LeaderLink>,
                           RankReport* report) { return DriveWorkload(ready, *workload, report); });
}

int ReplayRequests(const Options& options) {
  std::vector<Request> requests;
  if (options.trace.empty()) {
    requests = Generate(options);
  } else {
    auto read = ReadTrace(options.trace, options.requests);
    if (!read.ok()) return Fail(kExitUsage, read.status());
    requests = *std::move(read);
  }
  auto plan = MakePlan(options, std::move(requests));
  if (!plan.ok()) return Fail(kExitUsage, plan.status());
  if (options.prefix_only) {
    return RunWithDaemon(*std::move(plan),
                         [](const ReplayPlan& ready, uint32_t, uint32_t, FollowerLinks, std::optional<LeaderLink>,
                            RankReport* report) { return RunPrefixOnly(ready, report); });
  }
  return RunWithDaemon(*std::move(plan),
                       [](const ReplayPlan& ready, uint32_t engine, uint32_t rank, FollowerLinks followers,
                          std::optional<LeaderLink> leader, RankReport* report) {
                         return leader.has_value() ? RunFollower(ready, engine, rank, *std::move(leader), report)
                                                   : RunEngine(ready, engine, std::move(followers), report);
                       });
}

}  // namespace

int Run(const Options& options) {
  switch (options.action) {
    case Options::Action::kHelp:
      std::printf("%s", OptionsHelp().c_str());
      return 0;
    case Options::Action::kVersion:
      std::printf("stoker-replay %s\n", STOKER_VERSION);
      return 0;
    case Options::Action::kWriteTrace: {
      const absl::Status status = WriteTrace(Generate(options), options.write_trace);
      return status.ok() ? 0 : Fail(kExitFailed, status);
    }
    case Options::Action::kWriteWorkload: {
      const auto workload = MakeWorkload(options);
      if (!workload.ok()) return Fail(kExitUsage, workload.status());
      const absl::Status status = WriteWorkload(*workload, options.write_workload);
      return status.ok() ? 0 : Fail(kExitFailed, status);
    }
    case Options::Action::kDriveWorkload:
      return DriveWorkloadFile(options);
    case Options::Action::kReplay:
    case Options::Action::kPrefixOnly:
      return ReplayRequests(options);
  }
  return kExitUsage;
}

}  // namespace stoker::replay
