// What a Pool is inside: for pool.cc, pool_write.cc and pool_invariants.cc only.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/core/block_allocator.h"
#include "server/core/pool.h"
#include "server/core/prefix_index.h"
#include "server/core/sequence_table.h"

namespace stoker::core {

// What an admission can share. Naming entries and blocks holds none of them yet.
struct PrefixMatch {
  std::vector<int32_t> entries;  // that the sequence will be a user of
  std::vector<int32_t> blocks;   // that it will share
  int64_t rows = 0;
  // A partial last entry whose last block is to be copied. kNone: there is none.
  int32_t partial_entry = PrefixIndex::kNone;
  int32_t copy_source = 0;
  int64_t copy_rows = 0;
  // The first hash that is not shared is being stored by somebody.
  bool pending = false;
};

struct Pool::State {
  State(const PoolSpec& pool_spec, PoolCounters* pool_counters, absl::Duration retention_time)
      : spec(pool_spec),
        retention(retention_time),
        counters(*pool_counters),
        allocator(pool_spec.blocks),
        index(&allocator) {
    SyncCounters();
  }

  int64_t BlocksFor(int64_t rows) const { return (rows + spec.block_rows - 1) / spec.block_rows; }
  int64_t PoolRow(const Sequence& sequence, int64_t position) const {
    return sequence.table[position / spec.block_rows] * spec.block_rows + position % spec.block_rows;
  }
  // Rows [0, ...) that hash `ordinal` of the sequence stands for.
  int64_t PrefixEnd(int64_t ordinal, int64_t prompt_rows) const {
    return std::min((ordinal + 1) * spec.prefix_rows, prompt_rows);
  }

  absl::Status CheckKey(std::string_view key) const;
  absl::Status CheckQuota(SessionId session, const SequenceLimits& limits, int64_t blocks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status CheckBlocks(int64_t needed, int64_t matched_cached) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Evicts as much as it takes and appends `count` blocks; CheckBlocks has passed.
  void TakeBlocks(int64_t count, int32_t hint, std::vector<int32_t>* blocks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  PrefixMatch Match(const AdmitParams& params) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  int64_t CachedBlocks(const PrefixMatch& match) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::StatusOr<Admission> Join(SessionId session, const SequenceLimits& limits, AdmitParams& params,
                                 Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // The source block of the sequence's first copy is held until it is finished or given up.
  void BeginCopy(Sequence& sequence, int32_t source_block, int64_t first_row, SessionId session)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void EndCopy(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Expect(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void StopExpecting(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Publish(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Free(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  absl::Status FindWriter(SessionId session, SequenceId id, Sequence** sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // A write at `row` of the block in `column` must not be seen by others that hold the block.
  bool MustCopy(const Sequence& sequence, int64_t column, int64_t row) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return row < sequence.sealed_rows && allocator.shared(sequence.table[column]);
  }
  // Begins a write whose range has been checked.
  absl::Status Write(Sequence& sequence, int64_t first, int64_t count, WritePlan* plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status CopyOnWrite(Sequence& sequence, int64_t first, int64_t count, WritePlan* plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Step(SessionId session, const StepAccess& access, StepGrant* grant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  void Reclaim(absl::Span<const BlockRef> blocks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Whether the session must wait for copies of a write; then `on_copied`, if any, is kept, and *admission tells it.
  bool AwaitCopies(SessionId session, Sequence& sequence, std::function<void()> on_copied, Admission* admission)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Wakes those who wait for the sequence's copies, once Callbacks are taken.
  void WakeAll(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::move(sequence.waiting.begin(), sequence.waiting.end(), std::back_inserter(callbacks));
    sequence.waiting.clear();
  }
  // Wakes those who wait for the hash, once Callbacks are taken.
  void Wake(const PrefixHash& hash) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  std::vector<std::function<void()>> TakeCallbacks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return std::exchange(callbacks, {});
  }
  void SyncCounters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // A new sequence, with its word.
  Sequence& Create(std::string_view key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // RESOURCE_EXHAUSTED: MaxSequences.
  absl::Status CheckSequences() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // As those of `sequences`, with what the plane of the sequence's writer has stored.
  Sequence* Find(SequenceId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status FindOpen(SessionId session, SequenceId id, Sequence** sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Takes in what a plane has stored.
  void TakeIn(Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Tells planes of a change of stored_rows, copy, max_rows or writer. `anew`: also of fewer stored rows, of a sequence
  // that no plane can be appending to.
  void Tell(Sequence& sequence, bool anew = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const PoolSpec& spec;
  const absl::Duration retention;
  PoolCounters& counters;
  mutable absl::Mutex mutex;
  BlockAllocator allocator ABSL_GUARDED_BY(mutex);
  PrefixIndex index ABSL_GUARDED_BY(mutex);
  SequenceTable sequences ABSL_GUARDED_BY(mutex);
  absl::Span<SequenceWord> words;  // set before there are sequences
  absl::flat_hash_map<PrefixHash, std::vector<std::function<void()>>> waiting ABSL_GUARDED_BY(mutex);
  std::vector<std::function<void()>> callbacks ABSL_GUARDED_BY(mutex);
  // Blocks that write plans replaced and nobody has reclaimed yet: block -> generation and number of plans.
  absl::flat_hash_map<int32_t, std::pair<uint32_t, int64_t>> replaced ABSL_GUARDED_BY(mutex);
};

}  // namespace stoker::core
