// Echo servers in processes of their own, and timed calls to them.
//
// Thread safety: one thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tests/bench/child_process.h"
#include "tests/bench/echo.grpc.pb.h"

namespace stoker::bench {

class EchoProcess {
 public:
  // Starts this program as an echo server: see ServeEcho.
  static absl::StatusOr<std::unique_ptr<EchoProcess>> Start(absl::string_view api, bool standard,
                                                            const ScratchFolder& folder);
  const std::string& api() const { return api_; }
  bool standard() const { return standard_; }
  Echo::Stub& stub() const { return *stub_; }

 private:
  std::string api_;
  bool standard_ = false;
  std::unique_ptr<ChildProcess> process_;
  std::unique_ptr<Echo::Stub> stub_;
};

// One server of each of kEchoApis, in that order; then one of each with the standard services.
absl::StatusOr<std::vector<std::unique_ptr<EchoProcess>>> StartEchoServers(const ScratchFolder& folder);

// Calls of one size to one server. The sizes are those of the messages, as near as the framing of a bytes field lets.
class EchoCall {
 public:
  EchoCall(EchoProcess& server, bool stream, size_t request_bytes, size_t reply_bytes);
  ~EchoCall();
  EchoCall(const EchoCall&) = delete;
  EchoCall& operator=(const EchoCall&) = delete;

  // Microseconds of one round trip. Ends the program when a call fails or a reply's bytes are wrong: without a
  // baseline there is nothing to report.
  double Run();

 private:
  EchoProcess& server_;
  EchoRequest request_;
  EchoResponse response_;
  std::string expected_;
  std::unique_ptr<grpc::ClientContext> stream_context_;
  std::unique_ptr<grpc::ClientReaderWriter<EchoRequest, EchoResponse>> stream_;
};

}  // namespace stoker::bench
