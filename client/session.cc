// Parts, each behind the next: AttachStream (the lease's stream as a queue), Session::Impl (state, thread, calls),
// StepStream (RunSteps), Session (the public face).
//
// std::mutex rather than absl::Mutex: ThreadSanitizer sees into the one, but not into Debian's build of the other.
#include "client/session.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "client/backoff.h"
#include "client/connection.h"
#include "client/descriptor_exchange.h"
#include "client/pool_mapping.h"

namespace stoker::client {
namespace {

constexpr char kTokenKey[] = "stoker-token";
constexpr size_t kMaxTokenBytes = 4096;
// Events wait here while a callback runs. One more replaces the youngest.
constexpr size_t kMaxQueuedEvents = 64;
// How long after the last read of a stream its status may come.
constexpr absl::Duration kStatusGrace = absl::Seconds(1);
// How long after a call's failure the Attach stream may take to fail too. Longer than any scheduling delay, short for a
// caller whose call was refused by a daemon that lives on.
constexpr absl::Duration kLossGrace = absl::Milliseconds(250);
// Bound of the Detach that the destructor sends.
constexpr absl::Duration kDetachTimeout = absl::Seconds(5);

using Lock = std::unique_lock<std::mutex>;

// False at the deadline. Waits on the steady clock, which cannot be set back.
template <typename Condition>
bool WaitUntil(std::condition_variable& changed, Lock& lock, absl::Time deadline, Condition condition) {
  // Later than a day from now is "for ever" in steps, so that no clock arithmetic overflows.
  constexpr absl::Duration kLongest = absl::Hours(24);
  for (;;) {
    const absl::Duration left = deadline - absl::Now();
    if (changed.wait_for(lock, absl::ToChronoNanoseconds(std::clamp(left, absl::ZeroDuration(), kLongest)),
                         condition)) {
      return true;
    }
    if (left <= kLongest) return false;
  }
}

// A header value may hold nothing else: gRPC aborts the process over any other byte.
bool IsToken(absl::string_view token) {
  return !token.empty() && token.size() <= kMaxTokenBytes &&
         std::all_of(token.begin(), token.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

// Whether attaching again may succeed where this error came out.
bool IsWorthRepeating(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:  // the daemon has not yet freed what another session held
    case absl::StatusCode::kNotFound:           // the pool is not there yet
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
      return true;
    default:
      return false;
  }
}

// One Attach call. Reads by itself and queues what comes.
//
// Thread safety: any thread. Owns itself until gRPC is done with it.
class AttachStream : public grpc::ClientReadReactor<v1::AttachResponse> {
 public:
  enum class Outcome { kMessage, kEnded, kTimeout };

  static std::shared_ptr<AttachStream> Start(std::shared_ptr<Connection> connection, const v1::AttachRequest& request,
                                             bool wait_for_ready) {
    auto stream = std::make_shared<AttachStream>();
    stream->self_ = stream;
    stream->context_.set_wait_for_ready(wait_for_ready);
    stream->connection_ = std::move(connection);
    stream->connection_->sessions().async()->Attach(&stream->context_, &request, stream.get());
    stream->StartRead(&stream->incoming_);
    stream->StartCall();
    return stream;
  }

  // The next message, or the status with which the stream ended.
  Outcome Next(absl::Time deadline, v1::AttachResponse* message, absl::Status* status) {
    Lock lock(mutex_);
    if (!WaitUntil(changed_, lock, deadline, [this] { return !events_.empty() || reads_over_ || end_.has_value(); })) {
      return Outcome::kTimeout;
    }
    if (events_.empty()) {
      // The status follows the last read at once, unless that was a message that could not be parsed: then the stream
      // stays open without anybody reading it.
      if (!WaitUntil(changed_, lock, absl::Now() + kStatusGrace, [this] { return end_.has_value(); })) {
        lock.unlock();
        CancelAndWait();
        *status = absl::InternalError("Attach brought a message that cannot be parsed");
        return Outcome::kEnded;
      }
      *status = *end_;
      return Outcome::kEnded;
    }
    *message = std::move(events_.front());
    events_.pop_front();
    return Outcome::kMessage;
  }

  void Cancel() { context_.TryCancel(); }

  // Cancels, and waits until gRPC has let go.
  void CancelAndWait() {
    Cancel();
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return end_.has_value(); });
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      const std::lock_guard lock(mutex_);
      reads_over_ = true;
      changed_.notify_all();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      if (events_.size() == kMaxQueuedEvents) events_.pop_back();
      events_.push_back(std::move(incoming_));
      changed_.notify_all();
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<AttachStream> self = std::move(self_);  // outlives the lock
    const std::lock_guard lock(mutex_);
    end_ = FromGrpc(status);
    changed_.notify_all();
  }

