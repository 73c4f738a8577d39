#include <deque>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/pool_messages.h"
#include "server/rpc/services.h"
#include "server/rpc/tensor_messages.h"
#include "stoker/v1/sessions.grpc.pb.h"

namespace stoker::rpc {
namespace {

core::SessionSpec FromProto(const v1::AttachRequest& proto) {
  core::SessionSpec spec;
  spec.pool = proto.pool();
  spec.name = proto.name();
  spec.device = proto.device();
  spec.direct = proto.plane() == v1::PLANE_DIRECT;
  spec.arena_sharing = static_cast<core::ArenaSharing>(proto.arena_sharing());  // CheckSharing has seen it
  spec.state_rows = proto.state_rows();
  spec.hot_rows = proto.hot_rows();
  spec.max_top_k = proto.max_top_k();
  spec.max_batch_rows = proto.max_batch_rows();
  spec.max_sequence_rows = proto.max_sequence_rows();
  if (v1::IndexSpace_IsValid(proto.index_space()))
    spec.index_space = static_cast<core::IndexSpace>(proto.index_space());
  for (const v1::IndexGroup& group : proto.groups()) {
    spec.groups.emplace_back(group.layers().begin(), group.layers().end());
  }
  // Beyond int64 is beyond every limit.
  spec.staging_bytes = static_cast<int64_t>(std::min<uint64_t>(proto.staging_bytes(), INT64_MAX));
  spec.max_reserved_blocks = proto.max_reserved_blocks();
  spec.ordered_calls = proto.ordered_calls();
  return spec;
}

void ToProto(const core::ArenaLayout& layout, const std::string& descriptor_path, v1::ArenaLayout* proto) {
  proto->set_size_bytes(layout.size_bytes);
  for (const core::ArenaTensor& tensor : layout.tensors) {
    v1::ArenaTensor* t = proto->add_tensors();
    t->set_name(tensor.name);
    t->set_offset_bytes(tensor.offset_bytes);
    t->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    t->mutable_stride_bytes()->Add(tensor.stride_bytes.begin(), tensor.stride_bytes.end());
    t->set_element(tensor.element);
  }
  proto->set_region_rows(static_cast<uint32_t>(layout.region_rows));
  proto->set_newest_row(static_cast<uint32_t>(layout.newest_row));
  proto->set_cuda_ipc_handle(layout.ipc_handle);
  if (layout.has_descriptor) proto->set_descriptor_socket(descriptor_path);
  proto->set_allocation_bytes(layout.allocation_bytes);
}

void AddPlane(v1::Plane plane, absl::string_view reason, v1::Attached* attached) {
  v1::PlaneStatus* status = attached->add_planes();
  status->set_plane(plane);
  status->set_available(reason.empty());
  status->set_reason(std::string(reason));
}

bool IsMappable(const v1::ArenaLayout& arena) {
  return !arena.descriptor_socket().empty() || !arena.cuda_ipc_handle().empty();
}

// Why the session cannot be armed; empty where it can.
absl::string_view NoServerPlane(const core::Session& session, const v1::ArenaLayout& arena) {
  if (!session.no_server_plane().empty()) return session.no_server_plane();
  return IsMappable(arena) ? "" : "the arena, where the doorbells are, cannot be mapped";
}

// Why no session like this one can have ordered calls; empty where it can.
absl::string_view NoOrderedCalls(const core::Session& session, const v1::ArenaLayout& arena) {
  if (!session.no_ordered_calls().empty()) return session.no_ordered_calls();
  return IsMappable(arena) ? "" : "the arena, where the order words are, cannot be mapped";
}

// Why no session like this one can be on the direct plane; empty where it can.
std::string NoDirectPlane(const ServiceContext& service, const core::Session& session) {
  std::string reason = service.registry->NoDirectPlane(*session.pool());
  if (reason.empty() && service.descriptor_path.empty()) reason = "the daemon has no Unix socket to hand memory out";
  return reason;
}

void ToProto(const core::DirectLayout& layout, const std::string& descriptor_path, v1::DirectAccess* proto) {
  proto->set_memory(layout.cuda ? v1::DirectAccess::MEMORY_CUDA : v1::DirectAccess::MEMORY_FILE);
  proto->mutable_part_bytes()->Add(layout.part_bytes.begin(), layout.part_bytes.end());
  proto->set_layer_stride_bytes(layout.layer_stride_bytes);
  proto->set_sequence_words_offset_bytes(layout.words_offset_bytes);
  proto->set_sequence_words(layout.words);
  proto->set_result_offset_bytes(layout.result_offset_bytes);
  proto->set_descriptor_socket(descriptor_path);
  proto->set_max_copy_blocks(static_cast<uint32_t>(layout.max_copy_blocks));
  proto->set_max_copy_bytes(static_cast<uint64_t>(layout.max_copy_bytes));
}

// FAILED_PRECONDITION: the request is for the direct plane, and its sender cannot be handed the memory.
absl::Status CheckReach(const grpc::CallbackServerContext& context, const v1::AttachRequest& request) {
  if (request.plane() != v1::PLANE_DIRECT || absl::StartsWith(context.peer(), "unix:")) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "plane: the direct plane is not available: memory is handed out through the daemon's Unix socket, and ",
      context.peer(), " does not come through it"));
}

