#include "server/core/block_allocator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::core {
namespace {

using testing::ElementsAre;

std::vector<int32_t> Allocate(BlockAllocator& allocator, int64_t count, int32_t hint = -1) {
  std::vector<int32_t> blocks;
  EXPECT_TRUE(allocator.Allocate(count, hint, &blocks));
  return blocks;
}

int64_t Runs(const std::vector<int32_t>& blocks) {
  int64_t runs = 0;
  for (size_t i = 0; i < blocks.size(); ++i) runs += i == 0 || blocks[i] != blocks[i - 1] + 1;
  return runs;
}

TEST(BlockAllocatorTest, EverySizeGivesEachBlockOnce) {
  for (const int64_t size : {1, 2, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097}) {
    SCOPED_TRACE(size);
    BlockAllocator allocator(size);
    const std::vector<int32_t> blocks = Allocate(allocator, size);
    EXPECT_EQ(Runs(blocks), 1);
    EXPECT_EQ(blocks.front(), 0);
    EXPECT_EQ(blocks.back(), size - 1);
    EXPECT_EQ(allocator.free(), 0);
    std::vector<int32_t> none;
    EXPECT_FALSE(allocator.Allocate(1, -1, &none));
    EXPECT_TRUE(none.empty());
    for (const int32_t block : blocks) allocator.LetGo(block);
    EXPECT_EQ(allocator.free(), size);
    EXPECT_TRUE(allocator.Consistent());
  }
}

TEST(BlockAllocatorTest, NothingIsTakenWhereTooFewAreFree) {
  BlockAllocator allocator(100);
  Allocate(allocator, 60);
  std::vector<int32_t> blocks = {7};
  EXPECT_FALSE(allocator.Allocate(41, 59, &blocks));
  EXPECT_THAT(blocks, ElementsAre(7));
  EXPECT_EQ(allocator.free(), 40);
  EXPECT_TRUE(allocator.Allocate(0, -1, &blocks));
  EXPECT_THAT(blocks, ElementsAre(7));
}

TEST(BlockAllocatorTest, ContinuesAfterTheHint) {
  BlockAllocator allocator(1000);
  Allocate(allocator, 100);
  EXPECT_THAT(Allocate(allocator, 3, 300), ElementsAre(301, 302, 303));
  EXPECT_THAT(Allocate(allocator, 3, 99), ElementsAre(100, 101, 102));
  // The last block has nothing behind it.
  EXPECT_THAT(Allocate(allocator, 2, 999), ElementsAre(998, 999));
}

TEST(BlockAllocatorTest, TakesTheNearestRunThatSuffices) {
  BlockAllocator allocator(1000);
  Allocate(allocator, 1000);
  // Free: 100-103, 400-409, 520-524, 900-949.
  for (int32_t b = 100; b < 104; ++b) allocator.LetGo(b);
  for (int32_t b = 400; b < 410; ++b) allocator.LetGo(b);
  for (int32_t b = 520; b < 525; ++b) allocator.LetGo(b);
  for (int32_t b = 900; b < 950; ++b) allocator.LetGo(b);
  EXPECT_THAT(Allocate(allocator, 4, 450), ElementsAre(406, 407, 408, 409));
  EXPECT_THAT(Allocate(allocator, 5, 450), ElementsAre(401, 402, 403, 404, 405));
  EXPECT_THAT(Allocate(allocator, 5, 450), ElementsAre(520, 521, 522, 523, 524));
  EXPECT_THAT(Allocate(allocator, 4, 0), ElementsAre(100, 101, 102, 103));
  EXPECT_EQ(Allocate(allocator, 7, 0).front(), 900);
  EXPECT_TRUE(allocator.Consistent());
}

TEST(BlockAllocatorTest, TakesTheLongestRunsWhereNoneSuffices) {
  BlockAllocator allocator(1000);
  Allocate(allocator, 1000);
  for (int32_t b = 10; b < 15; ++b) allocator.LetGo(b);
  for (int32_t b = 100; b < 200; ++b) allocator.LetGo(b);
  for (int32_t b = 300; b < 301; ++b) allocator.LetGo(b);
  for (int32_t b = 700; b < 790; ++b) allocator.LetGo(b);
  const std::vector<int32_t> blocks = Allocate(allocator, 190, -1);
  EXPECT_EQ(Runs(blocks), 2);
  EXPECT_TRUE(std::is_sorted(blocks.begin(), blocks.end()));
  EXPECT_EQ(allocator.free(), 6);
}

TEST(BlockAllocatorTest, HoldersAndIndex) {
  BlockAllocator allocator(4);
  const int32_t block = Allocate(allocator, 1)[0];
  const BlockRef first = allocator.ref(block);
  EXPECT_FALSE(allocator.shared(block));
  allocator.Hold(block);
  EXPECT_TRUE(allocator.shared(block));
  allocator.LetGo(block);
  EXPECT_EQ(allocator.referenced(), 1);
  allocator.Index(block);
  EXPECT_TRUE(allocator.shared(block));
  allocator.LetGo(block);
  EXPECT_EQ(allocator.referenced(), 0);
  EXPECT_EQ(allocator.cached(), 1);
  EXPECT_EQ(allocator.free(), 3);
  allocator.Hold(block);
  EXPECT_EQ(allocator.cached(), 0);
  allocator.Unindex(block);
  allocator.LetGo(block);
  EXPECT_EQ(allocator.free(), 4);
  EXPECT_EQ(Allocate(allocator, 1)[0], block);
  EXPECT_EQ(allocator.ref(block).index, first.index);
  EXPECT_GT(allocator.ref(block).generation, first.generation);
}

TEST(BlockAllocatorTest, EvictingAReferencedBlockIsRefusedAndCounted) {
  BlockAllocator allocator(4);
  const int32_t block = Allocate(allocator, 1)[0];
  allocator.Index(block);
  EXPECT_FALSE(allocator.Evict(block));
  EXPECT_EQ(allocator.freed_while_referenced(), 1);
  EXPECT_EQ(allocator.free(), 3);
  EXPECT_EQ(allocator.holders(block), 1u);
  allocator.Index(block);
  allocator.LetGo(block);
  EXPECT_TRUE(allocator.Evict(block));
  EXPECT_EQ(allocator.freed_while_referenced(), 1);
  EXPECT_EQ(allocator.free(), 4);
}

TEST(BlockAllocatorDeathTest, UseOfAFreeBlockStopsTheProcess) {
  BlockAllocator allocator(4);
  EXPECT_DEATH(allocator.Hold(0), "check failed");
  EXPECT_DEATH(allocator.LetGo(0), "check failed");
}

// Against a set of free blocks: what is given was free, the continuation of the hint is taken, and the number of runs
// is the least possible one.
TEST(BlockAllocatorTest, RandomCallsAgainstASet) {
  for (const int64_t size : {1, 64, 65, 200, 1000}) {
    std::mt19937 random(static_cast<uint32_t>(size));
    SCOPED_TRACE(size);
    BlockAllocator allocator(size);
    std::set<int32_t> free;
    for (int32_t b = 0; b < size; ++b) free.insert(b);
    std::vector<int32_t> taken;
    for (int i = 0; i < 4000; ++i) {
      const int64_t count = random() % 3 == 0 ? random() % (size + 2) : random() % 12;
      const int32_t hint = taken.empty() || random() % 3 == 0 ? -1 : taken[random() % taken.size()];
      std::vector<int32_t> blocks;
      ASSERT_EQ(allocator.Allocate(count, hint, &blocks), count <= static_cast<int64_t>(free.size()));
      if (!blocks.empty()) {
        ASSERT_EQ(static_cast<int64_t>(blocks.size()), count);
        int64_t continued = 0;
        if (hint >= 0) {
          while (continued < count && free.contains(hint + 1 + static_cast<int32_t>(continued))) ++continued;
        }
        for (int64_t j = 0; j < continued; ++j) ASSERT_EQ(blocks[j], hint + 1 + j);
        for (int64_t j = 0; j < continued; ++j) free.erase(blocks[j]);
        // The fewest runs that the rest can have: the longest ones first.
        std::vector<int64_t> runs;
        int32_t previous = -2;
        for (const int32_t block : free) {
          if (block != previous + 1) runs.push_back(0);
          ++runs.back();
          previous = block;
        }
        std::sort(runs.rbegin(), runs.rend());
        int64_t fewest = 0;
        for (int64_t rest = count - continued; rest > 0; ++fewest) rest -= runs[fewest];
        const std::vector<int32_t> others(blocks.begin() + continued, blocks.end());
        ASSERT_TRUE(std::is_sorted(others.begin(), others.end()));
        ASSERT_LE(Runs(others), fewest);
        for (const int32_t block : others) ASSERT_EQ(free.erase(block), 1u);
        taken.insert(taken.end(), blocks.begin(), blocks.end());
      }
      for (int64_t frees = random() % (taken.size() + 1); frees > 0 && random() % 4 != 0; --frees) {
        std::swap(taken[random() % taken.size()], taken.back());
        allocator.LetGo(taken.back());
        free.insert(taken.back());
        taken.pop_back();
      }
      ASSERT_EQ(allocator.free(), static_cast<int64_t>(free.size()));
      ASSERT_TRUE(i % 64 != 0 || allocator.Consistent());
    }
  }
}

TEST(BlockAllocatorTest, TimeInAFragmentedPool) {
  constexpr int64_t kBlocks = 245760;
  BlockAllocator allocator(kBlocks);
  std::vector<int32_t> all = Allocate(allocator, kBlocks);
  // No two free blocks touch.
  for (int32_t b = 0; b < kBlocks; b += 2) allocator.LetGo(b);
  std::vector<int32_t> blocks;
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(allocator.Allocate(2048, 100001, &blocks));
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(Runs(blocks), 2048);
  // They lie around the hint.
  EXPECT_GE(*std::min_element(blocks.begin(), blocks.end()), 100001 - 2100);
  EXPECT_LE(*std::max_element(blocks.begin(), blocks.end()), 100001 + 2100);
  std::printf("2,048 single blocks out of 245,760, every second one free: %.0f us\n", elapsed.count());
}

}  // namespace
}  // namespace stoker::core
