#include "client/client.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/session.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace stoker::client {
namespace {

// How often a lost connection is tried again. gRPC's own values (1 s, growing to 120 s) are made for servers far away.
constexpr int kInitialReconnectMs = 50;
constexpr int kMaxReconnectMs = 1000;
constexpr int kConnectAttemptMs = 5000;
constexpr int kKeepaliveTimeoutMs = 5000;
// sun_path, less its closing zero.
constexpr size_t kMaxUnixPathBytes = 107;

absl::Status CheckAddress(absl::string_view address) {
  const absl::string_view kUnix = "unix:";
  if (absl::StartsWith(address, kUnix)) {
    const size_t path_bytes = address.size() - kUnix.size();
    if (path_bytes == 0 || path_bytes > kMaxUnixPathBytes) {
      return absl::InvalidArgumentError(absl::StrCat("address '", address, "': the path of a Unix socket has ",
                                                     path_bytes, " bytes; 1 to ", kMaxUnixPathBytes, " are possible"));
    }
    return absl::OkStatus();
  }
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) {
    return absl::InvalidArgumentError(absl::StrCat("address '", address, "' is neither unix:/path nor host:port"));
  }
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (host.find_first_of("/ ") != absl::string_view::npos ||
      (host.find(':') != absl::string_view::npos && !bracketed)) {
    return absl::InvalidArgumentError(absl::StrCat("address '", address, "' is neither unix:/path nor host:port"));
  }
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("address '", address, "': the port is not 1 to 65535"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const ClientOptions& options) {
  if (options.call_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("call_timeout ", absl::FormatDuration(options.call_timeout), " is not above 0"));
  }
  if (options.connect_timeout < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("connect_timeout ", absl::FormatDuration(options.connect_timeout), " is below 0"));
  }
  if (options.max_message_bytes < 1 || options.max_message_bytes > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("max_message_bytes ", options.max_message_bytes, " is not 1 to ",
                                                   std::numeric_limits<int>::max()));
  }
  if (options.keepalive_interval != absl::ZeroDuration() &&
      (options.keepalive_interval < absl::Seconds(1) || options.keepalive_interval > absl::Hours(24))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "keepalive_interval ", absl::FormatDuration(options.keepalive_interval), " is neither 0 nor 1 s to 24 h"));
  }
  if (options.tls && options.tls->certificate_file.empty() != options.tls->key_file.empty()) {
    return absl::InvalidArgumentError("tls: certificate_file and key_file must be given together");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(absl::string_view field, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file && file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (!file || text.str().empty()) {
    const int error = errno;
    return absl::ErrnoToStatus(error == 0 ? EINVAL : error,
                               absl::StrCat("tls: ", field, " '", path, "' cannot be read or is empty"));
  }
  return text.str();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const std::optional<TlsOptions>& tls) {
  if (!tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions ssl;
  const std::pair<absl::string_view, std::pair<const std::string*, std::string*>> files[] = {
      {"ca_file", {&tls->ca_file, &ssl.pem_root_certs}},
      {"certificate_file", {&tls->certificate_file, &ssl.pem_cert_chain}},
      {"key_file", {&tls->key_file, &ssl.pem_private_key}},
  };
  for (const auto& [field, file] : files) {
    if (file.first->empty()) continue;
    absl::StatusOr<std::string> text = ReadFile(field, *file.first);
    if (!text.ok()) return text.status();
    *file.second = *std::move(text);
  }
  return grpc::SslCredentials(ssl);
}

grpc::ChannelArguments MakeArguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kInitialReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  // Despite its name the time that one attempt to connect, handshake included, is given.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectAttemptMs);
  // The daemon is a neighbour: a proxy of the environment is never on the way to it.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Not repeated behind our back: a step that may have been done must not be done twice.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  if (options.keepalive_interval > absl::ZeroDuration()) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                     static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_interval)));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  if (options.tls && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  return arguments;
}

// What makes two channels equal. The contents of TLS files are not part of it: a rotated certificate is read when the
// last user of the old channel has let go.
std::string ChannelKey(absl::string_view address, const ClientOptions& options) {
  std::string key =
      absl::StrCat(address, "\n", options.max_message_bytes, "\n", absl::FormatDuration(options.keepalive_interval));
  if (options.tls) {
    absl::StrAppend(&key, "\n", options.tls->ca_file, "\n", options.tls->certificate_file, "\n", options.tls->key_file,
                    "\n", options.tls->server_name);
  }
  return key;
}

// gRPC would shut down with the last channel of a process, which can wait 10 s for a poller of its own; and what runs
// callbacks, which all channels share, would end and begin anew, which in gRPC 1.51 can abort the process. So one
// channel, on which a call with a callback was made, is never destroyed. It connects to nothing.
void KeepGrpcRunning() {
  struct Kept {
    std::unique_ptr<v1::Admin::Stub> stub;
    grpc::ClientContext context;
    v1::GetStatusRequest request;
    v1::GetStatusResponse response;
  };
  // Volatile, so that the pointer is there, and leak checkers find it.
  static Kept* volatile kept = [] {
    auto* const made = new Kept;
    made->stub = v1::Admin::NewStub(grpc::CreateChannel("unix:/dev/null", grpc::InsecureChannelCredentials()));
    made->context.set_deadline(std::chrono::system_clock::now());
    made->stub->async()->GetStatus(&made->context, &made->request, &made->response, [](const grpc::Status&) {});
    return made;
  }();
  static_cast<void>(kept);
}

}  // namespace

