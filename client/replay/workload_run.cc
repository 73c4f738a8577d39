#include "client/replay/workload_run.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/replay/engine_session.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {
namespace {

// Steps one workload through an open session.
class WorkloadDriver {
 public:
  WorkloadDriver(const Workload& workload, EngineSession* session, RankReport* report)
      : workload_(workload), session_(*session), report_(*report) {}

  absl::Status OpenSequences(const std::vector<Request>& requests);
  absl::Status Run();
  const SlotDump& dump() const { return dump_; }

 private:
  absl::Status Step(uint32_t step);

  const Workload& workload_;
  EngineSession& session_;
  RankReport& report_;
  std::vector<OpenSequence> sequences_;
  std::vector<BatchRow> batch_;
  v1::StepRequest request_;
  v1::StepResponse response_;
  SlotDump dump_;
};

absl::Status WorkloadDriver::OpenSequences(const std::vector<Request>& requests) {
  for (const Request& request : requests) {
    auto sequence = session_.Admit(request, "", workload_.context);
    if (!sequence.ok()) return sequence.status();
    if (absl::Status status = session_.Store(*sequence, 0, workload_.context); !status.ok()) return status;
    report_.requests.Add(1);
    report_.input_rows.Add(workload_.context);
    report_.unique_rows.Add(workload_.context);
    sequences_.push_back(*sequence);
  }
  return absl::OkStatus();
}

absl::Status WorkloadDriver::Run() {
  dump_ = {.steps = workload_.steps, .rows = workload_.rows, .top_k = workload_.top_k, .hot_rows = workload_.hot_rows};
  dump_.slots.reserve(workload_.positions.size());
  dump_.misses.reserve(size_t{workload_.steps} * workload_.rows);

  for (const OpenSequence& sequence : sequences_) {
    v1::StepRow* row = request_.add_rows();
    row->set_sequence_id(sequence.id);
    row->set_length(workload_.context);
    batch_.push_back({&sequence, workload_.context});
  }
  session_.BeginStep(&request_);
  for (uint32_t step = 0; step < workload_.steps; ++step) {
    if (absl::Status status = Step(step); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status WorkloadDriver::Step(uint32_t step) {
  for (uint32_t r = 0; r < workload_.rows; ++r) {
    const absl::Span<const int32_t> entries = workload_.Entries(step, r);
    std::copy(entries.begin(), entries.end(), session_.Entries(&request_, 0, r).begin());
  }
  if (absl::Status status = session_.Step(batch_, &request_, &response_); !status.ok()) return status;
  report_.steps.Add(1);
  report_.gathered_bytes.Add(response_.gathered_bytes());
  if (absl::Status status = session_.CheckStep(batch_, &request_, response_); !status.ok()) return status;
  for (uint32_t r = 0; r < workload_.rows; ++r) {
    const v1::LookupCounts& counts = response_.groups(0).counts(static_cast<int>(r));
    report_.hot.Add(counts.hot());
    report_.newest.Add(counts.newest());
    report_.miss.Add(counts.miss());
    report_.duplicate.Add(counts.duplicate());
    report_.invalid.Add(counts.invalid());
    const int64_t region_begin = int64_t{sequences_[r].state_row} * session_.region_rows();
    for (const int32_t hot_row : session_.HotRows(response_, 0, r)) {
      dump_.slots.push_back(static_cast<int16_t>(hot_row < 0 ? -1 : hot_row - region_begin));
    }
    dump_.misses.push_back(static_cast<int32_t>(counts.miss()));
  }
  return session_.FinishStep(request_);
}

}  // namespace

absl::StatusOr<Workload> MakeWorkload(const Options& options) {
  Workload workload;
  workload.steps = options.steps;
  workload.rows = options.rows;
  workload.top_k = options.top_k;
  workload.context = options.context;
  workload.hot_rows = options.hot_rows;
  workload.row_bytes = options.row_bytes;
  if (absl::Status status = ValidateWorkloadHeader(workload); !status.ok()) return status;
  const size_t step_entries = size_t{workload.rows} * workload.top_k;
  workload.positions.resize(workload.steps * step_entries);
  // Row by row, so that one model at a time is in the caches.
  for (uint32_t row = 0; row < workload.rows; ++row) {
    const auto model = MakeWorkloadModel(options.model(), workload.top_k, workload.context - 1,
                                         Mix64(options.seed) + row, options.noise());
    for (uint32_t step = 0; step < workload.steps; ++step) {
      model->Select(
          workload.context - 1,
          absl::MakeSpan(&workload.positions[step * step_entries + size_t{row} * workload.top_k], workload.top_k));
    }
  }
  return workload;
}

ReplayPlan WorkloadPlan(const Options& options, const Workload& workload) {
  ReplayPlan plan;
  plan.options = options;
  plan.options.layers = 1;
  plan.options.groups = 1;
  plan.options.row_layout = "linear";
  plan.options.row_bytes = workload.row_bytes;
  plan.options.v_row_bytes = 0;
  plan.options.top_k = workload.top_k;
  plan.options.hot_rows = workload.hot_rows;
  for (uint32_t row = 0; row < workload.rows; ++row) {
    Request request;
    request.number = row;
    request.input_rows = workload.context;
    plan.requests.push_back(std::move(request));
  }
  plan.max_sequence_rows = workload.context;
  const uint32_t blocks = (workload.context + options.block_rows - 1) / options.block_rows;
  plan.pool_blocks = blocks * workload.rows;
  plan.progress = &RankReport::steps;
  plan.progress_unit = "steps";
  plan.progress_all = workload.steps;
  return plan;
}

absl::Status DriveWorkload(const ReplayPlan& plan, const Workload& workload, RankReport* report) {
  SessionNeeds needs;
  needs.address = plan.address;
  needs.name = absl::StrCat(plan.run_id, ".workload");
  needs.state_rows = workload.rows;
  needs.batch_rows = workload.rows;
  needs.max_sequence_rows = workload.context;
  needs.pool_blocks = plan.pool_blocks;
  auto session = EngineSession::Open(plan.options, needs, report);
  if (!session.ok()) return session.status();
  WorkloadDriver driver(workload, session->get(), report);
  if (absl::Status status = driver.OpenSequences(plan.requests); !status.ok()) return status;
  if (absl::Status status = driver.Run(); !status.ok()) return status;
  return plan.options.dump_slots.empty() ? absl::OkStatus() : WriteSlotDump(driver.dump(), plan.options.dump_slots);
}

}  // namespace stoker::replay
