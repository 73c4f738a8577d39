#include "server/daemon.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <sys/random.h>

#ifdef STOKER_CHANNELZ
#include <grpcpp/ext/channelz_service_plugin.h>
#endif

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/device_choice.h"
#include "server/engine/engine.h"
#include "server/gpus.h"
#include "server/log.h"
#include "server/rpc/pool_messages.h"
#include "server/rpc/services.h"

namespace stoker::server {
namespace {

// A peer that a broken network hides is noticed after both together; a process that dies closes its socket at once.
constexpr int kKeepaliveTimeMs = 10000;
constexpr int kKeepaliveTimeoutMs = 5000;
// How long calls may take to notice that the server shuts down.
constexpr absl::Duration kShutdownTime = absl::Seconds(2);
constexpr absl::Duration kQuietTime = absl::Milliseconds(300);
constexpr absl::Duration kQuietPoll = absl::Milliseconds(20);
// Messages in flight, over all calls, in multiples of the largest one.
constexpr int64_t kMessagesInFlight = 16;

uint64_t NewEpoch() {
  uint64_t epoch = 0;
  while (epoch == 0) {
    if (getrandom(&epoch, sizeof epoch, 0) != sizeof epoch) epoch = 0;
  }
  return epoch;
}

absl::StatusOr<std::string> ReadPem(const std::string& key, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.good() && !file.eof()) return absl::NotFoundError(absl::StrCat(key, ": cannot read ", path));
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, " is missing or empty"));
  return text;
}

core::RegistryLimits LimitsOf(const DaemonConfig& config) {
  core::RegistryLimits limits;
  limits.max_pool_bytes = config.max_pool_bytes();
  limits.max_hot_bytes = config.max_hot_bytes();
  limits.max_hot_bytes_per_session = config.max_hot_bytes_per_session();
  limits.max_sessions = config.max_sessions();
  limits.max_sequences_per_session = config.max_sequences_per_session();
  limits.max_reserved_blocks_per_session = config.max_reserved_blocks_per_session();
  limits.max_batch_items = config.max_batch_items();
  limits.max_queued_operations = config.max_queued_operations();
  limits.max_tensors_per_session = config.max_tensors_per_session();
  limits.max_tensor_bytes_per_session = config.max_tensor_bytes_per_session();
  limits.sequence_retention = absl::Milliseconds(config.sequence_retention_ms());
  limits.drain_grace = absl::Milliseconds(config.drain_grace_ms());
  limits.pool_pressure_percent = config.pool_pressure_percent();
  limits.populate_pools = config.populate_pools();
  limits.max_armed_sessions = config.max_armed_sessions();
  limits.direct_plane = config.direct_plane();
  limits.doorbell_timeout = absl::Milliseconds(config.doorbell_timeout_ms());
  return limits;
}

PoolMetrics MetricsOf(const core::PoolEntry& entry) {
  const core::PoolCounters& counters = entry.pool.counters();
  const core::WorkTotals& totals = entry.totals;
  PoolMetrics metrics;
  metrics.pool = entry.pool.spec().name;
  metrics.capacity_bytes = static_cast<uint64_t>(entry.bytes);
  metrics.populated_bytes = static_cast<uint64_t>(entry.populated_bytes);
  metrics.free_blocks = static_cast<uint64_t>(counters.free_blocks.load());
  metrics.referenced_blocks = static_cast<uint64_t>(counters.referenced_blocks.load());
  metrics.cached_blocks = static_cast<uint64_t>(counters.cached_blocks.load());
  metrics.used_bytes = static_cast<uint64_t>(entry.bytes / entry.pool.spec().blocks) *
                       (metrics.referenced_blocks + metrics.cached_blocks);
  metrics.sequences = static_cast<uint64_t>(counters.sequences.load());
  metrics.lookups_hot = totals.lookups[0].load();
  metrics.lookups_newest = totals.lookups[1].load();
  metrics.lookups_resident = totals.lookups[2].load();
  metrics.lookups_miss = totals.lookups[3].load();
  metrics.lookups_duplicate = totals.lookups[4].load();
  metrics.lookups_invalid = totals.lookups[5].load();
  metrics.evicted_rows = totals.evictions.load();
  metrics.lru_repairs = totals.lru_repairs.load();
  metrics.gathered_bytes = totals.gathered_bytes.load();
  metrics.committed_bytes = totals.committed_bytes.load();
  metrics.stored_bytes = totals.stored_bytes.load();
  metrics.loaded_bytes = totals.loaded_bytes.load();
  metrics.prefix_hit_tokens = counters.prefix_hit_rows.load();
  metrics.prefix_miss_tokens = counters.prefix_miss_rows.load();
  metrics.evicted_blocks = counters.evicted_blocks.load();
  metrics.evicted_while_referenced_blocks = counters.evicted_while_referenced.load();
  metrics.copied_blocks = counters.copied_blocks.load();
  metrics.rejected_admissions = counters.rejected_admissions.load();
  return metrics;
}