 private:
  std::shared_ptr<Connection> connection_;
  grpc::ClientContext context_;
  v1::AttachResponse incoming_;  // gRPC's between StartRead and OnReadDone
  std::shared_ptr<AttachStream> self_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<v1::AttachResponse> events_;
  bool reads_over_ = false;
  std::optional<absl::Status> end_;
};

// One attachment. Immutable.
struct Lease {
  uint64_t generation = 0;
  v1::Attached attached;
  std::shared_ptr<const Arena> arena;
  std::shared_ptr<const PoolMapping> pool;  // null but on the direct plane
  std::shared_ptr<std::atomic<bool>> taken = std::make_shared<std::atomic<bool>>(false);
};

// What a call may do when the session was attached anew since it began.
enum class AcrossGenerations { kRun, kFail };

}  // namespace

// Invariants, beside those of session.h:
//  1. lease_ is never null once Open has succeeded; while detached it is the last one.
//  2. Only the session's thread leaves kAttached and kDetached, and nothing leaves kEnded.
//  3. No callback runs, and no call is made, while mutex_ is held.
class Session::Impl {
 public:
  Impl(std::shared_ptr<Connection> connection, const v1::AttachRequest& request, SessionOptions options)
      : connection_(std::move(connection)), request_(request), options_(std::move(options)) {}

