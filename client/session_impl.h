// Session::Impl: a session's state, the thread that watches its lease, and what all calls have in common. Internal to
// the library.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach_stream.h"
#include "client/bounded_wait.h"
#include "client/connection.h"
#include "client/pool_mapping.h"
#include "client/session.h"
#include "client/session_order.h"
#include "client/status.h"
#include "grpcpp/client_context.h"

namespace stoker::client {

// One attachment. Immutable.
struct Lease {
  uint64_t generation = 0;
  v1::Attached attached;
  std::shared_ptr<const Arena> arena;
  std::shared_ptr<const PoolMapping> pool;  // null but on the direct plane
  std::shared_ptr<SessionOrder> order;      // null but with ordered calls
  std::shared_ptr<std::atomic<bool>> taken = std::make_shared<std::atomic<bool>>(false);
};

// What a call may do when the session was attached anew since it began.
enum class AcrossGenerations { kRun, kFail };

// Invariants, beside those of session.h:
//  1. lease_ is never null once Open has succeeded; while detached it is the last one.
//  2. Only the session's thread leaves kAttached and kDetached, and nothing leaves kEnded.
//  3. No callback runs, and no call is made, while mutex_ is held.
class Session::Impl {
 public:
  Impl(std::shared_ptr<Connection> connection, const v1::AttachRequest& request, SessionOptions options)
      : connection_(std::move(connection)), request_(request), options_(std::move(options)) {}

  ~Impl();

  // The first attachment.
  absl::Status Open();

  template <typename Stub, typename Request, typename Response>
  absl::Status Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, const CallOptions& options,
                    AcrossGenerations across = AcrossGenerations::kFail) {
    const absl::Time deadline = connection_->Deadline(options.timeout);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    absl::StatusOr<std::shared_ptr<const Lease>> lease = Begin(&context, deadline, options.generation, across);
    if (!lease.ok()) return lease.status();
    absl::Status status = StatusOf((stub.*method)(&context, request, response));
    Finish(&context);
    if (absl::IsUnavailable(status)) AwaitLoss(*lease, deadline);
    return status;
  }

  // A call whose request may have an order.
  template <typename Stub, typename Request, typename Response>
  absl::Status CallInOrder(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                           const Request& request, Response* response, const CallOptions& options) {
    // Without words of the library's, or with a number of the caller's, all but the wait is the caller's own business.
    if (!options_.ordered_calls || !request.has_order()) return Call(stub, method, request, response, options);
    CallOptions rest = options;
    const absl::Time deadline = connection_->Deadline(options.timeout);
    OrderedCall call = {.generation = options.generation, .number = request.order().number()};
    absl::Status status;
    if (call.number != 0) {
      if (const std::shared_ptr<const Lease> now = lease(); call.generation == 0 && now != nullptr) {
        rest.generation = call.generation = now->generation;
      }
      status = Call(stub, method, request, response, rest);
    } else {
      status = BeginInOrder(request.order().wait(), options.stream, deadline, &call);
      if (!status.ok()) return status;
      Request numbered = request;
      numbered.mutable_order()->set_number(call.number);
      rest.generation = call.generation;
      rest.timeout = std::max(deadline - absl::Now(), absl::Milliseconds(1));
      status = Call(stub, method, numbered, response, rest);
      EndInOrder();
    }
    return status.ok() && request.order().signal() ? AwaitDaemon(call, options.stream, deadline) : status;
  }

  absl::StatusOr<OrderedCall> SignalEngine(CUstream_st* stream);
  absl::Status AwaitDaemon(const OrderedCall& call, CUstream_st* stream, absl::Time deadline);

  // start(context, done): begins the call.
  void CallAsync(absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options,
                 absl::AnyInvocable<void(grpc::ClientContext*, std::function<void(grpc::Status)>)> start);

  // The lease for a call that begins now: waits for one until the deadline.
  absl::StatusOr<std::shared_ptr<const Lease>> Acquire(absl::Time deadline, uint64_t generation,
                                                       AcrossGenerations across);

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
                                                       AcrossGenerations across);

  // Waits until no other call with an order has its reply to come, takes a number and, with `wait`, signals. Each
  // success is followed by one EndInOrder.
  absl::Status BeginInOrder(bool wait, CUstream_st* stream, absl::Time deadline, OrderedCall* call);
  void EndInOrder();
  // What was enqueued for the daemon's work, in this attachment, waits no more. The session's status says so already.
  void ReleaseOrder();

  // Gives the call a token, and the destructor the means to cancel it.
  absl::StatusOr<std::shared_ptr<const Lease>> Begin(grpc::ClientContext* context, absl::Time deadline,
                                                     uint64_t generation, AcrossGenerations across);

  // A call was UNAVAILABLE. If that was the daemon's death, the Attach stream tells so a moment later; waiting for that
  // here makes the caller's next call see a detached session, and not the old one for another moment.
  void AwaitLoss(const std::shared_ptr<const Lease>& lease, absl::Time deadline);

  // Of a call that is over, before Finish.
  absl::Status StatusOf(const grpc::Status& status) const;
  void Finish(grpc::ClientContext* context);

  absl::Status WrongGeneration(uint64_t generation) const;

  // One attempt. On success the session is attached in a new generation.
  absl::Status TryAttach(absl::Time deadline, bool wait_for_ready);

  static absl::Status ReadAttached(AttachStream& stream, absl::Time deadline, v1::Attached* attached);

  // All that steps of this process work on.
  absl::Status MapDirect(const v1::Attached& attached, absl::Time deadline, Lease* lease) const;

  absl::Status MapArena(const v1::Attached& attached, absl::Time deadline, Lease* lease) const;

  absl::StatusOr<std::shared_ptr<const Arena>> FindArena(const v1::Attached& attached, absl::Time deadline) const;

  void Run();

  // Hands out events until the stream ends. Its status.
  absl::Status Watch();

  // True: attached again. False: the session has ended, or is closing.
  bool Reattach(absl::Status why);

  void End(const absl::Status& why);

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
  std::unordered_set<grpc::ClientContext*> calls_;          // under way
  bool in_order_ = false;                                   // one of them has an order
  std::vector<std::shared_ptr<SessionOrder>> last_orders_;  // of attachments before, that may not be idle yet

  std::thread thread_;
};

}  // namespace stoker::client
