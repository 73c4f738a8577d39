// One decode step as operations of the backend: newest rows in, commits, then resolve and gather of each group.
#include <algorithm>

#include "server/engine/session_storage.h"

namespace stoker::engine {

static_assert(core::kOutcomeCount == kernels::kOutcomes);

absl::Status SessionStorage::UploadResident(const core::StepRowWork& row) {
  int32_t* const table = InState<int32_t>(memory_.resident_table) + row.state_row * memory_.table_columns;
  const int64_t pages = static_cast<int64_t>(row.resident_pages.size());
  if (pages > 0) {
    if (absl::Status status = Upload(table, row.resident_pages.data(), pages * 4); !status.ok()) return status;
    any_resident_ = true;
  }
  const int64_t stale = resident_pages_[row.state_row] - pages;
  resident_pages_[row.state_row] = pages;
  return stale > 0 ? Upload(table + pages, no_pages_.data(), stale * 4) : absl::OkStatus();
}

// Inline newest rows go through a private buffer into the hot cache; then commits copy newest rows into the pool.
absl::Status SessionStorage::EnqueueNewest(const core::StepWork& work) {
  const int64_t newest_bytes = pool_spec_.bytes_per_row() * pool_spec_.layers;
  int64_t given = 0;
  int64_t commits = 0;
  for (const core::StepRowWork& row : work.rows) {
    if (row.newest_bytes != nullptr) {
      if (absl::Status status =
              Upload(InState<char>(memory_.newest) + given * newest_bytes, row.newest_bytes, newest_bytes);
          !status.ok()) {
        return status;
      }
      ++given;
    }
    commits += row.commit ? 1 : 0;
  }
  kernels::TransferArgs args;
  args.src_layers = args.dst_layers = all_layers_.data();
  args.layer_count = static_cast<int32_t>(all_layers_.size());
  args.dst = hot();
  args.dst_row_limit = memory_.hot_total_rows;
  args.limits = copies_.step;
  args.skip = aborted();
  // The layers of one newest row are adjacent, so each row is a store of its own.
  for (int64_t i = 0; i < given; ++i) {
    args.src = DenseStore(InState<char>(memory_.newest) + i * newest_bytes, 1, pool_spec_.layers);
    args.src_row_limit = 1;
    args.src_rows = Argument(kNewestSource) + i;
    args.dst_rows = Argument(kNewestHotRows) + i;
    args.count = 1;
    if (absl::Status status = stream_->Transfer(args); !status.ok()) return status;
  }
  if (commits > 0) {
    args.src = hot();
    args.src_row_limit = memory_.hot_total_rows;
    args.dst = pool_;
    args.dst_row_limit = pool_.layout.rows;
    args.src_rows = Argument(kCommitHotRows);
    args.dst_rows = Argument(kCommitPoolRows);
    args.count = commits;
    if (absl::Status status = stream_->Transfer(args); !status.ok()) return status;
  }
  return absl::OkStatus();
}

kernels::GatherCompactArgs SessionStorage::GatherArgs(int32_t group, absl::Span<const int32_t> layers) const {
  const SessionMemory::Group& memory = memory_.groups[group];
  kernels::GatherCompactArgs args;
  args.pool = pool_;
  args.hot = hot();
  args.pool_rows = pool_.layout.rows;
  args.hot_rows = memory_.hot_total_rows;
  args.layers = layers.data();
  args.layer_count = static_cast<int32_t>(layers.size());
  args.miss_pool_rows = InState<int32_t>(memory.miss_pool_rows);
  args.miss_hot_rows = InState<int32_t>(memory.miss_hot_rows);
  args.miss_counts = InState<int32_t>(memory.miss_counts);
  args.rows = plans_[group].rows;
  args.top_k = plans_[group].top_k;
  args.gathered_bytes = Counter(kGatheredBytes);
  args.limits = copies_.step;
  return args;
}

absl::Status SessionStorage::EnqueueGroup(const core::StepWork& work, const core::StepGroupWork& group) {
  if (absl::Status status = FlushPlan(group.group); !status.ok()) return status;
  const SessionMemory::Group& memory = memory_.groups[group.group];
  const int64_t rows = static_cast<int64_t>(work.rows.size());
  const int64_t entries = rows * work.top_k;
  int32_t* const mailbox = InArena<int32_t>(memory.indices);
  int32_t* const hot_rows = InArena<int32_t>(memory.hot_rows);
  // The mailbox has a fixed row stride; inline entries are packed.
  const int64_t stride = group.indices == nullptr ? spec_.max_top_k : work.top_k;
  if (group.indices != nullptr) {
    if (absl::Status status = Upload(mailbox, group.indices, entries * 4); !status.ok()) return status;
  }
  kernels::ResolveArgs args;
  args.index_space = index_space();
  args.residency = ResidencyOf(group.group);
  args.rows = static_cast<int32_t>(rows);
  args.top_k = work.top_k;
  args.entries = mailbox;
  args.entry_stride = stride;
  args.lengths.data = Argument(kLengths);
  args.state_rows.data = Argument(kStateRows);
  args.block_table = InState<int32_t>(memory_.block_table);
  args.block_table_stride = memory_.table_columns;
  args.block_table_rows = static_cast<int32_t>(spec_.state_rows);
  args.block_table_columns = static_cast<int32_t>(memory_.table_columns);
  args.block_rows = static_cast<int32_t>(pool_spec_.block_rows);
  args.pool_rows = pool_.layout.rows;
  if (spec_.index_space == core::IndexSpace::kPoolRow) {
    args.newest_pool_rows = Argument(kNewestPoolRows);
    args.allowed_blocks = InState<uint64_t>(memory_.allowed_blocks);
    args.allowed_stride = memory_.allowed_words;
  }
  if (any_resident_) {
    args.resident_table = InState<int32_t>(memory_.resident_table);
    args.resident_stride = memory_.table_columns;
    args.resident_rows = static_cast<int32_t>(spec_.state_rows);
    args.resident_columns = static_cast<int32_t>(memory_.table_columns);
  }
  args.region_rows = memory_.arena.region_rows;
  args.newest_row = memory_.arena.newest_row;
  args.hot_rows_out = hot_rows;
  args.hot_rows_out_stride = stride;
  args.miss_pool_rows = InState<int32_t>(memory.miss_pool_rows);
  args.miss_hot_rows = InState<int32_t>(memory.miss_hot_rows);
  args.miss_counts = InState<int32_t>(memory.miss_counts);
  args.told_miss_counts = InArena<int32_t>(memory.misses);
  args.counts = InState<int32_t>(memory.counts);
  args.stats = Counter(0);
  Plan& plan = plans_[group.group];
  plan.rows = static_cast<int32_t>(rows);
  plan.top_k = work.top_k;
  if (group.gather) {
    const absl::Status enqueued = stream_->ResolveGather(args, GatherArgs(group.group, spec_.groups[group.group]));
    if (!enqueued.ok()) return enqueued;
  } else {
    if (absl::Status enqueued = stream_->Resolve(args); !enqueued.ok()) return enqueued;
    plan.pending = spec_.groups[group.group];
  }
  const auto download = [this](void* target, const void* source, int64_t bytes) {
    return target == nullptr ? absl::OkStatus() : stream_->Copy(target, source, static_cast<size_t>(bytes));
  };
  absl::Status status = download(group.hot_rows, hot_rows, entries * 4);
  status.Update(download(group.counts, args.counts, rows * core::kOutcomeCount * 4));
  status.Update(download(group.miss_pool_rows, args.miss_pool_rows, entries * 4));
  status.Update(download(group.miss_hot_rows, args.miss_hot_rows, entries * 4));
  status.Update(download(group.miss_counts, args.miss_counts, rows * 4));
  return status;
}

absl::Status SessionStorage::CopyTotals(core::DeviceTotals* totals) {
  absl::Status status = Upload(&totals->evictions, Counter(kernels::kEvictions), 8);
  status.Update(Upload(&totals->lru_repairs, Counter(kernels::kLruRepairs), 8));
  status.Update(Upload(&totals->gathered_bytes, Counter(kGatheredBytes), 8));
  return status;
}

absl::Status SessionStorage::Step(core::StepWork& work) {
  const int64_t rows = static_cast<int64_t>(work.rows.size());
  work.scratch.assign(kStepArguments * rows, -1);
  const auto argument = [&](StepArgument a) { return work.scratch.data() + a * rows; };
  int64_t given = 0;
  int64_t commits = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const core::StepRowWork& row = work.rows[i];
    argument(kStateRows)[i] = row.state_row;
    argument(kLengths)[i] = static_cast<int32_t>(row.length);
    if (row.state_row < 0) continue;
    const int32_t newest = row.state_row * memory_.arena.region_rows + memory_.arena.newest_row + row.newest_index;
    if (!tables_.empty()) {
      const int64_t position = row.length - 1;
      const int32_t block = tables_[row.state_row][position / pool_spec_.block_rows];
      argument(kNewestPoolRows)[i] =
          static_cast<int32_t>(block * pool_spec_.block_rows + position % pool_spec_.block_rows);
    }
    if (row.commit) {
      argument(kCommitHotRows)[commits] = newest;
      argument(kCommitPoolRows)[commits] = static_cast<int32_t>(row.commit_pool_row);
      ++commits;
    }
    if (row.newest_bytes != nullptr) {
      argument(kNewestSource)[given] = 0;
      argument(kNewestHotRows)[given] = newest;
      ++given;
    }
    if (!row.resident_pages.empty() || resident_pages_[row.state_row] > 0) {
      const bool sibling = i > 0 && work.rows[i - 1].state_row == row.state_row;
      if (!sibling) {
        if (absl::Status status = UploadResident(row); !status.ok()) return status;
      }
    }
  }
  stream_->Timestamp(Counter(kBeginNs));
  step_rows_ = rows;
  if (absl::Status status = Upload(InState<int32_t>(memory_.step_arguments), work.scratch.data(),
                                   static_cast<int64_t>(work.scratch.size()) * 4);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = EnqueueNewest(work); !status.ok()) return status;
  for (const core::StepGroupWork& group : work.groups) {
    if (absl::Status status = EnqueueGroup(work, group); !status.ok()) return status;
  }
  stream_->Timestamp(Counter(kEndNs));
  absl::Status status = CopyTotals(&work.totals);
  status.Update(Upload(&work.begin_ns, Counter(kBeginNs), 8));
  status.Update(Upload(&work.end_ns, Counter(kEndNs), 8));
  return status;
}

