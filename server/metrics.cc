#include "server/metrics.h"

#include <CivetServer.h>
#include <netdb.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/log.h"
#include "stoker/v1/admin.pb.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/residency.pb.h"
#include "stoker/v1/sequences.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// ---- the metrics ----

enum Name : size_t {
  kLookups,
  kEvictions,
  kLruRepairs,
  kGatheredBytes,
  kCommittedBytes,
  kStoredBytes,
  kLoadedBytes,
  kPrefixTokens,
  kAdmissionsRejected,
  kBlocks,
  kEvictedBlocks,
  kEvictedWhileReferenced,
  kCopiedBlocks,
  kSequences,
  kPoolCapacityBytes,
  kPoolPopulatedBytes,
  kPoolUsedBytes,
  kMaxPoolBytes,
  kSessions,
  kMaxSessions,
  kArmedSessions,
  kOrderedSessions,
  kMaxArmedSessions,
  kPlaneEnds,
  kHotBytes,
  kMaxHotBytes,
  kClientMappedBytes,
  kQueuedOperations,
  kRpcDuration,
  kStepDuration,
  kGatherRate,
  kDraining,
  kBuildInfo,
  kDeviceInfo,
  kMpsEnabled,
  kUptime,
  kProcessStartTime,
  kProcessResidentMemory,
  kNames,
};

struct Description {
  Name key;
  const char* name;
  MetricType type;
  const char* labels;  // for people; each label's name stands in backquotes
  const char* help;
};

constexpr MetricType kCounter = MetricType::Counter;
constexpr MetricType kGauge = MetricType::Gauge;
constexpr MetricType kHistogram = MetricType::Histogram;
constexpr const char* kPoolLabel = "`pool`";

