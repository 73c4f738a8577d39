// ServerPlane against the fake daemon, whose plane is a thread on the same memory. What the daemon may do wrong is done
// by the hook, on that thread, when the engine has rung a doorbell: so it happens while the engine waits, or just
// before.
#include "client/server_plane.h"

#include <sys/mman.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/device_plane.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_arena.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/fake_plane.h"
#include "tests/client/temporary_directory.h"

namespace stoker::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Answer = FakePlane::Answer;
using Rung = FakePlane::Rung;

constexpr uint32_t kTopK = 5, kGroups = 2;  // of the fake arena's 7 and 2
constexpr absl::Duration kForEver = absl::Minutes(10);
// The promise is one second after the daemon's death; the rest is for machines that are busy otherwise.
constexpr absl::Duration kAtOnce = absl::Seconds(5);

class ServerPlaneTest : public testing::Test {
 protected:
  ServerPlaneTest() { daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR)); }

  std::unique_ptr<Session> Attach(SessionOptions options = {}, const std::string& name = "") {
    options.initial_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(10);
    v1::AttachRequest request = FakeAttachRequest("kv");
    request.set_name(name);
    absl::StatusOr<std::unique_ptr<Session>> session = Client::Connect(daemon_.address())->Attach(request, options);
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  static std::unique_ptr<ServerPlane> Arm(Session& session) {
    absl::StatusOr<std::unique_ptr<ServerPlane>> plane = ServerPlane::Arm(session, kTopK);
    EXPECT_TRUE(plane.ok()) << plane.status();
    return *std::move(plane);
  }

  static PlaneRow Admit(Session& session) {
    v1::AdmitRequest request;
    request.add_items()->set_prompt_rows(10);
    v1::AdmitResponse response;
    EXPECT_TRUE(session.Admit(request, &response).ok());
    return {response.sequences(0).sequence_id(), response.sequences(0).state_row(), 11};
  }

  static void Release(Session& session, const PlaneRow& row) {
    v1::ReleaseRequest request;
    request.add_sequence_ids(row.sequence_id);
    v1::ReleaseResponse response;
    EXPECT_TRUE(session.Release(request, &response).ok());
    EXPECT_TRUE(FirstError(response.statuses()).ok());
  }

  static absl::Status Step(ServerPlane& plane, absl::Span<const PlaneRow> rows, absl::Span<const int32_t> commits) {
    if (absl::Status status = plane.Begin(rows); !status.ok()) return status;
    for (uint32_t group = 0; group < kGroups; ++group) {
      if (absl::Status status = plane.Ring(group); !status.ok()) return status;
      if (absl::Status status = plane.Await(group); !status.ok()) return status;
    }
    if (absl::Status status = plane.Commit(commits); !status.ok()) return status;
    return plane.AwaitCommit();
  }

  // The daemon answers nothing any more, from that doorbell of the first step on, and does this when it has been rung.
  void SetTrap(uint32_t doorbell, std::function<void()> trap) {
    daemon_.SetPlaneHook([doorbell, trap = std::move(trap)](const Rung& rung) {
      if (rung.doorbell != doorbell) return Answer::kDone;
      trap();
      return Answer::kSilence;
    });
  }

  // A word of the newest session's arena, in a mapping that lives as long as the test.
  template <typename T>
  std::atomic_ref<T> Word(const Session& session, const std::string& name, uint64_t i) {
    const v1::ArenaLayout layout = session.info().arena();
    Mapping& mapping = mappings_.emplace_back();
    mapping.bytes = layout.size_bytes();
    mapping.data = static_cast<std::byte*>(
        mmap(nullptr, mapping.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, daemon_.arena_memory().get(), 0));
    for (const v1::ArenaTensor& tensor : layout.tensors()) {
      if (tensor.name() != name) continue;
      return std::atomic_ref<T>(
          *reinterpret_cast<T*>(mapping.data + tensor.offset_bytes() + i * tensor.stride_bytes(0)));
    }
    ADD_FAILURE() << "no tensor " << name;
    return std::atomic_ref<T>(*reinterpret_cast<T*>(mapping.data));
  }

  // Begins a step and waits, for ever if need be, for the answer to the first doorbell.
  static absl::Status AwaitFirst(ServerPlane& plane) {
    EXPECT_TRUE(plane.Begin({}).ok());
    EXPECT_TRUE(plane.Ring(0).ok());
    return plane.Await(0, kForEver);
  }

  static void ExpectOver(ServerPlane& plane, const absl::Status& why) {
    EXPECT_EQ(plane.status(), why);
    EXPECT_EQ(plane.Begin({}), why);
    EXPECT_EQ(plane.Ring(0), why);
    EXPECT_EQ(plane.Await(0), why);
    EXPECT_EQ(plane.Commit({}), why);
    EXPECT_EQ(plane.AwaitCommit(), why);
  }

  struct Mapping {
    ~Mapping() {
      if (data != nullptr) munmap(data, bytes);
    }
    std::byte* data = nullptr;
    size_t bytes = 0;
  };

  std::deque<Mapping> mappings_;  // outlive the daemon's threads
  TemporaryDirectory directory_;
  FakeDaemon daemon_{directory_.path()};
};

