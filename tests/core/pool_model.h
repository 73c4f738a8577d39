// A model of a Pool that also has bytes, and random calls against the two.
//
// Sessions admit, join, fork, extend, write, step, read and close sequences whose prompts share prefixes. The model
// keeps what every sequence's rows must be, and a memory with one token identity per pool row. Each session has a queue
// of device work (copies, writes, reads), and the queues run at random speeds against each other, so a block that is
// shared, reused or written in place too early is seen by a read. Every status is predicted, or checked to be
// justified.
//
// Invariants: a read sees exactly the sequence's rows; a call that fails changes no block; Pool::CheckInvariants holds
// throughout; at the end everything is closed and every block is free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/core/pool.h"

namespace stoker::core {

inline constexpr int kModelSessions = 4;
inline constexpr absl::Duration kModelRetention = absl::Seconds(100);

inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct ModelShape {
  const char* name;
  int64_t blocks;
  int64_t block_rows;
  int64_t prefix_rows;
  int64_t max_rows;
  int64_t quota;
};

struct ModelSequence {
  SequenceId id;
  std::string key;
  int64_t prompt_rows = 0;
  int64_t admitted_max_rows = 0;
  int64_t max_rows = 0;
  int64_t matched_rows = 0;
  int64_t stored = 0;
  std::vector<uint64_t> rows;    // written so far
  std::vector<uint64_t> prompt;  // what the hashes stand for
  std::vector<PrefixHash> hashes;
  size_t published = 0;  // hashes that are stored, matched or given up
  std::vector<int32_t> table;
  std::vector<SessionId> sessions;
  SessionId writer;
  SessionId copier;  // has a copy to make
  int64_t copy_first_row = 0;
  absl::Time retained_until;

  bool OpenIn(SessionId session) const {
    return std::find(sessions.begin(), sessions.end(), session) != sessions.end();
  }
  int64_t written() const { return static_cast<int64_t>(rows.size()); }
  int64_t VisibleToOthers() const { return copier ? std::min(stored, copy_first_row) : stored; }
  int64_t Visible(SessionId session) const { return session == writer ? written() : VisibleToOthers(); }
};

// Work on the simulated device: what it does, then what the daemon does when it is done. Droppable work may be lost
// with its session.
struct Work {
  std::function<void()> run;
  std::function<void()> done;
  bool droppable = false;
};

class ModelRun {
 public:
  ModelRun(const ModelShape& shape, uint64_t seed)
      : shape_(shape), random_(seed), pool_(MakeSpec(shape), kModelRetention) {
    memory_.assign(shape.blocks * shape.block_rows, 0);
    limits_.max_rows = shape.max_rows;
    limits_.max_reserved_blocks = shape.quota;
  }

  int64_t operations() const { return operations_; }
  uint64_t matched_rows() const { return pool_.counters().prefix_hit_rows; }
  const PoolCounters& counters() const { return pool_.counters(); }

