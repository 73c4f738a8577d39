#include "server/core/registry.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/core/check.h"

namespace stoker::core {
namespace {

constexpr absl::Duration kTickPeriod = absl::Milliseconds(200);
constexpr int64_t kMaxSessionName = 63;
constexpr int64_t kMaxTopK = 8192;
constexpr int64_t kMaxHotRows = 32768;
constexpr int64_t kMaxBatchRows = 4096;
constexpr int64_t kMaxSequenceRows = int64_t{1} << 24;
constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxStagingBytes = int64_t{1} << 32;
constexpr int64_t kStagingAlignment = 64;

absl::Status OutOfRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, " given, limits ", low, " and ", high));
}

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  return value < low || value > high ? OutOfRange(field, value, low, high) : absl::OkStatus();
}

// Compares in a time that does not depend on where the two differ.
bool SecretsEqual(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Registry::Registry(Engine* engine, RegistryLimits limits, uint64_t epoch, std::function<absl::Time()> now,
                   PoolEvents pool_events)
    : engine_(engine),
      limits_(limits),
      epoch_(epoch),
      now_(std::move(now)),
      pool_events_(std::move(pool_events)),
      waiting_sessions_(limits.max_armed_sessions),
      pool_maker_(std::make_unique<Background>(absl::InfiniteDuration(), [] {})),
      background_(std::make_unique<Background>(kTickPeriod, [this] { Tick(); })) {}

Registry::~Registry() {
  StopPopulating();
  for (const std::shared_ptr<Session>& session : Sessions()) {
    EndSession(session->id(), absl::UnavailableError("the daemon stops"), /*retain=*/false).IgnoreError();
  }
  const auto gone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return session_count_ == 0; };
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&gone));
  }
  background_.reset();
  pool_maker_.reset();
}

absl::Status Registry::Ready() const {
  if (ready_.load(std::memory_order_acquire)) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  int64_t populated_bytes = 0;
  for (const auto& [name, entry] : pools_) populated_bytes += entry->bytes;
  for (const auto& [name, pool] : in_the_making_) populated_bytes += pool.populated_bytes;
  return absl::UnavailableError(
      absl::StrCat("pools are being populated: ", populated_bytes, " of ", expected_bytes_, " bytes"));
}

absl::Status Registry::Expect(std::vector<PoolSpec> specs) {
  absl::MutexLock lock(&mutex_);
  for (const PoolSpec& given : specs) {
    PoolSpec spec = given;
    absl::Status status = spec.Normalize();
    const absl::StatusOr<int64_t> bytes = status.ok() ? engine_->PoolBytes(spec) : status;
    if (!bytes.ok())
      return absl::Status(bytes.status().code(), absl::StrCat("pool ", spec.name, ": ", bytes.status().message()));
    if (*bytes > limits_.max_pool_bytes - expected_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat("pool ", spec.name, ": blocks: needs ", *bytes, " bytes, ",
                                                       expected_bytes_, " are in use, limit max_pool_bytes ",
                                                       limits_.max_pool_bytes));
    }
    expected_bytes_ += *bytes;
  }
  expected_ = std::move(specs);
  ready_.store(expected_.empty(), std::memory_order_release);
  return absl::OkStatus();
}

void Registry::CreateExpected(absl::AnyInvocable<void(absl::Status) &&> done) {
  pool_maker_->Post([this, done = std::move(done)]() mutable {
    std::vector<PoolSpec> specs;
    {
      absl::MutexLock lock(&mutex_);
      specs = std::move(expected_);
    }
    absl::Status status;
    for (PoolSpec& spec : specs) {
      const std::string name = spec.name;
      status = CreatePoolNow(std::move(spec)).status();
      if (status.ok()) continue;
      status = absl::Status(status.code(), absl::StrCat("pool ", name, ": ", status.message()));
      break;
    }
    if (status.ok()) ready_.store(true, std::memory_order_release);
    std::move(done)(std::move(status));
  });
}

std::vector<PoolInTheMaking> Registry::PoolsInTheMaking() const {
  absl::MutexLock lock(&mutex_);
  std::vector<PoolInTheMaking> pools;
  for (const auto& [name, pool] : in_the_making_) pools.push_back(pool);
  return pools;
}

