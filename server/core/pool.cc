#include "server/core/pool.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/check.h"
#include "server/core/pool_state.h"

namespace stoker::core {
namespace {

constexpr size_t kMaxKeyBytes = 255;
// An admission beyond this many for one hash does not wait: it stores the prefix once more.
constexpr size_t kMaxWaiting = 4096;

void Call(const std::vector<std::function<void()>>& callbacks) {
  for (const std::function<void()>& callback : callbacks) callback();
}

Admission Admitted(const Sequence& sequence, SessionId session) {
  Admission admission;
  admission.id = sequence.id;
  admission.matched_rows = sequence.matched_rows;
  admission.stored_rows = sequence.stored_rows;
  admission.max_rows = sequence.max_rows;
  admission.writer = sequence.writer == session;
  admission.table = sequence.table;
  return admission;
}

SequenceSnapshot TakeSnapshot(const Sequence& sequence) {
  SequenceSnapshot snapshot;
  snapshot.id = sequence.id;
  snapshot.key = sequence.key;
  snapshot.stored_rows = sequence.stored_rows;
  snapshot.written_rows = sequence.written_rows;
  snapshot.max_rows = sequence.max_rows;
  snapshot.blocks = sequence.blocks();
  snapshot.sessions.assign(sequence.sessions.begin(), sequence.sessions.end());
  snapshot.writer = sequence.writer;
  return snapshot;
}

absl::Status CheckMaxRows(int64_t max_rows, int64_t least, const char* least_name, int64_t most) {
  if (max_rows >= least && max_rows <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("max_rows is ", max_rows, "; it must be at least ", least_name, " (",
                                                 least, ") and at most the session's max_sequence_rows (", most, ")"));
}

absl::Status CheckHashes(const PoolSpec& spec, const AdmitParams& params) {
  const int64_t count = static_cast<int64_t>(params.hashes.size());
  const int64_t whole = params.prompt_rows / spec.prefix_rows;
  const int64_t all = (params.prompt_rows + spec.prefix_rows - 1) / spec.prefix_rows;
  if (count == 0 || count == whole || count == all) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("block_hashes has ", count, " hashes; prompt_rows ",
                                                 params.prompt_rows, " with prefix_rows ", spec.prefix_rows,
                                                 " takes 0, ", whole, " or ", all));
}

}  // namespace

Pool::Pool(PoolSpec spec, absl::Duration retention)
    : spec_(std::move(spec)), state_(std::make_unique<State>(spec_, &counters_, retention)) {}

Pool::~Pool() = default;