  ~Impl() {
    std::shared_ptr<AttachStream> stream;
    std::shared_ptr<const Lease> lease;
    {
      Lock lock(mutex_);
      closing_ = true;
      changed_.notify_all();
      for (grpc::ClientContext* context : calls_) context->TryCancel();
      changed_.wait(lock, [this] { return calls_.empty(); });
      stream = stream_;
      if (state_ == State::kAttached) lease = lease_;
    }
    if (lease != nullptr) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + std::min(kDetachTimeout, connection_->call_timeout())));
      context.AddMetadata(kTokenKey, lease->attached.token());
      v1::DetachResponse response;
      // A daemon that does not answer sees the stream end, which detaches as well: there is nothing to do about an
      // error.
      static_cast<void>(connection_->sessions().Detach(&context, {}, &response));
    }
    if (stream != nullptr) stream->CancelAndWait();
    if (thread_.joinable()) thread_.join();
  }

  // The first attachment.
  absl::Status Open() {
    absl::Status status = TryAttach(absl::Now() + options_.attach_timeout, /*wait_for_ready=*/false);
    if (status.ok()) thread_ = std::thread([this] { Run(); });
    return status;
  }

  template <typename Stub, typename Request, typename Response>
  absl::Status Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, const CallOptions& options,
                    AcrossGenerations across = AcrossGenerations::kFail) {
    const absl::Time deadline = connection_->Deadline(options.timeout);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    absl::StatusOr<std::shared_ptr<const Lease>> lease = Begin(&context, deadline, options.generation, across);
    if (!lease.ok()) return lease.status();
    absl::Status status = FromGrpc((stub.*method)(&context, request, response));
    Finish(&context);
    if (absl::IsUnavailable(status)) AwaitLoss(*lease, deadline);
    return status;
  }

  // start(context, done): begins the call.
  void CallAsync(absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options,
                 absl::AnyInvocable<void(grpc::ClientContext*, std::function<void(grpc::Status)>)> start) {
    struct Pending {
      grpc::ClientContext context;
      absl::AnyInvocable<void(absl::Status)> done;
    };
    auto pending = std::make_unique<Pending>();
    pending->context.set_deadline(absl::ToChronoTime(connection_->Deadline(options.timeout)));
    if (absl::Status status =
            Begin(&pending->context, absl::InfinitePast(), options.generation, AcrossGenerations::kFail).status();
        !status.ok()) {
      done(status);
      return;
    }
    pending->done = std::move(done);
    // gRPC wants a callback that can be copied, so ownership goes through a plain pointer; it calls back exactly once.
    Pending* const call = pending.release();
    start(&call->context, [this, call](const grpc::Status& status) {
      const std::unique_ptr<Pending> owned(call);
      owned->done(FromGrpc(status));
      Finish(&owned->context);  // from here on the session may be gone
    });
  }

  // The lease for a call that begins now: waits for one until the deadline.
  absl::StatusOr<std::shared_ptr<const Lease>> Acquire(absl::Time deadline, uint64_t generation,
                                                       AcrossGenerations across) {
    Lock lock(mutex_);
    return Acquire(lock, deadline, generation, across);
  }

  std::shared_ptr<const Lease> lease() const {
    const std::lock_guard lock(mutex_);
    return lease_;
  }

  absl::Status status() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }

  bool ended() const {
    const std::lock_guard lock(mutex_);
    return state_ == State::kEnded;
  }

  bool direct() const { return request_.plane() == v1::PLANE_DIRECT; }
  const v1::AttachRequest& request() const { return request_; }

  void CountArmCall() { arm_calls_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t arm_calls() const { return arm_calls_.load(std::memory_order_relaxed); }

  Connection& connection() const { return *connection_; }
  const std::shared_ptr<Connection>& shared_connection() const { return connection_; }

 private:
  enum class State { kAttached, kDetached, kEnded };

  absl::StatusOr<std::shared_ptr<const Lease>> Acquire(Lock& lock, absl::Time deadline, uint64_t generation,
                                                       AcrossGenerations across) {
    const uint64_t begun = generation != 0 ? generation : lease_->generation;
    if (generation != 0 && generation != lease_->generation) return WrongGeneration(generation);
    WaitUntil(changed_, lock, deadline, [this] { return closing_ || state_ != State::kDetached; });
    if (closing_) return absl::CancelledError("the session is being closed");
    if (!status_.ok()) return status_;
    if (lease_->generation != begun && (generation != 0 || across == AcrossGenerations::kFail)) {
      return WrongGeneration(begun);
    }
    return lease_;
  }

  // Gives the call a token, and the destructor the means to cancel it.
  absl::StatusOr<std::shared_ptr<const Lease>> Begin(grpc::ClientContext* context, absl::Time deadline,
                                                     uint64_t generation, AcrossGenerations across) {
    Lock lock(mutex_);
    absl::StatusOr<std::shared_ptr<const Lease>> lease = Acquire(lock, deadline, generation, across);
    if (!lease.ok()) return lease;
    context->AddMetadata(kTokenKey, (*lease)->attached.token());
    calls_.insert(context);
    return lease;
  }

  // A call was UNAVAILABLE. If that was the daemon's death, the Attach stream tells so a moment later; waiting for that
  // here makes the caller's next call see a detached session, and not the old one for another moment.
  void AwaitLoss(const std::shared_ptr<const Lease>& lease, absl::Time deadline) {
    Lock lock(mutex_);
    WaitUntil(changed_, lock, std::min(deadline, absl::Now() + kLossGrace),
              [&] { return closing_ || state_ != State::kAttached || lease_ != lease; });
  }

  void Finish(grpc::ClientContext* context) {
    const std::lock_guard lock(mutex_);
    calls_.erase(context);
    if (closing_) changed_.notify_all();
  }

  absl::Status WrongGeneration(uint64_t generation) const {
    return absl::FailedPreconditionError(absl::StrCat("generation ", generation, " of the session is over, it is ",
                                                      lease_->generation,
                                                      " now: sequence ids of before are gone, admit again"));
  }

  // One attempt. On success the session is attached in a new generation.
  absl::Status TryAttach(absl::Time deadline, bool wait_for_ready) {
    std::shared_ptr<AttachStream> stream = AttachStream::Start(connection_, request_, wait_for_ready);
    {
      const std::lock_guard lock(mutex_);
      stream_ = stream;
      if (closing_) stream->Cancel();
    }
    auto next = std::make_shared<Lease>();
    absl::Status status = ReadAttached(*stream, deadline, &next->attached);
    if (status.ok()) {
      status =
          direct() ? MapDirect(next->attached, deadline, next.get()) : MapArena(next->attached, deadline, next.get());
    }
    if (!status.ok()) {
      stream->CancelAndWait();
      return status;
    }
    const std::lock_guard lock(mutex_);
    next->generation = lease_ == nullptr ? 1 : lease_->generation + 1;
    lease_ = std::move(next);
    state_ = State::kAttached;
    status_ = absl::OkStatus();
    changed_.notify_all();
    return absl::OkStatus();
  }

  static absl::Status ReadAttached(AttachStream& stream, absl::Time deadline, v1::Attached* attached) {
    v1::AttachResponse message;
    absl::Status status;
    switch (stream.Next(deadline, &message, &status)) {
      case AttachStream::Outcome::kTimeout:
        return absl::DeadlineExceededError("the daemon did not answer Attach in time");
      case AttachStream::Outcome::kEnded:
        return status.ok() ? absl::InternalError("Attach ended without a message") : status;
      case AttachStream::Outcome::kMessage:
        break;
    }
    if (!message.has_attached()) return absl::InternalError("the first message of Attach is not `attached`");
    if (!IsToken(message.attached().token())) {
      return absl::InternalError(absl::StrCat("the token of Attach, ", message.attached().token().size(),
                                              " bytes, is not 1 to ", kMaxTokenBytes, " visible ASCII characters"));
    }
    *attached = std::move(*message.mutable_attached());
    return absl::OkStatus();
  }

  // All that steps of this process work on.
  absl::Status MapDirect(const v1::Attached& attached, absl::Time deadline, Lease* lease) const {
    if (!attached.has_direct()) {
      return absl::FailedPreconditionError("plane: the daemon is of a version without a direct plane");
    }
    absl::StatusOr<std::shared_ptr<const Arena>> arena = attached.arena().cuda_ipc_handle().empty()
                                                             ? Arena::Map(request_, attached, deadline)
                                                             : Arena::MapDevice(request_, attached);
    if (!arena.ok()) return arena.status();
    absl::StatusOr<std::shared_ptr<const PoolMapping>> pool = PoolMapping::Map(attached, deadline);
    if (!pool.ok()) return pool.status();
    lease->arena = *std::move(arena);
    lease->pool = *std::move(pool);
    return absl::OkStatus();
  }

  absl::Status MapArena(const v1::Attached& attached, absl::Time deadline, Lease* lease) const {
    absl::StatusOr<std::shared_ptr<const Arena>> arena = FindArena(attached, deadline);
    if (!arena.ok()) return arena.status();
    lease->arena = *std::move(arena);
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Arena>> FindArena(const v1::Attached& attached, absl::Time deadline) const {
    switch (options_.arena_mapping) {
      case ArenaMapping::kNever:
        return Arena::Unmapped(absl::FailedPreconditionError("the session was told not to map its arena"));
      case ArenaMapping::kRequired:
        return Arena::Map(request_, attached, deadline);
      case ArenaMapping::kDevice:
        return attached.arena().cuda_ipc_handle().empty() ? Arena::Map(request_, attached, deadline)
                                                          : Arena::MapDevice(request_, attached);
      case ArenaMapping::kWherePossible:
        break;
    }
    if (!connection_->is_unix()) {
      return Arena::Unmapped(absl::FailedPreconditionError(
          absl::StrCat("the daemon at ", connection_->address(), " is not reached through a Unix socket")));
    }
    absl::StatusOr<std::shared_ptr<const Arena>> arena = Arena::Map(request_, attached, deadline);
    return arena.ok() ? *std::move(arena) : Arena::Unmapped(arena.status());
  }

  void Run() {
    for (;;) {
      const absl::Status why = Watch();
      {
        const std::lock_guard lock(mutex_);
        if (closing_) return;
      }
      // CANCELLED, for we did not cancel, and UNKNOWN are what gRPC makes of some ways to lose a connection.
      const bool lost = absl::IsUnavailable(why) || absl::IsCancelled(why) || absl::IsUnknown(why);
      if (!lost || options_.reattach_timeout <= absl::ZeroDuration()) {
        End(why.ok() ? absl::FailedPreconditionError("the daemon closed it") : why);
        return;
      }
      {
        const std::lock_guard lock(mutex_);
        if (closing_) return;
        state_ = State::kDetached;
        status_ = absl::UnavailableError(absl::StrCat("the session is detached: ", why.message()));
        changed_.notify_all();
      }
      if (options_.on_detached) options_.on_detached(why);
      if (!Reattach(why)) return;
      if (options_.on_reattach) options_.on_reattach(lease()->generation);
    }
  }

  // Hands out events until the stream ends. Its status.
  absl::Status Watch() {
    std::shared_ptr<AttachStream> stream;
    {
      const std::lock_guard lock(mutex_);
      stream = stream_;
    }
    v1::AttachResponse event;
    absl::Status status;
    while (stream->Next(absl::InfiniteFuture(), &event, &status) == AttachStream::Outcome::kMessage) {
      switch (event.event_case()) {
        case v1::AttachResponse::kDraining:
          if (options_.on_draining) options_.on_draining(event.draining());
          break;
        case v1::AttachResponse::kPoolPressure:
          if (options_.on_pool_pressure) options_.on_pool_pressure(event.pool_pressure());
          break;
        case v1::AttachResponse::kSuperseded:
          if (options_.on_superseded) options_.on_superseded(event.superseded());
          break;
        case v1::AttachResponse::kAttached:      // comes once
        case v1::AttachResponse::EVENT_NOT_SET:  // an event of a later version
          break;
      }
    }
    return status;
  }

  // True: attached again. False: the session has ended, or is closing.
  bool Reattach(absl::Status why) {
    const absl::Time give_up = absl::Now() + options_.reattach_timeout;
    Backoff backoff(options_.initial_backoff, options_.max_backoff);
    absl::BitGen random;
    for (;;) {
      {
        Lock lock(mutex_);
        const absl::Time retry = std::min(absl::Now() + backoff.Next(random), give_up);
        if (WaitUntil(changed_, lock, retry, [this] { return closing_; })) return false;
      }
      if (absl::Now() >= give_up) {
        End(absl::UnavailableError(absl::StrCat("not attached again within ",
                                                absl::FormatDuration(options_.reattach_timeout), ": ", why.message())));
        return false;
      }
      // Waits for the channel, which looks for the daemon every 50 ms to 1 s; the backoff here is for refusals.
      const absl::Time deadline = std::min(absl::Now() + options_.attach_timeout, give_up);
      why = TryAttach(deadline, /*wait_for_ready=*/true);
      if (why.ok()) return true;
      {
        const std::lock_guard lock(mutex_);
        if (closing_) return false;
      }
      if (absl::IsNotFound(why) && options_.recreate_pool) {
        v1::CreatePoolRequest create;
        *create.mutable_spec() = lease()->attached.pool();
        const absl::Status created =
            connection_->Unary(connection_->pools(), &v1::Pools::Stub::CreatePool, create, {deadline - absl::Now()})
                .status();
        if (!created.ok()) why = created;
      }
      if (!IsWorthRepeating(why.code())) {
        End(why);
        return false;
      }
    }
  }

  void End(const absl::Status& why) {
    const absl::Status status = Annotate(why, "the session has ended");
    {
      const std::lock_guard lock(mutex_);
      state_ = State::kEnded;
      status_ = status;
      changed_.notify_all();
    }
    if (options_.on_ended) options_.on_ended(status);
  }

  const std::shared_ptr<Connection> connection_;
  const v1::AttachRequest request_;
  const SessionOptions options_;
  std::atomic<uint64_t> arm_calls_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool closing_ = false;
  State state_ = State::kDetached;
  absl::Status status_;
  std::shared_ptr<const Lease> lease_;
  std::shared_ptr<AttachStream> stream_;
  std::unordered_set<grpc::ClientContext*> calls_;  // under way

  std::thread thread_;
};

// Invariants: a write or a read is started only under mutex_ and before released_; gRPC reports the end (OnDone) only
// after the hold was removed, so that none of them comes too late.
class StepStream::Reactor : public grpc::ClientBidiReactor<v1::RunStepsRequest, v1::RunStepsResponse> {
 public:
  static std::shared_ptr<Reactor> Start(std::shared_ptr<Connection> connection, const std::string& token) {
    auto reactor = std::make_shared<Reactor>();
    reactor->self_ = reactor;
    reactor->connection_ = std::move(connection);
    reactor->context_.AddMetadata(kTokenKey, token);
    reactor->connection_->residency().async()->RunSteps(&reactor->context_, reactor.get());
    reactor->AddHold();
    reactor->StartCall();
    return reactor;
  }

  absl::Status Write(const v1::RunStepsRequest& request, absl::Time deadline) {
    Lock lock(mutex_);
    if (released_ || writes_over_) return Ended();
    writing_ = true;
    StartWrite(&request);
    const bool in_time = WaitUntil(changed_, lock, deadline, [this] { return !writing_; });
    if (!in_time) {
      context_.TryCancel();
      changed_.wait(lock, [this] { return !writing_; });  // `request` is gRPC's until then
    }
    if (in_time && write_ok_) return absl::OkStatus();
    writes_over_ = true;
    return in_time ? Ended() : absl::DeadlineExceededError("the daemon took no further step in time");
  }

  absl::Status Read(v1::RunStepsResponse* response, absl::Time deadline) {
    Lock lock(mutex_);
    if (!released_ && read_ == ReadState::kNone) {
      read_ = ReadState::kRunning;
      StartRead(&incoming_);
    }
    if (!WaitUntil(changed_, lock, deadline, [this] { return read_ != ReadState::kRunning; })) return NoReply();
    if (read_ == ReadState::kReady) {
      response->Swap(&incoming_);
      read_ = ReadState::kNone;
      return absl::OkStatus();
    }
    Release();
    if (!WaitUntil(changed_, lock, deadline, [this] { return end_.has_value(); })) return NoReply();
    return end_->ok() ? absl::OutOfRangeError("the stream of steps is complete") : *end_;
  }

  absl::Status Finish(absl::Time deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!released_ && !writes_over_) StartWritesDone();
      writes_over_ = true;
    }
    absl::Status status;
    for (v1::RunStepsResponse dropped; status.ok();) status = Read(&dropped, deadline);
    return absl::IsOutOfRange(status) ? absl::OkStatus() : status;
  }

  void Abandon() {
    Lock lock(mutex_);
    context_.TryCancel();
    Release();
    changed_.wait(lock, [this] { return end_.has_value(); });
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    write_ok_ = ok;
    changed_.notify_all();
  }

  void OnReadDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    read_ = ok ? ReadState::kReady : ReadState::kOver;
    changed_.notify_all();
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Reactor> self = std::move(self_);  // outlives the lock
    const std::lock_guard lock(mutex_);
    end_ = FromGrpc(status);
    changed_.notify_all();
  }

 private:
  enum class ReadState { kNone, kRunning, kReady, kOver };

  static absl::Status Ended() {
    return absl::UnavailableError("the stream of steps takes no more; Read or Finish gives the reason");
  }
  static absl::Status NoReply() { return absl::DeadlineExceededError("no reply to a step in time"); }

  // No read or write will be started any more.
  void Release() {
    if (!std::exchange(released_, true)) RemoveHold();
  }

  std::shared_ptr<Connection> connection_;
  grpc::ClientContext context_;
  v1::RunStepsResponse incoming_;  // gRPC's while read_ is kRunning
  std::shared_ptr<Reactor> self_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool released_ = false;
  bool writes_over_ = false;
  bool writing_ = false;
  bool write_ok_ = false;
  ReadState read_ = ReadState::kNone;
  std::optional<absl::Status> end_;
};

