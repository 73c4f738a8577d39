// Writes, copy on write, and steps.
#include <vector>

#include "tests/core/pool_fixture.h"

namespace stoker::core {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::IsEmpty;

class PoolWriteTest : public PoolFixture {};

TEST_F(PoolWriteTest, RowsFollowTheTable) {
  Start(10);
  const Admission a = Admit(40, 60);
  WritePlan plan = Begin(a.id, 0, 33);
  ASSERT_EQ(plan.pool_rows.size(), 33u);
  for (int i = 0; i < 33; ++i) EXPECT_EQ(plan.pool_rows[i], a.table[i / 16] * 16 + i % 16);
  EXPECT_THAT(plan.copies, IsEmpty());
  EXPECT_THAT(plan.openers, IsEmpty());
  EXPECT_EQ(plan.rewritten_count, 0);
  EXPECT_EQ(pool_->Snapshot(a.id)->written_rows, 33);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 0);
  pool_->FinishWrite(a.id, 0, 33);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 33);
  EXPECT_EQ(pool_->counters().stored_rows, 33u);
  // In place where nobody else can see it.
  plan = Begin(a.id, 30, 10);
  EXPECT_THAT(plan.copies, IsEmpty());
  EXPECT_EQ(plan.rewritten_first, 30);
  EXPECT_EQ(plan.rewritten_count, 3);
  EXPECT_THAT(plan.openers, ElementsAre(kFirst));
}

TEST_F(PoolWriteTest, ChecksItsArguments) {
  Start(10);
  const Admission a = Admit(40, 60, {}, kFirst, "key");
  Admit(40, 60, {}, kSecond, "key");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, 0, 0).status(), StatusCode::kInvalidArgument, "row_count is 0");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, -1, 1).status(), StatusCode::kInvalidArgument, "first_row is -1");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, 0, 61).status(), StatusCode::kInvalidArgument, "beyond max_rows 60");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, 60, INT64_MAX).status(), StatusCode::kInvalidArgument, "max_rows 60");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, INT64_MAX, 1).status(), StatusCode::kInvalidArgument, "max_rows 60");
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, 1, 1).status(), StatusCode::kFailedPrecondition,
               "first_row is 1; sequence_id " + std::to_string(a.id.value) + " has 0 written rows");
  ExpectStatus(pool_->BeginWrite(kSecond, a.id, 0, 1).status(), StatusCode::kFailedPrecondition,
               "is written by session 1, not by session 2");
  ExpectStatus(pool_->BeginWrite({3}, a.id, 0, 1).status(), StatusCode::kFailedPrecondition, "not open in session 3");
}

TEST_F(PoolWriteTest, AWriteBehindAFailedOneIsNotStored) {
  Start(10);
  const Admission a = Admit(40, 60);
  Begin(a.id, 0, 10);
  Begin(a.id, 10, 10);
  pool_->FinishWrite(a.id, 10, 10);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 0);
  Store(a.id, 0, 20);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 20);
}

TEST_F(PoolWriteTest, PublishedRowsAreCopiedOnWrite) {
  Start(10);
  const Admission a = Admit(48, 64, Hashes(1, 3));
  Store(a.id, 0, 48);
  const WritePlan plan = Begin(a.id, 20, 20);
  ASSERT_EQ(plan.copies.size(), 2u);
  EXPECT_EQ(plan.copies[0].source_block, a.table[1]);
  EXPECT_EQ(plan.copies[0].rows, 16);
  EXPECT_EQ(plan.copies[1].source_block, a.table[2]);
  ASSERT_EQ(plan.updates.size(), 2u);
  EXPECT_EQ(plan.updates[0].column, 1);
  EXPECT_EQ(plan.updates[0].block, plan.copies[0].target_block);
  EXPECT_EQ(plan.pool_rows[0], plan.updates[0].block * 16 + 4);
  ASSERT_EQ(plan.replaced.size(), 2u);
  EXPECT_EQ(plan.replaced[0].index, a.table[1]);
  EXPECT_EQ(plan.rewritten_first, 20);
  EXPECT_EQ(plan.rewritten_count, 20);
  EXPECT_THAT(plan.openers, ElementsAre(kFirst));
  EXPECT_EQ(pool_->counters().copied_blocks, 2u);
  // The index still has the old rows, and the plan keeps them in place.
  ExpectCounts(4, 6, 0);
  EXPECT_EQ(Matched(48, Hashes(1, 3)), 48);
  pool_->Reclaim(a.id, plan.replaced);
  ExpectCounts(4, 4, 2);
  // Now the block is its own.
  EXPECT_THAT(Begin(a.id, 20, 20).copies, IsEmpty());
  Close(a.id);
  ExpectCounts(7, 0, 3);
  EXPECT_EQ(Matched(48, Hashes(1, 3)), 48);
}

