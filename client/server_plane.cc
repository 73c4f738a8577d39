#include "client/server_plane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace stoker::client {
namespace {

// A small step of the CPU backend takes 10 to 20 us, and waking up from the shortest sleep 60. Spinning gives way to
// other threads, for the daemon's may want this core. stoker-replay (8 rows, top_k 32, one group) on two cores that had
// much else to do, a step's median and, of five runs, the median of its means: 21 and 71 us; without giving way 200 and
// 340; spinning for 200 us 24 and 460; as calls 90 and 130.
constexpr absl::Duration kSpin = absl::Microseconds(20);
// Sleeps double up to the longest one, which bounds how late an answer is seen, and the end of the session.
constexpr absl::Duration kFirstSleep = absl::Microseconds(10);
constexpr absl::Duration kLongestSleep = absl::Microseconds(500);
// Bound of the Disarm that the destructor sends.
constexpr absl::Duration kDisarmTimeout = absl::Seconds(5);

using Clock = std::chrono::steady_clock;

// The words are the other process's as well, so that no plain access will do. atomic_ref wants no const.
template <typename T>
T LoadAcquire(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free && std::atomic_ref<int32_t>::is_always_lock_free,
              "shared between processes");

absl::Status FromPlaneEnd(int32_t ended, absl::Duration doorbell_timeout) {
  switch (ended) {
    case v1::PLANE_END_DISARMED:
      return absl::UnavailableError(
          "the server plane was disarmed: by Disarm, or the end of the session or the daemon");
    case v1::PLANE_END_TIMED_OUT:
      return absl::DeadlineExceededError(
          absl::StrCat("the server plane has ended: a doorbell of a step was not rung within ",
                       absl::FormatDuration(doorbell_timeout)));
    case v1::PLANE_END_BAD_STEP:
      return absl::InternalError("the server plane has ended: the daemon saw a request with another step's number");
    default:
      return absl::InternalError(absl::StrCat("the server plane has ended: `ended` is ", ended,
                                              ", which this version of the client does not know"));
  }
}

}  // namespace

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

ServerPlane::ServerPlane(Session& session, std::shared_ptr<const Arena> arena, uint64_t generation, uint32_t top_k)
    : session_(session), arena_(std::move(arena)), generation_(generation), top_k_(top_k) {}

absl::StatusOr<std::unique_ptr<ServerPlane>> ServerPlane::Arm(Session& session, uint32_t top_k,
                                                              const CallOptions& options) {
  absl::StatusOr<uint64_t> generation = session.AwaitAttached(options.timeout);
  if (!generation.ok()) return generation.status();
  // The call names the generation, so that it fails where this arena is another one's.
  CallOptions call = options;
  if (call.generation == 0) call.generation = *generation;
  auto plane = std::unique_ptr<ServerPlane>(new ServerPlane(session, session.arena(), call.generation, top_k));
  plane->disarmed_ = true;  // until it is armed, the destructor has nothing to end
  if (absl::Status status = plane->Open(); !status.ok()) return status;
  v1::ArmRequest request;
  request.set_top_k(top_k);
  v1::ArmResponse armed;
  if (absl::Status status = session.Arm(request, &armed, call); !status.ok()) return status;
  plane->disarmed_ = false;
  plane->arm_call_ = session.arm_calls();
  if (absl::Status status = plane->Start(armed); !status.ok()) return status;
  return plane;
}

