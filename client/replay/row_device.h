// An engine's own work on a mapped arena, done where the arena is: prompts' rows in the staging area, newest rows and
// entries before a step, the comparison of every row afterwards. host_rows.h does it in host memory, cuda/gpu_rows.h on
// a GPU, with kernels.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "client/replay/row_oracle.h"
#include "client/replay/trace.h"

namespace stoker::replay {

// A sequence that a session has open.
struct OpenSequence {
  const Request* request = nullptr;
  uint64_t id = 0;
  uint32_t state_row = 0;
  uint32_t matched_rows = 0;
  bool writer = true;
};

// One row of a step's batch. Rows of one sequence are side by side, each one token longer than the one before.
struct BatchRow {
  const OpenSequence* sequence = nullptr;  // null: padding, with length 0
  uint32_t length = 0;
  uint32_t newest_index = 0;  // rows of the sequence before this one
};

// What a RowDevice must know of its session.
struct RowDeviceSpec {
  RowShape shape;
  std::vector<uint32_t> group_begin;  // first layer of each index group, and the number of layers
  uint32_t top_k = 1;
  uint32_t hot_rows = 1;
  uint32_t state_rows = 1;
  uint32_t batch_rows = 1;  // the most of a step
  uint32_t max_sequence_rows = 1;
  bool by_pool_row = false;  // the mailbox takes names that are not the positions
  uint64_t seed = 0;         // of samples

  uint32_t groups() const { return static_cast<uint32_t>(group_begin.size() - 1); }
  uint32_t layers() const { return group_begin.back(); }
};

// What a comparison found. A row is one layer's.
struct RowCheck {
  uint64_t on_device = 0;  // rows compared by a kernel
  uint64_t on_host = 0;    // rows compared by the host's oracle; where on_device is not 0, a sample of the same rows
  uint64_t wrong = 0;      // each once; an answer that cannot be right counts as one
  std::string first_wrong;
};

class RowDevice {
 public:
  virtual ~RowDevice() = default;

  // The staging area is used in so many pieces: with two, one is filled while the daemon stores the other.
  virtual uint32_t staging_pieces() const = 0;

  // The session has opened a sequence; its request lives on. A state row's sequence replaces the one before.
  virtual absl::Status Open(const OpenSequence& sequence) = 0;
  // Begins to write rows [first, first + count) of all layers, [layer][row][bytes], at an offset of the staging area,
  // which has room for them.
  virtual absl::Status FillStaging(const OpenSequence& sequence, uint32_t first, uint32_t count,
                                   uint64_t offset_bytes) = 0;
  // Waits until what FillStaging began is there.
  virtual absl::Status AwaitStaging() = 0;

  // Has the next Publish write the row's newest token, in every layer, where its sequence's newest rows lie.
  virtual void WriteNewest(const BatchRow& row) = 0;
  // Host memory for the top_k positions of one batch row: written before Publish, kept until after Check.
  virtual absl::Span<int32_t> Entries(uint32_t group, size_t row) = 0;
  // by_pool_row: host memory for what the mailbox gets in their place.
  virtual absl::Span<int32_t> Names(uint32_t group, size_t row) = 0;
  // Brings newest rows and the entries of `rows` batch rows to the arena, and waits for that. Comes before each step.
  virtual absl::Status Publish(size_t rows) = 0;
  // Compares every row that the step's hot rows name, in every layer, with what it must hold.
  virtual absl::StatusOr<RowCheck> Check(absl::Span<const BatchRow> batch) = 0;
  // Hot rows of the entries. Valid from Check to the next Publish.
  virtual absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const = 0;
};

// Says which row is wrong: `bytes` are those found, empty where the answer itself cannot be right.
std::string DescribeWrongRow(const RowOracle& oracle, const BatchRow& row, size_t batch_row, size_t entry,
                             uint32_t layer, int32_t position, int32_t hot_row, absl::Span<const std::byte> bytes);

}  // namespace stoker::replay