Connection::Connection(std::string address, absl::Duration call_timeout, std::shared_ptr<grpc::Channel> channel)
    : address_(std::move(address)),
      call_timeout_(call_timeout),
      channel_(std::move(channel)),
      pools_(v1::Pools::NewStub(channel_)),
      admin_(v1::Admin::NewStub(channel_)),
      sessions_(v1::Sessions::NewStub(channel_)),
      sequences_(v1::Sequences::NewStub(channel_)),
      residency_(v1::Residency::NewStub(channel_)) {}

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(absl::string_view address, const ClientOptions& options) {
  if (absl::Status status = CheckAddress(address); !status.ok()) return status;
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;

  // One channel per process and address: the only state of the library that outlives its objects. Never destroyed, so
  // that static destructors may use it.
  KeepGrpcRunning();
  static std::mutex& mutex = *new std::mutex;
  static auto& channels = *new std::map<std::string, std::weak_ptr<grpc::Channel>>;

  const std::string key = ChannelKey(address, options);
  const std::lock_guard lock(mutex);
  std::erase_if(channels, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<grpc::Channel> channel;
  if (auto found = channels.find(key); found != channels.end()) channel = found->second.lock();
  if (channel == nullptr) {
    absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials = MakeCredentials(options.tls);
    if (!credentials.ok()) return credentials.status();
    channel = grpc::CreateCustomChannel(std::string(address), *credentials, MakeArguments(options));
    channels[key] = channel;
  }
  return std::make_shared<Connection>(std::string(address), options.call_timeout, std::move(channel));
}

Client::Client(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

absl::StatusOr<Client> Client::Connect(absl::string_view address, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connection::Open(address, options);
  if (!connection.ok()) return connection.status();
  if (options.connect_timeout > absl::ZeroDuration() &&
      !(*connection)->channel().WaitForConnected(absl::ToChronoTime(absl::Now() + options.connect_timeout))) {
    return absl::UnavailableError(
        absl::StrCat("no daemon answered at ", address, " within ", absl::FormatDuration(options.connect_timeout)));
  }
  return Client(*std::move(connection));
}

absl::string_view Client::address() const { return connection_->address(); }

bool Client::SharesChannelWith(const Client& other) const {
  return &connection_->channel() == &other.connection_->channel();
}

absl::StatusOr<std::unique_ptr<Session>> Client::Attach(const v1::AttachRequest& request) const {
  return Attach(request, SessionOptions());
}

absl::StatusOr<std::unique_ptr<Session>> Client::Attach(const v1::AttachRequest& request,
                                                        SessionOptions options) const {
  return Session::Open(connection_, request, std::move(options));
}

absl::StatusOr<v1::CreatePoolResponse> Client::CreatePool(const v1::CreatePoolRequest& request,
                                                          const CallOptions& options) const {
  return connection_->Unary(connection_->pools(), &v1::Pools::Stub::CreatePool, request, options);
}

absl::StatusOr<v1::GetPoolResponse> Client::GetPool(const v1::GetPoolRequest& request,
                                                    const CallOptions& options) const {
  return connection_->Unary(connection_->pools(), &v1::Pools::Stub::GetPool, request, options);
}

absl::StatusOr<v1::ListPoolsResponse> Client::ListPools(const CallOptions& options) const {
  return connection_->Unary(connection_->pools(), &v1::Pools::Stub::ListPools, v1::ListPoolsRequest(), options);
}

absl::StatusOr<v1::DeletePoolResponse> Client::DeletePool(const v1::DeletePoolRequest& request,
                                                          const CallOptions& options) const {
  return connection_->Unary(connection_->pools(), &v1::Pools::Stub::DeletePool, request, options);
}

absl::StatusOr<v1::GetStatusResponse> Client::GetStatus(const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), options);
}

absl::StatusOr<v1::ListSessionsResponse> Client::ListSessions(const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), options);
}

absl::StatusOr<v1::ListSequencesResponse> Client::ListSequences(const v1::ListSequencesRequest& request,
                                                                const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::ListSequences, request, options);
}

absl::StatusOr<v1::EvictSessionResponse> Client::EvictSession(const v1::EvictSessionRequest& request,
                                                              const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::EvictSession, request, options);
}

absl::StatusOr<v1::DrainResponse> Client::Drain(const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::Drain, v1::DrainRequest(), options);
}

absl::StatusOr<v1::UndrainResponse> Client::Undrain(const CallOptions& options) const {
  return connection_->Unary(connection_->admin(), &v1::Admin::Stub::Undrain, v1::UndrainRequest(), options);
}

}  // namespace stoker::client
