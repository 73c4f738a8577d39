// A session: one engine rank's lease on hot buffers, and all work that it asks for.
//
// Every operation checks its request, begins it in the pool's bookkeeping and enqueues its work under one mutex, so
// that the order of the bookkeeping is the order of the work. The completion runs on a thread of the backend: it ends
// what the operation began, then calls the operation's `done`. Nothing waits. Where the device does not reach the
// memory of messages, a Store or Read that brings rows in its message does all this once it has bounce memory; it
// counts as an operation from its call on.
//
// Thread safety: a Session may be used by any thread.
//
// Invariants:
//  1. A sequence is open in the pool for this session as long as work of the session may use it: it is closed there
//     only from the completion of a fence behind all such work.
//  2. A state row has at most one sequence, and is empty when it gets one.
//  3. When `End` was called no operation begins; `drained` is called once, when the last one that had begun is done.
//  4. A call with an order takes its number, and enqueues its work, under one hold of the mutex, so that signals come
//  in
//     the order of the numbers; but for a Store whose rows go through bounce memory, which has no signal.
//  5. A tensor is mapped as long as work of the session may use it: it is unmapped behind a fence that follows all such
//     work, or by Destroy when the stream is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/core/descriptor_offers.h"
#include "server/core/engine.h"
#include "server/core/pool.h"
#include "server/core/tensor.h"
#include "server/core/tensor_registry.h"

namespace stoker::core {

// Sums over everything that was done in a pool. Never falls; read without locks.
struct WorkTotals {
  std::atomic<uint64_t> lookups[kOutcomeCount]{};
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> lru_repairs{0};
  std::atomic<uint64_t> gathered_bytes{0};
  std::atomic<uint64_t> committed_bytes{0};
  std::atomic<uint64_t> stored_bytes{0};
  std::atomic<uint64_t> loaded_bytes{0};
  std::atomic<uint64_t> steps{0};
};

// A pool with its memory and its totals.
struct PoolEntry {
  PoolEntry(PoolSpec spec, absl::Duration retention) : pool(std::move(spec), retention) {}

  Pool pool;
  std::unique_ptr<PoolStorage> storage;
  int64_t bytes = 0;
  int64_t populated_bytes = 0;  // faulted in ahead of use
  WorkTotals totals;
  std::atomic<int64_t> sessions{0};
};

// What one session may ask for in one call, and at one time.
struct OperationLimits {
  int64_t max_batch_items = 0;
  int64_t max_queued_operations = 0;
  int64_t max_reserved_blocks = 0;
  absl::Duration doorbell_timeout;  // of a server plane's step that has begun, and of a call's wait for the engine
  TensorLimits tensors;
};

// Counts the sessions whose streams may wait for their engines: those on the server plane, and those with ordered
// calls.
class WaitingSessions {
 public:
  explicit WaitingSessions(int64_t limit) : limit_(limit) {}

  // RESOURCE_EXHAUSTED with the figures.
  absl::Status TakeArmed() { return Take(&armed_); }
  absl::Status TakeOrdered() { return Take(&ordered_); }
  // Whether TakeOrdered would succeed when so many of them have gone.
  absl::Status CheckOrdered(int64_t going) const;
  void GiveArmedBack() { GiveBack(&armed_); }
  void GiveOrderedBack() { GiveBack(&ordered_); }
  int64_t armed() const;
  int64_t ordered() const;

 private:
  absl::Status Take(int64_t* count);
  absl::Status Check(int64_t going) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(int64_t* count);

