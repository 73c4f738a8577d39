// The batch of a plane on the CPU. What the engine writes is read once and checked before it is followed, and so are
// the daemon's entries and tables; the plan, which BeginBatch has checked, is followed as it is.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/plane.h"

namespace stoker::kernels::cpu {
namespace {

constexpr int32_t kNone = -1;

bool Ended(const BatchArgs& args) {
  return Load(&args.state->outcome) != static_cast<uint32_t>(PlaneOutcome::kRunning);
}

// What is known of a batch row.
struct BatchRow {
  BatchStatus status = BatchStatus::kOk;
  int32_t state_row = kNone;  // -1: padding, or not the sequence's
  int32_t length = 0;
  int32_t word = kNone;
  int32_t pool_row = kNone;  // of the newest row; -1: none
  int32_t newest_index = 0;
  bool taken = false;
};

void WriteStatus(const BatchArgs& args, int32_t i, BatchStatus status) {
  Store(args.mail.statuses + i, static_cast<int32_t>(status));
}

// Pool row of a position that is not negative, or -1.
int32_t PoolRowOf(const BatchArgs& args, int32_t state_row, int32_t position) {
  const int32_t column = position / args.block_rows;
  if (column >= args.block_table_columns) return kNone;
  const int64_t block = Load(args.block_table + state_row * args.block_table_stride + column);
  const int64_t row = block * args.block_rows + position % args.block_rows;
  return block >= 0 && row < args.pool_rows ? static_cast<int32_t>(row) : kNone;
}

BatchRow ReadRow(const BatchArgs& args, int32_t i) {
  BatchRow row;
  const uint64_t sequence_id = Load(args.mail.sequence_ids + i);
  const int32_t state_row = Load(args.mail.state_rows + i);
  const int32_t length = Load(args.mail.lengths + i);
  if (state_row < 0 || sequence_id == 0) return row;
  row.status = BatchStatus::kUnknownSequence;
  if (state_row >= args.state_rows) return row;
  // First: what else is known of the sequence was written before.
  if (LoadAcquire(&args.entries[state_row].sequence_id) != sequence_id) return row;
  const int32_t word = Load(&args.entries[state_row].word);
  if (word < 0 || word >= args.word_count) return row;
  row.status = BatchStatus::kOk;
  row.state_row = state_row;
  row.length = length;
  row.word = word;
  if (length >= 1) row.pool_row = PoolRowOf(args, state_row, length - 1);
  return row;
}

// Takes the rows [first, end) of a sequence.
void TakeSequence(const BatchArgs& args, std::vector<BatchRow>& rows, int32_t first, int32_t end) {
  const SequenceWord& word = args.words[rows[first].word];
  const int64_t stored_rows = LoadAcquire(&word.stored_rows);
  const int64_t max_rows = std::min<int64_t>(Load(&word.max_rows), args.max_sequence_rows);
  const int64_t count = end - first;
  const int64_t first_length = rows[first].length;
  const bool too_many = count * args.top_k > args.hot_rows || count > args.block_rows || (args.one_row && count > 1);
  bool failed = false;
  for (int32_t i = first; i < end; ++i) {
    BatchRow& row = rows[i];
    const int64_t newest_index = row.length - first_length;
    if (too_many) {
      row.status = BatchStatus::kTooManyRows;
    } else if (row.length < 1 || row.length > max_rows || (i > first && row.length < rows[i - 1].length) ||
               newest_index >= count) {
      row.status = BatchStatus::kBadLength;
    } else if (stored_rows < first_length - 1) {
      row.status = BatchStatus::kNotStored;
    } else if (row.pool_row < 0) {
      row.status = BatchStatus::kNoBlock;
    } else if (failed) {
      row.status = BatchStatus::kEarlierRow;
    } else {
      row.taken = true;
      row.newest_index = static_cast<int32_t>(newest_index);
    }
    failed |= !row.taken;
  }
}

void TakeSequences(const BatchArgs& args, std::vector<BatchRow>& rows) {
  const auto count = static_cast<int32_t>(rows.size());
  for (int32_t first = 0; first < count;) {
    const int32_t state_row = rows[first].state_row;
    int32_t end = first + 1;
    if (state_row >= 0) {
      while (end < count && rows[end].state_row == state_row) ++end;
      if (Load(args.plan.claims + state_row) == kUnclaimed) {
        Store(args.plan.claims + state_row, first);
        TakeSequence(args, rows, first, end);
      } else {
        for (int32_t i = first; i < end; ++i) rows[i].status = BatchStatus::kNotAdjacent;
      }
    }
    first = end;
  }
  for (const BatchRow& row : rows) {
    if (row.state_row >= 0) Store(args.plan.claims + row.state_row, kUnclaimed);
  }
}

void WritePlan(const BatchArgs& args, int32_t i, const BatchRow& row) {
  const BatchPlan& plan = args.plan;
  Store(plan.state_rows + i, row.taken ? row.state_row : kNone);
  Store(plan.lengths + i, row.taken ? row.length : 0);
  Store(plan.newest_pool_rows + i, row.taken ? row.pool_row : kNone);
  Store(plan.newest_hot_rows + i,
        row.taken ? row.state_row * args.region_rows + args.newest_row + row.newest_index : kNone);
  Store(plan.words + i, row.taken ? row.word : kNone);
}

}  // namespace

void BeginBatch(const BatchArgs& args) {
  if (Ended(args)) {
    Store(args.plan.rows, 0);
    return;
  }
  PlaneState& state = *args.state;
  if (args.raises_step) Store(&state.step, Load(&state.step) + 1);
  // Either what is read from here on is what others wrote before their AwaitQuiet, or that one sees `accepted`.
  StoreInTurn(&state.accepted, Load(&state.step));

  thread_local std::vector<BatchRow> rows;
  rows.clear();
  int32_t count = Load(args.mail.rows);
  if (count < 0 || count > args.max_rows) {
    count = 0;
    for (int32_t i = 0; i < args.max_rows; ++i) WriteStatus(args, i, BatchStatus::kBadCount);
  }
  for (int32_t i = 0; i < count; ++i) rows.push_back(ReadRow(args, i));
  TakeSequences(args, rows);
  for (int32_t i = 0; i < count; ++i) {
    WriteStatus(args, i, rows[i].status);
    WritePlan(args, i, rows[i]);
  }
  for (int32_t i = count; i < args.max_rows; ++i) WritePlan(args, i, BatchRow());
  Store(args.plan.rows, count);
}

void PlanCommits(const BatchArgs& args) {
  const BatchPlan& plan = args.plan;
  const bool ended = Ended(args);
  int32_t sequence = kNone;  // state row of the row before
  int64_t next = 0;          // position that the next commit must have; -1: none is carried out any more
  BatchStatus failure = BatchStatus::kOk;
  for (int32_t i = 0; i < args.max_rows; ++i) {
    const int32_t state_row = ended ? kNone : Load(plan.state_rows + i);
    bool planned = false;
    if (state_row >= 0) {
      if (state_row != sequence) {
        const SequenceWord& word = args.words[Load(plan.words + i)];
        const bool writes = Load(&word.writer) == args.session;
        failure = writes ? BatchStatus::kNotAppended : BatchStatus::kNotWriter;
        next = writes ? int64_t{LoadAcquire(&word.stored_rows)} : kNone;
      }
      if (Load(args.mail.commits + i) != 0) {
        planned = Load(plan.lengths + i) - 1 == next;
        next = planned ? next + 1 : kNone;
        if (!planned) WriteStatus(args, i, failure);
      }
    }
    sequence = state_row;
    Store(plan.commit_hot_rows + i, planned ? Load(plan.newest_hot_rows + i) : kNone);
    Store(plan.commit_pool_rows + i, planned ? Load(plan.newest_pool_rows + i) : kNone);
  }
}

void EndBatch(const BatchArgs& args) {
  const BatchPlan& plan = args.plan;
  PlaneState& state = *args.state;
  if (!Ended(args)) {
    uint64_t committed = 0;
    for (int32_t i = 0; i < args.max_rows; ++i) {
      if (Load(plan.commit_hot_rows + i) < 0) continue;
      int32_t* const stored_rows = &args.words[Load(plan.words + i)].stored_rows;
      const int32_t before = Load(stored_rows);
      const int32_t length = Load(plan.lengths + i);
      if (length <= before) continue;
      StoreRelease(stored_rows, length);
      committed += static_cast<uint64_t>(length) - static_cast<uint64_t>(before);
    }
    Add(args.committed_rows, committed);
  } else if (args.ended != nullptr) {
    StoreRelease(args.ended, Load(&state.outcome));
  }
  StoreRelease(&state.finished, Load(&state.accepted));
}

}  // namespace stoker::kernels::cpu