TEST_F(ServerPlaneTest, AThousandSteps) {
  constexpr uint64_t kSteps = 1000;
  std::mutex mutex;
  std::vector<Rung> seen;
  daemon_.SetPlaneHook([&](const Rung& rung) {
    const std::lock_guard lock(mutex);
    seen.push_back(rung);
    return Answer::kDone;
  });
  auto session = Attach();
  auto plane = Arm(*session);
  EXPECT_EQ(plane->top_k(), kTopK);
  EXPECT_EQ(plane->doorbell_timeout(), absl::Seconds(5));
  std::vector<PlaneRow> open = {Admit(*session)};
  for (uint64_t step = 1; step <= kSteps; ++step) {
    // Sequences join and leave without a new Arm.
    if (step % 100 == 50) open.push_back(Admit(*session));
    if (step % 100 == 0) {
      Release(*session, open.front());
      open.erase(open.begin());
    }
    std::vector<PlaneRow> rows = open;
    rows.insert(rows.begin() + static_cast<ptrdiff_t>(step % (rows.size() + 1)), PlaneRow());
    std::vector<int32_t> commits;
    for (size_t i = 0; i < rows.size(); ++i) commits.push_back((step + i) % 3 == 0 ? 1 : 0);

    ASSERT_EQ(plane->step(), step);
    ASSERT_TRUE(plane->Begin(rows).ok());
    for (uint32_t group = 0; group < kGroups; ++group) {
      for (size_t row = 0; row < rows.size(); ++row) {
        for (uint32_t i = 0; i < kTopK; ++i) {
          plane->Entries(group, row)[i] = i < row ? -1 : static_cast<int32_t>(step * 10 + group * 5 + row + i);
        }
      }
      ASSERT_TRUE(plane->Ring(group).ok());
      ASSERT_TRUE(plane->Await(group).ok());
      for (size_t row = 0; row < rows.size(); ++row) {
        ASSERT_EQ(plane->HotRows(group, row), plane->Entries(group, row));
        ASSERT_EQ(plane->Misses(group, row), static_cast<int32_t>(kTopK - row));
      }
    }
    ASSERT_EQ(plane->statuses().size(), rows.size());
    ASSERT_TRUE(plane->FirstRowError().ok()) << plane->FirstRowError();
    ASSERT_TRUE(plane->Commit(step % 7 == 0 ? absl::Span<const int32_t>() : commits).ok());
    ASSERT_TRUE(plane->AwaitCommit().ok());
    ASSERT_TRUE(plane->FirstRowError().ok());

    const std::lock_guard lock(mutex);
    ASSERT_EQ(seen.size(), kGroups + 1);
    for (uint32_t doorbell = 0; doorbell <= kGroups; ++doorbell) {
      const Rung& rung = seen[doorbell];
      ASSERT_EQ(rung.step, step);
      ASSERT_EQ(rung.doorbell, doorbell);
      ASSERT_EQ(rung.rows.size(), rows.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        const int32_t state_row = rows[i].sequence_id == 0 ? -1 : static_cast<int32_t>(rows[i].state_row);
        const int32_t commit = doorbell == kGroups && step % 7 != 0 ? commits[i] : 0;
        ASSERT_EQ(rung.rows[i],
                  (FakePlane::Row{rows[i].sequence_id, state_row, static_cast<int32_t>(rows[i].length), commit}));
      }
    }
    seen.clear();
    for (PlaneRow& row : open) ++row.length;
  }
  const absl::StatusOr<uint64_t> steps = plane->Disarm();
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(*steps, kSteps);
  EXPECT_EQ(daemon_.calls("Arm").size(), 1u);
  EXPECT_EQ(daemon_.calls("Step").size(), 0u);
  EXPECT_EQ(daemon_.calls("Arm")[0].token, session->info().token());
  EXPECT_EQ(daemon_.calls("Disarm")[0].token, session->info().token());
}

