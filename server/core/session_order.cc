// Calls of a session that have an order with the work of its engine's stream: numbers, waits, and replies ahead of the
// work.
//
// When the session ends, for whatever reason, its waits are aborted. Behind an aborted wait the engine's storage moves
// no rows and raises no daemon word; and whatever ends from then on counts as failed, since nobody knows on which side
// of the abort it was: rows that it appended are not stored, rows that were there before are the old ones or the new
// ones, whole.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/core/session.h"

namespace stoker::core {
namespace {

// Some 1,000 pieces of work fit into a stream of a GPU; the next one would let the caller wait, who holds the session's
// mutex. A step of 61 index groups has some 130 of them, and with limits of copies up to 300: with kMaxBacklog before
// it there is room for it. Items of one call are let in up to kFullBacklog, and what other sessions' writes need.
constexpr int64_t kMaxBacklog = 640;
constexpr int64_t kFullBacklog = 896;

}  // namespace

absl::Status WaitingSessions::Check(int64_t going) const {
  if (armed_ + ordered_ - going < limit_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("sessions: ", armed_, " are armed, ", ordered_ - going,
                                                   " have ordered calls, limit max_armed_sessions ", limit_));
}

absl::Status WaitingSessions::Take(int64_t* count) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = Check(0); !status.ok()) return status;
  ++*count;
  return absl::OkStatus();
}

absl::Status WaitingSessions::CheckOrdered(int64_t going) const {
  absl::MutexLock lock(&mutex_);
  return Check(going);
}

void WaitingSessions::GiveBack(int64_t* count) {
  absl::MutexLock lock(&mutex_);
  --*count;
}

int64_t WaitingSessions::armed() const {
  absl::MutexLock lock(&mutex_);
  return armed_;
}

int64_t WaitingSessions::ordered() const {
  absl::MutexLock lock(&mutex_);
  return ordered_;
}

absl::Status Session::CheckBacklog() const {
  if (order_abort_ == nullptr) return absl::OkStatus();
  const int64_t backlog = storage_->backlog();
  if (backlog < kMaxBacklog) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("session: ", id_.value, " has ", backlog,
                                                   " pieces of work queued on the device, limit ", kMaxBacklog));
}

absl::Status Session::CheckRoom(int64_t rows, absl::Span<const Tensor* const> tensors) const {
  if (order_abort_ == nullptr) return absl::OkStatus();
  {
    absl::MutexLock lock(&waits_mutex_);
    if (waits_.empty()) return absl::OkStatus();  // then to wait for room is to wait for the device alone
  }
  const int64_t backlog = storage_->backlog();
  const int64_t pieces = storage_->PiecesOf(rows, tensors);
  if (backlog + pieces <= kFullBacklog) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("range: ", rows, " rows make ", pieces, " pieces of work behind ",
                                                   backlog, " that wait for engine_word, limit ", kFullBacklog));
}

void Session::MakeRoomForOthers() {
  if (order_abort_ == nullptr || storage_->backlog() <= kFullBacklog) return;
  {
    absl::MutexLock lock(&waits_mutex_);
    if (waits_.empty()) return;
    is_full_ = true;  // the next CheckWaits ends the session
  }
  AbortWaits();
}

void Session::AbortWaits() {
  if (order_abort_ == nullptr) return;
  // First: what ends behind an aborted wait finds it set.
  waits_aborted_.store(true);
  order_abort_->Abort();
}

void Session::AbortWaitsAgain() {
  if (waits_aborted_.load()) order_abort_->Abort();
}

absl::Status Session::CheckOrder(const CallOrder& order) const {
  if (!order.given) return absl::OkStatus();
  if (order_abort_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("order: given, session ", id_.value, " was attached without ordered_calls"));
  }
  if (order.number < 1 || order.number > kMaxOrder) {
    return absl::InvalidArgumentError(absl::StrCat("order.number: ", order.number, " given, limits 1 and ", kMaxOrder));
  }
  if (!order.wait && !order.signal) {
    return absl::InvalidArgumentError("order: neither wait nor signal given, at least one of them is needed");
  }
  return absl::OkStatus();
}

absl::Status Session::BeginOperation(const CallOrder& order) {
  if (!order.given) return BeginOperation();
  if (order.number <= last_order_) {
    return absl::InvalidArgumentError(absl::StrCat("order.number: ", order.number, " given, limits ", last_order_ + 1,
                                                   ", one above an earlier call's, and ", kMaxOrder));
  }
  absl::Status status = BeginOperation();
  if (!status.ok()) {
    OweOrder(order);
    return status;
  }
  last_order_ = order.number;
  return absl::OkStatus();
}

absl::Status Session::AwaitOrder(const CallOrder& order) {
  if (!order.wait) return absl::OkStatus();
  {
    absl::MutexLock lock(&waits_mutex_);
    if (waits_.empty()) waits_since_ = absl::Now();
    waits_.push_back(order.number);
  }
  return storage_->AwaitOrder(order.number);
}

absl::Status Session::CheckWaits(absl::Time now) const {
  absl::MutexLock lock(&waits_mutex_);
  if (is_full_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "session: ", id_.value, ": more than ", kFullBacklog,
        " pieces of work wait for engine_word, and others that write to its sequences would wait with them"));
  }
  if (waits_.empty() || now - waits_since_ < limits_.doorbell_timeout) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(
      "session: ", id_.value, ": engine_word did not come to ", waits_.front(), ", or the work behind it to ",
      "its end, within doorbell_timeout_ms ", absl::ToInt64Milliseconds(limits_.doorbell_timeout)));
}

bool Session::SignalOrder(const CallOrder& order, const absl::Status& enqueued) {
  // An error is the device's: the reply comes with the fence, which tells it.
  return order.signal && storage_->SignalOrder(order.number).ok() && enqueued.ok();
}

absl::Status Session::Outcome(const CallOrder& order, bool answered, absl::Status work) {
  if (order.wait) {
    // Work ends in the order in which it was enqueued.
    absl::MutexLock lock(&waits_mutex_);
    waits_.pop_front();
  }
  if (work.ok() && waits_aborted_.load()) {
    work =
        absl::UnavailableError(absl::StrCat("session: ", id_.value, " has ended before its work was known to be done"));
  }
  if (!work.ok() && answered) {
    absl::MutexLock lock(&mutex_);
    if (late_error_.ok()) {
      late_error_ = absl::Status(
          work.code(), absl::StrCat("an earlier call with order.signal failed after its reply: ", work.message()));
    }
  }
  return work;
}

void Session::RefuseOrder(const CallOrder& order) {
  if (!order.given || !CheckOrder(order).ok()) return;
  absl::MutexLock lock(&mutex_);
  OweOrder(order);
}

void Session::OweOrder(const CallOrder& order) {
  if (order.number <= last_order_) return;
  last_order_ = order.number;
  if (!order.signal || !ended_.ok()) return;
  owed_order_ = order.number;
  // Else with the next operation that begins or ends. An armed plane is one that may do neither.
  if (queued_operations() == (plane_ != PlaneState::kNone ? 1 : 0)) PayOrder();
}

void Session::PayOrder() {
  if (owed_order_ == 0 || storage_ == nullptr) return;
  // An error is the device's, which all other work tells.
  storage_->SignalOrder(std::exchange(owed_order_, 0)).IgnoreError();
}

}  // namespace stoker::core
