// The direct plane of the real daemon: steps that this process runs on the mapped arena and pool, what comes and goes
// beside them, and engines that break the rules or die. The memory is in the host here: the CPU backend plays the
// device.
#include "client/direct_plane.h"

#include <random>

#include "client/descriptor_exchange.h"
#include "client/plane.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/plane_steps.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {
namespace {

using client::DirectPlane;
using client::PlaneRow;
using ::testing::HasSubstr;

constexpr uint32_t kTopK = 16;
constexpr uint32_t kLayers = 4;
constexpr absl::Duration kPatience = absl::Seconds(10);

class DirectPlaneTest : public DaemonTest {
 protected:
  DirectPlaneTest() : DirectPlaneTest(std::vector<std::string>{}) {}
  explicit DirectPlaneTest(std::vector<std::string> flags) : DaemonTest(std::move(flags)) {
    pool_ = CreatePool(LinearPool("p", kLayers, 48, 128));
  }

  v1::AttachRequest Request(const std::string& name, uint32_t state_rows = 8) const {
    v1::AttachRequest request = PlaneRequest(pool_, name, state_rows);
    request.set_plane(v1::PLANE_DIRECT);
    return request;
  }

  static std::unique_ptr<DirectPlane> Open(Rank& rank, uint32_t top_k = kTopK, int threads = 1) {
    auto plane = DirectPlane::Open(rank.session(), top_k, {.threads = threads});
    EXPECT_TRUE(plane.ok()) << plane.status();
    return plane.ok() ? *std::move(plane) : nullptr;
  }

  void Evict(Rank& rank) {
    v1::EvictSessionRequest evict;
    evict.set_session_id(rank.session().info().session_id());
    const auto evicted = client().EvictSession(evict);
    ASSERT_TRUE(evicted.ok()) << evicted.status();
  }

  uint32_t StoredRows(uint64_t id) {
    for (const v1::SequenceInfo& info : Sequences("p")) {
      if (info.sequence_id() == id) return info.stored_rows();
    }
    return 0;
  }

  double Metric(const std::string& series) { return Scrape(daemon().metrics_port())[series]; }

  double Lookups() {
    double lookups = 0;
    for (const auto& [series, value] : Scrape(daemon().metrics_port())) {
      if (series.rfind("stoker_lookups_total", 0) == 0) lookups += value;
    }
    return lookups;
  }

