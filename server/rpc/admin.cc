#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/pool_messages.h"
#include "server/rpc/services.h"
#include "stoker/v1/admin.grpc.pb.h"

namespace stoker::rpc {
namespace {

constexpr uint32_t kDefaultPageSize = 1000;
constexpr uint32_t kMaxPageSize = 10000;

void ToProto(const core::SessionInfo& info, v1::SessionInfo* proto) {
  proto->set_session_id(info.id.value);
  proto->set_name(info.name);
  proto->set_pool(info.pool);
  proto->set_device(info.device);
  proto->set_attached_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(absl::Now() - info.attached)));
  proto->set_state_rows(static_cast<uint32_t>(info.state_rows));
  proto->set_open_sequences(static_cast<uint32_t>(info.open_sequences));
  proto->set_reserved_blocks(static_cast<uint32_t>(info.reserved_blocks));
  proto->set_max_reserved_blocks(static_cast<uint32_t>(info.max_reserved_blocks));
  proto->set_arena_bytes(static_cast<uint64_t>(info.bytes));
  proto->set_steps(info.steps);
  proto->set_armed(info.armed);
  v1::LookupTotals* lookups = proto->mutable_lookups();
  lookups->set_hot(info.lookups[0]);
  lookups->set_newest(info.lookups[1]);
  lookups->set_resident(info.lookups[2]);
  lookups->set_miss(info.lookups[3]);
  lookups->set_duplicate(info.lookups[4]);
  lookups->set_invalid(info.lookups[5]);
}

void ToProto(const core::SequenceSnapshot& snapshot, v1::SequenceInfo* proto) {
  proto->set_sequence_id(snapshot.id.value);
  proto->set_sequence_key(snapshot.key);
  proto->set_stored_rows(static_cast<uint32_t>(snapshot.stored_rows));
  proto->set_max_rows(static_cast<uint32_t>(snapshot.max_rows));
  proto->set_blocks(static_cast<uint32_t>(snapshot.blocks));
  for (const core::SessionId session : snapshot.sessions) proto->add_session_ids(session.value);
  proto->set_writer_session_id(snapshot.writer.value);
}

v1::DaemonState StateOf(const core::Registry& registry) {
  if (registry.draining()) return v1::DAEMON_STATE_DRAINING;
  return registry.Ready().ok() ? v1::DAEMON_STATE_SERVING : v1::DAEMON_STATE_STARTING;
}

class AdminService final : public v1::Admin::CallbackService {
 public:
  explicit AdminService(const ServiceContext& service) : service_(service) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext*, const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/GetStatus");
    core::Registry& registry = *service_.registry;
    response->set_boot_epoch(registry.epoch());
    response->set_version(service_.version);
    response->set_state(StateOf(registry));
    response->set_uptime_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(absl::Now() - service_.started)));
    for (const std::string& device : registry.devices()) response->add_devices(device);
    for (const core::PoolDescription& pool : registry.DescribePools()) rpc::ToProto(pool, response->add_pools());
    const core::RegistryUsage usage = registry.Usage();
    response->set_sessions(static_cast<uint32_t>(usage.sessions));
    response->set_max_sessions(static_cast<uint32_t>(registry.limits().max_sessions));
    response->set_hot_bytes(static_cast<uint64_t>(usage.hot_bytes));
    response->set_max_hot_bytes(static_cast<uint64_t>(registry.limits().max_hot_bytes));
    response->set_pool_bytes(static_cast<uint64_t>(usage.pool_bytes));
    response->set_mps_enabled(registry.MpsEnabled());
    response->set_armed_sessions(static_cast<uint32_t>(usage.armed_sessions));
    response->set_ordered_sessions(static_cast<uint32_t>(usage.ordered_sessions));
    response->set_max_pool_bytes(static_cast<uint64_t>(registry.limits().max_pool_bytes));
    call->Reply(absl::OkStatus());
    return call;
  }

  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext*, const v1::ListSessionsRequest*,
                                         v1::ListSessionsResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/ListSessions");
    response->set_boot_epoch(service_.registry->epoch());
    for (const auto& session : service_.registry->Sessions()) ToProto(session->Info(), response->add_sessions());
    call->Reply(absl::OkStatus());
    return call;
  }

  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext*, const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/ListSequences");
    response->set_boot_epoch(service_.registry->epoch());
    if (request->page_size() > kMaxPageSize) {
      call->Reply(absl::InvalidArgumentError(
          absl::StrCat("page_size: ", request->page_size(), " given, limit ", kMaxPageSize)));
      return call;
    }
    const absl::StatusOr<std::shared_ptr<core::PoolEntry>> pool = service_.registry->FindPool(request->pool());
    if (pool.ok()) {
      bool more = false;
      const uint32_t page_size = request->page_size() == 0 ? kDefaultPageSize : request->page_size();
      for (const core::SequenceSnapshot& sequence :
           (*pool)->pool.List(core::SequenceId{request->after_sequence_id()}, page_size, &more)) {
        ToProto(sequence, response->add_sequences());
      }
      response->set_more(more);
    }
    call->Reply(pool.status());
    return call;
  }

  grpc::ServerUnaryReactor* EvictSession(grpc::CallbackServerContext*, const v1::EvictSessionRequest* request,
                                         v1::EvictSessionResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/EvictSession");
    response->set_boot_epoch(service_.registry->epoch());
    call->Reply(service_.registry->EndSession(core::SessionId{request->session_id()},
                                              absl::AbortedError("an operator evicted the session"), /*retain=*/true));
    return call;
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext*, const v1::DrainRequest*,
                                  v1::DrainResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/Drain");
    response->set_boot_epoch(service_.registry->epoch());
    service_.registry->Drain();
    call->Reply(absl::OkStatus());
    return call;
  }

  grpc::ServerUnaryReactor* Undrain(grpc::CallbackServerContext*, const v1::UndrainRequest*,
                                    v1::UndrainResponse* response) override {
    auto* call = new UnaryCall(service_, "Admin/Undrain");
    response->set_boot_epoch(service_.registry->epoch());
    service_.registry->Undrain();
    call->Reply(absl::OkStatus());
    return call;
  }

 private:
  const ServiceContext& service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdmin(const ServiceContext& service) {
  return std::make_unique<AdminService>(service);
}

}  // namespace stoker::rpc
