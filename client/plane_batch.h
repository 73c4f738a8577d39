// PlaneBatch: the engine's side of a plane's steps in host memory, whatever runs them: the order of calls, the batch,
// its statuses, and the views of entries and hot rows. What ServerPlane and DirectPlane have in common; internal to
// them.
//
// Thread safety: belongs to the plane's thread.
//
// Invariants:
//  1. Calls come in the order Begin, for each group Launch and Await, Commit, AwaitCommit. Any other is
//     FAILED_PRECONDITION and changes nothing.
//  2. statuses() has no more elements than the step's batch has rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// One row of a step's batch.
struct PlaneRow {
  uint64_t sequence_id = 0;  // 0: padding
  uint32_t state_row = 0;    // as Admit gave it
  uint32_t length = 0;       // as StepRow.length
};

// How the row number `index` of a batch was taken; the message names row, field and value.
absl::Status FromBatchRow(v1::BatchRowStatus status, size_t index, const PlaneRow& row);

// Why the daemon has ended a plane: `ended` of the arena, which is not 0. `awaited`: what was waited for, as DoneOf.
absl::Status FromPlaneEnd(int32_t ended, absl::string_view awaited, absl::Duration doorbell_timeout);

// How messages name the answer to a doorbell.
std::string DoneOf(size_t doorbell, uint64_t step);

class PlaneBatch {
 public:
  enum class Call : uint8_t { kBegin, kLaunch, kAwait, kCommit, kAwaitCommit };

  // `launch`: what the plane names its call that starts a group.
  explicit PlaneBatch(absl::string_view launch) : launch_(launch) {}
  // Makes the views of a mapped arena in host memory. INVALID_ARGUMENT: top_k is not 1 to max_top_k.
  absl::Status Open(const Arena& arena, uint32_t top_k);

  // OK where this call is the next one. `doorbell` is the group, or groups() for the commits.
  absl::Status Expect(Call call, size_t doorbell) const;
  // What follows it.
  void Took(Call call);

  // INVALID_ARGUMENT, naming argument, value and limit.
  absl::Status CheckRows(absl::Span<const PlaneRow> rows) const;
  absl::Status CheckCommits(absl::Span<const int32_t> commits) const;
  // What passed the checks goes into the arena.
  void WriteRows(absl::Span<const PlaneRow> rows);
  void WriteCommits(absl::Span<const int32_t> commits);
  void ReadStatuses();

  size_t groups() const { return groups_.size(); }
  uint32_t top_k() const { return top_k_; }
  uint64_t step() const { return step_; }
  void set_step(uint64_t step) { step_ = step; }
  const PlaneMail& mail() const { return mail_; }
  absl::Span<int32_t> Entries(uint32_t group, size_t row) const { return groups_[group].entries[row].first(top_k_); }
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const {
    return groups_[group].hot_rows[row].first(top_k_);
  }
  int32_t Misses(uint32_t group, size_t row) const { return groups_[group].misses[row]; }
  absl::Span<const v1::BatchRowStatus> statuses() const { return statuses_; }
  absl::Status FirstRowError() const;

 private:
  struct Group {
    MatrixView<int32_t> entries;
    MatrixView<const int32_t> hot_rows;
    absl::Span<const int32_t> misses;
  };

  const absl::string_view launch_;
  uint32_t top_k_ = 0;
  PlaneMail mail_;
  std::vector<Group> groups_;
  uint64_t step_ = 0;
  Call next_ = Call::kBegin;
  size_t next_doorbell_ = 0;
  std::vector<PlaneRow> rows_;  // of the step
  std::vector<v1::BatchRowStatus> statuses_;
};

}  // namespace stoker::client
