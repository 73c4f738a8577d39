#include "client/session.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/descriptor_exchange.h"
#include "client/session_impl.h"

namespace stoker::client {

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
  v1::AttachRequest attach = request;
  if (options.ordered_calls) attach.set_ordered_calls(true);
  auto impl = std::make_unique<Impl>(std::move(connection), attach, std::move(options));
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
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Store, request, response, options);
}

absl::Status Session::Load(const v1::LoadRequest& request, v1::LoadResponse* response, const CallOptions& options) {
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Load, request, response, options);
}

absl::Status Session::Step(const v1::StepRequest& request, v1::StepResponse* response, const CallOptions& options) {
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Step, request, response, options);
}

absl::Status Session::Resolve(const v1::ResolveRequest& request, v1::ResolveResponse* response,
                              const CallOptions& options) {
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Resolve, request, response, options);
}

absl::Status Session::Gather(const v1::GatherRequest& request, v1::GatherResponse* response,
                             const CallOptions& options) {
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Gather, request, response, options);
}

absl::Status Session::Commit(const v1::CommitRequest& request, v1::CommitResponse* response,
                             const CallOptions& options) {
  return impl_->CallInOrder(impl_->connection().residency(), &v1::Residency::Stub::Commit, request, response, options);
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
  return StepStream::Open(impl_->shared_connection(), (*lease)->attached.token(), timeout);
}

absl::StatusOr<uint64_t> Session::AwaitAttached(absl::Duration timeout) {
  absl::StatusOr<std::shared_ptr<const Lease>> lease =
      impl_->Acquire(impl_->connection().Deadline(timeout), 0, AcrossGenerations::kRun);
  if (!lease.ok()) return lease.status();
  return (*lease)->generation;
}

absl::StatusOr<Session::OrderedCall> Session::SignalEngine(CUstream_st* stream) { return impl_->SignalEngine(stream); }
absl::Status Session::AwaitDaemon(const OrderedCall& call, const CallOptions& options) {
  return impl_->AwaitDaemon(call, options.stream, impl_->connection().Deadline(options.timeout));
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
