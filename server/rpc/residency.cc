#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/rpc/message_pool.h"
#include "server/rpc/services.h"
#include "server/rpc/step_call.h"
#include "server/rpc/tensor_messages.h"
#include "stoker/v1/residency.grpc.pb.h"

namespace stoker::rpc {
namespace {

core::RowRange FromProto(const v1::RowRange& range) {
  return {core::SequenceId{range.sequence_id()}, range.first_row(), range.row_count()};
}

server::PlaneEndReason ReasonOf(const core::PlaneEnding& ending) {
  if (!ending.device.ok()) return server::PlaneEndReason::kDeviceFailed;
  switch (ending.why) {
    case core::PlaneEnd::kTimedOut:
      return server::PlaneEndReason::kTimedOut;
    case core::PlaneEnd::kBadStep:
      return server::PlaneEndReason::kBadStep;
    case core::PlaneEnd::kRunning:
    case core::PlaneEnd::kDisarmed:
      break;
  }
  return server::PlaneEndReason::kDisarmed;
}

void TellPlaneEnd(const core::Session& session, const core::PlaneEnding& ending, server::Metrics* metrics) {
  const server::PlaneEndReason reason = ReasonOf(ending);
  metrics->ObservePlaneEnd(reason);
  if (reason == server::PlaneEndReason::kDisarmed) return;
  std::string why = "a request had a number that cannot be";
  if (reason == server::PlaneEndReason::kTimedOut) {
    why = absl::StrCat("a doorbell was not rung within doorbell_timeout_ms, ",
                       absl::ToInt64Milliseconds(session.limits().doorbell_timeout));
  } else if (reason == server::PlaneEndReason::kDeviceFailed) {
    why = std::string(ending.device.message());
  }
  server::Log::Warning(
      "server plane ended",
      {{"session", session.spec().name}, {"id", session.id().value}, {"step", ending.step}, {"reason", why}});
}

// A call that runs one step. Owns itself until it replies. gRPC's own reactor, unlike one of ours, ends on the thread
// that sends the reply: a change of threads less.
class StepUnaryCall {
 public:
  StepUnaryCall(const ServiceContext& service, const char* method, grpc::CallbackServerContext* context)
      : step(service), service_(service), method_(method), started_(absl::Now()), reactor_(context->DefaultReactor()) {}

  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

  // Once. The call is gone when this returns.
  void Reply(const absl::Status& status) {
    const std::unique_ptr<StepUnaryCall> self(this);
    reactor_->Finish(ToGrpc(status));
    service_.metrics->ObserveRpc(method_, static_cast<int>(status.code()),
                                 absl::ToDoubleSeconds(absl::Now() - started_));
  }

  StepCall step;

 private:
  const ServiceContext& service_;
  const char* const method_;
  const absl::Time started_;
  grpc::ServerUnaryReactor* const reactor_;
};

// Steps of one stream, one after the other.
class RunStepsStream final : public grpc::ServerBidiReactor<v1::RunStepsRequest, v1::RunStepsResponse> {
 public:
  RunStepsStream(const ServiceContext& service, absl::StatusOr<std::shared_ptr<core::Session>> session)
      : service_(service), started_(absl::Now()), step_(service) {
    if (session.ok()) {
      session_ = *std::move(session);
      StartRead(&request_);
    } else {
      End(session.status());
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      End(absl::OkStatus());  // the client is done
      return;
    }
    response_.Clear();
    step_.Run(*session_, request_.step(), response_.mutable_step(), [this](absl::Status status) {
      if (status.ok()) {
        StartWrite(&response_);
      } else {
        End(status);
      }
    });
  }

  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      End(absl::CancelledError("the client has gone"));
    }
  }

  void OnDone() override {
    service_.metrics->ObserveRpc("Residency/RunSteps", code_, absl::ToDoubleSeconds(absl::Now() - started_));
    delete this;
  }

 private:
  void End(const absl::Status& status) {
    code_ = static_cast<int>(status.code());
    Finish(ToGrpc(status));
  }

  const ServiceContext& service_;
  const absl::Time started_;
  StepCall step_;
  std::shared_ptr<core::Session> session_;
  v1::RunStepsRequest request_;
  v1::RunStepsResponse response_;
  int code_ = 0;
};

class ResidencyService final : public v1::Residency::CallbackService {
 public:
  explicit ResidencyService(const ServiceContext& service) : service_(service) {
    SetMessageAllocatorFor_Step(&step_messages_);
  }