  v1::PoolSpec pool_;
};

TEST_F(DirectPlaneTest, DecodesAndStores) {
  Rank rank(client(), pool_, Request("rank"));
  EXPECT_EQ(*client::ChoosePlane(rank.session().info(), client::Plane::kAuto), client::Plane::kDirect);
  auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  std::mt19937_64 random(1);
  // Sequences join and leave between steps; a padding row lies between the two.
  Sequence a = OpenPart(rank, 1, 50, 400);
  Sequence b = OpenPart(rank, 2, 100, 300);
  uint32_t length_a = 51, length_b = 101;
  for (int step = 0; step < 300 && !HasFatalFailure(); ++step) {
    std::vector<BatchRow> batch = {{&a, length_a++, true}, {}};
    if (step % 3 != 2) batch.push_back({&b, length_b++, true});
    Step(rank, *plane, batch, random);
    if (step % 100 == 99) {
      rank.CheckStored(b, length_b - 1);
      EXPECT_EQ(StoredRows(b.id), length_b - 1);
      ASSERT_TRUE(rank.Close(b).ok());
      b = OpenPart(rank, 3 + static_cast<uint64_t>(step), 40, 300);
      length_b = 41;
    }
    // Another plane goes on where this one ended.
    if (step == 150) {
      plane.reset();
      plane = Open(rank, kTopK, 3);
      ASSERT_NE(plane, nullptr);
      EXPECT_EQ(plane->step(), 152u);
    }
  }
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(plane->step(), 301u);
  EXPECT_EQ(length_a, 351u);
  rank.CheckStored(a, 350);
  EXPECT_EQ(StoredRows(a.id), 350u);
  // What the steps did reaches the daemon, each entry once.
  EXPECT_TRUE(Eventually(kPatience, [&] { return Lookups() == (300 + 200) * 2 * kTopK; })) << Lookups();
  EXPECT_EQ(Metric("stoker_committed_bytes_total{pool=\"p\"}"), (300 + 200) * kLayers * 48);
  // Of steps between two looks the last one is seen.
  const double observed = Metric("stoker_step_duration_seconds_count{plane=\"direct\"}");
  EXPECT_GE(observed, 1);
  EXPECT_LE(observed, 300);
  EXPECT_GT(Metric("stoker_step_duration_seconds_sum{plane=\"direct\"}"), 0);
  EXPECT_EQ(Metric("stoker_step_duration_seconds_count{plane=\"rpc\"}"), 0);
}

TEST_F(DirectPlaneTest, SpeculativeRowsAreOneUnion) {
  Rank rank(client(), pool_, Request("rank"));
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
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

// Every row layout is found where the daemon has put it, and so are the rows of a resolve by pool rows.
TEST_F(DirectPlaneTest, EveryLayout) {
  for (const v1::PoolSpec& spec : {SplitPool("split", kLayers, 48, 32, 64), PagedPool("paged", kLayers, 64)}) {
    const v1::PoolSpec pool = CreatePool(spec);
    v1::AttachRequest request = PlaneRequest(pool, "rank");
    request.set_plane(v1::PLANE_DIRECT);
    Rank rank(client(), pool, request);
    const auto plane = Open(rank);
    ASSERT_NE(plane, nullptr);
    std::mt19937_64 random(3);
    const Sequence s = OpenPart(rank, 5, 60, 200);
    for (uint32_t length = 61; length <= 200 && !HasFatalFailure(); ++length) {
      Step(rank, *plane, std::vector<BatchRow>{{&s, length, true}}, random);
    }
    rank.CheckStored(s, 200);
  }
  v1::AttachRequest request = Request("by-pool-row");
  request.set_index_space(v1::INDEX_SPACE_POOL_ROW);
  Rank rank(client(), pool_, request);
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  const Sequence s = OpenPart(rank, 6, 60, 200);
  std::mt19937_64 random(4);
  for (int step = 0; step < 50; ++step) {
    std::vector<int32_t> positions(kTopK);
    for (int32_t& position : positions) position = static_cast<int32_t>(random() % 60);
    const std::vector<int32_t> pool_rows = rank.PoolRows(s, positions);
    ASSERT_EQ(pool_rows.size(), kTopK);
    ASSERT_EQ(plane->Begin({{s.id, s.state_row, 61}}), absl::OkStatus());
    for (uint32_t group = 0; group < 2; ++group) {
      std::copy(pool_rows.begin(), pool_rows.end(), plane->Entries(group, 0).begin());
      ASSERT_EQ(plane->Group(group), absl::OkStatus());
      ASSERT_EQ(plane->Await(group), absl::OkStatus());
      for (uint32_t k = 0; k < kTopK; ++k) {
        const int32_t hot_row = plane->HotRows(group, 0)[k];
        ASSERT_GE(hot_row, 0);
        EXPECT_EQ(rank.ArenaRow(2 * group, static_cast<uint32_t>(hot_row)),
                  RowOf(pool_, 2 * group, s.tokens[static_cast<size_t>(positions[k])]));
      }
    }
    ASSERT_EQ(plane->Commit({}), absl::OkStatus());
    ASSERT_EQ(plane->AwaitCommit(), absl::OkStatus());
  }
}

TEST_F(DirectPlaneTest, CallsOfStepsAreRefusedAndAllOthersWork) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 5, 80, 200);
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  const std::vector<BatchRow> batch = {{&s, 80, false, true}};
  const std::vector<std::vector<int32_t>> entries(2, std::vector<int32_t>{1, 2, 3, 79});
  v1::ArmRequest arm;
  arm.set_top_k(4);
  v1::ArmResponse armed;
  v1::GatherResponse gathered;
  v1::CommitRequest commit;
  commit.add_items()->set_sequence_id(s.id);
  v1::CommitResponse committed;
  for (const absl::Status& refused :
       {rank.Step(batch, entries, 4).status, rank.session().Arm(arm, &armed), rank.session().Gather({}, &gathered),
        rank.session().Commit(commit, &committed)}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("the direct plane"));
  }
  const absl::Status other = client::ChoosePlane(rank.session().info(), client::Plane::kRpc).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << other;

  std::mt19937_64 random(3);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 81, true}}, random);
  rank.CheckStored(s, 81);
  // Rewritten rows leave the hot buffers.
  Sequence changed = s;
  const Tokens fresh = MakeTokens(6, 200);
  std::copy(fresh.begin(), fresh.begin() + 40, changed.tokens.begin());
  ASSERT_TRUE(rank.Store(changed, 0, 40).ok());
  v1::InvalidateRequest invalidate;
  v1::InvalidateItem* item = invalidate.add_items();
  item->set_sequence_id(s.id);
  for (uint32_t p = 0; p < 80; ++p) item->add_positions(p);
  v1::InvalidateResponse invalidated;
  ASSERT_TRUE(rank.session().Invalidate(invalidate, &invalidated).ok());
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
  std::copy(fresh.begin() + 100, fresh.end(), child.tokens.begin() + 100);
  for (uint32_t i = 0; i < 60 && !HasFatalFailure(); ++i) {
    Step(rank, *plane, std::vector<BatchRow>{{&changed, 120 + i, true}, {&child, 101 + i, true}}, random);
  }
  rank.CheckStored(changed, 179);
  rank.CheckStored(child, 160);
}

