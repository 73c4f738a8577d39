#include "server/core/prefix_index.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/core/block_allocator.h"

namespace stoker::core {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

PrefixHash Hash(uint64_t value) {
  PrefixHash hash;
  hash.words = {value, ~value};
  return hash;
}

class PrefixIndexTest : public testing::Test {
 protected:
  std::vector<int32_t> Take(int64_t count) {
    std::vector<int32_t> blocks;
    EXPECT_TRUE(allocator_.Allocate(count, -1, &blocks));
    return blocks;
  }
  // Stores `count` new blocks under the hash and lets go of them: an entry without users.
  int32_t Cache(uint64_t hash, int64_t count = 1) {
    const std::vector<int32_t> blocks = Take(count);
    const int32_t entry = index_.Publish(Hash(hash), 0, 16 * count, blocks);
    EXPECT_NE(entry, PrefixIndex::kNone);
    for (const int32_t block : blocks) allocator_.LetGo(block);
    index_.Release(entry);
    return entry;
  }
  bool Stored(uint64_t hash) const {
    const int32_t entry = index_.Find(Hash(hash));
    return entry != PrefixIndex::kNone && index_.stored(entry);
  }

  BlockAllocator allocator_{100};
  PrefixIndex index_{&allocator_};
};

TEST_F(PrefixIndexTest, FindsWhatIsPublished) {
  EXPECT_EQ(index_.Find(Hash(1)), PrefixIndex::kNone);
  const std::vector<int32_t> blocks = Take(3);
  const int32_t entry = index_.Publish(Hash(1), 5, 40, blocks);
  EXPECT_EQ(index_.Find(Hash(1)), entry);
  EXPECT_EQ(index_.Find(Hash(2)), PrefixIndex::kNone);
  EXPECT_TRUE(index_.Matches(entry, 5, 40));
  EXPECT_FALSE(index_.Matches(entry, 4, 40));
  EXPECT_FALSE(index_.Matches(entry, 5, 41));
  EXPECT_THAT(index_.blocks(entry), testing::ElementsAreArray(blocks));
  EXPECT_THAT(index_.ColdToHot(), IsEmpty());
}

TEST_F(PrefixIndexTest, SecondPublishIsNotIndexed) {
  const std::vector<int32_t> blocks = Take(1);
  EXPECT_NE(index_.Publish(Hash(1), 0, 16, blocks), PrefixIndex::kNone);
  const std::vector<int32_t> others = Take(1);
  EXPECT_EQ(index_.Publish(Hash(1), 0, 16, others), PrefixIndex::kNone);
  EXPECT_FALSE(allocator_.indexed(others[0]));
  // Nor is a block that belongs to another entry.
  EXPECT_EQ(index_.Publish(Hash(2), 0, 16, blocks), PrefixIndex::kNone);
  EXPECT_EQ(index_.Find(Hash(2)), PrefixIndex::kNone);
}

TEST_F(PrefixIndexTest, EvictsTheLeastRecentFirst) {
  Cache(1);
  Cache(2);
  const int32_t third = Cache(3);
  index_.Touch(index_.Find(Hash(1)));
  EXPECT_EQ(index_.ColdToHot().back(), index_.Find(Hash(1)));
  EXPECT_EQ(index_.Evict(1), 1);
  EXPECT_FALSE(Stored(2));
  EXPECT_TRUE(Stored(1));
  index_.Hold(third);
  EXPECT_EQ(index_.Evict(1), 1);
  EXPECT_TRUE(Stored(3));
  EXPECT_FALSE(Stored(1));
  EXPECT_EQ(index_.known_entries(), 1);
}

TEST_F(PrefixIndexTest, EvictsNoMoreThanNeededButWholeEntries) {
  Cache(1, 4);
  Cache(2, 4);
  Cache(3, 4);
  EXPECT_EQ(allocator_.cached(), 12);
  EXPECT_EQ(index_.Evict(5), 8);
  EXPECT_TRUE(Stored(3));
  EXPECT_EQ(allocator_.cached(), 4);
  EXPECT_EQ(index_.Evict(100), 4);
  EXPECT_EQ(index_.Evict(1), 0);
  EXPECT_EQ(allocator_.free(), 100);
}

TEST_F(PrefixIndexTest, KeepsEntriesThatWouldFreeNothing) {
  const int32_t entry = Cache(1, 2);
  Cache(2, 2);
  for (const int32_t block : index_.blocks(entry)) allocator_.Hold(block);
  EXPECT_EQ(index_.Evict(1), 2);
  EXPECT_TRUE(Stored(1));
  EXPECT_FALSE(Stored(2));
  // With one block free to go the entry goes, and leaves the other block to its holder.
  const std::vector<int32_t> blocks(index_.blocks(entry).begin(), index_.blocks(entry).end());
  allocator_.LetGo(blocks[1]);
  EXPECT_EQ(index_.Evict(1), 1);
  EXPECT_FALSE(Stored(1));
  EXPECT_EQ(allocator_.holders(blocks[0]), 1u);
  EXPECT_FALSE(allocator_.indexed(blocks[0]));
  EXPECT_EQ(allocator_.freed_while_referenced(), 0);
}

TEST_F(PrefixIndexTest, ExpectedOwners) {
  const SequenceId a = SequenceId::Make(1, 1);
  const SequenceId b = SequenceId::Make(1, 2);
  index_.Expect(Hash(1), a);
  index_.Expect(Hash(1), b);
  const int32_t entry = index_.Find(Hash(1));
  ASSERT_NE(entry, PrefixIndex::kNone);
  EXPECT_FALSE(index_.stored(entry));
  EXPECT_FALSE(index_.Matches(entry, 0, 0));
  EXPECT_THAT(index_.owners(entry), ElementsAre(a, b));
  EXPECT_TRUE(index_.Forget(Hash(1), a));
  EXPECT_FALSE(index_.Forget(Hash(1), a));
  EXPECT_THAT(index_.owners(entry), ElementsAre(b));
  EXPECT_TRUE(index_.Forget(Hash(1), b));
  EXPECT_EQ(index_.Find(Hash(1)), PrefixIndex::kNone);
  EXPECT_FALSE(index_.Forget(Hash(1), b));
  EXPECT_EQ(index_.known_entries(), 0);
}

TEST_F(PrefixIndexTest, AnEvictedEntryIsStillExpected) {
  const SequenceId owner = SequenceId::Make(1, 1);
  Cache(1);
  index_.Expect(Hash(1), owner);
  EXPECT_EQ(index_.Evict(1), 1);
  const int32_t entry = index_.Find(Hash(1));
  ASSERT_NE(entry, PrefixIndex::kNone);
  EXPECT_FALSE(index_.stored(entry));
  EXPECT_THAT(index_.owners(entry), ElementsAre(owner));
  EXPECT_NE(index_.Publish(Hash(1), 0, 16, Take(1)), PrefixIndex::kNone);
  EXPECT_TRUE(index_.Forget(Hash(1), owner));
  EXPECT_TRUE(Stored(1));
}

TEST_F(PrefixIndexTest, ManyEntriesComeAndGo) {
  BlockAllocator allocator(5000);
  PrefixIndex index(&allocator);
  for (uint64_t round = 0; round < 4; ++round) {
    std::vector<int32_t> blocks;
    ASSERT_TRUE(allocator.Allocate(5000, -1, &blocks));
    for (uint64_t i = 0; i < 5000; ++i) {
      const int32_t entry = index.Publish(Hash(round * 10000 + i), 0, 16, {&blocks[i], 1});
      ASSERT_NE(entry, PrefixIndex::kNone);
      index.Release(entry);
      allocator.LetGo(blocks[i]);
    }
    EXPECT_EQ(index.stored_entries(), 5000);
    for (uint64_t i = 0; i < 5000; ++i) ASSERT_NE(index.Find(Hash(round * 10000 + i)), PrefixIndex::kNone);
    ASSERT_EQ(index.Evict(5000), 5000);
    EXPECT_EQ(index.known_entries(), 0);
  }
}

}  // namespace
}  // namespace stoker::core