PoolDescription Registry::Describe(const PoolEntry& entry) const {
  PoolDescription description;
  description.spec = entry.pool.spec();
  description.bytes = entry.bytes;
  const PoolCounters& counters = entry.pool.counters();
  description.blocks = {counters.free_blocks.load(), counters.referenced_blocks.load(), counters.cached_blocks.load()};
  description.sequences = counters.sequences.load();
  description.sessions = entry.sessions.load();
  return description;
}

void Registry::CreatePool(PoolSpec spec, absl::AnyInvocable<void(absl::StatusOr<PoolDescription>) &&> done) {
  if (absl::Status status = Ready(); !status.ok()) return std::move(done)(status);
  pool_maker_->Post([this, spec = std::move(spec), done = std::move(done)]() mutable {
    if (draining()) return std::move(done)(absl::UnavailableError("the daemon drains and accepts no new pool"));
    const absl::StatusOr<std::shared_ptr<PoolEntry>> entry = CreatePoolNow(std::move(spec));
    if (entry.ok()) {
      std::move(done)(Describe(**entry));
    } else {
      std::move(done)(entry.status());
    }
  });
}

absl::StatusOr<std::shared_ptr<PoolEntry>> Registry::CreatePoolNow(PoolSpec spec) {
  if (absl::Status status = spec.Normalize(); !status.ok()) return status;
  absl::StatusOr<int64_t> bytes = engine_->PoolBytes(spec);
  if (!bytes.ok()) return bytes.status();
  {
    absl::MutexLock lock(&mutex_);
    const auto it = pools_.find(spec.name);
    if (it != pools_.end()) {
      if (it->second->pool.spec() == spec) return it->second;
      return absl::AlreadyExistsError(absl::StrCat("name: pool ", spec.name, " exists with another spec"));
    }
    if (*bytes > limits_.max_pool_bytes - pool_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat("blocks: pool ", spec.name, " needs ", *bytes, " bytes, ",
                                                       pool_bytes_, " are in use, limit max_pool_bytes ",
                                                       limits_.max_pool_bytes));
    }
    pool_bytes_ += *bytes;
  }
  int64_t populated_bytes = 0;
  absl::StatusOr<std::unique_ptr<PoolStorage>> storage = Populate(spec, *bytes, &populated_bytes);
  std::shared_ptr<PoolEntry> entry;
  {
    absl::MutexLock lock(&mutex_);
    in_the_making_.erase(spec.name);
    if (!storage.ok()) {
      pool_bytes_ -= *bytes;
      return storage.status();
    }
    entry = std::make_shared<PoolEntry>(spec, limits_.sequence_retention);
    entry->storage = *std::move(storage);
    entry->pool.UseWords(entry->storage->sequence_words());
    entry->bytes = *bytes;
    entry->populated_bytes = populated_bytes;
    pools_.emplace(spec.name, entry);
  }
  if (pool_events_.created != nullptr) pool_events_.created(Describe(*entry));
  return entry;
}

absl::StatusOr<std::unique_ptr<PoolStorage>> Registry::Populate(const PoolSpec& spec, int64_t bytes,
                                                                int64_t* populated_bytes) {
  const absl::Status stopped = absl::UnavailableError("the daemon stops");
  if (stop_populating_.load()) return stopped;
  {
    absl::MutexLock lock(&mutex_);
    in_the_making_[spec.name] = {spec.name, bytes, 0};
  }
  PoolPopulation population;
  population.populate = limits_.populate_pools;
  population.progress = [&](const PoolProgress& progress) {
    // A page that is to be pinned has been faulted in.
    *populated_bytes = progress.phase == PoolProgress::Phase::kPin ? progress.total_bytes : progress.done_bytes;
    {
      absl::MutexLock lock(&mutex_);
      in_the_making_[spec.name].populated_bytes = *populated_bytes;
    }
    if (pool_events_.progress != nullptr) pool_events_.progress(spec.name, progress);
    return !stop_populating_.load();
  };
  absl::StatusOr<std::unique_ptr<PoolStorage>> storage = engine_->CreatePool(spec, population);
  if (absl::IsCancelled(storage.status())) return stopped;
  return storage;
}

