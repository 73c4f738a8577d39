// The calls that write rows, and the hot path among them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/check.h"
#include "server/core/pool_state.h"

namespace stoker::core {

absl::StatusOr<WritePlan> Pool::BeginWrite(SessionId session, SequenceId id, int64_t first, int64_t count) {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  Sequence* sequence;
  if (absl::Status status = s.FindWriter(session, id, &sequence); !status.ok()) return status;
  if (count < 1) return absl::InvalidArgumentError(absl::StrCat("row_count is ", count, "; it must be at least 1"));
  if (first < 0) return absl::InvalidArgumentError(absl::StrCat("first_row is ", first, "; it must be at least 0"));
  if (first > sequence->max_rows || count > sequence->max_rows - first) {
    return absl::InvalidArgumentError(absl::StrCat("rows ", first, " and ", count,
                                                   " from there on are beyond max_rows ", sequence->max_rows,
                                                   " of sequence_id ", id.value));
  }
  if (first > sequence->written_rows) {
    return absl::FailedPreconditionError(absl::StrCat("first_row is ", first, "; sequence_id ", id.value, " has ",
                                                      sequence->written_rows, " written rows"));
  }
  WritePlan plan;
  if (absl::Status status = s.Write(*sequence, first, count, &plan); !status.ok()) return status;
  s.SyncCounters();
  return plan;
}

void Pool::FinishWrite(SequenceId id, int64_t first, int64_t count) {
  State& s = *state_;
  std::vector<std::function<void()>> callbacks;
  {
    absl::MutexLock lock(&s.mutex);
    s.counters.stored_rows.fetch_add(count, std::memory_order_relaxed);
    Sequence* sequence = s.Find(id);
    // Rows that are not behind the stored ones belong to a write whose forerunner failed: still not stored.
    if (sequence != nullptr && first <= sequence->stored_rows) {
      // A writer that has gone leaves rows behind that its successor may be writing.
      const int64_t end = std::min(first + count, sequence->written_rows);
      sequence->stored_rows = std::max(sequence->stored_rows, end);
      if (sequence->held.size() < sequence->hashes.size()) s.Publish(*sequence);
      s.Tell(*sequence);
    }
    callbacks = s.TakeCallbacks();
  }
  for (const std::function<void()>& callback : callbacks) callback();
}

void Pool::BeginStep(SessionId session, absl::Span<const StepAccess> accesses, std::vector<StepGrant>* grants) {
  State& s = *state_;
  grants->resize(accesses.size());
  absl::MutexLock lock(&s.mutex);
  for (size_t i = 0; i < accesses.size(); ++i) {
    StepGrant& grant = (*grants)[i];
    // Rows of a sequence behind one that failed see rows that it was to bring.
    if (i > 0 && accesses[i].id == accesses[i - 1].id && !(*grants)[i - 1].status.ok()) {
      grant.commit_pool_row = -1;
      grant.plan.reset();
      grant.status = (*grants)[i - 1].status;
      continue;
    }
    s.Step(session, accesses[i], &grant);
  }
}

absl::StatusOr<std::vector<int32_t>> Pool::PoolRows(SessionId session, SequenceId id,
                                                    absl::Span<const int64_t> positions) {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  Sequence* sequence;
  if (absl::Status status = s.FindOpen(session, id, &sequence); !status.ok()) return status;
  const int64_t visible = sequence->VisibleRows(session);
  std::vector<int32_t> rows;
  rows.reserve(positions.size());
  for (const int64_t position : positions) {
    if (position < 0) {
      return absl::InvalidArgumentError(absl::StrCat("position is ", position, "; it must be at least 0"));
    }
    if (position >= visible) {
      return absl::FailedPreconditionError(
          absl::StrCat("position is ", position, "; sequence_id ", id.value, " has ", visible, " rows to read"));
    }
    rows.push_back(static_cast<int32_t>(s.PoolRow(*sequence, position)));
  }
  return rows;
}

absl::StatusOr<Pool::BlockTable> Pool::Table(SessionId session, SequenceId id) const {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  Sequence* sequence;
  if (absl::Status status = s.FindOpen(session, id, &sequence); !status.ok()) return status;
  return BlockTable{sequence->table, sequence->VisibleRows(session)};
}

void Pool::Reclaim(SequenceId id, absl::Span<const BlockRef> blocks) {
  if (blocks.empty()) return;
  State& s = *state_;
  std::vector<std::function<void()>> callbacks;
  {
    absl::MutexLock lock(&s.mutex);
    s.Reclaim(blocks);
    if (Sequence* sequence = s.sequences.Find(id); sequence != nullptr && --sequence->unfinished_copies == 0) {
      s.WakeAll(*sequence);
    }
    s.SyncCounters();
    callbacks = s.TakeCallbacks();
  }
  for (const std::function<void()>& callback : callbacks) callback();
}

void Pool::State::Reclaim(absl::Span<const BlockRef> blocks) {
  for (const BlockRef& block : blocks) {
    const auto found = replaced.find(block.index);
    STOKER_CHECK(found != replaced.end() && found->second.first == block.generation);
    if (--found->second.second == 0) replaced.erase(found);
    allocator.LetGo(block.index);
  }
}

absl::Status Pool::State::FindWriter(SessionId session, SequenceId id, Sequence** sequence) {
  if (absl::Status status = FindOpen(session, id, sequence); !status.ok()) return status;
  if ((*sequence)->writer == session) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("sequence_id ", id.value, " is written by session ",
                                                    (*sequence)->writer.value, ", not by session ", session.value));
}