StepStream::StepStream(std::shared_ptr<Reactor> reactor, absl::Duration default_timeout)
    : reactor_(std::move(reactor)), default_timeout_(default_timeout) {}

StepStream::~StepStream() { reactor_->Abandon(); }

absl::Time StepStream::Deadline(absl::Duration timeout) const {
  return absl::Now() + (timeout > absl::ZeroDuration() ? timeout : default_timeout_);
}

absl::Status StepStream::Write(const v1::RunStepsRequest& request, absl::Duration timeout) {
  return reactor_->Write(request, Deadline(timeout));
}

absl::Status StepStream::Read(v1::RunStepsResponse* response, absl::Duration timeout) {
  return reactor_->Read(response, Deadline(timeout));
}

absl::Status StepStream::Run(const v1::RunStepsRequest& request, v1::RunStepsResponse* response,
                             absl::Duration timeout) {
  const absl::Time deadline = Deadline(timeout);
  absl::Status written = reactor_->Write(request, deadline);
  if (!written.ok() && !absl::IsUnavailable(written)) return written;
  return reactor_->Read(response, deadline);  // where the write met the end of the stream, this has the reason
}

absl::Status StepStream::Finish(absl::Duration timeout) { return reactor_->Finish(Deadline(timeout)); }

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

absl::StatusOr<std::unique_ptr<Session>> Session::Open(std::shared_ptr<Connection> connection,
                                                       const v1::AttachRequest& request, SessionOptions options) {
  if (options.attach_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach_timeout ", absl::FormatDuration(options.attach_timeout), " is not above 0"));
  }
  if (options.initial_backoff <= absl::ZeroDuration() || options.max_backoff < options.initial_backoff) {
    return absl::InvalidArgumentError(absl::StrCat("initial_backoff ", absl::FormatDuration(options.initial_backoff),
                                                   " is not above 0 and at most max_backoff ",
                                                   absl::FormatDuration(options.max_backoff)));
  }
  if (request.plane() == v1::PLANE_DIRECT && !connection->is_unix()) {
    return absl::FailedPreconditionError(
        absl::StrCat("plane: the direct plane needs the daemon's memory, and the daemon at ", connection->address(),
                     " is not reached through a Unix socket"));
  }
  auto impl = std::make_unique<Impl>(std::move(connection), request, std::move(options));
  if (absl::Status status = impl->Open(); !status.ok()) return status;
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

absl::Status Session::Admit(const v1::AdmitRequest& request, v1::AdmitResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().sequences(), &v1::Sequences::Stub::Admit, request, response, options,
                     AcrossGenerations::kRun);
}