absl::StatusOr<std::shared_ptr<PoolEntry>> Registry::FindPool(absl::string_view name) const {
  if (absl::Status status = Ready(); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  const auto it = pools_.find(name);
  if (it == pools_.end()) {
    return absl::NotFoundError(absl::StrCat("pool: no pool is named \"", name, "\"; there are ", pools_.size()));
  }
  return it->second;
}

absl::StatusOr<PoolDescription> Registry::DescribePool(absl::string_view name) const {
  const absl::StatusOr<std::shared_ptr<PoolEntry>> entry = FindPool(name);
  if (!entry.ok()) return entry.status();
  return Describe(**entry);
}

std::vector<std::shared_ptr<PoolEntry>> Registry::Pools() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<PoolEntry>> pools;
  for (const auto& [name, entry] : pools_) pools.push_back(entry);
  return pools;
}

std::vector<PoolDescription> Registry::DescribePools() const {
  std::vector<PoolDescription> descriptions;
  for (const std::shared_ptr<PoolEntry>& entry : Pools()) descriptions.push_back(Describe(*entry));
  return descriptions;
}

void Registry::DeletePool(std::string name, absl::AnyInvocable<void(absl::Status) &&> done) {
  if (absl::Status status = Ready(); !status.ok()) return std::move(done)(status);
  background_->Post([this, name = std::move(name), done = std::move(done)]() mutable {
    std::shared_ptr<PoolEntry> entry;
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      const auto it = pools_.find(name);
      if (it == pools_.end()) {
        status = absl::NotFoundError(absl::StrCat("name: no pool is named \"", name, "\""));
      } else {
        const int64_t sessions = it->second->sessions.load();
        const int64_t sequences = it->second->pool.counters().sequences.load();
        if (sessions > 0 || sequences > 0) {
          status = absl::FailedPreconditionError(
              absl::StrCat("name: pool ", name, " has ", sessions, " sessions and ", sequences, " sequences, limit 0"));
        } else {
          entry = std::move(it->second);
          pools_.erase(it);
        }
      }
    }
    if (!status.ok()) return std::move(done)(status);
    // Nobody can attach to it any more. Giving back pinned memory takes up to 0.2 s a GiB.
    pool_maker_->Post([this, entry = std::move(entry), done = std::move(done)]() mutable {
      entry->storage.reset();
      {
        absl::MutexLock lock(&mutex_);
        pool_bytes_ -= entry->bytes;
      }
      std::move(done)(absl::OkStatus());
    });
  });
}

