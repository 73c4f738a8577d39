// A pool's bookkeeping: which blocks hold what, which sequences exist, which prefixes can be shared. Holds no row
// bytes.
//
// Thread safety: a Pool may be used by any thread; one mutex, never held while a callback runs.
//
// Invariants:
//  1. A block is free (no reference), referenced (at least one sequence, unfinished copy or unreclaimed plan holds it)
//  or
//     cached (only the prefix index holds it). Every cached block can be evicted.
//  2. A sequence holds from its admission on all blocks for max_rows rows: no later step can run out of blocks, unless
//  it
//     rewrites rows that others share.
//  3. Rows [0, stored_rows) of a sequence are in the pool. A prefix block is matched only when all its rows are.
//  4. Blocks that two sequences share hold equal rows in both; a sequence writes into a block in place only where no
//  other
//     holder can see it: at or above its sealed_rows, or where it is the only holder. Elsewhere the block is copied
//     first.
//  5. A block's place is reused only after every holder has let go, so whoever runs work on a sequence keeps it open.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/core/ids.h"
#include "server/core/pool_spec.h"
#include "server/core/sequence_word.h"

namespace stoker::core {

// Rows to copy inside the pool, from the start of one block to the start of another, in every layer.
struct BlockCopy {
  int32_t source_block = 0;
  int32_t target_block = 0;
  int32_t rows = 0;
};

// A change of one entry of a sequence's block table.
struct TableUpdate {
  int32_t column = 0;
  int32_t block = 0;
};

struct AdmitParams {
  std::string_view key;
  int64_t prompt_rows = 0;
  int64_t max_rows = 0;
  std::vector<PrefixHash> hashes;
  // Called once, without locks, by the FinishWrite, Close or Sweep with which another sequence has stored or given up
  // the prefix block that this admission waits for. Empty: do not wait.
  std::function<void()> on_prefix_ready;
  // Called once, without locks, when blocks that a write of another session is copying are complete. Empty: they are
  // known to be.
  std::function<void()> on_copied;
  // Sequences that are never waited for: those admitted by the same call, which nobody can store before it returns.
  std::vector<SequenceId> admitted_by_call;
};

// What a session may hold in this pool, and the longest sequence it can handle.
struct SequenceLimits {
  int64_t max_rows = 0;
  int64_t max_reserved_blocks = 0;  // over all sequences that the session has open
};

struct Admission {
  // The admission was not made: on_prefix_ready or on_copied will be called, try again then.
  bool waiting = false;
  SequenceId id;
  int64_t matched_rows = 0;
  int64_t stored_rows = 0;
  int64_t max_rows = 0;
  bool writer = false;
  std::vector<int32_t> table;     // block of each block_rows rows, for max_rows
  std::vector<BlockCopy> copies;  // to be done before the sequence is used; then call FinishCopies
};

// A write of rows that has begun: do the copies, apply the table updates in every session of `openers`, drop
// `rewritten` positions from their hot buffers, write, then call FinishWrite. `replaced`, where it is not empty, must
// be given to Reclaim once no session can still be reading it: until then no other session can open the sequence, since
// its new blocks may not hold their rows yet.
struct WritePlan {
  std::vector<int32_t> pool_rows;  // pool row of each written row
  std::vector<BlockCopy> copies;
  std::vector<TableUpdate> updates;
  std::vector<BlockRef> replaced;
  int64_t rewritten_first = 0;
  int64_t rewritten_count = 0;
  std::vector<SessionId> openers;  // filled when updates or rewritten rows exist
};

// One batch row of a step: a write of the row at length - 1, where `commit`, then a read of rows below `length`.
struct StepAccess {
  SequenceId id;
  int64_t length = 0;
  int64_t newest_count = 1;  // rows at the end of [0, length) that need not be stored yet
  bool commit = false;
};

struct StepGrant {
  absl::Status status;
  int64_t commit_pool_row = -1;
  std::unique_ptr<WritePlan> plan;  // only where a commit rewrites a row
};

struct SequenceSnapshot {
  SequenceId id;
  std::string key;
  int64_t stored_rows = 0;
  int64_t written_rows = 0;  // stored, or being stored by work that the writer has enqueued
  int64_t max_rows = 0;
  int64_t blocks = 0;
  std::vector<SessionId> sessions;
  SessionId writer;
};

struct BlockCounts {
  int64_t free = 0;
  int64_t referenced = 0;
  int64_t cached = 0;
};

// Read without the pool's mutex.
struct PoolCounters {
  std::atomic<uint64_t> prefix_hit_rows{0};
  std::atomic<uint64_t> prefix_miss_rows{0};
  std::atomic<uint64_t> evicted_blocks{0};
  std::atomic<uint64_t> evicted_while_referenced{
      0};                                  // stays 0: counted where a block is freed, from its reference count
  std::atomic<uint64_t> copied_blocks{0};  // copy on write
  std::atomic<uint64_t> stored_rows{0};    // rows written by stores and commits
  std::atomic<uint64_t> rejected_admissions{0};
  std::atomic<int64_t> free_blocks{0};
  std::atomic<int64_t> referenced_blocks{0};
  std::atomic<int64_t> cached_blocks{0};
  std::atomic<int64_t> sequences{0};
};

class Pool {
 public:
  // `spec` must have passed Normalize. Sequences that lose their last session are kept for `retention`.
  Pool(PoolSpec spec, absl::Duration retention);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Open and retained sequences that a pool can have at one time: 8 for each block, at least 4,096, at most 262,144.
  static int64_t MaxSequences(const PoolSpec& spec);