absl::Status Session::Extend(const v1::ExtendRequest& request, v1::ExtendResponse* response,
                             const CallOptions& options) {
  return impl_->Call(impl_->connection().sequences(), &v1::Sequences::Stub::Extend, request, response, options);
}

absl::Status Session::Fork(const v1::ForkRequest& request, v1::ForkResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().sequences(), &v1::Sequences::Stub::Fork, request, response, options);
}

absl::Status Session::Release(const v1::ReleaseRequest& request, v1::ReleaseResponse* response,
                              const CallOptions& options) {
  return impl_->Call(impl_->connection().sequences(), &v1::Sequences::Stub::Release, request, response, options);
}

absl::Status Session::GetBlockTables(const v1::GetBlockTablesRequest& request, v1::GetBlockTablesResponse* response,
                                     const CallOptions& options) {
  return impl_->Call(impl_->connection().sequences(), &v1::Sequences::Stub::GetBlockTables, request, response, options);
}

absl::Status Session::Store(const v1::StoreRequest& request, v1::StoreResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Store, request, response, options);
}

absl::Status Session::Load(const v1::LoadRequest& request, v1::LoadResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Load, request, response, options);
}

absl::Status Session::Step(const v1::StepRequest& request, v1::StepResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Step, request, response, options);
}

