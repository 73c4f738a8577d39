// Calls that the client library would refuse to make, or does not know: any bytes, any metadata, any method.
//
// Thread safety: free functions without state.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/status.h"

namespace stoker::system_test {

constexpr int kRawTimeoutSeconds = 20;

inline void PrepareContext(grpc::ClientContext& context, const std::string& token) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(kRawTimeoutSeconds));
  if (!token.empty()) context.AddMetadata("stoker-token", token);
}

// One unary call through a stub, with any token or none.
template <typename Stub, typename Request, typename Response>
absl::Status RawCall(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                     const std::string& token, const Request& request, Response* response) {
  grpc::ClientContext context;
  PrepareContext(context, token);
  return client::FromGrpc((stub.*method)(&context, request, response));
}

// One request of raw bytes to any method, and the first reply's bytes. Works for streaming methods too.
absl::Status RawBytesCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, std::string* response);

}  // namespace stoker::system_test
