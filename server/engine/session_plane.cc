// The server plane of a session as operations of the backend.
#include <atomic>
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
  return AwaitQuiet(absl::ZeroDuration());
}

absl::Status SessionStorage::AwaitQuiet(absl::Duration limit) {
  if (!spec_.direct && (plane_ == nullptr || plane_->over())) return absl::OkStatus();
  kernels::AwaitQuietArgs args;
  args.state = InState<kernels::PlaneState>(memory_.plane_state);
  if (spec_.direct) args.abort = reinterpret_cast<const uint32_t*>(quiet_abort_->data());
  args.limit_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(limit));
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

kernels::PlaneMemory SessionStorage::PlaneMemoryOf(uint64_t session, int32_t top_k) const {
  const auto plan = [this](PlanArray array) {
    return InState<int32_t>(memory_.batch_plan) + array * spec_.max_batch_rows;
  };
  kernels::PlaneMemory plane;
  kernels::BatchArgs& batch = plane.batch;
  batch.state = InState<kernels::PlaneState>(memory_.plane_state);
  batch.mail.rows = InArena<int32_t>(memory_.batch_rows);
  batch.mail.sequence_ids = InArena<uint64_t>(memory_.sequence_ids);
  batch.mail.state_rows = InArena<int32_t>(memory_.state_rows);
  batch.mail.lengths = InArena<int32_t>(memory_.lengths);
  batch.mail.commits = InArena<int32_t>(memory_.commits);
  batch.mail.statuses = InArena<int32_t>(memory_.statuses);
  batch.plan.rows = InState<int32_t>(memory_.plan_rows);
  batch.plan.state_rows = plan(kPlanStateRows);
  batch.plan.lengths = plan(kPlanLengths);
  batch.plan.newest_pool_rows = plan(kPlanNewestPoolRows);
  batch.plan.newest_hot_rows = plan(kPlanNewestHotRows);
  batch.plan.words = plan(kPlanWords);
  batch.plan.commit_hot_rows = plan(kPlanCommitHotRows);
  batch.plan.commit_pool_rows = plan(kPlanCommitPoolRows);
  batch.plan.claims = InState<int32_t>(memory_.claims);
  batch.max_rows = static_cast<int32_t>(spec_.max_batch_rows);
  batch.top_k = top_k;
  batch.hot_rows = static_cast<int32_t>(spec_.hot_rows);
  batch.max_sequence_rows = spec_.max_sequence_rows;
  batch.session = session;
  batch.entries = InState<kernels::StateRowEntry>(memory_.entries);
  batch.state_rows = static_cast<int32_t>(spec_.state_rows);
  batch.words = reinterpret_cast<kernels::SequenceWord*>(words_.data());
  batch.word_count = static_cast<int32_t>(words_.size());
  batch.block_table = InState<int32_t>(memory_.block_table);
  batch.block_table_stride = memory_.table_columns;
  batch.block_table_columns = static_cast<int32_t>(memory_.table_columns);
  batch.block_rows = static_cast<int32_t>(pool_spec_.block_rows);
  batch.pool_rows = pool_.layout.rows;
  batch.region_rows = memory_.arena.region_rows;
  batch.newest_row = memory_.arena.newest_row;
  plane.counters = InState<uint64_t>(memory_.plane_counters);
  batch.committed_rows = plane.counters + kernels::kPlaneCommittedRows;
  batch.ended = InArena<uint32_t>(memory_.ended);
  batch.one_row = spec_.index_space == core::IndexSpace::kPoolRow;
  plane.index_space = index_space();
  if (spec_.index_space == core::IndexSpace::kPoolRow) {
    plane.allowed_blocks = InState<uint64_t>(memory_.allowed_blocks);
    plane.allowed_stride = memory_.allowed_words;
  }
  plane.mailbox_stride = spec_.max_top_k;
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const SessionMemory::Group& memory = memory_.groups[g];
    plane.groups.push_back({.layers = spec_.groups[g],
                            .indices = InArena<int32_t>(memory.indices),
                            .hot_rows = InArena<int32_t>(memory.hot_rows),
                            .misses = InArena<int32_t>(memory.misses),
                            .residency = ResidencyOf(static_cast<int32_t>(g)),
                            .miss_pool_rows = InState<int32_t>(memory.miss_pool_rows),
                            .miss_hot_rows = InState<int32_t>(memory.miss_hot_rows),
                            .miss_counts = InState<int32_t>(memory.miss_counts)});
  }
  plane.layers = all_layers_;
  plane.pool = pool_;
  plane.hot = hot();
  plane.limits = copies_.step;
  return plane;
}

