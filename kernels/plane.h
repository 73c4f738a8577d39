// A plane: steps of a session that are enqueued ahead, or by another process, and take their batch from memory that the
// engine writes (deploy/adr/0007-planes.md).
//
// A step is these operations, in order: AwaitDoorbell for group 0, BeginBatch, a resolve and gather of group 0,
// RingDoorbell of it; for each further group AwaitDoorbell, resolve and gather, RingDoorbell; then AwaitDoorbell for
// the commit, PlanCommits, a Transfer of the planned rows, EndBatch, RingDoorbell. Without doorbells (the direct plane)
// the Await and Ring operations are left out and BeginBatch raises the step number.
//
// Doorbells carry step numbers: the engine sets request[g] to the number of the step, the first of which is 1, when
// what the operations behind it read is there; the plane sets done[g] to it when what they write is there. Nothing is
// reset between steps.
//
// Trust: all that the engine writes (requests, batch, indices) is read once and checked before it is followed; a row
// that is wrong gets a BatchStatus and is padding for the resolve. A request that is neither the step's number nor the
// one before it ends the plane. What the plane follows (PlaneState, tables, words, the checked batch) is in memory that
// the engine cannot reach on the server plane.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/resolve.h"

namespace stoker::kernels {

// How a plane ended. From then on its operations write nothing, and end at once, but for what keeps the operations
// between them from doing anything: BeginBatch sets plan.rows to 0, PlanCommits all commit rows to -1, and EndBatch
// writes `finished` and `ended`.
enum class PlaneOutcome : uint32_t {
  kRunning = 0,
  kAborted = 1,   // *abort was set
  kTimedOut = 2,  // a step had begun, and its next request did not come within the time limit
  kBadStep = 3,   // a request had a number that cannot be
};

// A plane's own words, in device memory. Zeroed before its first step.
struct PlaneState {
  uint64_t step = 0;      // the step that runs, or ran last
  uint64_t accepted = 0;  // the step whose batch was read last
  uint64_t finished = 0;  // the last step of which nothing runs any more; accepted - finished is 0 or 1
  uint32_t outcome = 0;   // PlaneOutcome
  uint32_t arrived = 0;   // of the blocks of a kernel that rings at its end, those that have ended; 0 between kernels
};

// Waits until *request is the present step's number. The first one of a step begins it: raises `step`, and waits
// without a limit. A request that is there is taken, whatever *abort says; *abort is looked at at least every
// millisecond, and before the plane ends for another reason. Acquires what was written before the request was.
//
// Who destroys a stream that may wait sets *abort first: the destructor waits for the stream's work.
struct AwaitDoorbellArgs {
  PlaneState* state = nullptr;
  const uint64_t* request = nullptr;  // engine's
  const uint32_t* abort = nullptr;    // host memory: not 0 ends the wait, and the plane
  bool begins_step = false;
  uint64_t limit_ns = 0;  // of a wait that does not begin a step, from where the wait begins; 0: none
};

// Sets *done to the step's number when all work before it is visible to other processes. Nothing after the plane's end.
// Stream::ResolveGather rings at its end where it is given one: where one kernel does all of it, that is a launch less
// between the rows and who waits for them, and they are visible to kernels of the same device alone.
struct RingDoorbellArgs {
  PlaneState* state = nullptr;
  uint64_t* done = nullptr;
};

// Waits until no step that may have read entries or tables as they were before this operation runs any more: later
// steps see all that was written before it, by this stream or, before the call, by the host. For streams beside the
// plane's. A step of the server plane that is in flight ends by its requests, by their time limits or by the plane's
// *abort; one of the direct plane by the engine alone.
struct AwaitQuietArgs {
  const PlaneState* state = nullptr;
  // They end the wait, whatever still runs.
  const uint32_t* abort = nullptr;  // optional, host memory: not 0
  uint64_t limit_ns = 0;            // 0: none
};

// What is known of a sequence to all sessions and devices, in host memory that all of them reach. Written by the
// daemon, and stored_rows also by EndBatch of the session that writes the sequence.
struct alignas(16) SequenceWord {
  int32_t stored_rows = 0;  // rows [0, stored_rows) are in the pool; only grows
  int32_t max_rows = 0;
  uint64_t writer = 0;  // session whose commits are carried out; 0: none
};

// Who has a state row, in memory of the daemon's. The sequence is written last when it comes, behind its tables and its
// word, and first when it goes (0); then AwaitQuiet, before anything else of it changes. No word is in two entries.
struct StateRowEntry {
  uint64_t sequence_id = 0;  // 0: nobody
  int32_t word = -1;         // of the sequence, in BatchArgs::words
  int32_t reserved = 0;
};

// How a batch row was taken: of what is wrong with it, the first in this list. Values are part of the contract with
// engines (proto/stoker/v1/sessions.proto).
enum class BatchStatus : int32_t {
  kOk = 0,               // also padding
  kBadCount = 1,         // batch.rows is below 0 or above max_rows: of every row
  kUnknownSequence = 2,  // the state row does not exist, or does not have the sequence
  kNotAdjacent = 3,      // the sequence has rows before this one that are not side by side with it
  kTooManyRows = 4,      // the sequence's rows x top_k are above hot_rows, or its rows above block_rows or one_row
  kBadLength = 5,        // below 1, above max_rows of the sequence or of the session, below the row before it, or above
                         // the sequence's first row by as many as it has rows, or more
  kNotStored = 6,        // rows before the newest ones, whose first is length - 1 of the first row, are not in the pool
  kNoBlock = 7,          // no pool block is reserved for the newest row
  kEarlierRow = 8,       // a row of the sequence before this one failed
  kNotWriter = 9,        // commit: another session writes the sequence
  kNotAppended = 10,     // commit: the row is not the one behind the stored rows
};

// The batch that the engine writes, and what it is told. Row i is padding where state_rows[i] < 0 or sequence_ids[i] is
// 0.
struct BatchMail {
  const int32_t* rows = nullptr;           // [1]: rows in use, 0 to max_rows
  const uint64_t* sequence_ids = nullptr;  // [max_rows]
  const int32_t* state_rows = nullptr;     // [max_rows]
  const int32_t* lengths = nullptr;        // [max_rows], newest row included
  const int32_t* commits = nullptr;        // [max_rows], read by PlanCommits: not 0 commits the newest row
  int32_t* statuses = nullptr;             // [max_rows] out: BatchStatus; those at or above *rows are not written, but
                                           // for kBadCount
};

inline constexpr int32_t kUnclaimed = 0x7fffffff;

// The checked batch, in device memory of the daemon's.
struct BatchPlan {
  int32_t* rows = nullptr;              // [1]: ResolveArgs::real_rows; 0 for a bad count, and after the plane's end
  int32_t* state_rows = nullptr;        // [max_rows]: -1 is padding, or a row that failed
  int32_t* lengths = nullptr;           // [max_rows]: 0 where state_rows is -1
  int32_t* newest_pool_rows = nullptr;  // [max_rows]: pool row of each newest row, or -1
  int32_t* newest_hot_rows = nullptr;   // [max_rows]: hot row of each newest row, or -1
  int32_t* words = nullptr;             // [max_rows]: the sequence's word, or -1
  int32_t* commit_hot_rows = nullptr;   // [max_rows]: TransferArgs::src_rows; -1 where there is nothing to commit
  int32_t* commit_pool_rows = nullptr;  // [max_rows]: TransferArgs::dst_rows
  int32_t* claims = nullptr;            // [state_rows]: scratch; kUnclaimed between batches
};

struct BatchArgs {
  PlaneState* state = nullptr;
  bool raises_step = false;  // BeginBatch raises `step`: no AwaitDoorbell does
  BatchMail mail;
  BatchPlan plan;
  int32_t max_rows = 0;  // of a batch, 1 to kMaxBatchRows
  int32_t top_k = 0;
  int32_t hot_rows = 0;           // of a state row
  int64_t max_sequence_rows = 0;  // of the session
  bool one_row = false;           // of a sequence in a batch, and no more: entries by pool row name one newest row
  uint64_t session = 0;           // not 0: compared with SequenceWord::writer