TEST_F(PoolWriteTest, TheChainOfARewrittenPromptIsStillEvictedFromItsTail) {
  Start(4);
  const Admission a = Admit(32, 32, Hashes(1, 2));
  Store(a.id, 0, 32);
  pool_->Reclaim(a.id, Begin(a.id, 0, 1).replaced);  // the head has no user any more, the tail has
  Close(a.id);
  Admit(48, 48);
  EXPECT_EQ(Matched(16, Hashes(1, 1)), 16);
}

TEST_F(PoolWriteTest, ThePartialTailIsWrittenInPlaceAboveItsSeal) {
  Start(10, 16, 32);
  const Admission a = Admit(38, 64, Hashes(1, 2));
  Store(a.id, 0, 38);
  WritePlan plan = Begin(a.id, 38, 5);
  EXPECT_THAT(plan.copies, IsEmpty());
  EXPECT_EQ(plan.pool_rows[0], a.table[2] * 16 + 6);
  pool_->FinishWrite(a.id, 38, 5);
  plan = Begin(a.id, 39, 1);
  EXPECT_THAT(plan.copies, IsEmpty());
  EXPECT_EQ(plan.rewritten_count, 1);
  plan = Begin(a.id, 37, 1);
  ASSERT_EQ(plan.copies.size(), 1u);
  EXPECT_EQ(plan.copies[0].rows, 11);
  pool_->Reclaim(a.id, plan.replaced);
}

