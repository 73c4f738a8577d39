// All pools and sessions of a daemon, by name and id, and the limits that they share.
//
// Thread safety: a Registry may be used by any thread. What allocates or waits runs on one of its two threads and calls
// back from there: pools are made and freed on one, which can take minutes, all else happens on the other. A call that
// is refused may call back at once.
//
// Invariants:
//  1. The memory of all pools is at most max_pool_bytes, of all arenas at most max_hot_bytes; both are counted before
//  they
//     are allocated and until they are freed.
//  2. A pool lives as long as a session is attached to it.
//  3. A session that has ended is unreachable by id and token at once; its memory is freed when its last work is done.
//  4. Between Expect and the end of CreateExpected nothing but descriptions is to be had: see Ready.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/background.h"
#include "server/core/engine.h"
#include "server/core/session.h"

namespace stoker::core {

struct RegistryLimits {
  int64_t max_pool_bytes = 0;
  int64_t max_hot_bytes = 0;
  int64_t max_hot_bytes_per_session = 0;  // 0: max_hot_bytes
  int64_t max_sessions = 0;
  int64_t max_sequences_per_session = 0;
  int64_t max_reserved_blocks_per_session = 0;  // 0: the pool's blocks
  int64_t max_batch_items = 0;
  int64_t max_queued_operations = 0;
  int64_t max_tensors_per_session = 0;
  int64_t max_tensor_bytes_per_session = 0;
  absl::Duration sequence_retention;
  absl::Duration drain_grace;
  int64_t pool_pressure_percent = 0;
  int64_t max_armed_sessions = 0;
  bool direct_plane = false;  // whether sessions may be on it
  absl::Duration doorbell_timeout;
  bool populate_pools = false;
};

// A pool that is being made.
struct PoolInTheMaking {
  std::string name;
  int64_t bytes = 0;
  int64_t populated_bytes = 0;
};

struct PoolDescription {
  PoolSpec spec;
  int64_t bytes = 0;
  BlockCounts blocks;
  int64_t sequences = 0;
  int64_t sessions = 0;
};

struct RegistryUsage {
  int64_t sessions = 0;
  int64_t hot_bytes = 0;
  int64_t pool_bytes = 0;
  int64_t armed_sessions = 0;
  int64_t ordered_sessions = 0;
};

class Registry {
 public:
  // Events of a session, called without locks, each from one thread at a time and none after `ended`.
  struct SessionEvents {
    std::function<void(absl::Duration grace)> draining;
    std::function<void(const BlockCounts& blocks)> pool_pressure;
    std::function<void(SessionId by)> superseded;
    // On the direct plane: steps were done since the last time. May be null.
    std::function<void(const PlaneStep& last)> stepped;
    // The session is over, its memory freed. OK after Detach.
    std::function<void(absl::Status reason)> ended;
  };

  // What the making of pools tells, one call at a time for each pool.
  struct PoolEvents {
    std::function<void(const std::string& pool, const PoolProgress& progress)> progress;
    std::function<void(const PoolDescription& pool)> created;
  };

  // `engine` must outlive the registry. `epoch` tells this boot of the daemon from others.
  Registry(Engine* engine, RegistryLimits limits, uint64_t epoch, std::function<absl::Time()> now,
           PoolEvents pool_events = {});
  // Ends all sessions and frees all pools.
  ~Registry();

  uint64_t epoch() const { return epoch_; }
  const RegistryLimits& limits() const { return limits_; }
  const std::vector<std::string>& devices() const { return engine_->devices(); }
  bool MpsEnabled() const { return engine_->MpsEnabled(); }

  // Declares the pools that must be there before anything else is: from now on Ready is not OK. At most once, before
  // any other call. The status is that of the first pool whose spec is wrong or that goes beyond the limits.
  absl::Status Expect(std::vector<PoolSpec> specs);
  // Makes the pools of Expect, one after the other, in the background. `done` is called once, with the first error; on
  // success Ready is OK from then on.
  void CreateExpected(absl::AnyInvocable<void(absl::Status) &&> done);
  // UNAVAILABLE, with bytes done and expected, while pools of Expect are missing. Every call that needs a pool or a
  // session returns this first.
  absl::Status Ready() const;
  // Stops the making of pools, now and from now on: calls get UNAVAILABLE.
  void StopPopulating() { stop_populating_.store(true); }
  std::vector<PoolInTheMaking> PoolsInTheMaking() const;