  const StateRowEntry* entries = nullptr;  // [state_rows]
  int32_t state_rows = 0;
  SequenceWord* words = nullptr;  // [word_count]
  int32_t word_count = 0;
  const int32_t* block_table = nullptr;  // [state_rows][block_table_stride]: pool block, negative for none
  int64_t block_table_stride = 0;
  int32_t block_table_columns = 0;
  int32_t block_rows = 64;
  int64_t pool_rows = 0;
  int32_t region_rows = 0;  // as ResolveArgs; newest_row + block_rows at least
  int32_t newest_row = 0;

  uint64_t* committed_rows = nullptr;  // optional [1]: EndBatch adds what it raises stored_rows by, atomically
  uint32_t* ended = nullptr;  // optional [1], engine's: EndBatch writes a PlaneOutcome that is not kRunning there
};

// BeginBatch sets `accepted` before it reads entries, words or tables; reads all of the mail but its commits, and
// writes statuses[0, *rows) and all of the plan but its commits, rows at or above *rows as padding. Rows that are side
// by side and name one state row, which has what they name, are the rows of a sequence. They are taken in order; newest
// row i of them is length - (first length) further than the first.
//
// PlanCommits reads mail.commits for the rows that BeginBatch took, writes commit_hot_rows, commit_pool_rows and the
// statuses of rows that fail. Commits of a sequence append: each is of the row behind those stored or planned before
// it; behind one that failed all fail. A row without a commit does not fail.
//
// EndBatch raises the stored_rows of what was planned to the length of the sequence's last such row, never lowers them,
// and then raises `finished` to `accepted`.
//
// A read of stored_rows acquires what was written before they were raised; EndBatch releases what the work before it
// has written.

// INVALID_ARGUMENT names field, value and limit. Every backend calls them before it enqueues.
absl::Status Validate(const AwaitDoorbellArgs& args);
absl::Status Validate(const RingDoorbellArgs& args);
absl::Status Validate(const AwaitQuietArgs& args);
absl::Status Validate(const BatchArgs& args);

}  // namespace stoker::kernels
