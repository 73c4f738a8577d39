// Resolve: classifies the entries of one index group, picks victims for the misses, keeps the LRU order, and publishes
// the plan. The contract is section "Residency" of kernels/README.md; seed kernels: SGLang load_cache_to_device_buffer,
// vLLM hisparse_resolve_residency.
//
// All pointers are device memory of the backend that runs the operation. Strides count elements. A null pointer means
// that the optional input or output is absent. Batch rows of one state row must be adjacent; they are resolved as one
// union, and their lengths must not fall (the shortest comes first).
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace stoker::kernels {

inline constexpr int32_t kMaxTopK = 8192;
inline constexpr int32_t kMaxHotRows = 32768;
inline constexpr int32_t kMaxBatchRows = 4096;
inline constexpr int32_t kMaxLayers = 1024;
inline constexpr int32_t kMaxBlockRows = 65536;

enum class IndexSpace : uint8_t {
  kPosition = 1,  // entries are token positions of the sequence
  kPoolRow = 2,   // entries are rows of the pool
};

// How an entry ended. Values are indices into LookupCounts and into ResolveArgs::stats.
enum Outcome : int32_t { kHot = 0, kNewest = 1, kResident = 2, kMiss = 3, kDuplicate = 4, kInvalid = 5 };
inline constexpr int32_t kOutcomes = 6;

// stats[kOutcomes] counts victims that held a row; stats[kOutcomes + 1] counts corrupt LRU entries that were repaired.
inline constexpr int32_t kEvictions = kOutcomes;
inline constexpr int32_t kLruRepairs = kOutcomes + 1;
inline constexpr int32_t kStats = kOutcomes + 2;

// Residency of all state rows of one group. Key p is in slot s if and only if slot_key[s] == p; a key that a corrupt
// slot_key has in several slots is in the lowest. The memory may be writable by a client: every value read from it is
// checked before it is followed.
struct Residency {
  int32_t* slot_key = nullptr;  // [state_rows][hot_rows]: position or pool row in each slot, -1 for none
  int16_t* lru = nullptr;       // [state_rows][hot_rows]: slots, least recent first
  int32_t state_rows = 0;
  int32_t hot_rows = 0;
};

// Lengths, request ids and the like come as int32 or int64.
struct IntArray {
  const void* data = nullptr;
  bool is_int64 = false;
};

struct ResolveArgs {
  IndexSpace index_space = IndexSpace::kPosition;
  Residency residency;

  // The batch.
  int32_t rows = 0;                    // batch rows, 0 to kMaxBatchRows
  const int32_t* real_rows = nullptr;  // optional [1]: rows at or above it are padding; clamped to [0, rows]
  int32_t top_k = 0;                   // entries of a row, 1 to kMaxTopK
  const int32_t* entries = nullptr;    // [rows][top_k]
  int64_t entry_stride = 0;
  IntArray lengths;                         // [rows], taken as 0 below 0 and as 2^31 - 1 above it; unused for kPoolRow
  IntArray state_rows;                      // [rows]: state row or, with request_states, request id; -1 is padding
  const int32_t* request_states = nullptr;  // optional [request_count]: state row of each request id
  int32_t request_count = 0;

  // Block table of each request (with request_states) or state row: position / block_rows -> pool block, negative for
  // none. Needed for kPosition.
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  int32_t block_table_rows = 0;     // requests covered
  int32_t block_table_columns = 0;  // blocks covered
  int32_t block_rows = 64;
  int32_t null_block = -1;  // this block id also means none (vLLM: 0)
  int64_t pool_rows = 0;    // pool rows at or above it do not exist

  // kPoolRow only: pool row of each batch row's newest token, -1 for none; and optionally the blocks that a state row
  // may name, one bit a block, [state_rows][allowed_stride] words.
  const int32_t* newest_pool_rows = nullptr;  // optional [rows]
  const uint64_t* allowed_blocks = nullptr;
  int64_t allowed_stride = 0;

  // kPosition only: pages of the engine's own cache, by request or state row as block_table; negative or
  // resident_null_block for none.
  const int32_t* resident_table = nullptr;
  int64_t resident_stride = 0;
  int32_t resident_rows = 0;
  int32_t resident_columns = 0;
  int32_t resident_null_block = -1;

  // Physical hot rows. Without hot_block_table, slot s of state row r is hot row r * region_rows + s, and the newest
  // row i is r * region_rows + newest_row + i. With it (an engine that pages its hot cache itself), logical row x of
  // request or state row r is hot_block_table[r][x / hot_block_rows] * hot_block_rows + x % hot_block_rows. It has a
  // row for every request or state row, and hot_block_stride columns, which cover newest_row.
  int32_t region_rows = 0;
  int32_t newest_row = 0;  // logical row of the first newest token; at least hot_rows
  const int32_t* hot_block_table = nullptr;
  int64_t hot_block_stride = 0;
  int32_t hot_block_rows = 64;

  // Outputs.
  int32_t* hot_rows_out = nullptr;  // [rows][top_k]: hot row of each entry, -1 for none
  int64_t hot_rows_out_stride = 0;
  int32_t* attention_indices = nullptr;  // optional [rows][top_k]: (hot row / hot_block_rows) * attention_block_stride
  int64_t attention_stride = 0;          //   + hot row % hot_block_rows, or -1 (none, or too large)
  int64_t attention_block_stride = 0;
  // Optional [rows][top_k], contiguous: pool row of each entry that is not invalid, -1 for none.
  int32_t* resolved_pool_rows = nullptr;
  int32_t* valid_counts = nullptr;  // optional [rows * valid_count_stride]: entries with an output that is not -1
  int64_t valid_count_stride = 1;
  int32_t* miss_mask = nullptr;  // optional [rows][top_k], contiguous: 1 where a row must be gathered, 0 elsewhere
  // Compact list, all three together or none: [rows][top_k], contiguous, the misses of each batch row in entry order.
  // Nothing is written behind the misses.
  int32_t* miss_pool_rows = nullptr;
  int32_t* miss_hot_rows = nullptr;
  int32_t* miss_counts = nullptr;  // [rows]
  // Optional [rows]: the same counts once more. The list and its counts are followed by the gather; these may lie where
  // others write.
  int32_t* told_miss_counts = nullptr;
  int32_t* counts = nullptr;  // optional [rows][kOutcomes]
  uint64_t* stats = nullptr;  // optional [kStats]: added to, atomically
};

// Checks everything that can be checked on the host: shapes, limits and required pointers. INVALID_ARGUMENT names the
// field, its value and its limit. Every backend calls it before it enqueues a resolve.
absl::Status Validate(const ResolveArgs& args);

}  // namespace stoker::kernels
