#include "server/core/block_allocator.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "server/core/check.h"

namespace stoker::core {
namespace {

constexpr int64_t kWordBlocks = 64;

// Bits of `word` at which `count` (1 to 64) set bits begin.
uint64_t RunStarts(uint64_t word, int64_t count) {
  for (int64_t have = 1; have < count;) {
    const int64_t step = std::min(have, count - have);
    word &= word >> step;
    have += step;
  }
  return word;
}

}  // namespace

// Walks the tree in one direction and remembers how long the free run is that touches the next node to be visited.
struct BlockAllocator::Search {
  const BlockAllocator& allocator;
  int64_t from;   // forward: the run begins here or later; backward: it ends before this
  int64_t count;  // of the run
  int64_t open_run = 0;

  template <bool kForward>
  int64_t Visit(int64_t node, int64_t start, int64_t length) {
    const bool outside = kForward ? start + length <= from : start >= from;
    if (outside) return -1;
    const bool inside = kForward ? start >= from : start + length <= from;
    if (!inside && length > kWordBlocks) return VisitHalves<kForward>(node, start, length);

    uint64_t word = 0;
    Runs runs = allocator.runs_[node];
    if (length == kWordBlocks) {
      word = allocator.words_[start / kWordBlocks];
      if (!inside) {
        const uint64_t below = (uint64_t{1} << (from - start)) - 1;
        word &= kForward ? ~below : below;
        runs = RunsOfWord(word);
      }
    }
    const int64_t first_run = kForward ? runs.head : runs.tail;
    if (open_run + first_run >= count) return kForward ? start - open_run : start + length + open_run - count;
    if (runs.longest < count) {
      open_run = first_run == length ? open_run + length : kForward ? runs.tail : runs.head;
      return -1;
    }
    if (length > kWordBlocks) return VisitHalves<kForward>(node, start, length);
    const uint64_t starts = RunStarts(word, count);
    return start + (kForward ? std::countr_zero(starts) : 63 - std::countl_zero(starts));
  }