TEST_F(ServerPlaneTest, StepsBeginWithTheNumberThatArmGives) {
  for (const uint64_t first : {uint64_t{1}, uint64_t{4711}, ~uint64_t{0} - 10}) {
    daemon_.SetFirstStep(first);
    auto session = Attach();
    auto plane = Arm(*session);
    for (uint64_t step = first; step < first + 3; ++step) {
      EXPECT_EQ(plane->step(), step);
      ASSERT_TRUE(Step(*plane, {}, {}).ok());
    }
    EXPECT_EQ(*plane->Disarm(), 3u);
  }
}

// All calls at all points: the one that must come is taken, and the others change nothing.
TEST_F(ServerPlaneTest, CallsInAnyOtherOrderChangeNothing) {
  auto session = Attach();
  auto plane = Arm(*session);
  const std::vector<std::pair<std::string, std::function<absl::Status()>>> calls = {
      {"Begin", [&] { return plane->Begin({}); }},          {"Ring(0)", [&] { return plane->Ring(0); }},
      {"Await(0)", [&] { return plane->Await(0); }},        {"Ring(1)", [&] { return plane->Ring(1); }},
      {"Await(1)", [&] { return plane->Await(1); }},        {"Commit", [&] { return plane->Commit({}); }},
      {"AwaitCommit", [&] { return plane->AwaitCommit(); }}};
  for (uint64_t step = 1; step <= 3; ++step) {
    for (const auto& [next, call] : calls) {
      for (const auto& [other, wrong] : calls) {
        if (other == next) continue;
        EXPECT_EQ(wrong(),
                  absl::FailedPreconditionError(absl::StrCat(other, " comes where step ", step, " needs ", next)));
      }
      EXPECT_TRUE(absl::IsFailedPrecondition(plane->Ring(kGroups)));
      EXPECT_TRUE(absl::IsFailedPrecondition(plane->Await(kGroups)));
      EXPECT_TRUE(call().ok()) << next;
    }
  }
  EXPECT_EQ(*plane->Disarm(), 3u);
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(call(), absl::FailedPreconditionError("the server plane was disarmed")) << name;
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(plane->Disarm().status()));
}

TEST_F(ServerPlaneTest, WrongArgumentsChangeNothing) {
  auto session = Attach();
  auto plane = Arm(*session);
  const absl::Status many = plane->Begin(std::vector<PlaneRow>(6));
  EXPECT_EQ(many, absl::InvalidArgumentError("rows are 6, above max_batch_rows, 5"));
  PlaneRow row = Admit(*session);
  row.length = uint32_t{1} << 31;
  EXPECT_TRUE(absl::IsInvalidArgument(plane->Begin({row})));
  row.length = 11;
  row.state_row = ~uint32_t{0};
  EXPECT_TRUE(absl::IsInvalidArgument(plane->Begin({row})));
  row.state_row = 0;
  ASSERT_TRUE(plane->Begin({row}).ok());
  for (uint32_t group = 0; group < kGroups; ++group) {
    ASSERT_TRUE(plane->Ring(group).ok());
    ASSERT_TRUE(plane->Await(group).ok());
  }
  EXPECT_EQ(plane->Commit({1, 1}), absl::InvalidArgumentError("commits are 2; the step has 1 rows"));
  ASSERT_TRUE(plane->Commit({1}).ok());
  EXPECT_TRUE(plane->AwaitCommit().ok());
  EXPECT_TRUE(plane->FirstRowError().ok());
  for (const uint32_t top_k : {0, 8}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ServerPlane::Arm(*session, top_k).status())) << top_k;
  }
  EXPECT_TRUE(Step(*plane, {}, {}).ok()) << "nothing was called that would end it";
}

