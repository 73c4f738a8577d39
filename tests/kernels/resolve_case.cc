#include "tests/kernels/resolve_case.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

constexpr int64_t kValidCountStride = 3;

void SetInt(std::byte* array, int32_t index, bool is_int64, int64_t value) {
  if (is_int64) {
    std::memcpy(array + int64_t{index} * 8, &value, 8);
  } else {
    const auto narrow = static_cast<int32_t>(value);
    std::memcpy(array + int64_t{index} * 4, &narrow, 4);
  }
}

std::vector<int32_t> Slice(const std::vector<int32_t>& values, int64_t first, int64_t count) {
  return {values.begin() + first, values.begin() + first + count};
}

}  // namespace

ResolveShape Plain(ResolveShape shape) {
  shape.int64_lengths = shape.int64_state_rows = false;
  shape.request_states = shape.hot_block_table = shape.resident_table = false;
  shape.attention_indices = shape.resolved_pool_rows = shape.valid_counts = shape.miss_mask = false;
  return shape;
}

int32_t ResolveCase::TableColumns() const {
  return shape_.table_columns != 0 ? shape_.table_columns
                                   : (shape_.positions + shape_.block_rows - 1) / shape_.block_rows;
}

ResolveCase::ResolveCase(const ResolveShape& shape)
    : shape_(shape),
      entry_stride_(shape.top_k + shape.stride_padding),
      table_stride_(TableColumns() + shape.stride_padding),
      hot_block_stride_((shape.hot_rows + shape.newest_capacity + shape.hot_block_rows - 1) / shape.hot_block_rows),
      allowed_stride_((shape.blocks + 63) / 64 + shape.stride_padding) {
  const size_t state_rows = shape_.state_rows;
  const size_t rows = shape_.rows;
  const size_t entries = rows * shape_.top_k;
  slot_key_ = image_.Add("slot_key", std::vector<int32_t>(shape_.slot_key_offset + state_rows * shape_.hot_rows, -1));
  lru_ = image_.Add<int16_t>("lru", state_rows * shape_.hot_rows);
  for (int32_t s = 0; s < shape_.state_rows; ++s) {
    for (int32_t i = 0; i < shape_.hot_rows; ++i) lru(s)[i] = static_cast<int16_t>(i);
  }
  entries_ = image_.Add("entries", std::vector<int32_t>(rows * entry_stride_, -1));
  lengths_ = image_.Add("lengths", std::vector<int64_t>(rows, 0));
  states_ = image_.Add("state_rows", std::vector<int64_t>(rows, 0));
  std::vector<int32_t> table(TableRows() * table_stride_, -1);
  block_table_ = image_.Add("block_table", table);
  // By default sequence r's blocks are spread over the pool.
  for (int32_t r = 0; r < TableRows(); ++r) {
    for (int32_t c = 0; c < TableColumns(); ++c) SetBlock(r, c, (r * 31 + c * 7) % shape_.blocks);
  }
  if (shape_.resident_table) resident_table_ = image_.Add("resident_table", table);
  if (shape_.real_rows) real_rows_ = image_.Add("real_rows", std::vector<int32_t>{shape_.rows});
  if (shape_.request_states) {
    std::vector<int32_t> states(TableRows());
    for (int32_t r = 0; r < TableRows(); ++r) states[r] = r % shape_.state_rows;
    request_states_ = image_.Add("request_states", states);
  }
  if (shape_.hot_block_table) {
    std::vector<int32_t> blocks(TableRows() * hot_block_stride_);
    std::iota(blocks.rbegin(), blocks.rend(), 5);
    hot_block_table_ = image_.Add("hot_block_table", blocks);
  }
  if (shape_.newest_pool_rows) newest_pool_rows_ = image_.Add("newest_pool_rows", std::vector<int32_t>(rows, -1));
  if (shape_.allowed_blocks) {
    allowed_blocks_ = image_.Add("allowed_blocks", std::vector<uint64_t>(state_rows * allowed_stride_, ~uint64_t{0}));
  }
  hot_rows_out_ = image_.Add<int32_t>("hot_rows_out", rows * entry_stride_);
  if (shape_.attention_indices) attention_ = image_.Add<int32_t>("attention_indices", rows * entry_stride_);
  if (shape_.resolved_pool_rows) resolved_ = image_.Add<int32_t>("resolved_pool_rows", entries);
  if (shape_.valid_counts) valid_counts_ = image_.Add<int32_t>("valid_counts", rows * kValidCountStride);
  if (shape_.miss_mask) miss_mask_ = image_.Add<int32_t>("miss_mask", entries);
  if (shape_.compact_list) {
    miss_pool_rows_ = image_.Add<int32_t>("miss_pool_rows", entries);
    miss_hot_rows_ = image_.Add<int32_t>("miss_hot_rows", entries);
    miss_counts_ = image_.Add<int32_t>("miss_counts", rows);
  }
  if (shape_.counts) {
    counts_ = image_.Add<int32_t>("counts", rows * kOutcomes);
    told_miss_counts_ = image_.Add<int32_t>("told_miss_counts", rows);
  }
  if (shape_.stats) stats_ = image_.Add("stats", std::vector<uint64_t>(kStats, 1000));
  for (int32_t r = 0; r < shape_.rows; ++r) {
    SetLength(r, shape_.positions);
    SetStateRow(r, r % shape_.state_rows);
  }
}

