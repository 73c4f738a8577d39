// BeginBatch, PlanCommits and EndBatch on every backend, beside the oracle: all bytes are compared after each of them,
// those that must not be written too.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/batch_case.h"
#include "tests/kernels/resolve_random.h"

namespace stoker::kernels {

void PrintTo(BatchStatus status, std::ostream* out) { *out << "status " << static_cast<int32_t>(status); }

namespace {

using testing::Each;
using testing::ElementsAre;
using enum BatchStatus;
using enum BatchOperation;

constexpr auto kPoison = static_cast<BatchStatus>(static_cast<int32_t>(0xb5b5b5b5u));

class PlaneBatchTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(PlaneBatchTest);

// Written out by hand, so that the oracle is held to something too: three rows of a speculating sequence, a padding row
// between two others, and one beyond the count.
TEST_P(PlaneBatchTest, SpeculatingSequence) {
  BatchCase c({.top_k = 5, .hot_rows = 16, .raises_step = true});
  c.state().step = c.state().accepted = c.state().finished = 8;
  c.word(2).stored_rows = 10;
  c.word(0).stored_rows = 30;
  c.rows() = 6;
  c.SetRow(0, 2, 11, 1);
  c.SetRow(1, 2, 12, 1);
  c.SetRow(2, 2, 13, 0);
  c.SetRow(3, -1, 5, 1);
  c.SetRow(4, 0, 31, 1);
  c.sequence_ids()[5] = 0;  // padding as well
  c.state_rows()[5] = 1;
  c.SetRow(6, 1, 1, 1);
  ASSERT_TRUE(c.Run(bench(), kBegin));
  EXPECT_EQ(c.state().step, 9);
  EXPECT_EQ(c.state().accepted, 9);
  EXPECT_EQ(c.state().finished, 8);
  EXPECT_THAT(c.Statuses(), ElementsAre(kOk, kOk, kOk, kOk, kOk, kOk, kPoison, kPoison));
  EXPECT_EQ(c.plan_rows(), 6);
  EXPECT_THAT(c.PlanRows(), ElementsAre(2, 2, 2, -1, 0, -1, -1, -1));
  EXPECT_THAT(c.PlanLengths(), ElementsAre(11, 12, 13, 0, 31, 0, 0, 0));
  // Regions of 20 rows, the newest from row 16 on; blocks of 4 rows, 8 a state row.
  EXPECT_THAT(c.NewestHotRows(), ElementsAre(56, 57, 58, -1, 16, -1, -1, -1));
  EXPECT_THAT(c.NewestPoolRows(), ElementsAre(74, 75, 76, -1, 30, -1, -1, -1));
  ASSERT_TRUE(c.Run(bench(), kPlan));
  EXPECT_THAT(c.CommitHotRows(), ElementsAre(56, 57, -1, -1, 16, -1, -1, -1));
  EXPECT_THAT(c.CommitPoolRows(), ElementsAre(74, 75, -1, -1, 30, -1, -1, -1));
  EXPECT_THAT(c.Statuses(), ElementsAre(kOk, kOk, kOk, kOk, kOk, kOk, kPoison, kPoison));
  ASSERT_TRUE(c.Run(bench(), kEnd));
  EXPECT_EQ(c.word(2).stored_rows, 12);
  EXPECT_EQ(c.word(0).stored_rows, 31);
  EXPECT_EQ(c.committed(), 3);
  EXPECT_EQ(c.state().finished, 9);
}

// Something that makes batch row 2 fail, the second of two rows of a sequence.
struct Wrong {
  BatchStatus status;
  std::function<void(BatchCase&)> make;
};

// In the order of their precedence. They may be made in any order and number.
std::vector<Wrong> Wrongs() {
  return {
      {kBadCount, [](BatchCase& c) { c.rows() = c.shape().max_rows + 1; }},
      {kUnknownSequence, [](BatchCase& c) { c.sequence_ids()[2] = 99; }},
      {kNotAdjacent,
       [](BatchCase& c) {
         c.SetRow(0, 1, 8);
         c.SetRow(1, -1, 0);
       }},
      {kTooManyRows, [](BatchCase& c) { c.top_k() = c.shape().hot_rows / 2 + 1; }},
      {kBadLength, [](BatchCase& c) { c.lengths()[2] = 0; }},
      {kNotStored, [](BatchCase& c) { c.word(1).stored_rows = 6; }},
      {kNoBlock, [](BatchCase& c) { c.block(1, 2) = -1; }},
      {kEarlierRow, [](BatchCase& c) { c.block(1, 1) = -1; }},
  };
}

// Batch rows 1 and 2 are of a sequence whose newest rows lie in two blocks, rows 0 and 3 of others.
BatchCase GoodCase() {
  BatchCase c({.max_rows = 5});
  c.word(1).stored_rows = 7;
  c.SetRow(0, 0, 1);
  c.SetRow(1, 1, 8);
  c.SetRow(2, 1, 9);
  c.SetRow(3, 2, 1);
  return c;
}

TEST_P(PlaneBatchTest, OfTwoWrongsTheFirstIsTold) {
  BatchCase good = GoodCase();
  ASSERT_TRUE(good.Run(bench(), kBegin));
  ASSERT_THAT(good.Statuses(), Each(kOk));
  const std::vector<Wrong> wrongs = Wrongs();
  for (size_t a = 0; a < wrongs.size(); ++a) {
    for (size_t b = a; b < wrongs.size(); ++b) {
      SCOPED_TRACE(testing::Message() << "wrongs " << a << " and " << b);
      BatchCase c = GoodCase();
      wrongs[b].make(c);
      wrongs[a].make(c);
      ASSERT_TRUE(c.Run(bench(), kBegin));
      ASSERT_EQ(c.Statuses()[2], wrongs[a].status);
      ASSERT_EQ(c.PlanRows()[2], -1);
      ASSERT_EQ(c.Statuses()[3], a == 0 ? kBadCount : kOk) << "another sequence";
    }
  }
}

TEST_P(PlaneBatchTest, CommitsThatFail) {
  // Lengths and commits of three rows, stored rows, whether this session writes; statuses.
  struct Case {
    int32_t lengths[3];
    int32_t commits[3];
    int32_t stored_rows;
    bool writes;
    BatchStatus want[3];
  };
  const std::vector<Case> cases = {
      {{8, 9, 10}, {1, 1, 1}, 7, true, {kOk, kOk, kOk}},
      {{8, 9, 10}, {0, 0, 0}, 7, false, {kOk, kOk, kOk}},
      {{8, 9, 10}, {1, 0, -1}, 7, false, {kNotWriter, kOk, kNotWriter}},
      {{8, 9, 10}, {1, 1, 1}, 8, false, {kNotWriter, kNotWriter, kNotWriter}},
      {{8, 9, 10}, {0, 1, 1}, 7, true, {kOk, kNotAppended, kNotAppended}},
      {{8, 9, 10}, {1, 0, 1}, 7, true, {kOk, kOk, kNotAppended}},
      {{8, 8, 9}, {1, 1, 1}, 7, true, {kOk, kNotAppended, kNotAppended}},
      {{8, 8, 9}, {1, 0, 1}, 7, true, {kOk, kOk, kOk}},
      {{8, 9, 10}, {1, 1, 1}, 8, true, {kNotAppended, kNotAppended, kNotAppended}},
      {{8, 9, 10}, {0, 1, 1}, 8, true, {kOk, kOk, kOk}},
  };
  for (size_t n = 0; n < cases.size(); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    const Case& k = cases[n];
    BatchCase c(BatchShape{});
    c.word(1).stored_rows = k.stored_rows;
    c.word(1).writer = k.writes ? BatchCase::kSession : 0;
    for (int32_t i = 0; i < 3; ++i) c.SetRow(i + 1, 1, k.lengths[i], k.commits[i]);
    c.SetRow(0, 0, 1, 1);
    c.SetRow(4, 2, 1, 1);
    ASSERT_TRUE(c.Run(bench(), kBegin));
    ASSERT_THAT(c.Statuses(), Each(kOk));
    ASSERT_TRUE(c.Run(bench(), kPlan));
    EXPECT_THAT(c.Statuses(), ElementsAre(kOk, k.want[0], k.want[1], k.want[2], kOk, kOk, kOk, kOk));
    ASSERT_TRUE(c.Run(bench(), kEnd));
    int32_t planned = 0;
    for (int32_t i = 0; i < 3; ++i) planned += k.commits[i] != 0 && k.want[i] == kOk;
    EXPECT_EQ(c.word(1).stored_rows, k.stored_rows + planned);
    EXPECT_EQ(c.committed(), 2 + planned);
  }
}

// The writer may change between the two, and the daemon may store rows.
TEST_P(PlaneBatchTest, StoredRowsAreReadAnewAndNeverFall) {
  BatchCase c(BatchShape{});
  c.SetRow(0, 0, 1, 1);
  c.SetRow(1, 1, 1, 1);
  c.SetRow(2, 2, 1, 1);
  ASSERT_TRUE(c.Run(bench(), kBegin));
  c.word(0).writer = BatchCase::kSession + 1;
  c.word(1).stored_rows = 5;
  ASSERT_TRUE(c.Run(bench(), kPlan));
  EXPECT_EQ(c.Statuses()[0], kNotWriter);
  EXPECT_EQ(c.Statuses()[1], kNotAppended);
  EXPECT_EQ(c.Statuses()[2], kOk);
  c.word(2).stored_rows = 9;
  ASSERT_TRUE(c.Run(bench(), kEnd));
  EXPECT_EQ(c.word(0).stored_rows, 0);
  EXPECT_EQ(c.word(1).stored_rows, 5);
  EXPECT_EQ(c.word(2).stored_rows, 9);
  EXPECT_EQ(c.committed(), 0);
}

// Values around a limit.
std::vector<int32_t> Edges(int32_t limit) {
  std::vector<int32_t> edges = {kLowest, kLowest + 1, -1, 0, 1, 2, limit / 2};
  for (const int32_t at : {limit - 2, limit - 1, limit}) edges.push_back(at);
  if (limit < kHighest - 1) edges.insert(edges.end(), {limit + 1, kHighest - 1, kHighest});
  return edges;
}

TEST_P(PlaneBatchTest, Edges) {
  const auto begin = [&](const std::function<void(BatchCase&)>& change) {
    BatchCase c = GoodCase();
    change(c);
    ASSERT_TRUE(c.Run(bench(), kBegin));
    ASSERT_TRUE(c.Run(bench(), kPlan));
    ASSERT_TRUE(c.Run(bench(), kEnd));
  };
  const BatchShape shape = GoodCase().shape();
  for (const int32_t value : Edges(shape.max_rows)) begin([=](BatchCase& c) { c.rows() = value; });
  for (const int32_t value : Edges(shape.state_rows)) {
    begin([=](BatchCase& c) { c.state_rows()[1] = value; });
    begin([=](BatchCase& c) { c.SetRow(3, value, 1); });
  }
  for (const int32_t value : Edges(static_cast<int32_t>(shape.max_sequence_rows))) {
    for (const int32_t i : {1, 2}) begin([=](BatchCase& c) { c.lengths()[i] = value; });
    begin([=](BatchCase& c) {
      c.word(1).stored_rows = 31;
      c.lengths()[1] = c.lengths()[2] = value;
    });
    begin([=](BatchCase& c) { c.word(1).max_rows = value; });
    begin([=](BatchCase& c) { c.word(1).stored_rows = value; });
  }
  // Around the lengths of rows 1 and 2.
  for (const int32_t value : Edges(9)) {
    for (const int32_t i : {1, 2}) begin([=](BatchCase& c) { c.lengths()[i] = value; });
    begin([=](BatchCase& c) { c.word(1).max_rows = value; });
    begin([=](BatchCase& c) { c.word(1).stored_rows = value; });
  }
  for (const int32_t value : Edges(shape.word_count)) begin([=](BatchCase& c) { c.entry(1).word = value; });
  for (const int32_t value : Edges(shape.blocks)) {
    for (const int32_t column : {1, 2}) begin([=](BatchCase& c) { c.block(1, column) = value; });
  }
}

// As many rows of one sequence as a batch, a warp, a block of threads and the limits allow, and one more.
TEST_P(PlaneBatchTest, RowsOfOneSequence) {
  for (const int32_t max_rows : {1, 2, 31, 32, 33, 64, 1023, 1024, 1025, 4095, kMaxBatchRows}) {
    for (const int32_t limit : {max_rows - 1, max_rows}) {
      for (const bool by_block : {false, true}) {
        if (limit == 0) continue;
        SCOPED_TRACE(testing::Message() << max_rows << " rows, limit " << limit
                                        << (by_block ? ", a block" : ", top_k"));
        BatchShape shape{.max_rows = max_rows, .top_k = 3, .state_rows = 2, .columns = 1, .blocks = 2};
        shape.hot_rows = by_block ? kMaxHotRows : limit * shape.top_k + 2;
        shape.block_rows = by_block ? limit : kMaxBatchRows;
        shape.newest_row = shape.hot_rows;
        shape.region_rows = shape.hot_rows + shape.block_rows;
        shape.max_sequence_rows = shape.block_rows;
        BatchCase c(shape);
        // A step of a row more than there are positions would be too long.
        for (int32_t i = 0; i < max_rows; ++i) c.SetRow(i, 1, std::min(i + 1, shape.block_rows), 1);
        ASSERT_TRUE(c.Run(bench(), kBegin));
        ASSERT_THAT(c.Statuses(), Each(limit < max_rows ? kTooManyRows : kOk));
        ASSERT_TRUE(c.Run(bench(), kPlan));
        ASSERT_TRUE(c.Run(bench(), kEnd));
        ASSERT_EQ(c.word(1).stored_rows, limit < max_rows ? 0 : max_rows);
      }
    }
  }
}

// A row for each state row, in an order that is not theirs.
TEST_P(PlaneBatchTest, ManySequences) {
  for (const int32_t rows : {31, 32, 33, 1024, 1025, kMaxBatchRows}) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    BatchShape shape{.max_rows = rows, .state_rows = rows, .word_count = rows};
    shape.blocks = rows * shape.columns;
    BatchCase c(shape);
    for (int32_t i = 0; i < rows; ++i) c.SetRow(i, (i * 7 + 3) % rows, 1, 1);
    // One state row again, far behind its first.
    c.SetRow(rows - 1, 3, 2, 1);
    ASSERT_TRUE(c.Run(bench(), kBegin));
    ASSERT_EQ(c.Statuses()[rows - 1], kNotAdjacent);
    ASSERT_EQ(c.Statuses()[0], kOk);
    ASSERT_TRUE(c.Run(bench(), kPlan));
    ASSERT_TRUE(c.Run(bench(), kEnd));
    ASSERT_EQ(c.committed(), rows - 1);
  }
}

TEST_P(PlaneBatchTest, AfterThePlanesEndNothingIsToldButThat) {
  for (const PlaneOutcome outcome : {PlaneOutcome::kAborted, PlaneOutcome::kTimedOut, PlaneOutcome::kBadStep}) {
    BatchCase c(BatchShape{});
    c.SetRow(0, 0, 1, 1);
    ASSERT_TRUE(c.Run(bench(), kBegin));
    ASSERT_TRUE(c.Run(bench(), kPlan));
    ASSERT_EQ(c.CommitHotRows()[0], 16);
    // A step later: what is planned must not be carried out again.
    c.state() = {.step = 6, .accepted = 5, .finished = 4, .outcome = static_cast<uint32_t>(outcome)};
    c.PoisonStatuses();
    ASSERT_TRUE(c.Run(bench(), kBegin));
    EXPECT_EQ(c.plan_rows(), 0);
    ASSERT_TRUE(c.Run(bench(), kPlan));
    EXPECT_THAT(c.CommitHotRows(), Each(-1));
    EXPECT_THAT(c.CommitPoolRows(), Each(-1));
    ASSERT_TRUE(c.Run(bench(), kEnd));
    EXPECT_EQ(c.state().finished, 5);
    EXPECT_EQ(c.ended(), static_cast<uint32_t>(outcome));
    EXPECT_EQ(c.word(0).stored_rows, 0);
    EXPECT_THAT(c.Statuses(), Each(kPoison));
  }
}

// Sequences that grow by what is accepted of each step's speculated rows, beside a model of their lengths.
TEST_P(PlaneBatchTest, StoredRowsGrowByWhatIsCommitted) {
  std::mt19937_64 rng(71);
  BatchShape shape{.max_rows = 12, .top_k = 4, .hot_rows = 16, .raises_step = true};
  shape.columns = 300;
  shape.blocks = shape.columns * shape.state_rows;
  shape.max_sequence_rows = shape.columns * shape.block_rows;
  BatchCase c(shape);
  std::map<int32_t, int32_t> stored;  // by state row
  uint64_t committed = 0;
  const int32_t steps = Cases(300, 300);
  for (int32_t step = 1; step <= steps; ++step) {
    std::vector<int32_t> order = {0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), rng);
    order.resize(Draw(rng, 0, 4));
    int32_t rows = 0;
    std::map<int32_t, int32_t> accepted;
    for (const int32_t r : order) {
      const int32_t drafts = Draw(rng, 1, 3);
      accepted[r] = Draw(rng, 0, drafts);
      for (int32_t k = 0; k < drafts; ++k) c.SetRow(rows++, r, stored[r] + 1 + k, k < accepted[r] ? 1 : 0);
    }
    c.rows() = rows;
    c.PoisonStatuses();
    c.PoisonPlan();
    ASSERT_TRUE(c.Run(bench(), kBegin));
    c.PoisonCommits();
    ASSERT_TRUE(c.Run(bench(), kPlan));
    ASSERT_TRUE(c.Run(bench(), kEnd));
    for (int32_t i = 0; i < rows; ++i) ASSERT_EQ(c.Statuses()[i], kOk);
    for (const auto& [r, count] : accepted) {
      stored[r] += count;
      committed += count;
    }
    for (int32_t r = 0; r < shape.state_rows; ++r) ASSERT_EQ(c.word(r).stored_rows, stored[r]);
    ASSERT_EQ(c.committed(), committed);
    ASSERT_EQ(c.state().step, step);
    ASSERT_EQ(c.state().finished, step);
  }
}

