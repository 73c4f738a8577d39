#include "client/plane_batch.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace stoker::client {

absl::Status FromBatchRow(v1::BatchRowStatus status, size_t index, const PlaneRow& row) {
  const auto text = [&](auto... parts) { return absl::StrCat("batch row ", index, ": ", parts...); };
  switch (static_cast<int>(status)) {
    case v1::BATCH_ROW_STATUS_UNSPECIFIED:
      return absl::OkStatus();
    case v1::BATCH_ROW_STATUS_BAD_COUNT:
      return absl::InvalidArgumentError(text("batch_rows is below 0 or above max_batch_rows"));
    case v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE:
      return absl::NotFoundError(
          text("state_row ", row.state_row, " does not exist, or does not have sequence_id ", row.sequence_id));
    case v1::BATCH_ROW_STATUS_NOT_ADJACENT:
      return absl::InvalidArgumentError(
          text("other rows lie between this one and those of sequence_id ", row.sequence_id, " before it"));
    case v1::BATCH_ROW_STATUS_TOO_MANY_ROWS:
      return absl::InvalidArgumentError(
          text("the rows of sequence_id ", row.sequence_id, " are above block_rows, or times top_k above hot_rows"));
    case v1::BATCH_ROW_STATUS_BAD_LENGTH:
      return absl::InvalidArgumentError(
          text("length ", row.length,
               " is below 1, above the sequence's max_rows or max_sequence_rows, below that "
               "of the row before, or too far above that of its first row"));
    case v1::BATCH_ROW_STATUS_NOT_STORED:
      return absl::FailedPreconditionError(
          text("length ", row.length, ": rows of sequence_id ", row.sequence_id, " before the newest are not stored"));
    case v1::BATCH_ROW_STATUS_NO_BLOCK:
      return absl::FailedPreconditionError(text("length ", row.length, ": no block of sequence_id ", row.sequence_id,
                                                " is reserved for the newest row"));
    case v1::BATCH_ROW_STATUS_EARLIER_ROW:
      return absl::FailedPreconditionError(
          text("a row of sequence_id ", row.sequence_id, " before this one has failed"));
    case v1::BATCH_ROW_STATUS_NOT_WRITER:
      return absl::FailedPreconditionError(text("commit: another session writes sequence_id ", row.sequence_id));
    case v1::BATCH_ROW_STATUS_NOT_APPENDED:
      return absl::FailedPreconditionError(text(
          "commit: length ", row.length, " is not one more than the stored rows of sequence_id ", row.sequence_id));
    default:
      return absl::InternalError(
          text("status ", static_cast<int>(status), " is unknown to this version of the client"));
  }
}

absl::Status FromPlaneEnd(int32_t ended, absl::string_view awaited, absl::Duration doorbell_timeout) {
  const std::string text = absl::StrCat("the server plane has ended, and ", awaited, " will not come: ");
  switch (ended) {
    case v1::PLANE_END_DISARMED:
      return absl::UnavailableError(absl::StrCat(text, "disarmed, by Disarm or the end of the session or the daemon"));
    case v1::PLANE_END_TIMED_OUT:
      return absl::DeadlineExceededError(
          absl::StrCat(text, "a doorbell of a step was not rung within ", absl::FormatDuration(doorbell_timeout)));
    case v1::PLANE_END_BAD_STEP:
      return absl::InternalError(absl::StrCat(text, "the daemon saw a request with another step's number"));
    default:
      return absl::InternalError(
          absl::StrCat(text, "`ended` is ", ended, ", which this version of the client does not know"));
  }
}

std::string DoneOf(size_t doorbell, uint64_t step) { return absl::StrCat("done[", doorbell, "] of step ", step); }