  void Operate() {
    ++operations_;
    // Phases with few sequences leave blocks to the prefix index; phases with many fill the pool.
    if (operations_ % 512 == 0) sequence_limit_ = int64_t{1} << (1 + Pick(6));
    const int64_t kind = Pick(100);
    if (kind < 34) {
      Step();
    } else if (kind < 48) {
      Write();
    } else if (kind < 60) {
      RunDevice(1 + Pick(6));
    } else if (kind < 70) {
      Admit();
    } else if (kind < 79) {
      CloseOne();
    } else if (kind < 83) {
      Join();
    } else if (kind < 87) {
      Fork();
    } else if (kind < 91) {
      Extend();
    } else if (kind < 96) {
      Read();
    } else if (kind < 98) {
      UseStaleId();
    } else if (kind == 98) {
      Sweep();
    } else if (Pick(8) == 0) {
      EndSession();
    } else {
      CheckList();
    }
    if (operations_ % 2048 == 0) {
      const absl::Status status = pool_.CheckInvariants();
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  void Finish() {
    DrainAll();
    while (!live_.empty()) {
      ModelSequence& sequence = *live_.begin()->second;
      if (sequence.sessions.empty()) {
        now_ += 2 * kModelRetention;
        Sweep();
      } else {
        Close(sequence, sequence.sessions.front(), false);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    for (const std::shared_ptr<int>& calls : waiting_) ASSERT_EQ(*calls, 1) << "an admission that waits was forgotten";
    ASSERT_EQ(pool_.CheckInvariants(), absl::OkStatus());
    ASSERT_EQ(pool_.Counts().referenced, 0);
    // An admission of the whole pool drops the prefix index.
    AdmitParams params;
    params.prompt_rows = params.max_rows = shape_.blocks * shape_.block_rows;
    const absl::StatusOr<Admission> all = pool_.Admit({1}, {params.max_rows, shape_.blocks}, params);
    ASSERT_TRUE(all.ok()) << all.status();
    ASSERT_EQ(pool_.Close({1}, all->id, false, now_), absl::OkStatus());
    ASSERT_EQ(pool_.Counts().free, shape_.blocks);
    ASSERT_EQ(pool_.counters().evicted_while_referenced, 0u);
    ASSERT_EQ(pool_.CheckInvariants(), absl::OkStatus());
  }

 private:
  static PoolSpec MakeSpec(const ModelShape& shape) {
    PoolSpec spec;
    spec.name = "model";
    spec.layers = 1;
    spec.row_layout = RowLayout::kLinear;
    spec.row_bytes = 8;
    spec.block_rows = shape.block_rows;
    spec.prefix_rows = shape.prefix_rows;
    spec.blocks = shape.blocks;
    EXPECT_EQ(spec.Normalize(), absl::OkStatus());
    return spec;
  }

  // Uniform in [0, count).
  int64_t Pick(int64_t count) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(count)); }
  SessionId AnySession() { return {static_cast<uint64_t>(1 + Pick(kModelSessions))}; }
  std::deque<Work>& QueueOf(SessionId session) { return queues_[session.value - 1]; }
  int64_t BlocksFor(int64_t rows) const { return (rows + shape_.block_rows - 1) / shape_.block_rows; }
  int64_t PoolRow(const ModelSequence& sequence, int64_t position) const {
    return sequence.table[position / shape_.block_rows] * shape_.block_rows + position % shape_.block_rows;
  }

  ModelSequence* AnySequence() {
    if (order_.empty()) return nullptr;
    return live_.at(order_[Pick(static_cast<int64_t>(order_.size()))]).get();
  }
  ModelSequence* Lookup(SequenceId id) {
    const auto found = live_.find(id);
    return found == live_.end() ? nullptr : found->second.get();
  }

  // ---- the device

  bool RunOne(SessionId session) {
    std::deque<Work>& queue = QueueOf(session);
    if (queue.empty()) return false;
    Work work = std::move(queue.front());
    queue.pop_front();
    if (work.run) work.run();
    if (work.done) work.done();
    return true;
  }
  void RunDevice(int64_t count) {
    for (int64_t i = 0; i < count; ++i) RunOne(AnySession());
  }
  void Drain(SessionId session) {
    while (RunOne(session)) {
    }
  }
  void DrainAll() {
    for (uint64_t i = 1; i <= kModelSessions; ++i) Drain({i});
  }
  void Copy(const BlockCopy& copy) {
    std::copy_n(memory_.begin() + copy.source_block * shape_.block_rows, copy.rows,
                memory_.begin() + copy.target_block * shape_.block_rows);
  }
  // Gives the blocks back once every queue has come past this point.
  void ReclaimLater(SequenceId id, std::vector<BlockRef> replaced) {
    if (replaced.empty()) return;
    auto missing = std::make_shared<int>(kModelSessions);
    for (std::deque<Work>& queue : queues_) {
      queue.push_back({nullptr, [this, id, missing, replaced] {
                         if (--*missing == 0) pool_.Reclaim(id, replaced);
                       }});
    }
  }
  void FinishCopiesLater(const ModelSequence& sequence, std::vector<BlockCopy> copies, SessionId session) {
    const SequenceId id = sequence.id;
    QueueOf(session).push_back({[this, copies] {
                                  for (const BlockCopy& copy : copies) Copy(copy);
                                },
                                [this, id] {
                                  pool_.FinishCopies(id);
                                  if (ModelSequence* s = Lookup(id)) s->copier = SessionId();
                                },
                                true});
  }
  void FinishWriteLater(SessionId session, SequenceId id, int64_t first, std::vector<int32_t> pool_rows,
                        std::vector<uint64_t> tokens, std::vector<BlockCopy> copies, bool droppable) {
    const int64_t count = static_cast<int64_t>(tokens.size());
    QueueOf(session).push_back(
        {[this, copies = std::move(copies), pool_rows = std::move(pool_rows), tokens = std::move(tokens)] {
           for (const BlockCopy& copy : copies) Copy(copy);
           for (size_t i = 0; i < tokens.size(); ++i) memory_[pool_rows[i]] = tokens[i];
         },
         [this, id, first, count] {
           pool_.FinishWrite(id, first, count);
           StoreInModel(id, first, count);
         },
         droppable});
  }
  void StoreInModel(SequenceId id, int64_t first, int64_t count) {
    ModelSequence* sequence = Lookup(id);
    if (sequence == nullptr || first > sequence->stored) return;
    sequence->stored = std::max(sequence->stored, std::min(first + count, sequence->written()));
    while (sequence->published < sequence->hashes.size() &&
           PrefixEnd(*sequence, sequence->published) <= sequence->stored) {
      const PrefixHash& hash = sequence->hashes[sequence->published++];
      ever_stored_.insert({hash.words[0], hash.words[1]});
    }
  }
  int64_t PrefixEnd(const ModelSequence& sequence, size_t ordinal) const {
    return std::min((static_cast<int64_t>(ordinal) + 1) * shape_.prefix_rows, sequence.prompt_rows);
  }
  // Reads a few rows, in the session's order; they must be what the sequence has now.
  void ReadLater(const ModelSequence& sequence, SessionId session, int64_t end) {
    std::vector<std::pair<int64_t, uint64_t>> expected;
    const int64_t reads = Pick(16) == 0 ? end : std::min<int64_t>(end, 6);
    for (int64_t i = 0; i < reads; ++i) {
      const int64_t position = reads == end ? i : Pick(end);
      expected.push_back({PoolRow(sequence, position), sequence.rows[position]});
    }
    QueueOf(session).push_back({[this, expected = std::move(expected)] {
                                  for (const auto& [row, token] : expected) {
                                    ASSERT_EQ(memory_[row], token) << "pool row " << row;
                                  }
                                },
                                nullptr, true});
  }

  // ---- calls

  void MakePrompt(ModelSequence* sequence) {
    sequence->prompt_rows = 1 + Pick(shape_.max_rows);
    // Equal lengths make partial prefix blocks match.
    if (Pick(3) == 0)
      sequence->prompt_rows = std::min(shape_.max_rows, shape_.block_rows * (1 + Pick(8)) + 5 * Pick(2));
    sequence->max_rows = std::min(shape_.max_rows, sequence->prompt_rows + Pick(3 * shape_.block_rows));
    const uint64_t document = static_cast<uint64_t>(Pick(6));
    const int64_t shared = Pick(2) == 0 ? sequence->prompt_rows : Pick(sequence->prompt_rows + 1);
    const uint64_t rest = Pick(2) == 0 ? Mix(document, shared) : ++unique_;
    for (int64_t i = 0; i < sequence->prompt_rows; ++i) {
      sequence->prompt.push_back(Mix(i < shared ? document : rest, static_cast<uint64_t>(i)));
    }
    if (Pick(8) == 0) return;
    const int64_t whole = sequence->prompt_rows / shape_.prefix_rows;
    const bool partial = sequence->prompt_rows % shape_.prefix_rows != 0 && Pick(3) != 0;
    PrefixHash chain;
    for (int64_t i = 0; i < sequence->prompt_rows; ++i) {
      chain.words[0] = Mix(chain.words[0], sequence->prompt[i]);
      chain.words[1] = Mix(chain.words[1] + 1, sequence->prompt[i]);
      const bool end = (i + 1) % shape_.prefix_rows == 0 || (partial && i + 1 == sequence->prompt_rows);
      if (end) sequence->hashes.push_back(chain);
    }
    ASSERT_EQ(static_cast<int64_t>(sequence->hashes.size()), whole + partial);
  }

  void Insert(std::unique_ptr<ModelSequence> sequence, const Admission& admission, SessionId session) {
    sequence->id = admission.id;
    sequence->table = admission.table;
    sequence->sessions = {session};
    sequence->writer = session;
    sequence->matched_rows = admission.matched_rows;
    sequence->admitted_max_rows = sequence->max_rows;
    ASSERT_TRUE(admission.writer);
    ASSERT_EQ(admission.max_rows, sequence->max_rows);
    ASSERT_EQ(static_cast<int64_t>(admission.table.size()), BlocksFor(sequence->max_rows));
    ASSERT_LE(admission.copies.size(), 1u);
    if (!admission.copies.empty()) {
      sequence->copier = session;
      sequence->copy_first_row = admission.stored_rows / shape_.block_rows * shape_.block_rows;
      FinishCopiesLater(*sequence, admission.copies, session);
    }
    reserved_[session] += BlocksFor(sequence->max_rows);
    if (!sequence->key.empty()) keys_[sequence->key] = sequence->id;
    order_.push_back(sequence->id);
    const SequenceId id = sequence->id;
    ASSERT_TRUE(live_.emplace(id, std::move(sequence)).second) << "an id was given out twice";
  }

  // The call was refused for want of blocks: that must be so, and nothing may have changed.
  void CheckExhausted(const BlockCounts& before, int64_t blocks, SessionId session, const absl::Status& status) {
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    const BlockCounts after = pool_.Counts();
    ASSERT_EQ(after.free, before.free);
    ASSERT_EQ(after.cached, before.cached);
    const bool quota = reserved_[session] + blocks > limits_.max_reserved_blocks;
    ASSERT_TRUE(quota || blocks > before.free + before.cached) << status;
  }

  void Admit() {
    if (static_cast<int64_t>(live_.size()) >= sequence_limit_) return CloseOne();
    const SessionId session = AnySession();
    auto sequence = std::make_unique<ModelSequence>();
    MakePrompt(sequence.get());
    if (Pick(2) == 0) sequence->key = "key" + std::to_string(++unique_);
    AdmitParams params;
    params.key = sequence->key;
    params.prompt_rows = sequence->prompt_rows;
    params.max_rows = sequence->max_rows;
    params.hashes = sequence->hashes;
    auto calls = std::make_shared<int>(0);
    const bool may_wait = Pick(4) == 0;
    if (may_wait) params.on_prefix_ready = [calls] { ++*calls; };
    const BlockCounts before = pool_.Counts();
    const int64_t blocks = BlocksFor(sequence->max_rows);
    const absl::StatusOr<Admission> admission = pool_.Admit(session, limits_, params);
    if (!admission.ok()) return CheckExhausted(before, blocks, session, admission.status());
    if (admission->waiting) {
      ASSERT_TRUE(may_wait);
      waiting_.push_back(calls);
      return CheckSomebodyStores(*sequence);
    }
    const int64_t matched = admission->matched_rows;
    ASSERT_EQ(admission->stored_rows, matched);
    ASSERT_TRUE(matched % shape_.prefix_rows == 0 || matched == sequence->prompt_rows);
    const size_t matched_hashes = (matched + shape_.prefix_rows - 1) / shape_.prefix_rows;
    ASSERT_LE(matched_hashes, sequence->hashes.size());
    for (size_t i = 0; i < sequence->hashes.size(); ++i) {
      const bool stored = ever_stored_.contains({sequence->hashes[i].words[0], sequence->hashes[i].words[1]});
      ASSERT_TRUE(i >= matched_hashes || stored) << "a prefix block is matched that nobody stored";
      // Nothing was ever evicted, so everything that was stored is found.
      ASSERT_FALSE(i == matched_hashes && stored && pool_.counters().evicted_blocks == 0);
    }
    ASSERT_LE(blocks - matched / shape_.block_rows, before.free + before.cached);
    ASSERT_EQ(admission->copies.size(), matched % shape_.block_rows != 0 ? 1u : 0u);
    sequence->rows.assign(sequence->prompt.begin(), sequence->prompt.begin() + matched);
    sequence->stored = matched;
    sequence->published = matched_hashes;
    Insert(std::move(sequence), *admission, session);
  }

  void CheckSomebodyStores(const ModelSequence& waiting) {
    for (const auto& [id, other] : live_) {
      if (other->sessions.empty()) continue;
      for (size_t i = other->published; i < std::min(other->hashes.size(), waiting.hashes.size()); ++i) {
        if (other->hashes[i] == waiting.hashes[i]) return;
      }
    }
    FAIL() << "an admission waits for a prefix that nobody stores";
  }

  void Join() {
    ModelSequence* sequence = AnySequence();
    if (sequence == nullptr || sequence->key.empty()) return;
    const SessionId session = AnySession();
    // Its reads are not ordered with rewrites of the writer.
    if (sequence->writer) Drain(sequence->writer);
    const bool wrong = Pick(10) == 0;
    AdmitParams params;
    params.key = sequence->key;
    params.prompt_rows = sequence->prompt_rows;
    params.max_rows = Pick(2) == 0 ? sequence->max_rows : sequence->admitted_max_rows;
    if (wrong) params.prompt_rows += params.prompt_rows > 1 ? -1 : 0;
    const absl::StatusOr<Admission> admission = pool_.Admit(session, limits_, params);
    if (params.prompt_rows != sequence->prompt_rows || sequence->OpenIn(session)) {
      ASSERT_EQ(admission.status().code(), absl::StatusCode::kFailedPrecondition) << admission.status();
      return;
    }
    const int64_t blocks = BlocksFor(sequence->max_rows);
    if (reserved_[session] + blocks > limits_.max_reserved_blocks) {
      ASSERT_EQ(admission.status().code(), absl::StatusCode::kResourceExhausted) << admission.status();
      return;
    }
    ASSERT_TRUE(admission.ok()) << admission.status();
    ASSERT_EQ(admission->id, sequence->id);
    ASSERT_EQ(admission->table, sequence->table);
    ASSERT_EQ(admission->matched_rows, sequence->matched_rows);
    ASSERT_EQ(admission->stored_rows, sequence->VisibleToOthers());
    ASSERT_EQ(admission->writer, sequence->sessions.empty());
    ASSERT_TRUE(admission->copies.empty());
    if (sequence->sessions.empty()) sequence->writer = session;
    sequence->sessions.push_back(session);
    reserved_[session] += blocks;
  }

  void Fork() {
    ModelSequence* source = AnySequence();
    if (source == nullptr || source->sessions.empty() || static_cast<int64_t>(live_.size()) >= sequence_limit_) return;
    const SessionId session = source->sessions[Pick(static_cast<int64_t>(source->sessions.size()))];
    // Work of another session that rewrites rows of the source must be done: the two are not ordered.
    if (session != source->writer) Drain(source->writer);
    source = Lookup(source->id);
    const int64_t rows = 1 + Pick(source->stored + 2);
    auto fork = std::make_unique<ModelSequence>();
    fork->max_rows = std::min(shape_.max_rows, rows + Pick(2 * shape_.block_rows));
    if (fork->max_rows < rows) return;
    if (Pick(2) == 0) fork->key = "key" + std::to_string(++unique_);
    const BlockCounts before = pool_.Counts();
    const absl::StatusOr<Admission> admission =
        pool_.Fork(session, limits_, source->id, rows, fork->max_rows, fork->key);
    if (rows > source->VisibleToOthers()) {
      ASSERT_EQ(admission.status().code(), absl::StatusCode::kFailedPrecondition) << admission.status();
      return;
    }
    const int64_t blocks = BlocksFor(fork->max_rows);
    if (!admission.ok()) {
      ASSERT_EQ(admission.status().code(), absl::StatusCode::kResourceExhausted) << admission.status();
      const bool quota = reserved_[session] + blocks > limits_.max_reserved_blocks;
      ASSERT_TRUE(quota || blocks - rows / shape_.block_rows > before.free + before.cached) << admission.status();
      return;
    }
    ASSERT_EQ(admission->stored_rows, rows);
    for (int64_t i = 0; i < rows / shape_.block_rows; ++i) ASSERT_EQ(admission->table[i], source->table[i]);
    fork->prompt_rows = fork->stored = rows;
    fork->rows.assign(source->rows.begin(), source->rows.begin() + rows);
    Insert(std::move(fork), *admission, session);
  }

  void Extend() {
    ModelSequence* sequence = AnySequence();
    if (sequence == nullptr) return;
    const SessionId session = AnySession();
    const int64_t max_rows = sequence->max_rows - 1 + Pick(2 * shape_.block_rows);
    const BlockCounts before = pool_.Counts();
    const absl::StatusOr<WritePlan> plan = pool_.Extend(session, limits_, sequence->id, max_rows);
    if (!sequence->OpenIn(session)) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition) << plan.status();
      return;
    }
    if (max_rows < sequence->max_rows || max_rows > shape_.max_rows) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument) << plan.status();
      return;
    }
    const int64_t added = BlocksFor(max_rows) - BlocksFor(sequence->max_rows);
    if (!plan.ok()) return CheckExhausted(before, added, session, plan.status());
    ASSERT_EQ(static_cast<int64_t>(plan->updates.size()), added);
    for (const TableUpdate& update : plan->updates) {
      ASSERT_EQ(update.column, static_cast<int32_t>(sequence->table.size()));
      sequence->table.push_back(update.block);
    }
    for (const SessionId opener : sequence->sessions) reserved_[opener] += added;
    sequence->max_rows = max_rows;
  }

  std::vector<uint64_t> TokensFor(const ModelSequence& sequence, int64_t first, int64_t count) {
    std::vector<uint64_t> tokens;
    // The prompt as hashed, unless this is a rewrite with something else.
    const bool other = first < sequence.written() && Pick(2) == 0;
    for (int64_t i = first; i < first + count; ++i) {
      tokens.push_back(i < static_cast<int64_t>(sequence.prompt.size()) && !other ? sequence.prompt[i] : ++unique_);
    }
    return tokens;
  }

  // What a write that begins does to the model. Returns the tokens.
  std::vector<uint64_t> ApplyWrite(ModelSequence* sequence, int64_t first, int64_t count, const WritePlan* plan) {
    const int64_t rewritten = std::max<int64_t>(0, std::min(first + count, sequence->written()) - first);
    if (plan != nullptr) {
      EXPECT_EQ(plan->rewritten_count, rewritten);
      EXPECT_TRUE(rewritten == 0 || plan->rewritten_first == first);
      EXPECT_TRUE((rewritten == 0 && plan->updates.empty()) || plan->openers == sequence->sessions);
      EXPECT_EQ(plan->updates.size(), plan->copies.size());
      EXPECT_EQ(plan->updates.size(), plan->replaced.size());
    } else {
      EXPECT_EQ(rewritten, 0);
    }
    const std::vector<uint64_t> tokens = TokensFor(*sequence, first, count);
    if (rewritten > 0 && first < sequence->prompt_rows && sequence->published < sequence->hashes.size()) {
      sequence->hashes.resize(sequence->published);
    }
    sequence->rows.resize(std::max(sequence->written(), first + count));
    std::copy(tokens.begin(), tokens.end(), sequence->rows.begin() + first);
    if (plan != nullptr) {
      for (const TableUpdate& update : plan->updates) sequence->table[update.column] = update.block;
    }
    return tokens;
  }

  void Write() {
    ModelSequence* sequence = AnySequence();
    if (sequence == nullptr) return;
    const SessionId session = Pick(12) == 0 || sequence->sessions.empty() ? AnySession() : sequence->writer;
    int64_t first = sequence->written();
    if (Pick(5) == 0) first = Pick(sequence->written() + 3);
    const int64_t count = Pick(20) == 0 ? Pick(3 * shape_.block_rows) : 1 + Pick(2 * shape_.block_rows);
    const bool rewrite = first < sequence->written();
    // Other ranks read what the writer rewrites: their engines wait for each other.
    const bool ordered = rewrite && sequence->sessions.size() > 1;
    if (ordered) DrainAll();
    const SequenceId id = sequence->id;
    const BlockCounts before = pool_.Counts();
    absl::StatusOr<WritePlan> plan = pool_.BeginWrite(session, id, first, count);
    if (!sequence->OpenIn(session) || session != sequence->writer) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition) << plan.status();
      return;
    }
    if (count < 1 || first + count > sequence->max_rows) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument) << plan.status();
      return;
    }
    if (first > sequence->written()) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition) << plan.status();
      return;
    }
    if (!plan.ok()) {
      ASSERT_TRUE(rewrite);
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted) << plan.status();
      ASSERT_GT((first + count - 1) / shape_.block_rows - first / shape_.block_rows + 1, before.free + before.cached);
      ASSERT_EQ(pool_.Counts().free, before.free);
      return;
    }
    std::vector<uint64_t> tokens = ApplyWrite(sequence, first, count, &*plan);
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(plan->pool_rows[i], PoolRow(*sequence, first + i));
    FinishWriteLater(session, id, first, std::move(plan->pool_rows), std::move(tokens), std::move(plan->copies),
                     !rewrite);
    ReclaimLater(id, std::move(plan->replaced));
    if (ordered) DrainAll();
  }

  void Step() {
    const SessionId session = AnySession();
    accesses_.clear();
    const int64_t batch = 1 + Pick(4);
    for (int64_t i = 0; i < batch; ++i) {
      ModelSequence* sequence = AnySequence();
      if (sequence == nullptr) return;
      StepAccess access;
      access.id = sequence->id;
      access.commit = sequence->writer == session ? Pick(4) != 0 : Pick(16) == 0;
      access.newest_count = 1 + Pick(2);
      access.length = sequence->Visible(session) + 1;
      if (Pick(8) == 0) access.length = Pick(sequence->max_rows + 3);
      // A rewrite that other ranks see is left to Write: a second commit of one sequence in a batch can be one.
      const bool again =
          std::any_of(accesses_.begin(), accesses_.end(), [&](const StepAccess& a) { return a.id == access.id; });
      if (sequence->sessions.size() > 1 && (again || access.length <= sequence->written())) access.commit = false;
      accesses_.push_back(access);
    }
    pool_.BeginStep(session, accesses_, &grants_);
    ASSERT_EQ(grants_.size(), accesses_.size());
    for (size_t i = 0; i < accesses_.size(); ++i) {
      if (i > 0 && accesses_[i].id == accesses_[i - 1].id && !grants_[i - 1].status.ok()) {
        ASSERT_EQ(grants_[i].status, grants_[i - 1].status);
        ASSERT_EQ(grants_[i].commit_pool_row, -1);
      } else {
        CheckGrant(session, accesses_[i], &grants_[i]);
      }
    }
  }

  void CheckGrant(SessionId session, const StepAccess& access, StepGrant* grant) {
    ModelSequence* sequence = Lookup(access.id);
    if (!sequence->OpenIn(session) || (access.commit && sequence->writer != session)) {
      ASSERT_EQ(grant->status.code(), absl::StatusCode::kFailedPrecondition) << grant->status;
      return;
    }
    if (access.length < 1 || access.length > sequence->max_rows) {
      ASSERT_EQ(grant->status.code(), absl::StatusCode::kInvalidArgument) << grant->status;
      return;
    }
    const int64_t limit = access.commit ? sequence->written() + 1 : sequence->Visible(session) + access.newest_count;
    if (access.length > limit) {
      ASSERT_EQ(grant->status.code(), absl::StatusCode::kFailedPrecondition) << grant->status;
      return;
    }
    if (!grant->status.ok()) {
      ASSERT_TRUE(access.commit);
      ASSERT_EQ(grant->status.code(), absl::StatusCode::kResourceExhausted) << grant->status;
      ASSERT_EQ(pool_.Counts().free + pool_.Counts().cached, 0);
      return;
    }
    ASSERT_EQ(grant->commit_pool_row >= 0, access.commit);
    if (access.commit) {
      const int64_t position = access.length - 1;
      const bool rewrite = position < sequence->written();
      std::vector<uint64_t> tokens = ApplyWrite(sequence, position, 1, grant->plan.get());
      // A later rewrite in the batch may have moved the block once more.
      std::vector<BlockCopy> copies;
      if (grant->plan != nullptr) copies = grant->plan->copies;
      ASSERT_EQ(grant->commit_pool_row, PoolRow(*sequence, position));
      FinishWriteLater(session, access.id, position, {static_cast<int32_t>(grant->commit_pool_row)}, std::move(tokens),
                       std::move(copies), !rewrite);
      if (grant->plan != nullptr) ReclaimLater(access.id, std::move(grant->plan->replaced));
    }
    const int64_t end = std::min(access.length, sequence->Visible(session));
    if (end > 0) ReadLater(*sequence, session, end);
  }

  void Read() {
    ModelSequence* sequence = AnySequence();
    if (sequence == nullptr) return;
    const SessionId session = AnySession();
    const int64_t visible = sequence->Visible(session);
    std::vector<int64_t> positions;
    for (int i = 0; i < 3; ++i) positions.push_back(Pick(visible + (Pick(8) == 0 ? 2 : 0) + 1));
    const absl::StatusOr<std::vector<int32_t>> rows = pool_.PoolRows(session, sequence->id, positions);
    const bool beyond = *std::max_element(positions.begin(), positions.end()) >= visible;
    if (!sequence->OpenIn(session) || beyond) {
      ASSERT_EQ(rows.status().code(), absl::StatusCode::kFailedPrecondition) << rows.status();
      return;
    }
    ASSERT_TRUE(rows.ok()) << rows.status();
    for (size_t i = 0; i < positions.size(); ++i) ASSERT_EQ((*rows)[i], PoolRow(*sequence, positions[i]));
    ReadLater(*sequence, session, visible);
  }

  void UseStaleId() {
    if (closed_.empty()) return;
    const SequenceId id = closed_[Pick(static_cast<int64_t>(closed_.size()))];
    const SessionId session = AnySession();
    ASSERT_EQ(pool_.BeginWrite(session, id, 0, 1).status().code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_EQ(pool_.Close(session, id, false, now_).code(), absl::StatusCode::kFailedPrecondition);
    pool_.FinishWrite(id, 0, 1);
    pool_.FinishCopies(id);
    const SequenceId unknown = SequenceId::Make(1, 1000000);
    ASSERT_EQ(pool_.PoolRows(session, unknown, {}).status().code(), absl::StatusCode::kNotFound);
  }

  void Sweep() {
    now_ += absl::Seconds(Pick(100));
    int64_t due = 0;
    for (size_t i = 0; i < order_.size();) {
      ModelSequence& sequence = *live_.at(order_[i]);
      if (sequence.sessions.empty() && sequence.retained_until <= now_) {
        ++due;
        Forget(sequence);
      } else {
        ++i;
      }
    }
    ASSERT_EQ(pool_.Sweep(now_), due);
  }

  void Forget(ModelSequence& sequence) {
    const SequenceId id = sequence.id;
    if (!sequence.key.empty()) keys_.erase(sequence.key);
    closed_.push_back(id);
    if (closed_.size() > 64) closed_.pop_front();
    order_.erase(std::find(order_.begin(), order_.end(), id));
    live_.erase(id);
  }

  void CloseOne() {
    ModelSequence* sequence = AnySequence();
    if (sequence == nullptr) return;
    const SessionId session = sequence->sessions.empty() || Pick(12) == 0
                                  ? AnySession()
                                  : sequence->sessions[Pick(sequence->sessions.size())];
    if (!sequence->OpenIn(session)) {
      ASSERT_EQ(pool_.Close(session, sequence->id, false, now_).code(), absl::StatusCode::kFailedPrecondition);
      return Sweep();
    }
    Drain(session);
    Close(*sequence, session, Pick(2) == 0);
  }

  // The session's work on the sequence is done or lost.
  void Close(ModelSequence& sequence, SessionId session, bool retain) {
    const absl::Status status = pool_.Close(session, sequence.id, retain, now_);
    ASSERT_TRUE(status.ok()) << status;
    reserved_[session] -= BlocksFor(sequence.max_rows);
    if (sequence.copier == session) {
      sequence.stored = std::min(sequence.stored, sequence.copy_first_row);
      sequence.copier = SessionId();
    }
    std::erase(sequence.sessions, session);
    if (sequence.writer == session) {
      sequence.rows.resize(sequence.stored);
      sequence.writer = sequence.sessions.empty() ? SessionId() : sequence.sessions.front();
    }
    if (!sequence.sessions.empty()) return;
    if (retain && !sequence.key.empty()) {
      sequence.retained_until = now_ + kModelRetention;
    } else {
      Forget(sequence);
    }
  }

  // The engine of a session dies: work that nobody else depends on is lost, then all its sequences are closed.
  void EndSession() {
    const SessionId session = AnySession();
    std::deque<Work>& queue = QueueOf(session);
    size_t keep = queue.size();
    while (keep > 0 && (queue[keep - 1].droppable || queue[keep - 1].run == nullptr)) --keep;
    keep += Pick(static_cast<int64_t>(queue.size() - keep) + 1);
    for (size_t i = 0; i < keep; ++i) RunOne(session);
    std::deque<Work> lost;
    lost.swap(queue);
    for (Work& work : lost) {
      if (work.run == nullptr) work.done();  // blocks to reclaim
    }
    const std::vector<SequenceId> ids(order_.begin(), order_.end());
    for (const SequenceId id : ids) {
      ModelSequence& sequence = *live_.at(id);
      if (sequence.OpenIn(session)) Close(sequence, session, Pick(2) == 0);
      if (testing::Test::HasFatalFailure()) return;
    }
    ASSERT_EQ(pool_.ReservedBlocks(session), 0);
  }

  void CheckList() {
    bool more = false;
    const std::vector<SequenceSnapshot> all = pool_.List(SequenceId(), 1000, &more);
    ASSERT_FALSE(more);
    ASSERT_EQ(all.size(), live_.size());
    for (const SequenceSnapshot& snapshot : all) {
      const ModelSequence* sequence = Lookup(snapshot.id);
      ASSERT_NE(sequence, nullptr);
      ASSERT_EQ(snapshot.key, sequence->key);
      ASSERT_EQ(snapshot.stored_rows, sequence->stored);
      ASSERT_EQ(snapshot.written_rows, sequence->written());
      ASSERT_EQ(snapshot.max_rows, sequence->max_rows);
      ASSERT_EQ(snapshot.sessions, sequence->sessions);
      ASSERT_EQ(snapshot.writer, sequence->writer);
    }
    for (uint64_t i = 1; i <= kModelSessions; ++i) ASSERT_EQ(pool_.ReservedBlocks({i}), reserved_[{i}]);
  }

  const ModelShape shape_;
  std::mt19937_64 random_;
  Pool pool_;
  SequenceLimits limits_;
  absl::Time now_ = absl::UnixEpoch();
  std::vector<uint64_t> memory_;
  std::deque<Work> queues_[kModelSessions];
  std::map<SequenceId, std::unique_ptr<ModelSequence>> live_;
  std::vector<SequenceId> order_;  // of live_, for picking
  std::map<std::string, SequenceId> keys_;
  std::deque<SequenceId> closed_;
  std::map<SessionId, int64_t> reserved_;
  std::set<std::pair<uint64_t, uint64_t>> ever_stored_;
  std::vector<std::shared_ptr<int>> waiting_;
  std::vector<StepAccess> accesses_;
  std::vector<StepGrant> grants_;
  int64_t sequence_limit_ = 8;
  uint64_t unique_ = uint64_t{1} << 32;
  int64_t operations_ = 0;
};

}  // namespace stoker::core
