// The batch of a plane: BeginBatch, PlanCommits, EndBatch. One block each, since what a row means depends on the other
// rows of its sequence.
//
// The rows of a sequence are taken by one thread, its first row's, which walks over them in shared memory: usually one,
// with speculative decoding a few. An engine that puts 4,096 rows of one sequence into a batch waits for a walk of
// 4,096. Which row is a state row's first is settled by atomicMin in plan.claims.
//
// Bound of BeginBatch: five dependent trips, four to device memory (the plane's state, the mail, entries, their words
// and tables) and one over the link (sequence words): 4 x 0.7 + 1.5 us. PlanCommits: two and one; EndBatch: two and
// one.
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/system_memory.cuh"
#include "kernels/plane.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kRowsOfThread = kMaxBatchRows / kMaxThreads;
static_assert(kRowsOfThread * kMaxThreads == kMaxBatchRows);

constexpr int32_t kNone = -1;

// Row j of this thread.
__device__ int32_t RowOf(int j) { return static_cast<int32_t>(threadIdx.x + static_cast<unsigned>(j) * blockDim.x); }

__device__ bool Ended(const BatchArgs& args) {
  return Load(&args.state->outcome) != static_cast<uint32_t>(PlaneOutcome::kRunning);
}

__device__ void WriteStatus(const BatchArgs& args, int32_t i, BatchStatus status) {
  args.mail.statuses[i] = static_cast<int32_t>(status);
}

// What the threads know of the rows.
struct BatchShared {
  int32_t count;                     // rows in use, or one of:
  int32_t state_row[kMaxBatchRows];  // -1: none, or not the sequence's
  int32_t length[kMaxBatchRows];
  uint8_t mark[kMaxBatchRows];  // BatchStatus, or one of the marks
};
constexpr int32_t kBadRows = -1;
constexpr int32_t kPlaneEnded = -2;
static_assert(sizeof(BatchShared) <= 48 << 10, "what a block has without asking");

// Marks of PlanCommits, beside statuses.
constexpr uint8_t kAsked = 0x40;
constexpr uint8_t kPlanned = 0x41;
// BeginBatch: added to what is wrong with a row by itself, until its sequence is taken.
constexpr uint8_t kNotTaken = 0x80;

__device__ constexpr uint8_t Mark(BatchStatus status) { return static_cast<uint8_t>(status); }

// Returns BatchShared::count.
__device__ int32_t Begin(const BatchArgs& args) {
  if (Ended(args)) {
    *args.plan.rows = 0;
    return kPlaneEnded;
  }
  PlaneState* const state = args.state;
  const uint64_t step = Load(&state->step) + (args.raises_step ? 1 : 0);
  if (args.raises_step) Store(&state->step, step);
  Store(&state->accepted, step);
  // Either what is read behind the barrier is what others wrote before their AwaitQuiet, or that one sees `accepted`.
  FenceSequential();
  const int32_t count = Load(args.mail.rows);
  const bool good = count >= 0 && count <= args.max_rows;
  *args.plan.rows = good ? count : 0;
  return good ? count : kBadRows;
}

// Pool row of a position that is not negative, or -1.
__device__ int32_t PoolRowOf(const BatchArgs& args, int32_t state_row, int32_t position) {
  const int32_t column = position / args.block_rows;
  if (column >= args.block_table_columns) return kNone;
  const int64_t block = Load(args.block_table + state_row * args.block_table_stride + column);
  const int64_t row = block * args.block_rows + position % args.block_rows;
  return block >= 0 && row < args.pool_rows ? static_cast<int32_t>(row) : kNone;
}

// What is kept of a row by its thread.
struct BatchRow {
  int32_t word = kNone;
  int32_t pool_row = kNone;  // of the newest row; -1: none
};

// Reads row i, and claims its state row. What others must know of it goes into shared memory.
__device__ BatchRow ReadRow(const BatchArgs& args, int32_t i, BatchShared& shared) {
  BatchRow row;
  const uint64_t sequence_id = Load(args.mail.sequence_ids + i);
  const int32_t state_row = Load(args.mail.state_rows + i);
  const int32_t length = Load(args.mail.lengths + i);
  shared.state_row[i] = kNone;
  shared.length[i] = length;
  shared.mark[i] = Mark(BatchStatus::kOk);
  if (state_row < 0 || sequence_id == 0) return row;
  shared.mark[i] = Mark(BatchStatus::kUnknownSequence);
  if (state_row >= args.state_rows) return row;
  // First: what else is known of the sequence was written before.
  if (LoadAcquire(&args.entries[state_row].sequence_id) != sequence_id) return row;
  const int32_t word = Load(&args.entries[state_row].word);
  const int32_t pool_row = length >= 1 ? PoolRowOf(args, state_row, length - 1) : kNone;
  if (word < 0 || word >= args.word_count) return row;
  row.word = word;
  row.pool_row = pool_row;
  shared.state_row[i] = state_row;
  shared.mark[i] = kNotTaken | Mark(pool_row < 0 ? BatchStatus::kNoBlock : BatchStatus::kOk);
  atomicMin(args.plan.claims + state_row, i);
  return row;
}

