// Rows through the daemon and back, in every row layout: what is stored is what steps, loads and reads hand out.
#include <array>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

constexpr auto kInline = v1::DATA_SOURCE_INLINE;
constexpr auto kShared = v1::DATA_SOURCE_SHARED;

struct LayoutCase {
  const char* name;
  v1::PoolSpec pool;
};

class RoundTripTest : public DaemonTest, public ::testing::WithParamInterface<LayoutCase> {
 protected:
  RoundTripTest() : pool_(CreatePool(GetParam().pool)) {}

  // Two groups: even layers, odd layers.
  v1::AttachRequest Request(const std::string& name) const {
    v1::AttachRequest request = AttachTo(pool_, name, 4, 64, 16, 512);
    request.clear_groups();
    for (int g = 0; g < 2; ++g) request.add_groups();
    for (uint32_t layer = 0; layer < pool_.layers(); ++layer) {
      request.mutable_groups(static_cast<int>(layer % 2))->add_layers(layer);
    }
    request.set_staging_bytes(4 << 20);
    return request;
  }

  // Entries that differ by group and step; some repeat, some are negative, the newest and one beyond it are in.
  static std::vector<std::vector<int32_t>> Entries(absl::Span<const BatchRow> batch, int step, uint32_t top_k) {
    std::vector<std::vector<int32_t>> entries(2);
    for (int g = 0; g < 2; ++g) {
      for (const BatchRow& row : batch) {
        const auto length = static_cast<int32_t>(std::max(row.length, 1u));
        for (uint32_t k = 0; k < top_k; ++k) {
          int32_t entry = static_cast<int32_t>(step * 5 + g * 3 + static_cast<int>(k) * 13) % length;
          if (k == 3) entry = length - 1;
          if (k == 5) entry = -1;
          if (k == 6) entry = length + 2;
          if (k == 8) entry = entries[static_cast<size_t>(g)].back();
          entries[static_cast<size_t>(g)].push_back(entry);
        }
      }
    }
    return entries;
  }

  v1::PoolSpec pool_;
};

