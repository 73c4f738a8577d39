// Bulk row movement of a session.
#include <algorithm>
#include <numeric>

#include "server/engine/session_storage.h"

namespace stoker::engine {
namespace {

std::vector<int32_t> Iota(int64_t first, int64_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), static_cast<int32_t>(first));
  return values;
}

}  // namespace

// The row lists are uploaded chunk by chunk into the same two arrays: work of a stream runs in order.
absl::Status SessionStorage::TransferRows(const kernels::CopyLimits& limits, const kernels::RowStore& source,
                                          const kernels::RowStore& target, absl::Span<const int32_t> source_rows,
                                          absl::Span<const int32_t> target_rows,
                                          absl::Span<const int32_t> source_layers,
                                          absl::Span<const int32_t> target_layers, const uint32_t* skip) {
  const int64_t count = static_cast<int64_t>(source_rows.size());
  for (int64_t begin = 0; begin < count; begin += kChunkRows) {
    const int64_t chunk = std::min(kChunkRows, count - begin);
    int32_t* const from = InState<int32_t>(memory_.source_rows);
    int32_t* const to = InState<int32_t>(memory_.target_rows);
    if (absl::Status status = Upload(from, source_rows.data() + begin, chunk * 4); !status.ok()) return status;
    if (absl::Status status = Upload(to, target_rows.data() + begin, chunk * 4); !status.ok()) return status;
    kernels::TransferArgs args;
    args.src = source;
    args.dst = target;
    args.src_row_limit = source.layout.rows;
    args.dst_row_limit = target.layout.rows;
    args.src_layers = source_layers.data();
    args.dst_layers = target_layers.data();
    args.layer_count = static_cast<int32_t>(source_layers.size());
    args.src_rows = from;
    args.dst_rows = to;
    args.count = chunk;
    args.limits = limits;
    args.skip = skip;
    if (absl::Status status = stream_->Transfer(args); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Bytes of a message and of the staging area are read and written where they are; core has seen to it that the device
// reaches them (bounce()).
absl::Status SessionStorage::Store(const core::RowsWork& work) {
  const int64_t count = static_cast<int64_t>(work.pool_rows.size());
  char* const base = work.source_bytes != nullptr ? const_cast<char*>(work.source_bytes)
                                                  : InArena<char>(memory_.staging + work.staging_offset);
  const std::vector<int32_t>* rows = Keep(Iota(0, count));
  return TransferRows(copies_.bulk, DenseStore(base, count, pool_spec_.layers), pool_, *rows, work.pool_rows,
                      all_layers_, all_layers_, aborted());
}

absl::Status SessionStorage::Load(const core::RowsWork& work) {
  const int64_t count = static_cast<int64_t>(work.pool_rows.size());
  char* const base =
      work.target_bytes != nullptr ? work.target_bytes : InArena<char>(memory_.staging + work.staging_offset);
  const std::vector<int32_t>* rows = Keep(Iota(0, count));
  return TransferRows(copies_.bulk, pool_, DenseStore(base, count, pool_spec_.layers), work.pool_rows, *rows,
                      all_layers_, all_layers_, aborted());
}

absl::Status SessionStorage::LoadHot(int32_t state_row, int32_t first_position, const core::RowsWork& work) {
  const int64_t count = static_cast<int64_t>(work.pool_rows.size());
  // A plan that is carried out later would overwrite the slots with the rows of its misses.
  if (absl::Status status = FlushPlans(); !status.ok()) return status;
  if (absl::Status status = Suspend({state_row}); !status.ok()) return status;
  const int64_t first_row = int64_t{state_row} * memory_.arena.region_rows + first_position;
  const std::vector<int32_t>* rows = Keep(Iota(first_row, count));
  if (absl::Status status =
          TransferRows(copies_.bulk, pool_, hot(), work.pool_rows, *rows, all_layers_, all_layers_, aborted());
      !status.ok()) {
    return status;
  }
  for (size_t group = 0; group < spec_.groups.size(); ++group) {
    kernels::PlaceArgs args;
    args.residency = ResidencyOf(static_cast<int32_t>(group));
    args.state_row = state_row;
    args.first_position = first_position;
    args.count = static_cast<int32_t>(count);
    if (absl::Status status = stream_->Place(args); !status.ok()) return status;
  }
  return Resume({state_row});
}

absl::Status SessionStorage::Commit(const core::CommitWork& work) {
  return TransferRows(copies_.step, hot(), pool_, work.hot_rows, work.pool_rows, all_layers_, all_layers_, aborted());
}

absl::Status SessionStorage::CopyBlocks(absl::Span<const core::BlockCopy> copies) {
  std::vector<int32_t> source_rows, target_rows;
  const int32_t block_rows = static_cast<int32_t>(pool_spec_.block_rows);
  for (const core::BlockCopy& copy : copies) {
    for (int32_t row = 0; row < copy.rows; ++row) {
      source_rows.push_back(copy.source_block * block_rows + row);
      target_rows.push_back(copy.target_block * block_rows + row);
    }
  }
  const std::vector<int32_t>* from = Keep(std::move(source_rows));
  const std::vector<int32_t>* to = Keep(std::move(target_rows));
  return TransferRows(copies_.bulk, pool_, pool_, *from, *to, all_layers_, all_layers_, /*skip=*/nullptr);
}

absl::Status SessionStorage::Read(const core::ReadWork& work) {
  const int64_t count = static_cast<int64_t>(work.rows.size());
  const int64_t layers = static_cast<int64_t>(work.layers.size());
  const std::vector<int32_t>* rows = Keep(Iota(0, count));
  const std::vector<int32_t>* target_layers = Keep(Iota(0, layers));
  return TransferRows(copies_.bulk, work.from_hot_cache ? hot() : pool_, DenseStore(work.target_bytes, count, layers),
                      work.rows, *rows, work.layers, *target_layers, /*skip=*/nullptr);
}

}  // namespace stoker::engine