absl::Status ServerPlane::Open() {
  if (!arena_->status().ok()) return arena_->status();
  if (arena_->on_device()) {
    return absl::FailedPreconditionError(
        "the arena is on a GPU: there the engine's kernels ring the doorbells, and host code cannot");
  }
  absl::StatusOr<PlaneMail> mail = arena_->Mail();
  if (!mail.ok()) return mail.status();
  mail_ = *mail;
  groups_.resize(arena_->groups());
  for (uint32_t group = 0; group < groups_.size(); ++group) {
    const auto entries = arena_->Indices(group);
    const auto hot_rows = arena_->HotRows(group);
    const auto misses = arena_->Misses(group);
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

absl::Status ServerPlane::Start(const v1::ArmResponse& armed) {
  step_ = armed.first_step();
  doorbell_timeout_ = absl::Milliseconds(armed.doorbell_timeout_ms());
  if (step_ == 0) return absl::InternalError("Arm: first_step is 0, which no step before it can have answered");
  for (size_t doorbell = 0; doorbell <= groups(); ++doorbell) {
    const uint64_t request = LoadAcquire(mail_.request[doorbell]), done = LoadAcquire(mail_.done[doorbell]);
    if (request == step_ - 1 && done == step_ - 1) continue;
    return absl::InternalError(absl::StrCat("Arm: request[", doorbell, "] is ", request, " and done[", doorbell, "] ",
                                            done, "; both must be ", step_ - 1, ", one less than first_step"));
  }
  return absl::OkStatus();
}

ServerPlane::~ServerPlane() {
  if (disarmed_ || !status_.ok() || !CheckSession().ok()) return;
  CallOptions options;
  options.timeout = kDisarmTimeout;
  // The end of the session, and the next Arm, end the plane as well: there is nothing to do about an error.
  static_cast<void>(Disarm(options));
}

absl::Status ServerPlane::End(absl::Status why) {
  status_ = std::move(why);
  return status_;
}

absl::Status ServerPlane::CheckSession() const {
  if (absl::Status status = session_.status(); !status.ok()) return status;
  if (const uint64_t generation = session_.generation(); generation != generation_) {
    return absl::UnavailableError(
        absl::StrCat("generation ", generation_, " of the session is over, it is ", generation, " now: arm anew"));
  }
  if (session_.arm_calls() != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  return absl::OkStatus();
}

absl::Status ServerPlane::Expect(Call call, size_t doorbell) const {
  if (!status_.ok()) return status_;
  if (disarmed_) return absl::FailedPreconditionError("the server plane was disarmed");
  if (call == next_ && doorbell == next_doorbell_) return absl::OkStatus();
  const auto name = [](Call c, size_t i) {
    switch (c) {
      case Call::kBegin:
        return std::string("Begin");
      case Call::kRing:
        return absl::StrCat("Ring(", i, ")");
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

absl::Status ServerPlane::Begin(absl::Span<const PlaneRow> rows) {
  if (absl::Status status = Expect(Call::kBegin, 0); !status.ok()) return status;
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
  if (absl::Status status = CheckSession(); !status.ok()) return End(status);
  rows_.assign(rows.begin(), rows.end());
  *mail_.batch_rows = static_cast<int32_t>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    mail_.sequence_ids[i] = rows[i].sequence_id;
    mail_.state_rows[i] = rows[i].sequence_id == 0 ? -1 : static_cast<int32_t>(rows[i].state_row);
    mail_.lengths[i] = static_cast<int32_t>(rows[i].length);
  }
  next_ = Call::kRing;
  return absl::OkStatus();
}

absl::Status ServerPlane::Ring(uint32_t group) {
  if (absl::Status status = Expect(Call::kRing, group); !status.ok()) return status;
  RingDoorbell(group);
  next_ = Call::kAwait;
  return absl::OkStatus();
}

absl::Status ServerPlane::Await(uint32_t group, absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwait, group); !status.ok()) return status;
  if (absl::Status status = AwaitDoorbell(group, timeout); !status.ok()) return status;
  if (group == 0) ReadStatuses();
  next_doorbell_ = group + 1;
  next_ = next_doorbell_ < groups() ? Call::kRing : Call::kCommit;
  return absl::OkStatus();
}

absl::Status ServerPlane::Commit(absl::Span<const int32_t> commits) {
  if (absl::Status status = Expect(Call::kCommit, groups()); !status.ok()) return status;
  if (!commits.empty() && commits.size() != rows_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("commits are ", commits.size(), "; the step has ", rows_.size(), " rows"));
  }
  const absl::Span<int32_t> flags = mail_.commits.first(rows_.size());
  if (commits.empty()) {
    std::fill(flags.begin(), flags.end(), 0);
  } else {
    std::copy(commits.begin(), commits.end(), flags.begin());
  }
  RingDoorbell(groups());
  next_ = Call::kAwaitCommit;
  return absl::OkStatus();
}

absl::Status ServerPlane::AwaitCommit(absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwaitCommit, groups()); !status.ok()) return status;
  if (absl::Status status = AwaitDoorbell(groups(), timeout); !status.ok()) return status;
  ReadStatuses();
  ++step_;
  next_ = Call::kBegin;
  next_doorbell_ = 0;
  return absl::OkStatus();
}

void ServerPlane::RingDoorbell(size_t doorbell) {
  std::atomic_ref<uint64_t>(mail_.request[doorbell]).store(step_, std::memory_order_release);
}

absl::Status ServerPlane::AwaitDoorbell(size_t doorbell, absl::Duration timeout) {
  const Clock::time_point begin = Clock::now();
  absl::Duration sleep = kFirstSleep;
  for (;;) {
    // In this order: what was not answered when the plane had ended never will be.
    const int32_t ended = LoadAcquire(*mail_.ended);
    const uint64_t done = LoadAcquire(mail_.done[doorbell]);
    if (done == step_) return absl::OkStatus();
    if (done != step_ - 1) {
      return End(absl::InternalError(absl::StrCat("done[", doorbell, "] is ", done, " in step ", step_,
                                                  ": the daemon does not keep to the protocol")));
    }
    if (ended != 0) return End(FromPlaneEnd(ended, doorbell_timeout_));
    const absl::Duration waited = absl::FromChrono(Clock::now() - begin);
    if (waited < kSpin && waited < timeout) {
      std::this_thread::yield();
      continue;
    }
    if (absl::Status status = CheckSession(); !status.ok()) return End(status);
    if (waited >= timeout) {
      return End(absl::DeadlineExceededError(absl::StrCat("done[", doorbell, "] of step ", step_,
                                                          " did not come within ", absl::FormatDuration(timeout))));
    }
    absl::SleepFor(std::min(sleep, timeout - waited));
    sleep = std::min(2 * sleep, kLongestSleep);
  }
}

void ServerPlane::ReadStatuses() {
  statuses_.clear();
  for (const int32_t status : mail_.statuses.first(rows_.size())) {
    statuses_.push_back(static_cast<v1::BatchRowStatus>(status));
  }
}

absl::Status ServerPlane::FirstRowError() const {
  for (size_t i = 0; i < statuses_.size(); ++i) {
    if (statuses_[i] != v1::BATCH_ROW_STATUS_UNSPECIFIED) return FromBatchRow(statuses_[i], i, rows_[i]);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ServerPlane::Disarm(const CallOptions& options) {
  if (disarmed_) return absl::FailedPreconditionError("the server plane was disarmed");
  CallOptions call = options;
  call.generation = generation_;
  if (session_.arm_calls() != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  v1::DisarmResponse response;
  if (absl::Status status = session_.Disarm({}, &response, call); !status.ok()) return status;
  disarmed_ = true;
  return response.steps();
}

}  // namespace stoker::client