engine::CopyPolicy CopiesOf(const DaemonConfig& config) {
  engine::CopyPolicy copies;
  copies.bulk.max_blocks = static_cast<int32_t>(config.max_bulk_copy_blocks());
  copies.bulk.max_bytes = config.max_bulk_copy_bytes();
  copies.step.max_blocks = static_cast<int32_t>(config.max_step_copy_blocks());
  copies.step.max_bytes = config.max_step_copy_bytes();
  return copies;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const DaemonConfig& config, std::function<void()> failed,
                                                      const MakeBackends& make_backends) {
  std::unique_ptr<Daemon> daemon(new Daemon(config, std::move(failed)));
  if (absl::Status status = daemon->Initialize(make_backends); !status.ok()) return status;
  return daemon;
}

absl::StatusOr<std::vector<std::unique_ptr<kernels::Backend>>> Daemon::MakeDevices() const {
  // A daemon that is told to use the CPU does not look at the GPUs: that alone can take seconds.
  absl::StatusOr<std::vector<Gpu>> gpus = std::vector<Gpu>();
  if (config_.device() != "cpu") gpus = ListGpus();
  absl::StatusOr<DeviceChoice> choice = ChooseDevices(config_.device(), gpus);
  if (!choice.ok()) return choice.status();
  std::vector<std::unique_ptr<kernels::Backend>> backends;
  for (const Gpu& gpu : choice->gpus) {
    absl::StatusOr<std::unique_ptr<kernels::Backend>> backend = MakeGpuBackend(gpu);
    if (!backend.ok() && config_.device() == "auto") {
      Log::Warning("the GPU is not used", {{"device", gpu.uuid}, {"reason", backend.status().message()}});
      break;
    }
    if (!backend.ok()) return backend.status();
    Log::Info("device", {{"device", gpu.uuid}, {"backend", "cuda"}, {"name", gpu.name}, {"reason", choice->reason}});
    if (const std::string_view reason = (*backend)->no_doorbells(); !reason.empty()) {
      Log::Warning(
          "the server plane is not available, and each hop between an engine's kernels and the daemon's costs "
          "about 285 us",
          {{"device", gpu.uuid}, {"reason", reason}});
    }
    backends.push_back(*std::move(backend));
  }
  if (backends.empty()) {
    Log::Info("device", {{"device", "cpu"}, {"backend", "cpu"}, {"reason", choice->reason}});
    backends.push_back(kernels::cpu::MakeCpuBackend(static_cast<int>(config_.cpu_threads())));
  }
  return backends;
}

void Daemon::OnLost(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!lost_.ok()) return;
    lost_ = status;
  }
  tell_failed_();
}

absl::Status Daemon::lost() const {
  absl::MutexLock lock(&mutex_);
  return lost_;
}