absl::Status Registry::CheckSpec(const PoolSpec& pool, SessionSpec* spec) const {
  if (static_cast<int64_t>(spec->name.size()) > kMaxSessionName) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", spec->name.size(), " bytes given, limit ", kMaxSessionName));
  }
  for (const char c : spec->name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && !absl::StrContains("_.:-", c)) {
      return absl::InvalidArgumentError(
          absl::StrCat("name: \"", absl::CHexEscape(spec->name), "\" given, allowed are [a-zA-Z0-9_.:-]"));
    }
  }
  const std::vector<std::string>& devices = engine_->devices();
  if (spec->device.empty()) spec->device = devices[0];
  if (std::find(devices.begin(), devices.end(), spec->device) == devices.end()) {
    return absl::InvalidArgumentError(absl::StrCat("device: \"", absl::CHexEscape(spec->device),
                                                   "\" given, the devices are ", absl::StrJoin(devices, ", ")));
  }
  if (spec->ordered_calls) {
    const std::string reason = engine_->NoOrderedCalls(spec->device);
    if (!reason.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("ordered_calls: given, not available on ", spec->device, ": ", reason));
    }
  }
  if (spec->max_batch_rows == 0) spec->max_batch_rows = std::min(spec->state_rows, kMaxBatchRows);
  for (const absl::Status& status : {CheckRange("state_rows", spec->state_rows, 1, limits_.max_sequences_per_session),
                                     CheckRange("hot_rows", spec->hot_rows, 1, kMaxHotRows),
                                     CheckRange("max_top_k", spec->max_top_k, 1, std::min(kMaxTopK, spec->hot_rows)),
                                     CheckRange("max_batch_rows", spec->max_batch_rows, 1, kMaxBatchRows),
                                     CheckRange("max_sequence_rows", spec->max_sequence_rows, 1, kMaxSequenceRows),
                                     CheckRange("groups", static_cast<int64_t>(spec->groups.size()), 1, kMaxGroups),
                                     CheckRange("staging_bytes", spec->staging_bytes, 0, kMaxStagingBytes)}) {
    if (!status.ok()) return status;
  }
  if (spec->staging_bytes % kStagingAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging_bytes: ", spec->staging_bytes, " given, not a multiple of ", kStagingAlignment));
  }
  if (spec->index_space == IndexSpace::kUnspecified) {
    return absl::InvalidArgumentError("index_space: not given, allowed are POSITION and POOL_ROW");
  }
  std::vector<bool> seen(pool.layers, false);
  for (size_t g = 0; g < spec->groups.size(); ++g) {
    if (spec->groups[g].empty()) return absl::InvalidArgumentError(absl::StrCat("groups: group ", g, " has no layer"));
    for (const int32_t layer : spec->groups[g]) {
      if (layer < 0 || layer >= pool.layers) {
        // As it was sent: unsigned.
        return absl::InvalidArgumentError(absl::StrCat("groups: layer ", static_cast<uint32_t>(layer),
                                                       " given in group ", g, ", limit ", pool.layers - 1));
      }
      if (seen[layer]) return absl::InvalidArgumentError(absl::StrCat("groups: layer ", layer, " is in two groups"));
      seen[layer] = true;
    }
  }
  const int64_t most =
      limits_.max_reserved_blocks_per_session > 0 ? limits_.max_reserved_blocks_per_session : pool.blocks;
  if (spec->max_reserved_blocks == 0) spec->max_reserved_blocks = most;
  return CheckRange("max_reserved_blocks", spec->max_reserved_blocks, 1, most);
}

std::string Registry::NoDirectPlane(const PoolEntry& pool) const {
  if (!limits_.direct_plane) return "direct_plane is off in the daemon's configuration";
  return engine_->NoDirectPlane(*pool.storage);
}

std::string Registry::MakeToken(SessionId id) const {
  uint64_t secret[2];
  // The kernel's generator never fails for so few bytes once it is seeded, and waits until it is.
  while (getrandom(secret, sizeof secret, 0) != sizeof secret) {
  }
  return absl::StrFormat("%016x-%x-%016x%016x", epoch_, id.value, secret[0], secret[1]);
}

void Registry::Attach(SessionSpec spec, SessionEvents events,
                      absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Session>>) &&> done) {
  auto call = std::make_shared<AttachCall>();
  call->spec = std::move(spec);
  call->events = std::make_shared<SessionEvents>(std::move(events));
  call->done = std::move(done);
  background_->Post([this, call] { ContinueAttach(call); });
}

void Registry::ContinueAttach(const std::shared_ptr<AttachCall>& call) {
  absl::StatusOr<std::shared_ptr<Session>> session = AttachNow(call);
  if (session.ok() && *session == nullptr) return;  // called again when its namesake is gone
  std::move(call->done)(std::move(session));
}

bool Registry::AwaitNamesake(const std::shared_ptr<AttachCall>& call) {
  if (call->spec.name.empty()) return false;
  for (auto& [id, ending] : ending_) {
    if (ending.pool != call->spec.pool || ending.name != call->spec.name) continue;
    ending.waiting.push_back(call);
    return true;
  }
  return false;
}