  grpc::ServerUnaryReactor* Store(grpc::CallbackServerContext* context, const v1::StoreRequest* request,
                                  v1::StoreResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Store");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    for (const v1::StoreItem& item : request->items()) {
      if (item.source() != v1::DATA_SOURCE_UNSPECIFIED && v1::DataSource_IsValid(item.source())) continue;
      session->RefuseOrder(rpc::OrderOf(*request));
      call->Reply(absl::InvalidArgumentError(absl::StrCat(
          "source: ", static_cast<int>(item.source()), " given, allowed are INLINE (1), SHARED (2) and TENSOR (3)")));
      return call;
    }
    session->Store(Map<core::StoreItem>(request->items(),
                                        [](const v1::StoreItem& item) {
                                          return core::StoreItem{
                                              FromProto(item.range()), static_cast<core::RowSource>(item.source()),
                                              item.rows(), item.staging_offset_bytes(), rpc::FromProto(item.tensor())};
                                        }),
                   rpc::OrderOf(*request), ReplyTo(call, response, &v1::StoreResponse::set_stored_bytes));
    return call;
  }

  grpc::ServerUnaryReactor* Load(grpc::CallbackServerContext* context, const v1::LoadRequest* request,
                                 v1::LoadResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Load");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    for (const v1::LoadItem& item : request->items()) {
      if (item.target() != v1::LOAD_TARGET_UNSPECIFIED && v1::LoadTarget_IsValid(item.target())) continue;
      session->RefuseOrder(rpc::OrderOf(*request));
      call->Reply(
          absl::InvalidArgumentError(absl::StrCat("target: ", static_cast<int>(item.target()),
                                                  " given, allowed are STAGING (1), HOT_BUFFER (2) and TENSOR (3)")));
      return call;
    }
    session->Load(Map<core::LoadItem>(request->items(),
                                      [](const v1::LoadItem& item) {
                                        return core::LoadItem{
                                            FromProto(item.range()), static_cast<core::RowTarget>(item.target()),
                                            item.staging_offset_bytes(), rpc::FromProto(item.tensor())};
                                      }),
                  rpc::OrderOf(*request), ReplyTo(call, response, &v1::LoadResponse::set_loaded_bytes));
    return call;
  }

  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext* context, const v1::StepRequest* request,
                                 v1::StepResponse* response) override {
    return RunStep("Residency/Step", context, request, response);
  }

  grpc::ServerUnaryReactor* Resolve(grpc::CallbackServerContext* context, const v1::ResolveRequest* request,
                                    v1::ResolveResponse* response) override {
    return RunStep("Residency/Resolve", context, request, response);
  }

  grpc::ServerUnaryReactor* Gather(grpc::CallbackServerContext* context, const v1::GatherRequest* request,
                                   v1::GatherResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Gather");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    session->Gather(request->group(), std::vector<int64_t>(request->layers().begin(), request->layers().end()),
                    rpc::OrderOf(*request), [call, response](absl::StatusOr<uint64_t> bytes) {
                      if (bytes.ok()) response->set_gathered_bytes(*bytes);
                      call->Reply(bytes.status());
                    });
    return call;
  }

  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context, const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Commit");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    session->Commit(
        Map<core::CommitItem>(
            request->items(),
            [](const v1::CommitItem& item) {
              return core::CommitItem{core::SequenceId{item.sequence_id()}, item.first_row(), item.row_count()};
            }),
        rpc::OrderOf(*request), ReplyTo(call, response, &v1::CommitResponse::set_committed_bytes));
    return call;
  }

  grpc::ServerUnaryReactor* Invalidate(grpc::CallbackServerContext* context, const v1::InvalidateRequest* request,
                                       v1::InvalidateResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Invalidate");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    session->Invalidate(
        Map<core::InvalidateItem>(request->items(),
                                  [](const v1::InvalidateItem& item) {
                                    return core::InvalidateItem{
                                        core::SequenceId{item.sequence_id()},
                                        absl::MakeConstSpan(item.positions().data(),
                                                            static_cast<size_t>(item.positions_size()))};
                                  }),
        ReplyTo<v1::InvalidateResponse>(call, response, nullptr));
    return call;
  }

  grpc::ServerUnaryReactor* Read(grpc::CallbackServerContext* context, const v1::ReadRequest* request,
                                 v1::ReadResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Read");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    core::ReadRequest read;
    read.id = core::SequenceId{request->sequence_id()};
    read.hot_rows = request->has_hot_rows();
    const auto& values = read.hot_rows ? request->hot_rows().values() : request->positions().values();
    read.values = absl::MakeConstSpan(values.data(), static_cast<size_t>(values.size()));
    read.layers.assign(request->layers().begin(), request->layers().end());
    const absl::StatusOr<uint64_t> bytes = session->ReadBytes(read);
    absl::Status status = bytes.status();
    if (status.ok() && *bytes > static_cast<uint64_t>(service_.max_message_bytes) - kReplyOverheadBytes) {
      status = absl::ResourceExhaustedError(absl::StrCat("rows: the reply would have ", *bytes,
                                                         " bytes of rows, limit max_message_bytes ",
                                                         service_.max_message_bytes, " less ", kReplyOverheadBytes));
    }
    if (!status.ok()) {
      call->Reply(status);
      return call;
    }
    response->mutable_rows()->resize(*bytes);
    session->Read(std::move(read), response->mutable_rows()->data(),
                  [call](absl::StatusOr<uint64_t> done) { call->Reply(done.status()); });
    return call;
  }

  grpc::ServerUnaryReactor* Arm(grpc::CallbackServerContext* context, const v1::ArmRequest* request,
                                v1::ArmResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Arm");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    core::Session::PlaneEvents events;
    events.stepped = [metrics = service_.metrics](const core::PlaneStep& step) {
      const double seconds = static_cast<double>(step.device_ns) * 1e-9;
      metrics->ObserveStep(server::StepPlane::kServer, seconds);
    };
    // The session keeps this until its plane has ended.
    events.ended = [metrics = service_.metrics, &session = *session](const core::PlaneEnding& ending) {
      TellPlaneEnd(session, ending, metrics);
    };
    session->Arm(request->top_k(), std::move(events), [call, response](absl::StatusOr<core::ArmResult> armed) {
      if (armed.ok()) {
        response->set_first_step(armed->first_step);
        response->set_doorbell_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(armed->doorbell_timeout)));
      }
      call->Reply(armed.status());
    });
    return call;
  }

  grpc::ServerUnaryReactor* Disarm(grpc::CallbackServerContext* context, const v1::DisarmRequest*,
                                   v1::DisarmResponse* response) override {
    auto* call = new UnaryCall(service_, "Residency/Disarm");
    const auto session = Begin(*context, response, call);
    if (session == nullptr) return call;
    session->Disarm([call, response](absl::StatusOr<uint64_t> steps) {
      if (steps.ok()) response->set_steps(*steps);
      call->Reply(steps.status());
    });
    return call;
  }

  grpc::ServerBidiReactor<v1::RunStepsRequest, v1::RunStepsResponse>* RunSteps(
      grpc::CallbackServerContext* context) override {
    return new RunStepsStream(service_, Authenticate(service_, *context));
  }

 private:
  static constexpr uint64_t kReplyOverheadBytes = 64;

  // The caller's session, or null when the call has been answered.
  template <typename Response, typename Call>
  std::shared_ptr<core::Session> Begin(const grpc::CallbackServerContext& context, Response* response, Call* call) {
    response->set_boot_epoch(service_.registry->epoch());
    absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, context);
    if (session.ok()) return *std::move(session);
    call->Reply(session.status());
    return nullptr;
  }

  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* RunStep(const char* method, grpc::CallbackServerContext* context, const Request* request,
                                    Response* response) {
    auto* const call = new StepUnaryCall(service_, method, context);
    grpc::ServerUnaryReactor* const reactor = call->reactor();
    if (const auto session = Begin(*context, response, call); session != nullptr) {
      call->step.Run(*session, *request, response, [call](absl::Status status) { call->Reply(status); });
    }
    return reactor;
  }

  // Ends a batch call: the items' statuses, and the bytes in the field that `set_bytes` sets.
  template <typename Response>
  static core::Session::Done<core::BatchResult> ReplyTo(UnaryCall* call, Response* response,
                                                        void (Response::*set_bytes)(uint64_t)) {
    return [call, response, set_bytes](absl::StatusOr<core::BatchResult> result) {
      if (result.ok()) {
        for (const absl::Status& status : result->statuses) ToProto(status, response->add_statuses());
        if (set_bytes != nullptr) (response->*set_bytes)(result->bytes);
      }
      call->Reply(result.status());
    };
  }

  const ServiceContext& service_;
  MessagePool<v1::StepRequest, v1::StepResponse> step_messages_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeResidency(const ServiceContext& service) {
  return std::make_unique<ResidencyService>(service);
}

}  // namespace stoker::rpc
