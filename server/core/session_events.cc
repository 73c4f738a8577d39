// The events of a session: calls that begin after the engine's work, and that are answered before their own is done.
//
// When the engine is gone, its event may never come, and the session's event is released instead (EngineGone). What
// then runs moves bytes that the engine may not have written: such work fails, rows that it appended are not stored,
// and sequences in which it wrote rows anew are not retained.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/session.h"

namespace stoker::core {

absl::Status Session::CheckEvents(const CallEvents& events) const {
  if ((!events.wait && !events.signal) || spec_.engine_event.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(events.wait ? "wait_event" : "signal_event", ": given, session ",
                                                    id_.value, " on ", spec_.device,
                                                    " has no events: it was attached without engine_event"));
}

absl::Status Session::AwaitEngineEvent(const CallEvents& events) {
  return events.wait ? storage_->AwaitEngineEvent() : absl::OkStatus();
}

bool Session::SignalEvent(const CallEvents& events) {
  // An error is the device's: the reply comes with the fence, which tells it.
  return events.signal && storage_->RecordEvent().ok();
}

absl::Status Session::Outcome(const CallEvents& events, bool answered, absl::Status work) {
  if (!events.wait && !answered) return work;
  absl::MutexLock lock(&mutex_);
  if (work.ok() && events.wait && engine_gone_) {
    work = absl::UnavailableError(
        absl::StrCat("wait_event: the engine of session ", id_.value, " went before it was known to have come"));
  }
  if (!work.ok() && answered && late_error_.ok()) {
    late_error_ = absl::Status(
        work.code(), absl::StrCat("an earlier call with signal_event failed after its reply: ", work.message()));
  }
  return work;
}

void Session::Spoil(const CallEvents& events, SequenceId id, int64_t first) {
  if (!events.wait) return;
  const absl::StatusOr<SequenceSnapshot> snapshot = pool_->pool.Snapshot(id);
  if (!snapshot.ok() || first >= snapshot->stored_rows) return;
  absl::MutexLock lock(&mutex_);
  spoiled_.insert(id);
}

void Session::ReleaseEngineEvent() {
  if (engine_gone_) return;
  engine_gone_ = true;
  // An error is the device's, which the fence of the session's end tells.
  if (spec_.engine_event.has_value() && storage_ != nullptr) storage_->ReleaseEngineEvent().IgnoreError();
}

void Session::EngineGone() {
  absl::MutexLock lock(&mutex_);
  ReleaseEngineEvent();
}

}  // namespace stoker::core
