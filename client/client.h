// Client: one daemon's address, and the calls that need no session.
//
//   auto client = stoker::client::Client::Connect("unix:/run/stoker/stokerd.sock");
//   auto session = client->Attach(request);
//   (*session)->Step(step, &reply);
//
// Thread safety: a Client is a small handle that may be copied and used by any thread. Options are plain values.
//
// Invariants:
//  1. In one process, clients with equal address, TLS files, max_message_bytes and keepalive share one gRPC channel,
//  for as long as one of them (or one of
//     their sessions) lives.
//  2. Every call has a deadline: CallOptions.timeout, or else ClientOptions.call_timeout. None waits longer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "stoker/v1/admin.pb.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/sessions.pb.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

class Connection;
class Session;
struct SessionOptions;

// PEM files. With a certificate and its key the client proves who it is (mTLS).
struct TlsOptions {
  std::string ca_file;  // empty: the system's roots
  std::string certificate_file;
  std::string key_file;
  std::string server_name;  // name expected in the daemon's certificate; empty: the host of the address
};

struct ClientOptions {
  // Longest time that a call may take when its CallOptions do not say.
  absl::Duration call_timeout = absl::Seconds(30);
  // How long Connect waits for the daemon. Zero: Connect does not wait, and the first call finds out.
  absl::Duration connect_timeout = absl::Seconds(5);
  // Empty: plain text, which daemons offer on Unix sockets and, if so configured, on loopback.
  std::optional<TlsOptions> tls;
  // Largest message in either direction. 1 to 2^31 - 1. The daemon's limit is in Attached.limits.
  int64_t max_message_bytes = int64_t{256} << 20;
  // Time without traffic after which the connection is probed, for TCP where a host can vanish silently: without probes
  // a session then does not notice. 1 s to 24 h; zero: none. stokerd drops clients that probe more often than every 5
  // s.
  absl::Duration keepalive_interval = absl::ZeroDuration();
};

struct CallOptions {
  // Zero: ClientOptions.call_timeout.
  absl::Duration timeout = absl::ZeroDuration();
  // Session calls only. The Session::generation() that the request's sequence ids come from; the call fails with
  // FAILED_PRECONDITION when the session has another one by now. Zero: the generation at the time of the call. Sequence
  // ids are unique in one boot of the daemon only, so name it where ids are kept across a re-attach.
  uint64_t generation = 0;
  // Sessions with ordered_calls (SessionOptions) on a GPU, for requests with an order: the engine's stream, of the
  // session's GPU. Not null: cudaStreamLegacy is a stream's name, too.
  CUstream_st* stream = nullptr;
};

class Client {
 public:
  // `address` is "unix:/path" or "host:port" ("[::1]:7070").
  //
  // INVALID_ARGUMENT: address or options (the message names field, value and limit); NOT_FOUND or PERMISSION_DENIED: a
  // TLS file; UNAVAILABLE: no daemon answered within connect_timeout.
  static absl::StatusOr<Client> Connect(absl::string_view address, const ClientOptions& options = {});

  // Opens a session. Waits for at most SessionOptions.attach_timeout. Errors as Sessions.Attach, and see session.h.
  absl::StatusOr<std::unique_ptr<Session>> Attach(const v1::AttachRequest& request) const;
  absl::StatusOr<std::unique_ptr<Session>> Attach(const v1::AttachRequest& request, SessionOptions options) const;

  // Pools and Admin as in their proto files.
  absl::StatusOr<v1::CreatePoolResponse> CreatePool(const v1::CreatePoolRequest& request,
                                                    const CallOptions& options = {}) const;
  absl::StatusOr<v1::GetPoolResponse> GetPool(const v1::GetPoolRequest& request, const CallOptions& options = {}) const;
  absl::StatusOr<v1::ListPoolsResponse> ListPools(const CallOptions& options = {}) const;
  absl::StatusOr<v1::DeletePoolResponse> DeletePool(const v1::DeletePoolRequest& request,
                                                    const CallOptions& options = {}) const;
  absl::StatusOr<v1::GetStatusResponse> GetStatus(const CallOptions& options = {}) const;
  absl::StatusOr<v1::ListSessionsResponse> ListSessions(const CallOptions& options = {}) const;
  absl::StatusOr<v1::ListSequencesResponse> ListSequences(const v1::ListSequencesRequest& request,
                                                          const CallOptions& options = {}) const;
  absl::StatusOr<v1::EvictSessionResponse> EvictSession(const v1::EvictSessionRequest& request,
                                                        const CallOptions& options = {}) const;
  absl::StatusOr<v1::DrainResponse> Drain(const CallOptions& options = {}) const;
  absl::StatusOr<v1::UndrainResponse> Undrain(const CallOptions& options = {}) const;

  absl::string_view address() const;
  // Whether the two use one channel.
  bool SharesChannelWith(const Client& other) const;

 private:
  explicit Client(std::shared_ptr<Connection> connection);

  std::shared_ptr<Connection> connection_;
};

}  // namespace stoker::client