absl::Status Session::Resolve(const v1::ResolveRequest& request, v1::ResolveResponse* response,
                              const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Resolve, request, response, options);
}

absl::Status Session::Gather(const v1::GatherRequest& request, v1::GatherResponse* response,
                             const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Gather, request, response, options);
}

absl::Status Session::Commit(const v1::CommitRequest& request, v1::CommitResponse* response,
                             const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Commit, request, response, options);
}

absl::Status Session::Invalidate(const v1::InvalidateRequest& request, v1::InvalidateResponse* response,
                                 const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Invalidate, request, response, options);
}

absl::Status Session::Read(const v1::ReadRequest& request, v1::ReadResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Read, request, response, options);
}

absl::Status Session::Arm(const v1::ArmRequest& request, v1::ArmResponse* response, const CallOptions& options) {
  impl_->CountArmCall();
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Arm, request, response, options);
}

absl::Status Session::Disarm(const v1::DisarmRequest& request, v1::DisarmResponse* response,
                             const CallOptions& options) {
  return impl_->Call(impl_->connection().residency(), &v1::Residency::Stub::Disarm, request, response, options);
}

absl::Status Session::RegisterTensor(const v1::RegisterTensorRequest& request, v1::RegisterTensorResponse* response,
                                     const CallOptions& options) {
  return impl_->Call(impl_->connection().sessions(), &v1::Sessions::Stub::RegisterTensor, request, response, options);
}

