// The decode step of a session: checks, the pool's bookkeeping, the engine's work.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "server/core/session.h"
#include "server/core/session_follow_up.h"

namespace stoker::core {
namespace {

// Everything that a step needs until it is done. The vectors keep their memory from step to step.
struct StepOperation {
  StepWork work;
  StepResult result;
  std::vector<StepAccess> accesses;
  std::vector<StepGrant> grants;
  std::vector<int> access_of_row;
  // With CallOrder::signal, what the request would hold otherwise.
  std::vector<std::vector<int32_t>> resident_pages;
  std::vector<int32_t> counts;
  std::function<void(const StepResult&)> finished;
};

}  // namespace

absl::Status Session::CheckStepShape(int64_t rows, int64_t top_k, int64_t groups) const {
  if (rows < 1 || rows > spec_.max_batch_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows: ", rows, " given, limits 1 and max_batch_rows ", spec_.max_batch_rows));
  }
  if (top_k < 1 || top_k > spec_.max_top_k) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k: ", top_k, " given, limits 1 and max_top_k ", spec_.max_top_k));
  }
  const int64_t most = static_cast<int64_t>(spec_.groups.size());
  if (groups > most) return absl::InvalidArgumentError(absl::StrCat("groups: ", groups, " given, limit ", most));
  return absl::OkStatus();
}

absl::Status Session::CheckStep(const StepRequest& request) const {
  const int64_t rows = static_cast<int64_t>(request.rows.size());
  if (absl::Status status = CheckStepShape(rows, request.top_k, static_cast<int64_t>(request.groups.size()));
      !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckOrder(request.order); !status.ok()) return status;
  if (request.order.signal && !request.shared) {
    return absl::InvalidArgumentError(
        "source: INLINE given with order.signal, whose reply comes before hot rows are known: allowed is SHARED (2)");
  }
  const int64_t groups = static_cast<int64_t>(spec_.groups.size());
  absl::InlinedVector<bool, 64> seen(groups, false);
  for (const StepGroupRequest& group : request.groups) {
    if (group.group < 0 || group.group >= groups) {
      return absl::InvalidArgumentError(absl::StrCat("group: ", group.group, " given, limit ", groups - 1));
    }
    if (seen[group.group]) return absl::InvalidArgumentError(absl::StrCat("group: ", group.group, " given twice"));
    seen[group.group] = true;
    const int64_t wanted = request.shared ? 0 : rows * request.top_k;
    if (static_cast<int64_t>(group.indices.size()) != wanted) {
      return absl::InvalidArgumentError(absl::StrCat("indices: ", group.indices.size(), " values given for group ",
                                                     group.group, ", rows x top_k need ", wanted));
    }
  }
  const size_t newest_bytes = static_cast<size_t>(BytesPerRow());
  absl::flat_hash_set<SequenceId> earlier;
  for (int64_t begin = 0; begin < rows;) {
    const StepRowRequest& first = request.rows[begin];
    int64_t end = begin + 1;
    while (first.id && end < rows && request.rows[end].id == first.id) ++end;
    if (first.id && !earlier.insert(first.id).second) {
      return absl::InvalidArgumentError(absl::StrCat("rows: sequence ", first.id.value, " is named at row ", begin,
                                                     " again, but not next to its other rows"));
    }
    // Only one newest row has a name there: of the others the engine would read the first one's bytes.
    if (end - begin > 1 && spec_.index_space == IndexSpace::kPoolRow) {
      return absl::InvalidArgumentError(absl::StrCat("rows: ", end - begin, " rows of sequence ", first.id.value,
                                                     " given at row ", begin,
                                                     ", limit 1 in a session with INDEX_SPACE_POOL_ROW"));
    }
    if ((end - begin) * request.top_k > spec_.hot_rows) {
      return absl::InvalidArgumentError(absl::StrCat("top_k: ", end - begin, " rows of one sequence x ", request.top_k,
                                                     " given, limit hot_rows ", spec_.hot_rows));
    }
    for (int64_t row = begin; row < end; ++row) {
      const StepRowRequest& r = request.rows[row];
      if (row > begin && r.length < request.rows[row - 1].length) {
        return absl::InvalidArgumentError(absl::StrCat("length: ", r.length, " given at row ", row, ", below ",
                                                       request.rows[row - 1].length, " of the row before it"));
      }
      if (r.length > spec_.max_sequence_rows) {
        return absl::InvalidArgumentError(absl::StrCat("length: ", r.length, " given at row ", row,
                                                       ", limit max_sequence_rows ", spec_.max_sequence_rows));
      }
      const int64_t newest_limit = std::min<int64_t>(end - begin, pool_->pool.spec().block_rows);
      if (r.length - first.length >= newest_limit) {
        return absl::InvalidArgumentError(absl::StrCat("length: ", r.length, " given at row ", row, ", limit ",
                                                       first.length + newest_limit - 1, " for ", end - begin,
                                                       " rows of one sequence"));
      }
      const int64_t most_pages =
          (spec_.max_sequence_rows + pool_->pool.spec().block_rows - 1) / pool_->pool.spec().block_rows;
      if (static_cast<int64_t>(r.resident_pages.size()) > most_pages) {
        return absl::InvalidArgumentError(
            absl::StrCat("resident_pages: ", r.resident_pages.size(), " given at row ", row, ", limit ", most_pages));
      }
      if (!r.newest_row.empty() && request.order.signal) {
        return absl::InvalidArgumentError(absl::StrCat("newest_row: ", r.newest_row.size(), " bytes given at row ", row,
                                                       " with order.signal, limit 0: the engine's stream writes it"));
      }
      if (!r.newest_row.empty() && r.newest_row.size() != newest_bytes) {
        return absl::InvalidArgumentError(absl::StrCat("newest_row: ", r.newest_row.size(), " bytes given at row ", row,
                                                       ", one row of all layers needs ", newest_bytes));
      }
    }
    begin = end;
  }
  return absl::OkStatus();
}