// End of the rows of one sequence, of which `first` is the first.
__device__ int32_t EndOfSequence(const BatchShared& shared, int32_t first, int32_t count) {
  int32_t end = first + 1;
  while (end < count && shared.state_row[end] == shared.state_row[first]) ++end;
  return end;
}

// Settles the statuses of a sequence's rows.
__device__ void TakeSequence(const BatchArgs& args, int32_t first, int32_t word, BatchShared& shared) {
  const int32_t max_word_rows = Load(&args.words[word].max_rows);
  const int64_t stored_rows = LoadAcquire(&args.words[word].stored_rows);
  const int64_t max_rows = min(int64_t{max_word_rows}, args.max_sequence_rows);
  const int32_t end = EndOfSequence(shared, first, shared.count);
  const int64_t count = end - first;
  const int64_t first_length = shared.length[first];
  const bool too_many = count * args.top_k > args.hot_rows || count > args.block_rows || (args.one_row && count > 1);
  bool failed = false;
  int32_t before = shared.length[first];
  for (int32_t i = first; i < end; ++i) {
    const int32_t length = shared.length[i];
    const bool no_block = (shared.mark[i] & ~kNotTaken) == Mark(BatchStatus::kNoBlock);
    BatchStatus status = BatchStatus::kOk;
    if (too_many) {
      status = BatchStatus::kTooManyRows;
    } else if (length < 1 || length > max_rows || length < before || length - first_length >= count) {
      status = BatchStatus::kBadLength;
    } else if (stored_rows < first_length - 1) {
      status = BatchStatus::kNotStored;
    } else if (no_block) {
      status = BatchStatus::kNoBlock;
    } else if (failed) {
      status = BatchStatus::kEarlierRow;
    }
    shared.mark[i] = Mark(status);
    failed |= status != BatchStatus::kOk;
    before = length;
  }
}

__global__ void __launch_bounds__(kMaxThreads) BeginBatchKernel(const __grid_constant__ BatchArgs args) {
  __shared__ BatchShared shared;
  if (threadIdx.x == 0) shared.count = Begin(args);
  __syncthreads();
  if (shared.count == kPlaneEnded) return;
  const bool bad = shared.count == kBadRows;
  const int32_t count = shared.count;  // negative where it is bad: no row is below it

  BatchRow row[kRowsOfThread];
  int32_t first[kRowsOfThread];  // of the rows that name the same state row; -1 where that has not what it names
#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    if (RowOf(j) < count) row[j] = ReadRow(args, RowOf(j), shared);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    const int32_t i = RowOf(j);
    first[j] = i < count && shared.state_row[i] >= 0 ? Load(args.plan.claims + shared.state_row[i]) : kNone;
    if (first[j] == i) TakeSequence(args, i, row[j].word, shared);
  }
  __syncthreads();

#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    const int32_t i = RowOf(j);
    if (i >= args.max_rows) continue;
    uint8_t mark = Mark(bad ? BatchStatus::kBadCount : BatchStatus::kOk);
    if (i < count) mark = shared.mark[i] < kNotTaken ? shared.mark[i] : Mark(BatchStatus::kNotAdjacent);
    if (i < count || bad) WriteStatus(args, i, static_cast<BatchStatus>(mark));
    const bool taken = first[j] >= 0 && mark == Mark(BatchStatus::kOk);
    const int32_t state_row = first[j] >= 0 ? shared.state_row[i] : kNone;
    const BatchPlan& plan = args.plan;
    plan.state_rows[i] = taken ? state_row : kNone;
    plan.lengths[i] = taken ? shared.length[i] : 0;
    plan.newest_pool_rows[i] = taken ? row[j].pool_row : kNone;
    plan.newest_hot_rows[i] =
        taken ? state_row * args.region_rows + args.newest_row + (shared.length[i] - shared.length[first[j]]) : kNone;
    plan.words[i] = taken ? row[j].word : kNone;
    if (state_row >= 0) plan.claims[state_row] = kUnclaimed;
  }
}