absl::Status Pool::State::Write(Sequence& sequence, int64_t first, int64_t count, WritePlan* plan) {
  const int64_t end = first + count;
  if (first < sequence.sealed_rows) {
    if (absl::Status status = CopyOnWrite(sequence, first, count, plan); !status.ok()) return status;
  }
  if (first < sequence.written_rows) {
    plan->rewritten_first = first;
    plan->rewritten_count = std::min(end, sequence.written_rows) - first;
    if (first < sequence.prompt_rows && sequence.held.size() < sequence.hashes.size()) {
      StopExpecting(sequence);
      sequence.hashes.resize(sequence.held.size());
    }
  }
  if (!plan->updates.empty() || plan->rewritten_count > 0) {
    plan->openers.assign(sequence.sessions.begin(), sequence.sessions.end());
  }
  sequence.written_rows = std::max(sequence.written_rows, end);
  // One block at a time: a division for each of 131,072 rows takes longer than the rest of the call.
  plan->pool_rows.resize(count);
  int32_t* out = plan->pool_rows.data();
  for (int64_t position = first; position < end;) {
    const int64_t block_end = std::min(end, (position / spec.block_rows + 1) * spec.block_rows);
    int32_t row = static_cast<int32_t>(PoolRow(sequence, position));
    for (; position < block_end; ++position) *out++ = row++;
  }
  return absl::OkStatus();
}

absl::Status Pool::State::CopyOnWrite(Sequence& sequence, int64_t first, int64_t count, WritePlan* plan) {
  const int64_t first_column = first / spec.block_rows;
  const int64_t last_column = (std::min(first + count, sequence.sealed_rows) - 1) / spec.block_rows;
  std::vector<int32_t> columns;
  for (int64_t column = first_column; column <= last_column; ++column) {
    const int64_t row = std::max(first, column * spec.block_rows);
    if (MustCopy(sequence, column, row)) columns.push_back(static_cast<int32_t>(column));
  }
  if (columns.empty()) return absl::OkStatus();
  const int64_t needed = static_cast<int64_t>(columns.size());
  if (absl::Status status = CheckBlocks(needed, 0); !status.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("sequence_id ", sequence.id.value,
                                                     " is to write to blocks that others share: ", status.message()));
  }
  std::vector<int32_t> blocks;
  TakeBlocks(needed, sequence.table[columns[0]], &blocks);
  for (size_t i = 0; i < columns.size(); ++i) {
    const int32_t column = columns[i];
    int32_t& entry_of_table = sequence.table[column];
    const BlockRef old = allocator.ref(entry_of_table);
    const int64_t start = column * spec.block_rows;
    const int64_t rows = std::min(spec.block_rows, sequence.written_rows - start);
    plan->copies.push_back({old.index, blocks[i], static_cast<int32_t>(rows)});
    plan->updates.push_back({column, blocks[i]});
    // The sequence's hold on the old block passes to the plan.
    plan->replaced.push_back(old);
    auto& [generation, plans] = replaced[old.index];
    generation = old.generation;
    ++plans;
    entry_of_table = blocks[i];
    const size_t ordinal = start / spec.prefix_rows;
    if (ordinal < sequence.held.size() && sequence.held[ordinal] != PrefixIndex::kNone) {
      index.Release(sequence.held[ordinal]);
      sequence.held[ordinal] = PrefixIndex::kNone;
    }
  }
  ++sequence.unfinished_copies;
  counters.copied_blocks.fetch_add(needed, std::memory_order_relaxed);
  return absl::OkStatus();
}