absl::StatusOr<Admission> Pool::Admit(SessionId session, const SequenceLimits& limits, AdmitParams params) {
  State& s = *state_;
  if (absl::Status status = s.CheckKey(params.key); !status.ok()) return status;
  if (params.prompt_rows < 1) {
    return absl::InvalidArgumentError(absl::StrCat("prompt_rows is ", params.prompt_rows, "; it must be at least 1"));
  }
  absl::Status status = CheckMaxRows(params.max_rows, params.prompt_rows, "prompt_rows", limits.max_rows);
  if (!status.ok()) return status;
  if (status = CheckHashes(spec_, params); !status.ok()) return status;

  absl::MutexLock lock(&s.mutex);
  if (Sequence* open = s.sequences.FindKey(params.key)) {
    s.TakeIn(*open);
    return s.Join(session, limits, params, *open);
  }
  if (status = s.CheckSequences(); !status.ok()) return status;

  const int64_t blocks = s.BlocksFor(params.max_rows);
  if (status = s.CheckQuota(session, limits, blocks); !status.ok()) return status;
  PrefixMatch match = s.Match(params);
  if (match.pending && params.on_prefix_ready) {
    std::vector<std::function<void()>>& waiting = s.waiting[params.hashes[match.entries.size()]];
    if (waiting.size() < kMaxWaiting) {
      waiting.push_back(std::move(params.on_prefix_ready));
      Admission admission;
      admission.waiting = true;
      return admission;
    }
  }
  status = s.CheckBlocks(blocks - static_cast<int64_t>(match.blocks.size()), s.CachedBlocks(match));
  if (!status.ok() && match.partial_entry != PrefixIndex::kNone) {
    // The copy takes a block beside its source. Without it the source itself can be evicted.
    AdmitParams whole = params;
    whole.hashes.resize(match.entries.size());
    match = s.Match(whole);
    status = s.CheckBlocks(blocks - static_cast<int64_t>(match.blocks.size()), s.CachedBlocks(match));
  }
  if (!status.ok()) {
    s.counters.rejected_admissions.fetch_add(1, std::memory_order_relaxed);
    return status;
  }

  // Everything that was matched is held before anything is evicted.
  for (const int32_t block : match.blocks) s.allocator.Hold(block);
  for (const int32_t entry : match.entries) s.index.Hold(entry);
  Sequence& sequence = s.Create(params.key);
  if (match.partial_entry != PrefixIndex::kNone) {
    s.index.Touch(match.partial_entry);
    s.BeginCopy(sequence, match.copy_source, match.rows - match.copy_rows, session);
  }
  sequence.prompt_rows = params.prompt_rows;
  sequence.admitted_max_rows = sequence.max_rows = params.max_rows;
  sequence.matched_rows = sequence.stored_rows = sequence.written_rows = sequence.sealed_rows = match.rows;
  sequence.table = std::move(match.blocks);
  sequence.hashes = std::move(params.hashes);
  sequence.held = std::move(match.entries);
  if (match.partial_entry != PrefixIndex::kNone) sequence.held.push_back(PrefixIndex::kNone);
  const int64_t shared = sequence.blocks();
  s.TakeBlocks(blocks - shared, shared > 0 ? sequence.table.back() : -1, &sequence.table);
  s.Expect(sequence);
  s.sequences.Open(sequence, session);
  s.Tell(sequence, /*anew=*/true);
  s.counters.prefix_hit_rows.fetch_add(match.rows, std::memory_order_relaxed);
  s.counters.prefix_miss_rows.fetch_add(params.prompt_rows - match.rows, std::memory_order_relaxed);
  s.SyncCounters();

  Admission admission = Admitted(sequence, session);
  if (match.partial_entry != PrefixIndex::kNone) {
    admission.copies.push_back({match.copy_source, sequence.table[shared], static_cast<int32_t>(match.copy_rows)});
  }
  return admission;
}

absl::StatusOr<WritePlan> Pool::Extend(SessionId session, const SequenceLimits& limits, SequenceId id,
                                       int64_t max_rows) {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  Sequence* sequence;
  if (absl::Status status = s.FindOpen(session, id, &sequence); !status.ok()) return status;
  absl::Status status = CheckMaxRows(max_rows, sequence->max_rows, "the present max_rows", limits.max_rows);
  if (!status.ok()) return status;
  const int64_t present = sequence->blocks();
  const int64_t added = s.BlocksFor(max_rows) - present;
  if (status = s.CheckQuota(session, limits, added); !status.ok()) return status;
  if (status = s.CheckBlocks(added, 0); !status.ok()) return status;

  WritePlan plan;
  sequence->max_rows = max_rows;
  s.Tell(*sequence);
  if (added == 0) return plan;
  s.sequences.Grow(*sequence, added);
  s.TakeBlocks(added, sequence->table.back(), &sequence->table);
  for (int64_t column = present; column < sequence->blocks(); ++column) {
    plan.updates.push_back({static_cast<int32_t>(column), sequence->table[column]});
  }
  plan.openers.assign(sequence->sessions.begin(), sequence->sessions.end());
  s.SyncCounters();
  return plan;
}

