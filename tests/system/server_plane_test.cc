// The server plane of the real daemon: steps started by doorbells, what comes and goes beside them, and engines that
// break the protocol or die. The arena is in host memory here: the CPU backend plays the device.
#include "client/server_plane.h"

#include <random>

#include "tests/system/daemon_fixture.h"
#include "tests/system/plane_steps.h"

namespace stoker::system_test {
namespace {

using client::PlaneRow;
using client::ServerPlane;
using ::testing::HasSubstr;

constexpr uint32_t kTopK = 16;
constexpr uint32_t kLayers = 4;

class ServerPlaneTest : public DaemonTest {
 protected:
  ServerPlaneTest() : ServerPlaneTest(std::vector<std::string>{}) {}
  explicit ServerPlaneTest(std::vector<std::string> flags) : DaemonTest(std::move(flags)) {
    pool_ = CreatePool(LinearPool("p", kLayers, 48, 128));
  }

  v1::AttachRequest Request(const std::string& name, uint32_t state_rows = 8) const {
    return PlaneRequest(pool_, name, state_rows);
  }

  static std::unique_ptr<ServerPlane> Arm(Rank& rank, uint32_t top_k = kTopK) {
    auto plane = ServerPlane::Arm(rank.session(), top_k);
    EXPECT_TRUE(plane.ok()) << plane.status();
    return plane.ok() ? *std::move(plane) : nullptr;
  }

  uint32_t StoredRows(uint64_t id) {
    for (const v1::SequenceInfo& info : Sequences("p")) {
      if (info.sequence_id() == id) return info.stored_rows();
    }
    return 0;
  }