  const int64_t limit_;
  mutable absl::Mutex mutex_;
  int64_t armed_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t ordered_ ABSL_GUARDED_BY(mutex_) = 0;
};

struct ArmResult {
  uint64_t first_step = 0;
  absl::Duration doorbell_timeout;
};

// A step of a plane that was finished.
struct PlaneStep {
  uint64_t device_ns = 0;
};

// The result of Admit or Fork for one item.
struct AdmittedSequence {
  absl::Status status;
  SequenceId id;
  int32_t state_row = -1;
  int64_t matched_rows = 0;
  int64_t stored_rows = 0;
  bool writer = false;
};

struct AdmitItem {
  std::string key;
  int64_t prompt_rows = 0;
  int64_t max_rows = 0;
  absl::string_view block_hashes;  // PrefixHash::kBytes each
  bool wait_for_prefix = false;
};

struct ForkItem {
  SequenceId source;
  int64_t rows = 0;
  int64_t max_rows = 0;
  std::string key;
};

struct ExtendItem {
  SequenceId id;
  int64_t max_rows = 0;
};

struct RowRange {
  SequenceId id;
  int64_t first = 0;
  int64_t count = 0;
};

// Rows of registered tensors, one for each row of a range.
struct TensorRows {
  absl::Span<const uint64_t> ids;
  absl::Span<const uint32_t> rows;  // empty: from `first` on
  int64_t first = 0;
};

enum class RowSource : uint8_t { kInline = 1, kStaging = 2, kTensor = 3 };
enum class RowTarget : uint8_t { kStaging = 1, kHotBuffer = 2, kTensor = 3 };

struct StoreItem {
  RowRange range;
  RowSource source = RowSource::kInline;
  absl::string_view rows;       // inline
  uint64_t staging_offset = 0;  // in the staging area
  TensorRows tensor;
};

struct LoadItem {
  RowRange range;
  RowTarget target = RowTarget::kStaging;
  uint64_t staging_offset = 0;
  TensorRows tensor;
};

// Memory of the engine's own that is to be registered: by handle, else by the number of a descriptor that was handed
// over.
struct TensorRequest {
  absl::Status malformed;  // why the spec is none; the descriptor is used up nevertheless
  TensorSpec spec;
  std::string ipc_handle;
  std::string device;  // of the handle
  uint64_t descriptor = 0;
};

struct CommitItem {
  SequenceId id;
  int64_t first = 0;
  int64_t count = 0;
};

struct InvalidateItem {
  SequenceId id;
  absl::Span<const uint32_t> positions;
};

struct StepRowRequest {
  SequenceId id;  // none: padding
  int64_t length = 0;
  bool commit = false;
  absl::string_view newest_row;
  absl::Span<const int32_t> resident_pages;
};

struct StepGroupRequest {
  int64_t group = 0;
  absl::Span<const int32_t> indices;  // inline
  // Out. hot_rows may be null with shared steps, the plan when it is not wanted.
  int32_t* hot_rows = nullptr;
  int32_t* counts = nullptr;
  int32_t* miss_pool_rows = nullptr;
  int32_t* miss_hot_rows = nullptr;
  int32_t* miss_counts = nullptr;
};

// The order of a call's work with the engine's, in a session with ordered calls.
struct CallOrder {
  bool given = false;   // false: none, and the others mean nothing
  uint64_t number = 0;  // above those of earlier calls
  bool wait = false;    // the work begins when the engine word has come to the number
  bool signal = false;  // the reply comes when the work is enqueued, and the daemon word is raised when it is done
};

struct StepResult;

struct StepRequest {
  std::vector<StepRowRequest> rows;
  std::vector<StepGroupRequest> groups;
  int64_t top_k = 0;
  bool shared = false;
  bool gather = true;
  // With `signal` nothing that the groups point to is written, and nothing of the request is used once `done` was
  // called.
  CallOrder order;
  // Then: called when the work is done, as `done` otherwise; not for work that fails.
  std::function<void(const StepResult&)> finished;
};

struct StepResult {
  std::vector<absl::Status> statuses;  // one for each row
  // Not known, and 0, where the reply came first.
  uint64_t gathered_bytes = 0;
  uint64_t device_ns = 0;
};

struct ReadRequest {
  SequenceId id;
  absl::Span<const uint32_t> values;
  bool hot_rows = false;  // values are hot rows, not positions
  std::vector<int64_t> layers;
};

// One status for each item, and the bytes that all of them moved.
struct BatchResult {
  std::vector<absl::Status> statuses;
  uint64_t bytes = 0;
};

struct SessionInfo {
  SessionId id;
  std::string name;
  std::string pool;
  std::string device;
  absl::Time attached;
  int64_t state_rows = 0;
  int64_t open_sequences = 0;
  int64_t reserved_blocks = 0;
  int64_t max_reserved_blocks = 0;
  int64_t bytes = 0;
  uint64_t steps = 0;
  uint64_t lookups[kOutcomeCount] = {};
  int64_t queued_operations = 0;
  bool armed = false;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  using FindSession = std::function<std::shared_ptr<Session>(SessionId)>;
  template <typename T>
  using Done = absl::AnyInvocable<void(absl::StatusOr<T>) &&>;