absl::Status PlaneBatch::Open(const Arena& arena, uint32_t top_k) {
  absl::StatusOr<PlaneMail> mail = arena.Mail();
  if (!mail.ok()) return mail.status();
  mail_ = *mail;
  top_k_ = top_k;
  groups_.resize(arena.groups());
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    const auto entries = arena.Indices(group);
    const auto hot_rows = arena.HotRows(group);
    const auto misses = arena.Misses(group);
    for (const absl::Status& status : {entries.status(), hot_rows.status(), misses.status()}) {
      if (!status.ok()) return status;
    }
    if (top_k_ < 1 || top_k_ > entries->columns()) {
      return absl::InvalidArgumentError(absl::StrCat("top_k ", top_k_, " is not 1 to max_top_k, ", entries->columns()));
    }
    groups_[group] = {*entries, *hot_rows, *misses};
  }
  rows_.reserve(mail_.lengths.size());
  statuses_.reserve(mail_.lengths.size());
  return absl::OkStatus();
}

absl::Status PlaneBatch::Expect(Call call, size_t doorbell) const {
  if (call == next_ && doorbell == next_doorbell_) return absl::OkStatus();
  const auto name = [this](Call c, size_t i) {
    switch (c) {
      case Call::kBegin:
        return std::string("Begin");
      case Call::kLaunch:
        return absl::StrCat(launch_, "(", i, ")");
      case Call::kAwait:
        return absl::StrCat("Await(", i, ")");
      case Call::kCommit:
        return std::string("Commit");
      case Call::kAwaitCommit:
        return std::string("AwaitCommit");
    }
    return std::string();
  };
  return absl::FailedPreconditionError(
      absl::StrCat(name(call, doorbell), " comes where step ", step_, " needs ", name(next_, next_doorbell_)));
}

void PlaneBatch::Took(Call call) {
  switch (call) {
    case Call::kBegin:
      next_ = Call::kLaunch;
      break;
    case Call::kLaunch:
      next_ = Call::kAwait;
      break;
    case Call::kAwait:
      ++next_doorbell_;
      next_ = next_doorbell_ < groups() ? Call::kLaunch : Call::kCommit;
      break;
    case Call::kCommit:
      next_ = Call::kAwaitCommit;
      break;
    case Call::kAwaitCommit:
      ++step_;
      next_ = Call::kBegin;
      next_doorbell_ = 0;
      break;
  }
}

absl::Status PlaneBatch::CheckRows(absl::Span<const PlaneRow> rows) const {
  if (rows.size() > mail_.lengths.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows are ", rows.size(), ", above max_batch_rows, ", mail_.lengths.size()));
  }
  constexpr uint32_t kMax = std::numeric_limits<int32_t>::max();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].state_row <= kMax && rows[i].length <= kMax) continue;
    return absl::InvalidArgumentError(absl::StrCat("rows[", i, "]: state_row ", rows[i].state_row, " or length ",
                                                   rows[i].length, " is above ", kMax));
  }
  return absl::OkStatus();
}

absl::Status PlaneBatch::CheckCommits(absl::Span<const int32_t> commits) const {
  if (commits.empty() || commits.size() == rows_.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("commits are ", commits.size(), "; the step has ", rows_.size(), " rows"));
}

void PlaneBatch::WriteRows(absl::Span<const PlaneRow> rows) {
  rows_.assign(rows.begin(), rows.end());
  *mail_.batch_rows = static_cast<int32_t>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    mail_.sequence_ids[i] = rows[i].sequence_id;
    mail_.state_rows[i] = rows[i].sequence_id == 0 ? -1 : static_cast<int32_t>(rows[i].state_row);
    mail_.lengths[i] = static_cast<int32_t>(rows[i].length);
  }
}

void PlaneBatch::WriteCommits(absl::Span<const int32_t> commits) {
  const absl::Span<int32_t> flags = mail_.commits.first(rows_.size());
  if (commits.empty()) {
    std::fill(flags.begin(), flags.end(), 0);
  } else {
    std::copy(commits.begin(), commits.end(), flags.begin());
  }
}

void PlaneBatch::ReadStatuses() {
  statuses_.clear();
  for (const int32_t status : mail_.statuses.first(rows_.size())) {
    statuses_.push_back(static_cast<v1::BatchRowStatus>(status));
  }
}

absl::Status PlaneBatch::FirstRowError() const {
  for (size_t i = 0; i < statuses_.size(); ++i) {
    if (statuses_[i] != v1::BATCH_ROW_STATUS_UNSPECIFIED) return FromBatchRow(statuses_[i], i, rows_[i]);
  }
  return absl::OkStatus();
}

}  // namespace stoker::client