  v1::PoolSpec pool_;
};

TEST_F(ServerPlaneTest, DecodesAndStores) {
  Rank rank(client(), pool_, Request("rank"));
  const auto plane = Arm(rank);
  ASSERT_NE(plane, nullptr);
  std::mt19937_64 random(1);
  // Sequences join and leave between steps; a padding row lies between the two.
  Sequence a = OpenPart(rank, 1, 50, 400);
  Sequence b = OpenPart(rank, 2, 100, 300);
  uint32_t length_a = 51, length_b = 101;
  const auto before = Scrape(daemon().metrics_port());
  for (int step = 0; step < 300 && !HasFatalFailure(); ++step) {
    std::vector<BatchRow> batch = {{&a, length_a++, true}, {}};
    if (step % 3 != 2) batch.push_back({&b, length_b++, true});
    Step(rank, *plane, batch, random);
    if (step % 100 == 99) {
      rank.CheckStored(b, length_b - 1);
      ASSERT_TRUE(rank.Close(b).ok());
      b = OpenPart(rank, 3 + static_cast<uint64_t>(step), 40, 300);
      length_b = 41;
    }
  }
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(length_a, 351u);
  rank.CheckStored(a, 350);
  EXPECT_EQ(StoredRows(a.id), 350u);
  // What the plane did is counted, each entry once, and its steps as the server plane's.
  auto after = Scrape(daemon().metrics_port());
  double lookups = 0;
  for (const auto& [series, value] : after) {
    if (series.rfind("stoker_lookups_total", 0) == 0) lookups += value - (before.count(series) ? before.at(series) : 0);
  }
  EXPECT_EQ(lookups, (300 + 200) * 2 * kTopK);
  EXPECT_EQ(after["stoker_step_duration_seconds_count{plane=\"server\"}"], 300);
  EXPECT_EQ(after["stoker_armed_sessions"], 1);
  EXPECT_EQ(after["stoker_committed_bytes_total{pool=\"p\"}"], (300 + 200) * kLayers * 48);
  const auto steps = plane->Disarm();
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(*steps, 300u);
  after = Scrape(daemon().metrics_port());
  EXPECT_EQ(after["stoker_armed_sessions"], 0);
  EXPECT_EQ(after["stoker_plane_ends_total{reason=\"disarmed\"}"], 1);
  EXPECT_EQ(daemon().LogField("server plane ended", "session"), "");  // it was asked to
}

TEST_F(ServerPlaneTest, SpeculativeRowsAreOneUnion) {
  Rank rank(client(), pool_, Request("rank"));
  const auto plane = Arm(rank);
  std::mt19937_64 random(2);
  const Sequence s = OpenPart(rank, 4, 60, 400);
  // Three drafts a step, of which one, two or three are kept.
  uint32_t stored = 60;
  for (int step = 0; step < 100 && !HasFatalFailure(); ++step) {
    const uint32_t kept = 1 + static_cast<uint32_t>(random() % 3);
    std::vector<BatchRow> batch;
    for (uint32_t i = 0; i < 3; ++i) batch.push_back({&s, stored + 1 + i, i < kept});
    Step(rank, *plane, batch, random);
    stored += kept;
  }
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(StoredRows(s.id), stored);
  rank.CheckStored(s, stored);
}

TEST_F(ServerPlaneTest, CallsOfStepsAreRefusedAndAllOthersWork) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 5, 80, 200);
  const std::vector<BatchRow> batch = {{&s, 80, false, true}};
  const std::vector<std::vector<int32_t>> entries(2, std::vector<int32_t>{1, 2, 3, 79});
  ASSERT_TRUE(rank.Step(batch, entries, 4).status.ok());
  auto plane = Arm(rank);
  const absl::Status refused = rank.Step(batch, entries, 4).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("server plane"));
  v1::GatherRequest gather;
  v1::GatherResponse gathered;
  EXPECT_EQ(rank.session().Gather(gather, &gathered).code(), absl::StatusCode::kFailedPrecondition);
  v1::CommitRequest commit;
  commit.add_items()->set_sequence_id(s.id);
  v1::CommitResponse committed;
  EXPECT_EQ(rank.session().Commit(commit, &committed).code(), absl::StatusCode::kFailedPrecondition);

  std::mt19937_64 random(3);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 81, true}}, random);
  rank.CheckStored(s, 81);
  // Rewritten rows leave the hot buffers, in the daemon's order.
  Sequence changed = s;
  const Tokens other = MakeTokens(6, 200);
  std::copy(other.begin(), other.begin() + 40, changed.tokens.begin());
  ASSERT_TRUE(rank.Store(changed, 0, 40).ok());
  v1::InvalidateRequest invalidate;
  v1::InvalidateItem* item = invalidate.add_items();
  item->set_sequence_id(s.id);
  for (uint32_t p = 0; p < 80; ++p) item->add_positions(p);
  v1::InvalidateResponse invalidated;
  ASSERT_TRUE(rank.session().Invalidate(invalidate, &invalidated).ok());
  v1::LoadRequest load;
  load.add_items()->set_target(v1::LOAD_TARGET_HOT_BUFFER);
  load.mutable_items(0)->mutable_range()->set_sequence_id(s.id);
  load.mutable_items(0)->mutable_range()->set_row_count(50);
  v1::LoadResponse loaded;
  ASSERT_TRUE(rank.session().Load(load, &loaded).ok());
  EXPECT_TRUE(client::FirstError(loaded.statuses()).ok());
  for (uint32_t length = 82; length < 120 && !HasFatalFailure(); ++length) {
    Step(rank, *plane, std::vector<BatchRow>{{&changed, length, true}}, random);
  }
  // A fork shares blocks of a sequence that is being decoded, and goes its own way.
  v1::ForkRequest fork;
  fork.add_items()->set_sequence_id(s.id);
  fork.mutable_items(0)->set_rows(100);
  fork.mutable_items(0)->set_max_rows(200);
  v1::ForkResponse forked;
  ASSERT_TRUE(rank.session().Fork(fork, &forked).ok());
  ASSERT_EQ(forked.sequences(0).status().code(), 0) << forked.sequences(0).status().message();
  Sequence child{forked.sequences(0).sequence_id(), forked.sequences(0).state_row(), changed.tokens};
  std::copy(other.begin() + 100, other.end(), child.tokens.begin() + 100);
  for (uint32_t i = 0; i < 60 && !HasFatalFailure(); ++i) {
    Step(rank, *plane, std::vector<BatchRow>{{&changed, 120 + i, true}, {&child, 101 + i, true}}, random);
  }
  rank.CheckStored(changed, 179);
  rank.CheckStored(child, 160);
  // Extended while it is armed: the new block is there for the next step.
  Sequence grown = child;
  const Tokens more = MakeTokens(7, 100);
  grown.tokens.insert(grown.tokens.end(), more.begin(), more.end());
  v1::ExtendRequest extend;
  extend.add_items()->set_sequence_id(child.id);
  extend.mutable_items(0)->set_max_rows(300);
  v1::ExtendResponse extended;
  ASSERT_TRUE(rank.session().Extend(extend, &extended).ok());
  ASSERT_TRUE(client::FirstError(extended.statuses()).ok());
  for (uint32_t length = 161; length <= 300 && !HasFatalFailure(); ++length) {
    Step(rank, *plane, std::vector<BatchRow>{{&grown, length, true}}, random);
  }
  rank.CheckStored(grown, 300);
  ASSERT_TRUE(plane->Disarm().ok());
  EXPECT_TRUE(rank.Step(batch, entries, 4).status.ok());
  // Armed anew, twice: the second Arm takes the place of the first.
  plane = Arm(rank);
  auto again = Arm(rank);
  ASSERT_NE(again, nullptr);
  Step(rank, *again, std::vector<BatchRow>{{&changed, 180, true}}, random);
}

