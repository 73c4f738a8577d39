// A resolve problem of any shape: its image, its state, and one step of it on a backend and on the oracle.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/resolve.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/image.h"

namespace stoker::kernels {

// What a case consists of. Defaults: one sequence, every optional input absent, every optional output present.
struct ResolveShape {
  IndexSpace index_space = IndexSpace::kPosition;
  int32_t state_rows = 1;
  int32_t rows = 1;
  int32_t top_k = 32;
  int32_t hot_rows = 64;
  int32_t positions = 512;  // of a sequence; the block table covers them
  int32_t blocks = 64;      // of the pool
  int32_t block_rows = 16;
  int32_t table_rows = 0;     // rows of the block tables; 0: state_rows
  int32_t table_columns = 0;  // 0: all positions
  int32_t null_block = -1;
  int32_t newest_capacity = 8;
  int32_t stride_padding = 0;  // added to every stride that the arguments have
  bool int64_lengths = false;
  bool int64_state_rows = false;
  bool real_rows = false;
  bool request_states = false;
  bool hot_block_table = false;
  bool resident_table = false;
  bool allowed_blocks = false;
  bool newest_pool_rows = false;
  bool attention_indices = true;
  bool resolved_pool_rows = true;
  bool valid_counts = true;
  bool miss_mask = true;
  bool compact_list = true;
  bool counts = true;
  bool stats = true;
  int32_t hot_block_rows = 16;
  int64_t attention_block_stride = 24;
  int32_t slot_key_offset = 0;  // elements before slot_key, which is aligned to 64 bytes without them

  int32_t region_rows() const { return hot_rows + newest_capacity; }
};

// The shape without optional inputs and outputs of an entry, and with integers of 32 bits: what the CUDA backend has
// faster kernels for.
ResolveShape Plain(ResolveShape shape);

class ResolveCase {
 public:
  explicit ResolveCase(const ResolveShape& shape);

  const ResolveShape& shape() const { return shape_; }
  Image& image() { return image_; }

  // Inputs, to be set before a step. Lengths and state rows take the shape's integer width.
  void SetEntries(int32_t row, const std::vector<int32_t>& entries);  // short lists are filled with -1
  void SetLength(int32_t row, int64_t length);
  void SetStateRow(int32_t row, int64_t state_row_or_request);
  // Maps block `column` of a table row to a pool block.
  void SetBlock(int32_t table_row, int32_t column, int32_t block);
  void SetResidentPage(int32_t table_row, int32_t column, int32_t page);
  void SetAllowed(int32_t state_row, int32_t block, bool allowed);
  int32_t* real_rows() { return image_.At(real_rows_); }
  int32_t* request_states() { return image_.At(request_states_); }
  int32_t* newest_pool_rows() { return image_.At(newest_pool_rows_); }
  int32_t* hot_block_table() { return image_.At(hot_block_table_); }
  int64_t hot_block_stride() const { return hot_block_stride_; }

  // The residency, free to be corrupted.
  int32_t* slot_key(int32_t state_row) {
    return image_.At(slot_key_) + shape_.slot_key_offset + int64_t{state_row} * shape_.hot_rows;
  }
  int16_t* lru(int32_t state_row) { return image_.At(lru_) + int64_t{state_row} * shape_.hot_rows; }
  // Puts a key into a slot, on both sides.
  void Hold(int32_t state_row, int32_t slot, int32_t key);
  // Fills the state rows with random keys below `limit` and a random order. `share` of the slots hold a key.
  void FillState(std::mt19937_64& rng, int32_t limit, double share);

  // Outputs of the last step.
  std::vector<int32_t> hot_rows(int32_t row) const;
  std::vector<int32_t> counts(int32_t row) const;
  std::vector<int32_t> misses(int32_t row) const;  // hot rows of the compact list
  std::vector<int32_t> miss_pool_rows(int32_t row) const;
  std::vector<uint64_t> stats() const { return image_.Values(stats_); }
  std::vector<int32_t> valid_counts() const { return image_.Values(valid_counts_); }
  std::vector<int32_t> resolved(int32_t row) const;

  // Poisons the outputs, runs one step on the backend and on the oracle, and compares all memory. Where `consistent`,
  // also checks what must hold of a state that was consistent before.
  testing::AssertionResult Step(Bench& bench, bool consistent = true);
  // As Step, on the oracle alone.
  void StepOracle();

  // The arguments over the copy of the image at `base`.
  ResolveArgs Args(std::byte* base) const;
  void PoisonOutputs();
  // The order is a permutation, and no key is in two slots.
  testing::AssertionResult CheckResidency();
  // The outcomes of every row sum to its entries >= 0.
  testing::AssertionResult CheckOutcomes() const;

 private:
  int32_t TableRows() const { return shape_.table_rows != 0 ? shape_.table_rows : shape_.state_rows; }
  int32_t TableColumns() const;

  const ResolveShape shape_;
  Image image_;
  int64_t entry_stride_;
  int64_t table_stride_;
  int64_t hot_block_stride_;
  int64_t allowed_stride_;
  Region<int32_t> slot_key_;
  Region<int16_t> lru_;
  Region<int32_t> real_rows_;
  Region<int32_t> entries_;
  Region<int64_t> lengths_;
  Region<int64_t> states_;
  Region<int32_t> request_states_;
  Region<int32_t> block_table_;
  Region<int32_t> resident_table_;
  Region<int32_t> hot_block_table_;
  Region<int32_t> newest_pool_rows_;
  Region<uint64_t> allowed_blocks_;
  Region<int32_t> hot_rows_out_;
  Region<int32_t> attention_;
  Region<int32_t> resolved_;
  Region<int32_t> valid_counts_;
  Region<int32_t> miss_mask_;
  Region<int32_t> miss_pool_rows_;
  Region<int32_t> miss_hot_rows_;
  Region<int32_t> miss_counts_;
  Region<int32_t> told_miss_counts_;
  Region<int32_t> counts_;
  Region<uint64_t> stats_;
};

}  // namespace stoker::kernels