constexpr Description kDescriptions[] = {
    {kLookups, "stoker_lookups_total", kCounter, "`pool`, `outcome` = hot, newest, resident, miss, duplicate, invalid",
     "Entries that resolves classified, by outcome. They add up to the entries asked for that are not negative."},
    {kEvictions, "stoker_evictions_total", kCounter, kPoolLabel, "Rows of hot buffers that gave their slot to a miss."},
    {kLruRepairs, "stoker_lru_repairs_total", kCounter, kPoolLabel,
     "Corrupt entries of an LRU order that were repaired. Any is a defect or a stray write by an engine."},
    {kGatheredBytes, "stoker_gathered_bytes_total", kCounter, kPoolLabel,
     "Bytes of missed rows copied from the pool into hot buffers."},
    {kCommittedBytes, "stoker_committed_bytes_total", kCounter, kPoolLabel,
     "Bytes of newest rows copied from hot buffers into the pool."},
    {kStoredBytes, "stoker_stored_bytes_total", kCounter, kPoolLabel, "Bytes written into the pool by Store."},
    {kLoadedBytes, "stoker_loaded_bytes_total", kCounter, kPoolLabel, "Bytes read from the pool by Load."},
    {kPrefixTokens, "stoker_prefix_tokens_total", kCounter, "`pool`, `outcome` = hit, miss",
     "Prompt tokens of admitted sequences that the prefix index had (hit) or had not (miss)."},
    {kAdmissionsRejected, "stoker_admissions_rejected_total", kCounter, kPoolLabel,
     "Admissions and forks refused because too few blocks were free or cached."},
    {kBlocks, "stoker_blocks", kGauge, "`pool`, `state` = free, referenced, cached",
     "Blocks that hold nothing (free), that a sequence holds (referenced), or that only the prefix index holds "
     "(cached)."},
    {kEvictedBlocks, "stoker_evicted_blocks_total", kCounter, kPoolLabel, "Cached blocks given up to make room."},
    {kEvictedWhileReferenced, "stoker_evicted_while_referenced_total", kCounter, kPoolLabel,
     "Blocks evicted while a sequence held them. Any is a defect of Stoker."},
    {kCopiedBlocks, "stoker_copied_blocks_total", kCounter, kPoolLabel,
     "Blocks copied because a sequence wrote to one that others share."},
    {kSequences, "stoker_sequences", kGauge, kPoolLabel, "Sequences, open or kept for their retention time."},
    {kPoolCapacityBytes, "stoker_pool_capacity_bytes", kGauge, kPoolLabel,
     "Memory that the pool holds for its whole life."},
    {kPoolPopulatedBytes, "stoker_pool_populated_bytes", kGauge, kPoolLabel,
     "Memory of the pool that was faulted in ahead of its use: grows to the capacity while the pool is made. 0 where "
     "pools are neither pinned nor populated."},
    {kPoolUsedBytes, "stoker_pool_used_bytes", kGauge, kPoolLabel,
     "Memory of the pool's referenced and cached blocks."},
    {kMaxPoolBytes, "stoker_max_pool_bytes", kGauge, "", "Limit of the memory of all pools (max_pool_bytes)."},
    {kSessions, "stoker_sessions", kGauge, "", "Attached sessions."},
    {kMaxSessions, "stoker_max_sessions", kGauge, "", "Limit of attached sessions (max_sessions)."},
    {kArmedSessions, "stoker_armed_sessions", kGauge, "", "Sessions on the server plane."},
    {kOrderedSessions, "stoker_ordered_sessions", kGauge, "",
     "Sessions whose calls may have an order (ordered_calls)."},
    {kMaxArmedSessions, "stoker_max_armed_sessions", kGauge, "",
     "Limit of sessions on the server plane and of sessions with ordered calls, together (max_armed_sessions)."},
    {kPlaneEnds, "stoker_plane_ends_total", kCounter, "`reason` = disarmed, timed_out, bad_step, device_failed",
     "Server planes of sessions that have ended: by Disarm, by another Arm or with the session (disarmed), because an "
     "engine did not ring a doorbell in time (timed_out) or wrote a number that cannot be (bad_step), or with the "
     "device."},
    {kHotBytes, "stoker_hot_bytes", kGauge, "", "Memory of all session arenas: hot buffers, mailboxes, staging areas."},
    {kMaxHotBytes, "stoker_max_hot_bytes", kGauge, "", "Limit of the memory of all session arenas (max_hot_bytes)."},
    {kClientMappedBytes, "stoker_client_mapped_bytes", kGauge, "`session`",
     "Memory of the session's arena, which its engine can map, and of its registered tensors, which the daemon has "
     "mapped. The series ends with the session."},
    {kQueuedOperations, "stoker_queued_operations", kGauge, "", "Operations of all sessions that wait or run."},
    {kRpcDuration, "stoker_rpc_duration_seconds", kHistogram, "`method` = SERVICE/CALL or other, `code` = gRPC's names",
     "Time from a call's arrival to its status. A stream counts from its start to its end."},
    {kStepDuration, "stoker_step_duration_seconds", kHistogram, "`plane` = rpc, server, direct",
     "Time that a step's work took on the device, all its groups."},
    {kGatherRate, "stoker_gather_bytes_per_second", kHistogram, "", "Rate of each gather that moved rows."},
    {kDraining, "stoker_draining", kGauge, "", "1 while the daemon refuses new sessions, otherwise 0."},
    {kBuildInfo, "stoker_build_info", kGauge, "`version`, `device`",
     "Always 1; the labels describe the daemon. Several devices have commas between them."},
    {kDeviceInfo, "stoker_device_info", kGauge, "`device`, `backend` = cpu, cuda",
     "Always 1; one series for each device that sessions can be on: cpu, or the UUID of a GPU."},
    {kMpsEnabled, "stoker_mps_enabled", kGauge, "",
     "1 where kernels of the daemon and of engines run side by side on every GPU (MPS), otherwise 0."},
    {kUptime, "stoker_uptime_seconds", kGauge, "", "Time since the daemon started."},
    {kProcessStartTime, "process_start_time_seconds", kGauge, "",
     "Start of the process, in seconds since the Unix epoch."},
    {kProcessResidentMemory, "process_resident_memory_bytes", kGauge, "", "Resident memory of the process."},
};
static_assert(std::size(kDescriptions) == kNames);
static_assert([] {
  for (size_t i = 0; i < kNames; ++i) {
    if (kDescriptions[i].key != i) return false;
  }
  return true;
}());

// A field of PoolMetrics, and the series that shows it beside the label `pool`.
struct PoolSeries {
  Name name;
  uint64_t PoolMetrics::*field;
  const char* label = nullptr;
  const char* value = nullptr;
};