// INVALID_ARGUMENT: the field has a value of no meaning. FAILED_PRECONDITION: a descriptor is asked for, and this
// daemon hands out none.
absl::Status CheckSharing(const ServiceContext& service, const v1::AttachRequest& request) {
  if (!v1::ArenaSharing_IsValid(request.arena_sharing())) {
    return absl::InvalidArgumentError(absl::StrCat("arena_sharing: ", static_cast<int>(request.arena_sharing()),
                                                   " given, allowed are 0 to ",
                                                   static_cast<int>(v1::ArenaSharing_MAX)));
  }
  const char* const needs = request.arena_sharing() == v1::ARENA_SHARING_DESCRIPTOR
                                ? "arena_sharing: ARENA_SHARING_DESCRIPTOR"
                            : request.ordered_calls() ? "ordered_calls:"
                                                      : nullptr;
  if (needs != nullptr && service.descriptor_path.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(needs, " given, the daemon has no Unix socket to hand descriptors out"));
  }
  return absl::OkStatus();
}

// The stream of one session. Lives until gRPC is done with it; the session's events reach it through shared ownership
// and find it closed afterwards.
class AttachStream final : public grpc::ServerWriteReactor<v1::AttachResponse> {
 public:
  // What outlives the stream.
  struct Link {
    absl::Mutex mutex;
    AttachStream* stream ABSL_GUARDED_BY(mutex) = nullptr;
  };