absl::Status SessionStorage::EnqueuePlaneStep(kernels::Stream& stream, const kernels::PlaneStep& step,
                                              absl::Duration timeout, const uint32_t* abort,
                                              kernels::PlaneResult* result) const {
  kernels::PlaneState* const state = step.memory().batch.state;
  const int64_t groups = static_cast<int64_t>(memory_.groups.size());
  absl::Status status;
  const auto await = [&](int64_t doorbell) {
    kernels::AwaitDoorbellArgs args;
    args.state = state;
    args.request = InArena<uint64_t>(memory_.requests + doorbell * kDoorbellBytes);
    args.abort = abort;
    args.begins_step = doorbell == 0;
    args.limit_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(timeout));
    status.Update(stream.AwaitDoorbell(args));
  };
  const auto ring = [&](int64_t doorbell) {
    kernels::RingDoorbellArgs args;
    args.state = state;
    args.done = InArena<uint64_t>(memory_.dones + doorbell * kDoorbellBytes);
    return args;
  };
  for (int64_t group = 0; group < groups; ++group) {
    await(group);
    if (group == 0) status.Update(step.Begin(stream));
    const kernels::RingDoorbellArgs rung = ring(group);
    status.Update(step.Group(stream, static_cast<int32_t>(group), &rung));
  }
  await(groups);
  status.Update(step.Commit(stream));
  status.Update(stream.RingDoorbell(ring(groups)));
  // Behind the doorbell: the engine need not wait for it, and the next step does.
  status.Update(step.Report(stream, result));
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
      Keep(std::vector<uint64_t>(std::max<int64_t>(doorbells * kDoorbellBytes / 8, kernels::kPlaneCounters), 0));
  absl::Status status = Upload(InArena<char>(memory_.requests), zeros->data(), doorbells * kDoorbellBytes);
  status.Update(Upload(InArena<char>(memory_.dones), zeros->data(), doorbells * kDoorbellBytes));
  status.Update(Upload(InArena<char>(memory_.ended), zeros->data(), 4));
  status.Update(Upload(InState<char>(memory_.plane_state), zeros->data(), sizeof(kernels::PlaneState)));
  status.Update(Upload(InState<char>(memory_.plane_counters), zeros->data(), kernels::kPlaneCounters * 8));
  if (!status.ok()) return status;
  auto step = std::make_shared<const kernels::PlaneStep>(PlaneMemoryOf(setup.session.value, setup.top_k));
  const absl::Duration timeout = setup.doorbell_timeout;
  absl::StatusOr<std::shared_ptr<ArmedPlane>> plane = ArmedPlane::Start(
      backend_, *plane_stream_, stream_->Record(),
      [this, step, timeout](kernels::Stream& stream, const uint32_t* abort, kernels::PlaneResult* result) {
        return EnqueuePlaneStep(stream, *step, timeout, abort, result);
      },
      std::move(setup));
  if (!plane.ok()) return plane.status();
  plane_ = *std::move(plane);
  return absl::OkStatus();
}

core::PlaneSample SessionStorage::DirectSample() const {
  // The engine's kernels may be writing it: each word is whole, and what does not fit together is left out by core.
  kernels::PlaneResult result;
  const auto* from = reinterpret_cast<const uint64_t*>(direct_.result);
  auto* to = reinterpret_cast<uint64_t*>(&result);
  static_assert(sizeof(result) % sizeof(uint64_t) == 0);
  for (size_t i = 0; i < sizeof(result) / sizeof(uint64_t); ++i) {
    to[i] = std::atomic_ref<uint64_t>(const_cast<uint64_t&>(from[i])).load(std::memory_order_relaxed);
  }
  return SampleOf(result);
}

absl::Status SessionStorage::EndDirect(bool engine_gone, absl::Duration limit) {
  for (int64_t row = 0; row < spec_.state_rows; ++row) {
    if (sequence_ids_[row] == 0) continue;
    if (absl::Status status = UploadEntry(static_cast<int32_t>(row), 0); !status.ok()) return status;
  }
  if (engine_gone) {
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(quiet_abort_->data())).store(1, std::memory_order_release);
  }
  return AwaitQuiet(limit);
}

void SessionStorage::Disarm() {
  if (plane_ != nullptr) plane_->Disarm();
}

}  // namespace stoker::engine