constexpr PoolSeries kPoolSeries[] = {
    {kLookups, &PoolMetrics::lookups_hot, "outcome", "hot"},
    {kLookups, &PoolMetrics::lookups_newest, "outcome", "newest"},
    {kLookups, &PoolMetrics::lookups_resident, "outcome", "resident"},
    {kLookups, &PoolMetrics::lookups_miss, "outcome", "miss"},
    {kLookups, &PoolMetrics::lookups_duplicate, "outcome", "duplicate"},
    {kLookups, &PoolMetrics::lookups_invalid, "outcome", "invalid"},
    {kEvictions, &PoolMetrics::evicted_rows},
    {kLruRepairs, &PoolMetrics::lru_repairs},
    {kGatheredBytes, &PoolMetrics::gathered_bytes},
    {kCommittedBytes, &PoolMetrics::committed_bytes},
    {kStoredBytes, &PoolMetrics::stored_bytes},
    {kLoadedBytes, &PoolMetrics::loaded_bytes},
    {kPrefixTokens, &PoolMetrics::prefix_hit_tokens, "outcome", "hit"},
    {kPrefixTokens, &PoolMetrics::prefix_miss_tokens, "outcome", "miss"},
    {kAdmissionsRejected, &PoolMetrics::rejected_admissions},
    {kBlocks, &PoolMetrics::free_blocks, "state", "free"},
    {kBlocks, &PoolMetrics::referenced_blocks, "state", "referenced"},
    {kBlocks, &PoolMetrics::cached_blocks, "state", "cached"},
    {kEvictedBlocks, &PoolMetrics::evicted_blocks},
    {kEvictedWhileReferenced, &PoolMetrics::evicted_while_referenced_blocks},
    {kCopiedBlocks, &PoolMetrics::copied_blocks},
    {kSequences, &PoolMetrics::sequences},
    {kPoolCapacityBytes, &PoolMetrics::capacity_bytes},
    {kPoolPopulatedBytes, &PoolMetrics::populated_bytes},
    {kPoolUsedBytes, &PoolMetrics::used_bytes},
};

constexpr const char* kPlanes[] = {"rpc", "server", "direct"};
// As PlaneEndReason.
constexpr const char* kPlaneEndReasons[] = {"disarmed", "timed_out", "bad_step", "device_failed"};
constexpr const char* kCodes[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr int kUnknownCode = 2;
constexpr int kCodeCount = std::size(kCodes);
static_assert(kCodeCount == 17);

// A round trip over a Unix socket takes 50 us, a store of gigabytes seconds.
constexpr double kRpcBounds[] = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3,
                                 50e-3, 0.1,    0.2,    0.5,    1,    2,    5,    10};
constexpr double kStepBounds[] = {10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3,
                                  5e-3,  10e-3, 20e-3, 50e-3,  0.1,    0.2,    0.5,  1};
// From one small row a call to the memory bandwidth of a large host.
constexpr double kRateBounds[] = {1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11};

// Counts observations without a lock.
class Histogram {
 public:
  explicit Histogram(absl::Span<const double> bounds)
      : bounds_(bounds), counts_(std::make_unique<std::atomic<uint64_t>[]>(bounds.size() + 1)) {}

  void Observe(double value) {
    if (std::isnan(value)) return;
    value = std::max(value, 0.0);
    const size_t bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }

  ClientMetric::Histogram Collect() const {
    ClientMetric::Histogram result;
    result.bucket.resize(bounds_.size() + 1);
    for (size_t i = 0; i <= bounds_.size(); ++i) {
      result.sample_count += counts_[i].load(std::memory_order_relaxed);
      result.bucket[i].cumulative_count = result.sample_count;
      result.bucket[i].upper_bound = i < bounds_.size() ? bounds_[i] : std::numeric_limits<double>::infinity();
    }
    result.sample_sum = sum_.load(std::memory_order_relaxed);
    return result;
  }

 private:
  const absl::Span<const double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0};
};

// A histogram that exists from its first use on: of 29 methods x 17 codes most never occur, and each costs 20 lines a
// scrape.
class LazyHistogram {
 public:
  LazyHistogram() = default;
  ~LazyHistogram() { delete histogram_.load(); }
  LazyHistogram(const LazyHistogram&) = delete;
  LazyHistogram& operator=(const LazyHistogram&) = delete;