void Session::Step(const StepRequest* step, Done<StepResult> done) {
  const StepRequest& request = *step;
  absl::Status status = CheckStep(request);
  if (!status.ok()) {
    RefuseOrder(request.order);
    std::move(done)(status);
    return;
  }
  auto op = std::make_shared<StepOperation>();
  auto follow_ups = std::make_shared<std::vector<WriteFollowUp>>();
  // A step is short, and two changes of threads would cost about as much: its work begins, and may run, when the mutex
  // is free again.
  absl::AnyInvocable<void() &&> begin;
  std::optional<StepResult> early;
  {
    absl::MutexLock lock(&mutex_);
    status = CheckNotArmed();
    if (status.ok()) status = BeginOperation(request.order);
    if (status.ok()) {
      begin = storage_->Hold();
      const CallOrder order = request.order;
      const absl::Status waits = AwaitOrder(order);
      const size_t rows = request.rows.size();
      op->result.statuses.resize(rows);
      op->work.rows.resize(rows);
      op->access_of_row.assign(rows, -1);
      op->accesses.reserve(rows);
      for (size_t row = 0; row < rows; ++row) {
        const StepRowRequest& r = request.rows[row];
        if (!r.id) continue;
        const bool sibling = row > 0 && request.rows[row - 1].id == r.id;
        const absl::StatusOr<Opened> opened = sibling ? absl::StatusOr<Opened>(Opened{}) : Find(r.id);
        if (!opened.ok() || (sibling && op->access_of_row[row - 1] < 0)) {
          op->result.statuses[row] = sibling ? op->result.statuses[row - 1] : opened.status();
          continue;
        }
        op->work.rows[row].state_row = sibling ? op->work.rows[row - 1].state_row : opened->state_row;
        const int64_t base =
            sibling ? request.rows[row].length - op->work.rows[row - 1].length + op->work.rows[row - 1].newest_index
                    : 0;
        op->work.rows[row].length = r.length;
        op->work.rows[row].newest_index = static_cast<int32_t>(base);
        op->access_of_row[row] = static_cast<int>(op->accesses.size());
        op->accesses.push_back({r.id, r.length, base + 1, r.commit});
      }
      pool_->pool.BeginStep(id_, op->accesses, &op->grants);
      for (size_t row = 0; row < rows; ++row) {
        const int access = op->access_of_row[row];
        if (access < 0) continue;
        StepGrant& grant = op->grants[access];
        StepRowWork& work = op->work.rows[row];
        const StepRowRequest& r = request.rows[row];
        // The rows of one sequence behind a failed one fail with it (BeginStep gives them its status).
        if (grant.status.ok() && grant.plan != nullptr) {
          AddFollowUp(r.id, id_, *grant.plan, follow_ups.get());
          grant.status = EnqueuePlan(work.state_row, *grant.plan);
        }
        if (!grant.status.ok()) {
          op->result.statuses[row] = grant.status;
          work = StepRowWork();
          continue;
        }
        work.commit = r.commit;
        work.commit_pool_row = grant.commit_pool_row;
        work.newest_bytes = r.newest_row.empty() ? nullptr : r.newest_row.data();
        work.resident_pages = r.resident_pages;
        if (order.signal && !r.resident_pages.empty()) {
          work.resident_pages = op->resident_pages.emplace_back(r.resident_pages.begin(), r.resident_pages.end());
        }
      }
      op->work.top_k = static_cast<int32_t>(request.top_k);
      if (order.signal) {
        op->counts.resize(request.groups.size() * rows * kOutcomeCount);
        op->finished = request.finished;
      }
      for (const StepGroupRequest& group : request.groups) {
        int32_t* const counts = op->counts.data() + op->work.groups.size() * rows * kOutcomeCount;
        op->work.groups.push_back({.group = static_cast<int32_t>(group.group),
                                   .indices = request.shared ? nullptr : group.indices.data(),
                                   .hot_rows = request.shared ? nullptr : group.hot_rows,
                                   .counts = order.signal ? counts : group.counts,
                                   .gather = request.gather,
                                   .miss_pool_rows = order.signal ? nullptr : group.miss_pool_rows,
                                   .miss_hot_rows = order.signal ? nullptr : group.miss_hot_rows,
                                   .miss_counts = order.signal ? nullptr : group.miss_counts});
      }
      const absl::Status enqueued = waits.ok() ? storage_->Step(op->work) : waits;
      Done<StepResult> answer = std::move(done);
      if (SignalOrder(order, enqueued)) {
        early = op->result;
        done = std::exchange(answer, nullptr);
      }
      storage_->Notify([self = shared_from_this(), op, follow_ups, enqueued, order,
                        done = std::move(answer)](absl::Status finished) mutable {
        if (finished.ok()) finished = enqueued;
        finished = self->Outcome(order, done == nullptr, std::move(finished));
        if (!finished.ok()) {
          self->FollowUp(std::move(*follow_ups), [self, finished, done = std::move(done)]() mutable {
            if (done) std::move(done)(finished);
            self->EndOperation();
          });
          return;
        }
        uint64_t committed = 0;
        for (size_t row = 0; row < op->work.rows.size(); ++row) {
          if (!op->work.rows[row].commit) continue;
          const StepAccess& access = op->accesses[op->access_of_row[row]];
          self->pool_->pool.FinishWrite(access.id, access.length - 1, 1);
          committed += static_cast<uint64_t>(self->BytesPerRow());
        }
        self->pool_->totals.committed_bytes.fetch_add(committed, std::memory_order_relaxed);
        self->CountLookups(op->work);
        op->result.gathered_bytes = self->CountDevice(op->work.totals);
        op->result.device_ns = op->work.end_ns - op->work.begin_ns;
        self->FollowUp(std::move(*follow_ups), [self, op, done = std::move(done)]() mutable {
          if (op->finished) op->finished(op->result);
          if (done) std::move(done)(std::move(op->result));
          self->EndOperation();
        });
      });
    }
  }
  if (begin) {
    std::move(begin)();
    if (early.has_value()) std::move(done)(*std::move(early));
  } else {
    RefuseOrder(request.order);
    std::move(done)(status);
  }
}

