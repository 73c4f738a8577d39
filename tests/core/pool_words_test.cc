// The words by which the pool and the planes of sessions tell each other what a sequence has.
#include <algorithm>

#include "tests/core/pool_fixture.h"

namespace stoker::core {
namespace {

using absl::StatusCode;

class PoolWordsTest : public PoolFixture {
 protected:
  void Start(int64_t blocks) {
    PoolFixture::Start(blocks);
    words_ = std::vector<SequenceWord>(static_cast<size_t>(Pool::MaxSequences(pool_->spec())));
    // What an earlier user of the memory left.
    for (SequenceWord& word : words_) word.stored_rows = 77;
    pool_->UseWords(absl::MakeSpan(words_));
  }
  SequenceWord& Word(SequenceId id) { return words_[id.index()]; }
  // What EndBatch of a session's plane does.
  void Append(SequenceId id, int32_t rows) { Word(id).stored_rows.fetch_add(rows, std::memory_order_release); }
  void ExpectWord(SequenceId id, int32_t stored_rows, int32_t max_rows, SessionId writer) {
    EXPECT_EQ(Word(id).stored_rows.load(), stored_rows);
    EXPECT_EQ(Word(id).max_rows.load(), max_rows);
    EXPECT_EQ(Word(id).writer.load(), writer.value);
  }

 private:
  std::vector<SequenceWord> words_;
};

TEST_F(PoolWordsTest, FollowTheSequence) {
  Start(32);
  const Admission a = Admit(20, 60, {}, kFirst, "key");
  ExpectWord(a.id, 0, 60, kFirst);
  Begin(a.id, 0, 20);
  ExpectWord(a.id, 0, 60, kFirst);  // begun is not stored
  pool_->FinishWrite(a.id, 0, 20);
  ExpectWord(a.id, 20, 60, kFirst);
  ASSERT_TRUE(pool_->Extend(kFirst, limits_, a.id, 61).ok());
  ExpectWord(a.id, 20, 61, kFirst);
  ASSERT_TRUE(pool_->Extend(kFirst, limits_, a.id, 100).ok());
  ExpectWord(a.id, 20, 100, kFirst);
  Admit(20, 60, {}, kSecond, "key");
  ExpectWord(a.id, 20, 100, kFirst);
  Close(a.id);
  ExpectWord(a.id, 20, 100, kSecond);
  Close(a.id, kSecond, /*retain=*/true);
  ExpectWord(a.id, 20, 100, SessionId{});
  Admit(20, 60, {}, kFirst, "key");
  ExpectWord(a.id, 20, 100, kFirst);
  Close(a.id);
  // The place's next sequence begins anew.
  const Admission b = Admit(8, 8, {}, kSecond);
  ASSERT_EQ(b.id.index(), a.id.index());
  ExpectWord(b.id, 0, 8, kSecond);
}

TEST_F(PoolWordsTest, RowsThatAPlaneAppendsAreStored) {
  Start(32);
  const Admission a = Admit(20, 60);
  Store(a.id, 0, 20);
  Append(a.id, 3);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 23);
  EXPECT_EQ(pool_->counters().stored_rows, 23u);
  Append(a.id, 1);
  // Every call sees them first.
  EXPECT_EQ(Begin(a.id, 24, 2).pool_rows.size(), 2u);
  pool_->FinishWrite(a.id, 24, 2);
  ExpectWord(a.id, 26, 60, kFirst);
  Append(a.id, 4);
  EXPECT_EQ(Step(a.id, 31, true).status, absl::OkStatus());
  Append(a.id, 1);
  EXPECT_EQ(pool_->PoolRows(kFirst, a.id, {30})->size(), 1u);
  absl::StatusOr<Admission> fork = pool_->Fork(kFirst, limits_, a.id, 31, 60, "");
  EXPECT_TRUE(fork.ok()) << fork.status();
  ExpectWord(fork->id, 15 + 1, 60, kFirst);  // the block that is copied is not there yet
  pool_->FinishCopies(fork->id);
  ExpectWord(fork->id, 31, 60, kFirst);
  // More than there can be is not believed.
  Append(a.id, 1000);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 60);
}

TEST_F(PoolWordsTest, APromptThatAPlaneFinishesCanBeMatched) {
  Start(32);
  const std::vector<PrefixHash> hashes = Hashes(1, 3);
  const Admission a = Admit(48, 60, hashes);
  bool woken = false;
  AdmitParams waiting;
  waiting.prompt_rows = 48;
  waiting.max_rows = 60;
  waiting.hashes = hashes;
  waiting.on_prefix_ready = [&] { woken = true; };
  EXPECT_TRUE(pool_->Admit(kSecond, limits_, waiting)->waiting);
  Store(a.id, 0, 40);
  EXPECT_TRUE(woken);  // two of its three blocks
  woken = false;
  waiting.on_prefix_ready = [&] { woken = true; };
  EXPECT_TRUE(pool_->Admit(kSecond, limits_, waiting)->waiting);
  Append(a.id, 8);
  EXPECT_FALSE(woken);
  pool_->Sweep(now_);
  EXPECT_TRUE(woken);
  const Admission b = Admit(48, 60, hashes, kSecond);
  EXPECT_EQ(b.matched_rows, 48);
  ExpectWord(b.id, 48, 60, kSecond);
}

TEST_F(PoolWordsTest, ACopyThatIsGivenUpTakesItsRowsBack) {
  Start(32);
  const std::vector<PrefixHash> hashes = Hashes(2, 2);
  Cache(20, hashes);
  const Admission a = Admit(20, 40, hashes, kFirst, "key");
  ASSERT_EQ(a.copies.size(), 1u);
  ExpectWord(a.id, 16, 40, kFirst);
  Admit(20, 40, hashes, kSecond, "key");
  Close(a.id, kFirst);
  ExpectWord(a.id, 16, 40, kSecond);
  EXPECT_EQ(pool_->Snapshot(a.id)->stored_rows, 16);
}

TEST_F(PoolWordsTest, MoreSequencesThanWordsAreRefused) {
  Start(1);
  const std::vector<PrefixHash> hashes = Hashes(3, 1);
  Cache(16, hashes);
  const int64_t most = Pool::MaxSequences(pool_->spec());
  EXPECT_EQ(most, 4096);
  std::vector<SequenceId> open;
  for (int64_t i = 0; i < most; ++i) open.push_back(Admit(16, 16, hashes).id);
  ExpectStatus(TryAdmit(16, 16, hashes).status(), StatusCode::kResourceExhausted, "4096 of pool small");
  ExpectStatus(pool_->Fork(kFirst, limits_, open[0], 16, 16, "").status(), StatusCode::kResourceExhausted,
               "limit 4096");
  Close(open.back());
  open.back() = Admit(16, 16, hashes).id;
  for (const SequenceId id : open) Close(id);
}

}  // namespace
}  // namespace stoker::core
