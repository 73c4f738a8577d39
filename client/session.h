// Session: one engine rank's lease, its calls and its mapped arena.
//
// The lease is the open Attach stream, which a thread of the session watches. When the daemon dies or restarts (the
// stream ends with UNAVAILABLE), that thread attaches again with the same request: exponential backoff with jitter, for
// at most reattach_timeout. Each attachment is a generation. What belonged to the one before is gone: sequence ids,
// state rows, hot buffers, and the memory of the arena (a view of it stays readable while its Arena is held, but nobody
// else sees it).
//
// What a call does while the session is detached:
//   Admit        waits until the session is attached, then runs; UNAVAILABLE at its deadline.
//   other calls  wait likewise, but then fail with FAILED_PRECONDITION: they name sequences of the generation before.
//   async calls  fail at once with UNAVAILABLE: waiting could not make them succeed.
// A call that is under way when the daemon dies fails with UNAVAILABLE and is not repeated: whether it was done is
// unknown. Once the session has ended (superseded, evicted, re-attach given up) every call fails with the status of the
// end.
//
// Thread safety: all methods may be called by any thread at the same time; the daemon runs one session's work in the
// order in which calls arrive. The destructor must not run while another thread is in a method.
//
// Invariants:
//  1. Each wait has a bound: a call's deadline, attach_timeout, reattach_timeout.
//  2. generation() rises by one with each attachment, and a call is sent with the token of exactly one generation.
//  3. Callbacks of SessionOptions run on the session's thread, one at a time, in the order of the events. They may call
//     the session, but must not destroy it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/status.h"
#include "client/step_stream.h"
#include "stoker/v1/residency.pb.h"
#include "stoker/v1/sequences.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

class PoolMapping;

// Of a session on the direct plane (AttachRequest.plane) arena and pool are mapped in any case, and Attach fails when
// they cannot be; the choice here is not asked.
enum class ArenaMapping {
  // Maps an arena in host memory where the daemon is reached through a Unix socket and offers it. A failure is in
  // arena()->status(); so is that the arena is on a GPU.
  kWherePossible,
  // Attach fails when the arena cannot be mapped, or is on a GPU.
  kRequired,
  kNever,
  // Attach fails when the arena cannot be mapped, wherever it is. Where arena()->on_device(), its views are device
  // addresses.
  kDevice,
};

struct SessionOptions {
  // Bound of one attempt to attach, the mapping included.
  absl::Duration attach_timeout = absl::Seconds(10);
  // How long a lost session keeps trying to attach again. Zero: it ends with the status of the stream.
  absl::Duration reattach_timeout = absl::Seconds(60);
  // Wait before the second attempt; doubles up to max_backoff. Each wait is drawn from [half, whole].
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(2);
  // Creates the pool with its old spec when a restarted daemon does not have it. Without this the session waits for
  // somebody else to create it.
  bool recreate_pool = false;
  ArenaMapping arena_mapping = ArenaMapping::kWherePossible;
  // Calls may have an order (CallOrder of residency.proto) with the engine's stream (CallOptions::stream), so that they
  // need not wait on the host for it, nor for the daemon's work. The arena must be mapped, on a GPU by kDevice. Attach
  // fails with FAILED_PRECONDITION where the daemon or the GPU does not have it, with RESOURCE_EXHAUSTED where as many
  // sessions as may be have it.
  bool ordered_calls = false;

  std::function<void(const v1::Draining&)> on_draining;
  std::function<void(const v1::PoolPressure&)> on_pool_pressure;
  // Comes before on_ended.
  std::function<void(const v1::Superseded&)> on_superseded;
  // The stream was lost with this status; the session now tries to attach again.
  std::function<void(const absl::Status&)> on_detached;
  // Attached again: admit the sequences anew and fetch arena(). Once for each new generation.
  std::function<void(uint64_t generation)> on_reattach;
  // The session has ended and will not come back. Not called when the destructor ends it.
  std::function<void(const absl::Status&)> on_ended;
};

class Session {
 public:
  // Ends the session: cancels the calls under way (their callbacks run first), detaches, unmaps.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // The calls of Sequences and Residency, as in their proto files. The status is the call's; each item has its own
  // inside the response (FirstError in status.h). `response` is overwritten; reuse requests and responses to save
  // allocations.
  absl::Status Admit(const v1::AdmitRequest& request, v1::AdmitResponse* response, const CallOptions& options = {});
  absl::Status Extend(const v1::ExtendRequest& request, v1::ExtendResponse* response, const CallOptions& options = {});
  absl::Status Fork(const v1::ForkRequest& request, v1::ForkResponse* response, const CallOptions& options = {});
  absl::Status Release(const v1::ReleaseRequest& request, v1::ReleaseResponse* response,
                       const CallOptions& options = {});
  absl::Status GetBlockTables(const v1::GetBlockTablesRequest& request, v1::GetBlockTablesResponse* response,
                              const CallOptions& options = {});
  absl::Status Store(const v1::StoreRequest& request, v1::StoreResponse* response, const CallOptions& options = {});
  absl::Status Load(const v1::LoadRequest& request, v1::LoadResponse* response, const CallOptions& options = {});
  absl::Status Step(const v1::StepRequest& request, v1::StepResponse* response, const CallOptions& options = {});
  absl::Status Resolve(const v1::ResolveRequest& request, v1::ResolveResponse* response,
                       const CallOptions& options = {});
  absl::Status Gather(const v1::GatherRequest& request, v1::GatherResponse* response, const CallOptions& options = {});
  absl::Status Commit(const v1::CommitRequest& request, v1::CommitResponse* response, const CallOptions& options = {});
  absl::Status Invalidate(const v1::InvalidateRequest& request, v1::InvalidateResponse* response,
                          const CallOptions& options = {});
  absl::Status Read(const v1::ReadRequest& request, v1::ReadResponse* response, const CallOptions& options = {});
  // ServerPlane (server_plane.h) makes these two.
  absl::Status Arm(const v1::ArmRequest& request, v1::ArmResponse* response, const CallOptions& options = {});
  absl::Status Disarm(const v1::DisarmRequest& request, v1::DisarmResponse* response, const CallOptions& options = {});