TEST_F(ServerPlaneTest, RowsThatAreWrongGetAStatus) {
  Rank rank(client(), pool_, Request("rank"));
  Rank reader(client(), pool_, Request("reader"));
  const auto plane = Arm(rank);
  const auto reader_plane = Arm(reader);
  const Sequence s = OpenPart(rank, 8, 40, 50, "key");
  const Sequence t = OpenPart(rank, 9, 20, 60);
  Sequence same = s;
  const v1::AdmittedSequence joined =
      reader.Admit(reader.Item(Tokens(s.tokens.begin(), s.tokens.begin() + 40), 50, "key"));
  ASSERT_EQ(joined.sequence_id(), s.id);
  same.state_row = joined.state_row();
  using S = std::vector<v1::BatchRowStatus>;
  rank.WriteNewest(s, 40);
  rank.WriteNewest(t, 20);
  EXPECT_EQ(StatusesOf(*plane, {{s.id + 1, s.state_row, 41}}), S{v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, t.state_row, 41}}), S{v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, 8, 41}}), S{v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 0}}), S{v1::BATCH_ROW_STATUS_BAD_LENGTH});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 51}}), S{v1::BATCH_ROW_STATUS_BAD_LENGTH});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 42}}), S{v1::BATCH_ROW_STATUS_NOT_STORED});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 40}}), S{v1::BATCH_ROW_STATUS_NOT_APPENDED});
  EXPECT_EQ(StatusesOf(*reader_plane, {{same.id, same.state_row, 41}}), S{v1::BATCH_ROW_STATUS_NOT_WRITER});
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 41}, {t.id, t.state_row, 21}, {s.id, s.state_row, 42}}),
            (S{v1::BATCH_ROW_STATUS_UNSPECIFIED, v1::BATCH_ROW_STATUS_UNSPECIFIED, v1::BATCH_ROW_STATUS_NOT_ADJACENT}));
  EXPECT_EQ(StoredRows(s.id), 41u);
  EXPECT_EQ(StoredRows(t.id), 21u);
  // The reader sees what the writer's plane has stored, and becomes the writer when that one lets go.
  std::mt19937_64 random(4);
  reader.WriteNewest(same, 41);
  Step(reader, *reader_plane, std::vector<BatchRow>{{&same, 42, false}}, random);
  ASSERT_TRUE(rank.Close(s).ok());
  EXPECT_EQ(StatusesOf(*plane, {{s.id, s.state_row, 42}}), S{v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE});
  for (uint32_t length = 42; length <= 50 && !HasFatalFailure(); ++length) {
    Step(reader, *reader_plane, std::vector<BatchRow>{{&same, length, true}}, random);
  }
  EXPECT_EQ(StatusesOf(*reader_plane, {{same.id, same.state_row, 51}}), S{v1::BATCH_ROW_STATUS_BAD_LENGTH});
  EXPECT_EQ(StoredRows(s.id), 50u);
}