TEST_F(ServerPlaneTest, RowsThatFailHaveTheirStatus) {
  auto session = Attach();
  auto plane = Arm(*session);
  const PlaneRow good = Admit(*session);
  const PlaneRow unknown = {4711, 1, 70};
  ASSERT_TRUE(Step(*plane, {good, unknown, PlaneRow()}, {1, 1, 0}).ok());
  EXPECT_THAT(plane->statuses(), ElementsAre(v1::BATCH_ROW_STATUS_UNSPECIFIED, v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE,
                                             v1::BATCH_ROW_STATUS_UNSPECIFIED));
  EXPECT_EQ(plane->FirstRowError(),
            absl::NotFoundError("batch row 1: state_row 1 does not exist, or does not have sequence_id 4711"));
  ASSERT_TRUE(Step(*plane, {good}, {1}).ok());
  EXPECT_THAT(plane->statuses(), ElementsAre(v1::BATCH_ROW_STATUS_UNSPECIFIED));
  EXPECT_TRUE(plane->FirstRowError().ok());
}

TEST(FromBatchRowTest, EveryStatusHasItsCodeAndNamesTheRow) {
  const std::map<int, absl::StatusCode> codes = {
      {v1::BATCH_ROW_STATUS_BAD_COUNT, absl::StatusCode::kInvalidArgument},
      {v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE, absl::StatusCode::kNotFound},
      {v1::BATCH_ROW_STATUS_NOT_ADJACENT, absl::StatusCode::kInvalidArgument},
      {v1::BATCH_ROW_STATUS_TOO_MANY_ROWS, absl::StatusCode::kInvalidArgument},
      {v1::BATCH_ROW_STATUS_BAD_LENGTH, absl::StatusCode::kInvalidArgument},
      {v1::BATCH_ROW_STATUS_NOT_STORED, absl::StatusCode::kFailedPrecondition},
      {v1::BATCH_ROW_STATUS_NO_BLOCK, absl::StatusCode::kFailedPrecondition},
      {v1::BATCH_ROW_STATUS_EARLIER_ROW, absl::StatusCode::kFailedPrecondition},
      {v1::BATCH_ROW_STATUS_NOT_WRITER, absl::StatusCode::kFailedPrecondition},
      {v1::BATCH_ROW_STATUS_NOT_APPENDED, absl::StatusCode::kFailedPrecondition},
  };
  const PlaneRow row = {17, 2, 70};
  for (int value = v1::BatchRowStatus_MIN; value <= v1::BatchRowStatus_MAX; ++value) {
    const absl::Status status = FromBatchRow(static_cast<v1::BatchRowStatus>(value), 3, row);
    if (value == v1::BATCH_ROW_STATUS_UNSPECIFIED) {
      EXPECT_TRUE(status.ok());
      continue;
    }
    ASSERT_EQ(codes.count(value), 1u) << v1::BatchRowStatus_Name(value);
    EXPECT_EQ(status.code(), codes.at(value)) << status;
    EXPECT_THAT(std::string(status.message()), testing::StartsWith("batch row 3: "));
  }
  for (const int value : {-1, v1::BatchRowStatus_MAX + 1}) {
    const absl::Status status = FromBatchRow(static_cast<v1::BatchRowStatus>(value), 3, row);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("status ", value)));
  }
}

TEST_F(ServerPlaneTest, TheDaemonsDeathEndsAWaitAtOnce) {
  for (const bool returns : {true, false}) {
    SessionOptions options;
    if (!returns) options.reattach_timeout = absl::ZeroDuration();
    std::atomic<bool> rung = false;
    SetTrap(0, [&] { rung = true; });
    auto session = Attach(options);
    auto plane = Arm(*session);
    absl::Status status;
    absl::Time ended;
    std::thread engine([&] {
      status = AwaitFirst(*plane);
      ended = absl::Now();
    });
    while (!rung) std::this_thread::yield();
    const absl::Time killed = absl::Now();
    daemon_.Kill();
    engine.join();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_LT(ended - killed, kAtOnce);
    ExpectOver(*plane, status);
    daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
    daemon_.Restart();
    EXPECT_EQ(session->AwaitAttached().ok(), returns);
    EXPECT_EQ(plane->status(), status);
  }
}

