// Sequences that share rows: prefixes, forks, rewritten rows, several ranks.
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr int kOk = 0;
constexpr int kFailedPrecondition = 9;

Tokens Join(const Tokens& a, const Tokens& b) {
  Tokens joined = a;
  joined.insert(joined.end(), b.begin(), b.end());
  return joined;
}

class SharingTest : public DaemonTest {
 protected:
  SharingTest() : SharingTest(std::vector<std::string>{}) {}
  explicit SharingTest(std::vector<std::string> flags) : DaemonTest(std::move(flags)) {
    v1::PoolSpec spec = LinearPool("p", 2, 48, 64);
    spec.set_prefix_rows(32);
    pool_ = CreatePool(spec);
  }

  // Steps over positions [first, first + 16) and checks the rows.
  StepOutcome CheckStep(Rank& rank, const Sequence& sequence, uint32_t length, int32_t first) {
    std::vector<int32_t> entries(16);
    for (int32_t k = 0; k < 16; ++k) entries[static_cast<size_t>(k)] = first + k;
    const std::vector<BatchRow> batch = {{&sequence, length}};
    const StepOutcome outcome = rank.Step(batch, {entries}, 16);
    rank.CheckRows(batch, {entries}, 16, outcome);
    return outcome;
  }

  v1::PoolSpec pool_;
};

TEST_F(SharingTest, MatchesPrefixesOfOpenAndOfReleasedSequences) {
  Rank first(client(), pool_, AttachTo(pool_, "first"));
  Rank second(client(), pool_, AttachTo(pool_, "second"));
  const Tokens common = MakeTokens(1, 96);
  const Sequence a = first.Open(Join(common, MakeTokens(2, 20)), 140);
  const uint32_t held = Usage("p").referenced_blocks();
  EXPECT_EQ(held, 9u);
  const Tokens tokens_b = Join(common, MakeTokens(3, 20));
  const v1::AdmittedSequence admitted = second.Admit(second.Item(tokens_b, 140));
  EXPECT_EQ(admitted.matched_rows(), 96u);
  EXPECT_EQ(admitted.stored_rows(), 96u);
  EXPECT_EQ(Usage("p").referenced_blocks(), held + 3);  // 6 of 9 blocks are shared
  const Sequence b{admitted.sequence_id(), admitted.state_row(), tokens_b};
  ASSERT_TRUE(second.Store(b, 96, 20).ok());
  first.CheckStored(a, 116);
  second.CheckStored(b, 116);

  ASSERT_TRUE(first.Close(a).ok());
  ASSERT_TRUE(second.Close(b).ok());
  // Three prefix blocks of both, and the partial one at the end of each.
  const v1::PoolUsage usage = Usage("p");
  EXPECT_EQ(usage.referenced_blocks(), 0u);
  EXPECT_EQ(usage.cached_blocks(), 6u + 2u + 2u);
  EXPECT_EQ(usage.sequences(), 0u);
  const v1::AdmittedSequence again = first.Admit(first.Item(tokens_b, 140));
  EXPECT_EQ(again.matched_rows(), 116u);
  first.CheckStored({again.sequence_id(), again.state_row(), tokens_b}, 116);
}

TEST_F(SharingTest, ContinuesSharedPartialPrefixBlocksApart) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  const Tokens prompt = MakeTokens(4, 75);  // 2 prefix blocks, then 11 rows of a block of 16
  Sequence a = rank.Open(prompt, 120);
  Sequence b = rank.Open(prompt, 120);
  Sequence c = rank.Open(prompt, 120);
  for (Sequence* s : {&a, &b, &c}) EXPECT_NE(s->id, 0u);
  a.tokens = Join(prompt, MakeTokens(5, 45));
  b.tokens = Join(prompt, MakeTokens(6, 45));
  for (uint32_t row = 75; row < 120; ++row) {
    const std::vector<BatchRow> batch = {{&a, row + 1, true, true}, {&b, row + 1, true, true}};
    std::vector<int32_t> entries;
    for (int i = 0; i < 2; ++i) {
      for (int32_t k = 0; k < 16; ++k) entries.push_back(static_cast<int32_t>(row) - 15 + k);
    }
    rank.CheckRows(batch, {entries}, 16, rank.Step(batch, {entries}, 16));
    if (HasFatalFailure()) return;
  }
  rank.CheckStored(a, 120);
  rank.CheckStored(b, 120);
  rank.CheckStored(c, 75);
  // What the index hands out is still the prompt, not what a continued it with.
  const Sequence d = rank.Open(prompt, 75);
  rank.CheckStored(d, 75);
}

