// What every RPC handler shares: authentication, deadlines, metrics and the end of a call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/core/registry.h"
#include "server/metrics.h"
#include "server/rpc/status.h"

namespace stoker::rpc {

// What the services work on. Everything outlives the services.
struct ServiceContext {
  core::Registry* registry = nullptr;
  server::Metrics* metrics = nullptr;
  std::string version;
  std::string descriptor_path;  // empty: arenas cannot be mapped
  int64_t max_message_bytes = 0;
  absl::Time started;
};

// Metadata key of the session's token.
inline constexpr char kTokenKey[] = "stoker-token";

// The session that the call's token names, after a look at the call's deadline. See Registry::Authenticate.
inline absl::StatusOr<std::shared_ptr<core::Session>> Authenticate(const ServiceContext& service,
                                                                   const grpc::CallbackServerContext& context) {
  if (context.deadline() < std::chrono::system_clock::now()) {
    return absl::DeadlineExceededError("deadline: it had passed before the call began");
  }
  const auto it = context.client_metadata().find(kTokenKey);
  if (it == context.client_metadata().end()) return service.registry->Authenticate("");
  return service.registry->Authenticate(absl::string_view(it->second.data(), it->second.size()));
}

// One unary call: owns itself, ends with Reply, observes its duration.
class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(const ServiceContext& service, const char* method)
      : service_(service), method_(method), started_(absl::Now()) {}

  // At most once. The call may be gone when this returns.
  void Reply(const absl::Status& status) {
    code_ = static_cast<int>(status.code());
    Finish(ToGrpc(status));
  }

  void OnDone() override {
    service_.metrics->ObserveRpc(method_, code_, absl::ToDoubleSeconds(absl::Now() - started_));
    delete this;
  }

 protected:
  const ServiceContext& service_;

 private:
  const char* const method_;
  const absl::Time started_;
  int code_ = 0;
};

// Converts `ids` and the like: a repeated message field to a vector of core's items.
template <typename Item, typename Field, typename Convert>
std::vector<Item> Map(const Field& field, Convert convert) {
  std::vector<Item> items;
  items.reserve(static_cast<size_t>(field.size()));
  for (const auto& element : field) items.push_back(convert(element));
  return items;
}

}  // namespace stoker::rpc
