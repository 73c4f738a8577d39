#include "tests/client/fake_daemon.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "stoker/v1/admin.grpc.pb.h"
#include "stoker/v1/pools.grpc.pb.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "stoker/v1/sequences.grpc.pb.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/client/fake_arena.h"

namespace stoker::client {
namespace {

void SetItem(const absl::Status& status, google::rpc::Status* item) {
  item->set_code(static_cast<int>(status.code()));
  item->set_message(std::string(status.message()));
}

// The server's side of one Attach stream. Deletes itself when gRPC is done with it.
class Lease : public grpc::ServerWriteReactor<v1::AttachResponse> {
 public:
  // on_end runs once, when the stream has ended.
  explicit Lease(std::function<void()> on_end) : on_end_(std::move(on_end)) {}

  void Send(const v1::AttachResponse& message) {
    const std::lock_guard lock(mutex_);
    if (end_) return;
    queue_.push_back(message);
    if (queue_.size() == 1) StartWrite(&queue_.front());
  }

  // After what is queued.
  void End(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    if (!end_) end_ = status;
    FinishIfDone();
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    queue_.pop_front();
    if (!ok) queue_.clear();
    if (!queue_.empty()) StartWrite(&queue_.front());
    FinishIfDone();
  }
  void OnCancel() override { End(absl::CancelledError("the client cancelled")); }
  void OnDone() override {
    on_end_();
    delete this;
  }

 private:
  void FinishIfDone() {
    if (end_ && queue_.empty() && !std::exchange(finished_, true)) Finish(ToGrpc(*end_));
  }

  const std::function<void()> on_end_;
  std::mutex mutex_;
  std::deque<v1::AttachResponse> queue_;
  std::optional<absl::Status> end_;
  bool finished_ = false;
};

struct FakeSession {
  uint64_t id = 0;
  std::string name;
  Lease* lease = nullptr;
  FileDescriptor memory;
  v1::AttachRequest request;
  v1::ArenaLayout layout;
  std::set<uint64_t> sequences;
  // Its thread asks for mutex_: to be destroyed without it.
  std::unique_ptr<FakePlane> plane;
};

}  // namespace

class FakeDaemon::Impl {
 public:
  explicit Impl(std::string directory)
      : socket_path_(absl::StrCat(directory, "/rpc.sock")),
        descriptor_path_(absl::StrCat(directory, "/arena.sock")),
        address_(absl::StrCat("unix:", socket_path_)),
        pools_service_(this),
        admin_service_(this),
        sessions_service_(this),
        sequences_service_(this),
        residency_service_(this) {}