  template <bool kForward>
  int64_t VisitHalves(int64_t node, int64_t start, int64_t length) {
    const int64_t half = length / 2;
    for (int i = 0; i < 2; ++i) {
      const int64_t side = kForward ? i : 1 - i;
      const int64_t found = Visit<kForward>(2 * node + side, start + side * half, half);
      if (found >= 0) return found;
    }
    return -1;
  }
};

BlockAllocator::BlockAllocator(int64_t blocks)
    : states_(blocks, BlockState{0, 0, 0}), words_((blocks + kWordBlocks - 1) / kWordBlocks), free_(blocks) {
  STOKER_CHECK(blocks >= 1 && blocks <= std::numeric_limits<int32_t>::max());
  std::fill(words_.begin(), words_.end(), ~uint64_t{0});
  if (blocks % kWordBlocks != 0) words_.back() = (uint64_t{1} << (blocks % kWordBlocks)) - 1;
  while (leaves_ < static_cast<int64_t>(words_.size())) {
    leaves_ *= 2;
    ++levels_;
  }
  words_.resize(leaves_, 0);
  runs_.resize(2 * leaves_);
  stale_.resize(leaves_);
  RefreshLeaves(0, leaves_ - 1);
}

bool BlockAllocator::Allocate(int64_t count, int32_t hint, std::vector<int32_t>* blocks) {
  if (count > free_) return false;
  Refresh();
  blocks->reserve(blocks->size() + count);
  int64_t left = count;
  const int64_t from = int64_t{hint} + 1;
  if (hint >= 0 && left > 0) {
    const int64_t run = FreeRunAt(from, left);
    if (run > 0) Take(from, run, blocks);
    left -= run;
  }
  absl::InlinedVector<std::pair<int64_t, int64_t>, 16> runs;
  Neighbours neighbours;
  while (left > 0) {
    const int64_t run = std::min<int64_t>(left, runs_[1].longest);
    const int64_t first = TakeNearest(from, run, &neighbours);
    runs.push_back({first, run});
    left -= run;
  }
  std::sort(runs.begin(), runs.end());
  for (const auto& [first, run] : runs) {
    for (int64_t i = 0; i < run; ++i) blocks->push_back(static_cast<int32_t>(first + i));
  }
  return true;
}

void BlockAllocator::Hold(int32_t block) {
  BlockState& state = states_[block];
  STOKER_CHECK(state.holders > 0 || state.indexed);
  if (state.holders == 0) --cached_;
  ++state.holders;
}

void BlockAllocator::LetGo(int32_t block) {
  BlockState& state = states_[block];
  STOKER_CHECK(state.holders > 0);
  if (--state.holders > 0) return;
  if (state.indexed) {
    ++cached_;
  } else {
    Free(block);
  }
}

void BlockAllocator::Index(int32_t block) {
  BlockState& state = states_[block];
  STOKER_CHECK(state.holders > 0 && !state.indexed);
  state.indexed = 1;
}

void BlockAllocator::Unindex(int32_t block) {
  BlockState& state = states_[block];
  STOKER_CHECK(state.holders > 0 && state.indexed);
  state.indexed = 0;
}

bool BlockAllocator::Evict(int32_t block) {
  BlockState& state = states_[block];
  STOKER_CHECK(state.indexed);
  state.indexed = 0;
  if (!Free(block)) return false;
  --cached_;
  return true;
}

bool BlockAllocator::Free(int32_t block) {
  if (states_[block].holders != 0) {
    ++freed_while_referenced_;
    return false;
  }
  const int32_t word = block / kWordBlocks;
  words_[word] |= uint64_t{1} << (block % kWordBlocks);
  ++free_;
  if (!stale_[word]) {
    stale_[word] = true;
    stale_words_.push_back(word);
  }
  return true;
}

void BlockAllocator::Take(int64_t first, int64_t count, std::vector<int32_t>* blocks) {
  for (int64_t block = first; block < first + count; ++block) {
    const uint64_t bit = uint64_t{1} << (block % kWordBlocks);
    STOKER_CHECK((words_[block / kWordBlocks] & bit) != 0);
    words_[block / kWordBlocks] ^= bit;
    BlockState& state = states_[block];
    state.holders = 1;
    ++state.generation;
    if (blocks != nullptr) blocks->push_back(static_cast<int32_t>(block));
  }
  free_ -= count;
  RefreshLeaves(first / kWordBlocks, (first + count - 1) / kWordBlocks);
}

int64_t BlockAllocator::FreeRunAt(int64_t first, int64_t limit) const {
  int64_t run = 0;
  while (run < limit && first + run < blocks()) {
    const int64_t at = first + run;
    const int64_t ones = std::countr_one(words_[at / kWordBlocks] >> (at % kWordBlocks));
    run += ones;
    if (ones < kWordBlocks - at % kWordBlocks) break;
  }
  return std::min(run, limit);
}

int64_t BlockAllocator::TakeNearest(int64_t from, int64_t count, Neighbours* neighbours) {
  const int64_t length = leaves_ * kWordBlocks;
  const bool same = neighbours->count == count;
  neighbours->count = count;
  if (!same || neighbours->after == kUnknown) {
    neighbours->after = Search{*this, from, count}.Visit<true>(1, 0, length);
  }
  if (!same || neighbours->before == kUnknown) {
    neighbours->before = Search{*this, from, count}.Visit<false>(1, 0, length);
  }
  const int64_t after = neighbours->after;
  const int64_t before = neighbours->before;
  int64_t first;
  if (after >= 0 && (before < 0 || after - from <= from - (before + count))) {
    first = after;
    neighbours->after = kUnknown;
  } else if (before >= 0) {
    first = before;
    neighbours->before = kUnknown;
  } else {
    // The only run that is long enough lies across `from`.
    first = Search{*this, 0, count}.Visit<true>(1, 0, length);
    STOKER_CHECK(first >= 0);
  }
  Take(first, count, nullptr);
  return first;
}

BlockAllocator::Runs BlockAllocator::RunsOfWord(uint64_t word) {
  if (word == 0) return {};
  Runs runs{std::countr_one(word), std::countl_one(word), 0};
  for (; word != 0; word &= word << 1) ++runs.longest;
  return runs;
}

BlockAllocator::Runs BlockAllocator::Join(const Runs& left, const Runs& right, int64_t half) {
  Runs runs;
  runs.head = left.head == half ? left.head + right.head : left.head;
  runs.tail = right.tail == half ? right.tail + left.tail : right.tail;
  runs.longest = std::max({left.longest, right.longest, left.tail + right.head});
  return runs;
}

void BlockAllocator::RefreshLeaves(int64_t first_word, int64_t last_word) {
  int64_t first = leaves_ + first_word;
  int64_t last = leaves_ + last_word;
  for (int64_t i = first; i <= last; ++i) runs_[i] = RunsOfWord(words_[i - leaves_]);
  for (int64_t half = kWordBlocks; first > 1; half *= 2) {
    first /= 2;
    last /= 2;
    for (int64_t i = first; i <= last; ++i) runs_[i] = Join(runs_[2 * i], runs_[2 * i + 1], half);
  }
}

void BlockAllocator::Refresh() {
  if (stale_words_.empty()) return;
  // The whole tree costs two nodes a leaf, a single word one node a level.
  if (static_cast<int64_t>(stale_words_.size()) * levels_ > 2 * leaves_) {
    RefreshLeaves(0, leaves_ - 1);
  } else {
    for (const int32_t word : stale_words_) RefreshLeaves(word, word);
  }
  for (const int32_t word : stale_words_) stale_[word] = false;
  stale_words_.clear();
}

bool BlockAllocator::Consistent() const {
  int64_t free_count = 0;
  int64_t cached_count = 0;
  for (int32_t block = 0; block < blocks(); ++block) {
    const BlockState& state = states_[block];
    if (is_free(block) != (state.holders == 0 && !state.indexed)) return false;
    free_count += is_free(block);
    cached_count += state.holders == 0 && state.indexed;
  }
  BlockAllocator copy = *this;
  copy.Refresh();
  const std::vector<Runs> kept = copy.runs_;
  copy.RefreshLeaves(0, leaves_ - 1);
  return free_count == free_ && cached_count == cached_ && kept == copy.runs_;
}

}  // namespace stoker::core
