// Opening, growing, forking and closing sequences in a session.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/core/session.h"
#include "server/core/session_follow_up.h"

namespace stoker::core {
namespace {

absl::StatusOr<std::vector<PrefixHash>> ParseHashes(absl::string_view bytes) {
  if (bytes.size() % PrefixHash::kBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_hashes: ", bytes.size(), " bytes given, not a multiple of ", PrefixHash::kBytes));
  }
  std::vector<PrefixHash> hashes(bytes.size() / PrefixHash::kBytes);
  for (size_t i = 0; i < hashes.size(); ++i) hashes[i] = PrefixHash::FromBytes(bytes.data() + i * PrefixHash::kBytes);
  return hashes;
}

constexpr size_t kMaxKeyBytes = 255;

absl::Status CheckKey(absl::string_view key) {
  if (key.size() <= kMaxKeyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("sequence_key: ", key.size(), " bytes given, limit ", kMaxKeyBytes));
}

}  // namespace

absl::Status Session::CheckStateRowFree() const {
  if (!free_state_rows_.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("state_rows: all ", spec_.state_rows, " of session ", id_.value, " are in use, 1 needed"));
}

AdmittedSequence Session::OpenAdmitted(const Admission& admission) {
  AdmittedSequence admitted;
  admitted.id = admission.id;
  admitted.matched_rows = admission.matched_rows;
  admitted.stored_rows = admission.stored_rows;
  admitted.writer = admission.writer;
  admitted.state_row = free_state_rows_.back();
  free_state_rows_.pop_back();
  open_[admission.id] = {admitted.state_row};
  open_count_.store(static_cast<int64_t>(open_.size()), std::memory_order_relaxed);
  admitted.status = storage_->Open(admitted.state_row, admission.id, admission.table);
  if (admitted.status.ok() && !admission.copies.empty()) admitted.status = storage_->CopyBlocks(admission.copies);
  return admitted;
}

// Opens sequences one after the other; one that has to wait holds up those behind it.
class OpenOperation : public Session::AdmitCall, public std::enable_shared_from_this<OpenOperation> {
 public:
  // What opens sequence i, with the session's mutex held: a waiting admission has kept `again`, which calls Run.
  using Open = std::function<absl::StatusOr<Admission>(size_t i, const std::vector<AdmittedSequence>& opened,
                                                       std::function<void()> again)>;

  OpenOperation(std::shared_ptr<Session> session, size_t count, Open open,
                Session::Done<std::vector<AdmittedSequence>> done)
      : session_(std::move(session)), count_(count), open_(std::move(open)), done_(std::move(done)) {}

  void Run() {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      while (results_.size() < count_) {
        AdmittedSequence result;
        if (!OpenOne(&result)) return;  // waits
        results_.push_back(std::move(result));
      }
      finished_ = true;
    }
    Finish();
  }

  void Cancel() override {
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      if (finished_) return;
      while (results_.size() < count_) {
        AdmittedSequence dropped;
        dropped.status =
            absl::DeadlineExceededError("wait_for_prefix: the call ended while the prefix was being stored");
        results_.push_back(std::move(dropped));
      }
      finished_ = true;
    }
    Finish();
  }

 private:
  // False: it waits; Run is called again.
  bool OpenOne(AdmittedSequence* result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::MutexLock lock(&session_->mutex_);
    if (result->status = session_->ended_; !result->status.ok()) return true;
    absl::StatusOr<Admission> admission =
        open_(results_.size(), results_, [self = shared_from_this()] { self->Run(); });
    if (result->status = admission.status(); !result->status.ok()) return true;
    if (admission->waiting) return false;
    *result = session_->OpenAdmitted(*admission);
    return true;
  }

  void Finish() {
    absl::MutexLock lock(&session_->mutex_);
    session_->storage_->Notify([self = shared_from_this()](absl::Status status) { self->Complete(std::move(status)); });
  }

  void Complete(absl::Status work) {
    std::vector<SequenceId> orphans;
    bool cancelled;
    {
      absl::MutexLock lock(&mutex_);
      cancelled = cancelled_;
      for (AdmittedSequence& result : results_) {
        if (!result.id) continue;
        session_->pool_->pool.FinishCopies(result.id);
        if (result.status.ok()) result.status = work;
        // A client that has gone, or that is told of an error, will not name the sequence.
        if (cancelled || !result.status.ok()) orphans.push_back(result.id);
        if (!result.status.ok()) result.id = SequenceId();
      }
    }
    if (!orphans.empty()) session_->Abandon(orphans);
    std::move(done_)(std::move(results_));
    session_->EndOperation();
  }

  const std::shared_ptr<Session> session_;
  const size_t count_;
  const Open open_;
  Session::Done<std::vector<AdmittedSequence>> done_;
  absl::Mutex mutex_;  // taken before the session's
  std::vector<AdmittedSequence> results_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

