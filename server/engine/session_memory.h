// What a session has in memory and where: the arena, which the client may map, and private state, which it cannot
// reach.
//
// The arena holds what the engine reads and writes: hot caches, mailbox, staging area. Everything that the daemon
// follows (block tables, residency, plans) is private, so that a client can spoil its own rows but never reach
// another's. A session on the direct plane has no private state: its engine, which has the whole pool mapped, is
// trusted.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/row_layout.h"
#include "server/core/engine.h"

namespace stoker::engine {

// Rows that one chunk of a bulk transfer names.
inline constexpr int64_t kChunkRows = 16384;

// Offsets of the parts of a session's memory, in bytes.
struct SessionMemory {
  static absl::StatusOr<SessionMemory> Make(const core::PoolSpec& pool, const core::SessionSpec& session);

  struct Group {
    int64_t indices = 0;   // arena, i32 [max_batch_rows][max_top_k]
    int64_t hot_rows = 0;  // arena, i32 [max_batch_rows][max_top_k]
    int64_t misses = 0;    // arena, i32 [max_batch_rows]
    int64_t slot_key = 0;  // private, as kernels::Residency
    int64_t lru = 0;
    int64_t miss_pool_rows = 0;  // private, i32 [max_batch_rows][max_top_k]
    int64_t miss_hot_rows = 0;
    int64_t miss_counts = 0;  // private, i32 [max_batch_rows]
    int64_t counts = 0;       // private, i32 [max_batch_rows][kOutcomeCount]
  };

  kernels::RowLayout hot_layout;
  int64_t hot_layer_stride = 0;
  int64_t hot_total_rows = 0;
  int64_t table_columns = 0;   // blocks of the longest sequence
  int64_t allowed_words = 0;   // POOL_ROW: words of a state row's block bitmap
  int64_t hot = 0;             // arena
  int64_t staging = 0;         // arena
  int64_t block_table = 0;     // private, i32 [state_rows][table_columns]
  int64_t resident_table = 0;  // private, i32 [state_rows][table_columns]
  int64_t allowed_blocks = 0;  // private, u64 [state_rows][allowed_words]
  int64_t step_arguments = 0;  // private, i32 [kStepArguments][rows of the step]
  int64_t source_rows = 0;     // private, i32 [kChunkRows]
  int64_t target_rows = 0;     // private, i32 [kChunkRows]
  int64_t keys = 0;            // private, i64 [kChunkRows]
  int64_t counters = 0;        // private, u64 [kCounters]
  int64_t newest = 0;          // private, u8 [max_batch_rows][layers][row bytes]
  // The server plane (kernels/plane.h).
  int64_t requests = 0;        // arena, u64 [groups + 1], kDoorbellBytes apart
  int64_t dones = 0;           // arena, likewise
  int64_t ended = 0;           // arena, u32
  int64_t batch_rows = 0;      // arena, i32, as the next five [max_batch_rows]
  int64_t sequence_ids = 0;    // arena, u64
  int64_t state_rows = 0;      // arena
  int64_t lengths = 0;         // arena
  int64_t commits = 0;         // arena
  int64_t statuses = 0;        // arena
  int64_t entries = 0;         // private, kernels::StateRowEntry [state_rows]
  int64_t plane_state = 0;     // private, kernels::PlaneState
  int64_t plane_counters = 0;  // private, u64 [kernels::kPlaneCounters]
  int64_t batch_plan = 0;      // private, i32 [kPlanArrays][max_batch_rows]
  int64_t plan_rows = 0;       // private, i32
  int64_t claims = 0;          // private, i32 [state_rows]
  // Calls with an order (kernels/order_word.h), a cache line each.
  int64_t engine_word = 0;  // arena, u64
  int64_t daemon_word = 0;  // arena, u64
  int64_t aborted = 0;      // private, u32
  std::vector<Group> groups;
  // Of a session on the direct plane all is in the arena, and what is private elsewhere begins at state_offset.
  int64_t state_offset = 0;
  int64_t arena_bytes = 0;
  int64_t private_bytes = 0;
  core::ArenaLayout arena;
};

// Arrays of step_arguments.
enum StepArgument : int64_t {
  kStateRows,
  kLengths,
  kNewestPoolRows,
  kCommitHotRows,
  kCommitPoolRows,
  kNewestSource,
  kNewestHotRows,
  kStepArguments
};

// Arrays of batch_plan.
enum PlanArray : int64_t {
  kPlanStateRows,
  kPlanLengths,
  kPlanNewestPoolRows,
  kPlanNewestHotRows,
  kPlanWords,
  kPlanCommitHotRows,
  kPlanCommitPoolRows,
  kPlanArrays
};

// Between two doorbells: a cache line of the GPU's, so that polling one does not fetch the other.
inline constexpr int64_t kDoorbellBytes = 128;

// Counters behind the statistics of resolve.
inline constexpr int64_t kGatheredBytes = 8;
inline constexpr int64_t kBeginNs = 9;
inline constexpr int64_t kEndNs = 10;
inline constexpr int64_t kCounters = 16;

}  // namespace stoker::engine