  Histogram& Get(absl::Span<const double> bounds) {
    Histogram* histogram = histogram_.load(std::memory_order_acquire);
    if (histogram != nullptr) return *histogram;
    auto fresh = std::make_unique<Histogram>(bounds);
    if (histogram_.compare_exchange_strong(histogram, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
    return *histogram;
  }
  const Histogram* Find() const { return histogram_.load(std::memory_order_acquire); }

 private:
  std::atomic<Histogram*> histogram_{nullptr};
};

// "Residency/Step" and so on, of all services of stoker.v1, and "other" as the last one.
std::vector<std::string> MethodNames() {
  std::vector<std::string> names;
  // To name a message of each file also keeps the linker from leaving the file out.
  for (const google::protobuf::Descriptor* message :
       {v1::CreatePoolRequest::descriptor(), v1::AttachRequest::descriptor(), v1::AdmitRequest::descriptor(),
        v1::StepRequest::descriptor(), v1::GetStatusRequest::descriptor()}) {
    const google::protobuf::FileDescriptor* file = message->file();
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        names.push_back(absl::StrCat(file->service(i)->name(), "/", file->service(i)->method(j)->name()));
      }
    }
  }
  names.push_back("other");
  return names;
}

double ResidentMemoryBytes() {
  std::ifstream file("/proc/self/statm");
  double total_pages = 0, resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// The kernel tells the start in ticks since the boot, and the boot in seconds since the epoch.
double ProcessStartSeconds() {
  std::ifstream stat_file("/proc/self/stat");
  const std::string stat((std::istreambuf_iterator<char>(stat_file)), std::istreambuf_iterator<char>());
  // Fields 3 and up follow the program's name, which may hold anything, and its closing parenthesis.
  constexpr size_t kStartField = 22 - 3;
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
  double ticks = 0, boot = 0;
  if (fields.size() <= kStartField || !absl::SimpleAtod(fields[kStartField], &ticks)) return 0;
  std::ifstream boot_file("/proc/stat");
  for (std::string line; std::getline(boot_file, line);) {
    absl::string_view rest = line;
    if (absl::ConsumePrefix(&rest, "btime ") && absl::SimpleAtod(rest, &boot)) break;
  }
  return boot + ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

const char* TypeName(MetricType type) { return type == kCounter ? "counter" : type == kGauge ? "gauge" : "histogram"; }

}  // namespace

class Metrics::Families final : public prometheus::Collectable {
 public:
  explicit Families(SnapshotFunction snapshot)
      : snapshot_(std::move(snapshot)), methods_(MethodNames()), rpcs_(methods_.size() * kCodeCount) {
    for (size_t i = 0; i < methods_.size(); ++i) {
      method_indices_[methods_[i]] = i;
      method_indices_[absl::StrCat("/stoker.v1.", methods_[i])] = i;
      // Successful calls are shown from the start, so that a rate over the first ones is right.
      rpcs_[i * kCodeCount].Get(kRpcBounds);
    }
    steps_[static_cast<size_t>(StepPlane::kRpc)].Get(kStepBounds);
  }

  void ObserveRpc(absl::string_view method, int code, double seconds) {
    const auto it = method_indices_.find(method);
    const size_t index = it == method_indices_.end() ? methods_.size() - 1 : it->second;
    if (code < 0 || code >= kCodeCount) code = kUnknownCode;
    rpcs_[index * kCodeCount + code].Get(kRpcBounds).Observe(seconds);
  }
  void ObserveStep(StepPlane plane, double seconds) {
    steps_[static_cast<size_t>(plane)].Get(kStepBounds).Observe(seconds);
  }
  void ObservePlaneEnd(PlaneEndReason reason) {
    plane_ends_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
  void ObserveGatherRate(double bytes_per_second) { gather_rate_.Observe(bytes_per_second); }

  std::vector<MetricFamily> Collect() const override {
    const MetricsSnapshot snapshot = snapshot_();
    std::vector<MetricFamily> families(kNames);
    for (size_t i = 0; i < kNames; ++i) {
      families[i].name = kDescriptions[i].name;
      families[i].help = kDescriptions[i].help;
      families[i].type = kDescriptions[i].type;
    }
    AddPools(snapshot.pools, &families);
    AddSessions(snapshot, &families);
    AddHistograms(&families);
    Add(kMaxPoolBytes, {}, snapshot.max_pool_bytes, &families);
    Add(kMaxSessions, {}, snapshot.max_sessions, &families);
    Add(kArmedSessions, {}, snapshot.armed_sessions, &families);
    Add(kOrderedSessions, {}, snapshot.ordered_sessions, &families);
    Add(kMaxArmedSessions, {}, snapshot.max_armed_sessions, &families);
    for (size_t i = 0; i < std::size(kPlaneEndReasons); ++i) {
      Add(kPlaneEnds, {{"reason", kPlaneEndReasons[i]}}, plane_ends_[i].load(std::memory_order_relaxed), &families);
    }
    Add(kHotBytes, {}, snapshot.hot_bytes, &families);
    Add(kMaxHotBytes, {}, snapshot.max_hot_bytes, &families);
    Add(kDraining, {}, snapshot.draining ? 1 : 0, &families);
    Add(kBuildInfo, {{"version", snapshot.version}, {"device", absl::StrJoin(snapshot.devices, ",")}}, 1, &families);
    for (const std::string& device : snapshot.devices) {
      Add(kDeviceInfo, {{"device", device}, {"backend", device == "cpu" ? "cpu" : "cuda"}}, 1, &families);
    }
    Add(kMpsEnabled, {}, snapshot.mps_enabled ? 1 : 0, &families);
    Add(kUptime, {}, snapshot.uptime_seconds, &families);
    Add(kProcessStartTime, {}, start_seconds_, &families);
    Add(kProcessResidentMemory, {}, ResidentMemoryBytes(), &families);
    return families;
  }

 private:
  using Labels = std::vector<ClientMetric::Label>;

  static void Add(Name name, Labels labels, double value, std::vector<MetricFamily>* families) {
    ClientMetric& metric = (*families)[name].metric.emplace_back();
    metric.label = std::move(labels);
    if (kDescriptions[name].type == kCounter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
  }

  static void AddPools(const std::vector<PoolMetrics>& pools, std::vector<MetricFamily>* families) {
    for (const PoolSeries& series : kPoolSeries) {
      std::map<std::string, uint64_t> values;
      for (const PoolMetrics& pool : pools) values[pool.pool] += pool.*series.field;
      for (const auto& [pool, value] : values) {
        Labels labels = {{"pool", pool}};
        if (series.label != nullptr) labels.push_back({series.label, series.value});
        Add(series.name, std::move(labels), value, families);
      }
    }
  }

  static void AddSessions(const MetricsSnapshot& snapshot, std::vector<MetricFamily>* families) {
    std::map<std::string, uint64_t> mapped_bytes;
    uint64_t queued_operations = 0;
    for (const SessionMetrics& session : snapshot.sessions) {
      mapped_bytes[session.session] += session.mapped_bytes;
      queued_operations += session.queued_operations;
    }
    for (const auto& [session, bytes] : mapped_bytes) Add(kClientMappedBytes, {{"session", session}}, bytes, families);
    Add(kQueuedOperations, {}, queued_operations, families);
    Add(kSessions, {}, snapshot.sessions.size(), families);
  }

  void AddHistograms(std::vector<MetricFamily>* families) const {
    const auto add = [&](Name name, Labels labels, const Histogram* histogram) {
      if (histogram == nullptr) return;
      ClientMetric& metric = (*families)[name].metric.emplace_back();
      metric.label = std::move(labels);
      metric.histogram = histogram->Collect();
    };
    for (size_t i = 0; i < rpcs_.size(); ++i) {
      add(kRpcDuration, {{"method", methods_[i / kCodeCount]}, {"code", kCodes[i % kCodeCount]}}, rpcs_[i].Find());
    }
    for (size_t i = 0; i < std::size(kPlanes); ++i) add(kStepDuration, {{"plane", kPlanes[i]}}, steps_[i].Find());
    add(kGatherRate, {}, &gather_rate_);
  }

  const SnapshotFunction snapshot_;
  const double start_seconds_ = ProcessStartSeconds();
  const std::vector<std::string> methods_;
  absl::flat_hash_map<std::string, size_t> method_indices_;
  std::vector<LazyHistogram> rpcs_;  // [method][code]
  std::array<LazyHistogram, std::size(kPlanes)> steps_;
  std::array<std::atomic<uint64_t>, std::size(kPlaneEndReasons)> plane_ends_ = {};
  Histogram gather_rate_{kRateBounds};
};

namespace {

// While an exposer is being made: where the reasons go that civetweb tells its log only. It binds on the calling
// thread.
thread_local std::string* start_errors = nullptr;

int OnCivetMessage(const mg_connection*, const char* message) {
  if (start_errors != nullptr) {
    absl::StrAppend(start_errors, start_errors->empty() ? "" : "; ", message);
  } else {
    Log::Debug("metrics server", {{"detail", message}});
  }
  return 1;
}

// civetweb reads lists, and letters behind a port, which mean other things than an address.
bool IsHostAndPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 || absl::StrContains(address, ',')) return false;
  const absl::string_view port = address.substr(colon + 1);
  int number = 0;
  return std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; }) &&
         absl::SimpleAtoi(port, &number) && number <= 65535;
}