uint64_t ArmRaw(Rank& rank) {
  v1::ArmRequest request;
  request.set_top_k(kTopK);
  v1::ArmResponse response;
  const absl::Status status = rank.session().Arm(request, &response);
  EXPECT_TRUE(status.ok()) << status;
  return response.first_step();
}

TEST_F(ServerPlaneTest, GarbageInTheMailboxHurtsNobody) {
  Rank rank(client(), pool_, Request("rank"));
  Rank other(client(), pool_, Request("other"));
  const Sequence mine = OpenPart(rank, 10, 60, 200);
  const Sequence yours = OpenPart(other, 11, 60, 200);
  std::mt19937_64 random(5);
  Words words(rank);
  uint64_t step = ArmRaw(rank);
  const int32_t extremes[] = {0, 1, -1, 7, 8, 60, 61, 200, 201, 1 << 24, INT32_MAX, INT32_MIN};
  const auto any = [&] {
    return random() % 2 == 0 ? extremes[random() % std::size(extremes)] : static_cast<int32_t>(random());
  };
  for (int i = 0; i < 2000; ++i, ++step) {
    words.Put<int32_t>("batch_rows", 0, random() % 4 == 0 ? any() : static_cast<int32_t>(random() % 9));
    for (size_t row = 0; row < 8; ++row) {
      words.Put<uint64_t>("sequence_ids", row, random() % 3 == 0 ? random() : mine.id);
      words.Put<int32_t>("state_rows", row, random() % 2 ? static_cast<int32_t>(mine.state_row) : any());
      words.Put<int32_t>("lengths", row, random() % 2 ? static_cast<int32_t>(random() % 64) : any());
      words.Put<int32_t>("commits", row, 0);
    }
    const auto arena = rank.session().arena();
    for (uint32_t group = 0; group < 2; ++group) {
      for (size_t row = 0; row < 8; ++row) {
        for (int32_t& entry : (*arena->Indices(group))[row]) {
          std::atomic_ref<int32_t>(entry).store(any(), std::memory_order_relaxed);
        }
      }
      words.Put<uint64_t>("request", group, step);
      while (words.Get<uint64_t>("done", group) != step) ASSERT_EQ(words.Get<int32_t>("ended", 0), 0);
      const auto hot = *arena->HotRows(group);
      for (size_t row = 0; row < 8; ++row) {
        for (const int32_t& hot_row : hot[row]) {
          // In the state row's own region, whatever was asked.
          if (hot_row < 0) continue;
          ASSERT_EQ(static_cast<uint32_t>(hot_row) / arena->region_rows(), mine.state_row);
        }
      }
    }
    words.Put<uint64_t>("request", 2, step);
    while (words.Get<uint64_t>("done", 2) != step) ASSERT_EQ(words.Get<int32_t>("ended", 0), 0);
  }
  // The next good steps are right, here and beside it.
  auto plane = Arm(rank);
  auto other_plane = Arm(other);
  for (uint32_t length = 61; length < 90 && !HasFatalFailure(); ++length) {
    Step(rank, *plane, std::vector<BatchRow>{{&mine, length, true}}, random);
    Step(other, *other_plane, std::vector<BatchRow>{{&yours, length, true}}, random);
  }
  rank.CheckStored(mine, 89);
  other.CheckStored(yours, 89);
}