  // The statuses of proto/stoker/v1/pools.proto.
  void CreatePool(PoolSpec spec, absl::AnyInvocable<void(absl::StatusOr<PoolDescription>) &&> done);
  absl::StatusOr<PoolDescription> DescribePool(absl::string_view name) const;
  std::vector<PoolDescription> DescribePools() const;
  void DeletePool(std::string name, absl::AnyInvocable<void(absl::Status) &&> done);
  // For metrics and listings.
  std::vector<std::shared_ptr<PoolEntry>> Pools() const;
  absl::StatusOr<std::shared_ptr<PoolEntry>> FindPool(absl::string_view name) const;

  // Why no session of the pool can be on the direct plane; empty where one can.
  std::string NoDirectPlane(const PoolEntry& pool) const;
  // The statuses of Attach in sessions.proto.
  void Attach(SessionSpec spec, SessionEvents events,
              absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Session>>) &&> done);
  // UNAUTHENTICATED: no token. FAILED_PRECONDITION: of an earlier boot, or of a session that has ended.
  // PERMISSION_DENIED: wrong.
  absl::StatusOr<std::shared_ptr<Session>> Authenticate(absl::string_view token) const;
  std::shared_ptr<Session> FindSession(SessionId id) const;
  std::vector<std::shared_ptr<Session>> Sessions() const;
  // Ends a session. With `retain`, its sequences are kept for the retention time. NOT_FOUND.
  absl::Status EndSession(SessionId id, absl::Status reason, bool retain);

  // Refuses new sessions and pools, and tells the attached sessions.
  void Drain();
  void Undrain();
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  RegistryUsage Usage() const;

 private:
  struct Entry {
    std::shared_ptr<Session> session;
    std::shared_ptr<SessionEvents> events;
    bool pressed = false;  // has been told of pool pressure and not of its end
  };
  struct AttachCall {
    SessionSpec spec;
    std::shared_ptr<SessionEvents> events;
    absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Session>>) &&> done;
    SessionId id;  // once it has been told to a session that this one supersedes
  };
  // A session that is unreachable, and still has work or memory.
  struct Ending {
    std::string pool;
    std::string name;
    std::vector<std::shared_ptr<AttachCall>> waiting;
    std::shared_ptr<Session> session;
  };

  // Also a session that has ended and may still have work running.
  std::shared_ptr<Session> FindWorking(SessionId id) const;

  absl::StatusOr<std::shared_ptr<PoolEntry>> CreatePoolNow(PoolSpec spec);
  // Memory for a pool that is on the account already.
  absl::StatusOr<std::unique_ptr<PoolStorage>> Populate(const PoolSpec& spec, int64_t bytes, int64_t* populated_bytes);
  // Attaches, or returns null: ContinueAttach is called again when the session that has the name is gone.
  absl::StatusOr<std::shared_ptr<Session>> AttachNow(const std::shared_ptr<AttachCall>& call);
  void ContinueAttach(const std::shared_ptr<AttachCall>& call);
  // Whether a session of the call's pool and name is ending; then the call waits for that.
  bool AwaitNamesake(const std::shared_ptr<AttachCall>& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSpec(const PoolSpec& pool, SessionSpec* spec) const;
  PoolDescription Describe(const PoolEntry& entry) const;
  std::string MakeToken(SessionId id) const;
  void Tick();

  Engine* const engine_;
  const RegistryLimits limits_;
  const uint64_t epoch_;
  const std::function<absl::Time()> now_;
  const PoolEvents pool_events_;
  WaitingSessions waiting_sessions_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> ready_{true};
  std::atomic<bool> stop_populating_{false};

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<PoolEntry>, std::less<>> pools_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SessionId, Entry> sessions_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SessionId, Ending> ending_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_session_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t session_count_ ABSL_GUARDED_BY(mutex_) = 0;  // also those whose memory is not freed yet
  int64_t hot_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pool_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<PoolSpec> expected_ ABSL_GUARDED_BY(mutex_);
  int64_t expected_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, PoolInTheMaking> in_the_making_ ABSL_GUARDED_BY(mutex_);
  // Last: their tasks use the rest. Those of the first post to the second.
  std::unique_ptr<Background> pool_maker_;
  std::unique_ptr<Background> background_;
};

}  // namespace stoker::core
