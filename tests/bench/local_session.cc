#include "tests/bench/local_session.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/cpu_backend.h"

namespace stoker::bench {
namespace {

// The benchmark's own arguments: an error is a defect of this file.
void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}

kernels::RowStore Lay(const SessionShape& shape, int64_t rows) {
  kernels::RowFormat format;
  format.kind = kernels::RowLayoutKind::kLinear;
  format.row_bytes = shape.row_bytes;
  const absl::StatusOr<kernels::RowLayout> layout = kernels::RowLayout::Make(format, rows);
  Require(layout.status());
  kernels::RowStore store;
  store.layout = *layout;
  store.layers = shape.layers;
  store.layer_stride = layout->layer_bytes;
  return store;
}

}  // namespace

uint32_t RowSeed(int32_t layer, int32_t sequence, int32_t position) {
  const uint64_t key =
      (static_cast<uint64_t>(layer) << 52) ^ (static_cast<uint64_t>(sequence) << 32) ^ static_cast<uint64_t>(position);
  return static_cast<uint32_t>((key + 1) * 0x9e3779b97f4a7c15u >> 32);
}

void FillRow(uint32_t seed, std::byte* row, int32_t bytes) {
  for (int32_t i = 0; i < bytes / 4; ++i) {
    const uint32_t word = seed + static_cast<uint32_t>(i);
    std::memcpy(row + i * 4, &word, 4);
  }
}

bool IsRow(uint32_t seed, const std::byte* row, int32_t bytes) {
  for (int32_t i = 0; i < bytes / 4; ++i) {
    const uint32_t word = seed + static_cast<uint32_t>(i);
    if (std::memcmp(row + i * 4, &word, 4) != 0) return false;
  }
  return true;
}

LocalSession::LocalSession(const SessionShape& shape, bool fill)
    : shape_(shape), backend_(kernels::cpu::MakeCpuBackend(1)) {
  pool_ = Lay(shape, shape.pool_rows());
  hot_ = Lay(shape, int64_t{shape.state_rows} * shape.region_rows());
  // The backend's own memory, as in a daemon: its pages differ from those of the heap.
  auto pool = backend_->AllocatePool(static_cast<size_t>(pool_.layer_stride * pool_.layers));
  Require(pool.status());
  auto hot = backend_->AllocateShared(static_cast<size_t>(hot_.layer_stride * hot_.layers));
  Require(hot.status());
  pool_memory_ = *std::move(pool);
  hot_memory_ = *std::move(hot);
  pool_.base = pool_memory_->data();
  hot_.base = hot_memory_->data();
  if (fill) {
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      for (int64_t row = 0; row < shape.pool_rows(); ++row) {
        FillRow(RowSeed(layer, static_cast<int32_t>(row / shape.sequence_rows),
                        static_cast<int32_t>(row % shape.sequence_rows)),
                pool_.At(layer, 0, row), shape.row_bytes);
      }
    }
  }
  // One row more than is stored: the newest, which no entry names.
  lengths_.assign(static_cast<size_t>(shape.state_rows), shape.sequence_rows + 1);
  state_rows_.resize(lengths_.size());
  std::iota(state_rows_.begin(), state_rows_.end(), 0);
  block_table_.resize(static_cast<size_t>(shape.pool_rows() / shape.block_rows));
  std::iota(block_table_.begin(), block_table_.end(), 0);
  const size_t rows = lengths_.size();
  const size_t slots = rows * static_cast<size_t>(shape.hot_rows);
  const size_t entries = rows * static_cast<size_t>(shape.top_k);
  groups_.resize(static_cast<size_t>(shape.layers));
  for (Group& group : groups_) {
    group.slot_key.assign(slots, -1);
    group.lru.resize(slots);
    for (size_t i = 0; i < slots; ++i) group.lru[i] = static_cast<int16_t>(i % static_cast<size_t>(shape.hot_rows));
    group.entries.resize(entries);
    group.hot_rows_out.resize(entries);
    group.miss_pool_rows.resize(entries);
    group.miss_hot_rows.resize(entries);
    group.miss_counts.resize(rows);
    group.counts.resize(rows * kernels::kOutcomes);
  }
}

void LocalSession::Resolve(int32_t group_index) {
  Group& group = groups_[static_cast<size_t>(group_index)];
  kernels::ResolveArgs args;
  args.residency = {.slot_key = group.slot_key.data(),
                    .lru = group.lru.data(),
                    .state_rows = shape_.state_rows,
                    .hot_rows = shape_.hot_rows};
  args.rows = shape_.state_rows;
  args.top_k = shape_.top_k;
  args.entries = group.entries.data();
  args.entry_stride = shape_.top_k;
  args.lengths.data = lengths_.data();
  args.state_rows.data = state_rows_.data();
  args.block_table = block_table_.data();
  args.block_table_stride = shape_.sequence_rows / shape_.block_rows;
  args.block_table_rows = shape_.state_rows;
  args.block_table_columns = static_cast<int32_t>(args.block_table_stride);
  args.block_rows = shape_.block_rows;
  args.pool_rows = shape_.pool_rows();
  args.region_rows = shape_.region_rows();
  args.newest_row = shape_.hot_rows;
  args.hot_rows_out = group.hot_rows_out.data();
  args.hot_rows_out_stride = shape_.top_k;
  args.miss_pool_rows = group.miss_pool_rows.data();
  args.miss_hot_rows = group.miss_hot_rows.data();
  args.miss_counts = group.miss_counts.data();
  args.counts = group.counts.data();
  args.stats = stats_;
  Require(kernels::Validate(args));
  kernels::cpu::Resolve(args);
}

void LocalSession::Gather(int32_t group_index) {
  const Group& group = groups_[static_cast<size_t>(group_index)];
  kernels::GatherCompactArgs args;
  args.pool = pool_;
  args.hot = hot_;
  args.pool_rows = shape_.pool_rows();
  args.hot_rows = hot_.layout.rows;
  args.layers = &group_index;
  args.layer_count = 1;
  args.miss_pool_rows = group.miss_pool_rows.data();
  args.miss_hot_rows = group.miss_hot_rows.data();
  args.miss_counts = group.miss_counts.data();
  args.rows = shape_.state_rows;
  args.top_k = shape_.top_k;
  args.gathered_bytes = &gathered_bytes_;
  Require(kernels::Validate(args));
  kernels::cpu::Gather(args);
}

}  // namespace stoker::bench
