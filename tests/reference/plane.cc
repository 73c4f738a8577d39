// The batch of a plane, by the contract of kernels/plane.h: rows become lists by state row, and what is said of a row
// is asked of it line by line.
#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "tests/reference/reference.h"

namespace stoker::reference {
namespace {

using kernels::BatchArgs;
using kernels::BatchStatus;

bool Ended(const BatchArgs& args) { return args.state->outcome != 0; }

void SetStatus(const BatchArgs& args, int64_t i, BatchStatus status) {
  args.mail.statuses[i] = static_cast<int32_t>(status);
}

void Pad(const BatchArgs& args, int64_t i) {
  args.plan.state_rows[i] = -1;
  args.plan.lengths[i] = 0;
  args.plan.newest_pool_rows[i] = -1;
  args.plan.newest_hot_rows[i] = -1;
  args.plan.words[i] = -1;
}

bool IsPadding(const BatchArgs& args, int64_t i) {
  return args.mail.state_rows[i] < 0 || args.mail.sequence_ids[i] == 0;
}

bool IsKnown(const BatchArgs& args, int64_t i) {
  const int64_t state_row = args.mail.state_rows[i];
  if (state_row >= args.state_rows) return false;
  const kernels::StateRowEntry& entry = args.entries[state_row];
  return entry.sequence_id == args.mail.sequence_ids[i] && entry.word >= 0 && entry.word < args.word_count;
}

int64_t PoolRow(const BatchArgs& args, int64_t state_row, int64_t position) {
  const int64_t column = position / args.block_rows;
  if (column >= args.block_table_columns) return -1;
  const int64_t block = args.block_table[state_row * args.block_table_stride + column];
  const int64_t row = block * args.block_rows + position % args.block_rows;
  return block < 0 || row >= args.pool_rows ? -1 : row;
}

// Of row k of a sequence's batch rows, which are side by side.
BatchStatus StatusOf(const BatchArgs& args, const std::vector<int64_t>& sequence, size_t k) {
  const int64_t state_row = args.mail.state_rows[sequence[k]];
  const int64_t length = args.mail.lengths[sequence[k]];
  const int64_t first_length = args.mail.lengths[sequence[0]];
  const auto count = static_cast<int64_t>(sequence.size());
  const kernels::SequenceWord& word = args.words[args.entries[state_row].word];
  if (count * args.top_k > args.hot_rows) return BatchStatus::kTooManyRows;
  if (count > args.block_rows) return BatchStatus::kTooManyRows;
  if (args.one_row && count != 1) return BatchStatus::kTooManyRows;
  if (length < 1) return BatchStatus::kBadLength;
  if (length > word.max_rows) return BatchStatus::kBadLength;
  if (length > args.max_sequence_rows) return BatchStatus::kBadLength;
  if (k > 0 && length < args.mail.lengths[sequence[k - 1]]) return BatchStatus::kBadLength;
  if (length >= first_length + count) return BatchStatus::kBadLength;
  if (word.stored_rows < first_length - 1) return BatchStatus::kNotStored;
  if (PoolRow(args, state_row, length - 1) < 0) return BatchStatus::kNoBlock;
  return BatchStatus::kOk;
}

void Take(const BatchArgs& args, int64_t i, int64_t first_length) {
  const int64_t state_row = args.mail.state_rows[i];
  const int64_t length = args.mail.lengths[i];
  args.plan.state_rows[i] = static_cast<int32_t>(state_row);
  args.plan.lengths[i] = static_cast<int32_t>(length);
  args.plan.newest_pool_rows[i] = static_cast<int32_t>(PoolRow(args, state_row, length - 1));
  args.plan.newest_hot_rows[i] =
      static_cast<int32_t>(state_row * args.region_rows + args.newest_row + (length - first_length));
  args.plan.words[i] = args.entries[state_row].word;
}

// The rows that BeginBatch took, by sequence.
std::map<int32_t, std::vector<int64_t>> TakenRows(const BatchArgs& args) {
  std::map<int32_t, std::vector<int64_t>> taken;
  for (int64_t i = 0; i < args.max_rows; ++i) {
    if (args.plan.state_rows[i] >= 0) taken[args.plan.state_rows[i]].push_back(i);
  }
  return taken;
}

}  // namespace

void BeginBatch(const BatchArgs& args) {
  if (Ended(args)) {
    *args.plan.rows = 0;
    return;
  }
  if (args.raises_step) args.state->step += 1;
  args.state->accepted = args.state->step;
  for (int64_t i = 0; i < args.max_rows; ++i) Pad(args, i);
  const int32_t rows = *args.mail.rows;
  if (rows < 0 || rows > args.max_rows) {
    *args.plan.rows = 0;
    for (int64_t i = 0; i < args.max_rows; ++i) SetStatus(args, i, BatchStatus::kBadCount);
    return;
  }
  *args.plan.rows = rows;
  std::map<int32_t, std::vector<int64_t>> named;
  for (int64_t i = 0; i < rows; ++i) {
    if (IsPadding(args, i)) {
      SetStatus(args, i, BatchStatus::kOk);
    } else if (!IsKnown(args, i)) {
      SetStatus(args, i, BatchStatus::kUnknownSequence);
    } else {
      named[args.mail.state_rows[i]].push_back(i);
    }
  }
  for (auto& [state_row, sequence] : named) {
    size_t adjacent = 1;
    while (adjacent < sequence.size() && sequence[adjacent] == sequence[adjacent - 1] + 1) ++adjacent;
    for (size_t k = adjacent; k < sequence.size(); ++k) SetStatus(args, sequence[k], BatchStatus::kNotAdjacent);
    sequence.resize(adjacent);
    bool failed = false;
    for (size_t k = 0; k < sequence.size(); ++k) {
      BatchStatus status = StatusOf(args, sequence, k);
      if (status == BatchStatus::kOk && failed) status = BatchStatus::kEarlierRow;
      if (status == BatchStatus::kOk) Take(args, sequence[k], args.mail.lengths[sequence[0]]);
      if (status != BatchStatus::kOk) failed = true;
      SetStatus(args, sequence[k], status);
    }
  }
}

void PlanCommits(const BatchArgs& args) {
  for (int64_t i = 0; i < args.max_rows; ++i) args.plan.commit_hot_rows[i] = args.plan.commit_pool_rows[i] = -1;
  if (Ended(args)) return;
  for (const auto& [state_row, sequence] : TakenRows(args)) {
    const kernels::SequenceWord& word = args.words[args.plan.words[sequence[0]]];
    int64_t planned = 0;
    bool failed = false;
    for (const int64_t i : sequence) {
      if (args.mail.commits[i] == 0) continue;
      if (word.writer != args.session) {
        SetStatus(args, i, BatchStatus::kNotWriter);
      } else if (failed || args.plan.lengths[i] - 1 != word.stored_rows + planned) {
        SetStatus(args, i, BatchStatus::kNotAppended);
        failed = true;
      } else {
        args.plan.commit_hot_rows[i] = args.plan.newest_hot_rows[i];
        args.plan.commit_pool_rows[i] = args.plan.newest_pool_rows[i];
        ++planned;
      }
    }
  }
}

void EndBatch(const BatchArgs& args) {
  if (Ended(args)) {
    if (args.ended != nullptr) *args.ended = args.state->outcome;
  } else {
    for (const auto& [state_row, sequence] : TakenRows(args)) {
      kernels::SequenceWord& word = args.words[args.plan.words[sequence[0]]];
      for (const int64_t i : sequence) {
        if (args.plan.commit_hot_rows[i] < 0 || args.plan.lengths[i] <= word.stored_rows) continue;
        if (args.committed_rows != nullptr) *args.committed_rows += args.plan.lengths[i] - word.stored_rows;
        word.stored_rows = args.plan.lengths[i];
      }
    }
  }
  args.state->finished = args.state->accepted;
}

}  // namespace stoker::reference
