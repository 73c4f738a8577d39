// What planes know of sequences, and what they tell: Pool::State's side of SequenceWord.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/core/check.h"
#include "server/core/pool_state.h"

namespace stoker::core {

int64_t Pool::MaxSequences(const PoolSpec& spec) {
  return std::clamp<int64_t>(8 * spec.blocks, int64_t{1} << 12, int64_t{1} << 18);
}

void Pool::UseWords(absl::Span<SequenceWord> words) {
  STOKER_CHECK(words.empty() || static_cast<int64_t>(words.size()) == MaxSequences(spec_));
  STOKER_CHECK(counters_.sequences.load() == 0);
  state_->words = words;
}

Sequence& Pool::State::Create(std::string_view key) {
  Sequence& sequence = sequences.Create(key);
  if (sequence.id.index() < words.size()) sequence.word = &words[sequence.id.index()];
  return sequence;
}

absl::Status Pool::State::CheckSequences() const {
  const int64_t most = MaxSequences(spec);
  if (sequences.size() < most) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("sequences: ", sequences.size(), " of pool ", spec.name, " are open or retained, limit ", most));
}

Sequence* Pool::State::Find(SequenceId id) {
  Sequence* const sequence = sequences.Find(id);
  if (sequence != nullptr) TakeIn(*sequence);
  return sequence;
}

absl::Status Pool::State::FindOpen(SessionId session, SequenceId id, Sequence** sequence) {
  absl::Status status = sequences.FindOpen(session, id, sequence);
  if (status.ok()) TakeIn(**sequence);
  return status;
}

void Pool::State::TakeIn(Sequence& sequence) {
  if (sequence.word == nullptr) return;
  const int64_t stored =
      std::min<int64_t>(sequence.word->stored_rows.load(std::memory_order_acquire), sequence.max_rows);
  if (stored <= sequence.stored_rows) return;
  counters.stored_rows.fetch_add(static_cast<uint64_t>(stored - sequence.stored_rows), std::memory_order_relaxed);
  sequence.stored_rows = stored;
  sequence.written_rows = std::max(sequence.written_rows, stored);
  if (sequence.held.size() < sequence.hashes.size()) Publish(sequence);
}

void Pool::State::Tell(Sequence& sequence, bool anew) {
  if (sequence.word == nullptr) return;
  sequence.word->writer.store(sequence.writer.value, std::memory_order_relaxed);
  sequence.word->max_rows.store(static_cast<int32_t>(sequence.max_rows), std::memory_order_relaxed);
  const int32_t stored = static_cast<int32_t>(sequence.VisibleRows(SessionId{}));
  std::atomic<int32_t>& told = sequence.word->stored_rows;
  int32_t present = told.load(std::memory_order_relaxed);
  // A plane may raise it at the same time.
  while ((anew || present < stored) && !told.compare_exchange_weak(present, stored, std::memory_order_release)) {
  }
}

}  // namespace stoker::core
