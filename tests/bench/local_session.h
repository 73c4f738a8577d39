// The kernels of a session without its daemon: same shapes, same order of operations, called on this thread.
//
// Serves as the baseline for a step's time, and, given the same entries, as the oracle of its hot rows.
//
// Thread safety: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/gather.h"
#include "kernels/resolve.h"
#include "kernels/row_layout.h"

namespace stoker::bench {

struct SessionShape {
  int32_t state_rows = 1;
  int32_t layers = 1;  // each layer is an index group
  int32_t top_k = 2048;
  int32_t hot_rows = 4096;
  int32_t sequence_rows = 8192;  // rows of each sequence, all stored
  int32_t block_rows = 64;
  int32_t row_bytes = 656;

  int32_t region_rows() const { return hot_rows + block_rows; }
  int64_t pool_rows() const { return int64_t{state_rows} * sequence_rows; }
};

// The bytes of a row: word i is Mix(layer, sequence, position) + i.
uint32_t RowSeed(int32_t layer, int32_t sequence, int32_t position);
void FillRow(uint32_t seed, std::byte* row, int32_t bytes);
bool IsRow(uint32_t seed, const std::byte* row, int32_t bytes);

class LocalSession {
 public:
  // State row r holds sequence r. `fill`: rows get the bytes of FillRow; without it they are not touched beyond zeros.
  LocalSession(const SessionShape& shape, bool fill);

  // Entries [state_rows][top_k] of the next step of `group`.
  std::vector<int32_t>& entries(int32_t group) { return groups_[static_cast<size_t>(group)].entries; }
  const std::vector<int32_t>& hot_rows(int32_t group) const { return groups_[static_cast<size_t>(group)].hot_rows_out; }
  const std::vector<int32_t>& miss_counts(int32_t group) const {
    return groups_[static_cast<size_t>(group)].miss_counts;
  }

  void Resolve(int32_t group);
  void Gather(int32_t group);
  int64_t gathered_bytes() const { return static_cast<int64_t>(gathered_bytes_); }

  const kernels::RowStore& pool() const { return pool_; }
  const kernels::RowStore& hot() const { return hot_; }

 private:
  struct Group {
    std::vector<int32_t> slot_key, entries, hot_rows_out, miss_pool_rows, miss_hot_rows, miss_counts, counts;
    std::vector<int16_t> lru;
  };

  const SessionShape shape_;
  const std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::Buffer> pool_memory_, hot_memory_;
  kernels::RowStore pool_, hot_;
  std::vector<int32_t> block_table_, lengths_, state_rows_;
  std::vector<Group> groups_;
  uint64_t stats_[kernels::kStats] = {};
  uint64_t gathered_bytes_ = 0;
};

}  // namespace stoker::bench