TEST_F(SharingTest, ForksAndDiverges) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  const Tokens prompt = MakeTokens(7, 70);
  Sequence source = rank.Open(prompt, 120);
  const uint32_t before = Usage("p").free_blocks();
  v1::ForkRequest request;
  v1::ForkItem* item = request.add_items();
  item->set_sequence_id(source.id);
  item->set_rows(70);
  item->set_max_rows(120);
  v1::ForkResponse response;
  ASSERT_TRUE(rank.session().Fork(request, &response).ok());
  ASSERT_EQ(response.sequences(0).status().code(), kOk) << response.sequences(0).status().message();
  EXPECT_EQ(Usage("p").free_blocks(), before - 4);  // 4 whole blocks of 8 are shared
  Sequence fork{response.sequences(0).sequence_id(), response.sequences(0).state_row(),
                Join(prompt, MakeTokens(8, 50))};
  EXPECT_EQ(response.sequences(0).stored_rows(), 70u);
  source.tokens = Join(prompt, MakeTokens(9, 50));
  ASSERT_TRUE(rank.Store(source, 70, 50).ok());
  ASSERT_TRUE(rank.Store(fork, 70, 50).ok());
  rank.CheckStored(source, 120);
  rank.CheckStored(fork, 120);
  // One position of each block: the whole blocks of the fork are shared until they are written.
  const std::vector<int32_t> positions = {0, 16, 32, 48, 64, 80, 96, 112};
  const std::vector<int32_t> of_source = rank.PoolRows(source, positions);
  const std::vector<int32_t> of_fork = rank.PoolRows(fork, positions);
  ASSERT_EQ(of_source.size(), 8u);
  ASSERT_EQ(of_fork.size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(of_fork[i] == of_source[i], i < 4) << i;
  // Rewriting shared rows is seen by the writer alone.
  std::copy_n(MakeTokens(10, 20).begin(), 20, fork.tokens.begin() + 10);
  CheckStep(rank, fork, 120, 60);
  ASSERT_TRUE(rank.Store(fork, 10, 20).ok());
  EXPECT_EQ(rank.PoolRows(source, positions), of_source);
  const std::vector<int32_t> rewritten = rank.PoolRows(fork, positions);
  ASSERT_EQ(rewritten.size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(rewritten[i] == of_fork[i], i > 1) << i;
  rank.CheckStored(fork, 120);
  rank.CheckStored(source, 120);
  CheckStep(rank, source, 120, 8);
  CheckStep(rank, fork, 120, 8);
}

TEST_F(SharingTest, DropsRewrittenRowsFromEveryRanksHotBuffers) {
  Rank writer(client(), pool_, AttachTo(pool_, "rank0"));
  Rank reader(client(), pool_, AttachTo(pool_, "rank1"));
  const Tokens tokens = MakeTokens(11, 64);
  Sequence at_writer = writer.Open(tokens, 80, "key");
  Sequence at_reader = reader.Open(tokens, 80, "key");
  EXPECT_EQ(at_writer.id, at_reader.id);
  // Another sequence shares the prefix blocks, so the rewrite copies them first.
  const Sequence sharer = reader.Open(tokens, 80);
  for (const bool shared : {true, false}) {
    CheckStep(writer, at_writer, 64, 8);
    CheckStep(reader, at_reader, 64, 8);
    EXPECT_EQ(CheckStep(reader, at_reader, 64, 8).Sum(&v1::LookupCounts::hot), 16u);
    std::copy_n(MakeTokens(shared ? 12 : 13, 8).begin(), 8, at_writer.tokens.begin() + 12);
    at_reader.tokens = at_writer.tokens;
    ASSERT_TRUE(writer.Store(at_writer, 12, 8).ok());
    EXPECT_EQ(CheckStep(writer, at_writer, 64, 8).Sum(&v1::LookupCounts::miss), 8u);
    EXPECT_EQ(CheckStep(reader, at_reader, 64, 8).Sum(&v1::LookupCounts::miss), 8u);
    writer.CheckStored(at_writer, 64);
    reader.CheckStored(at_reader, 64);
    reader.CheckStored(sharer, 64);
  }
}

TEST_F(SharingTest, LetsOneRankWriteAndAllRead) {
  Rank writer(client(), pool_, AttachTo(pool_, "rank0"));
  Rank reader(client(), pool_, AttachTo(pool_, "rank1"));
  Tokens tokens = MakeTokens(14, 50);
  const v1::AdmittedSequence first = writer.Admit(writer.Item(tokens, 80, "key"));
  const v1::AdmittedSequence second = reader.Admit(reader.Item(tokens, 80, "key"));
  EXPECT_TRUE(first.writer());
  EXPECT_FALSE(second.writer());
  EXPECT_EQ(first.sequence_id(), second.sequence_id());
  tokens = Join(tokens, MakeTokens(15, 30));
  const Sequence at_writer{first.sequence_id(), first.state_row(), tokens};
  const Sequence at_reader{second.sequence_id(), second.state_row(), tokens};
  ASSERT_TRUE(writer.Store(at_writer, 0, 50).ok());
  const absl::Status refused = reader.Store(at_reader, 0, 50);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("written by session"));
  // Both decode; only the writer commits. Rows are stored once.
  for (uint32_t row = 50; row < 80; ++row) {
    const std::vector<BatchRow> reads = {{&at_reader, row + 1, false, true}},
                                writes = {{&at_writer, row + 1, true, true}};
    std::vector<int32_t> entries;
    for (int32_t k = 0; k < 16; ++k) entries.push_back(static_cast<int32_t>(row) - 15 + k);
    writer.CheckRows(writes, {entries}, 16, writer.Step(writes, {entries}, 16));
    reader.CheckRows(reads, {entries}, 16, reader.Step(reads, {entries}, 16));
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Usage("p").referenced_blocks(), 5u);
  EXPECT_EQ(Usage("p").sequences(), 1u);
  ASSERT_EQ(Sequences("p").size(), 1u);
  EXPECT_EQ(Sequences("p")[0].session_ids_size(), 2);
  // The writer leaves; the other rank takes over.
  ASSERT_TRUE(writer.Close(at_writer).ok());
  EXPECT_EQ(Sequences("p")[0].writer_session_id(), reader.session().info().session_id());
  EXPECT_TRUE(reader.Store(at_reader, 40, 10).ok());
}