absl::Status Daemon::Initialize(const MakeBackends& make_backends) {
  // For the process: with its last server gRPC would shut down, and can wait 10 s for a poller of its own in that.
  static const bool kept = (grpc_init(), true);
  static_cast<void>(kept);
  absl::StatusOr<std::vector<std::unique_ptr<kernels::Backend>>> backends =
      make_backends != nullptr ? make_backends() : MakeDevices();
  if (!backends.ok()) return backends.status();
  backends_ = *std::move(backends);
  std::vector<kernels::Backend*> devices;
  for (const std::unique_ptr<kernels::Backend>& backend : backends_) {
    if (absl::Status status = backend->CheckWaitingStreams(config_.max_armed_sessions()); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("max_armed_sessions: ", status.message()));
    }
    backend->OnLost([this](absl::Status status) { OnLost(status); });
    devices.push_back(backend.get());
  }
  absl::StatusOr<std::unique_ptr<core::Engine>> engine =
      engine::MakeEngine(std::move(devices), config_.max_message_bytes(), CopiesOf(config_));
  if (!engine.ok()) {
    return absl::Status(engine.status().code(), absl::StrCat("max_message_bytes: ", engine.status().message()));
  }
  engine_ = *std::move(engine);
  metrics_ = std::make_unique<Metrics>([this] { return Snapshot(); });
  registry_ = std::make_unique<core::Registry>(
      engine_.get(), LimitsOf(config_), NewEpoch(), [] { return absl::Now(); }, PoolEvents());
  service_.registry = registry_.get();
  service_.metrics = metrics_.get();
  service_.version = Version();
  service_.max_message_bytes = config_.max_message_bytes();
  service_.started = absl::Now();
  // The path first: a second daemon is refused before it has taken the memory of its pools.
  if (!config_.socket_path().empty()) {
    absl::StatusOr<std::unique_ptr<ListenSocket>> socket = ListenSocket::Prepare(config_.socket_path());
    if (!socket.ok()) return socket.status();
    listen_socket_ = *std::move(socket);
    service_.descriptor_path = listen_socket_->descriptor_path();
  }
  std::vector<core::PoolSpec> pools;
  for (const v1::PoolSpec& pool : config_.pool()) pools.push_back(rpc::FromProto(pool));
  if (absl::Status status = registry_->Expect(std::move(pools)); !status.ok()) return status;
  if (!config_.metrics_address().empty()) {
    if (absl::Status status = metrics_->Serve(config_.metrics_address()); !status.ok()) return status;
    Log::Info("metrics", {{"address", config_.metrics_address()}, {"port", metrics_->port()}});
  }
  if (absl::Status status = Listen(); !status.ok()) return status;
  Log::Info("listening", {{"socket", config_.socket_path()}, {"tcp_port", tcp_port_}, {"pools", config_.pool_size()}});
  registry_->CreateExpected([this](const absl::Status& status) { OnPoolsMade(status); });
  return absl::OkStatus();
}

core::Registry::PoolEvents Daemon::PoolEvents() {
  core::Registry::PoolEvents events;
  events.progress = [this](const std::string& pool, const core::PoolProgress& progress) {
    const std::optional<PoolMeter::Line> line = pool_meter_.Observe(pool, progress);
    if (!line.has_value()) return;
    Log::Info("pool is being populated", {{"pool", pool},
                                          {"phase", line->phase},
                                          {"bytes", line->bytes},
                                          {"total_bytes", line->total_bytes},
                                          {"percent", line->percent},
                                          {"gb_per_second", line->gb_per_second}});
  };
  events.created = [this](const core::PoolDescription& pool) {
    const PoolMeter::Summary summary = pool_meter_.Finish(pool.spec.name);
    Log::Info("pool created", {{"pool", pool.spec.name},
                               {"bytes", pool.bytes},
                               {"blocks", pool.spec.blocks},
                               {"fault_seconds", summary.fault_seconds},
                               {"pin_seconds", summary.pin_seconds},
                               {"memory", summary.memory},
                               {"reason", summary.reason}});
  };
  return events;
}

void Daemon::OnPoolsMade(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    // What a stop has ended is no failure; and from then on the members come to their end.
    if (stopping_) return;
    failure_ = status;
    if (status.ok()) {
      SetServing(true);
      Log::Info("serving", {{"version", Version()},
                            {"device", absl::StrJoin(registry_->devices(), ",")},
                            {"socket", config_.socket_path()},
                            {"tcp_port", tcp_port_},
                            {"boot_epoch", registry_->epoch()}});
    }
  }
  if (!status.ok()) tell_failed_();
}