// Connects, without waiting for the result, and hangs up.
void Knock(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) return;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    const int knocker = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (knocker < 0) continue;
    (void)!connect(knocker, address->ai_addr, address->ai_addrlen);
    close(knocker);
  }
  freeaddrinfo(found);
}

}  // namespace

struct Metrics::Exposition {
  std::unique_ptr<prometheus::Exposer> exposer;
  std::string host;
  int port = 0;
};

Metrics::Metrics(SnapshotFunction snapshot)
    : families_(std::make_shared<Families>(std::move(snapshot))), exposition_(std::make_unique<Exposition>()) {}

Metrics::~Metrics() { Stop(); }

absl::Status Metrics::Serve(const std::string& address) {
  if (!IsHostAndPort(address)) {
    return absl::InvalidArgumentError(absl::StrCat("metrics_address \"", address, "\" is not HOST:PORT"));
  }
  CivetCallbacks callbacks = {};
  callbacks.log_message = &OnCivetMessage;
  // Four threads, so that a few slow readers do not keep Prometheus out; each is dropped after 5 s without progress.
  const std::vector<std::string> options = {"listening_ports",    address, "num_threads", "4",
                                            "request_timeout_ms", "5000"};
  std::string reason;
  start_errors = &reason;
  // The only exception of this file: it is how the library says that it cannot listen.
  try {
    exposition_->exposer = std::make_unique<prometheus::Exposer>(options, &callbacks);
  } catch (const std::exception& error) {
    if (reason.empty()) reason = error.what();
  }
  start_errors = nullptr;
  if (exposition_->exposer == nullptr) {
    return absl::UnavailableError(absl::StrCat("metrics_address \"", address, "\": cannot listen: ", reason));
  }
  exposition_->exposer->RegisterCollectable(families_);
  const absl::string_view host = absl::string_view(address).substr(0, address.rfind(':'));
  exposition_->host = std::string(absl::StripPrefix(absl::StripSuffix(host, "]"), "["));
  const std::vector<int> ports = exposition_->exposer->GetListeningPorts();
  exposition_->port = ports.empty() ? 0 : ports.front();
  return absl::OkStatus();
}

