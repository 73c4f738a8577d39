// The server plane of a session as operations of the backend.
#include <limits>
#include <utility>

#include "server/engine/session_storage.h"

namespace stoker::engine {

static_assert(sizeof(core::SequenceWord) == sizeof(kernels::SequenceWord) &&
              alignof(core::SequenceWord) == alignof(kernels::SequenceWord));

absl::Status SessionStorage::UploadEntry(int32_t state_row, uint64_t sequence_id) {
  auto* const entry = InState<kernels::StateRowEntry>(memory_.entries) + state_row;
  if (sequence_id != 0) {
    const uint32_t index = core::SequenceId{sequence_id}.index();
    const int32_t word = index < words_.size() ? static_cast<int32_t>(index) : -1;
    if (absl::Status status = stream_->Write(&entry->word, word); !status.ok()) return status;
  }
  return stream_->Write(&entry->sequence_id, sequence_id);
}

absl::Status SessionStorage::Suspend(absl::Span<const int32_t> state_rows) {
  int32_t before = -1;
  for (const int32_t row : state_rows) {
    if (row == before) continue;
    before = row;
    if (absl::Status status = UploadEntry(row, 0); !status.ok()) return status;
  }
  if (plane_ == nullptr || plane_->over()) return absl::OkStatus();
  kernels::AwaitQuietArgs args;
  args.state = InState<kernels::PlaneState>(memory_.plane_state);
  return stream_->AwaitQuiet(args);
}

absl::Status SessionStorage::Resume(absl::Span<const int32_t> state_rows) {
  int32_t before = -1;
  for (const int32_t row : state_rows) {
    if (row == before) continue;
    before = row;
    if (absl::Status status = UploadEntry(row, sequence_ids_[row]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

kernels::BatchArgs SessionStorage::BatchArgsOf(uint64_t session, int32_t top_k) const {
  const auto plan = [this](PlanArray array) {
    return InState<int32_t>(memory_.batch_plan) + array * spec_.max_batch_rows;
  };
  kernels::BatchArgs args;
  args.state = InState<kernels::PlaneState>(memory_.plane_state);
  args.mail.rows = InArena<int32_t>(memory_.batch_rows);
  args.mail.sequence_ids = InArena<uint64_t>(memory_.sequence_ids);
  args.mail.state_rows = InArena<int32_t>(memory_.state_rows);
  args.mail.lengths = InArena<int32_t>(memory_.lengths);
  args.mail.commits = InArena<int32_t>(memory_.commits);
  args.mail.statuses = InArena<int32_t>(memory_.statuses);
  args.plan.rows = InState<int32_t>(memory_.plan_rows);
  args.plan.state_rows = plan(kPlanStateRows);
  args.plan.lengths = plan(kPlanLengths);
  args.plan.newest_pool_rows = plan(kPlanNewestPoolRows);
  args.plan.newest_hot_rows = plan(kPlanNewestHotRows);
  args.plan.words = plan(kPlanWords);
  args.plan.commit_hot_rows = plan(kPlanCommitHotRows);
  args.plan.commit_pool_rows = plan(kPlanCommitPoolRows);
  args.plan.claims = InState<int32_t>(memory_.claims);
  args.max_rows = static_cast<int32_t>(spec_.max_batch_rows);
  args.top_k = top_k;
  args.hot_rows = static_cast<int32_t>(spec_.hot_rows);
  args.max_sequence_rows = spec_.max_sequence_rows;
  args.session = session;
  args.entries = InState<kernels::StateRowEntry>(memory_.entries);
  args.state_rows = static_cast<int32_t>(spec_.state_rows);
  args.words = reinterpret_cast<kernels::SequenceWord*>(words_.data());
  args.word_count = static_cast<int32_t>(words_.size());
  args.block_table = InState<int32_t>(memory_.block_table);
  args.block_table_stride = memory_.table_columns;
  args.block_table_columns = static_cast<int32_t>(memory_.table_columns);
  args.block_rows = static_cast<int32_t>(pool_spec_.block_rows);
  args.pool_rows = pool_.layout.rows;
  args.region_rows = memory_.arena.region_rows;
  args.newest_row = memory_.arena.newest_row;
  args.committed_rows = InState<uint64_t>(memory_.plane_counters) + kCommittedRows;
  args.ended = InArena<uint32_t>(memory_.ended);
  return args;
}

absl::Status SessionStorage::EnqueuePlaneStep(kernels::Stream& stream, const kernels::BatchArgs& batch,
                                              absl::Duration timeout, const uint32_t* abort,
                                              ArmedPlane::Slot* slot) const {
  uint64_t* const counters = InState<uint64_t>(memory_.plane_counters);
  const int64_t groups = static_cast<int64_t>(memory_.groups.size());
  absl::Status status;
  const auto await = [&](int64_t doorbell) {
    kernels::AwaitDoorbellArgs args;
    args.state = batch.state;
    args.request = InArena<uint64_t>(memory_.requests + doorbell * kDoorbellBytes);
    args.abort = abort;
    args.begins_step = doorbell == 0;
    args.limit_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(timeout));
    status.Update(stream.AwaitDoorbell(args));
  };
  const auto ring = [&](int64_t doorbell) {
    kernels::RingDoorbellArgs args;
    args.state = batch.state;
    args.done = InArena<uint64_t>(memory_.dones + doorbell * kDoorbellBytes);
    status.Update(stream.RingDoorbell(args));
  };
  for (int64_t group = 0; group < groups; ++group) {
    await(group);
    if (group == 0) {
      stream.Timestamp(counters + kBeginNs);
      status.Update(stream.BeginBatch(batch));
    }
    const int32_t g = static_cast<int32_t>(group);
    kernels::ResolveArgs resolve = ResolveArgsOf(g, spec_.max_batch_rows, batch.top_k, spec_.max_top_k);
    resolve.real_rows = batch.plan.rows;
    resolve.lengths.data = batch.plan.lengths;
    resolve.state_rows.data = batch.plan.state_rows;
    if (spec_.index_space == core::IndexSpace::kPoolRow) resolve.newest_pool_rows = batch.plan.newest_pool_rows;
    resolve.stats = counters;
    kernels::GatherCompactArgs gather = GatherArgs(g, spec_.groups[group], batch.max_rows, batch.top_k);
    gather.gathered_bytes = counters + kGatheredBytes;
    status.Update(stream.ResolveGather(resolve, gather));
    status.Update(stream.Copy(InArena<int32_t>(memory_.groups[group].misses), resolve.miss_counts,
                              static_cast<size_t>(batch.max_rows) * 4));
    ring(group);
  }
  await(groups);
  status.Update(stream.PlanCommits(batch));
  kernels::TransferArgs commit;
  commit.src = hot();
  commit.dst = pool_;
  commit.src_row_limit = memory_.hot_total_rows;
  commit.dst_row_limit = pool_.layout.rows;
  commit.src_layers = commit.dst_layers = all_layers_.data();
  commit.layer_count = static_cast<int32_t>(all_layers_.size());
  commit.src_rows = batch.plan.commit_hot_rows;
  commit.dst_rows = batch.plan.commit_pool_rows;
  commit.count = batch.max_rows;
  status.Update(stream.Transfer(commit));
  status.Update(stream.EndBatch(batch));
  stream.Timestamp(counters + kEndNs);
  ring(groups);
  // Behind the doorbell: the engine need not wait for them, and the next step does.
  status.Update(stream.Copy(&slot->state, batch.state, sizeof(kernels::PlaneState)));
  status.Update(stream.Copy(slot->counters, counters, sizeof(slot->counters)));
  return status;
}

absl::Status SessionStorage::Arm(core::PlaneSetup setup) {
  if (absl::Status status = FlushPlans(); !status.ok()) return status;
  if (plane_stream_ == nullptr) {
    absl::StatusOr<std::unique_ptr<kernels::Stream>> stream = backend_.CreateStream();
    if (!stream.ok()) return stream.status();
    plane_stream_ = *std::move(stream);
  }
  const int64_t doorbells = static_cast<int64_t>(memory_.groups.size()) + 1;
  const std::vector<uint64_t>* zeros =
      Keep(std::vector<uint64_t>(std::max<int64_t>(doorbells * kDoorbellBytes / 8, kCounters), 0));
  const std::vector<int32_t>* unclaimed =
      Keep(std::vector<int32_t>(spec_.state_rows, std::numeric_limits<int32_t>::max()));
  absl::Status status = Upload(InArena<char>(memory_.requests), zeros->data(), doorbells * kDoorbellBytes);
  status.Update(Upload(InArena<char>(memory_.dones), zeros->data(), doorbells * kDoorbellBytes));
  status.Update(Upload(InArena<char>(memory_.ended), zeros->data(), 4));
  status.Update(Upload(InState<char>(memory_.plane_state), zeros->data(), sizeof(kernels::PlaneState)));
  status.Update(Upload(InState<char>(memory_.plane_counters), zeros->data(), kCounters * 8));
  status.Update(Upload(InState<char>(memory_.claims), unclaimed->data(), spec_.state_rows * 4));
  if (!status.ok()) return status;
  const kernels::BatchArgs batch = BatchArgsOf(setup.session.value, setup.top_k);
  const absl::Duration timeout = setup.doorbell_timeout;
  absl::StatusOr<std::shared_ptr<ArmedPlane>> plane = ArmedPlane::Start(
      backend_, *plane_stream_, stream_->Record(),
      [this, batch, timeout](kernels::Stream& stream, const uint32_t* abort, ArmedPlane::Slot* slot) {
        return EnqueuePlaneStep(stream, batch, timeout, abort, slot);
      },
      std::move(setup));
  if (!plane.ok()) return plane.status();
  plane_ = *std::move(plane);
  return absl::OkStatus();
}

void SessionStorage::Disarm() {
  if (plane_ != nullptr) plane_->Disarm();
}

}  // namespace stoker::engine