TEST_F(ServerPlaneTest, TheDaemonsDeathBetweenStepsEndsThePlane) {
  auto session = Attach();
  auto plane = Arm(*session);
  ASSERT_TRUE(Step(*plane, {}, {}).ok());
  daemon_.Kill();
  while (session->attached()) std::this_thread::yield();
  const absl::Status status = plane->Begin({});
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  ExpectOver(*plane, status);
}

// The plane sees that the session was attached anew even where it never saw it detached; then it can be armed anew.
TEST_F(ServerPlaneTest, APlaneBelongsToOneGeneration) {
  auto session = Attach();
  auto plane = Arm(*session);
  const Arena* const arena = &plane->arena();
  ASSERT_TRUE(Step(*plane, {}, {}).ok());
  daemon_.Kill();
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  daemon_.Restart();
  while (session->generation() == 1) std::this_thread::yield();
  ASSERT_TRUE(session->AwaitAttached().ok());
  const absl::Status status = plane->Begin({});
  EXPECT_EQ(status, absl::UnavailableError("generation 1 of the session is over, it is 2 now: arm anew"));
  ExpectOver(*plane, status);
  EXPECT_TRUE(absl::IsFailedPrecondition(plane->Disarm().status())) << "it names its generation";
  EXPECT_EQ(daemon_.calls("Disarm").size(), 0u);
  plane = Arm(*session);
  EXPECT_NE(&plane->arena(), arena);
  EXPECT_TRUE(Step(*plane, {}, {}).ok());
  EXPECT_EQ(*plane->Disarm(), 1u);
}

TEST_F(ServerPlaneTest, AWaitDuringWhichTheDaemonRestartsEnds) {
  std::atomic<bool> rung = false;
  SetTrap(kGroups, [&] { rung = true; });
  auto session = Attach();
  auto plane = Arm(*session);
  absl::Status status;
  std::thread engine([&] { status = Step(*plane, {}, {}); });
  while (!rung) std::this_thread::yield();
  daemon_.Kill();
  daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
  daemon_.Restart();
  engine.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  ExpectOver(*plane, status);
}

TEST_F(ServerPlaneTest, AWaitEndsWithTheSession) {
  SetTrap(0, [&] { daemon_.EndSessions(absl::AbortedError("superseded")); });
  auto session = Attach();
  auto plane = Arm(*session);
  const absl::Status status = AwaitFirst(*plane);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  ExpectOver(*plane, status);
}

TEST_F(ServerPlaneTest, ThePlanesEndIsAStatus) {
  const std::vector<std::pair<int32_t, absl::StatusCode>> ends = {
      {v1::PLANE_END_DISARMED, absl::StatusCode::kUnavailable},
      {v1::PLANE_END_TIMED_OUT, absl::StatusCode::kDeadlineExceeded},
      {v1::PLANE_END_BAD_STEP, absl::StatusCode::kInternal},
      {v1::PlaneEnd_MAX + 1, absl::StatusCode::kInternal},
      {-1, absl::StatusCode::kInternal}};
  for (const auto& [value, code] : ends) {
    auto session = Attach();
    auto ended = Word<int32_t>(*session, "ended", 0);
    SetTrap(0, [ended, value = value] { ended.store(value); });
    auto plane = Arm(*session);
    const absl::Status status = AwaitFirst(*plane);
    EXPECT_EQ(status.code(), code) << status;
    ExpectOver(*plane, status);
    // The session is still there, and can be armed anew.
    daemon_.SetPlaneHook(nullptr);
    plane = Arm(*session);
    EXPECT_TRUE(Step(*plane, {}, {}).ok());
  }
}

// What was answered before the end counts.
TEST_F(ServerPlaneTest, AnAnswerBeforeTheEndIsTaken) {
  for (int run = 0; run < 100; ++run) {
    auto session = Attach();
    auto ended = Word<int32_t>(*session, "ended", 0);
    auto done = Word<uint64_t>(*session, "done", 0);
    SetTrap(0, [ended, done] {
      done.store(1);
      ended.store(v1::PLANE_END_DISARMED);
    });
    auto plane = Arm(*session);
    ASSERT_TRUE(AwaitFirst(*plane).ok());
    ASSERT_TRUE(plane->Ring(1).ok());
    ASSERT_TRUE(absl::IsUnavailable(plane->Await(1, kForEver)));
  }
}