TEST_F(SharingTest, FailsAllRowsOfASequenceBehindAFailedOne) {
  Rank writer(client(), pool_, AttachTo(pool_, "rank0"));
  Rank reader(client(), pool_, AttachTo(pool_, "rank1"));
  const Tokens tokens = MakeTokens(16, 64);
  const Sequence at_writer = writer.Open(tokens, 80, "key");
  Sequence at_reader = reader.Open(tokens, 80, "key");
  at_reader.tokens = Join(tokens, MakeTokens(17, 16));
  const Sequence other = reader.Open(MakeTokens(18, 64), 64);
  // A rank that may not write asks for a commit in its first row of two.
  const std::vector<BatchRow> batch = {
      {&at_reader, 65, true, true}, {&at_reader, 66, false, true}, {&other, 64, false, true}};
  std::vector<int32_t> entries;
  for (int32_t i = 0; i < 24; ++i) entries.push_back(i % 8);
  const StepOutcome outcome = reader.Step(batch, {entries}, 8);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.response.statuses(0).code(), kFailedPrecondition);
  EXPECT_EQ(outcome.response.statuses(1).code(), kFailedPrecondition);
  EXPECT_EQ(outcome.response.statuses(2).code(), kOk);
  reader.CheckRows(batch, {entries}, 8, outcome);
}

