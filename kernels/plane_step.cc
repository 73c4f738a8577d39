#include "kernels/plane_step.h"

namespace stoker::kernels {

absl::Status PlaneStep::Begin(Stream& stream) const {
  stream.Timestamp(memory_.counters + kPlaneBeginNs);
  return stream.BeginBatch(memory_.batch);
}

absl::Status PlaneStep::Group(Stream& stream, int32_t group, const RingDoorbellArgs* ring) const {
  const BatchArgs& batch = memory_.batch;
  const PlaneGroup& of_group = memory_.groups[static_cast<size_t>(group)];
  ResolveArgs resolve;
  resolve.index_space = memory_.index_space;
  resolve.residency = of_group.residency;
  resolve.rows = batch.max_rows;
  resolve.real_rows = batch.plan.rows;
  resolve.top_k = batch.top_k;
  resolve.entries = of_group.indices;
  resolve.entry_stride = memory_.mailbox_stride;
  resolve.lengths.data = batch.plan.lengths;
  resolve.state_rows.data = batch.plan.state_rows;
  resolve.block_table = batch.block_table;
  resolve.block_table_stride = batch.block_table_stride;
  resolve.block_table_rows = batch.state_rows;
  resolve.block_table_columns = batch.block_table_columns;
  resolve.block_rows = batch.block_rows;
  resolve.pool_rows = batch.pool_rows;
  if (memory_.index_space == IndexSpace::kPoolRow) {
    resolve.newest_pool_rows = batch.plan.newest_pool_rows;
    resolve.allowed_blocks = memory_.allowed_blocks;
    resolve.allowed_stride = memory_.allowed_stride;
  }
  resolve.region_rows = batch.region_rows;
  resolve.newest_row = batch.newest_row;
  resolve.hot_rows_out = of_group.hot_rows;
  resolve.hot_rows_out_stride = memory_.mailbox_stride;
  resolve.miss_pool_rows = of_group.miss_pool_rows;
  resolve.miss_hot_rows = of_group.miss_hot_rows;
  resolve.miss_counts = of_group.miss_counts;
  resolve.told_miss_counts = of_group.misses;
  resolve.stats = memory_.counters;
  GatherCompactArgs gather;
  gather.pool = memory_.pool;
  gather.hot = memory_.hot;
  gather.pool_rows = memory_.pool.layout.rows;
  gather.hot_rows = memory_.hot.layout.rows;
  gather.layers = of_group.layers.data();
  gather.layer_count = static_cast<int32_t>(of_group.layers.size());
  gather.miss_pool_rows = of_group.miss_pool_rows;
  gather.miss_hot_rows = of_group.miss_hot_rows;
  gather.miss_counts = of_group.miss_counts;
  gather.rows = batch.max_rows;
  gather.top_k = batch.top_k;
  gather.gathered_bytes = memory_.counters + kPlaneGatheredBytes;
  gather.limits = memory_.limits;
  return ring != nullptr ? stream.ResolveGather(resolve, gather, *ring) : stream.ResolveGather(resolve, gather);
}

absl::Status PlaneStep::Commit(Stream& stream) const {
  const BatchArgs& batch = memory_.batch;
  if (absl::Status status = stream.PlanCommits(batch); !status.ok()) return status;
  TransferArgs commit;
  commit.src = memory_.hot;
  commit.dst = memory_.pool;
  commit.src_row_limit = memory_.hot.layout.rows;
  commit.dst_row_limit = memory_.pool.layout.rows;
  commit.src_layers = commit.dst_layers = memory_.layers.data();
  commit.layer_count = static_cast<int32_t>(memory_.layers.size());
  commit.src_rows = batch.plan.commit_hot_rows;
  commit.dst_rows = batch.plan.commit_pool_rows;
  commit.count = batch.max_rows;
  commit.limits = memory_.limits;
  if (absl::Status status = stream.Transfer(commit); !status.ok()) return status;
  if (absl::Status status = stream.EndBatch(batch); !status.ok()) return status;
  stream.Timestamp(memory_.counters + kPlaneEndNs);
  return absl::OkStatus();
}

absl::Status PlaneStep::Report(Stream& stream, PlaneResult* result) const {
  absl::Status status = stream.Copy(&result->state, memory_.batch.state, sizeof(PlaneState));
  status.Update(stream.Copy(result->counters, memory_.counters, sizeof(result->counters)));
  return status;
}

}  // namespace stoker::kernels