TEST_F(ServerPlaneTest, ANumberThatCannotBeEndsThePlane) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 12, 60, 200);
  Words words(rank);
  for (const uint64_t wrong : {uint64_t{2}, ~uint64_t{0}}) {
    ASSERT_EQ(ArmRaw(rank), 1u);
    EXPECT_EQ(words.Get<uint64_t>("request", 0), 0u);
    words.Put<uint64_t>("request", 0, wrong);
    ASSERT_TRUE(Eventually(absl::Seconds(10), [&] { return words.Get<int32_t>("ended", 0) != 0; }));
    EXPECT_EQ(words.Get<int32_t>("ended", 0), v1::PLANE_END_BAD_STEP);
    EXPECT_EQ(words.Get<uint64_t>("done", 0), 0u);
    ASSERT_TRUE(Eventually(absl::Seconds(10), [&] { return !client().ListSessions()->sessions(0).armed(); }));
  }
  auto ends = Scrape(daemon().metrics_port());
  EXPECT_EQ(ends["stoker_plane_ends_total{reason=\"bad_step\"}"], 2);
  EXPECT_EQ(ends["stoker_plane_ends_total{reason=\"timed_out\"}"], 0);
  EXPECT_EQ(daemon().LogField("server plane ended", "session"), "rank");
  EXPECT_EQ(daemon().LogField("server plane ended", "step"), "1");
  EXPECT_EQ(daemon().LogField("server plane ended", "reason"), "a request had a number that cannot be");
  std::mt19937_64 random(6);
  const auto plane = Arm(rank);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 61, true}}, random);
}

class ImpatientServerPlaneTest : public ServerPlaneTest {
 protected:
  ImpatientServerPlaneTest() : ServerPlaneTest({"--doorbell-timeout-ms=300", "--max-armed-sessions=2"}) {}
};

TEST_F(ImpatientServerPlaneTest, AStepThatIsNotGoneOnWithEndsThePlane) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 13, 60, 200);
  Words words(rank);
  auto plane = Arm(rank);
  EXPECT_EQ(plane->doorbell_timeout(), absl::Milliseconds(300));
  std::mt19937_64 random(7);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 61, true}}, random);
  // Between steps nothing is late.
  const absl::Time begin = absl::Now();
  ASSERT_FALSE(Eventually(absl::Milliseconds(900), [&] { return words.Get<int32_t>("ended", 0) != 0; }));
  Step(rank, *plane, std::vector<BatchRow>{{&s, 62, true}}, random);
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(900));
  ASSERT_EQ(plane->Begin({{s.id, s.state_row, 63}}), absl::OkStatus());
  for (int32_t& entry : plane->Entries(0, 0)) entry = 5;
  ASSERT_EQ(plane->Ring(0), absl::OkStatus());
  ASSERT_EQ(plane->Await(0), absl::OkStatus());
  ASSERT_TRUE(Eventually(absl::Seconds(10), [&] { return words.Get<int32_t>("ended", 0) != 0; }));
  EXPECT_EQ(words.Get<int32_t>("ended", 0), v1::PLANE_END_TIMED_OUT);
  ASSERT_TRUE(Eventually(absl::Seconds(10), [&] {
    return Scrape(daemon().metrics_port())["stoker_plane_ends_total{reason=\"timed_out\"}"] == 1;
  }));
  EXPECT_EQ(daemon().LogField("server plane ended", "step"), "3");
  EXPECT_EQ(daemon().LogField("server plane ended", "reason"),
            "a doorbell was not rung within doorbell_timeout_ms, 300");
  plane = Arm(rank);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 63, true}}, random);
  rank.CheckStored(s, 63);
}