absl::StatusOr<std::shared_ptr<Session>> Registry::AttachNow(const std::shared_ptr<AttachCall>& call) {
  SessionSpec spec = call->spec;
  if (draining()) return absl::UnavailableError("the daemon drains and accepts no new session");
  const absl::StatusOr<std::shared_ptr<PoolEntry>> found = FindPool(spec.pool);
  if (!found.ok()) return found.status();
  const std::shared_ptr<PoolEntry>& pool = *found;
  if (absl::Status status = CheckSpec(pool->pool.spec(), &spec); !status.ok()) return status;
  if (spec.direct) {
    const std::string reason = NoDirectPlane(*pool);
    if (!reason.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("plane: the direct plane is not available: ", reason));
    }
  }
  if (spec.ordered_calls) {
    // What an engine still sets, or waits for, when its session has ended must not be another session's: an allocation
    // with a descriptor is the engine's until it lets go.
    if (spec.arena_sharing == ArenaSharing::kIpcHandle) {
      return absl::InvalidArgumentError(
          "arena_sharing: ARENA_SHARING_IPC_HANDLE given with ordered_calls, allowed are UNSPECIFIED (0) and "
          "ARENA_SHARING_DESCRIPTOR (2)");
    }
    if (engine_->RecyclesArenas(spec.device)) spec.arena_sharing = ArenaSharing::kDescriptor;
  }
  if (const std::string reason = engine_->NoArenaSharing(spec.device, spec.arena_sharing); !reason.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "arena_sharing: ",
        spec.arena_sharing == ArenaSharing::kIpcHandle ? "ARENA_SHARING_IPC_HANDLE" : "ARENA_SHARING_DESCRIPTOR",
        " given, not available on ", spec.device, ": ", reason));
  }
  const absl::StatusOr<int64_t> bytes = engine_->SessionBytes(pool->pool.spec(), spec);
  if (!bytes.ok()) return bytes.status();
  if (limits_.max_hot_bytes_per_session > 0 && *bytes > limits_.max_hot_bytes_per_session) {
    return absl::ResourceExhaustedError(absl::StrCat("state_rows: hot buffers and state need ", *bytes,
                                                     " bytes, limit max_hot_bytes_per_session ",
                                                     limits_.max_hot_bytes_per_session));
  }

  SessionId superseded;
  std::shared_ptr<SessionEvents> old_events;
  {
    absl::MutexLock lock(&mutex_);
    if (AwaitNamesake(call)) return nullptr;
    if (!spec.name.empty()) {
      for (const auto& [other_id, other] : sessions_) {
        if (other.session->spec().name == spec.name && other.session->spec().pool == spec.pool) superseded = other_id;
      }
    }
    const int64_t sessions = session_count_ - (superseded ? 1 : 0);
    if (sessions >= limits_.max_sessions) {
      return absl::ResourceExhaustedError(
          absl::StrCat("sessions: ", sessions, " are attached, limit max_sessions ", limits_.max_sessions));
    }
    const int64_t hot_bytes = hot_bytes_ - (superseded ? sessions_[superseded].session->bytes() : 0);
    if (*bytes > limits_.max_hot_bytes - hot_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("state_rows: hot buffers and state need ", *bytes, " bytes, ",
                                                       hot_bytes, " are in use, limit max_hot_bytes ",
                                                       limits_.max_hot_bytes));
    }
    if (spec.ordered_calls) {
      const bool going = superseded && sessions_[superseded].session->spec().ordered_calls;
      if (absl::Status status = waiting_sessions_.CheckOrdered(going ? 1 : 0); !status.ok()) return status;
    }
    if (!call->id) call->id = SessionId{next_session_++};
    if (superseded) {
      old_events = sessions_[superseded].events;
    } else {
      hot_bytes_ += *bytes;
      ++session_count_;
    }
  }
  const SessionId id = call->id;
  if (superseded) {
    old_events->superseded(id);
    EndSession(superseded,
               absl::AbortedError(absl::StrCat("session ", superseded.value, " was superseded by session ", id.value,
                                               " of the same name")),
               /*retain=*/true)
        .IgnoreError();
    // Only when it has let go of its sequences can the new session become their writer, and have its memory. Sessions
    // are destroyed on this thread, so it is still ending, whoever ended it.
    absl::MutexLock lock(&mutex_);
    STOKER_CHECK(AwaitNamesake(call));
    return nullptr;
  }
  auto give_back = absl::MakeCleanup([&] {
    absl::MutexLock lock(&mutex_);
    hot_bytes_ -= *bytes;
    --session_count_;
  });
  if (spec.ordered_calls) {
    if (absl::Status status = waiting_sessions_.TakeOrdered(); !status.ok()) return status;
  }
  auto give_ordered_back = absl::MakeCleanup([&, ordered = spec.ordered_calls] {
    if (ordered) waiting_sessions_.GiveOrderedBack();
  });
  absl::StatusOr<std::unique_ptr<SessionStorage>> storage =
      engine_->CreateSession(pool->pool.spec(), *pool->storage, spec);
  if (!storage.ok()) return storage.status();
  std::move(give_back).Cancel();
  const OperationLimits operation_limits = {
      limits_.max_batch_items,
      limits_.max_queued_operations,
      spec.max_reserved_blocks,
      limits_.doorbell_timeout,
      {limits_.max_tensors_per_session, static_cast<uint64_t>(limits_.max_tensor_bytes_per_session)}};
  Session::Environment environment;
  environment.find_session = [this](SessionId other) { return FindWorking(other); };
  environment.map_memory = [this](const std::string& device, const ClientMemorySource& source) {
    return engine_->MapClientMemory(device, source);
  };
  environment.post = [this](absl::AnyInvocable<void() &&> task) { background_->Post(std::move(task)); };
  environment.no_server_plane =
      spec.direct ? "the session is on the direct plane" : engine_->NoServerPlane(spec.device);
  environment.no_ordered_calls = engine_->NoOrderedCalls(spec.device);
  environment.waiting_sessions = &waiting_sessions_;
  auto session = std::make_shared<Session>(id, MakeToken(id), std::move(spec), operation_limits, *bytes, pool,
                                           *std::move(storage), now_(), std::move(environment));
  absl::MutexLock lock(&mutex_);
  if (draining()) {
    // Drain has told the sessions that it found; this one came too late to be told.
    hot_bytes_ -= *bytes;
    --session_count_;
    return absl::UnavailableError("the daemon drains and accepts no new session");
  }
  std::move(give_ordered_back).Cancel();
  pool->sessions.fetch_add(1);
  sessions_[id] = {session, call->events};
  return session;
}