TEST_F(PoolWriteTest, CopyOnWriteNeedsABlock) {
  Start(4);
  const Admission a = Admit(48, 48, Hashes(1, 3));
  Store(a.id, 0, 48);
  const Admission b = Admit(16, 16);
  ExpectStatus(pool_->BeginWrite(kFirst, a.id, 3, 1).status(), StatusCode::kResourceExhausted,
               "is to write to blocks that others share: pool small: 1 blocks needed, 0 free, 0 evictable");
  ExpectCounts(0, 4, 0);
  EXPECT_EQ(pool_->counters().copied_blocks, 0u);
  const StepGrant grant = Step(a.id, 4, true);
  EXPECT_EQ(grant.status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(grant.commit_pool_row, -1);
  EXPECT_EQ(grant.plan, nullptr);
  EXPECT_EQ(Matched(48, Hashes(1, 3)), 48);
  // A cached block makes room.
  Close(b.id);
  Cache(16, Hashes(2, 1));
  ExpectCounts(0, 3, 1);
  pool_->Reclaim(a.id, Begin(a.id, 3, 1).replaced);
  EXPECT_EQ(pool_->counters().evicted_blocks, 1u);
}

TEST_F(PoolWriteTest, ForksAreCopiedOnWriteOnBothSides) {
  Start(10);
  const Admission a = Admit(32, 32);
  Store(a.id, 0, 32);
  const absl::StatusOr<Admission> fork = pool_->Fork(kFirst, limits_, a.id, 32, 32, "");
  ASSERT_TRUE(fork.ok());
  ExpectCounts(8, 2, 0);
  WritePlan plan = Begin(a.id, 0, 1);
  ASSERT_EQ(plan.copies.size(), 1u);
  // The fork is not alone while the old block can be read.
  EXPECT_EQ(Begin(fork->id, 1, 1).copies.size(), 1u);
  pool_->Reclaim(a.id, plan.replaced);
  plan = Begin(fork->id, 16, 1);
  EXPECT_EQ(plan.copies.size(), 1u);
  pool_->Reclaim(fork->id, plan.replaced);
  EXPECT_THAT(Begin(a.id, 16, 1).copies, IsEmpty());
}

TEST_F(PoolWriteTest, OthersOpenNoSequenceWhoseCopiesAreNotDone) {
  Start(20);
  const Admission a = *TryAdmit(32, 48, Hashes(1, 2), kFirst, "key");
  Store(a.id, 0, 32);
  const WritePlan plan = Begin(a.id, 3, 1);  // of a block that the index has, too
  ASSERT_EQ(plan.copies.size(), 1u);
  int woken = 0;
  AdmitParams params;
  params.key = "key";
  params.prompt_rows = 32;
  params.max_rows = 48;
  params.on_copied = [&] { ++woken; };
  absl::StatusOr<Admission> other = pool_->Admit(kSecond, limits_, params);
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(other->waiting);
  // Not even the writer forks it: the fork has a key of its own.
  absl::StatusOr<Admission> fork = pool_->Fork(kFirst, limits_, a.id, 20, 40, "fork", [&] { ++woken; });
  ASSERT_TRUE(fork.ok());
  EXPECT_TRUE(fork->waiting);
  pool_->FinishWrite(a.id, 3, 1);
  EXPECT_EQ(woken, 0);
  pool_->Reclaim(a.id, plan.replaced);
  EXPECT_EQ(woken, 2);
  other = pool_->Admit(kSecond, limits_, params);
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(other->waiting);
  EXPECT_EQ(other->table[0], plan.copies[0].target_block);
  fork = pool_->Fork(kFirst, limits_, a.id, 20, 40, "fork", [&] { ++woken; });
  ASSERT_TRUE(fork.ok());
  EXPECT_FALSE(fork->waiting);
  EXPECT_EQ(woken, 2);
}

TEST_F(PoolWriteTest, ThoseWhoWaitForCopiesHearOfTheEndOfTheSequence) {
  Start(20);
  const Admission a = *TryAdmit(32, 48, Hashes(1, 2), kFirst, "key");
  Store(a.id, 0, 32);
  const WritePlan plan = Begin(a.id, 3, 1);
  int woken = 0;
  AdmitParams params;
  params.key = "key";
  params.prompt_rows = 32;
  params.max_rows = 48;
  params.on_copied = [&] { ++woken; };
  ASSERT_TRUE(pool_->Admit(kSecond, limits_, params)->waiting);
  ASSERT_TRUE(pool_->Close(kFirst, a.id, /*retain=*/false, absl::InfinitePast()).ok());
  EXPECT_EQ(woken, 1);
  pool_->Reclaim(a.id, plan.replaced);  // of a sequence that is gone
  EXPECT_EQ(woken, 1);
}

TEST_F(PoolWriteTest, ReclaimedTwiceStopsTheProcess) {
  Start(10);
  const Admission a = Admit(16, 16, Hashes(1, 1));
  Store(a.id, 0, 16);
  const WritePlan plan = Begin(a.id, 0, 1);
  pool_->Reclaim(a.id, plan.replaced);
  EXPECT_DEATH(pool_->Reclaim(a.id, plan.replaced), "check failed");
}

TEST_F(PoolWriteTest, PoolRows) {
  Start(10);
  const Admission a = Admit(40, 60, {}, kFirst, "key");
  Admit(40, 60, {}, kSecond, "key");
  Store(a.id, 0, 20);
  Begin(a.id, 20, 5);
  const std::vector<int64_t> positions = {24, 0, 17};
  const absl::StatusOr<std::vector<int32_t>> rows = pool_->PoolRows(kFirst, a.id, positions);
  ASSERT_TRUE(rows.ok());
  EXPECT_THAT(*rows, ElementsAre(a.table[1] * 16 + 8, a.table[0] * 16, a.table[1] * 16 + 1));
  ExpectStatus(pool_->PoolRows(kSecond, a.id, positions).status(), StatusCode::kFailedPrecondition,
               "position is 24; sequence_id " + std::to_string(a.id.value) + " has 20 rows to read");
  ExpectStatus(pool_->PoolRows(kFirst, a.id, {25}).status(), StatusCode::kFailedPrecondition, "position is 25");
  ExpectStatus(pool_->PoolRows(kFirst, a.id, {-1}).status(), StatusCode::kInvalidArgument, "position is -1");
}

TEST_F(PoolWriteTest, StepCommits) {
  Start(10);
  const Admission a = Admit(20, 40);
  Store(a.id, 0, 20);
  StepGrant grant = Step(a.id, 21, true);
  EXPECT_TRUE(grant.status.ok()) << grant.status;
  EXPECT_EQ(grant.commit_pool_row, a.table[1] * 16 + 4);
  EXPECT_EQ(grant.plan, nullptr);
  EXPECT_EQ(pool_->Snapshot(a.id)->written_rows, 21);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 20);
  // The next step comes before the commit is finished.
  grant = Step(a.id, 22, true, 0);
  EXPECT_TRUE(grant.status.ok()) << grant.status;
  pool_->FinishWrite(a.id, 20, 1);
  pool_->FinishWrite(a.id, 21, 1);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 22);
  EXPECT_EQ(pool_->counters().stored_rows, 22u);
  grant = Step(a.id, 21, true);
  EXPECT_TRUE(grant.status.ok());
  ASSERT_NE(grant.plan, nullptr);
  EXPECT_EQ(grant.plan->rewritten_first, 20);
  EXPECT_EQ(grant.plan->rewritten_count, 1);
  EXPECT_THAT(grant.plan->pool_rows, ElementsAre(a.table[1] * 16 + 4));
  EXPECT_THAT(grant.plan->copies, IsEmpty());
  grant = Step(a.id, 22, false);
  EXPECT_EQ(grant.commit_pool_row, -1);
  EXPECT_EQ(grant.plan, nullptr);
}