absl::Status Daemon::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Daemon::TcpCredentials() const {
  // ValidateConfig has seen to it that plain text means loopback.
  if (config_.tls_cert_file().empty()) return grpc::InsecureServerCredentials();
  absl::StatusOr<std::string> certificate = ReadPem("tls_cert_file", config_.tls_cert_file());
  if (!certificate.ok()) return certificate.status();
  absl::StatusOr<std::string> key = ReadPem("tls_key_file", config_.tls_key_file());
  if (!key.ok()) return key.status();
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs.push_back({*std::move(key), *std::move(certificate)});
  if (!config_.tls_client_ca_file().empty()) {
    absl::StatusOr<std::string> authorities = ReadPem("tls_client_ca_file", config_.tls_client_ca_file());
    if (!authorities.ok()) return authorities.status();
    options.pem_root_certs = *std::move(authorities);
    options.client_certificate_request = GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  return grpc::SslServerCredentials(options);
}

absl::Status Daemon::Listen() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
#ifdef STOKER_CHANNELZ
  grpc::channelz::experimental::InitChannelzService();
#endif
  if (listen_socket_ != nullptr) {
    // Before gRPC serves, so that no session is told of a descriptor socket that is not there yet.
    const auto lookup = [this](std::string_view token) -> absl::StatusOr<int> {
      const absl::StatusOr<std::shared_ptr<core::Session>> session =
          registry_->Authenticate(absl::string_view(token.data(), token.size()));
      if (!session.ok()) return session.status();
      return (*session)->DuplicateArenaDescriptor();
    };
    const auto offer = [this](std::string_view token, core::FileDescriptor descriptor) -> absl::StatusOr<uint64_t> {
      const absl::StatusOr<std::shared_ptr<core::Session>> session =
          registry_->Authenticate(absl::string_view(token.data(), token.size()));
      if (!session.ok()) return session.status();
      return (*session)->OfferDescriptor(std::move(descriptor));
    };
    const auto pool = [this](std::string_view token) -> absl::StatusOr<std::vector<core::FileDescriptor>> {
      const absl::StatusOr<std::shared_ptr<core::Session>> session =
          registry_->Authenticate(absl::string_view(token.data(), token.size()));
      if (!session.ok()) return session.status();
      return (*session)->DuplicatePoolDescriptors();
    };
    absl::StatusOr<std::unique_ptr<DescriptorSocket>> socket =
        DescriptorSocket::Start(listen_socket_->descriptor_path(), lookup, {.offer = offer, .pool = pool});
    if (!socket.ok()) return socket.status();
    descriptor_socket_ = *std::move(socket);
  }
  const int max_message = static_cast<int>(config_.max_message_bytes());
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(max_message);
  builder.SetMaxSendMessageSize(max_message);
  // Two daemons on one port would each get some of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kKeepaliveTimeMs / 2);
  grpc::ResourceQuota quota("stokerd");
  quota.Resize(static_cast<size_t>(config_.max_message_bytes() * kMessagesInFlight));
  builder.SetResourceQuota(quota);
  int unix_port = 0;
  if (listen_socket_ != nullptr) {
    builder.AddListeningPort(listen_socket_->address(), grpc::InsecureServerCredentials(), &unix_port);
  }
  if (!config_.tcp_address().empty()) {
    absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials = TcpCredentials();
    if (!credentials.ok()) return credentials.status();
    builder.AddListeningPort(config_.tcp_address(), *std::move(credentials), &tcp_port_);
  }
  services_.push_back(rpc::MakePools(service_));
  services_.push_back(rpc::MakeSessions(service_));
  services_.push_back(rpc::MakeSequences(service_));
  services_.push_back(rpc::MakeResidency(service_));
  services_.push_back(rpc::MakeAdmin(service_));
  for (const std::unique_ptr<grpc::Service>& service : services_) builder.RegisterService(service.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    const bool tcp = !config_.tcp_address().empty() && tcp_port_ == 0;
    return absl::UnavailableError(
        tcp ? absl::StrCat("tcp_address: cannot listen on ", config_.tcp_address(),
                           "; it is in use, not an address of this machine, or its certificate or key is not valid")
            : absl::StrCat("socket_path: cannot listen on ", config_.socket_path()));
  }
  SetServing(false);
  if (listen_socket_ != nullptr) {
    if (absl::Status status = listen_socket_->Finish(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void Daemon::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus("", serving);
  for (const char* name : rpc::kServiceNames) health->SetServingStatus(name, serving);
}

void Daemon::AwaitQuiet() {
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config_.drain_grace_ms());
  absl::Time quiet_since = absl::Now();
  while (absl::Now() < deadline) {
    int64_t queued = 0;
    const std::vector<std::shared_ptr<core::Session>> sessions = registry_->Sessions();
    for (const std::shared_ptr<core::Session>& session : sessions) queued += session->queued_operations();
    if (sessions.empty()) return;
    if (queued > 0) quiet_since = absl::Now();
    if (absl::Now() - quiet_since >= kQuietTime) return;
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kQuietPoll));
  }
  Log::Warning("grace time ended with work running", {{"drain_grace_ms", config_.drain_grace_ms()}});
}