absl::StatusOr<std::shared_ptr<Session>> Registry::Authenticate(absl::string_view token) const {
  if (absl::Status status = Ready(); !status.ok()) return status;
  if (token.empty()) return absl::UnauthenticatedError("stoker-token: not given in the metadata");
  const std::vector<absl::string_view> parts = absl::StrSplit(token, '-');
  uint64_t epoch = 0, id = 0;
  if (parts.size() != 3 || !absl::SimpleHexAtoi(parts[0], &epoch) || !absl::SimpleHexAtoi(parts[1], &id)) {
    return absl::PermissionDeniedError("stoker-token: is not a token of this daemon");
  }
  if (epoch != epoch_) {
    return absl::FailedPreconditionError(
        absl::StrCat("stoker-token: is of boot epoch ", epoch, ", this daemon's is ", epoch_, "; attach again"));
  }
  std::shared_ptr<Session> session = FindSession(SessionId{id});
  if (session == nullptr) {
    absl::MutexLock lock(&mutex_);
    if (id == 0 || id >= next_session_)
      return absl::PermissionDeniedError("stoker-token: is not a token of this daemon");
    return absl::FailedPreconditionError(absl::StrCat("stoker-token: session ", id, " has ended; attach again"));
  }
  if (!SecretsEqual(session->token(), token)) {
    return absl::PermissionDeniedError("stoker-token: is not a token of this daemon");
  }
  return session;
}

std::shared_ptr<Session> Registry::FindWorking(SessionId id) const {
  absl::MutexLock lock(&mutex_);
  if (const auto it = sessions_.find(id); it != sessions_.end()) return it->second.session;
  const auto it = ending_.find(id);
  return it == ending_.end() ? nullptr : it->second.session;
}

std::shared_ptr<Session> Registry::FindSession(SessionId id) const {
  absl::MutexLock lock(&mutex_);
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second.session;
}

std::vector<std::shared_ptr<Session>> Registry::Sessions() const {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, entry] : sessions_) sessions.push_back(entry.session);
  }
  std::sort(sessions.begin(), sessions.end(), [](const auto& a, const auto& b) { return a->id() < b->id(); });
  return sessions;
}