  void Start() {
    {
      const std::lock_guard lock(mutex_);
      ++boot_epoch_;
    }
    descriptors_ = std::make_unique<DescriptorServer>(descriptor_path_, [this](const std::string& token) {
      const std::lock_guard lock(mutex_);
      const auto found = sessions_.find(token);
      return found == sessions_.end() ? FileDescriptor() : Duplicate(found->second.memory);
    });
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(&pools_service_);
    builder.RegisterService(&admin_service_);
    builder.RegisterService(&sessions_service_);
    builder.RegisterService(&sequences_service_);
    builder.RegisterService(&residency_service_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }

  void Stop() {
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    descriptors_.reset();
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(sessions_.empty());
    sessions_.clear();
    pools_.clear();
  }

  // What every call begins with. `context` has the token where `needs_token`.
  template <typename Context>
  absl::Status Enter(const std::string& method, const Context& context, bool needs_token, std::string* token) {
    std::function<absl::Status(const std::string&)> hook;
    {
      const std::lock_guard lock(mutex_);
      SeenCall& seen = calls_.emplace_back();
      seen.method = method;
      seen.time_left = absl::FromChrono(context.deadline()) - absl::Now();
      const auto found = context.client_metadata().find("stoker-token");
      if (found != context.client_metadata().end()) {
        seen.token = std::string(found->second.data(), found->second.size());
      }
      *token = seen.token;
      hook = hook_;
    }
    if (hook) {
      if (absl::Status status = hook(method); !status.ok()) return status;
    }
    if (!needs_token) return absl::OkStatus();
    const std::lock_guard lock(mutex_);
    if (token->empty()) return absl::UnauthenticatedError("metadata stoker-token is missing");
    if (sessions_.count(*token) == 0) return absl::PermissionDeniedError("metadata stoker-token is no session's");
    return absl::OkStatus();
  }

  // The session's plane, which is its own no more.
  std::unique_ptr<FakePlane> TakePlane(const std::string& token) {
    const std::lock_guard lock(mutex_);
    const auto found = sessions_.find(token);
    return found == sessions_.end() ? nullptr : std::move(found->second.plane);
  }

  absl::Status CheckNotArmed(const std::string& token) {
    const auto found = sessions_.find(token);
    const bool armed = found != sessions_.end() && found->second.plane != nullptr;
    return armed ? absl::FailedPreconditionError("the session is armed") : absl::OkStatus();
  }

  absl::Status CheckSequence(const std::string& token, uint64_t id) {
    const auto found = sessions_.find(token);
    const bool open = found != sessions_.end() && found->second.sequences.count(id) != 0;
    return open ? absl::OkStatus() : absl::NotFoundError(absl::StrCat("sequence ", id, " is not open"));
  }

  class PoolsService : public v1::Pools::Service {
   public:
    explicit PoolsService(Impl* impl) : impl_(*impl) {}
    grpc::Status CreatePool(grpc::ServerContext* context, const v1::CreatePoolRequest* request,
                            v1::CreatePoolResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("CreatePool", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      v1::PoolSpec spec = request->spec();
      if (spec.block_rows() == 0) spec.set_block_rows(64);
      if (spec.prefix_rows() == 0) spec.set_prefix_rows(spec.block_rows());
      const auto [entry, made] = impl_.pools_.emplace(spec.name(), spec);
      if (!made && entry->second.SerializeAsString() != spec.SerializeAsString()) {
        return ToGrpc(absl::AlreadyExistsError(absl::StrCat("pool '", spec.name(), "' exists with another spec")));
      }
      response->set_boot_epoch(impl_.boot_epoch_);
      *response->mutable_pool() = impl_.MakePool(spec);
      return grpc::Status::OK;
    }
    grpc::Status GetPool(grpc::ServerContext* context, const v1::GetPoolRequest* request,
                         v1::GetPoolResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("GetPool", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      const auto found = impl_.pools_.find(request->name());
      if (found == impl_.pools_.end()) return ToGrpc(NoPool(request->name()));
      response->set_boot_epoch(impl_.boot_epoch_);
      *response->mutable_pool() = impl_.MakePool(found->second);
      return grpc::Status::OK;
    }
    grpc::Status ListPools(grpc::ServerContext* context, const v1::ListPoolsRequest*,
                           v1::ListPoolsResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("ListPools", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      for (const auto& pool : impl_.pools_) *response->add_pools() = impl_.MakePool(pool.second);
      return grpc::Status::OK;
    }
    grpc::Status DeletePool(grpc::ServerContext* context, const v1::DeletePoolRequest* request,
                            v1::DeletePoolResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("DeletePool", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      return impl_.pools_.erase(request->name()) == 1 ? grpc::Status::OK : ToGrpc(NoPool(request->name()));
    }

   private:
    Impl& impl_;
  };

  class AdminService : public v1::Admin::Service {
   public:
    explicit AdminService(Impl* impl) : impl_(*impl) {}
    grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest*,
                           v1::GetStatusResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("GetStatus", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      response->set_version("0.0.0-fake");
      response->set_state(impl_.draining_ ? v1::DAEMON_STATE_DRAINING : v1::DAEMON_STATE_SERVING);
      response->set_uptime_ms(7384000);
      response->add_devices("cpu");
      for (const auto& pool : impl_.pools_) *response->add_pools() = impl_.MakePool(pool.second);
      response->set_sessions(static_cast<uint32_t>(impl_.sessions_.size()));
      response->set_max_sessions(16);
      response->set_hot_bytes(uint64_t{3} << 29);
      response->set_max_hot_bytes(uint64_t{8} << 30);
      return grpc::Status::OK;
    }
    grpc::Status ListSessions(grpc::ServerContext* context, const v1::ListSessionsRequest*,
                              v1::ListSessionsResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("ListSessions", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      for (const auto& entry : impl_.sessions_) {
        v1::SessionInfo& info = *response->add_sessions();
        info.set_session_id(entry.second.id);
        info.set_name(entry.second.name);
        info.set_pool(entry.second.request.pool());
        info.set_state_rows(entry.second.request.state_rows());
        info.set_open_sequences(static_cast<uint32_t>(entry.second.sequences.size()));
        info.mutable_lookups()->set_hot(3);
        info.mutable_lookups()->set_miss(1);
      }
      return grpc::Status::OK;
    }
    // As if each pool had 2,500 sequences with the ids 1 to 2,500.
    grpc::Status ListSequences(grpc::ServerContext* context, const v1::ListSequencesRequest* request,
                               v1::ListSequencesResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("ListSequences", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      if (impl_.pools_.count(request->pool()) == 0) return ToGrpc(NoPool(request->pool()));
      constexpr uint64_t kSequences = 2500;
      response->set_boot_epoch(impl_.boot_epoch_);
      uint64_t id = request->after_sequence_id() + 1;
      for (; id <= kSequences && response->sequences_size() < static_cast<int>(request->page_size()); ++id) {
        v1::SequenceInfo& info = *response->add_sequences();
        info.set_sequence_id(id);
        info.set_sequence_key(id == 1 ? "key\x1b[31m" : "");
      }
      response->set_more(id <= kSequences);
      return grpc::Status::OK;
    }
    grpc::Status EvictSession(grpc::ServerContext* context, const v1::EvictSessionRequest* request,
                              v1::EvictSessionResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("EvictSession", *context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      for (const auto& entry : impl_.sessions_) {
        if (entry.second.id != request->session_id()) continue;
        entry.second.lease->End(absl::AbortedError("evicted"));
        return grpc::Status::OK;
      }
      return ToGrpc(absl::NotFoundError(absl::StrCat("session ", request->session_id(), " does not exist")));
    }
    grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest*, v1::DrainResponse* response) override {
      return SetDraining("Drain", *context, true, response);
    }
    grpc::Status Undrain(grpc::ServerContext* context, const v1::UndrainRequest*,
                         v1::UndrainResponse* response) override {
      return SetDraining("Undrain", *context, false, response);
    }

   private:
    template <typename Response>
    grpc::Status SetDraining(const char* method, const grpc::ServerContext& context, bool draining,
                             Response* response) {
      std::string token;
      if (absl::Status s = impl_.Enter(method, context, false, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      impl_.draining_ = draining;
      response->set_boot_epoch(impl_.boot_epoch_);
      return grpc::Status::OK;
    }

    Impl& impl_;
  };

  class SessionsService : public v1::Sessions::WithCallbackMethod_Attach<v1::Sessions::Service> {
   public:
    explicit SessionsService(Impl* impl) : impl_(*impl) {}
    grpc::ServerWriteReactor<v1::AttachResponse>* Attach(grpc::CallbackServerContext* context,
                                                         const v1::AttachRequest* request) override {
      std::string unused;
      const absl::Status entered = impl_.Enter("Attach", *context, false, &unused);
      const std::lock_guard lock(impl_.mutex_);
      const auto pool = impl_.pools_.find(request->pool());
      const absl::Status status = !entered.ok()                ? entered
                                  : impl_.draining_            ? absl::UnavailableError("the daemon drains")
                                  : pool == impl_.pools_.end() ? NoPool(request->pool())
                                                               : absl::OkStatus();
      if (!status.ok()) {
        auto* const refusal = new Lease([] {});
        refusal->End(status);
        return refusal;
      }
      const uint64_t id = ++impl_.last_session_id_;
      const std::string token = absl::StrCat("token-", impl_.boot_epoch_, "-", id);
      auto* const lease = new Lease([this, token] {
        impl_.TakePlane(token);
        const std::lock_guard end_lock(impl_.mutex_);
        impl_.sessions_.erase(token);
        impl_.session_ended_.notify_all();
      });
      for (const auto& entry : impl_.sessions_) {
        if (request->name().empty() || entry.second.name != request->name()) continue;
        v1::AttachResponse event;
        event.mutable_superseded()->set_by_session_id(id);
        entry.second.lease->Send(event);
        entry.second.lease->End(absl::AbortedError("superseded"));
      }
      v1::AttachResponse first;
      v1::Attached& attached = *first.mutable_attached();
      attached.set_boot_epoch(impl_.boot_epoch_);
      attached.set_session_id(id);
      attached.set_token(token);
      *attached.mutable_arena() = FakeArenaLayout(*request, pool->second);
      attached.mutable_arena()->set_descriptor_socket(impl_.descriptor_path_);
      *attached.mutable_pool() = pool->second;
      attached.set_device("cpu");
      for (const v1::Plane plane : {v1::PLANE_RPC, v1::PLANE_SERVER, v1::PLANE_DIRECT}) {
        v1::PlaneStatus& offer = *attached.add_planes();
        offer.set_plane(plane);
        offer.set_available(plane != v1::PLANE_DIRECT);
        if (plane == v1::PLANE_DIRECT) offer.set_reason("the fake daemon has no direct plane");
      }
      FakeSession& session = impl_.sessions_[token];
      session.id = id;
      session.name = request->name();
      session.lease = lease;
      session.request = *request;
      session.memory = MakeMemory(attached.arena().size_bytes());
      session.layout = attached.arena();
      if (impl_.editor_) impl_.editor_(&first);
      lease->Send(first);
      return lease;
    }
    grpc::Status Detach(grpc::ServerContext* context, const v1::DetachRequest*, v1::DetachResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Detach", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      const auto found = impl_.sessions_.find(token);
      if (found != impl_.sessions_.end()) found->second.lease->End(absl::OkStatus());
      return grpc::Status::OK;
    }

   private:
    Impl& impl_;
  };

  class SequencesService : public v1::Sequences::Service {
   public:
    explicit SequencesService(Impl* impl) : impl_(*impl) {}
    grpc::Status Admit(grpc::ServerContext* context, const v1::AdmitRequest* request,
                       v1::AdmitResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Admit", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      FakeSession& session = impl_.sessions_[token];
      for (const v1::AdmitItem& item : request->items()) {
        v1::AdmittedSequence& admitted = *response->add_sequences();
        if (item.prompt_rows() == 0) {
          SetItem(absl::InvalidArgumentError("prompt_rows 0 is below 1"), admitted.mutable_status());
          continue;
        }
        admitted.set_sequence_id(++impl_.last_sequence_id_);
        admitted.set_state_row(static_cast<uint32_t>(session.sequences.size()));
        admitted.set_writer(true);
        session.sequences.insert(admitted.sequence_id());
      }
      return grpc::Status::OK;
    }
    grpc::Status Extend(grpc::ServerContext* context, const v1::ExtendRequest* request,
                        v1::ExtendResponse* response) override {
      return impl_.ForEachItem("Extend", *context, *request, response);
    }
    grpc::Status Fork(grpc::ServerContext* context, const v1::ForkRequest* request,
                      v1::ForkResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Fork", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      for (const v1::ForkItem& item : request->items()) {
        v1::AdmittedSequence& forked = *response->add_sequences();
        const absl::Status status = impl_.CheckSequence(token, item.sequence_id());
        SetItem(status, forked.mutable_status());
        if (!status.ok()) continue;
        forked.set_sequence_id(++impl_.last_sequence_id_);
        impl_.sessions_[token].sequences.insert(forked.sequence_id());
      }
      return grpc::Status::OK;
    }
    grpc::Status Release(grpc::ServerContext* context, const v1::ReleaseRequest* request,
                         v1::ReleaseResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Release", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      for (const uint64_t id : request->sequence_ids()) {
        SetItem(impl_.CheckSequence(token, id), response->add_statuses());
        impl_.sessions_[token].sequences.erase(id);
      }
      return grpc::Status::OK;
    }

   private:
    Impl& impl_;
  };

  class ResidencyService : public v1::Residency::Service {
   public:
    explicit ResidencyService(Impl* impl) : impl_(*impl) {}
    grpc::Status Store(grpc::ServerContext* context, const v1::StoreRequest* request,
                       v1::StoreResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Store", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      for (const v1::StoreItem& item : request->items()) {
        SetItem(impl_.CheckSequence(token, item.range().sequence_id()), response->add_statuses());
        response->set_stored_bytes(response->stored_bytes() + item.rows().size());
      }
      return grpc::Status::OK;
    }
    grpc::Status Load(grpc::ServerContext* context, const v1::LoadRequest* request,
                      v1::LoadResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Load", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      for (const v1::LoadItem& item : request->items()) {
        SetItem(impl_.CheckSequence(token, item.range().sequence_id()), response->add_statuses());
      }
      return grpc::Status::OK;
    }
    // Answers each entry with itself.
    grpc::Status Step(grpc::ServerContext* context, const v1::StepRequest* request,
                      v1::StepResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Step", *context, true, &token); !s.ok()) return ToGrpc(s);
      return ToGrpc(DoStep(token, *request, response));
    }
    grpc::Status Resolve(grpc::ServerContext* context, const v1::ResolveRequest* request,
                         v1::ResolveResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Resolve", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      for (const v1::StepRow& row : request->rows()) {
        SetItem(impl_.CheckSequence(token, row.sequence_id()), response->add_statuses());
      }
      return grpc::Status::OK;
    }
    grpc::Status Gather(grpc::ServerContext* context, const v1::GatherRequest* request,
                        v1::GatherResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Gather", *context, true, &token); !s.ok()) return ToGrpc(s);
      response->set_gathered_bytes(request->layers_size());
      return grpc::Status::OK;
    }
    grpc::Status Commit(grpc::ServerContext* context, const v1::CommitRequest* request,
                        v1::CommitResponse* response) override {
      return impl_.ForEachItem("Commit", *context, *request, response);
    }
    grpc::Status Invalidate(grpc::ServerContext* context, const v1::InvalidateRequest* request,
                            v1::InvalidateResponse* response) override {
      return impl_.ForEachItem("Invalidate", *context, *request, response);
    }
    grpc::Status Read(grpc::ServerContext* context, const v1::ReadRequest* request,
                      v1::ReadResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Read", *context, true, &token); !s.ok()) return ToGrpc(s);
      const std::lock_guard lock(impl_.mutex_);
      response->set_rows("bytes");
      return ToGrpc(impl_.CheckSequence(token, request->sequence_id()));
    }
    grpc::Status Arm(grpc::ServerContext* context, const v1::ArmRequest* request, v1::ArmResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Arm", *context, true, &token); !s.ok()) return ToGrpc(s);
      if (const auto before = impl_.TakePlane(token); before != nullptr) before->Disarm();
      const auto check = [impl = &impl_, token](const FakePlane::Row& row) -> int32_t {
        if (row.sequence_id == 0) return v1::BATCH_ROW_STATUS_UNSPECIFIED;
        const std::lock_guard lock(impl->mutex_);
        return impl->CheckSequence(token, row.sequence_id).ok() ? v1::BATCH_ROW_STATUS_UNSPECIFIED
                                                                : v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE;
      };
      const std::lock_guard lock(impl_.mutex_);
      const auto found = impl_.sessions_.find(token);
      if (found == impl_.sessions_.end()) return ToGrpc(absl::FailedPreconditionError("the session has ended"));
      FakeSession& session = found->second;
      session.plane = std::make_unique<FakePlane>(session.memory, session.layout, impl_.first_step_, request->top_k(),
                                                  check, impl_.plane_hook_);
      response->set_boot_epoch(impl_.boot_epoch_);
      response->set_first_step(impl_.first_step_);
      response->set_doorbell_timeout_ms(5000);
      if (impl_.armed_editor_) impl_.armed_editor_(response);
      return grpc::Status::OK;
    }
    grpc::Status Disarm(grpc::ServerContext* context, const v1::DisarmRequest*, v1::DisarmResponse* response) override {
      std::string token;
      if (absl::Status s = impl_.Enter("Disarm", *context, true, &token); !s.ok()) return ToGrpc(s);
      const auto plane = impl_.TakePlane(token);
      if (plane == nullptr) return ToGrpc(absl::FailedPreconditionError("the session is not armed"));
      response->set_steps(plane->Disarm());
      const std::lock_guard lock(impl_.mutex_);
      response->set_boot_epoch(impl_.boot_epoch_);
      return grpc::Status::OK;
    }
    grpc::Status RunSteps(grpc::ServerContext* context,
                          grpc::ServerReaderWriter<v1::RunStepsResponse, v1::RunStepsRequest>* stream) override {
      std::string token;
      if (absl::Status s = impl_.Enter("RunSteps", *context, true, &token); !s.ok()) return ToGrpc(s);
      for (v1::RunStepsRequest request; stream->Read(&request);) {
        v1::RunStepsResponse response;
        if (absl::Status s = impl_.Enter("RunSteps.step", *context, true, &token); !s.ok()) return ToGrpc(s);
        if (absl::Status s = DoStep(token, request.step(), response.mutable_step()); !s.ok()) return ToGrpc(s);
        stream->Write(response);
      }
      return grpc::Status::OK;
    }

   private:
    absl::Status DoStep(const std::string& token, const v1::StepRequest& request, v1::StepResponse* response) {
      if (request.rows().empty()) return absl::InvalidArgumentError("rows is empty");
      const std::lock_guard lock(impl_.mutex_);
      if (absl::Status s = impl_.CheckNotArmed(token); !s.ok()) return s;
      response->set_boot_epoch(impl_.boot_epoch_);
      for (const v1::StepRow& row : request.rows()) {
        SetItem(row.sequence_id() == 0 ? absl::OkStatus() : impl_.CheckSequence(token, row.sequence_id()),
                response->add_statuses());
      }
      for (const v1::StepGroup& group : request.groups()) {
        v1::StepGroupResult& result = *response->add_groups();
        result.set_group(group.group());
        *result.mutable_hot_rows() = group.indices();
        for (int row = 0; row < request.rows_size(); ++row) result.add_counts();
      }
      return absl::OkStatus();
    }

    Impl& impl_;
  };

  template <typename Request, typename Response>
  grpc::Status ForEachItem(const char* method, const grpc::ServerContext& context, const Request& request,
                           Response* response) {
    std::string token;
    if (absl::Status s = Enter(method, context, true, &token); !s.ok()) return ToGrpc(s);
    const std::lock_guard lock(mutex_);
    for (const auto& item : request.items()) {
      SetItem(CheckSequence(token, item.sequence_id()), response->add_statuses());
    }
    return grpc::Status::OK;
  }

  static absl::Status NoPool(const std::string& name) {
    return absl::NotFoundError(absl::StrCat("pool '", name, "' does not exist"));
  }

  v1::Pool MakePool(const v1::PoolSpec& spec) const {
    v1::Pool pool;
    *pool.mutable_spec() = spec;
    pool.mutable_usage()->set_capacity_bytes(uint64_t{spec.layers()} * spec.blocks() * 64 * spec.row_bytes());
    pool.mutable_usage()->set_free_blocks(spec.blocks());
    return pool;
  }

  const std::string socket_path_;
  const std::string descriptor_path_;
  const std::string address_;
  PoolsService pools_service_;
  AdminService admin_service_;
  SessionsService sessions_service_;
  SequencesService sequences_service_;
  ResidencyService residency_service_;
  std::unique_ptr<DescriptorServer> descriptors_;
  std::unique_ptr<grpc::Server> server_;

  mutable std::mutex mutex_;
  mutable std::condition_variable session_ended_;
  // Guarded by mutex_.
  uint64_t boot_epoch_ = 100;
  bool draining_ = false;
  uint64_t last_session_id_ = 0;
  uint64_t last_sequence_id_ = 0;
  std::map<std::string, v1::PoolSpec> pools_;
  std::map<std::string, FakeSession> sessions_;  // by token
  std::vector<SeenCall> calls_;
  std::function<absl::Status(const std::string&)> hook_;
  std::function<void(v1::AttachResponse*)> editor_;
  FakePlane::Hook plane_hook_;
  uint64_t first_step_ = 1;
  std::function<void(v1::ArmResponse*)> armed_editor_;
};

FakeDaemon::FakeDaemon(std::string directory) : impl_(std::make_unique<Impl>(std::move(directory))) { impl_->Start(); }

FakeDaemon::~FakeDaemon() {
  if (impl_->server_ != nullptr) impl_->Stop();
}

const std::string& FakeDaemon::address() const { return impl_->address_; }
void FakeDaemon::Kill() { impl_->Stop(); }
void FakeDaemon::Restart() { impl_->Start(); }

void FakeDaemon::AddPool(const v1::PoolSpec& spec) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->pools_[spec.name()] = spec;
}

void FakeDaemon::SetHook(std::function<absl::Status(const std::string&)> hook) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->hook_ = std::move(hook);
}

void FakeDaemon::SetAttachedEditor(std::function<void(v1::AttachResponse*)> editor) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->editor_ = std::move(editor);
}

void FakeDaemon::SetPlaneHook(FakePlane::Hook hook) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->plane_hook_ = std::move(hook);
}

void FakeDaemon::SetFirstStep(uint64_t first_step) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->first_step_ = first_step;
}