absl::StatusOr<Admission> Session::AdmitOne(const AdmitItem& item, const std::vector<AdmittedSequence>& opened,
                                            const std::function<void()>& again) {
  if (absl::Status status = CheckKey(item.key); !status.ok()) return status;
  absl::StatusOr<std::vector<PrefixHash>> hashes = ParseHashes(item.block_hashes);
  if (!hashes.ok()) return hashes.status();
  if (absl::Status status = CheckStateRowFree(); !status.ok()) return status;
  AdmitParams params;
  params.key = item.key;
  params.prompt_rows = item.prompt_rows;
  params.max_rows = item.max_rows;
  params.hashes = *std::move(hashes);
  for (const AdmittedSequence& admitted : opened) {
    if (admitted.id) params.admitted_by_call.push_back(admitted.id);
  }
  if (item.wait_for_prefix) params.on_prefix_ready = again;
  params.on_copied = again;
  return pool_->pool.Admit(id_, sequence_limits(), std::move(params));
}

std::shared_ptr<Session::AdmitCall> Session::Admit(std::vector<AdmitItem> items,
                                                   Done<std::vector<AdmittedSequence>> done) {
  absl::Status status = CheckItems("items", items.size());
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    status = BeginOperation();
  }
  if (!status.ok()) {
    std::move(done)(status);
    return nullptr;
  }
  const bool may_wait = std::any_of(items.begin(), items.end(), [](const AdmitItem& i) { return i.wait_for_prefix; });
  const size_t count = items.size();
  auto operation = std::make_shared<OpenOperation>(
      shared_from_this(), count,
      [this, items = std::move(items)](size_t i, const std::vector<AdmittedSequence>& opened,
                                       const std::function<void()>& again) {
        mutex_.AssertHeld();
        return AdmitOne(items[i], opened, again);
      },
      std::move(done));
  if (may_wait) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(admissions_, [](const std::weak_ptr<AdmitCall>& call) { return call.expired(); });
    admissions_.push_back(operation);
  }
  operation->Run();
  return operation;
}

void Session::Fork(std::vector<ForkItem> items, Done<std::vector<AdmittedSequence>> done) {
  absl::Status status = CheckItems("items", items.size());
  if (status.ok()) {
    absl::MutexLock lock(&mutex_);
    status = BeginOperation();
  }
  if (!status.ok()) {
    std::move(done)(status);
    return;
  }
  const size_t count = items.size();
  std::make_shared<OpenOperation>(
      shared_from_this(), count,
      [this, items = std::move(items)](size_t i, const std::vector<AdmittedSequence>&,
                                       std::function<void()> again) -> absl::StatusOr<Admission> {
        mutex_.AssertHeld();
        const ForkItem& item = items[i];
        if (absl::Status refused = CheckKey(item.key); !refused.ok()) return refused;
        if (absl::Status refused = Find(item.source).status(); !refused.ok()) return refused;
        if (absl::Status refused = CheckStateRowFree(); !refused.ok()) return refused;
        return pool_->pool.Fork(id_, sequence_limits(), item.source, item.rows, item.max_rows, item.key,
                                std::move(again));
      },
      std::move(done))
      ->Run();
}