TEST_F(ServerPlaneTest, GarbageInDoneEndsThePlane) {
  for (const uint64_t garbage : {uint64_t{2}, ~uint64_t{0}, uint64_t{1} << 32, uint64_t{0x0100000000000001}}) {
    auto session = Attach();
    auto done = Word<uint64_t>(*session, "done", 0);
    SetTrap(0, [done, garbage] { done.store(garbage); });
    auto plane = Arm(*session);
    const absl::Status status = AwaitFirst(*plane);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("done[0] is ", garbage, " in step 1")));
    ExpectOver(*plane, status);
  }
}

TEST_F(ServerPlaneTest, AWaitEndsAtItsTimeout) {
  for (uint32_t doorbell = 0; doorbell <= kGroups; ++doorbell) {
    for (const absl::Duration timeout : {absl::Milliseconds(20), absl::ZeroDuration(), -absl::Seconds(1)}) {
      SetTrap(doorbell, [] {});
      auto session = Attach();
      auto plane = Arm(*session);
      ASSERT_TRUE(plane->Begin({}).ok());
      absl::Status status;
      for (uint32_t group = 0; group < kGroups && status.ok(); ++group) {
        ASSERT_TRUE(plane->Ring(group).ok());
        status = plane->Await(group, group == doorbell ? timeout : kForEver);
      }
      if (doorbell == kGroups) {
        ASSERT_TRUE(plane->Commit({}).ok());
        status = plane->AwaitCommit(timeout);
      }
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("done[", doorbell, "] of step 1")));
      ExpectOver(*plane, status);
      daemon_.SetPlaneHook(nullptr);
      plane = Arm(*session);
      EXPECT_TRUE(Step(*plane, {}, {}).ok());
    }
  }
}

TEST_F(ServerPlaneTest, DisarmGivesTheStepsBackToCalls) {
  auto session = Attach();
  v1::StepRequest step;
  step.add_rows()->set_sequence_id(Admit(*session).sequence_id);
  v1::StepResponse stepped;
  auto plane = Arm(*session);
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Step(step, &stepped)));
  ASSERT_TRUE(Step(*plane, {}, {}).ok());
  // In the middle of a step.
  ASSERT_TRUE(plane->Begin({}).ok());
  ASSERT_TRUE(plane->Ring(0).ok());
  EXPECT_EQ(*plane->Disarm(), 1u);
  EXPECT_TRUE(session->Step(step, &stepped).ok());
  EXPECT_EQ(daemon_.calls("Disarm").size(), 1u);
  plane.reset();
  EXPECT_EQ(daemon_.calls("Disarm").size(), 1u) << "once is enough";
  // After an error as well, which the destructor leaves alone.
  SetTrap(0, [] {});
  plane = Arm(*session);
  ASSERT_TRUE(plane->Begin({}).ok());
  ASSERT_TRUE(plane->Ring(0).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(plane->Await(0, absl::ZeroDuration())));
  EXPECT_EQ(*plane->Disarm(), 0u);
  EXPECT_TRUE(session->Step(step, &stepped).ok());
  EXPECT_EQ(daemon_.calls("Disarm").size(), 2u);
  plane = Arm(*session);
  ASSERT_TRUE(plane->Begin({}).ok());
  ASSERT_TRUE(plane->Ring(0).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(plane->Await(0, absl::ZeroDuration())));
  plane.reset();
  EXPECT_EQ(daemon_.calls("Disarm").size(), 2u);
}

TEST_F(ServerPlaneTest, ADestroyedPlaneDisarmsItsOwnArmAndNoOther) {
  auto session = Attach();
  Arm(*session).reset();
  EXPECT_EQ(daemon_.calls("Disarm").size(), 1u);
  auto plane = Arm(*session);
  // The assignment destroys the older plane when the newer one is armed already.
  plane = Arm(*session);
  EXPECT_EQ(daemon_.calls("Disarm").size(), 1u);
  EXPECT_TRUE(Step(*plane, {}, {}).ok());
  auto older = std::move(plane);
  plane = Arm(*session);
  EXPECT_TRUE(absl::IsFailedPrecondition(older->Begin({})));
  EXPECT_TRUE(absl::IsFailedPrecondition(older->Disarm().status()));
  older.reset();
  EXPECT_TRUE(Step(*plane, {}, {}).ok());
  EXPECT_EQ(*plane->Disarm(), 1u);
}

