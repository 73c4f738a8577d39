// stokerd as an object: starts everything in order, serves until told to stop, and stops in the reverse order.
//
// Start: backend, engine, registry, lock of the socket path, pools of the configuration, metrics, descriptor socket,
// gRPC, health "serving". Stop: health "not serving", drain (no new session or pool; attached engines are told),
// running work up to the grace time, sessions, gRPC, descriptor socket, metrics, pools.
//
// Thread safety: one thread, that which starts and stops it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/config.h"
#include "server/core/registry.h"
#include "server/descriptor_socket.h"
#include "server/listen_socket.h"
#include "server/metrics.h"
#include "server/rpc/call.h"

namespace stoker::server {

class Daemon {
 public:
  // `config` must have passed ValidateConfig and ResolveAutomaticValues. The status names what could not be had.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const DaemonConfig& config);
  // Stops, without a grace time, when Stop was not called.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Drains and stops. Returns within drain_grace_ms and a bounded time for what has to be torn down.
  void Stop();

  // Port of tcp_address, 0 without one; and that of metrics.
  int tcp_port() const { return tcp_port_; }
  int metrics_port() const { return metrics_ == nullptr ? 0 : metrics_->port(); }
  core::Registry& registry() { return *registry_; }

 private:
  explicit Daemon(const DaemonConfig& config) : config_(config) {}

  absl::Status Initialize();
  absl::Status CreatePools();
  absl::Status Listen();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials() const;
  void SetServing(bool serving);
  // Waits until nothing runs any more, at most for the grace time.
  void AwaitQuiet();
  // Waits until ended sessions have freed their memory, for a bounded time. The server still answers: a call that it
  // meets while it shuts down ends with CANCELLED, and not with the reason that the session has ended with.
  void AwaitFreed();
  MetricsSnapshot Snapshot() const;

  const DaemonConfig config_;
  rpc::ServiceContext service_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<core::Engine> engine_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<core::Registry> registry_;
  std::unique_ptr<ListenSocket> listen_socket_;
  std::unique_ptr<DescriptorSocket> descriptor_socket_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<grpc::Server> server_;
  int tcp_port_ = 0;
};

}  // namespace stoker::server