void Pool::State::Publish(Sequence& sequence) {
  while (sequence.held.size() < sequence.hashes.size()) {
    const size_t i = sequence.held.size();
    const int64_t first = static_cast<int64_t>(i) * spec.prefix_rows;
    const int64_t end = PrefixEnd(static_cast<int64_t>(i), sequence.prompt_rows);
    if (end > sequence.stored_rows) return;
    const PrefixHash& hash = sequence.hashes[i];
    const int64_t first_column = first / spec.block_rows;
    const int32_t entry =
        index.Publish(hash, static_cast<int64_t>(i), end - first,
                      absl::MakeConstSpan(sequence.table).subspan(first_column, BlocksFor(end) - first_column));
    if (sequence.expected) STOKER_CHECK(index.Forget(hash, sequence.id));
    sequence.held.push_back(entry);
    if (entry != PrefixIndex::kNone) sequence.sealed_rows = std::max(sequence.sealed_rows, end);
    Wake(hash);
  }
}

void Pool::State::Step(SessionId session, const StepAccess& access, StepGrant* grant) {
  grant->commit_pool_row = -1;
  grant->plan.reset();
  Sequence* found;
  grant->status = access.commit ? FindWriter(session, access.id, &found) : FindOpen(session, access.id, &found);
  if (!grant->status.ok()) return;
  Sequence& sequence = *found;
  if (access.length < 1 || access.length > sequence.max_rows) {
    grant->status = absl::InvalidArgumentError(absl::StrCat("length is ", access.length, "; it must be 1 to max_rows (",
                                                            sequence.max_rows, ") of sequence_id ", access.id.value));
    return;
  }
  if (access.newest_count < 0) {
    grant->status =
        absl::InvalidArgumentError(absl::StrCat("newest_count is ", access.newest_count, "; it must be at least 0"));
    return;
  }
  const int64_t visible = sequence.VisibleRows(session);
  const int64_t position = access.length - 1;
  if (access.commit && position > sequence.written_rows) {
    grant->status = absl::FailedPreconditionError(
        absl::StrCat("length is ", access.length, "; a commit writes the row before it, and sequence_id ",
                     access.id.value, " has ", sequence.written_rows, " written rows"));
    return;
  }
  if (access.length - visible > access.newest_count && !access.commit) {
    grant->status = absl::FailedPreconditionError(
        absl::StrCat("length is ", access.length, "; sequence_id ", access.id.value, " has ", visible,
                     " rows to read, and newest_count ", access.newest_count, " may be missing"));
    return;
  }
  if (!access.commit) return;
  if (position == sequence.written_rows && !MustCopy(sequence, position / spec.block_rows, position)) {
    sequence.written_rows = access.length;
  } else {
    auto plan = std::make_unique<WritePlan>();
    if (grant->status = Write(sequence, position, 1, plan.get()); !grant->status.ok()) return;
    grant->plan = std::move(plan);
    SyncCounters();
  }
  grant->commit_pool_row = PoolRow(sequence, position);
}

}  // namespace stoker::core