  // Lets a caller give up an admission that waits for a prefix.
  class AdmitCall {
   public:
    virtual ~AdmitCall() = default;
    // Items that are not admitted yet end with DEADLINE_EXCEEDED; those that are, are released: nobody will name them.
    virtual void Cancel() = 0;
  };

  // What a session needs of what is around it.
  struct Environment {
    FindSession find_session;
    // Engine::MapClientMemory.
    std::function<absl::StatusOr<std::unique_ptr<ClientMemory>>(const std::string& device, const ClientMemorySource&)>
        map_memory;
    // Calls a function on a thread that may wait for the system.
    std::function<void(absl::AnyInvocable<void() &&>)> post;
    // Why the session can have no server plane; empty where it can.
    std::string no_server_plane;
    std::string no_ordered_calls;
    WaitingSessions* waiting_sessions = nullptr;
  };

  Session(SessionId id, std::string token, SessionSpec spec, OperationLimits limits, int64_t bytes,
          std::shared_ptr<PoolEntry> pool, std::unique_ptr<SessionStorage> storage, absl::Time attached,
          Environment environment);
  ~Session();

  SessionId id() const { return id_; }
  const std::string& token() const { return token_; }
  const SessionSpec& spec() const { return spec_; }
  const OperationLimits& limits() const { return limits_; }
  const std::shared_ptr<PoolEntry>& pool() const { return pool_; }
  const ArenaLayout& arena() const { return arena_; }
  int64_t bytes() const { return bytes_; }
  // Why the session can have no server plane; empty where it can.
  const std::string& no_server_plane() const { return environment_.no_server_plane; }
  bool direct() const { return spec_.direct; }
  // Why sessions like this one can have no ordered calls; empty where they can.
  const std::string& no_ordered_calls() const { return environment_.no_ordered_calls; }
  SessionInfo Info() const;
  // Does not take the session's mutex.
  int64_t queued_operations() const { return queued_.load(std::memory_order_relaxed); }
  int64_t open_sequences() const { return open_count_.load(std::memory_order_relaxed); }
  // size_bytes of all tensors that are mapped.
  uint64_t tensor_bytes() const { return tensor_bytes_.load(std::memory_order_relaxed); }

  // Descriptor of the arena, duplicated; the caller closes it. FAILED_PRECONDITION when the session has ended.
  absl::StatusOr<int> DuplicateArenaDescriptor() const;
  // Keeps a descriptor for the RegisterTensor that names the number. Not an operation.
  absl::StatusOr<uint64_t> OfferDescriptor(FileDescriptor descriptor);
  // Closes descriptors that nobody has registered in time.
  void ExpireOffers(absl::Time now);