absl::StatusOr<Admission> Pool::Fork(SessionId session, const SequenceLimits& limits, SequenceId source, int64_t rows,
                                     int64_t max_rows, std::string_view key, std::function<void()> on_copied) {
  State& s = *state_;
  if (absl::Status status = s.CheckKey(key); !status.ok()) return status;
  if (rows < 1) return absl::InvalidArgumentError(absl::StrCat("rows is ", rows, "; it must be at least 1"));
  absl::Status status = CheckMaxRows(max_rows, rows, "rows", limits.max_rows);
  if (!status.ok()) return status;

  absl::MutexLock lock(&s.mutex);
  Sequence* from;
  if (status = s.FindOpen(session, source, &from); !status.ok()) return status;
  const int64_t stored = from->VisibleRows(SessionId{});
  if (rows > stored) {
    return absl::FailedPreconditionError(
        absl::StrCat("rows is ", rows, "; sequence_id ", source.value, " has ", stored, " stored rows"));
  }
  if (s.sequences.FindKey(key) != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence_key ", std::string(key), " is open already; a fork takes a new one"));
  }
  if (status = s.CheckSequences(); !status.ok()) return status;
  Admission admission;
  // Even of the writer: others could open the fork by its key.
  if (s.AwaitCopies(SessionId{}, *from, std::move(on_copied), &admission)) return admission;
  const int64_t blocks = s.BlocksFor(max_rows);
  const int64_t whole = rows / s.spec.block_rows;
  if (status = s.CheckQuota(session, limits, blocks); !status.ok()) return status;
  if (status = s.CheckBlocks(blocks - whole, 0); !status.ok()) {
    s.counters.rejected_admissions.fetch_add(1, std::memory_order_relaxed);
    return status;
  }

  Sequence& fork = s.Create(key);
  fork.prompt_rows = fork.stored_rows = fork.written_rows = fork.sealed_rows = rows;
  fork.matched_rows = rows;
  fork.admitted_max_rows = fork.max_rows = max_rows;
  from->sealed_rows = std::max(from->sealed_rows, rows);
  fork.table.assign(from->table.begin(), from->table.begin() + whole);
  for (const int32_t block : fork.table) s.allocator.Hold(block);
  for (size_t i = 0; i < from->held.size(); ++i) {
    if (s.BlocksFor(s.PrefixEnd(static_cast<int64_t>(i), from->prompt_rows)) > whole) break;
    fork.hashes.push_back(from->hashes[i]);
    fork.held.push_back(from->held[i]);
    if (from->held[i] != PrefixIndex::kNone) s.index.Hold(from->held[i]);
  }
  // Held before anything is evicted: it may be a block of the index.
  const int64_t copy_rows = rows % s.spec.block_rows;
  if (copy_rows > 0) s.BeginCopy(fork, from->table[whole], rows - copy_rows, session);
  s.TakeBlocks(blocks - whole, from->table[std::max<int64_t>(whole - 1, 0)], &fork.table);
  s.sequences.Open(fork, session);
  s.Tell(fork, /*anew=*/true);
  s.SyncCounters();
  admission = Admitted(fork, session);
  if (copy_rows > 0) {
    admission.copies.push_back({from->table[whole], fork.table[whole], static_cast<int32_t>(copy_rows)});
  }
  return admission;
}

void Pool::FinishCopies(SequenceId id) {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  if (Sequence* sequence = s.Find(id)) {
    s.EndCopy(*sequence);
    s.Tell(*sequence);
  }
  s.SyncCounters();
}

absl::Status Pool::Close(SessionId session, SequenceId id, bool retain, absl::Time now) {
  State& s = *state_;
  std::vector<std::function<void()>> callbacks;
  {
    absl::MutexLock lock(&s.mutex);
    Sequence* sequence;
    if (absl::Status status = s.FindOpen(session, id, &sequence); !status.ok()) return status;
    const bool gives_up_copy = sequence->copy.has_value() && sequence->copy->session == session;
    if (gives_up_copy) {
      sequence->stored_rows = std::min(sequence->stored_rows, sequence->copy->first_row);
      s.EndCopy(*sequence);
    }
    const bool was_writer = sequence->writer == session;
    s.sequences.Close(*sequence, session);
    if (was_writer) sequence->written_rows = sequence->stored_rows;
    s.Tell(*sequence, /*anew=*/gives_up_copy);
    if (sequence->sessions.empty()) {
      if (retain && !sequence->key.empty()) {
        s.StopExpecting(*sequence);
        s.sequences.Retain(*sequence, now + s.retention);
      } else {
        s.Free(*sequence);
      }
    }
    s.SyncCounters();
    callbacks = s.TakeCallbacks();
  }
  Call(callbacks);
  return absl::OkStatus();
}

int64_t Pool::Sweep(absl::Time now) {
  State& s = *state_;
  std::vector<std::function<void()>> callbacks;
  int64_t freed = 0;
  {
    absl::MutexLock lock(&s.mutex);
    // Somebody may be waiting for prompt rows that a plane has appended.
    if (!s.waiting.empty()) {
      for (const SequenceId id : s.sequences.ids()) s.Find(id);
    }
    while (Sequence* sequence = s.sequences.Expired(now)) {
      s.Free(*sequence);
      ++freed;
    }
    s.SyncCounters();
    callbacks = s.TakeCallbacks();
  }
  Call(callbacks);
  return freed;
}

