// A plane's batch: its images, and its operations on a backend and on the oracle.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/plane.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/image.h"

namespace stoker::kernels {

inline constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kHighest = std::numeric_limits<int32_t>::max();

struct BatchShape {
  int32_t max_rows = 8;
  int32_t top_k = 4;
  int32_t hot_rows = 16;
  int32_t state_rows = 4;
  int32_t word_count = 4;
  int32_t block_rows = 4;
  int32_t columns = 8;
  int32_t blocks = 40;
  int32_t missing_pool_rows = 0;  // of the last block
  int32_t stride_padding = 0;
  int32_t newest_row = 16;
  int32_t region_rows = 20;
  int64_t max_sequence_rows = 32;
  bool one_row = false;
  bool raises_step = false;
  bool optional_outputs = true;
};

enum class BatchOperation { kBegin, kPlan, kEnd };

class BatchCase {
 public:
  static constexpr uint64_t kSession = 7;

  // Every state row r has sequence 100 + r and word r, of 0 rows in the pool and of max_sequence_rows; its blocks are
  // columns x r and those after it. All rows of the batch are padding, and all that the operations write is poison.
  explicit BatchCase(const BatchShape& shape);

  const BatchShape& shape() const { return shape_; }
  Image& image() { return image_; }
  BatchArgs Args(std::byte* device, std::byte* host) const;

  // What the engine writes.
  int32_t& rows() { return *image_.At(rows_); }
  uint64_t* sequence_ids() { return image_.At(sequence_ids_); }
  int32_t* state_rows() { return image_.At(state_rows_); }
  int32_t* lengths() { return image_.At(lengths_); }
  int32_t* commits() { return image_.At(commits_); }
  // Batch row i: of the state row and the sequence that it has by its number.
  void SetRow(int32_t i, int32_t state_row, int32_t length, int32_t commit = 0);

  // What the daemon writes.
  PlaneState& state() { return *reinterpret_cast<PlaneState*>(image_.At(state_)); }
  StateRowEntry& entry(int32_t state_row) { return image_.At(entries_)[state_row]; }
  SequenceWord& word(int32_t w) { return host_.At(words_)[w]; }
  int32_t& block(int32_t state_row, int32_t column) {
    return image_.At(block_table_)[int64_t{state_row} * (shape_.columns + shape_.stride_padding) + column];
  }
  // For shapes within the limits; others are changed before the operation.
  int32_t& top_k() { return shape_.top_k; }

  // What the operations write.
  std::vector<BatchStatus> Statuses() const;
  std::vector<int32_t> PlanRows() const { return image_.Values(plan_state_rows_); }
  std::vector<int32_t> PlanLengths() const { return image_.Values(plan_lengths_); }
  std::vector<int32_t> NewestHotRows() const { return image_.Values(newest_hot_rows_); }
  std::vector<int32_t> NewestPoolRows() const { return image_.Values(newest_pool_rows_); }
  std::vector<int32_t> CommitHotRows() const { return image_.Values(commit_hot_rows_); }
  std::vector<int32_t> CommitPoolRows() const { return image_.Values(commit_pool_rows_); }
  int32_t plan_rows() { return *image_.At(plan_rows_); }
  uint64_t& committed() { return *image_.At(committed_); }
  uint32_t& ended() { return *image_.At(ended_); }
  void PoisonStatuses() { image_.Poison(statuses_); }
  void PoisonPlan();
  void PoisonCommits();

  // Runs the operation on the backend and on the oracle, and compares all bytes.
  testing::AssertionResult Run(Bench& bench, BatchOperation operation);

 private:
  BatchShape shape_;
  Image image_;
  Image host_;
  Region<uint64_t> state_;
  Region<int32_t> rows_;
  Region<uint64_t> sequence_ids_;
  Region<int32_t> state_rows_;
  Region<int32_t> lengths_;
  Region<int32_t> commits_;
  Region<int32_t> statuses_;
  Region<int32_t> plan_rows_;
  Region<int32_t> plan_state_rows_;
  Region<int32_t> plan_lengths_;
  Region<int32_t> newest_pool_rows_;
  Region<int32_t> newest_hot_rows_;
  Region<int32_t> plan_words_;
  Region<int32_t> commit_hot_rows_;
  Region<int32_t> commit_pool_rows_;
  Region<int32_t> claims_;
  Region<StateRowEntry> entries_;
  Region<int32_t> block_table_;
  Region<uint64_t> committed_;
  Region<uint32_t> ended_;
  Region<SequenceWord> words_;
};

// Random shapes, and what a random daemon and a random engine write: a fifth of it wrong in one of all ways.
BatchShape RandomBatchShape(std::mt19937_64& rng);
void RandomDaemon(BatchCase& c, std::mt19937_64& rng);
void RandomEngine(BatchCase& c, std::mt19937_64& rng);

}  // namespace stoker::kernels
