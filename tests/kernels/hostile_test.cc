// Operations while a client writes random values into everything that it can write: nothing is read or written out of
// bounds (the sanitizers and the poison tell), and every output is in range.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/batch_case.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/row_store_case.h"

namespace stoker::kernels {
namespace {

// Operations go on until every scribbler has had this many turns, so that they do run side by side.
constexpr int64_t kTurns = 500;

// Writes into one array until it is destroyed. Half of the values are in range, where they do most harm.
class Scribbler {
 public:
  template <typename T>
  void Add(T* values, size_t count, int32_t limit) {
    turns_.push_back(std::make_unique<std::atomic<int64_t>>(0));
    threads_.emplace_back([this, values, count, limit, turns = turns_.back().get()] {
      std::minstd_rand rng(static_cast<uint32_t>(count));
      while (!stop_.load(std::memory_order_relaxed)) {
        for (int i = 0; i < 64; ++i) {
          const uint32_t value = rng();
          const T written = value % 2 == 0 ? static_cast<T>(value / 2 % limit) : static_cast<T>(rng() * 2654435761u);
          cpu::Store(values + rng() % count, written);
        }
        ++*turns;
        std::this_thread::yield();
      }
    });
  }
  bool Working() const {
    return std::any_of(turns_.begin(), turns_.end(), [](const auto& turns) { return *turns < kTurns; });
  }
  ~Scribbler() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_ = false;
  std::vector<std::unique_ptr<std::atomic<int64_t>>> turns_;
  std::vector<std::thread> threads_;
};

void ScribbleWhileResolving(IndexSpace index_space) {
  std::mt19937_64 rng(31);
  ResolveShape shape;
  shape.index_space = index_space;
  shape.state_rows = 2;
  shape.rows = 3;
  shape.top_k = 64;
  shape.hot_rows = 128;
  shape.resident_table = false;
  shape.newest_pool_rows = index_space == IndexSpace::kPoolRow;
  ResolveCase c(shape);
  c.FillState(rng, 512, 0.8);
  c.SetStateRow(0, 0);
  c.SetStateRow(1, 1);
  c.SetStateRow(2, 1);
  std::byte* const base = c.image().data();
  const ResolveArgs args = c.Args(base);
  ASSERT_TRUE(Validate(args).ok());
  const int32_t region_rows = shape.hot_rows + shape.newest_capacity;
  const Image before = c.image();
  {
    Scribbler scribbler;
    scribbler.Add(args.residency.slot_key, size_t{2} * shape.hot_rows, 512);
    scribbler.Add(args.residency.lru, size_t{2} * shape.hot_rows, shape.hot_rows);
    scribbler.Add(const_cast<int32_t*>(args.entries), size_t{3} * shape.top_k, 512);
    scribbler.Add(const_cast<int32_t*>(static_cast<const int32_t*>(args.lengths.data)), 3, 513);
    while (scribbler.Working()) {
      cpu::Resolve(args);
      for (int32_t r = 0; r < 3; ++r) {
        const int32_t first = (r == 0 ? 0 : 1) * region_rows;
        int32_t sum = 0;
        for (int32_t o = 0; o < kOutcomes; ++o) sum += args.counts[r * kOutcomes + o];
        ASSERT_LE(sum, shape.top_k);
        for (int32_t i = 0; i < shape.top_k; ++i) {
          const int32_t hot_row = args.hot_rows_out[r * args.hot_rows_out_stride + i];
          ASSERT_TRUE(hot_row == -1 || (hot_row >= first && hot_row < first + region_rows)) << hot_row;
        }
        ASSERT_GE(args.miss_counts[r], 0);
        ASSERT_LE(args.miss_counts[r], shape.top_k);
        ASSERT_EQ(args.told_miss_counts[r], args.miss_counts[r]);
        for (int32_t i = 0; i < args.miss_counts[r]; ++i) {
          const int32_t pool_row = args.miss_pool_rows[r * shape.top_k + i];
          ASSERT_GE(pool_row, 0);
          ASSERT_LT(pool_row, args.pool_rows);
        }
      }
    }
  }
  // Everything that neither side may write is as it was.
  Image after = c.image();
  const auto restore = [&](const void* from, size_t bytes) {
    const size_t offset = static_cast<const std::byte*>(from) - base;
    std::copy_n(const_cast<Image&>(before).data() + offset, bytes, after.data() + offset);
  };
  restore(args.residency.slot_key, size_t{2} * shape.hot_rows * 4);
  restore(args.residency.lru, size_t{2} * shape.hot_rows * 2);
  restore(args.entries, size_t{3} * shape.top_k * 4);
  restore(args.lengths.data, 12);
  const size_t entries = size_t{3} * shape.top_k * 4;
  for (const void* output :
       {static_cast<const void*>(args.hot_rows_out), static_cast<const void*>(args.attention_indices),
        static_cast<const void*>(args.resolved_pool_rows), static_cast<const void*>(args.miss_mask),
        static_cast<const void*>(args.miss_pool_rows), static_cast<const void*>(args.miss_hot_rows)}) {
    restore(output, entries);
  }
  restore(args.miss_counts, 12);
  restore(args.told_miss_counts, 12);
  restore(args.counts, size_t{3} * kOutcomes * 4);
  restore(args.stats, kStats * 8);
  for (int32_t r = 0; r < 3; ++r) restore(args.valid_counts + r * args.valid_count_stride, 4);
  EXPECT_TRUE(after.Equals(before));
}

TEST(HostileTest, ResolveOfPositions) { ScribbleWhileResolving(IndexSpace::kPosition); }
TEST(HostileTest, ResolveOfPoolRows) { ScribbleWhileResolving(IndexSpace::kPoolRow); }

// A batch, and what becomes of it: only rows of sequences that the daemon gave leave the plan, and commits append.
TEST(HostileTest, Batch) {
  BatchShape shape{.max_rows = 6, .top_k = 4, .hot_rows = 8, .raises_step = true};
  shape.newest_row = 8;
  shape.region_rows = 12;
  BatchCase c(shape);
  std::vector<SequenceWord> words(shape.word_count);
  std::copy_n(&c.word(0), shape.word_count, words.begin());
  std::byte* const base = c.image().data();
  const BatchArgs args = c.Args(base, reinterpret_cast<std::byte*>(words.data()));
  ASSERT_TRUE(Validate(args).ok());
  int32_t commits = 0;
  int32_t most[4] = {};  // rows that a sequence had in the pool
  Scribbler scribbler;
  scribbler.Add(&c.rows(), 1, 7);
  scribbler.Add(c.state_rows(), 6, 4);
  scribbler.Add(c.lengths(), 6, 33);
  scribbler.Add(c.commits(), 6, 2);
  const int32_t known_ids = 104;
  scribbler.Add(c.sequence_ids(), 6, known_ids);
  std::minstd_rand rng(34);
  while (scribbler.Working() || commits < 20) {
    // Sequence ids are rarely hit by chance.
    for (int32_t i = 0; i < 6; ++i) cpu::Store(c.sequence_ids() + i, uint64_t{100 + rng() % 4});
    cpu::BeginBatch(args);
    const int32_t rows = *args.plan.rows;
    ASSERT_TRUE(rows >= 0 && rows <= 6) << rows;
    std::set<int32_t> ended;
    for (int32_t i = 0; i < 6; ++i) {
      const int32_t state_row = args.plan.state_rows[i];
      if (i > 0 && args.plan.state_rows[i - 1] != state_row) ended.insert(args.plan.state_rows[i - 1]);
      if (state_row == -1) continue;
      ASSERT_LT(i, rows);
      ASSERT_TRUE(state_row >= 0 && state_row < 4) << state_row;
      ASSERT_EQ(ended.count(state_row), 0) << "not side by side";
      ASSERT_EQ(args.plan.words[i], state_row);
      const int32_t length = args.plan.lengths[i];
      ASSERT_TRUE(length >= 1 && length <= 32) << length;
      ASSERT_EQ(args.plan.newest_pool_rows[i], state_row * 32 + length - 1);
      const int32_t newest = args.plan.newest_hot_rows[i] - state_row * 12;
      ASSERT_TRUE(newest >= 8 && newest < 10) << newest;
    }
    cpu::PlanCommits(args);
    std::set<int32_t> targets;
    for (int32_t i = 0; i < 6; ++i) {
      if (args.plan.commit_hot_rows[i] < 0) continue;
      ASSERT_EQ(args.plan.commit_hot_rows[i], args.plan.newest_hot_rows[i]);
      ASSERT_TRUE(targets.insert(args.plan.commit_pool_rows[i]).second);
      ASSERT_EQ(args.plan.commit_pool_rows[i] % 32, most[args.plan.state_rows[i]]++);
      ++commits;
    }
    cpu::EndBatch(args);
    for (int32_t r = 0; r < 4; ++r) {
      ASSERT_EQ(words[r].stored_rows, most[r]);
      // As if the sequence were given up and another came.
      if (most[r] > 28) most[r] = words[r].stored_rows = 0;
    }
  }
}

TEST(HostileTest, InvalidateResetPlace) {
  std::mt19937_64 rng(32);
  ResolveShape shape;
  shape.hot_rows = 128;
  ResolveCase c(shape);
  c.FillState(rng, 512, 0.8);
  std::vector<int32_t> states(100, 0);
  std::vector<int64_t> keys(100, 5);
  const Residency residency = c.Args(c.image().data()).residency;
  Scribbler scribbler;
  scribbler.Add(residency.slot_key, 128, 512);
  scribbler.Add(residency.lru, 128, 128);
  scribbler.Add(states.data(), states.size(), 2);
  scribbler.Add(keys.data(), keys.size(), 512);
  while (scribbler.Working()) {
    cpu::Invalidate({.residency = residency, .state_rows = states.data(), .keys = keys.data(), .count = 100});
    cpu::Place(
        {.residency = residency, .state_row = 0, .first_position = static_cast<int32_t>(rng() % 64), .count = 64});
    cpu::Reset({.residency = residency, .state_rows = states.data(), .count = 3});
  }
}

TEST(HostileTest, Gather) {
  std::mt19937_64 rng(33);
  Image image;
  const RowLayout layout = RowLayout::Make({.row_bytes = 16}, 64).value();
  const StoreCase pool(image, "pool", layout, 2, 0, rng);
  const StoreCase hot(image, "hot", layout, 2, 0, rng);
  std::vector<int32_t> from(128, 0);
  std::vector<int32_t> to(128, 0);
  std::vector<int32_t> mask(128, 1);
  std::vector<int32_t> counts(2, 64);
  const std::vector<int32_t> layers = {0, 1};
  const std::vector<uint8_t> pool_before = image.Values(pool.bytes);
  Scribbler scribbler;
  for (std::vector<int32_t>* values : {&from, &to, &mask, &counts}) scribbler.Add(values->data(), values->size(), 64);
  while (scribbler.Working()) {
    cpu::Gather(GatherCompactArgs{.pool = pool.In(image.data()),
                                  .hot = hot.In(image.data()),
                                  .pool_rows = 64,
                                  .hot_rows = 64,
                                  .layers = layers.data(),
                                  .layer_count = 2,
                                  .miss_pool_rows = from.data(),
                                  .miss_hot_rows = to.data(),
                                  .miss_counts = counts.data(),
                                  .rows = 2,
                                  .top_k = 64,
                                  .gathered_bytes = nullptr});
    GatherDenseArgs dense;
    dense.pool = pool.In(image.data());
    dense.hot = hot.In(image.data());
    dense.pool_rows = 64;
    dense.hot_rows = 64;
    dense.layers = layers.data();
    dense.layer_count = 2;
    dense.entry_pool_rows = from.data();
    dense.entry_hot_rows = to.data();
    dense.miss_mask = mask.data();
    dense.rows = 2;
    dense.top_k = 64;
    cpu::Gather(dense);
    cpu::Transfer({.src = pool.In(image.data()),
                   .dst = hot.In(image.data()),
                   .src_row_limit = 64,
                   .dst_row_limit = 64,
                   .src_layers = layers.data(),
                   .dst_layers = layers.data(),
                   .layer_count = 2,
                   .src_rows = from.data(),
                   .dst_rows = to.data(),
                   .count = 128,
                   .transferred_bytes = nullptr});
  }
  EXPECT_EQ(image.Values(pool.bytes), pool_before);
}

}  // namespace
}  // namespace stoker::kernels