absl::Status Session::RegisterTensor(int descriptor, v1::RegisterTensorRequest request,
                                     v1::RegisterTensorResponse* response, const CallOptions& options) {
  const absl::Time deadline = impl_->connection().Deadline(options.timeout);
  const absl::StatusOr<std::shared_ptr<const Lease>> lease =
      impl_->Acquire(deadline, options.generation, AcrossGenerations::kFail);
  if (!lease.ok()) return lease.status();
  const v1::Attached& attached = (*lease)->attached;
  if (attached.arena().descriptor_socket().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon takes no descriptors for a session on ", attached.device()));
  }
  const absl::StatusOr<uint64_t> number =
      OfferDescriptor(attached.arena().descriptor_socket(), attached.token(), descriptor, deadline);
  if (!number.ok()) return number.status();
  request.set_offered_descriptor(*number);
  CallOptions rest = options;
  rest.timeout = std::max(deadline - absl::Now(), absl::Milliseconds(1));
  rest.generation = (*lease)->generation;
  return RegisterTensor(request, response, rest);
}

absl::Status Session::UnregisterTensor(const v1::UnregisterTensorRequest& request,
                                       v1::UnregisterTensorResponse* response, const CallOptions& options) {
  return impl_->Call(impl_->connection().sessions(), &v1::Sessions::Stub::UnregisterTensor, request, response, options);
}