absl::Status SessionStorage::FlushPlan(int32_t group) {
  std::vector<int32_t> pending;
  pending.swap(plans_[group].pending);
  return pending.empty() ? absl::OkStatus() : stream_->Gather(GatherArgs(group, pending));
}

absl::Status SessionStorage::FlushPlans() {
  absl::Status status;
  for (size_t group = 0; group < plans_.size(); ++group) status.Update(FlushPlan(static_cast<int32_t>(group)));
  return status;
}

absl::Status SessionStorage::Gather(int32_t group, absl::Span<const int32_t> layers, core::DeviceTotals* totals) {
  Plan& plan = plans_[group];
  if (plan.rows == 0) return absl::FailedPreconditionError("group: no step or resolve has made a plan for it");
  // Layers that were carried out before need nothing: their rows are in place.
  std::vector<int32_t> wanted;
  for (const int32_t layer : layers) {
    const auto it = std::find(plan.pending.begin(), plan.pending.end(), layer);
    if (it == plan.pending.end()) continue;
    wanted.push_back(layer);
    plan.pending.erase(it);
  }
  if (!wanted.empty()) {
    if (absl::Status status = stream_->Gather(GatherArgs(group, wanted)); !status.ok()) return status;
  }
  return CopyTotals(totals);
}

}  // namespace stoker::engine
