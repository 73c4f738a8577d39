#include "server/core/session.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/core/session_follow_up.h"

namespace stoker::core {

Session::Session(SessionId id, std::string token, SessionSpec spec, OperationLimits limits, int64_t bytes,
                 std::shared_ptr<PoolEntry> pool, std::unique_ptr<SessionStorage> storage, absl::Time attached,
                 Environment environment)
    : id_(id),
      token_(std::move(token)),
      spec_(std::move(spec)),
      limits_(limits),
      bytes_(bytes),
      pool_(std::move(pool)),
      attached_(attached),
      environment_(std::move(environment)),
      arena_(storage->arena()),
      order_abort_(storage->order_abort()),
      bounce_(storage->bounce()),
      storage_(std::move(storage)),
      tensors_(id, limits.tensors) {
  free_state_rows_.reserve(spec_.state_rows);
  for (int64_t row = spec_.state_rows; row > 0; --row) free_state_rows_.push_back(static_cast<int32_t>(row - 1));
}

Session::~Session() = default;

SessionInfo Session::Info() const {
  SessionInfo info;
  info.id = id_;
  info.name = spec_.name;
  info.pool = spec_.pool;
  info.device = spec_.device;
  info.attached = attached_;
  info.state_rows = spec_.state_rows;
  info.open_sequences = open_sequences();
  info.reserved_blocks = pool_->pool.ReservedBlocks(id_);
  info.max_reserved_blocks = limits_.max_reserved_blocks;
  info.bytes = bytes_;
  info.steps = steps_.load(std::memory_order_relaxed);
  for (int i = 0; i < kOutcomeCount; ++i) info.lookups[i] = lookups_[i].load(std::memory_order_relaxed);
  info.queued_operations = queued_operations();
  {
    absl::MutexLock lock(&mutex_);
    info.armed = plane_ != PlaneState::kNone;
  }
  return info;
}

absl::StatusOr<int> Session::DuplicateArenaDescriptor() const {
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok() || storage_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("session: ", id_.value, " has ended"));
  }
  if (storage_->arena_descriptor() < 0) {
    return absl::UnimplementedError("arena: the device's memory cannot be mapped by descriptor");
  }
  const int descriptor = fcntl(storage_->arena_descriptor(), F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) return absl::ErrnoToStatus(errno, "arena: the descriptor cannot be duplicated");
  return descriptor;
}

absl::StatusOr<std::vector<FileDescriptor>> Session::DuplicatePoolDescriptors() const {
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok() || storage_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("session: ", id_.value, " has ended"));
  }
  if (!spec_.direct) {
    return absl::PermissionDeniedError(absl::StrCat("session: ", id_.value, " is not on the direct plane"));
  }
  std::vector<FileDescriptor> copies;
  copies.reserve(storage_->pool_descriptors().size());
  for (const int descriptor : storage_->pool_descriptors()) {
    copies.emplace_back(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!copies.back().valid()) return absl::ErrnoToStatus(errno, "pool: a descriptor cannot be duplicated");
  }
  return copies;
}

absl::Status Session::BeginOperation() {
  if (!ended_.ok()) return ended_;
  if (!late_error_.ok()) return std::exchange(late_error_, absl::OkStatus());
  if (queued_.load(std::memory_order_relaxed) >= limits_.max_queued_operations) {
    return absl::ResourceExhaustedError(absl::StrCat("session: ", id_.value, " has ", queued_.load(),
                                                     " operations queued, limit max_queued_operations ",
                                                     limits_.max_queued_operations));
  }
  if (absl::Status status = CheckBacklog(); !status.ok()) return status;
  queued_.fetch_add(1, std::memory_order_relaxed);
  PayOrder();
  return absl::OkStatus();
}

void Session::EndOperation() {
  absl::AnyInvocable<void() &&> drained;
  if (order_abort_ != nullptr) {
    absl::MutexLock lock(&waits_mutex_);
    if (!waits_.empty()) waits_since_ = absl::Now();
  }
  {
    absl::MutexLock lock(&mutex_);
    PayOrder();
    if (queued_.fetch_sub(1, std::memory_order_relaxed) == 1 && !ended_.ok())
      drained = std::exchange(drained_, nullptr);
  }
  if (drained) std::move(drained)();
}

absl::StatusOr<Session::Opened> Session::Find(SequenceId id) const {
  const auto it = open_.find(id);
  if (it != open_.end()) return it->second;
  // The pool knows why: unknown, of an earlier generation, or not open here.
  const absl::StatusOr<SequenceSnapshot> snapshot = pool_->pool.Snapshot(id);
  if (!snapshot.ok()) return snapshot.status();
  return absl::FailedPreconditionError(absl::StrCat("sequence_id: ", id.value, " is not open in session ", id_.value));
}

absl::Status Session::CheckItems(absl::string_view field, size_t count) const {
  if (count < 1 || static_cast<int64_t>(count) > limits_.max_batch_items) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", count, " given, limits 1 and max_batch_items ", limits_.max_batch_items));
  }
  return absl::OkStatus();
}

int64_t Session::BytesPerRow() const {
  const PoolSpec& pool = pool_->pool.spec();
  return pool.bytes_per_row() * pool.layers;
}

absl::Status Session::EnqueuePlan(int32_t state_row, const WritePlan& plan) {
  if (!plan.copies.empty()) {
    if (absl::Status status = storage_->CopyBlocks(plan.copies); !status.ok()) return status;
  }
  if (!plan.updates.empty()) {
    if (absl::Status status = storage_->UpdateTable(state_row, plan.updates, plan.replaced); !status.ok())
      return status;
  }
  if (plan.rewritten_count > 0) {
    InvalidateWork work;
    for (int64_t i = 0; i < plan.rewritten_count; ++i) {
      work.state_rows.push_back(state_row);
      work.keys.push_back(spec_.index_space == IndexSpace::kPosition ? plan.rewritten_first + i : plan.pool_rows[i]);
    }
    return storage_->Invalidate(work);
  }
  return absl::OkStatus();
}