TEST_F(ServerPlaneTest, AnArmThatCannotBe) {
  // The daemon's reason.
  auto session = Attach();
  daemon_.SetHook([](const std::string& method) {
    return method == "Arm" ? absl::FailedPreconditionError("no MPS") : absl::OkStatus();
  });
  EXPECT_EQ(ServerPlane::Arm(*session, kTopK).status(), absl::FailedPreconditionError("no MPS"));
  daemon_.SetHook(nullptr);
  // Another generation's arena.
  CallOptions options;
  options.generation = 7;
  EXPECT_TRUE(absl::IsFailedPrecondition(ServerPlane::Arm(*session, kTopK, options).status()));
  // No memory, or none that has doorbells.
  SessionOptions unmapped;
  unmapped.arena_mapping = ArenaMapping::kNever;
  session = Attach(unmapped);
  EXPECT_EQ(ServerPlane::Arm(*session, kTopK).status(), session->arena()->status());
  daemon_.SetAttachedEditor([](v1::AttachResponse* first) {
    for (v1::ArenaTensor& tensor : *first->mutable_attached()->mutable_arena()->mutable_tensors()) {
      if (tensor.name().find('.') == std::string::npos && tensor.name() != "staging")
        tensor.set_name("x." + tensor.name());
    }
  });
  session = Attach();
  ASSERT_TRUE(session->arena()->status().ok()) << session->arena()->status();
  EXPECT_THAT(std::string(ServerPlane::Arm(*session, kTopK).status().message()),
              HasSubstr("version without a server plane"));
  EXPECT_EQ(daemon_.calls("Arm").size(), 1u);
  daemon_.SetAttachedEditor(nullptr);
  // The session has gone.
  session = Attach();
  daemon_.EndSessions(absl::AbortedError("evicted"));
  while (!session->ended()) std::this_thread::yield();
  EXPECT_TRUE(absl::IsAborted(ServerPlane::Arm(*session, kTopK).status()));
}

// DevicePlane is for arenas on a GPU, in builds with CUDA; what it does there is tested in tests/gpu.
TEST_F(ServerPlaneTest, ADevicePlaneNeedsAGpu) {
  const std::unique_ptr<Session> session = Attach();
  const absl::Status refused = DevicePlane::Arm(*session, kTopK).status();
  EXPECT_TRUE(absl::IsUnimplemented(refused) || absl::IsFailedPrecondition(refused)) << refused;
  // The session was not armed for it.
  EXPECT_EQ(Step(*Arm(*session), {Admit(*session)}, {}), absl::OkStatus());
}

TEST_F(ServerPlaneTest, AnArmThatIsAnsweredWrongly) {
  auto session = Attach();
  daemon_.SetArmedEditor([](v1::ArmResponse* armed) { armed->set_first_step(0); });
  EXPECT_EQ(ServerPlane::Arm(*session, kTopK).status().code(), absl::StatusCode::kInternal);
  daemon_.SetArmedEditor([](v1::ArmResponse* armed) { armed->set_first_step(9); });
  const absl::Status status = ServerPlane::Arm(*session, kTopK).status();
  EXPECT_EQ(status,
            absl::InternalError("Arm: request[0] is 0 and done[0] 0; both must be 8, one less than first_step"));
  EXPECT_EQ(daemon_.calls("Disarm").size(), 2u);
}

TEST_F(ServerPlaneTest, TheSessionsOtherCallsGoOn) {
  auto session = Attach();
  auto plane = Arm(*session);
  std::atomic<bool> over = false;
  std::atomic<int> failed = 0;
  std::thread other([&] {
    while (!over) {
      v1::ReadRequest read;
      v1::ReadResponse rows;
      failed += absl::IsNotFound(session->Read(read, &rows)) ? 0 : 1;
    }
  });
  for (int step = 0; step < 200; ++step) EXPECT_TRUE(Step(*plane, {}, {}).ok());
  over = true;
  other.join();
  EXPECT_EQ(failed, 0);
}

}  // namespace
}  // namespace stoker::client
