// Connection: the channel to one daemon and the stubs on it. Internal to the library: it brings in gRPC's headers.
//
// Thread safety: immutable once made; stubs may be used by any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/status.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "stoker/v1/admin.grpc.pb.h"
#include "stoker/v1/pools.grpc.pb.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "stoker/v1/sequences.grpc.pb.h"
#include "stoker/v1/sessions.grpc.pb.h"

namespace stoker::client {

// The header that carries a session's token.
inline constexpr char kTokenKey[] = "stoker-token";

class Connection {
 public:
  Connection(std::string address, absl::Duration call_timeout, std::shared_ptr<grpc::Channel> channel);

  // Checks the address and the options, and finds or makes the process's channel to it.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(absl::string_view address, const ClientOptions& options);

  // When a call that begins now must have ended.
  absl::Time Deadline(absl::Duration timeout) const {
    return absl::Now() + (timeout > absl::ZeroDuration() ? timeout : call_timeout_);
  }

  // One blocking unary call without a token.
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Unary(Stub& stub,
                                 grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                 const Request& request, const CallOptions& options) const {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(Deadline(options.timeout)));
    Response response;
    const absl::Status status = FromCall((stub.*method)(&context, request, &response), /*cancelled_here=*/false);
    if (!status.ok()) return status;
    return response;
  }

  bool is_unix() const { return absl::StartsWith(address_, "unix:"); }
  const std::string& address() const { return address_; }
  absl::Duration call_timeout() const { return call_timeout_; }
  grpc::Channel& channel() const { return *channel_; }
  v1::Pools::Stub& pools() const { return *pools_; }
  v1::Admin::Stub& admin() const { return *admin_; }
  v1::Sessions::Stub& sessions() const { return *sessions_; }
  v1::Sequences::Stub& sequences() const { return *sequences_; }
  v1::Residency::Stub& residency() const { return *residency_; }

 private:
  const std::string address_;
  const absl::Duration call_timeout_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Pools::Stub> pools_;
  const std::unique_ptr<v1::Admin::Stub> admin_;
  const std::unique_ptr<v1::Sessions::Stub> sessions_;
  const std::unique_ptr<v1::Sequences::Stub> sequences_;
  const std::unique_ptr<v1::Residency::Stub> residency_;
};

}  // namespace stoker::client
