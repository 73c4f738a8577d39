// Workload files (STKW: the entries of every step) and slot dumps (STKG: where a resolve put them), little-endian.
//
//   STKW: magic, uint32 version (1), steps, rows, top_k, context, hot_rows, row_bytes, reserved (0);
//         int32 positions[steps][rows][top_k], distinct in a row and in [0, context - 1).
//   STKG: magic, uint32 version (1), steps, rows, top_k, hot_rows; int16 slots[steps][rows][top_k];
//         int32 misses[steps][rows].
//
// Thread safety: values and free functions.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace stoker::replay {

static_assert(std::endian::native == std::endian::little, "the files are read and written as they lie in memory");

struct Workload {
  // Entries of one sequence's step.
  absl::Span<const int32_t> Entries(uint32_t step, uint32_t row) const {
    return absl::MakeConstSpan(positions).subspan((size_t{step} * rows + row) * top_k, top_k);
  }

  uint32_t steps = 0;      // 1 to 1,000,000
  uint32_t rows = 0;       // sequences, 1 to 4096
  uint32_t top_k = 0;      // 1 to 8192
  uint32_t context = 0;    // rows of a sequence, newest included; top_k + 1 to 2^24
  uint32_t hot_rows = 0;   // top_k to 32768
  uint32_t row_bytes = 0;  // 4 to 65536, a multiple of 4
  std::vector<int32_t> positions;
};

struct SlotDump {
  uint32_t steps = 0, rows = 0, top_k = 0, hot_rows = 0;
  std::vector<int16_t> slots = {};   // [steps][rows][top_k]
  std::vector<int32_t> misses = {};  // [steps][rows]
};

// Checks all but the positions. INVALID_ARGUMENT names the field, its value and its limit; steps x rows x top_k is at
// most 2^28.
absl::Status ValidateWorkloadHeader(const Workload& workload);
// Checks the positions as well. INVALID_ARGUMENT names the first entry that is out of range or a repeat.
absl::Status ValidateWorkload(const Workload& workload);

// NOT_FOUND: the file cannot be opened; INVALID_ARGUMENT: it is no such file, has another size than its header says, or
// ValidateWorkload refuses it.
absl::StatusOr<Workload> ReadWorkload(const std::string& path);
absl::StatusOr<SlotDump> ReadSlotDump(const std::string& path);
// UNAVAILABLE: the file cannot be written.
absl::Status WriteWorkload(const Workload& workload, const std::string& path);
absl::Status WriteSlotDump(const SlotDump& dump, const std::string& path);

}  // namespace stoker::replay
