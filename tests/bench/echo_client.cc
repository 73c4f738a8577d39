#include "tests/bench/echo_client.h"

#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/samples.h"

namespace stoker::bench {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);
// Largest framing of the bytes field and of reply_bytes.
constexpr size_t kRequestFraming = 10;
constexpr size_t kReplyFraming = 5;

size_t Less(size_t bytes, size_t framing) { return bytes > framing ? bytes - framing : 0; }

}  // namespace

absl::StatusOr<std::unique_ptr<EchoProcess>> EchoProcess::Start(absl::string_view api, bool standard,
                                                                const ScratchFolder& folder) {
  const std::string name = absl::StrCat("echo-", api, standard ? "-standard" : "");
  const std::string socket = folder.Path(absl::StrCat(name, ".sock"));
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(
      {OwnProgram(), absl::StrCat("--echo_server=", api), absl::StrCat("--echo_standard=", standard ? "true" : "false"),
       absl::StrCat("--socket=", socket)},
      socket, folder.Path(absl::StrCat(name, ".log")));
  if (!child.ok()) return child.status();
  auto echo = std::make_unique<EchoProcess>();
  echo->api_ = std::string(api);
  echo->standard_ = standard;
  echo->process_ = *std::move(child);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  echo->stub_ = Echo::NewStub(
      grpc::CreateCustomChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials(), arguments));
  return echo;
}

absl::StatusOr<std::vector<std::unique_ptr<EchoProcess>>> StartEchoServers(const ScratchFolder& folder) {
  std::vector<std::unique_ptr<EchoProcess>> servers;
  for (const bool standard : {false, true}) {
    for (const char* api : kEchoApis) {
      absl::StatusOr<std::unique_ptr<EchoProcess>> server = EchoProcess::Start(api, standard, folder);
      if (!server.ok()) return server.status();
      servers.push_back(*std::move(server));
    }
  }
  return servers;
}

EchoCall::EchoCall(EchoProcess& server, bool stream, size_t request_bytes, size_t reply_bytes) : server_(server) {
  std::string& payload = *request_.mutable_payload();
  payload.resize(Less(request_bytes, kRequestFraming));
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 131 + i / 256);
  request_.set_reply_bytes(static_cast<uint32_t>(Less(reply_bytes, kReplyFraming)));
  expected_ = payload.substr(0, request_.reply_bytes());
  expected_.resize(request_.reply_bytes());
  if (!stream) return;
  stream_context_ = std::make_unique<grpc::ClientContext>();
  stream_ = server_.stub().Stream(stream_context_.get());
}

EchoCall::~EchoCall() {
  if (stream_ == nullptr) return;
  stream_->WritesDone();
  while (stream_->Read(&response_)) {
  }
  static_cast<void>(stream_->Finish());  // nothing depends on how the stream ends
}

double EchoCall::Run() {
  bool ok;
  double us;
  if (stream_ != nullptr) {
    const Stopwatch watch;
    ok = stream_->Write(request_) && stream_->Read(&response_);
    us = watch.us();
  } else {
    const Stopwatch watch;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kTimeout));
    ok = server_.stub().Unary(&context, request_, &response_).ok();
    us = watch.us();
  }
  if (!ok || response_.payload() != expected_) {
    std::fprintf(stderr, "an echo call failed or gave wrong bytes\n");
    std::exit(1);
  }
  return us;
}

}  // namespace stoker::bench