TEST_F(ImpatientServerPlaneTest, NoMoreThanTheLimitAreArmed) {
  Rank first(client(), pool_, Request("first"));
  Rank second(client(), pool_, Request("second"));
  Rank third(client(), pool_, Request("third"));
  auto a = Arm(first);
  auto b = Arm(second);
  const absl::Status refused = ServerPlane::Arm(third.session(), kTopK).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("2 are armed, 0 have ordered calls, limit max_armed_sessions 2"));
  ASSERT_TRUE(a->Disarm().ok());
  EXPECT_EQ(a->Disarm().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Arm(third), nullptr);
  const absl::Status too_many = ServerPlane::Arm(first.session(), 17).status();
  EXPECT_EQ(too_many.code(), absl::StatusCode::kInvalidArgument) << too_many;
}

TEST_F(ServerPlaneTest, ASessionThatLeavesInTheMiddleOfAStepIsGoneAtOnce) {
  Rank bystander(client(), pool_, Request("bystander"));
  const Sequence s = OpenPart(bystander, 14, 60, 400);
  const auto plane = Arm(bystander);
  std::mt19937_64 random(8);
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  const uint32_t free_blocks = Usage("p").free_blocks() + Usage("p").cached_blocks();
  uint32_t length = 61;
  for (const char* how : {"armed", "stepping", "step"}) {
    ChildProcess engine({ClientProcessPath(), daemon().address(), "p", "engine", how}, daemon().folder().File(how));
    ASSERT_TRUE(engine.AwaitOutput("ready", absl::Seconds(30))) << engine.Output();
    for (int i = 0; i < 20; ++i) Step(bystander, *plane, std::vector<BatchRow>{{&s, length++, true}}, random);
    ASSERT_FALSE(HasFatalFailure());
    const absl::Time begin = absl::Now();
    engine.Kill();
    EXPECT_TRUE(Eventually(absl::Seconds(2), [&] {
      return SessionCount() == 1 && Usage("p").sessions() == 1 && client().GetStatus()->hot_bytes() == hot_bytes;
    })) << how;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_TRUE(Eventually(absl::Seconds(2), [&] {
      return Usage("p").free_blocks() + Usage("p").cached_blocks() == free_blocks;
    })) << how;
    for (int i = 0; i < 20; ++i) Step(bystander, *plane, std::vector<BatchRow>{{&s, length++, true}}, random);
  }
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_armed_sessions"], 1);
}

TEST_F(ServerPlaneTest, EightArmedSessionsOfWhichSevenAreIdle) {
  std::vector<std::unique_ptr<Rank>> idle;
  std::vector<std::unique_ptr<ServerPlane>> planes;
  for (int i = 0; i < 7; ++i) {
    idle.push_back(std::make_unique<Rank>(client(), pool_, Request(absl::StrCat("idle", i), 2)));
    planes.push_back(Arm(*idle.back()));
  }
  Rank rank(client(), pool_, Request("rank"));
  const auto plane = Arm(rank);
  const Sequence s = OpenPart(rank, 15, 60, 400);
  std::mt19937_64 random(9);
  for (uint32_t length = 61; length < 120 && !HasFatalFailure(); ++length) {
    Step(rank, *plane, std::vector<BatchRow>{{&s, length, true}}, random);
    Rank passing(client(), pool_, Request("passing", 2));
    OpenPart(passing, length, 20, 40);
  }
  rank.CheckStored(s, 119);
  // A daemon that stops ends the planes.
  EXPECT_EQ(daemon().Stop(), 0);
  const absl::Status gone = plane->Begin({{s.id, s.state_row, 120}});
  absl::Status status = gone.ok() ? plane->Ring(0) : gone;
  if (status.ok()) status = plane->Await(0);
  EXPECT_FALSE(status.ok());
  daemon().Restart();
}

}  // namespace
}  // namespace stoker::system_test