absl::Status Registry::EndSession(SessionId id, absl::Status reason, bool retain) {
  Entry entry;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = sessions_.find(id);
    if (it == sessions_.end()) return absl::NotFoundError(absl::StrCat("session_id: no session ", id.value));
    entry = std::move(it->second);
    sessions_.erase(it);
    ending_[id] = {entry.session->spec().pool, entry.session->spec().name, {}, entry.session};
  }
  const absl::Status refused = absl::FailedPreconditionError(
      absl::StrCat("session: ", id.value, " has ended", reason.ok() ? "" : ": ", reason.message()));
  entry.session->End(
      refused, absl::IsCancelled(reason),
      [this, session = entry.session, events = entry.events, reason, retain]() mutable {
        background_->Post([this, session = std::move(session), events = std::move(events), reason, retain] {
          if (session->direct()) session->SampleDirect();
          session->Destroy(retain, now_());
          if (session->spec().ordered_calls) waiting_sessions_.GiveOrderedBack();
          session->pool()->sessions.fetch_sub(1);
          events->ended(reason);
          std::vector<std::shared_ptr<AttachCall>> waiting;
          {
            absl::MutexLock lock(&mutex_);
            hot_bytes_ -= session->bytes();
            --session_count_;
            const auto it = ending_.find(session->id());
            waiting = std::move(it->second.waiting);
            ending_.erase(it);
          }
          for (const std::shared_ptr<AttachCall>& call : waiting) ContinueAttach(call);
        });
      });
  return absl::OkStatus();
}

void Registry::Drain() {
  std::vector<std::shared_ptr<SessionEvents>> events;
  {
    absl::MutexLock lock(&mutex_);
    if (draining_.exchange(true)) return;
    for (const auto& [id, entry] : sessions_) events.push_back(entry.events);
  }
  for (const std::shared_ptr<SessionEvents>& e : events) e->draining(limits_.drain_grace);
}

void Registry::Undrain() { draining_.store(false); }

RegistryUsage Registry::Usage() const {
  absl::MutexLock lock(&mutex_);
  return {static_cast<int64_t>(sessions_.size()), hot_bytes_, pool_bytes_, waiting_sessions_.armed(),
          waiting_sessions_.ordered()};
}

void Registry::Tick() {
  const absl::Time now = now_();
  std::vector<std::pair<std::shared_ptr<Session>, std::shared_ptr<SessionEvents>>> direct;
  std::vector<std::shared_ptr<Session>> ending;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, other] : ending_) ending.push_back(other.session);
    for (const auto& [id, entry] : sessions_) {
      if (entry.session->direct()) direct.emplace_back(entry.session, entry.events);
    }
  }
  for (const std::shared_ptr<Session>& session : ending) session->AbortWaitsAgain();
  for (const std::shared_ptr<Session>& session : Sessions()) {
    if (absl::Status status = session->CheckWaits(absl::Now()); !status.ok()) {
      // NOT_FOUND: it ends already.
      EndSession(session->id(), std::move(status), /*retain=*/true).IgnoreError();
    }
  }
  for (const auto& [session, events] : direct) {
    const std::optional<PlaneStep> step = session->SampleDirect();
    if (step.has_value() && events->stepped != nullptr) events->stepped(*step);
  }
  for (const std::shared_ptr<Session>& session : Sessions()) session->ExpireOffers(absl::Now());
  for (const std::shared_ptr<PoolEntry>& entry : Pools()) {
    entry->pool.Sweep(now);
    const PoolDescription description = Describe(*entry);
    const int64_t left = description.blocks.free + description.blocks.cached;
    const bool pressed = left * 100 < limits_.pool_pressure_percent * description.spec.blocks;
    std::vector<std::shared_ptr<SessionEvents>> to_tell;
    {
      absl::MutexLock lock(&mutex_);
      for (auto& [id, session] : sessions_) {
        if (session.session->pool() != entry) continue;
        if (pressed && !session.pressed) to_tell.push_back(session.events);
        session.pressed = pressed;
      }
    }
    for (const std::shared_ptr<SessionEvents>& events : to_tell) events->pool_pressure(description.blocks);
  }
}

}  // namespace stoker::core