  // The operations. Where a call-level status is given, nothing was done. Otherwise `done` gets one status an item.
  // Memory of the request must live until `done`.
  //
  // With CallOrder::signal, `done` says what was enqueued. An error of that work is the call-level status of the next
  // operation. FAILED_PRECONDITION: the session has no ordered calls. INVALID_ARGUMENT: a number that is out of range
  // or not above the last one. Of a call that fails the daemon word comes to the number nevertheless.
  std::shared_ptr<AdmitCall> Admit(std::vector<AdmitItem> items, Done<std::vector<AdmittedSequence>> done);
  void Fork(std::vector<ForkItem> items, Done<std::vector<AdmittedSequence>> done);
  void Extend(std::vector<ExtendItem> items, Done<BatchResult> done);
  void Release(std::vector<SequenceId> ids, Done<BatchResult> done);
  // Not an operation: it waits for nothing and is not counted as queued. Tables that together have more than
  // kMaxTableBlocks blocks are refused, from the first on that is too much.
  static constexpr int64_t kMaxTableBlocks = int64_t{1} << 22;
  absl::StatusOr<std::vector<absl::StatusOr<Pool::BlockTable>>> BlockTables(absl::Span<const SequenceId> ids) const;
  // The statuses of proto/stoker/v1/sessions.proto.
  void RegisterTensor(TensorRequest request, Done<TensorId> done);
  void UnregisterTensor(TensorId id, absl::AnyInvocable<void(absl::Status) &&> done);
  void Store(std::vector<StoreItem> items, CallOrder order, Done<BatchResult> done);
  void Load(std::vector<LoadItem> items, CallOrder order, Done<BatchResult> done);
  void Commit(std::vector<CommitItem> items, CallOrder order, Done<BatchResult> done);
  void Invalidate(std::vector<InvalidateItem> items, Done<BatchResult> done);
  // `request` must live until `done`, and may be used again then.
  void Step(const StepRequest* request, Done<StepResult> done);
  // The part of Step's checks that a caller needs before it makes room for the results.
  absl::Status CheckStepShape(int64_t rows, int64_t top_k, int64_t groups) const;
  // With order.signal `done` gets 0.
  void Gather(int64_t group, std::vector<int64_t> layers, CallOrder order, Done<uint64_t> done);
  // `target` must hold layers x values x row bytes; ReadBytes checks the request and tells how many that are.
  absl::StatusOr<uint64_t> ReadBytes(const ReadRequest& request) const;
  void Read(ReadRequest request, char* target, Done<uint64_t> done);

  // What a server plane tells, one call at a time, without locks. They may be null, and must not block.
  struct PlaneEvents {
    std::function<void(const PlaneStep& last)> stepped;
    // Once, after all others.
    std::function<void(const PlaneEnding& ending)> ended;
  };
  // Arm and Disarm of residency.proto. Disarm's `done` gets the number of steps.
  void Arm(int64_t top_k, PlaneEvents events, Done<ArmResult> done);
  void Disarm(Done<uint64_t> done);

  // On the direct plane: takes in what the engine's steps have done since the last time. Says how long the last of them
  // took, where there were any.
  std::optional<PlaneStep> SampleDirect();
  // Likewise: new descriptors of the pool's memory. PERMISSION_DENIED on the other planes.
  absl::StatusOr<std::vector<FileDescriptor>> DuplicatePoolDescriptors() const;

  // Refuses new operations with `reason` and calls `drained` (never inside this call) when those that have begun are
  // done. `engine_gone`: nothing of the engine's runs any more.
  void End(absl::Status reason, bool engine_gone, absl::AnyInvocable<void() &&> drained);
  // After End, until it is drained: ends waits that the engine has made possible again. See OrderAbort.
  void AbortWaitsAgain();
  // DEADLINE_EXCEEDED: a call has waited for the engine for doorbell_timeout, and none has ended meanwhile. Does not
  // take the session's mutex.
  absl::Status CheckWaits(absl::Time now) const;
  // A call with an order that was refused before it became an operation.
  void RefuseOrder(const CallOrder& order);
  // After `drained`: closes the session's sequences in the pool and frees its memory.
  void Destroy(bool retain, absl::Time now);

 private:
  friend class OpenOperation;
  struct WriteFollowUp;
  struct Opened {
    int32_t state_row = -1;
  };
  // kEnding: it was told to.
  enum class PlaneState : uint8_t { kNone, kArmed, kEnding };

