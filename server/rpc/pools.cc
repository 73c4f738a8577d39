#include <utility>

#include "server/rpc/pool_messages.h"
#include "server/rpc/services.h"
#include "stoker/v1/pools.grpc.pb.h"

namespace stoker::rpc {
namespace {

class PoolsService final : public v1::Pools::CallbackService {
 public:
  explicit PoolsService(const ServiceContext& service) : service_(service) {}

  grpc::ServerUnaryReactor* CreatePool(grpc::CallbackServerContext*, const v1::CreatePoolRequest* request,
                                       v1::CreatePoolResponse* response) override {
    auto* call = new UnaryCall(service_, "Pools/CreatePool");
    response->set_boot_epoch(service_.registry->epoch());
    service_.registry->CreatePool(FromProto(request->spec()),
                                  [call, response](absl::StatusOr<core::PoolDescription> pool) {
                                    if (pool.ok()) ToProto(*pool, response->mutable_pool());
                                    call->Reply(pool.status());
                                  });
    return call;
  }

  grpc::ServerUnaryReactor* GetPool(grpc::CallbackServerContext*, const v1::GetPoolRequest* request,
                                    v1::GetPoolResponse* response) override {
    auto* call = new UnaryCall(service_, "Pools/GetPool");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<core::PoolDescription> pool = service_.registry->DescribePool(request->name());
    if (pool.ok()) ToProto(*pool, response->mutable_pool());
    call->Reply(pool.status());
    return call;
  }

  grpc::ServerUnaryReactor* ListPools(grpc::CallbackServerContext*, const v1::ListPoolsRequest*,
                                      v1::ListPoolsResponse* response) override {
    auto* call = new UnaryCall(service_, "Pools/ListPools");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::Status ready = service_.registry->Ready();
    if (ready.ok()) {
      for (const core::PoolDescription& pool : service_.registry->DescribePools()) ToProto(pool, response->add_pools());
    }
    call->Reply(ready);
    return call;
  }

  grpc::ServerUnaryReactor* DeletePool(grpc::CallbackServerContext*, const v1::DeletePoolRequest* request,
                                       v1::DeletePoolResponse* response) override {
    auto* call = new UnaryCall(service_, "Pools/DeletePool");
    response->set_boot_epoch(service_.registry->epoch());
    service_.registry->DeletePool(request->name(), [call](absl::Status status) { call->Reply(status); });
    return call;
  }

 private:
  const ServiceContext& service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakePools(const ServiceContext& service) {
  return std::make_unique<PoolsService>(service);
}

}  // namespace stoker::rpc