void FakeDaemon::SetArmedEditor(std::function<void(v1::ArmResponse*)> editor) {
  const std::lock_guard lock(impl_->mutex_);
  impl_->armed_editor_ = std::move(editor);
}

void FakeDaemon::Send(const v1::AttachResponse& event) {
  const std::lock_guard lock(impl_->mutex_);
  for (const auto& entry : impl_->sessions_) entry.second.lease->Send(event);
}

void FakeDaemon::EndSessions(const absl::Status& status) {
  const std::lock_guard lock(impl_->mutex_);
  for (const auto& entry : impl_->sessions_) entry.second.lease->End(status);
}

uint64_t FakeDaemon::boot_epoch() const {
  const std::lock_guard lock(impl_->mutex_);
  return impl_->boot_epoch_;
}

bool FakeDaemon::AwaitNoSession() const {
  std::unique_lock lock(impl_->mutex_);
  return impl_->session_ended_.wait_for(lock, std::chrono::seconds(20), [&] { return impl_->sessions_.empty(); });
}

std::vector<SeenCall> FakeDaemon::calls(const std::string& method) const {
  const std::lock_guard lock(impl_->mutex_);
  std::vector<SeenCall> found;
  for (const SeenCall& call : impl_->calls_) {
    if (call.method == method) found.push_back(call);
  }
  return found;
}

FileDescriptor FakeDaemon::arena_memory() const {
  const std::lock_guard lock(impl_->mutex_);
  const FakeSession* newest = nullptr;
  for (const auto& entry : impl_->sessions_) {
    if (newest == nullptr || entry.second.id > newest->id) newest = &entry.second;
  }
  return newest == nullptr ? FileDescriptor() : Duplicate(newest->memory);
}

}  // namespace stoker::client