  // Words for the planes of sessions: word i is of the sequence whose id has index i. MaxSequences of them, or none. To
  // be called before there are sequences; they must outlive the pool.
  void UseWords(absl::Span<SequenceWord> words);

  const PoolSpec& spec() const { return spec_; }
  const PoolCounters& counters() const { return counters_; }

  // Opens a sequence for `session`: a new one, with its longest stored prefix matched, or the one that has the key.
  // Counts prefix_hit_rows and prefix_miss_rows for new sequences.
  //
  // A session that joins an open sequence gets the matched_rows of its admission, the present stored_rows and no
  // copies.
  //
  // INVALID_ARGUMENT: key, prompt_rows, max_rows, hash count (0, prompt_rows / prefix_rows, or that rounded up).
  // RESOURCE_EXHAUSTED: blocks or the session's quota; the message gives needed, free and evictable, or needed, held,
  // limit. FAILED_PRECONDITION: the key is open with other prompt_rows or max_rows (the present one, or the one of its
  // admission), or in this session already.
  absl::StatusOr<Admission> Admit(SessionId session, const SequenceLimits& limits, AdmitParams params);

  // Raises max_rows, for any session that has the sequence open. The blocks that are added are in `updates` of the
  // plan. INVALID_ARGUMENT: max_rows. RESOURCE_EXHAUSTED: as Admit. NOT_FOUND, FAILED_PRECONDITION: as BeginWrite.
  absl::StatusOr<WritePlan> Extend(SessionId session, const SequenceLimits& limits, SequenceId id, int64_t max_rows);

  // Opens a copy of the first `rows` rows of `source`. Whole blocks are shared; the partial one at the end is copied.
  // INVALID_ARGUMENT: key, rows, max_rows. FAILED_PRECONDITION: more rows than `source` has stored (rows whose first
  // copies are not finished do not count), or the key is open. Others as Admit and BeginWrite. With `on_copied` it may
  // have to wait, as Admit.
  absl::StatusOr<Admission> Fork(SessionId session, const SequenceLimits& limits, SequenceId source, int64_t rows,
                                 int64_t max_rows, std::string_view key, std::function<void()> on_copied = {});

  // The copies of an Admission are done. A sequence that is gone is ignored.
  void FinishCopies(SequenceId id);

  // Begins a write of rows [first, first + count). NOT_FOUND: no such sequence. FAILED_PRECONDITION: an id of an
  // earlier generation, not open in the session, not its writer, or first > written rows. INVALID_ARGUMENT: beyond
  // max_rows or count < 1. RESOURCE_EXHAUSTED: a shared block is to be copied and none is free; nothing is changed
  // then.
  //
  // A sequence that rewrites rows of its prompt no longer publishes what it has not published yet: the hashes may not
  // stand for the rows any more.
  absl::StatusOr<WritePlan> BeginWrite(SessionId session, SequenceId id, int64_t first, int64_t count);
  // The write is done, in the order of the Begins: the rows are stored, prefix blocks that are complete become
  // matchable. A sequence that is gone is ignored.
  void FinishWrite(SequenceId id, int64_t first, int64_t count);

  // Checks all accesses of a batch and begins its commits, under one lock. grants[i] belongs to accesses[i]. An access
  // that fails begins nothing, and neither do those of its sequence that directly follow it: they get its status. A
  // session that writes may read what it has begun to write; others only what is stored.
  void BeginStep(SessionId session, absl::Span<const StepAccess> accesses, std::vector<StepGrant>* grants);

  // Pool rows of positions; FAILED_PRECONDITION when one is not stored (for the writer: begun to be written).
  absl::StatusOr<std::vector<int32_t>> PoolRows(SessionId session, SequenceId id, absl::Span<const int64_t> positions);

  // Blocks of a sequence, and the rows that the session may read of it.
  struct BlockTable {
    std::vector<int32_t> blocks;
    int64_t readable_rows = 0;
  };
  absl::StatusOr<BlockTable> Table(SessionId session, SequenceId id) const;

  // Gives up the blocks that a WritePlan of the sequence replaced, once; its copies are done. The sequence may be gone.
  void Reclaim(SequenceId id, absl::Span<const BlockRef> blocks);

  // Ends the session's use of the sequence: no work of the session may use it any more. With the last session it is
  // freed, or, with `retain` and a key, kept until the retention time has passed after `now`. If it was the writer, the
  // longest-standing other session becomes the writer, and rows that were not stored are no longer written. Copies that
  // the session owed are given up with the rows that they were to bring.
  absl::Status Close(SessionId session, SequenceId id, bool retain, absl::Time now);

  // Frees sequences whose retention time has ended. Returns how many.
  int64_t Sweep(absl::Time now);

  // Blocks that the session's sequences hold.
  int64_t ReservedBlocks(SessionId session) const;
  absl::StatusOr<SequenceSnapshot> Snapshot(SequenceId id) const;
  // At most `limit` sequences with ids above `after`, by id; *more tells whether there are others.
  std::vector<SequenceSnapshot> List(SequenceId after, int64_t limit, bool* more) const;
  BlockCounts Counts() const;

  // Checks every invariant by walking everything, for tests. Linear in blocks and sequences.
  absl::Status CheckInvariants() const;

 private:
  struct State;

  const PoolSpec spec_;
  PoolCounters counters_;
  std::unique_ptr<State> state_;
};

}  // namespace stoker::core
