#include "client/session_impl.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "client/backoff.h"

namespace stoker::client {
namespace {

constexpr size_t kMaxTokenBytes = 4096;
// How long after a call's failure the Attach stream may take to fail too. Longer than any scheduling delay, short for a
// caller whose call was refused by a daemon that lives on.
constexpr absl::Duration kLossGrace = absl::Milliseconds(250);
// Bound of the Detach that the destructor sends.
constexpr absl::Duration kDetachTimeout = absl::Seconds(5);

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
    case absl::StatusCode::kUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace

Session::Impl::~Impl() {
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

absl::Status Session::Impl::Open() {
  absl::Status status = TryAttach(absl::Now() + options_.attach_timeout, /*wait_for_ready=*/false);
  if (status.ok()) thread_ = std::thread([this] { Run(); });
  return status;
}

void Session::Impl::CallAsync(absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options,
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
    owned->done(StatusOf(status));
    Finish(&owned->context);  // from here on the session may be gone
  });
}

absl::StatusOr<std::shared_ptr<const Lease>> Session::Impl::Acquire(absl::Time deadline, uint64_t generation,
                                                                    AcrossGenerations across) {
  Lock lock(mutex_);
  return Acquire(lock, deadline, generation, across);
}

absl::StatusOr<std::shared_ptr<const Lease>> Session::Impl::Acquire(Lock& lock, absl::Time deadline,
                                                                    uint64_t generation, AcrossGenerations across) {
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

absl::StatusOr<std::shared_ptr<const Lease>> Session::Impl::Begin(grpc::ClientContext* context, absl::Time deadline,
                                                                  uint64_t generation, AcrossGenerations across) {
  Lock lock(mutex_);
  absl::StatusOr<std::shared_ptr<const Lease>> lease = Acquire(lock, deadline, generation, across);
  if (!lease.ok()) return lease;
  context->AddMetadata(kTokenKey, (*lease)->attached.token());
  calls_.insert(context);
  return lease;
}

void Session::Impl::AwaitLoss(const std::shared_ptr<const Lease>& lease, absl::Time deadline) {
  Lock lock(mutex_);
  WaitUntil(changed_, lock, std::min(deadline, absl::Now() + kLossGrace),
            [&] { return closing_ || state_ != State::kAttached || lease_ != lease; });
}

absl::Status Session::Impl::StatusOf(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  return FromCall(status, closing_);
}

void Session::Impl::Finish(grpc::ClientContext* context) {
  const std::lock_guard lock(mutex_);
  calls_.erase(context);
  if (closing_) changed_.notify_all();
}

absl::Status Session::Impl::BeginInOrder(bool wait, CUstream_st* stream, absl::Time deadline, OrderedCall* call) {
  std::shared_ptr<SessionOrder> order;
  {
    Lock lock(mutex_);
    if (!WaitUntil(changed_, lock, deadline, [this] { return closing_ || !in_order_; })) {
      return absl::DeadlineExceededError("order: another call with an order had no reply in time");
    }
    const absl::StatusOr<std::shared_ptr<const Lease>> lease =
        Acquire(lock, deadline, call->generation, AcrossGenerations::kFail);
    if (!lease.ok()) return lease.status();
    call->generation = (*lease)->generation;
    order = (*lease)->order;
    in_order_ = true;
  }
  absl::StatusOr<uint64_t> number = wait ? order->Signal(stream) : order->Next();
  if (!number.ok()) {
    EndInOrder();
    return number.status();
  }
  call->number = *number;
  return absl::OkStatus();
}

void Session::Impl::EndInOrder() {
  const std::lock_guard lock(mutex_);
  in_order_ = false;
  changed_.notify_all();
}

absl::StatusOr<Session::OrderedCall> Session::Impl::SignalEngine(CUstream_st* stream) {
  const std::shared_ptr<const Lease> lease = this->lease();
  if (lease->order == nullptr) return absl::FailedPreconditionError("ordered_calls: the session was attached without");
  const absl::StatusOr<uint64_t> number = lease->order->Signal(stream);
  if (!number.ok()) return number.status();
  return OrderedCall{.generation = lease->generation, .number = *number};
}

absl::Status Session::Impl::AwaitDaemon(const OrderedCall& call, CUstream_st* stream, absl::Time deadline) {
  const std::shared_ptr<const Lease> lease = this->lease();
  if (lease->order == nullptr) return absl::FailedPreconditionError("ordered_calls: the session was attached without");
  absl::Status status;
  if (call.generation == 0 || lease->generation == call.generation) {
    status = lease->order->Await(call.number, stream, deadline);
  }
  // A word that was released says nothing about the work, nor does one of an attachment that came later.
  const std::lock_guard lock(mutex_);
  if (!status_.ok()) return status_;
  if (call.generation != 0 && lease_->generation != call.generation) {
    return absl::UnavailableError("order.signal: the session was attached anew before the work was done");
  }
  return status;
}

void Session::Impl::ReleaseOrder() {
  if (const std::shared_ptr<SessionOrder> order = lease()->order; order != nullptr) order->Release();
}

absl::Status Session::Impl::WrongGeneration(uint64_t generation) const {
  return absl::FailedPreconditionError(absl::StrCat("generation ", generation, " of the session is over, it is ",
                                                    lease_->generation,
                                                    " now: sequence ids of before are gone, admit again"));
}

absl::Status Session::Impl::TryAttach(absl::Time deadline, bool wait_for_ready) {
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
  if (status.ok() && options_.ordered_calls) {
    absl::StatusOr<std::shared_ptr<SessionOrder>> order = SessionOrder::Make(next->arena);
    status = order.status();
    if (order.ok()) next->order = *std::move(order);
  }
  if (!status.ok()) {
    stream->CancelAndWait();
    return status;
  }
  std::vector<std::shared_ptr<SessionOrder>> idle;  // they go without the mutex
  const std::lock_guard lock(mutex_);
  if (lease_ != nullptr && lease_->order != nullptr) last_orders_.push_back(lease_->order);
  const auto first_idle = std::partition(last_orders_.begin(), last_orders_.end(),
                                         [](const std::shared_ptr<SessionOrder>& order) { return !order->Idle(); });
  std::move(first_idle, last_orders_.end(), std::back_inserter(idle));
  last_orders_.erase(first_idle, last_orders_.end());
  next->generation = lease_ == nullptr ? 1 : lease_->generation + 1;
  lease_ = std::move(next);
  state_ = State::kAttached;
  status_ = absl::OkStatus();
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status Session::Impl::ReadAttached(AttachStream& stream, absl::Time deadline, v1::Attached* attached) {
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

absl::Status Session::Impl::MapDirect(const v1::Attached& attached, absl::Time deadline, Lease* lease) const {
  if (!attached.has_direct()) {
    return absl::FailedPreconditionError("plane: the daemon is of a version without a direct plane");
  }
  absl::StatusOr<std::shared_ptr<const Arena>> arena = Arena::MapAnywhere(request_, attached, deadline);
  if (!arena.ok()) return arena.status();
  absl::StatusOr<std::shared_ptr<const PoolMapping>> pool = PoolMapping::Map(attached, deadline);
  if (!pool.ok()) return pool.status();
  lease->arena = *std::move(arena);
  lease->pool = *std::move(pool);
  return absl::OkStatus();
}

absl::Status Session::Impl::MapArena(const v1::Attached& attached, absl::Time deadline, Lease* lease) const {
  absl::StatusOr<std::shared_ptr<const Arena>> arena = FindArena(attached, deadline);
  if (!arena.ok()) return arena.status();
  lease->arena = *std::move(arena);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Arena>> Session::Impl::FindArena(const v1::Attached& attached,
                                                                      absl::Time deadline) const {
  switch (options_.arena_mapping) {
    case ArenaMapping::kNever:
      return Arena::Unmapped(absl::FailedPreconditionError("the session was told not to map its arena"));
    case ArenaMapping::kRequired:
      return Arena::Map(request_, attached, deadline);
    case ArenaMapping::kDevice:
      return Arena::MapAnywhere(request_, attached, deadline);
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

void Session::Impl::Run() {
  for (;;) {
    const absl::Status why = Watch();
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
    }
    // UNKNOWN is what gRPC makes of some ways to lose a connection.
    const bool lost = absl::IsUnavailable(why) || absl::IsUnknown(why);
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
    ReleaseOrder();
    if (options_.on_detached) options_.on_detached(why);
    if (!Reattach(why)) return;
    if (options_.on_reattach) options_.on_reattach(lease()->generation);
  }
}

absl::Status Session::Impl::Watch() {
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

bool Session::Impl::Reattach(absl::Status why) {
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

void Session::Impl::End(const absl::Status& why) {
  const absl::Status status = Annotate(why, "the session has ended");
  {
    const std::lock_guard lock(mutex_);
    state_ = State::kEnded;
    status_ = status;
    changed_.notify_all();
  }
  ReleaseOrder();
  if (options_.on_ended) options_.on_ended(status);
}

}  // namespace stoker::client