void Session::Extend(std::vector<ExtendItem> items, Done<BatchResult> done) {
  absl::Status status = CheckItems("items", items.size());
  auto result = std::make_shared<BatchResult>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = BeginOperation();
    if (status.ok()) {
      std::vector<WriteFollowUp> follow_ups;
      for (const ExtendItem& item : items) {
        const absl::StatusOr<Opened> opened = Find(item.id);
        absl::Status item_status = opened.status();
        if (item_status.ok()) {
          absl::StatusOr<WritePlan> plan = pool_->pool.Extend(id_, sequence_limits(), item.id, item.max_rows);
          item_status = plan.status();
          if (item_status.ok()) {
            AddFollowUp(item.id, id_, *plan, &follow_ups);
            item_status = EnqueuePlan(opened->state_row, *plan);
          }
        }
        result->statuses.push_back(std::move(item_status));
      }
      storage_->Notify([self = shared_from_this(), result, follow_ups = std::move(follow_ups),
                        done = std::move(done)](absl::Status) mutable {
        self->FollowUp(std::move(follow_ups), [self, result, done = std::move(done)]() mutable {
          std::move(done)(std::move(*result));
          self->EndOperation();
        });
      });
      return;
    }
  }
  std::move(done)(status);
}

void Session::Release(std::vector<SequenceId> ids, Done<BatchResult> done) {
  absl::Status status = CheckItems("sequence_ids", ids.size());
  auto result = std::make_shared<BatchResult>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = BeginOperation();
    if (status.ok()) {
      std::vector<std::pair<SequenceId, int32_t>> closing;
      for (SequenceId id : ids) {
        const absl::StatusOr<Opened> opened = Find(id);
        absl::Status item_status = opened.status();
        if (item_status.ok()) {
          open_.erase(id);
          closing.emplace_back(id, opened->state_row);
          item_status = storage_->Close(opened->state_row);
        }
        result->statuses.push_back(std::move(item_status));
      }
      open_count_.store(static_cast<int64_t>(open_.size()), std::memory_order_relaxed);
      storage_->Notify([self = shared_from_this(), closing = std::move(closing), result,
                        done = std::move(done)](absl::Status) mutable {
        self->CloseSequences(std::move(closing), /*retain=*/false, absl::InfinitePast());
        std::move(done)(std::move(*result));
        self->EndOperation();
      });
      return;
    }
  }
  std::move(done)(status);
}

absl::StatusOr<std::vector<absl::StatusOr<Pool::BlockTable>>> Session::BlockTables(
    absl::Span<const SequenceId> ids) const {
  if (absl::Status status = CheckItems("sequence_ids", ids.size()); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  std::vector<absl::StatusOr<Pool::BlockTable>> tables;
  int64_t blocks = 0;
  for (const SequenceId id : ids) {
    if (const absl::StatusOr<Opened> opened = Find(id); !opened.ok()) {
      tables.push_back(opened.status());
      continue;
    }
    tables.push_back(pool_->pool.Table(id_, id));
    if (!tables.back().ok()) continue;
    blocks += static_cast<int64_t>(tables.back()->blocks.size());
    if (blocks > kMaxTableBlocks) {
      tables.back() = absl::ResourceExhaustedError(
          absl::StrCat("sequence_ids: ", blocks, " blocks in the tables of one reply, limit ", kMaxTableBlocks));
    }
  }
  return tables;
}

void Session::Abandon(const std::vector<SequenceId>& ids) {
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return;  // Destroy closes all
  // Not BeginOperation: a full queue must not keep the sequences for ever.
  queued_.fetch_add(1, std::memory_order_relaxed);
  std::vector<std::pair<SequenceId, int32_t>> closing;
  for (SequenceId id : ids) {
    const auto it = open_.find(id);
    if (it == open_.end()) continue;
    closing.emplace_back(id, it->second.state_row);
    // Emptied again before its next use; an error here is the stream's, and Notify reports it.
    storage_->Close(it->second.state_row).IgnoreError();
    open_.erase(it);
  }
  open_count_.store(static_cast<int64_t>(open_.size()), std::memory_order_relaxed);
  storage_->Notify([self = shared_from_this(), closing = std::move(closing)](absl::Status) mutable {
    self->CloseSequences(std::move(closing), /*retain=*/false, absl::InfinitePast());
    self->EndOperation();
  });
}

void Session::CloseSequences(std::vector<std::pair<SequenceId, int32_t>> closing, bool retain, absl::Time now) {
  for (const auto& [id, state_row] : closing) pool_->pool.Close(id_, id, retain, now).IgnoreError();
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, state_row] : closing) free_state_rows_.push_back(state_row);
}

}  // namespace stoker::core
