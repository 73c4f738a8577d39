// Which blocks of a pool are free, and who keeps the others.
//
// Random reads of host memory from a GPU are bound by address translation, not by bytes: 2,048 rows per sequence out of
// 16 GiB arrive 1.6 times as fast when each sequence's rows lie together. So a request for many blocks is answered with
// as few runs of neighbours as there can be, near the sequence's earlier blocks. Summaries of the free runs (the first,
// the last and the longest one under each node of a binary tree over 64-block words) find a run in O(log blocks),
// however fragmented the pool is.
//
// Thread safety: none; the pool's mutex guards it.
//
// Invariants:
//  1. A block is free, or has holders (sequences, pending copies, write plans), or is indexed, or both of the latter.
//  2. free() + referenced() + cached() = blocks(); referenced: with holders; cached: indexed without holders.
//  3. Every allocation of a place raises its generation.
#pragma once

#include <cstdint>
#include <vector>

#include "server/core/ids.h"

namespace stoker::core {

class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t blocks);

  // Appends `count` blocks to *blocks, each with one holder: first those that follow `hint` (a block, or -1), then the
  // longest free runs, or the nearest ones that suffice, in ascending order. False, and nothing changed, where fewer
  // are free.
  bool Allocate(int64_t count, int32_t hint, std::vector<int32_t>* blocks);

  // Adds a holder to a block that is not free.
  void Hold(int32_t block);
  // Takes one holder away. The block becomes free with the last one, unless it is indexed.
  void LetGo(int32_t block);
  // The prefix index takes up a block that has holders.
  void Index(int32_t block);
  // The prefix index gives up a block that has holders.
  void Unindex(int32_t block);
  // The prefix index gives up a cached block, which becomes free. A block that has holders is left to them and counted
  // in freed_while_referenced; false then.
  bool Evict(int32_t block);

  int64_t blocks() const { return static_cast<int64_t>(states_.size()); }
  int64_t free() const { return free_; }
  int64_t referenced() const { return blocks() - free_ - cached_; }
  int64_t cached() const { return cached_; }
  // How often a block was about to become free while it had holders. Anything but 0 is a bug in the caller.
  int64_t freed_while_referenced() const { return freed_while_referenced_; }

  uint32_t holders(int32_t block) const { return states_[block].holders; }
  bool indexed(int32_t block) const { return states_[block].indexed; }
  // Whether anyone beside one holder can see the block.
  bool shared(int32_t block) const { return states_[block].holders + states_[block].indexed > 1; }
  bool is_free(int32_t block) const { return (words_[block / 64] >> (block % 64) & 1) != 0; }
  BlockRef ref(int32_t block) const { return {block, states_[block].generation}; }

  // Compares the summaries and the counts with the blocks' states. For tests; linear in blocks.
  bool Consistent() const;

 private:
  struct BlockState {
    uint32_t holders : 31;
    uint32_t indexed : 1;
    uint32_t generation;
  };
  // The free runs under a node: at its start, at its end, and the longest anywhere in it.
  struct Runs {
    int32_t head = 0;
    int32_t tail = 0;
    int32_t longest = 0;
    friend bool operator==(const Runs&, const Runs&) = default;
  };
  static constexpr int64_t kUnknown = -2;
  // The nearest runs of `count` free blocks, or -1. What is not taken stays valid until the next length.
  struct Neighbours {
    int64_t count = 0;
    int64_t after = kUnknown;
    int64_t before = kUnknown;
  };
  struct Search;

  static Runs RunsOfWord(uint64_t word);
  static Runs Join(const Runs& left, const Runs& right, int64_t half);
  bool Free(int32_t block);
  void Take(int64_t first, int64_t count, std::vector<int32_t>* blocks);
  int64_t FreeRunAt(int64_t first, int64_t limit) const;
  // Takes the run of `count` free blocks that is nearest to `from`, and returns its first block. There must be one.
  int64_t TakeNearest(int64_t from, int64_t count, Neighbours* neighbours);
  void RefreshLeaves(int64_t first_word, int64_t last_word);
  void Refresh();

  std::vector<BlockState> states_;
  std::vector<uint64_t> words_;  // bit: the block is free
  // Heap order: node 1 is the root, leaf i (word i) is leaves_ + i.
  std::vector<Runs> runs_;
  int64_t leaves_ = 1;
  int levels_ = 0;
  // Words whose summary is out of date since blocks became free; brought up to date by the next allocation.
  std::vector<int32_t> stale_words_;
  std::vector<bool> stale_;
  int64_t free_ = 0;
  int64_t cached_ = 0;
  int64_t freed_while_referenced_ = 0;
};

}  // namespace stoker::core
