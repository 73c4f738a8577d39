// The server plane of a session: steps that doorbells start, without a call for each.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/session.h"

namespace stoker::core {

absl::Status Session::CheckNotArmed() const {
  if (spec_.direct) {
    return absl::FailedPreconditionError(
        absl::StrCat("session: ", id_.value, " is on the direct plane, where the engine launches its steps"));
  }
  if (plane_ == PlaneState::kNone) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("session: ", id_.value, " is on the server plane, where doorbells start steps; Disarm comes first"));
}

void Session::Arm(int64_t top_k, PlaneEvents events, Done<ArmResult> done) {
  absl::Status status;
  if (top_k < 1 || top_k > spec_.max_top_k) {
    status =
        absl::InvalidArgumentError(absl::StrCat("top_k: ", top_k, " given, limits 1 and max_top_k ", spec_.max_top_k));
  } else if (!environment_.no_server_plane.empty()) {
    status = absl::FailedPreconditionError(
        absl::StrCat("plane: the server plane is not available: ", environment_.no_server_plane));
  }
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    if (ended_.ok() && plane_ != PlaneState::kNone) {
      plane_ = PlaneState::kEnding;
      on_plane_end_.push_back(
          [self = shared_from_this(), top_k, events = std::move(events), done = std::move(done)]() mutable {
            self->Arm(top_k, std::move(events), std::move(done));
          });
      storage_->Disarm();
      return;
    }
    if (status = ArmNow(top_k, std::move(events)); status.ok()) {
      storage_->Notify([self = shared_from_this(), done = std::move(done)](absl::Status work) mutable {
        if (work.ok()) {
          std::move(done)(ArmResult{1, self->limits_.doorbell_timeout});
        } else {
          std::move(done)(std::move(work));
        }
        self->EndOperation();
      });
      return;
    }
  }
  std::move(done)(status);
}

absl::Status Session::ArmNow(int64_t top_k, PlaneEvents events) {
  if (absl::Status status = BeginOperation(); !status.ok()) return status;
  absl::Status status = environment_.waiting_sessions->TakeArmed();
  if (status.ok()) {
    PlaneSetup setup;
    setup.session = id_;
    setup.top_k = static_cast<int32_t>(top_k);
    setup.doorbell_timeout = limits_.doorbell_timeout;
    setup.stepped = [self = shared_from_this(), stepped = std::move(events.stepped)](const PlaneSample& sample) {
      self->CountPlane(sample);
      if (stepped != nullptr) stepped({sample.step_ns});
    };
    setup.ended = [self = shared_from_this(), ended = std::move(events.ended)](const PlaneEnding& ending) {
      if (ended != nullptr) ended(ending);
      self->PlaneEnded();
    };
    {
      absl::MutexLock lock(&device_mutex_);
      plane_sample_ = PlaneSample();
    }
    status = storage_->Arm(std::move(setup));
    if (!status.ok()) environment_.waiting_sessions->GiveArmedBack();
  }
  if (!status.ok()) {
    queued_.fetch_sub(1, std::memory_order_relaxed);
    return status;
  }
  plane_ = PlaneState::kArmed;
  // The plane counts as an operation of its own until it has ended: the session's memory lives as long.
  queued_.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

void Session::Disarm(Done<uint64_t> done) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) {
      status = ended_;
    } else if (plane_ == PlaneState::kNone) {
      status = absl::FailedPreconditionError(absl::StrCat("session: ", id_.value, " is not armed"));
    } else {
      plane_ = PlaneState::kEnding;
      on_plane_end_.push_back([self = shared_from_this(), done = std::move(done)]() mutable {
        uint64_t steps;
        {
          absl::MutexLock sample_lock(&self->device_mutex_);
          steps = self->plane_sample_.steps;
        }
        std::move(done)(steps);
      });
      storage_->Disarm();
      return;
    }
  }
  std::move(done)(status);
}

void Session::PlaneEnded() {
  std::vector<absl::AnyInvocable<void() &&>> then;
  {
    absl::MutexLock lock(&mutex_);
    plane_ = PlaneState::kNone;
    then.swap(on_plane_end_);
  }
  environment_.waiting_sessions->GiveArmedBack();
  for (absl::AnyInvocable<void() &&>& call : then) std::move(call)();
  EndOperation();
}

void Session::CountPlane(const PlaneSample& sample) {
  absl::MutexLock lock(&device_mutex_);
  const PlaneSample& before = plane_sample_;
  for (int i = 0; i < kOutcomeCount; ++i) {
    const uint64_t more = sample.lookups[i] - before.lookups[i];
    lookups_[i].fetch_add(more, std::memory_order_relaxed);
    pool_->totals.lookups[i].fetch_add(more, std::memory_order_relaxed);
  }
  const uint64_t steps = sample.steps - before.steps;
  steps_.fetch_add(steps, std::memory_order_relaxed);
  pool_->totals.steps.fetch_add(steps, std::memory_order_relaxed);
  pool_->totals.committed_bytes.fetch_add(
      (sample.committed_rows - before.committed_rows) * static_cast<uint64_t>(BytesPerRow()),
      std::memory_order_relaxed);
  pool_->totals.gathered_bytes.fetch_add(sample.totals.gathered_bytes - before.totals.gathered_bytes,
                                         std::memory_order_relaxed);
  pool_->totals.evictions.fetch_add(sample.totals.evictions - before.totals.evictions, std::memory_order_relaxed);
  pool_->totals.lru_repairs.fetch_add(sample.totals.lru_repairs - before.totals.lru_repairs, std::memory_order_relaxed);
  plane_sample_ = sample;
}

std::optional<PlaneStep> Session::SampleDirect() {
  PlaneSample sample;
  {
    absl::MutexLock lock(&mutex_);
    if (storage_ == nullptr) return std::nullopt;
    sample = storage_->DirectSample();
  }
  PlaneSample before;
  {
    absl::MutexLock lock(&device_mutex_);
    before = plane_sample_;
  }
  // The engine writes them, and may be doing so now: numbers that fall, or belong to another step, wait for the next
  // time.
  bool whole = sample.steps > before.steps && sample.committed_rows >= before.committed_rows &&
               sample.totals.evictions >= before.totals.evictions &&
               sample.totals.lru_repairs >= before.totals.lru_repairs &&
               sample.totals.gathered_bytes >= before.totals.gathered_bytes;
  for (int i = 0; i < kOutcomeCount; ++i) whole = whole && sample.lookups[i] >= before.lookups[i];
  if (!whole) return std::nullopt;
  CountPlane(sample);
  return PlaneStep{sample.step_ns};
}

}  // namespace stoker::core