TEST_F(DirectPlaneTest, RowsThatAreWrongGetAStatus) {
  Rank rank(client(), pool_, Request("rank"));
  Rank reader(client(), pool_, Request("reader"));
  const auto plane = Open(rank);
  const auto reader_plane = Open(reader);
  ASSERT_TRUE(plane != nullptr && reader_plane != nullptr);
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
  const absl::Status named = plane->FirstRowError();
  EXPECT_EQ(named.code(), absl::StatusCode::kNotFound) << named;
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
  reader.CheckStored(same, 50);
}

TEST_F(DirectPlaneTest, CallsOutOfOrderAndWrongArgumentsChangeNothing) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 8, 40, 100);
  for (const uint32_t top_k : {0u, 17u}) {
    EXPECT_EQ(DirectPlane::Open(rank.session(), top_k).status().code(), absl::StatusCode::kInvalidArgument);
  }
  for (const int threads : {0, -1, 257}) {
    EXPECT_EQ(DirectPlane::Open(rank.session(), kTopK, {.threads = threads}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  EXPECT_EQ(DirectPlane::Open(rank.session(), kTopK).status().code(), absl::StatusCode::kFailedPrecondition);
  constexpr auto kOrder = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(plane->Group(0), absl::FailedPreconditionError("Group(0) comes where step 1 needs Begin"));
  EXPECT_EQ(plane->Await(0).code(), kOrder);
  EXPECT_EQ(plane->Commit({}).code(), kOrder);
  EXPECT_EQ(plane->AwaitCommit().code(), kOrder);
  EXPECT_EQ(plane->EnqueueBegin().code(), kOrder);
  EXPECT_EQ(plane->EnqueueGroup(0).code(), kOrder);
  EXPECT_EQ(plane->EnqueueCommit().code(), kOrder);
  EXPECT_EQ(plane->Begin(std::vector<PlaneRow>(9)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(plane->Begin({{s.id, 0x80000000u, 1}}).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(plane->Begin({{s.id, s.state_row, 41}}), absl::OkStatus());
  EXPECT_EQ(plane->Begin({}).code(), kOrder);
  EXPECT_EQ(plane->Group(1).code(), kOrder);
  EXPECT_EQ(plane->Group(7).code(), kOrder);
  for (uint32_t group = 0; group < 2; ++group) {
    for (int32_t& entry : plane->Entries(group, 0)) entry = 3;
    ASSERT_EQ(plane->Group(group), absl::OkStatus());
    EXPECT_EQ(plane->Commit({}).code(), kOrder);
    ASSERT_EQ(plane->Await(group), absl::OkStatus());
  }
  EXPECT_EQ(plane->Commit({1, 1}).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(plane->Commit({}), absl::OkStatus());
  ASSERT_EQ(plane->AwaitCommit(), absl::OkStatus());
  EXPECT_EQ(plane->FirstRowError(), absl::OkStatus());
  EXPECT_EQ(plane->status(), absl::OkStatus());
  EXPECT_EQ(StoredRows(s.id), 40u);
  // An empty batch is a step as well.
  EXPECT_TRUE(StatusesOf(*plane, {}).empty());
}

TEST_F(DirectPlaneTest, GarbageInTheMailboxHurtsNobody) {
  Rank rank(client(), pool_, Request("rank"));
  Rank other(client(), pool_, Request("other"));
  const Sequence mine = OpenPart(rank, 10, 60, 200);
  const Sequence yours = OpenPart(other, 11, 60, 200);
  const auto plane = Open(rank);
  const auto other_plane = Open(other);
  ASSERT_TRUE(plane != nullptr && other_plane != nullptr);
  std::mt19937_64 random(5);
  Words words(rank);
  const int32_t extremes[] = {0, 1, -1, 7, 8, 60, 61, 200, 201, 1 << 24, INT32_MAX, INT32_MIN};
  const auto any = [&] {
    return random() % 2 == 0 ? extremes[random() % std::size(extremes)] : static_cast<int32_t>(random());
  };
  for (int i = 0; i < 2000; ++i) {
    // Rows as a broken engine has them. What the operations read is what stands there when they run: the batch is
    // written over before, or meanwhile.
    std::vector<PlaneRow> rows(random() % 9);
    for (PlaneRow& row : rows) {
      row.sequence_id = random() % 3 == 0 ? random() : mine.id;
      row.state_row = random() % 2 ? mine.state_row : static_cast<uint32_t>(any()) & 0x7fffffffu;
      row.length = random() % 2 ? static_cast<uint32_t>(random() % 64) : static_cast<uint32_t>(any()) & 0x7fffffffu;
    }
    ASSERT_EQ(plane->Begin(rows), absl::OkStatus());
    words.Put<int32_t>("batch_rows", 0, random() % 4 == 0 ? any() : static_cast<int32_t>(rows.size()));
    for (size_t row = 0; row < 8; ++row) {
      if (random() % 4 == 0) words.Put<int32_t>("state_rows", row, any());
      if (random() % 4 == 0) words.Put<int32_t>("lengths", row, any());
      if (random() % 4 == 0) words.Put<uint64_t>("sequence_ids", row, random());
    }
    for (uint32_t group = 0; group < 2; ++group) {
      for (size_t row = 0; row < 8; ++row) {
        for (int32_t& entry : plane->Entries(group, row)) {
          std::atomic_ref<int32_t>(entry).store(any(), std::memory_order_relaxed);
        }
      }
      ASSERT_EQ(plane->Group(group), absl::OkStatus());
      ASSERT_EQ(plane->Await(group), absl::OkStatus());
      for (size_t row = 0; row < rows.size(); ++row) {
        for (const int32_t& hot_row : plane->HotRows(group, row)) {
          // In the state row's own region, whatever was asked.
          if (hot_row < 0) continue;
          ASSERT_EQ(static_cast<uint32_t>(hot_row) / rank.session().arena()->region_rows(), mine.state_row);
        }
      }
    }
    ASSERT_EQ(plane->Commit({}), absl::OkStatus());
    ASSERT_EQ(plane->AwaitCommit(), absl::OkStatus());
  }
  // The next good steps are right, here and beside it.
  for (uint32_t length = 61; length < 90 && !HasFatalFailure(); ++length) {
    Step(rank, *plane, std::vector<BatchRow>{{&mine, length, true}}, random);
    Step(other, *other_plane, std::vector<BatchRow>{{&yours, length, true}}, random);
  }
  rank.CheckStored(mine, 89);
  other.CheckStored(yours, 89);
}

// Sequences come and go while a step is open: the daemon waits for its end, and a plane that is let go of ends it.
TEST_F(DirectPlaneTest, APlaneThatGoesInTheMiddleOfAStepEndsIt) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 12, 60, 200);
  auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  rank.WriteNewest(s, 60);
  ASSERT_EQ(plane->Begin({{s.id, s.state_row, 61}}), absl::OkStatus());
  for (int32_t& entry : plane->Entries(0, 0)) entry = 5;
  ASSERT_EQ(plane->Group(0), absl::OkStatus());
  ASSERT_EQ(plane->Await(0), absl::OkStatus());
  // What the engine has not said is not stored.
  Words(rank).Put<int32_t>("commits", 0, 1);
  plane.reset();
  ASSERT_TRUE(rank.Close(s).ok());
  const Sequence t = OpenPart(rank, 13, 60, 200);
  EXPECT_EQ(StoredRows(t.id), 60u);
  plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  std::mt19937_64 random(6);
  Step(rank, *plane, std::vector<BatchRow>{{&t, 61, true}}, random);
  rank.CheckStored(t, 61);
}

TEST_F(DirectPlaneTest, AnEngineThatDiesInTheMiddleOfAStepIsGoneAtOnce) {
  Rank bystander(client(), pool_, Request("bystander"));
  const Sequence s = OpenPart(bystander, 14, 60, 400);
  const auto plane = Open(bystander);
  ASSERT_NE(plane, nullptr);
  std::mt19937_64 random(8);
  const uint64_t hot_bytes = client().GetStatus()->hot_bytes();
  const uint32_t free_blocks = Usage("p").free_blocks() + Usage("p").cached_blocks();
  const auto mapped = [&] {
    double bytes = 0;
    for (const auto& [series, value] : Scrape(daemon().metrics_port())) {
      if (series.rfind("stoker_client_mapped_bytes", 0) == 0) bytes += value;
    }
    return bytes;
  };
  const double mapped_bytes = mapped();
  EXPECT_GT(mapped_bytes, 0);
  uint32_t length = 61;
  for (const char* how : {"direct", "direct-stepping", "direct-step"}) {
    ChildProcess engine({ClientProcessPath(), daemon().address(), "p", "engine", how}, daemon().folder().File(how));
    ASSERT_TRUE(engine.AwaitOutput("ready", absl::Seconds(30))) << engine.Output();
    EXPECT_GT(mapped(), mapped_bytes);
    for (int i = 0; i < 20; ++i) Step(bystander, *plane, std::vector<BatchRow>{{&s, length++, true}}, random);
    ASSERT_FALSE(HasFatalFailure());
    const absl::Time begin = absl::Now();
    engine.Kill();
    EXPECT_TRUE(Eventually(absl::Seconds(2), [&] {
      return SessionCount() == 1 && Usage("p").sessions() == 1 && client().GetStatus()->hot_bytes() == hot_bytes;
    })) << how;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
    EXPECT_EQ(mapped(), mapped_bytes);
    EXPECT_TRUE(Eventually(absl::Seconds(2), [&] {
      return Usage("p").free_blocks() + Usage("p").cached_blocks() == free_blocks;
    })) << how;
    for (int i = 0; i < 20; ++i) Step(bystander, *plane, std::vector<BatchRow>{{&s, length++, true}}, random);
  }
}

TEST_F(DirectPlaneTest, AnEvictedSessionStepsNoMore) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 15, 60, 200);
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  std::mt19937_64 random(7);
  Step(rank, *plane, std::vector<BatchRow>{{&s, 61, true}}, random);
  Evict(rank);
  ASSERT_TRUE(Eventually(kPatience, [&] { return !rank.session().status().ok(); }));
  const absl::Status refused = plane->Begin({{s.id, s.state_row, 62}});
  EXPECT_EQ(refused, rank.session().status());
  EXPECT_EQ(refused, plane->status());
  EXPECT_EQ(refused, plane->Group(0));
  EXPECT_EQ(refused, plane->Commit({}));
  EXPECT_EQ(SessionCount(), 0);
  // The memory is there for as long as the plane is.
  EXPECT_EQ(plane->arena().bytes().size(), rank.session().info().arena().size_bytes());
  EXPECT_EQ(rank.ArenaRow(0, 0).size(), 48u);
}

// A step that has begun is waited for, and may be finished.
TEST_F(DirectPlaneTest, AnEvictedSessionMayFinishItsStep) {
  Rank rank(client(), pool_, Request("rank"));
  Rank other(client(), pool_, Request("other"));
  const Sequence s = OpenPart(rank, 15, 60, 200, "key");
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  rank.WriteNewest(s, 60);
  ASSERT_EQ(plane->Begin({{s.id, s.state_row, 61}}), absl::OkStatus());
  Words words(rank);
  // The batch has been read: PlaneState::accepted.
  ASSERT_TRUE(Eventually(kPatience, [&] { return words.Get<uint64_t>("state.plane", 1) == 1; }));
  Evict(rank);
  for (uint32_t group = 0; group < 2; ++group) {
    for (int32_t& entry : plane->Entries(group, 0)) entry = 5;
    ASSERT_EQ(plane->Group(group), absl::OkStatus());
    ASSERT_EQ(plane->Await(group), absl::OkStatus());
    ASSERT_EQ(plane->FirstRowError(), absl::OkStatus());
    EXPECT_EQ(rank.ArenaRow(2 * group, static_cast<uint32_t>(plane->HotRows(group, 0)[0])),
              RowOf(pool_, 2 * group, s.tokens[5]));
  }
  EXPECT_TRUE(rank.session().attached());
  ASSERT_EQ(plane->Commit({1}), absl::OkStatus());
  ASSERT_EQ(plane->AwaitCommit(), absl::OkStatus());
  EXPECT_EQ(plane->FirstRowError(), absl::OkStatus());
  ASSERT_TRUE(Eventually(kPatience, [&] { return !rank.session().status().ok(); }));
  EXPECT_EQ(plane->Begin({}), rank.session().status());
  EXPECT_EQ(SessionCount(), 1);
  EXPECT_EQ(StoredRows(s.id), 61u);
}

class ImpatientDirectPlaneTest : public DirectPlaneTest {
 protected:
  ImpatientDirectPlaneTest() : DirectPlaneTest({"--doorbell-timeout-ms=300"}) {}
};

// An engine that does not go on with its step holds up the end of its session for as long as a doorbell may be late.
TEST_F(ImpatientDirectPlaneTest, AStepThatIsNotGoneOnWith) {
  Rank rank(client(), pool_, Request("rank"));
  const Sequence s = OpenPart(rank, 15, 60, 200);
  const auto plane = Open(rank);
  ASSERT_NE(plane, nullptr);
  ASSERT_EQ(plane->Begin({{s.id, s.state_row, 61}}), absl::OkStatus());
  Words words(rank);
  ASSERT_TRUE(Eventually(kPatience, [&] { return words.Get<uint64_t>("state.plane", 1) == 1; }));
  Evict(rank);
  ASSERT_TRUE(Eventually(kPatience, [&] { return !rank.session().status().ok(); }));
  EXPECT_EQ(SessionCount(), 0);
  EXPECT_EQ(words.Get<uint64_t>("state.plane", 2), 0u);
  const absl::Status refused = plane->Group(0);
  EXPECT_EQ(refused, rank.session().status());
  // The plane has ended it by then.
  EXPECT_TRUE(Eventually(kPatience, [&] { return words.Get<uint64_t>("state.plane", 2) == 1; }));
}

TEST_F(DirectPlaneTest, ARestartedDaemonHasAnotherGeneration) {
  client::SessionOptions options;
  options.recreate_pool = true;
  options.max_backoff = absl::Milliseconds(100);
  auto rank = std::make_unique<Rank>(client(), pool_, Request("rank"), options);
  auto plane = Open(*rank);
  ASSERT_NE(plane, nullptr);
  const Sequence s = OpenPart(*rank, 16, 60, 200);
  std::mt19937_64 random(9);
  Step(*rank, *plane, std::vector<BatchRow>{{&s, 61, true}}, random);
  daemon().process().Kill();
  ASSERT_TRUE(Eventually(kPatience, [&] { return !rank->session().attached(); }));
  EXPECT_EQ(plane->Begin({{s.id, s.state_row, 62}}).code(), absl::StatusCode::kUnavailable);
  daemon().Restart();
  const auto generation = rank->session().AwaitAttached(absl::Seconds(30));
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_EQ(*generation, 2u);
  // This plane stays over; another one, beside it even, has the new memory.
  EXPECT_EQ(plane->Begin({{s.id, s.state_row, 62}}).code(), absl::StatusCode::kUnavailable);
  const auto next = Open(*rank);
  ASSERT_NE(next, nullptr);
  const Sequence t = OpenPart(*rank, 17, 60, 200);
  Step(*rank, *next, std::vector<BatchRow>{{&t, 61, true}}, random);
  rank->CheckStored(t, 61);
  plane.reset();
  Step(*rank, *next, std::vector<BatchRow>{{&t, 62, true}}, random);
}

TEST_F(DirectPlaneTest, OnlySessionsOfThePlaneGetThePool) {
  v1::AttachRequest request = PlaneRequest(pool_, "rank");
  Rank rank(client(), pool_, request);
  EXPECT_FALSE(rank.session().info().has_direct());
  const absl::Status no_plane = DirectPlane::Open(rank.session(), kTopK).status();
  EXPECT_EQ(no_plane.code(), absl::StatusCode::kFailedPrecondition) << no_plane;
  const absl::Status not_attached = client::ChoosePlane(rank.session().info(), client::Plane::kDirect).status();
  EXPECT_EQ(not_attached.code(), absl::StatusCode::kFailedPrecondition) << not_attached;
  EXPECT_EQ(*client::ChoosePlane(rank.session().info(), client::Plane::kAuto), client::Plane::kServer);
  const auto automatic = client::AttachOnPlane(client(), PlaneRequest(pool_, "auto"), client::Plane::kAuto);
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  EXPECT_TRUE((*automatic)->info().has_direct());
  const auto by_calls = client::AttachOnPlane(client(), Request("calls"), client::Plane::kRpc);
  ASSERT_TRUE(by_calls.ok()) << by_calls.status();
  EXPECT_FALSE((*by_calls)->info().has_direct());
  // Nor does the token of another plane's session open the pool.
  const std::string socket = (*automatic)->info().direct().descriptor_socket();
  const auto pool_of = [&](const client::Session& session) {
    return client::FetchPoolDescriptors(socket, session.info().token(), 1, absl::Now() + kPatience).status();
  };
  EXPECT_EQ(pool_of(**automatic), absl::OkStatus());
  const absl::Status denied = pool_of(rank.session());
  EXPECT_EQ(denied.code(), absl::StatusCode::kPermissionDenied) << denied;
  EXPECT_THAT(std::string(denied.message()), HasSubstr("is not on the direct plane"));
}

class ManySessionsTest : public DirectPlaneTest {
 protected:
  ManySessionsTest() : DirectPlaneTest({"--max-sessions=80"}) {}
};

TEST_F(ManySessionsTest, APoolHasSoManyOfThePlane) {
  std::vector<std::unique_ptr<client::Session>> sessions;
  for (int i = 0; i < 64; ++i) {
    auto session = client().Attach(Request(absl::StrCat("rank", i), 1));
    ASSERT_TRUE(session.ok()) << session.status();
    sessions.push_back(*std::move(session));
  }
  const auto wanted = client::AttachOnPlane(client(), PlaneRequest(pool_, "wanted"), client::Plane::kDirect);
  EXPECT_EQ(wanted.status().code(), absl::StatusCode::kResourceExhausted) << wanted.status();
  EXPECT_THAT(std::string(wanted.status().message()), HasSubstr("sessions on the direct plane: 64 of the pool"));
  const auto automatic = client::AttachOnPlane(client(), PlaneRequest(pool_, "auto"), client::Plane::kAuto);
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  EXPECT_EQ(*client::ChoosePlane((*automatic)->info(), client::Plane::kAuto), client::Plane::kServer);
  // The place of one that ends is the next one's.
  sessions.pop_back();
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return client::AttachOnPlane(client(), PlaneRequest(pool_, "wanted"), client::Plane::kDirect).ok();
  }));
}