  // The calls of Sessions. What was registered is gone when the session comes back: on_reattach registers it again.
  absl::Status RegisterTensor(const v1::RegisterTensorRequest& request, v1::RegisterTensorResponse* response,
                              const CallOptions& options = {});
  // The same for shared memory (MakeTensorMemory in tensor_memory.h): hands `descriptor` over, which stays the caller's
  // and may be closed afterwards. PERMISSION_DENIED: the daemon does not take it, and why.
  absl::Status RegisterTensor(int descriptor, v1::RegisterTensorRequest request, v1::RegisterTensorResponse* response,
                              const CallOptions& options = {});
  // The memory may be freed when the reply is there.
  absl::Status UnregisterTensor(const v1::UnregisterTensorRequest& request, v1::UnregisterTensorResponse* response,
                                const CallOptions& options = {});

  // Of a session with ordered_calls, where a request has an order without a number, Store, Load, Step, Resolve, Gather
  // and Commit do all that belongs to it, one such call at a time: they take the next number; with `wait` the engine
  // word is set to it behind what options.stream has been given so far; with `signal` that stream waits for the daemon
  // word when the reply is there, and what the engine enqueues on it then finds the work done. INVALID_ARGUMENT: no
  // stream. On the CPU there is none: the caller is what a stream is elsewhere, and waits until the work is done.
  //
  // RunSteps and the asynchronous calls do not: SignalEngine before, its number in the request's order, and AwaitDaemon
  // when the reply is there. The requests must go out in the order of their numbers.
  //
  // The stream's wait ends when the daemon dies or the session ends, without the work having been done, and after
  // status() and generation() say so: ask them, when the stream has come to its end, before what was computed from the
  // rows is used. UNAVAILABLE: the session was attached anew meanwhile. FAILED_PRECONDITION: the session has no ordered
  // calls.
  struct OrderedCall {
    uint64_t generation = 0;  // for CallOptions
    uint64_t number = 0;
  };
  absl::StatusOr<OrderedCall> SignalEngine(CUstream_st* stream);
  // options: stream and timeout.
  absl::Status AwaitDaemon(const OrderedCall& call, const CallOptions& options);

  // As Step and Store, without waiting. `request` and `response` must live until `done` has run; `done` runs exactly
  // once, on a gRPC thread or, where the call cannot start, inside StepAsync. It must not block, nor destroy the
  // session.
  void StepAsync(const v1::StepRequest* request, v1::StepResponse* response,
                 absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options = {});
  void StoreAsync(const v1::StoreRequest* request, v1::StoreResponse* response,
                  absl::AnyInvocable<void(absl::Status)> done, const CallOptions& options = {});

  // Opens a stream of steps. It has no deadline as a whole; options.timeout bounds each of its waits that gives none.
  absl::StatusOr<std::unique_ptr<StepStream>> RunSteps(const CallOptions& options = {});

  // Waits until the session is attached, and gives the generation. UNAVAILABLE: not within the timeout; else the status
  // of the end.
  absl::StatusOr<uint64_t> AwaitAttached(absl::Duration timeout = absl::ZeroDuration());

  // The attachment now in force, or the last one.
  uint64_t generation() const;
  bool attached() const;
  // It will not come back.
  bool ended() const;
  // OK while attached, UNAVAILABLE while it tries to attach again, then the status of the end.
  absl::Status status() const;
  v1::Attached info() const;
  // Never null. Replaced by a re-attach: hold the pointer as long as its views are used.
  std::shared_ptr<const Arena> arena() const;

 private:
  friend class Client;
  friend class DevicePlane;
  friend class DirectPlane;
  friend class ServerPlane;
  class Impl;
  // What a session on the direct plane works with. Of one generation.
  struct DirectLease {
    uint64_t generation = 0;
    v1::AttachRequest request;
    v1::Attached attached;
    std::shared_ptr<const Arena> arena;
    std::shared_ptr<const PoolMapping> pool;   // null on the other planes
    std::shared_ptr<std::atomic<bool>> taken;  // a DirectPlane has it
  };
  static absl::StatusOr<std::unique_ptr<Session>> Open(std::shared_ptr<Connection> connection,
                                                       const v1::AttachRequest& request, SessionOptions options);
  explicit Session(std::unique_ptr<Impl> impl);
  // Calls of Arm so far: each makes an end of the plane before.
  uint64_t arm_calls() const;
  DirectLease direct_lease() const;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace stoker::client
