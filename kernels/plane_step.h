// The steps of a plane (plane.h) over one session's memory: the daemon enqueues them on the server plane, the client
// library on the direct plane.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/plane.h"
#include "kernels/row_layout.h"

namespace stoker::kernels {

// Counters of a plane, u64 each, in device memory; they only rise, but for the two times.
enum PlaneCounter : int32_t {
  // 0 to kStats - 1: as ResolveArgs::stats.
  kPlaneGatheredBytes = kStats,
  kPlaneCommittedRows,
  kPlaneBeginNs,  // Timestamp of the last step's begin, behind its first doorbell
  kPlaneEndNs,    //   and of its end
  kPlaneCounters = 16
};
static_assert(kPlaneEndNs < kPlaneCounters);

// What the end of a step leaves in host memory.
struct PlaneResult {
  PlaneState state;
  uint64_t counters[kPlaneCounters];
};

struct PlaneGroup {
  std::vector<int32_t> layers;
  const int32_t* indices = nullptr;  // [max_rows][mailbox_stride]: entries
  int32_t* hot_rows = nullptr;       // likewise, out
  int32_t* misses = nullptr;         // [max_rows], out
  Residency residency;
  int32_t* miss_pool_rows = nullptr;  // [max_rows][mailbox_stride]: the plan
  int32_t* miss_hot_rows = nullptr;
  int32_t* miss_counts = nullptr;  // [max_rows]
};

// One session's memory, and what its steps have in common.
struct PlaneMemory {
  BatchArgs batch;
  IndexSpace index_space = IndexSpace::kPosition;
  const uint64_t* allowed_blocks = nullptr;  // kPoolRow: as ResolveArgs
  int64_t allowed_stride = 0;
  int64_t mailbox_stride = 0;  // entries of a row of the mailbox: the session's max_top_k
  std::vector<PlaneGroup> groups;
  std::vector<int32_t> layers;  // all of the pool
  RowStore pool;
  RowStore hot;
  uint64_t* counters = nullptr;  // [kPlaneCounters]
  CopyLimits limits;             // of each launch that gathers or commits
};

// Enqueues the parts of a step. In order: Begin, then Group for each group, then Commit, then Report.
class PlaneStep {
 public:
  explicit PlaneStep(PlaneMemory memory) : memory_(std::move(memory)) {}

  const PlaneMemory& memory() const { return memory_; }
  absl::Status Begin(Stream& stream) const;
  // `group` below the number of groups. With `ring` its doorbell is rung at the end.
  absl::Status Group(Stream& stream, int32_t group, const RingDoorbellArgs* ring = nullptr) const;
  absl::Status Commit(Stream& stream) const;
  // Copies state and counters to host memory.
  absl::Status Report(Stream& stream, PlaneResult* result) const;

 private:
  const PlaneMemory memory_;
};

}  // namespace stoker::kernels