class WithoutDirectPlaneTest : public DirectPlaneTest {
 protected:
  WithoutDirectPlaneTest() : DirectPlaneTest({"--direct-plane=false"}) {}
};

TEST_F(WithoutDirectPlaneTest, IsRefusedWithTheReason) {
  const absl::Status refused = client().Attach(Request("rank")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("direct_plane is off in the daemon's configuration"));
  const auto wanted = client::AttachOnPlane(client(), PlaneRequest(pool_, "wanted"), client::Plane::kDirect);
  EXPECT_EQ(wanted.status(), refused);
  // Who takes what there is gets another plane, and the reason.
  const auto automatic = client::AttachOnPlane(client(), PlaneRequest(pool_, "auto"), client::Plane::kAuto);
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  EXPECT_EQ(*client::ChoosePlane((*automatic)->info(), client::Plane::kAuto), client::Plane::kServer);
  const absl::Status reason = client::ChoosePlane((*automatic)->info(), client::Plane::kDirect).status();
  EXPECT_THAT(std::string(reason.message()), HasSubstr("direct_plane is off"));
}

class DirectPlaneByTcpTest : public DirectPlaneTest {
 protected:
  DirectPlaneByTcpTest() : DirectPlaneTest({"--tcp-address=127.0.0.1:0", "--insecure-loopback"}) {}
};

TEST_F(DirectPlaneByTcpTest, IsRefusedByBothSides) {
  const std::string address = "127.0.0.1:" + daemon().LogField("serving", "tcp_port");
  const auto remote = client::Client::Connect(address);
  ASSERT_TRUE(remote.ok()) << remote.status();
  const absl::Status refused = remote->Attach(Request("rank")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("not reached through a Unix socket"));
  // The daemon says so too, to clients that ask.
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  std::string response;
  const absl::Status status =
      RawBytesCall(channel, "/stoker.v1.Sessions/Attach", Request("rank").SerializeAsString(), &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the direct plane is not available"));
  EXPECT_EQ(SessionCount(), 0);
  const auto automatic = client::AttachOnPlane(*remote, PlaneRequest(pool_, "auto"), client::Plane::kAuto);
  ASSERT_TRUE(automatic.ok()) << automatic.status();
}

}  // namespace
}  // namespace stoker::system_test