TEST_F(SharingTest, ExtendsForEveryRank) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank0"));
  Rank other(client(), pool_, AttachTo(pool_, "rank1"));
  // This rank cannot follow beyond 96 rows.
  Rank narrow(client(), pool_, AttachTo(pool_, "rank2", 2, 64, 16, 96));
  Rank narrow_by_row = [&] {
    v1::AttachRequest request = AttachTo(pool_, "rank3", 2, 64, 16, 96);
    request.set_index_space(v1::INDEX_SPACE_POOL_ROW);
    return Rank(client(), pool_, request);
  }();
  const Tokens prompt = MakeTokens(19, 60);
  Sequence sequence = rank.Open(prompt, 64, "key");
  Sequence at_other = other.Open(prompt, 64, "key");
  Sequence at_narrow = narrow.Open(prompt, 64, "key");
  Sequence by_row = narrow_by_row.Open(prompt, 64, "key");
  const Sequence neighbour = narrow.Open(MakeTokens(20, 60), 64);
  sequence.tokens = at_other.tokens = at_narrow.tokens = by_row.tokens = Join(prompt, MakeTokens(21, 140));
  v1::ExtendRequest request;
  request.add_items()->set_sequence_id(sequence.id);
  request.mutable_items(0)->set_max_rows(200);
  v1::ExtendResponse response;
  ASSERT_TRUE(rank.session().Extend(request, &response).ok());
  ASSERT_TRUE(client::FirstError(response.statuses()).ok()) << client::FirstError(response.statuses());
  ASSERT_TRUE(rank.Store(sequence, 60, 140).ok());
  CheckStep(other, at_other, 200, 180);
  rank.CheckStored(sequence, 200);
  // The other rank may drop any position of the sequence as it now is.
  v1::InvalidateRequest invalidate;
  invalidate.add_items()->set_sequence_id(sequence.id);
  invalidate.mutable_items(0)->add_positions(199);
  v1::InvalidateResponse invalidated;
  ASSERT_TRUE(other.session().Invalidate(invalidate, &invalidated).ok());
  EXPECT_TRUE(client::FirstError(invalidated.statuses()).ok()) << client::FirstError(invalidated.statuses());
  // The narrow ones keep to what they were attached for, and their other sequences are untouched.
  CheckStep(narrow, at_narrow, 96, 79);
  CheckStep(narrow, neighbour, 60, 20);
  for (auto [n, s] : {std::pair(&narrow, &at_narrow), std::pair(&narrow_by_row, &by_row)}) {
    const std::vector<BatchRow> batch = {{s, 200, false, true}};
    const StepOutcome outcome = n->Step(batch, {{1, 2, 3, 199}}, 4);
    const absl::Status status = outcome.status.ok() ? client::FirstError(outcome.response.statuses()) : outcome.status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("max_sequence_rows"));
    v1::LoadRequest load;
    v1::LoadItem* item = load.add_items();
    item->mutable_range()->set_sequence_id(s->id);
    item->mutable_range()->set_first_row(90);
    item->mutable_range()->set_row_count(10);
    item->set_target(v1::LOAD_TARGET_STAGING);
    v1::LoadResponse loaded;
    ASSERT_TRUE(n->session().Load(load, &loaded).ok());
    EXPECT_EQ(loaded.statuses(0).code(), 3) << loaded.statuses(0).message();
  }
  CheckStep(narrow, neighbour, 60, 20);
}

class RetentionTest : public SharingTest {
 protected:
  RetentionTest() : SharingTest({"--sequence-retention-ms=1500"}) {}
};

TEST_F(RetentionTest, KeepsKeyedSequencesOfALostSessionForAWhile) {
  const Tokens tokens = MakeTokens(22, 64);
  {
    ChildProcess engine({ClientProcessPath(), daemon().address(), "p", "engine", "keyed"},
                        daemon().folder().File("engine"));
    ASSERT_TRUE(engine.AwaitOutput("ready", absl::Seconds(30))) << engine.Output();
  }  // killed
  ASSERT_TRUE(Eventually(absl::Seconds(1), [&] { return SessionCount() == 0; }));
  ASSERT_EQ(Sequences("p").size(), 1u);
  EXPECT_TRUE(Eventually(absl::Seconds(1), [&] { return Sequences("p")[0].session_ids_size() == 0; }));
  {
    Rank rank(client(), pool_, AttachTo(pool_, "engine"));
    const Tokens victim = MakeTokens(77, 64);
    const v1::AdmittedSequence again = rank.Admit(rank.Item(victim, 64, "victim"));
    ASSERT_EQ(again.status().code(), kOk) << again.status().message();
    EXPECT_EQ(again.stored_rows(), 32u);
    EXPECT_TRUE(again.writer());
    const Sequence sequence{again.sequence_id(), again.state_row(), victim};
    rank.CheckStored(sequence, 32);
    ASSERT_TRUE(rank.Store(sequence, 32, 32).ok());
    rank.CheckStored(sequence, 64);
  }
  // Detached on purpose: gone at once. Nobody has it for longer than the retention time anyway.
  ASSERT_TRUE(Eventually(absl::Seconds(5), [&] { return Sequences("p").empty(); }));
  EXPECT_EQ(Usage("p").referenced_blocks(), 0u);
}

}  // namespace
}  // namespace stoker::system_test