void Session::StepAsync(const v1::StepRequest* request, v1::StepResponse* response,
                        absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options) {
  impl_->CallAsync(std::move(done), options,
                   [=, this](grpc::ClientContext* context, std::function<void(grpc::Status)> then) {
                     impl_->connection().residency().async()->Step(context, request, response, std::move(then));
                   });
}

void Session::StoreAsync(const v1::StoreRequest* request, v1::StoreResponse* response,
                         absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options) {
  impl_->CallAsync(std::move(done), options,
                   [=, this](grpc::ClientContext* context, std::function<void(grpc::Status)> then) {
                     impl_->connection().residency().async()->Store(context, request, response, std::move(then));
                   });
}

absl::StatusOr<std::unique_ptr<StepStream>> Session::RunSteps(const CallOptions& options) {
  const absl::Duration timeout =
      options.timeout > absl::ZeroDuration() ? options.timeout : impl_->connection().call_timeout();
  absl::StatusOr<std::shared_ptr<const Lease>> lease =
      impl_->Acquire(absl::Now() + timeout, options.generation, AcrossGenerations::kFail);
  if (!lease.ok()) return lease.status();
  return std::unique_ptr<StepStream>(
      new StepStream(StepStream::Reactor::Start(impl_->shared_connection(), (*lease)->attached.token()), timeout));
}

absl::StatusOr<uint64_t> Session::AwaitAttached(absl::Duration timeout) {
  absl::StatusOr<std::shared_ptr<const Lease>> lease =
      impl_->Acquire(impl_->connection().Deadline(timeout), 0, AcrossGenerations::kRun);
  if (!lease.ok()) return lease.status();
  return (*lease)->generation;
}

uint64_t Session::arm_calls() const { return impl_->arm_calls(); }
Session::DirectLease Session::direct_lease() const {
  const std::shared_ptr<const Lease> lease = impl_->lease();
  return {lease->generation, impl_->request(), lease->attached, lease->arena, lease->pool, lease->taken};
}
uint64_t Session::generation() const { return impl_->lease()->generation; }
bool Session::attached() const { return impl_->status().ok(); }
bool Session::ended() const { return impl_->ended(); }
absl::Status Session::status() const { return impl_->status(); }
v1::Attached Session::info() const { return impl_->lease()->attached; }
std::shared_ptr<const Arena> Session::arena() const { return impl_->lease()->arena; }

}  // namespace stoker::client
