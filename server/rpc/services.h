// The services of stoker.v1 over core. Each function makes one, to be registered with a grpc::ServerBuilder.
//
// Thread safety: handlers run on gRPC's threads and never block: they check, enqueue and return.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/rpc/call.h"

namespace stoker::rpc {

std::unique_ptr<grpc::Service> MakePools(const ServiceContext& service);
std::unique_ptr<grpc::Service> MakeSessions(const ServiceContext& service);
std::unique_ptr<grpc::Service> MakeSequences(const ServiceContext& service);
std::unique_ptr<grpc::Service> MakeResidency(const ServiceContext& service);
std::unique_ptr<grpc::Service> MakeAdmin(const ServiceContext& service);

// Full names of the services, for health.
inline constexpr const char* kServiceNames[] = {"stoker.v1.Pools", "stoker.v1.Sessions", "stoker.v1.Sequences",
                                                "stoker.v1.Residency", "stoker.v1.Admin"};

}  // namespace stoker::rpc
