// stokerd as an object: starts everything in order, serves until told to stop, and stops in the reverse order.
//
// Start: devices, engine, registry, lock of the socket path, metrics, descriptor socket, gRPC. From then on it lives:
// scrapes, health ("not serving") and GetStatus are answered, while the pools of the configuration are made in the
// background, which can take minutes; then health says "serving". Stop: health "not serving", no more making of pools,
// drain (no new session or pool; attached engines are told), running work up to the grace time, sessions, calls. The
// destructor: sockets, metrics, gRPC, pools; what the outside sees is gone first.
//
// A device that is lost (kernels::Backend::OnLost) takes its process with it: nothing that uses CUDA works from then
// on, so the daemon is told to abandon all sessions and is not stopped in order.
//
// Thread safety: one thread, that which starts and stops it; failure() and lost() are for any thread.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/config.h"
#include "server/core/registry.h"
#include "server/descriptor_socket.h"
#include "server/listen_socket.h"
#include "server/metrics.h"
#include "server/pool_meter.h"
#include "server/rpc/call.h"

namespace stoker::server {

class Daemon {
 public:
  // Makes a backend for each device; tests give their own. The daemon's are those that config.device() names.
  using MakeBackends = std::function<absl::StatusOr<std::vector<std::unique_ptr<kernels::Backend>>>()>;

  // `config` must have passed ValidateConfig and ResolveAutomaticValues. The status names what could not be had.
  // `failed` is called, on any thread, when failure() or lost() is no longer OK.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(
      const DaemonConfig& config, std::function<void()> failed = [] {}, const MakeBackends& make_backends = nullptr);
  // Stops, without a grace time, when Stop was not called.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Drains and stops serving. Returns within drain_grace_ms and a bounded time for what has to be torn down.
  void Stop();

  // Why a pool of the configuration could not be made: the daemon will never serve, and is to be stopped.
  absl::Status failure() const;
  // OK, or UNAVAILABLE when a device is lost, with its UUID and the reason.
  absl::Status lost() const;
  // Ends all sessions with lost(), and gRPC, without waiting for work longer than a few seconds. For a process that
  // ends next, without destructors: those that use a lost device may never return.
  void Abandon();

  // Port of tcp_address, 0 without one; and that of metrics.
  int tcp_port() const { return tcp_port_; }
  int metrics_port() const { return metrics_ == nullptr ? 0 : metrics_->port(); }
  core::Registry& registry() { return *registry_; }

 private:
  Daemon(const DaemonConfig& config, std::function<void()> failed)
      : config_(config), tell_failed_(std::move(failed)), pool_meter_([] { return absl::Now(); }, kPoolLogPeriod) {}

  absl::Status Initialize(const MakeBackends& make_backends);
  // The backends that config_.device() names.
  absl::StatusOr<std::vector<std::unique_ptr<kernels::Backend>>> MakeDevices() const;
  // FAILED_PRECONDITION where the configuration has more than the device carries.
  absl::Status LimitArmedSessions(const kernels::Backend& backend);
  void OnLost(const absl::Status& status);
  // How the registry tells of pools that are made.
  core::Registry::PoolEvents PoolEvents();
  // The end of the making of the configuration's pools.
  void OnPoolsMade(const absl::Status& status);
  absl::Status Listen();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials() const;
  void SetServing(bool serving);
  // Waits until nothing runs any more, at most for the grace time.
  void AwaitQuiet();
  // Waits until ended sessions have freed their memory, for a bounded time. The server still answers: a call that it
  // meets while it shuts down ends with CANCELLED, and not with the reason that the session has ended with.
  void AwaitFreed();
  MetricsSnapshot Snapshot() const;

  static constexpr absl::Duration kPoolLogPeriod = absl::Seconds(3);

  DaemonConfig config_;  // max_armed_sessions: what the devices carry
  const std::function<void()> tell_failed_;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  PoolMeter pool_meter_;
  rpc::ServiceContext service_;
  std::vector<std::unique_ptr<kernels::Backend>> backends_;
  std::unique_ptr<core::Engine> engine_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<core::Registry> registry_;
  std::unique_ptr<ListenSocket> listen_socket_;
  std::unique_ptr<DescriptorSocket> descriptor_socket_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<grpc::Server> server_;
  bool stopped_ = false;
  int tcp_port_ = 0;
};

}  // namespace stoker::server