  // Begins an operation; every success is followed by one EndOperation.
  absl::Status BeginOperation() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndOperation();
  // RESOURCE_EXHAUSTED: more work is enqueued on a stream that may wait than a device takes without letting the caller
  // wait.
  absl::Status CheckBacklog() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of an item of Store or Load with so many rows: RESOURCE_EXHAUSTED, where as much is enqueued behind a wait.
  absl::Status CheckRoom(int64_t rows, absl::Span<const Tensor* const> tensors) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Before work of another session is enqueued here: where there is no room for it the waits are aborted, and the
  // session is over.
  void MakeRoomForOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From now on nothing waits for the engine.
  void AbortWaits();
  // Calls with an order: what can be said of it without the others;
  absl::Status CheckOrder(const CallOrder& order) const;
  // BeginOperation, which takes the number,
  absl::Status BeginOperation(const CallOrder& order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // the wait,
  absl::Status AwaitOrder(const CallOrder& order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // the signal, whose success with `enqueued` says that the reply goes out now,
  bool SignalOrder(const CallOrder& order, const absl::Status& enqueued) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // and what became of the work.
  absl::Status Outcome(const CallOrder& order, bool answered, absl::Status work);
  // What a call says before its work is done: that it did not begin, or, with a signal, that it is enqueued.
  template <typename Result>
  void AnswerNow(const CallOrder& order, const absl::Status& begun, std::optional<Result> early, Done<Result> done);
  // Of calls that were refused: the daemon word comes to their numbers behind the work before them.
  void OweOrder(const CallOrder& order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PayOrder() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Opened> Find(SequenceId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckItems(absl::string_view field, size_t count) const;
  absl::Status CheckStep(const StepRequest& request) const;
  absl::Status CheckRange(const RowRange& range) const;
  absl::Status CheckStaging(const RowRange& range, uint64_t offset) const;
  int64_t BytesPerRow() const;  // of all layers
  // The rest of RegisterTensor and UnregisterTensor, on the thread of Environment::post.
  void MapTensor(TensorRequest request, FileDescriptor descriptor, Done<TensorId> done);
  void UnmapTensor(std::unique_ptr<Tensor> tensor, absl::AnyInvocable<void(absl::Status) &&> done);
  void ReleaseTensorPlace(uint64_t bytes);
  // The tensors that an item names, for so many rows, after all checks.
  absl::StatusOr<std::vector<const Tensor*>> FindTensors(const TensorRows& rows, int64_t row_count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static TensorWork MakeTensorWork(std::vector<int32_t> pool_rows, std::vector<const Tensor*> tensors,
                                   const TensorRows& rows);
  SequenceLimits sequence_limits() const { return {spec_.max_sequence_rows, limits_.max_reserved_blocks}; }

  // BeginOperation for one that moves `bytes` of rows in its message, of its `field`. RESOURCE_EXHAUSTED: more than
  // bounce memory can hold.
  absl::Status BeginBounced(absl::string_view field, int64_t bytes, const CallOrder& order);
  // The rest of Store and Read, once the rows are where the device reaches them. The operation has begun, but of a
  // Store without `memory`.
  void StoreBegun(std::vector<StoreItem> items, CallOrder order, Bounce::Memory memory, Done<BatchResult> done);
  void ReadBegun(const ReadRequest& request, uint64_t bytes, char* target, Done<uint64_t> done);

  // `again` is called when a waiting admission is worth another try.
  absl::StatusOr<Admission> AdmitOne(const AdmitItem& item, const std::vector<AdmittedSequence>& opened,
                                     const std::function<void()>& again) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a state row for an admission and enqueues what makes it usable.
  AdmittedSequence OpenAdmitted(const Admission& admission) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckStateRowFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Enqueues the copies, table updates and invalidations of a write in this session.
  absl::Status EnqueuePlan(int32_t state_row, const WritePlan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What other sessions need to hear of a write, once it is done. Before anything of it is enqueued, so that what it
  // replaces is given back in any case.
  static void AddFollowUp(SequenceId id, SessionId writer, const WritePlan& plan,
                          std::vector<WriteFollowUp>* follow_ups);
  // Tells them, gives back replaced blocks, then calls `done`.
  void FollowUp(std::vector<WriteFollowUp> follow_ups, absl::AnyInvocable<void() &&> done);
  // A write of another session reaches this one. `done` is called when no work here uses the old blocks any more.
  void ApplyForeignWrite(SequenceId id, const WriteFollowUp& write, absl::AnyInvocable<void() &&> done);
  // Closes sequences that were opened for a caller who will not hear of it.
  void Abandon(const std::vector<SequenceId>& ids);
  void CloseSequences(std::vector<std::pair<SequenceId, int32_t>> closing, bool retain, absl::Time now);
  // FAILED_PRECONDITION: doorbells, or the engine itself, start this session's steps.
  absl::Status CheckNotArmed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ArmNow(int64_t top_k, PlaneEvents events) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PlaneEnded();
  // Takes in what a plane has done.
  void CountPlane(const PlaneSample& sample);
  void CountLookups(const StepWork& work);
  // Takes in the device's totals; returns the bytes gathered since the last time.
  uint64_t CountDevice(const DeviceTotals& totals);

  const SessionId id_;
  const std::string token_;
  const SessionSpec spec_;
  const OperationLimits limits_;
  const int64_t bytes_;
  const std::shared_ptr<PoolEntry> pool_;
  const absl::Time attached_;
  const Environment environment_;
  ArenaLayout arena_;
  const std::shared_ptr<OrderAbort> order_abort_;  // null: no ordered calls
  Bounce* const bounce_;                           // null: the device reaches messages

  mutable absl::Mutex mutex_;
  std::unique_ptr<SessionStorage> storage_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, Opened> open_ ABSL_GUARDED_BY(mutex_);
  std::vector<int32_t> free_state_rows_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  absl::AnyInvocable<void() &&> drained_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_order_ ABSL_GUARDED_BY(mutex_) = 0;                           // number of the last call with an order
  uint64_t owed_order_ ABSL_GUARDED_BY(mutex_) = 0;                           // not 0: of a call that was refused
  absl::Status late_error_ ABSL_GUARDED_BY(mutex_);                           // of work whose reply had gone out
  std::vector<std::weak_ptr<AdmitCall>> admissions_ ABSL_GUARDED_BY(mutex_);  // those that may be waiting
  PlaneState plane_ ABSL_GUARDED_BY(mutex_) = PlaneState::kNone;
  std::vector<absl::AnyInvocable<void() &&>> on_plane_end_ ABSL_GUARDED_BY(mutex_);
  TensorRegistry tensors_ ABSL_GUARDED_BY(mutex_);
  DescriptorOffers offers_ ABSL_GUARDED_BY(mutex_);
  // Calls whose work waits, or is behind its wait, by number.
  mutable absl::Mutex waits_mutex_;
  std::deque<uint64_t> waits_ ABSL_GUARDED_BY(waits_mutex_);
  absl::Time waits_since_ ABSL_GUARDED_BY(waits_mutex_);  // since when nothing of the session has ended
  bool is_full_ ABSL_GUARDED_BY(waits_mutex_) = false;    // see MakeRoomForOthers
  absl::Mutex device_mutex_;
  DeviceTotals device_totals_ ABSL_GUARDED_BY(device_mutex_);
  PlaneSample plane_sample_ ABSL_GUARDED_BY(device_mutex_);
  std::atomic<bool> waits_aborted_{false};
  std::atomic<int64_t> queued_{0};
  std::atomic<int64_t> open_count_{0};
  std::atomic<uint64_t> tensor_bytes_{0};
  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> lookups_[kOutcomeCount]{};
};

}  // namespace stoker::core