// Settles the marks of a sequence's rows, all of which are taken, and some asked for.
__device__ void PlanSequence(const BatchArgs& args, int32_t first, BatchShared& shared) {
  const SequenceWord* const word = args.words + args.plan.words[first];
  const bool writes = Load(&word->writer) == args.session;
  const int64_t stored_rows = LoadAcquire(&word->stored_rows);
  const uint8_t failure = Mark(writes ? BatchStatus::kNotAppended : BatchStatus::kNotWriter);
  // Position that the next commit must have; -1: none is carried out any more.
  int64_t next = writes ? stored_rows : kNone;
  const int32_t end = EndOfSequence(shared, first, args.max_rows);
  for (int32_t i = first; i < end; ++i) {
    if (shared.mark[i] != kAsked) continue;
    const bool planned = shared.length[i] - 1 == next;
    next = planned ? next + 1 : kNone;
    shared.mark[i] = planned ? kPlanned : failure;
  }
}

__global__ void __launch_bounds__(kMaxThreads) PlanCommitsKernel(const __grid_constant__ BatchArgs args) {
  __shared__ BatchShared shared;
  const BatchPlan& plan = args.plan;
  const bool ended = Ended(args);
#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    const int32_t i = RowOf(j);
    if (i >= args.max_rows) continue;
    shared.state_row[i] = ended ? kNone : plan.state_rows[i];
    shared.length[i] = plan.lengths[i];
    const bool asked = shared.state_row[i] >= 0 && Load(args.mail.commits + i) != 0;
    shared.mark[i] = asked ? kAsked : Mark(BatchStatus::kOk);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    const int32_t i = RowOf(j);
    if (i >= args.max_rows || shared.state_row[i] < 0) continue;
    if (i == 0 || shared.state_row[i - 1] != shared.state_row[i]) PlanSequence(args, i, shared);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kRowsOfThread; ++j) {
    const int32_t i = RowOf(j);
    if (i >= args.max_rows) continue;
    const uint8_t mark = shared.mark[i];
    const bool planned = mark == kPlanned;
    plan.commit_hot_rows[i] = planned ? plan.newest_hot_rows[i] : kNone;
    plan.commit_pool_rows[i] = planned ? plan.newest_pool_rows[i] : kNone;
    if (!planned && mark != Mark(BatchStatus::kOk)) WriteStatus(args, i, static_cast<BatchStatus>(mark));
  }
}

// Whether no row behind row i has a planned commit of the same sequence.
__device__ bool IsLastCommit(const BatchArgs& args, int32_t i) {
  const int32_t state_row = args.plan.state_rows[i];
  for (int32_t k = i + 1; k < args.max_rows && args.plan.state_rows[k] == state_row; ++k) {
    if (args.plan.commit_hot_rows[k] >= 0) return false;
  }
  return true;
}

__global__ void __launch_bounds__(kMaxThreads) EndBatchKernel(const __grid_constant__ BatchArgs args) {
  const bool ended = Ended(args);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < args.max_rows && !ended;
       i += static_cast<int32_t>(blockDim.x)) {
    if (args.plan.commit_hot_rows[i] < 0 || !IsLastCommit(args, i)) continue;
    int32_t* const stored_rows = &args.words[args.plan.words[i]].stored_rows;
    const int32_t before = Load(stored_rows);
    const int32_t length = args.plan.lengths[i];
    if (length <= before) continue;
    StoreRelease(stored_rows, length);
    if (args.committed_rows != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.committed_rows),
                static_cast<unsigned long long>(int64_t{length} - before));
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ended && args.ended != nullptr) StoreRelease(args.ended, Load(&args.state->outcome));
  StoreRelease(&args.state->finished, Load(&args.state->accepted));
}

// Whole warps, and a thread for each row as far as a block has them.
unsigned ThreadsFor(const BatchArgs& args) {
  return static_cast<unsigned>(std::min((args.max_rows + 31) / 32 * 32, kMaxThreads));
}

}  // namespace

cudaError_t LaunchBeginBatch(const BatchArgs& args, cudaStream_t stream) {
  BeginBatchKernel<<<1, ThreadsFor(args), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchPlanCommits(const BatchArgs& args, cudaStream_t stream) {
  PlanCommitsKernel<<<1, ThreadsFor(args), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchEndBatch(const BatchArgs& args, cudaStream_t stream) {
  EndBatchKernel<<<1, ThreadsFor(args), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