int64_t Pool::ReservedBlocks(SessionId session) const {
  absl::MutexLock lock(&state_->mutex);
  return state_->sequences.ReservedBlocks(session);
}

absl::StatusOr<SequenceSnapshot> Pool::Snapshot(SequenceId id) const {
  absl::MutexLock lock(&state_->mutex);
  Sequence* sequence;
  if (absl::Status status = state_->sequences.Find(id, &sequence); !status.ok()) return status;
  state_->TakeIn(*sequence);
  return TakeSnapshot(*sequence);
}

std::vector<SequenceSnapshot> Pool::List(SequenceId after, int64_t limit, bool* more) const {
  absl::MutexLock lock(&state_->mutex);
  const std::set<SequenceId>& ids = state_->sequences.ids();
  std::vector<SequenceSnapshot> snapshots;
  auto id = ids.upper_bound(after);
  for (; id != ids.end() && static_cast<int64_t>(snapshots.size()) < limit; ++id) {
    snapshots.push_back(TakeSnapshot(*state_->Find(*id)));
  }
  *more = id != ids.end();
  return snapshots;
}

BlockCounts Pool::Counts() const {
  absl::MutexLock lock(&state_->mutex);
  return {state_->allocator.free(), state_->allocator.referenced(), state_->allocator.cached()};
}

absl::Status Pool::State::CheckKey(std::string_view key) const {
  if (key.size() <= kMaxKeyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_key has ", key.size(), " bytes; the limit is ", kMaxKeyBytes));
}

absl::Status Pool::State::CheckQuota(SessionId session, const SequenceLimits& limits, int64_t blocks) {
  const int64_t held = sequences.ReservedBlocks(session);
  if (held + blocks <= limits.max_reserved_blocks) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("max_reserved_blocks: ", blocks, " blocks needed, ", held,
                                                   " held by the session, limit ", limits.max_reserved_blocks));
}

absl::Status Pool::State::CheckBlocks(int64_t needed, int64_t matched_cached) {
  const int64_t evictable = allocator.cached() - matched_cached;
  if (needed <= allocator.free() + evictable) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("pool ", spec.name, ": ", needed, " blocks needed, ",
                                                   allocator.free(), " free, ", evictable, " evictable"));
}

void Pool::State::TakeBlocks(int64_t count, int32_t hint, std::vector<int32_t>* blocks) {
  if (count > allocator.free()) {
    const int64_t evicted = index.Evict(count - allocator.free());
    counters.evicted_blocks.fetch_add(evicted, std::memory_order_relaxed);
  }
  STOKER_CHECK(allocator.Allocate(count, hint, blocks));
}

PrefixMatch Pool::State::Match(const AdmitParams& params) {
  PrefixMatch match;
  match.entries.reserve(params.hashes.size());
  match.blocks.reserve(BlocksFor(params.max_rows));
  for (size_t i = 0; i < params.hashes.size(); ++i) {
    const int64_t ordinal = static_cast<int64_t>(i);
    const int64_t rows = PrefixEnd(ordinal, params.prompt_rows) - ordinal * spec.prefix_rows;
    const int32_t entry = index.Find(params.hashes[i]);
    if (entry == PrefixIndex::kNone) break;
    if (!index.Matches(entry, ordinal, rows)) {
      const PrefixIndex::Owners& owners = index.owners(entry);
      match.pending = !index.stored(entry) && std::any_of(owners.begin(), owners.end(), [&params](SequenceId owner) {
        return std::find(params.admitted_by_call.begin(), params.admitted_by_call.end(), owner) ==
               params.admitted_by_call.end();
      });
      break;
    }
    const absl::Span<const int32_t> blocks = index.blocks(entry);
    match.rows += rows;
    match.copy_rows = rows % spec.block_rows;
    if (match.copy_rows > 0) {
      match.partial_entry = entry;
      match.copy_source = blocks.back();
      match.blocks.insert(match.blocks.end(), blocks.begin(), blocks.end() - 1);
    } else {
      match.entries.push_back(entry);
      match.blocks.insert(match.blocks.end(), blocks.begin(), blocks.end());
    }
  }
  return match;
}

int64_t Pool::State::CachedBlocks(const PrefixMatch& match) {
  int64_t cached = 0;
  for (const int32_t block : match.blocks) cached += allocator.holders(block) == 0;
  if (match.partial_entry != PrefixIndex::kNone) cached += allocator.holders(match.copy_source) == 0;
  return cached;
}

