// The daemon's metrics: the only code that knows their names. deploy/metrics.md lists them.
//
// Gauges and counters are pulled: a scrape calls the daemon's snapshot function once. Histograms are pushed by the RPC
// layer and the engine into atomics, without locks.
//
// Thread safety: any thread. The snapshot function runs on the exposer's threads, possibly in several at a time.
//
// Invariants:
//  1. Each scrape shows each series once: entries of a snapshot that have equal labels are added up.
//  2. Labels are closed sets, but for pool, session and device, which live as long as what they name. Totals have no
//  session label,
//     so none falls when a session ends.
//  3. A histogram's count is the sum of its buckets, in every scrape.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace stoker::server {

// One pool, at the moment of a scrape. Totals count from the pool's creation and must include sessions that have ended.
struct PoolMetrics {
  std::string pool;
  uint64_t capacity_bytes = 0;
  uint64_t populated_bytes = 0;
  uint64_t used_bytes = 0;  // of referenced and cached blocks
  uint64_t free_blocks = 0;
  uint64_t referenced_blocks = 0;
  uint64_t cached_blocks = 0;
  uint64_t sequences = 0;

  uint64_t lookups_hot = 0;
  uint64_t lookups_newest = 0;
  uint64_t lookups_resident = 0;
  uint64_t lookups_miss = 0;
  uint64_t lookups_duplicate = 0;
  uint64_t lookups_invalid = 0;
  uint64_t evicted_rows = 0;
  uint64_t lru_repairs = 0;
  uint64_t gathered_bytes = 0;
  uint64_t committed_bytes = 0;
  uint64_t stored_bytes = 0;
  uint64_t loaded_bytes = 0;
  uint64_t prefix_hit_tokens = 0;
  uint64_t prefix_miss_tokens = 0;
  uint64_t evicted_blocks = 0;
  uint64_t evicted_while_referenced_blocks = 0;
  uint64_t copied_blocks = 0;
  uint64_t rejected_admissions = 0;
};

// One attached session.
struct SessionMetrics {
  std::string session;  // its name, or its id where it has none
  uint64_t mapped_bytes = 0;
  uint64_t queued_operations = 0;
};

struct MetricsSnapshot {
  std::string version;
  std::vector<std::string> devices;  // "cpu", or UUIDs of GPUs
  bool mps_enabled = false;
  double uptime_seconds = 0;
  bool draining = false;
  uint64_t max_sessions = 0;
  uint64_t armed_sessions = 0;
  uint64_t ordered_sessions = 0;
  uint64_t max_armed_sessions = 0;
  uint64_t hot_bytes = 0;
  uint64_t max_hot_bytes = 0;
  uint64_t max_pool_bytes = 0;
  std::vector<PoolMetrics> pools;
  std::vector<SessionMetrics> sessions;
};

// The data plane on which a step ran.
enum class StepPlane : uint8_t { kRpc = 0, kServer = 1, kDirect = 2 };

// How a session has left the server plane.
enum class PlaneEndReason : uint8_t { kDisarmed = 0, kTimedOut = 1, kBadStep = 2, kDeviceFailed = 3 };

// Holds the histograms and serves /metrics.
class Metrics {
 public:
  using SnapshotFunction = std::function<MetricsSnapshot()>;

  // `snapshot` must be callable until Stop returns, and must not wait for data-path work.
  explicit Metrics(SnapshotFunction snapshot);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Starts to answer scrapes at "HOST:PORT"; port 0 takes any free one. UNAVAILABLE: cannot listen there; the message
  // names the address and the reason. INVALID_ARGUMENT: not an address. At most once.
  absl::Status Serve(const std::string& address);
  // The port served on; 0 before Serve.
  int port() const;
  // Ends serving; a scrape in progress is waited for. Observe calls stay allowed.
  void Stop();

  // One finished RPC. `method` as in "Residency/Step" or "/stoker.v1.Residency/Step"; those that are not of stoker.v1
  // are counted as "other". `code` is a gRPC code (equal to absl::StatusCode); a value beyond the known ones counts as
  // UNKNOWN.
  void ObserveRpc(std::string_view method, int code, double seconds);
  // One step's work, all its groups, from its start on the device to its end.
  void ObserveStep(StepPlane plane, double seconds);
  void ObservePlaneEnd(PlaneEndReason reason);
  // The rate of one gather that moved rows.
  void ObserveGatherRate(double bytes_per_second);

  // What a scrape gives now, in Prometheus' text format, without the exposer's own metrics.
  std::string Render() const;

  // The metrics as a Markdown table, one a row; deploy/metrics.md holds it.
  static std::string DocumentationTable();

 private:
  class Families;

  std::shared_ptr<Families> families_;
  struct Exposition;
  std::unique_ptr<Exposition> exposition_;
};

}  // namespace stoker::server
