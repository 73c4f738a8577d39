// The one place that turns absl::Status into what goes over the wire.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace stoker::rpc {

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::string_view message = status.message();
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(message.data(), message.size()));
}

inline void ToProto(const absl::Status& status, google::rpc::Status* proto) {
  proto->set_code(static_cast<int>(status.code()));
  if (!status.ok()) proto->set_message(status.message().data(), status.message().size());
}

}  // namespace stoker::rpc