void ResolveCase::SetEntries(int32_t row, const std::vector<int32_t>& entries) {
  int32_t* const first = image_.At(entries_) + row * entry_stride_;
  for (int32_t i = 0; i < shape_.top_k; ++i) first[i] = i < std::ssize(entries) ? entries[i] : -1;
}

void ResolveCase::SetLength(int32_t row, int64_t length) {
  SetInt(image_.data() + lengths_.offset, row, shape_.int64_lengths, length);
}

void ResolveCase::SetStateRow(int32_t row, int64_t state_row_or_request) {
  SetInt(image_.data() + states_.offset, row, shape_.int64_state_rows, state_row_or_request);
}

void ResolveCase::SetBlock(int32_t table_row, int32_t column, int32_t block) {
  image_.At(block_table_)[table_row * table_stride_ + column] = block;
}

void ResolveCase::SetResidentPage(int32_t table_row, int32_t column, int32_t page) {
  image_.At(resident_table_)[table_row * table_stride_ + column] = page;
}

void ResolveCase::SetAllowed(int32_t state_row, int32_t block, bool allowed) {
  uint64_t& word = image_.At(allowed_blocks_)[state_row * allowed_stride_ + block / 64];
  const uint64_t bit = uint64_t{1} << (block % 64);
  word = allowed ? word | bit : word & ~bit;
}

void ResolveCase::Hold(int32_t state_row, int32_t slot, int32_t key) { slot_key(state_row)[slot] = key; }

void ResolveCase::FillState(std::mt19937_64& rng, int32_t limit, double share) {
  for (int32_t s = 0; s < shape_.state_rows; ++s) {
    std::vector<int32_t> keys(limit);
    std::iota(keys.begin(), keys.end(), 0);
    std::shuffle(keys.begin(), keys.end(), rng);
    std::shuffle(lru(s), lru(s) + shape_.hot_rows, rng);
    for (int32_t i = 0; i < std::min(shape_.hot_rows, limit); ++i) {
      if (std::uniform_real_distribution<>(0, 1)(rng) < share) Hold(s, i, keys[i]);
    }
  }
}

std::vector<int32_t> ResolveCase::hot_rows(int32_t row) const {
  return Slice(image_.Values(hot_rows_out_), row * entry_stride_, shape_.top_k);
}

std::vector<int32_t> ResolveCase::counts(int32_t row) const {
  return Slice(image_.Values(counts_), row * kOutcomes, kOutcomes);
}

std::vector<int32_t> ResolveCase::misses(int32_t row) const {
  return Slice(image_.Values(miss_hot_rows_), row * shape_.top_k, image_.Values(miss_counts_)[row]);
}

std::vector<int32_t> ResolveCase::miss_pool_rows(int32_t row) const {
  return Slice(image_.Values(miss_pool_rows_), row * shape_.top_k, image_.Values(miss_counts_)[row]);
}

std::vector<int32_t> ResolveCase::resolved(int32_t row) const {
  return Slice(image_.Values(resolved_), row * shape_.top_k, shape_.top_k);
}