void Daemon::AwaitFreed() {
  const absl::Time deadline = absl::Now() + kShutdownTime;
  do {
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kQuietPoll));
  } while (registry_->Usage().hot_bytes > 0 && absl::Now() < deadline);
}

void Daemon::Stop() {
  if (server_ == nullptr || stopped_) return;
  Log::Info("draining", {{"sessions", registry_->Usage().sessions}, {"drain_grace_ms", config_.drain_grace_ms()}});
  {
    // OnPoolsMade says "serving" under this lock, or not at all.
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    SetServing(false);
  }
  registry_->StopPopulating();
  registry_->Drain();
  AwaitQuiet();
  for (const std::shared_ptr<core::Session>& session : registry_->Sessions()) {
    registry_->EndSession(session->id(), absl::UnavailableError("the daemon stops"), /*retain=*/false).IgnoreError();
  }
  AwaitFreed();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kShutdownTime));
  server_->Wait();
  stopped_ = true;
  Log::Info("stopped");
}

void Daemon::Abandon() {
  const absl::Status reason = lost();
  if (server_ == nullptr || stopped_) return;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    SetServing(false);
  }
  registry_->StopPopulating();
  registry_->Drain();
  for (const std::shared_ptr<core::Session>& session : registry_->Sessions()) {
    registry_->EndSession(session->id(), reason, /*retain=*/false).IgnoreError();
  }
  AwaitFreed();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kShutdownTime));
}

Daemon::~Daemon() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (registry_ != nullptr) registry_->StopPopulating();
  if (server_ != nullptr && !stopped_) {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  // First what others see of the daemon.
  descriptor_socket_.reset();
  listen_socket_.reset();
  if (metrics_ != nullptr) metrics_->Stop();
  server_.reset();
  services_.clear();
  registry_.reset();
}

MetricsSnapshot Daemon::Snapshot() const {
  MetricsSnapshot snapshot;
  snapshot.version = Version();
  snapshot.devices = registry_->devices();
  snapshot.uptime_seconds = absl::ToDoubleSeconds(absl::Now() - service_.started);
  snapshot.mps_enabled = registry_->MpsEnabled();
  snapshot.draining = registry_->draining();
  snapshot.max_sessions = static_cast<uint64_t>(config_.max_sessions());
  const core::RegistryUsage usage = registry_->Usage();
  snapshot.hot_bytes = static_cast<uint64_t>(usage.hot_bytes);
  snapshot.armed_sessions = static_cast<uint64_t>(usage.armed_sessions);
  snapshot.ordered_sessions = static_cast<uint64_t>(usage.ordered_sessions);
  snapshot.max_armed_sessions = static_cast<uint64_t>(config_.max_armed_sessions());
  snapshot.max_hot_bytes = static_cast<uint64_t>(config_.max_hot_bytes());
  snapshot.max_pool_bytes = static_cast<uint64_t>(config_.max_pool_bytes());
  // In this order, so that a pool that is finished in between is not missing; and not there twice.
  const std::vector<core::PoolInTheMaking> in_the_making = registry_->PoolsInTheMaking();
  for (const std::shared_ptr<core::PoolEntry>& entry : registry_->Pools()) snapshot.pools.push_back(MetricsOf(*entry));
  const size_t made = snapshot.pools.size();
  for (const core::PoolInTheMaking& pool : in_the_making) {
    const auto same = [&](const PoolMetrics& other) { return other.pool == pool.name; };
    if (std::any_of(snapshot.pools.begin(), snapshot.pools.begin() + static_cast<ptrdiff_t>(made), same)) continue;
    PoolMetrics& metrics = snapshot.pools.emplace_back();
    metrics.pool = pool.name;
    metrics.capacity_bytes = static_cast<uint64_t>(pool.bytes);
    metrics.populated_bytes = static_cast<uint64_t>(pool.populated_bytes);
  }
  for (const std::shared_ptr<core::Session>& session : registry_->Sessions()) {
    SessionMetrics metrics;
    metrics.session = session->spec().name.empty() ? absl::StrCat(session->id().value) : session->spec().name;
    metrics.mapped_bytes = session->arena().size_bytes + session->tensor_bytes();
    metrics.queued_operations = static_cast<uint64_t>(session->queued_operations());
    snapshot.sessions.push_back(std::move(metrics));
  }
  return snapshot;
}

}  // namespace stoker::server