  // `refused`: the answer, where it is not OK.
  AttachStream(const ServiceContext& service, const v1::AttachRequest& request, const absl::Status& refused)
      : service_(service), started_(absl::Now()), link_(std::make_shared<Link>()) {
    link_->stream = this;
    if (!refused.ok()) {
      End(*link_, refused);
      return;
    }
    core::Registry::SessionEvents events;
    events.draining = [link = link_](absl::Duration grace) {
      v1::AttachResponse event;
      event.mutable_draining()->set_grace_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(grace)));
      Send(*link, std::move(event));
    };
    events.pool_pressure = [link = link_](const core::BlockCounts& blocks) {
      v1::AttachResponse event;
      v1::PoolPressure* pressure = event.mutable_pool_pressure();
      pressure->set_free_blocks(static_cast<uint32_t>(blocks.free));
      pressure->set_cached_blocks(static_cast<uint32_t>(blocks.cached));
      pressure->set_total_blocks(static_cast<uint32_t>(blocks.free + blocks.cached + blocks.referenced));
      Send(*link, std::move(event));
    };
    events.superseded = [link = link_](core::SessionId by) {
      v1::AttachResponse event;
      event.mutable_superseded()->set_by_session_id(by.value);
      Send(*link, std::move(event));
    };
    events.stepped = [metrics = service_.metrics](const core::PlaneStep& last) {
      metrics->ObserveStep(server::StepPlane::kDirect, static_cast<double>(last.device_ns) * 1e-9);
    };
    events.ended = [link = link_](const absl::Status& reason) { End(*link, reason); };
    service_.registry->Attach(FromProto(request), std::move(events),
                              [this, link = link_](absl::StatusOr<std::shared_ptr<core::Session>> session) {
                                if (session.ok()) {
                                  Attached(**session);
                                } else {
                                  End(*link, session.status());
                                }
                              });
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&link_->mutex);
    writing_ = false;
    if (!ok) queue_.clear();
    if (!queue_.empty()) queue_.pop_front();
    Continue();
  }

  void OnCancel() override {
    core::SessionId session;
    {
      absl::MutexLock lock(&link_->mutex);
      cancelled_ = true;
      session = session_;
    }
    // Before the session exists, Attached sees cancelled_.
    if (session) EndLost(session);
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&link_->mutex);
      link_->stream = nullptr;
    }
    service_.metrics->ObserveRpc("Sessions/Attach", code_, absl::ToDoubleSeconds(absl::Now() - started_));
    delete this;
  }

 private:
  static void Send(Link& link, v1::AttachResponse event) {
    absl::MutexLock lock(&link.mutex);
    if (link.stream == nullptr || link.stream->ended_) return;
    link.stream->queue_.push_back(std::move(event));
    link.stream->Continue();
  }

  static void End(Link& link, const absl::Status& reason) {
    absl::MutexLock lock(&link.mutex);
    if (link.stream == nullptr || link.stream->ended_) return;
    link.stream->ended_ = true;
    link.stream->reason_ = reason;
    if (!link.stream->session_) link.stream->queue_.clear();
    link.stream->Continue();
  }

  void Attached(const core::Session& session) {
    v1::AttachResponse response;
    v1::Attached* attached = response.mutable_attached();
    attached->set_boot_epoch(service_.registry->epoch());
    attached->set_session_id(session.id().value);
    attached->set_token(session.token());
    attached->set_device(session.spec().device);
    ToProto(session.arena(), service_.descriptor_path, attached->mutable_arena());
    rpc::ToProto(session.pool()->pool.spec(), attached->mutable_pool());
    v1::SessionLimits* limits = attached->mutable_limits();
    limits->set_max_batch_rows(static_cast<uint32_t>(session.spec().max_batch_rows));
    limits->set_max_top_k(static_cast<uint32_t>(session.spec().max_top_k));
    limits->set_max_reserved_blocks(static_cast<uint32_t>(session.limits().max_reserved_blocks));
    limits->set_max_batch_items(static_cast<uint32_t>(session.limits().max_batch_items));
    limits->set_max_message_bytes(static_cast<uint64_t>(service_.max_message_bytes));
    limits->set_max_queued_operations(static_cast<uint32_t>(session.limits().max_queued_operations));
    limits->set_max_tensors(static_cast<uint32_t>(session.limits().tensors.max_tensors));
    limits->set_max_tensor_bytes(session.limits().tensors.max_bytes);
    AddPlane(v1::PLANE_RPC, session.direct() ? "the session is on the direct plane" : "", attached);
    AddPlane(v1::PLANE_SERVER, NoServerPlane(session, attached->arena()), attached);
    AddPlane(v1::PLANE_DIRECT, NoDirectPlane(service_, session), attached);
    const absl::string_view no_ordered_calls = NoOrderedCalls(session, attached->arena());
    attached->mutable_ordered_calls()->set_available(no_ordered_calls.empty());
    attached->mutable_ordered_calls()->set_reason(std::string(no_ordered_calls));
    attached->mutable_ordered_calls()->set_wait_timeout_ms(
        static_cast<uint32_t>(absl::ToInt64Milliseconds(session.limits().doorbell_timeout)));
    if (session.direct()) ToProto(*session.arena().direct, service_.descriptor_path, attached->mutable_direct());
    bool cancelled = false;
    {
      absl::MutexLock lock(&link_->mutex);
      session_ = session.id();
      cancelled = cancelled_;
      // The session may have ended already; then Finish comes next and the message is of no use.
      if (!ended_) queue_.push_front(std::move(response));
      Continue();
    }
    if (cancelled) EndLost(session.id());
  }

  void EndLost(core::SessionId session) {
    // NOT_FOUND: it has ended for another reason.
    service_.registry->EndSession(session, absl::CancelledError("the Attach stream ended"), /*retain=*/true)
        .IgnoreError();
  }

  // Starts the next write, or ends the stream when all is written.
  void Continue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(link_->mutex) {
    if (writing_ || finished_) return;
    // The first message is `attached`; events that come before it wait.
    if (!session_ && !ended_) return;
    if (!queue_.empty()) {
      writing_ = true;
      StartWrite(&queue_.front());
    } else if (ended_) {
      finished_ = true;
      code_ = static_cast<int>(reason_.code());
      Finish(ToGrpc(reason_));
    }
  }

  const ServiceContext& service_;
  const absl::Time started_;
  const std::shared_ptr<Link> link_;
  // The rest is guarded by link_->mutex.
  std::deque<v1::AttachResponse> queue_;
  core::SessionId session_;
  absl::Status reason_;
  int code_ = 0;
  bool writing_ = false;
  bool cancelled_ = false;
  bool ended_ = false;
  bool finished_ = false;
};