void Session::AddFollowUp(SequenceId id, SessionId writer, const WritePlan& plan,
                          std::vector<WriteFollowUp>* follow_ups) {
  if (plan.replaced.empty() && plan.rewritten_count == 0 && plan.updates.empty()) return;
  WriteFollowUp follow_up;
  follow_up.id = id;
  for (SessionId opener : plan.openers) {
    if (opener != writer) follow_up.sessions.push_back(opener);
  }
  follow_up.updates = plan.updates;
  follow_up.replaced = plan.replaced;
  follow_up.rewritten_first = plan.rewritten_first;
  follow_up.rewritten_count = plan.rewritten_count;
  if (plan.rewritten_count > 0) {
    follow_up.rewritten_pool_rows.assign(plan.pool_rows.begin(), plan.pool_rows.begin() + plan.rewritten_count);
  }
  follow_ups->push_back(std::move(follow_up));
}

void Session::FollowUp(std::vector<WriteFollowUp> follow_ups, absl::AnyInvocable<void() &&> done) {
  if (follow_ups.empty()) {
    std::move(done)();
    return;
  }
  // The last session that has taken all of it in gives the old blocks back and goes on.
  struct Barrier {
    std::atomic<int64_t> open{1};
    std::vector<WriteFollowUp> follow_ups;
    absl::AnyInvocable<void() &&> done;
    std::shared_ptr<PoolEntry> pool;
    void Leave() {
      if (open.fetch_sub(1) != 1) return;
      for (const WriteFollowUp& follow_up : follow_ups) {
        if (!follow_up.replaced.empty()) pool->pool.Reclaim(follow_up.id, follow_up.replaced);
      }
      std::move(done)();
    }
  };
  auto barrier = std::make_shared<Barrier>();
  barrier->follow_ups = std::move(follow_ups);
  barrier->done = std::move(done);
  barrier->pool = pool_;
  for (const WriteFollowUp& follow_up : barrier->follow_ups) {
    for (SessionId other_id : follow_up.sessions) {
      // One that has ended may still be reading the old blocks; one whose memory is freed has no work.
      std::shared_ptr<Session> other = environment_.find_session(other_id);
      if (other == nullptr) continue;
      barrier->open.fetch_add(1);
      other->ApplyForeignWrite(follow_up.id, follow_up, [barrier] { barrier->Leave(); });
    }
  }
  barrier->Leave();
}

void Session::ApplyForeignWrite(SequenceId id, const WriteFollowUp& write, absl::AnyInvocable<void() &&> done) {
  {
    absl::MutexLock lock(&mutex_);
    const auto it = open_.find(id);
    if (storage_ != nullptr) {
      queued_.fetch_add(1, std::memory_order_relaxed);
      // Of the writer's completion, which must not wait for this session's engine.
      MakeRoomForOthers();
      if (it != open_.end()) {
        WritePlan plan;
        plan.updates = write.updates;
        plan.replaced = write.replaced;
        plan.rewritten_first = write.rewritten_first;
        plan.rewritten_count = write.rewritten_count;
        plan.pool_rows = write.rewritten_pool_rows;
        // The arguments come from the pool itself; an error here is a defect, and the fence below still holds.
        EnqueuePlan(it->second.state_row, plan).IgnoreError();
      }
      storage_->Notify([self = shared_from_this(), done = std::move(done)](absl::Status) mutable {
        std::move(done)();
        self->EndOperation();
      });
      return;
    }
  }
  std::move(done)();
}

void Session::End(absl::Status reason, bool engine_gone, absl::AnyInvocable<void() &&> drained) {
  std::vector<std::weak_ptr<AdmitCall>> admissions;
  // Without the mutex: who holds it may be waiting for room on a stream that waits for the engine.
  AbortWaits();
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_.ok()) return;
    ended_ = std::move(reason);
    drained_ = std::move(drained);
    admissions.swap(admissions_);
    if (plane_ != PlaneState::kNone) storage_->Disarm();
    // An error is the device's, which the fence tells.
    if (spec_.direct) storage_->EndDirect(engine_gone, limits_.doorbell_timeout).IgnoreError();
    // The fence counts as an operation: `drained` comes from its completion, or from a later one's.
    queued_.fetch_add(1, std::memory_order_relaxed);
    storage_->Notify([self = shared_from_this()](absl::Status) { self->EndOperation(); });
  }
  for (const std::weak_ptr<AdmitCall>& weak : admissions) {
    if (std::shared_ptr<AdmitCall> call = weak.lock()) call->Cancel();
  }
}

void Session::Destroy(bool retain, absl::Time now) {
  std::unique_ptr<SessionStorage> storage;
  TensorRegistry tensors(id_, {});
  DescriptorOffers offers;
  std::vector<SequenceId> open;
  {
    absl::MutexLock lock(&mutex_);
    storage = std::move(storage_);
    std::swap(tensors, tensors_);
    std::swap(offers, offers_);
    for (const auto& [id, opened] : open_) open.push_back(id);
    open_.clear();
    open_count_.store(0, std::memory_order_relaxed);
  }
  storage.reset();
  tensors = TensorRegistry(id_, {});  // unmapped only now: work of the stream may have used them
  tensor_bytes_.store(0, std::memory_order_relaxed);
  std::sort(open.begin(), open.end());
  for (SequenceId id : open) pool_->pool.Close(id_, id, retain, now).IgnoreError();
}

}  // namespace stoker::core