bool Pool::State::AwaitCopies(SessionId session, Sequence& sequence, std::function<void()> on_copied,
                              Admission* admission) {
  // The writer's own work is behind its copies.
  if (on_copied == nullptr || sequence.unfinished_copies == 0 || sequence.writer == session) return false;
  sequence.waiting.push_back(std::move(on_copied));
  admission->waiting = true;
  return true;
}

absl::StatusOr<Admission> Pool::State::Join(SessionId session, const SequenceLimits& limits, AdmitParams& params,
                                            Sequence& sequence) {
  const bool same_max = params.max_rows == sequence.max_rows || params.max_rows == sequence.admitted_max_rows;
  if (params.prompt_rows != sequence.prompt_rows || !same_max) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence_key ", std::string(params.key), " is open with prompt_rows ", sequence.prompt_rows, " and max_rows ",
        sequence.max_rows, "; asked for were prompt_rows ", params.prompt_rows, " and max_rows ", params.max_rows));
  }
  if (sequence.IsOpenIn(session)) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence_key ", std::string(params.key), " is open in session ", session.value, " already"));
  }
  absl::Status status = CheckMaxRows(sequence.max_rows, sequence.prompt_rows, "prompt_rows", limits.max_rows);
  if (!status.ok()) return status;
  if (status = CheckQuota(session, limits, sequence.blocks()); !status.ok()) return status;
  Admission admission;
  if (AwaitCopies(session, sequence, std::move(params.on_copied), &admission)) return admission;
  sequences.Open(sequence, session);
  Tell(sequence);
  Expect(sequence);
  admission = Admitted(sequence, session);
  admission.stored_rows = sequence.VisibleRows(SessionId{});
  return admission;
}

void Pool::State::BeginCopy(Sequence& sequence, int32_t source_block, int64_t first_row, SessionId session) {
  allocator.Hold(source_block);
  sequence.copy = PendingCopy{source_block, first_row, session};
}

void Pool::State::EndCopy(Sequence& sequence) {
  if (!sequence.copy.has_value()) return;
  allocator.LetGo(sequence.copy->source_block);
  sequence.copy.reset();
}

void Pool::State::Expect(Sequence& sequence) {
  if (sequence.expected) return;
  sequence.expected = true;
  for (size_t i = sequence.held.size(); i < sequence.hashes.size(); ++i) index.Expect(sequence.hashes[i], sequence.id);
}

void Pool::State::StopExpecting(Sequence& sequence) {
  if (!sequence.expected) return;
  sequence.expected = false;
  for (size_t i = sequence.held.size(); i < sequence.hashes.size(); ++i) {
    STOKER_CHECK(index.Forget(sequence.hashes[i], sequence.id));
    Wake(sequence.hashes[i]);
  }
}

void Pool::State::Free(Sequence& sequence) {
  EndCopy(sequence);
  WakeAll(sequence);
  StopExpecting(sequence);
  for (const int32_t block : sequence.table) allocator.LetGo(block);
  // The tail first, so that it is evicted before the head. Entries that the sequence left or that are another's keep
  // their place in the chain.
  for (size_t i = sequence.held.size(); i-- > 0;) {
    if (sequence.held[i] != PrefixIndex::kNone) {
      index.Release(sequence.held[i]);
    } else if (const int32_t entry = index.Find(sequence.hashes[i]); entry != PrefixIndex::kNone) {
      index.Touch(entry);
    }
  }
  sequences.Free(sequence);
}

void Pool::State::Wake(const PrefixHash& hash) {
  if (waiting.empty()) return;
  const auto found = waiting.find(hash);
  if (found == waiting.end()) return;
  std::move(found->second.begin(), found->second.end(), std::back_inserter(callbacks));
  waiting.erase(found);
}

void Pool::State::SyncCounters() {
  counters.free_blocks.store(allocator.free(), std::memory_order_relaxed);
  counters.referenced_blocks.store(allocator.referenced(), std::memory_order_relaxed);
  counters.cached_blocks.store(allocator.cached(), std::memory_order_relaxed);
  counters.sequences.store(sequences.size(), std::memory_order_relaxed);
  counters.evicted_while_referenced.store(allocator.freed_while_referenced(), std::memory_order_relaxed);
}

}  // namespace stoker::core