int Metrics::port() const { return exposition_->port; }

void Metrics::Stop() {
  if (exposition_->exposer == nullptr) return;
  // civetweb looks up from its sockets every 2 s only, or when somebody connects: too long for a daemon that restarts.
  absl::Notification stopped;
  std::thread knocker([&] {
    do {
      Knock(exposition_->host, exposition_->port);
    } while (!stopped.WaitForNotificationWithTimeout(absl::Milliseconds(10)));
  });
  exposition_->exposer.reset();
  stopped.Notify();
  knocker.join();
}

void Metrics::ObserveRpc(std::string_view method, int code, double seconds) {
  families_->ObserveRpc(absl::string_view(method.data(), method.size()), code, seconds);
}
void Metrics::ObservePlaneEnd(PlaneEndReason reason) { families_->ObservePlaneEnd(reason); }
void Metrics::ObserveStep(StepPlane plane, double seconds) { families_->ObserveStep(plane, seconds); }
void Metrics::ObserveGatherRate(double bytes_per_second) { families_->ObserveGatherRate(bytes_per_second); }

std::string Metrics::Render() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families_->Collect());
  return out.str();
}

std::string Metrics::DocumentationTable() {
  std::string table = "| metric | type | labels | meaning |\n|---|---|---|---|\n";
  for (const Description& description : kDescriptions) {
    absl::StrAppend(&table, "| `", description.name, "` | ", TypeName(description.type), " | ", description.labels,
                    " | ", description.help, " |\n");
  }
  return table;
}

}  // namespace stoker::server