TEST_P(RoundTripTest, DecodesWithInlineAndSharedStepsAlike) {
  Rank by_message(client(), pool_, Request("inline"));
  Rank by_arena(client(), pool_, Request("shared"));
  ASSERT_TRUE(by_arena.session().arena()->status().ok()) << by_arena.session().arena()->status();
  const Tokens a = MakeTokens(1, 160), b = MakeTokens(2, 110);
  std::vector<Sequence> of_message, of_arena;
  for (auto [rank, sequences, source] :
       {std::tuple(&by_message, &of_message, kInline), std::tuple(&by_arena, &of_arena, kShared)}) {
    for (const Tokens& tokens : {a, b}) {
      const Tokens prompt(tokens.begin(), tokens.end() - 40);
      v1::AdmitItem item = rank->Item(prompt, static_cast<uint32_t>(tokens.size()), "", /*hashes=*/false);
      const v1::AdmittedSequence admitted = rank->Admit(item);
      ASSERT_EQ(admitted.status().code(), 0) << admitted.status().message();
      EXPECT_TRUE(admitted.writer());
      EXPECT_EQ(admitted.matched_rows(), 0u);
      sequences->push_back({admitted.sequence_id(), admitted.state_row(), tokens});
      const absl::Status status = rank->Store(sequences->back(), 0, static_cast<uint32_t>(prompt.size()), source);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  for (int step = 0; step < 40; ++step) {
    const uint32_t length_a = 121 + static_cast<uint32_t>(step), length_b = 71 + static_cast<uint32_t>(step);
    const auto batch_of = [&](const std::vector<Sequence>& sequences, bool inline_newest) {
      return std::vector<BatchRow>{
          {&sequences[0], length_a, true, inline_newest}, {nullptr, 0}, {&sequences[1], length_b, true, inline_newest}};
    };
    const std::vector<BatchRow> message_batch = batch_of(of_message, true), arena_batch = batch_of(of_arena, false);
    const auto entries = Entries(message_batch, step, 16);
    by_arena.WriteNewest(of_arena[0], length_a - 1);
    by_arena.WriteNewest(of_arena[1], length_b - 1);
    const StepOutcome from_message = by_message.Step(message_batch, entries, 16, kInline);
    const StepOutcome from_arena = by_arena.Step(arena_batch, entries, 16, kShared);
    by_message.CheckRows(message_batch, entries, 16, from_message);
    by_arena.CheckRows(arena_batch, entries, 16, from_arena);
    if (HasFatalFailure()) return;
    EXPECT_EQ(from_message.hot_rows, from_arena.hot_rows) << "step " << step;
    for (int g = 0; g < 2; ++g) {
      const auto arena = by_arena.session().arena();
      std::array<int32_t, 3> misses;
      EXPECT_TRUE(arena->CopyOut(arena->Misses(static_cast<uint32_t>(g))->subspan(0, 3), misses.data()).ok());
      for (int row = 0; row < 3; ++row) {
        const v1::LookupCounts& counts = from_message.response.groups(g).counts(row);
        EXPECT_EQ(counts.SerializeAsString(), from_arena.response.groups(g).counts(row).SerializeAsString());
        EXPECT_EQ(misses[static_cast<size_t>(row)], static_cast<int32_t>(counts.miss()));
      }
    }
    EXPECT_EQ(from_message.response.gathered_bytes(), from_arena.response.gathered_bytes());
    EXPECT_EQ(from_message.response.boot_epoch(), by_message.session().info().boot_epoch());
  }
  for (size_t i = 0; i < 2; ++i) {
    by_message.CheckStored(of_message[i], static_cast<uint32_t>(of_message[i].tokens.size()));
    by_arena.CheckStored(of_arena[i], static_cast<uint32_t>(of_arena[i].tokens.size()));
  }
  for (const v1::SequenceInfo& info : Sequences(pool_.name())) EXPECT_EQ(info.stored_rows(), info.max_rows());
}

TEST_P(RoundTripTest, ReadsHotRowsAsTheArenaShowsThem) {
  Rank rank(client(), pool_, Request("reader"));
  const Sequence sequence = rank.Open(MakeTokens(3, 100), 100);
  const std::vector<BatchRow> batch = {{&sequence, 100, false, true}};
  const auto entries = Entries(batch, 1, 16);
  const StepOutcome outcome = rank.Step(batch, entries, 16);
  rank.CheckRows(batch, entries, 16, outcome);
  v1::ReadRequest read;
  read.set_sequence_id(sequence.id);
  std::string expected;
  for (const uint32_t layer : {2u, 0u}) {
    read.add_layers(layer);
    for (const int32_t hot_row : outcome.hot_rows[0]) {
      if (hot_row >= 0) expected += rank.ArenaRow(layer, static_cast<uint32_t>(hot_row));
    }
  }
  for (const int32_t hot_row : outcome.hot_rows[0]) {
    if (hot_row >= 0) read.mutable_hot_rows()->add_values(static_cast<uint32_t>(hot_row));
  }
  v1::ReadResponse response;
  const absl::Status status = rank.session().Read(read, &response);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(response.rows(), expected);
}

TEST_P(RoundTripTest, LoadsIntoStagingAndHotBuffers) {
  Rank rank(client(), pool_, Request("loader"));
  const Sequence sequence = rank.Open(MakeTokens(4, 100), 120);
  v1::LoadRequest load;
  v1::LoadItem* to_staging = load.add_items();
  to_staging->mutable_range()->set_sequence_id(sequence.id);
  to_staging->mutable_range()->set_first_row(10);
  to_staging->mutable_range()->set_row_count(90);
  to_staging->set_target(v1::LOAD_TARGET_STAGING);
  to_staging->set_staging_offset_bytes(64);
  v1::LoadItem* to_hot = load.add_items();
  to_hot->mutable_range()->set_sequence_id(sequence.id);
  to_hot->mutable_range()->set_row_count(64);
  to_hot->set_target(v1::LOAD_TARGET_HOT_BUFFER);
  v1::LoadResponse loaded;
  ASSERT_TRUE(rank.session().Load(load, &loaded).ok());
  ASSERT_TRUE(client::FirstError(loaded.statuses()).ok()) << client::FirstError(loaded.statuses());
  EXPECT_EQ(loaded.loaded_bytes(), uint64_t{154} * pool_.layers() * RowBytes(pool_));
  const std::string expected = RowsOf(pool_, absl::MakeConstSpan(sequence.tokens).subspan(10, 90));
  const auto staging = rank.session().arena()->Staging();
  ASSERT_TRUE(staging.ok());
  std::string staged(expected.size(), '\0');
  EXPECT_TRUE(rank.session()
                  .arena()
                  ->CopyOut(staging->subspan(64, staged.size()), reinterpret_cast<std::byte*>(staged.data()))
                  .ok());
  EXPECT_TRUE(staged == expected);
  // Positions 0 to 63 are now in slots 0 to 63: a step finds them hot and copies nothing.
  const std::vector<BatchRow> batch = {{&sequence, 100}};
  std::vector<int32_t> positions(16);
  std::iota(positions.begin(), positions.end(), 48);
  const std::vector<std::vector<int32_t>> entries = {positions, positions};
  const StepOutcome outcome = rank.Step(batch, entries, 16);
  rank.CheckRows(batch, entries, 16, outcome);
  EXPECT_EQ(outcome.Sum(&v1::LookupCounts::hot), 32u);
  EXPECT_EQ(outcome.response.gathered_bytes(), 0u);
  const int32_t region = static_cast<int32_t>(rank.session().arena()->RegionBegin(sequence.state_row));
  EXPECT_EQ(outcome.hot_rows[0][0], region + 48);
}

TEST_P(RoundTripTest, LoadsIntoHotBuffersBehindAnUnfinishedPlan) {
  Rank rank(client(), pool_, Request("pending"));
  const Sequence sequence = rank.Open(MakeTokens(5, 200), 200);
  // A plan that takes slots, and whose rows are not copied yet.
  v1::ResolveRequest resolve;
  resolve.set_top_k(16);
  resolve.set_source(kInline);
  resolve.add_rows()->set_sequence_id(sequence.id);
  resolve.mutable_rows(0)->set_length(200);
  for (int32_t k = 0; k < 16; ++k) resolve.mutable_group()->add_indices(100 + k);
  v1::ResolveResponse resolved;
  ASSERT_TRUE(rank.session().Resolve(resolve, &resolved).ok());
  ASSERT_EQ(resolved.miss_hot_rows_size(), 16);
  v1::LoadRequest load;
  v1::LoadItem* item = load.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_row_count(64);
  item->set_target(v1::LOAD_TARGET_HOT_BUFFER);
  v1::LoadResponse loaded;
  ASSERT_TRUE(rank.session().Load(load, &loaded).ok());
  ASSERT_TRUE(client::FirstError(loaded.statuses()).ok());
  for (int32_t begin : {0, 16, 32, 48}) {
    std::vector<int32_t> positions(16);
    std::iota(positions.begin(), positions.end(), begin);
    const std::vector<BatchRow> batch = {{&sequence, 200}};
    const std::vector<std::vector<int32_t>> entries = {positions, positions};
    rank.CheckRows(batch, entries, 16, rank.Step(batch, entries, 16));
  }
}

TEST_P(RoundTripTest, ResolvesThenGathersSomeLayersNowAndTheRestBeforeTheNextPlan) {
  Rank rank(client(), pool_, Request("plans"));
  const Sequence sequence = rank.Open(MakeTokens(6, 150), 150);
  const auto resolve = [&](int32_t first) {
    v1::ResolveRequest request;
    request.set_top_k(8);
    request.set_source(kInline);
    request.add_rows()->set_sequence_id(sequence.id);
    request.mutable_rows(0)->set_length(150);
    for (int32_t k = 0; k < 8; ++k) request.mutable_group()->add_indices(first + k);
    v1::ResolveResponse response;
    const absl::Status status = rank.session().Resolve(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(response.result().counts(0).miss(), 8u);
    EXPECT_EQ(response.miss_pool_rows_size(), 8);
    EXPECT_TRUE(std::equal(response.miss_hot_rows().begin(), response.miss_hot_rows().end(),
                           response.result().hot_rows().begin()));
    return response;
  };
  const auto expect_rows = [&](const v1::ResolveResponse& plan, int32_t first, absl::Span<const uint32_t> layers) {
    for (int k = 0; k < 8; ++k) {
      for (uint32_t layer : layers) {
        EXPECT_EQ(rank.ArenaRow(layer, static_cast<uint32_t>(plan.result().hot_rows(k))),
                  RowOf(pool_, layer, sequence.tokens[static_cast<size_t>(first + k)]));
      }
    }
  };
  const v1::ResolveResponse first = resolve(10);
  v1::GatherRequest gather;
  gather.add_layers(2);  // group 0 has the even layers
  v1::GatherResponse gathered;
  ASSERT_TRUE(rank.session().Gather(gather, &gathered).ok());
  EXPECT_EQ(gathered.gathered_bytes(), uint64_t{8} * RowBytes(pool_));
  expect_rows(first, 10, {2});
  EXPECT_NE(rank.ArenaRow(0, static_cast<uint32_t>(first.result().hot_rows(0))), RowOf(pool_, 0, sequence.tokens[10]));
  // Gathered layers are left alone.
  ASSERT_TRUE(rank.session().Gather(gather, &gathered).ok());
  EXPECT_EQ(gathered.gathered_bytes(), 0u);
  const v1::ResolveResponse second = resolve(30);
  expect_rows(first, 10, {0, 2});
  ASSERT_TRUE(rank.session().Gather(v1::GatherRequest(), &gathered).ok());
  expect_rows(second, 30, {0, 2});
}

TEST_P(RoundTripTest, CommitsNewestRowsFromTheArenaAndInvalidates) {
  Rank rank(client(), pool_, Request("commits"));
  Sequence sequence = rank.Open(MakeTokens(7, 40), 60);
  const Tokens later = MakeTokens(8, 20);
  sequence.tokens.insert(sequence.tokens.end(), later.begin(), later.end());
  for (uint32_t i = 0; i < 3; ++i) rank.WriteNewest(sequence, 40 + i, i);
  v1::CommitRequest commit;
  v1::CommitItem* item = commit.add_items();
  item->set_sequence_id(sequence.id);
  item->set_first_row(40);
  item->set_row_count(3);
  v1::CommitResponse committed;
  ASSERT_TRUE(rank.session().Commit(commit, &committed).ok());
  ASSERT_TRUE(client::FirstError(committed.statuses()).ok()) << client::FirstError(committed.statuses());
  EXPECT_EQ(committed.committed_bytes(), uint64_t{3} * pool_.layers() * RowBytes(pool_));
  rank.CheckStored(sequence, 43);

  const std::vector<BatchRow> batch = {{&sequence, 43}};
  const std::vector<std::vector<int32_t>> entries = {{1, 2, 3, 40}, {1, 2, 3, 40}};
  rank.CheckRows(batch, entries, 4, rank.Step(batch, entries, 4));
  EXPECT_EQ(rank.Step(batch, entries, 4).Sum(&v1::LookupCounts::hot), 8u);
  v1::InvalidateRequest invalidate;
  v1::InvalidateItem* dropped = invalidate.add_items();
  dropped->set_sequence_id(sequence.id);
  for (uint32_t position : {2u, 40u, 41u, 59u}) dropped->add_positions(position);
  v1::InvalidateResponse invalidated;
  ASSERT_TRUE(rank.session().Invalidate(invalidate, &invalidated).ok());
  ASSERT_TRUE(client::FirstError(invalidated.statuses()).ok()) << client::FirstError(invalidated.statuses());
  const StepOutcome outcome = rank.Step(batch, entries, 4);
  rank.CheckRows(batch, entries, 4, outcome);
  EXPECT_EQ(outcome.Sum(&v1::LookupCounts::hot), 4u);
  EXPECT_EQ(outcome.Sum(&v1::LookupCounts::miss), 4u);
}

TEST_P(RoundTripTest, StreamsSteps) {
  Rank rank(client(), pool_, Request("stream"));
  const Sequence sequence = rank.Open(MakeTokens(9, 90), 90);
  auto stream = rank.session().RunSteps();
  ASSERT_TRUE(stream.ok()) << stream.status();
  for (int step = 0; step < 10; ++step) {
    const std::vector<BatchRow> batch = {{&sequence, 90, false, true}};
    const auto entries = Entries(batch, step, 16);
    v1::RunStepsRequest request;
    *request.mutable_step() = rank.StepRequestOf(batch, entries, 16, kInline);
    v1::RunStepsResponse response;
    ASSERT_TRUE((*stream)->Run(request, &response).ok());
    StepOutcome outcome;
    outcome.response = response.step();
    for (const auto& group : response.step().groups()) {
      outcome.hot_rows.emplace_back(group.hot_rows().begin(), group.hot_rows().end());
    }
    rank.CheckRows(batch, entries, 16, outcome);
  }
  EXPECT_TRUE((*stream)->Finish().ok());
}

TEST_P(RoundTripTest, ResolvesSeveralRowsOfOneSequenceAsOneUnion) {
  Rank rank(client(), pool_, Request("speculative"));
  Sequence sequence = rank.Open(MakeTokens(10, 80), 100);
  const Tokens drafts = MakeTokens(11, 20);
  sequence.tokens.insert(sequence.tokens.end(), drafts.begin(), drafts.end());
  // Rows of length 81, 82, 83: tokens 80, 81, 82 are not in the pool yet and lie one after the other.
  const std::vector<BatchRow> batch = {
      {&sequence, 81, false, true}, {&sequence, 82, false, true}, {&sequence, 83, false, true}};
  std::vector<std::vector<int32_t>> entries(2);
  for (auto& group : entries) {
    for (int32_t row = 0; row < 3; ++row) {
      for (int32_t k = 0; k < 16; ++k) group.push_back(k < 3 ? 80 + std::min(k, row) : (row * 8 + k * 4) % 80);
    }
  }
  const StepOutcome outcome = rank.Step(batch, entries, 16);
  rank.CheckRows(batch, entries, 16, outcome);
  EXPECT_GE(outcome.Sum(&v1::LookupCounts::newest), 2u * 9u);
  EXPECT_GT(outcome.Sum(&v1::LookupCounts::duplicate), 0u);
  // Two of the three are accepted and committed.
  v1::CommitRequest commit;
  commit.add_items()->set_sequence_id(sequence.id);
  commit.mutable_items(0)->set_first_row(80);
  commit.mutable_items(0)->set_row_count(2);
  v1::CommitResponse committed;
  ASSERT_TRUE(rank.session().Commit(commit, &committed).ok());
  ASSERT_TRUE(client::FirstError(committed.statuses()).ok()) << client::FirstError(committed.statuses());
  rank.CheckStored(sequence, 82);
}

TEST_P(RoundTripTest, AnswersResidentPagesWithTheEnginesOwnRows) {
  Rank rank(client(), pool_, Request("pages"));
  const Sequence sequence = rank.Open(MakeTokens(12, 200), 200);
  const auto block_rows = static_cast<int32_t>(pool_.block_rows());
  const std::vector<BatchRow> batch = {{&sequence, 200, false, true, {-1, 5}}};
  const std::vector<int32_t> wanted = {0, block_rows, block_rows + 3, 2 * block_rows};
  const std::vector<std::vector<int32_t>> entries = {wanted, wanted};
  const StepOutcome outcome = rank.Step(batch, entries, 4);
  rank.CheckRows(batch, entries, 4, outcome);
  EXPECT_EQ(outcome.Sum(&v1::LookupCounts::resident), 4u);
  EXPECT_EQ(outcome.hot_rows[0][1], 5 * block_rows);
  EXPECT_EQ(outcome.hot_rows[0][2], 5 * block_rows + 3);
  // Pages of one step do not linger in the next.
  const std::vector<BatchRow> without = {{&sequence, 200, false, true}};
  const StepOutcome plain = rank.Step(without, entries, 4);
  rank.CheckRows(without, entries, 4, plain);
  EXPECT_EQ(plain.Sum(&v1::LookupCounts::resident), 0u);
}

// A client learns pool rows from a plan; a session of the other index space names them.
TEST_P(RoundTripTest, StepsByPoolRow) {
  Rank by_position(client(), pool_, Request("position"));
  v1::AttachRequest request = Request("pool-row");
  request.set_index_space(v1::INDEX_SPACE_POOL_ROW);
  Rank by_row(client(), pool_, request);
  const Sequence at_writer = by_position.Open(MakeTokens(13, 120), 160, "shared");
  const Sequence at_reader = by_row.Open(at_writer.tokens, 160, "shared");
  std::vector<int32_t> positions;
  for (int32_t k = 0; k < 16; ++k) positions.push_back(k * 7);
  const std::vector<int32_t> rows = by_row.PoolRows(at_reader, positions);
  ASSERT_EQ(rows.size(), 16u);
  const std::vector<BatchRow> batch = {{&at_reader, 120, false, true}};
  for (const auto source : {kInline, kShared}) {
    const StepOutcome outcome = by_row.Step(batch, {rows, rows}, 16, source);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    for (size_t k = 0; k < 16; ++k) {
      for (uint32_t layer = 0; layer < pool_.layers(); ++layer) {
        EXPECT_EQ(by_row.ArenaRow(layer, static_cast<uint32_t>(outcome.hot_rows[layer % 2][k])),
                  RowOf(pool_, layer, at_reader.tokens[static_cast<size_t>(positions[k])]));
      }
    }
    EXPECT_EQ(outcome.Sum(source == kInline ? &v1::LookupCounts::miss : &v1::LookupCounts::hot), 32u);
  }
  // Of several rows of a sequence only the first one's newest token would have a name.
  std::vector<int32_t> twice = rows;
  twice.insert(twice.end(), rows.begin(), rows.end());
  const std::vector<BatchRow> draft = {{&at_reader, 120, false, true}, {&at_reader, 121, false, true}};
  const absl::Status several = by_row.Step(draft, {twice, twice}, 16).status;
  EXPECT_EQ(several.code(), absl::StatusCode::kInvalidArgument) << several;
  EXPECT_THAT(several.message(), testing::HasSubstr("limit 1 in a session with INDEX_SPACE_POOL_ROW")) << several;
  // Rows of blocks that are not the sequence's are invalid, not readable.
  const Sequence other = by_position.Open(MakeTokens(14, 120), 160);
  const std::vector<int32_t> foreign = by_position.PoolRows(other, positions);
  EXPECT_EQ(by_row.Step(batch, {foreign, foreign}, 16).Sum(&v1::LookupCounts::invalid), 32u);
}

INSTANTIATE_TEST_SUITE_P(Layouts, RoundTripTest,
                         ::testing::Values(LayoutCase{"Linear16", LinearPool("p", 4, 16, 64)},
                                           LayoutCase{"Linear656", LinearPool("p", 4, 656, 64)},
                                           LayoutCase{"Linear20", LinearPool("p", 3, 20, 64)},
                                           LayoutCase{"SplitKv", SplitPool("p", 3, 128, 36, 64)},
                                           LayoutCase{"Dsv4Paged", PagedPool("p", 3, 16)}),
                         [](const auto& test_case) { return test_case.param.name; });

}  // namespace
}  // namespace stoker::system_test