void Session::CountLookups(const StepWork& work) {
  uint64_t sums[kOutcomeCount] = {};
  for (const StepGroupWork& group : work.groups) {
    for (size_t i = 0; i < work.rows.size() * kOutcomeCount; ++i) sums[i % kOutcomeCount] += group.counts[i];
  }
  for (int i = 0; i < kOutcomeCount; ++i) {
    lookups_[i].fetch_add(sums[i], std::memory_order_relaxed);
    pool_->totals.lookups[i].fetch_add(sums[i], std::memory_order_relaxed);
  }
  steps_.fetch_add(1, std::memory_order_relaxed);
  pool_->totals.steps.fetch_add(1, std::memory_order_relaxed);
}

uint64_t Session::CountDevice(const DeviceTotals& totals) {
  absl::MutexLock lock(&device_mutex_);
  // Totals only rise, and completions of one session come in order.
  const uint64_t gathered = totals.gathered_bytes - device_totals_.gathered_bytes;
  pool_->totals.evictions.fetch_add(totals.evictions - device_totals_.evictions, std::memory_order_relaxed);
  pool_->totals.lru_repairs.fetch_add(totals.lru_repairs - device_totals_.lru_repairs, std::memory_order_relaxed);
  pool_->totals.gathered_bytes.fetch_add(gathered, std::memory_order_relaxed);
  device_totals_ = totals;
  return gathered;
}

}  // namespace stoker::core
