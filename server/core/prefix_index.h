// Content hash of a prefix block -> the pool blocks that store its rows, and who is about to store those that none does
// yet.
//
// An entry is known from the admission of the first sequence that names its hash until nobody names it any more; it is
// *stored* from Publish until it is evicted. A stored entry's users are the sequences whose block tables hold all its
// blocks. Stored entries without users are on one list in the order of their last use and are evicted from its cold
// end.
//
// An entry has its own bucket chains instead of an absl map, because at most as many entries exist as the pool has
// blocks: the buckets never grow, so no admission pays for a rehash of 245,760 entries (about 10 ms).
//
// Thread safety: none; the pool's mutex guards it.
//
// Invariants:
//  1. A block belongs to at most one stored entry, and exactly the blocks of stored entries are indexed in the
//  allocator.
//  2. A stored entry with users has no cached block, so every cached block can be had by eviction.
//  3. An entry is stored or has at least one expected owner.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "server/core/block_allocator.h"
#include "server/core/ids.h"

namespace stoker::core {

class PrefixIndex {
 public:
  static constexpr int32_t kNone = -1;
  using Owners = absl::InlinedVector<SequenceId, 1>;

  explicit PrefixIndex(BlockAllocator* allocator);

  // The entry of the hash, stored or expected, or kNone.
  int32_t Find(const PrefixHash& hash) const;
  bool stored(int32_t entry) const { return at(entry).stored; }
  // Whether the entry is stored as the prefix block `ordinal` of its sequence, with `rows` rows.
  bool Matches(int32_t entry, int64_t ordinal, int64_t rows) const {
    return at(entry).stored && at(entry).ordinal == ordinal && at(entry).rows == rows;
  }
  absl::Span<const int32_t> blocks(int32_t entry) const { return at(entry).blocks; }
  // Sequences that were admitted with the hash and have not stored it.
  const Owners& owners(int32_t entry) const { return at(entry).owners; }

  // A user more or less of a stored entry. The entry that loses its last user is the most recent one then.
  void Hold(int32_t entry);
  void Release(int32_t entry);
  // Makes a stored entry without users the most recent one.
  void Touch(int32_t entry);

  // `owner` is about to store the hash.
  void Expect(const PrefixHash& hash, SequenceId owner);
  // It is not any more. False where it was not expected from that owner.
  bool Forget(const PrefixHash& hash, SequenceId owner);

  // Stores the rows under the hash with one user. kNone, and nothing changed, where the hash is stored already or a
  // block belongs to another entry: the rows then stay private to their sequence.
  int32_t Publish(const PrefixHash& hash, int64_t ordinal, int64_t rows, absl::Span<const int32_t> blocks);

  // Frees at least `count` blocks by evicting entries that nobody uses, the least recent ones first, each as a whole.
  // Entries that would free nothing are kept. Returns the number of blocks freed; less than `count` only where no
  // cached block is left.
  int64_t Evict(int64_t count);

  int64_t stored_entries() const { return stored_entries_; }
  int64_t known_entries() const { return known_entries_; }

  struct EntryView {
    PrefixHash hash;
    bool stored;
    uint32_t users;
    int64_t rows;
    absl::Span<const int32_t> blocks;
    absl::Span<const SequenceId> owners;
  };
  // Calls visit(entry, EntryView) for every known entry. For tests.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const int32_t head : buckets_) {
      for (int32_t i = head; i != kNone; i = at(i).next_in_bucket) {
        const Entry& entry = at(i);
        visit(i, EntryView{entry.hash, entry.stored, entry.users, entry.rows, entry.blocks, entry.owners});
      }
    }
  }
  // Entries without users, the least recent one first. For tests.
  std::vector<int32_t> ColdToHot() const;

 private:
  static constexpr int64_t kChunkEntries = 1024;

  struct Entry {
    PrefixHash hash;
    int32_t next_in_bucket = kNone;
    int32_t colder = kNone;
    int32_t hotter = kNone;
    int32_t ordinal = 0;
    int32_t rows = 0;
    uint32_t users = 0;
    bool stored = false;
    bool listed = false;  // stored and without users
    absl::InlinedVector<int32_t, 8> blocks;
    Owners owners;
  };

  Entry& at(int32_t entry) { return chunks_[entry / kChunkEntries][entry % kChunkEntries]; }
  const Entry& at(int32_t entry) const { return chunks_[entry / kChunkEntries][entry % kChunkEntries]; }
  void Prefetch(const Entry& entry) const;
  int32_t& Bucket(const PrefixHash& hash);
  int32_t FindOrCreate(const PrefixHash& hash);
  void Remove(int32_t entry);
  void List(int32_t entry);
  void Unlist(int32_t entry);

  BlockAllocator& allocator_;
  std::vector<int32_t> buckets_;
  std::vector<std::unique_ptr<Entry[]>> chunks_;  // entries never move
  int32_t first_unused_ = kNone;                  // chained by next_in_bucket
  int32_t coldest_ = kNone;
  int32_t hottest_ = kNone;
  int64_t stored_entries_ = 0;
  int64_t known_entries_ = 0;
};

}  // namespace stoker::core