class SessionsService final : public v1::Sessions::CallbackService {
 public:
  explicit SessionsService(const ServiceContext& service) : service_(service) {}

  grpc::ServerWriteReactor<v1::AttachResponse>* Attach(grpc::CallbackServerContext* context,
                                                       const v1::AttachRequest* request) override {
    absl::Status refused = CheckReach(*context, *request);
    refused.Update(CheckSharing(service_, *request));
    return new AttachStream(service_, *request, refused);
  }

  grpc::ServerUnaryReactor* Detach(grpc::CallbackServerContext* context, const v1::DetachRequest*,
                                   v1::DetachResponse* response) override {
    auto* call = new UnaryCall(service_, "Sessions/Detach");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    call->Reply(session.ok() ? service_.registry->EndSession((*session)->id(), absl::OkStatus(), /*retain=*/false)
                             : session.status());
    return call;
  }

  grpc::ServerUnaryReactor* RegisterTensor(grpc::CallbackServerContext* context,
                                           const v1::RegisterTensorRequest* request,
                                           v1::RegisterTensorResponse* response) override {
    auto* call = new UnaryCall(service_, "Sessions/RegisterTensor");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    (*session)->RegisterTensor(rpc::FromProto(*request), [call, response](absl::StatusOr<core::TensorId> id) {
      if (id.ok()) response->set_tensor_id(id->value);
      call->Reply(id.status());
    });
    return call;
  }

  grpc::ServerUnaryReactor* UnregisterTensor(grpc::CallbackServerContext* context,
                                             const v1::UnregisterTensorRequest* request,
                                             v1::UnregisterTensorResponse* response) override {
    auto* call = new UnaryCall(service_, "Sessions/UnregisterTensor");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (session.ok()) {
      (*session)->UnregisterTensor(core::TensorId{request->tensor_id()},
                                   [call](const absl::Status& status) { call->Reply(status); });
    } else {
      call->Reply(session.status());
    }
    return call;
  }

 private:
  const ServiceContext& service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSessions(const ServiceContext& service) {
  return std::make_unique<SessionsService>(service);
}

}  // namespace stoker::rpc