ResolveArgs ResolveCase::Args(std::byte* base) const {
  ResolveArgs args;
  args.index_space = shape_.index_space;
  args.residency = {.slot_key = slot_key_.In(base) + shape_.slot_key_offset,
                    .lru = lru_.In(base),
                    .state_rows = shape_.state_rows,
                    .hot_rows = shape_.hot_rows};
  args.rows = shape_.rows;
  args.real_rows = real_rows_.In(base);
  args.top_k = shape_.top_k;
  args.entries = entries_.In(base);
  args.entry_stride = entry_stride_;
  args.lengths = {lengths_.In(base), shape_.int64_lengths};
  args.state_rows = {states_.In(base), shape_.int64_state_rows};
  args.request_states = request_states_.In(base);
  args.request_count = shape_.request_states ? TableRows() : 0;
  args.block_rows = shape_.block_rows;
  args.null_block = shape_.null_block;
  args.pool_rows = int64_t{shape_.blocks} * shape_.block_rows;
  if (shape_.index_space == IndexSpace::kPosition) {
    args.block_table = block_table_.In(base);
    args.block_table_stride = table_stride_;
    args.block_table_rows = TableRows();
    args.block_table_columns = TableColumns();
  }
  args.newest_pool_rows = newest_pool_rows_.In(base);
  args.allowed_blocks = allowed_blocks_.In(base);
  args.allowed_stride = allowed_stride_;
  if (shape_.resident_table) {
    args.resident_table = resident_table_.In(base);
    args.resident_stride = table_stride_;
    args.resident_rows = TableRows();
    args.resident_columns = TableColumns();
    args.resident_null_block = 0;
  }
  args.region_rows = shape_.region_rows();
  args.newest_row = shape_.hot_rows;
  args.hot_block_table = hot_block_table_.In(base);
  args.hot_block_stride = hot_block_stride_;
  args.hot_block_rows = shape_.hot_block_rows;
  args.hot_rows_out = hot_rows_out_.In(base);
  args.hot_rows_out_stride = entry_stride_;
  args.attention_indices = attention_.In(base);
  args.attention_stride = entry_stride_;
  args.attention_block_stride = shape_.attention_block_stride;
  args.resolved_pool_rows = resolved_.In(base);
  args.valid_counts = valid_counts_.In(base);
  args.valid_count_stride = kValidCountStride;
  args.miss_mask = miss_mask_.In(base);
  args.miss_pool_rows = miss_pool_rows_.In(base);
  args.miss_hot_rows = miss_hot_rows_.In(base);
  args.miss_counts = miss_counts_.In(base);
  args.told_miss_counts = told_miss_counts_.In(base);
  args.counts = counts_.In(base);
  args.stats = stats_.In(base);
  return args;
}

void ResolveCase::PoisonOutputs() {
  for (const auto* region : {&hot_rows_out_, &attention_, &resolved_, &valid_counts_, &miss_mask_, &miss_pool_rows_,
                             &miss_hot_rows_, &miss_counts_, &told_miss_counts_, &counts_}) {
    image_.Poison(*region);
  }
}

void ResolveCase::StepOracle() {
  PoisonOutputs();
  reference::Resolve(Args(image_.data()));
}

testing::AssertionResult ResolveCase::Step(Bench& bench, bool consistent) {
  PoisonOutputs();
  Image want = image_;
  const ResolveArgs oracle_args = Args(want.data());
  if (const absl::Status status = Validate(oracle_args); !status.ok()) {
    return testing::AssertionFailure() << status;
  }
  reference::Resolve(oracle_args);
  const absl::Status status =
      bench.Run(image_, [&](Stream& stream, std::byte* device, std::byte*) { return stream.Resolve(Args(device)); });
  if (!status.ok()) return testing::AssertionFailure() << status;
  if (testing::AssertionResult equal = image_.Equals(want); !equal) return equal;
  if (testing::AssertionResult sums = CheckOutcomes(); !sums) return sums;
  return consistent ? CheckResidency() : testing::AssertionSuccess();
}

testing::AssertionResult ResolveCase::CheckResidency() {
  for (int32_t s = 0; s < shape_.state_rows; ++s) {
    std::vector<bool> seen(shape_.hot_rows);
    for (int32_t i = 0; i < shape_.hot_rows; ++i) {
      const int32_t slot = lru(s)[i];
      if (slot < 0 || slot >= shape_.hot_rows || seen[slot]) {
        return testing::AssertionFailure() << "lru of state row " << s << " is no permutation at " << i;
      }
      seen[slot] = true;
    }
    std::set<int32_t> keys;
    for (int32_t i = 0; i < shape_.hot_rows; ++i) {
      const int32_t key = slot_key(s)[i];
      if (key >= 0 && !keys.insert(key).second) {
        return testing::AssertionFailure() << "slot " << i << " of state row " << s << " holds " << key << " once more";
      }
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult ResolveCase::CheckOutcomes() const {
  if (!shape_.counts) return testing::AssertionSuccess();
  const std::vector<int32_t> entries = image_.Values(entries_);
  for (int32_t r = 0; r < shape_.rows; ++r) {
    const std::vector<int32_t> row = Slice(entries, r * entry_stride_, shape_.top_k);
    const std::vector<int32_t> outcomes = counts(r);
    const auto real = std::count_if(row.begin(), row.end(), [](int32_t entry) { return entry >= 0; });
    const int32_t sum = std::accumulate(outcomes.begin(), outcomes.end(), 0);
    const std::vector<int32_t> out = hot_rows(r);
    const bool padding = sum == 0 && std::count(out.begin(), out.end(), -1) == shape_.top_k;
    if (sum != real && !padding) {
      return testing::AssertionFailure() << "outcomes of row " << r << " sum to " << sum << ", entries are " << real;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace stoker::kernels