TEST_P(PlaneBatchTest, RandomBatches) {
  std::map<BatchStatus, int> seen;
  const int32_t cases = Cases(2000, 4000);
  for (int32_t seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 rng(seed);
    BatchCase c(RandomBatchShape(rng));
    RandomDaemon(c, rng);
    const uint64_t step = rng() % 1000;
    c.state() = {.step = step, .accepted = step, .finished = step};
    for (int32_t batch = 0; batch < 2; ++batch) {
      RandomEngine(c, rng);
      c.PoisonStatuses();
      c.PoisonPlan();
      if (!c.shape().raises_step) ++c.state().step;
      if (Chance(rng, 0.05)) c.state().outcome = Draw(rng, 1, 3);
      ASSERT_TRUE(c.Run(bench(), kBegin));
      for (const BatchStatus status : c.Statuses()) ++seen[status];
      // An engine may change its mind about commits until it asks for them.
      for (int32_t i = 0; i < c.shape().max_rows; ++i) {
        if (Chance(rng, 0.1)) c.commits()[i] = Draw(rng, -1, 1);
      }
      if (Chance(rng, 0.2)) RandomDaemon(c, rng);
      if (Chance(rng, 0.05)) c.state().outcome = Draw(rng, 1, 3);
      ASSERT_TRUE(c.Run(bench(), kPlan));
      for (const BatchStatus status : c.Statuses()) ++seen[status];
      for (int32_t w = 0; w < c.shape().word_count; ++w) {
        if (Chance(rng, 0.05)) c.word(w).stored_rows += Draw(rng, 1, 3);
      }
      ASSERT_TRUE(c.Run(bench(), kEnd));
    }
  }
  if (cases < 1000) return;
  for (int32_t status = 0; status <= static_cast<int32_t>(kNotAppended); ++status) {
    EXPECT_GT(seen[static_cast<BatchStatus>(status)], 100) << "status " << status << " is hardly tested";
  }
}

}  // namespace
}  // namespace stoker::kernels