TEST_F(PoolWriteTest, StepRewritesPublishedRowsByCopy) {
  Start(10);
  const Admission a = Admit(16, 40, Hashes(1, 1));
  Store(a.id, 0, 16);
  const StepGrant grant = Step(a.id, 16, true);
  ASSERT_TRUE(grant.status.ok());
  ASSERT_NE(grant.plan, nullptr);
  ASSERT_EQ(grant.plan->updates.size(), 1u);
  EXPECT_EQ(grant.commit_pool_row, grant.plan->updates[0].block * 16 + 15);
  EXPECT_EQ(grant.plan->copies[0].rows, 16);
  pool_->Reclaim(a.id, grant.plan->replaced);
}

TEST_F(PoolWriteTest, StepChecksEachAccess) {
  Start(10);
  const Admission a = Admit(20, 40, {}, kFirst, "key");
  Admit(20, 40, {}, kSecond, "key");
  Store(a.id, 0, 20);
  Begin(a.id, 20, 2);
  ExpectStatus(Step(a.id, 0, false).status, StatusCode::kInvalidArgument, "length is 0; it must be 1 to max_rows (40)");
  ExpectStatus(Step(a.id, 41, false).status, StatusCode::kInvalidArgument, "length is 41");
  ExpectStatus(Step(a.id, 1, false, -1).status, StatusCode::kInvalidArgument, "newest_count is -1");
  EXPECT_TRUE(Step(a.id, 23, false, 1).status.ok());
  ExpectStatus(Step(a.id, 24, false, 1).status, StatusCode::kFailedPrecondition,
               "length is 24; sequence_id " + std::to_string(a.id.value) + " has 22 rows to read, and newest_count 1");
  EXPECT_TRUE(Step(a.id, 24, false, 2).status.ok());
  // Others see what is stored.
  EXPECT_TRUE(Step(a.id, 21, false, 1, kSecond).status.ok());
  ExpectStatus(Step(a.id, 22, false, 1, kSecond).status, StatusCode::kFailedPrecondition, "has 20 rows to read");
  ExpectStatus(Step(a.id, 21, true, 1, kSecond).status, StatusCode::kFailedPrecondition, "is written by session 1");
  ExpectStatus(Step(a.id, 24, true).status, StatusCode::kFailedPrecondition, "has 22 written rows");
  ExpectStatus(Step(a.id, 1, false, 1, {3}).status, StatusCode::kFailedPrecondition, "is not open in session 3");
  EXPECT_EQ(pool_->Snapshot(a.id)->written_rows, 22);
}

TEST_F(PoolWriteTest, ABatchIsGrantedItemByItem) {
  Start(10);
  const Admission a = Admit(20, 40);
  const Admission b = Admit(20, 40);
  Store(a.id, 0, 20);
  Store(b.id, 0, 20);
  const std::vector<StepAccess> accesses = {
      {a.id, 21, 1, true}, {b.id, 30, 1, true}, {a.id, 22, 1, true}, {b.id, 21, 1, true}, {a.id, 22, 0, false}};
  std::vector<StepGrant> grants(9);
  grants[4].plan = std::make_unique<WritePlan>();
  grants[4].commit_pool_row = 5;
  pool_->BeginStep(kFirst, accesses, &grants);
  ASSERT_EQ(grants.size(), 5u);
  for (const int i : {0, 2, 3, 4}) EXPECT_TRUE(grants[i].status.ok()) << grants[i].status;
  EXPECT_EQ(grants[1].status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(grants[2].commit_pool_row, grants[0].commit_pool_row + 1);
  EXPECT_EQ(grants[3].commit_pool_row, b.table[1] * 16 + 4);
  EXPECT_EQ(grants[4].plan, nullptr);
  EXPECT_EQ(grants[4].commit_pool_row, -1);
}

TEST_F(PoolWriteTest, AnAccessBehindAFailedOneOfItsSequenceFailsToo) {
  Start(10);
  const Admission a = Admit(20, 40);
  const Admission b = Admit(20, 40);
  Store(a.id, 0, 20);
  Store(b.id, 0, 20);
  const std::vector<StepAccess> accesses = {
      {a.id, 30, 1, true}, {a.id, 21, 1, true}, {a.id, 5, 1, false}, {b.id, 21, 1, true}, {a.id, 21, 1, true}};
  std::vector<StepGrant> grants;
  pool_->BeginStep(kFirst, accesses, &grants);
  EXPECT_EQ(grants[0].status.code(), StatusCode::kFailedPrecondition);
  for (const int i : {1, 2}) {
    EXPECT_EQ(grants[i].status, grants[0].status);
    EXPECT_EQ(grants[i].commit_pool_row, -1);
  }
  for (const int i : {3, 4}) EXPECT_TRUE(grants[i].status.ok()) << grants[i].status;
  EXPECT_EQ(pool_->Snapshot(a.id)->written_rows, 21);
}

}  // namespace
}  // namespace stoker::core
