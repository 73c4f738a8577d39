// Sessions: the lease, its ends, and what the others notice of them.
#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

// What a session's callbacks have told.
struct Events {
  absl::Notification draining, superseded, ended, reattached;
  uint64_t by = 0;
  uint32_t grace_ms = 0;
  absl::Status end;
  std::atomic<uint64_t> generation{0};
  std::atomic<int> pressures{0};

  client::SessionOptions Options(absl::Duration reattach_timeout) {
    client::SessionOptions options;
    options.reattach_timeout = reattach_timeout;
    options.on_draining = [this](const v1::Draining& event) {
      grace_ms = event.grace_ms();
      draining.Notify();
    };
    options.on_superseded = [this](const v1::Superseded& event) {
      by = event.by_session_id();
      superseded.Notify();
    };
    options.on_pool_pressure = [this](const v1::PoolPressure&) { ++pressures; };
    options.on_ended = [this](const absl::Status& status) {
      end = status;
      ended.Notify();
    };
    options.on_reattach = [this](uint64_t g) {
      generation = g;
      reattached.Notify();
    };
    return options;
  }
};

class LifecycleTest : public DaemonTest {
 protected:
  LifecycleTest() : LifecycleTest(std::vector<std::string>{}) {}
  explicit LifecycleTest(std::vector<std::string> flags)
      : DaemonTest(std::move(flags)), pool_(CreatePool(LinearPool("p", 2, 48, 64))) {}

  std::unique_ptr<ChildProcess> Engine(const std::string& name, const std::string& mode) {
    auto engine = std::make_unique<ChildProcess>(
        std::vector<std::string>{ClientProcessPath(), daemon().address(), "p", name, mode},
        daemon().folder().File(name));
    EXPECT_TRUE(engine->AwaitOutput("ready", absl::Seconds(30))) << engine->Output();
    return engine;
  }

  uint64_t HotBytes() const { return client().GetStatus()->hot_bytes(); }

  v1::PoolSpec pool_;
};

TEST_F(LifecycleTest, TakesEverythingBackWithinASecondOfAKill) {
  Rank bystander(client(), pool_, AttachTo(pool_, "bystander"));
  const Sequence sequence = bystander.Open(MakeTokens(1, 100), 100);
  const uint32_t free_blocks = Usage("p").free_blocks();
  const uint64_t hot_bytes = HotBytes();
  for (const char* mode : {"attach", "busy"}) {
    auto engine = Engine("engine", mode);
    EXPECT_EQ(SessionCount(), 2);
    EXPECT_GT(HotBytes(), hot_bytes);
    const absl::Time begin = absl::Now();
    engine->Kill();
    EXPECT_TRUE(Eventually(absl::Seconds(1), [&] {
      return SessionCount() == 1 && Usage("p").sessions() == 1 && HotBytes() == hot_bytes;
    })) << mode;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
    // Without a key nothing is kept; its whole prompt stays cached.
    EXPECT_TRUE(Eventually(absl::Seconds(1), [&] {
      return Usage("p").free_blocks() + Usage("p").cached_blocks() == free_blocks;
    })) << Usage("p").ShortDebugString();
    const std::vector<BatchRow> batch = {{&sequence, 100, false, true}};
    const std::vector<std::vector<int32_t>> entries = {{5, 50, 99, 3}};
    bystander.CheckRows(batch, entries, 4, bystander.Step(batch, entries, 4));
  }
}

TEST_F(LifecycleTest, DetachesAtOnce) {
  {
    Rank rank(client(), pool_, AttachTo(pool_, "rank"));
    rank.Open(MakeTokens(2, 100), 200, "key");
    EXPECT_EQ(SessionCount(), 1);
  }
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 0 && HotBytes() == 0; }));
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return Usage("p").sessions() == 0; }));
  v1::DeletePoolRequest request;
  request.set_name("p");
  // Whoever detaches on purpose keeps nothing, keys or not.
  const auto deleted = client().DeletePool(request);
  EXPECT_TRUE(deleted.ok()) << deleted.status();
}

TEST_F(LifecycleTest, SupersedesASessionOfTheSameName) {
  Events events;
  Rank old_rank(client(), pool_, AttachTo(pool_, "rank"), events.Options(absl::ZeroDuration()));
  const Tokens tokens = MakeTokens(3, 64);
  const Sequence sequence = old_rank.Open(tokens, 100, "key");
  Rank new_rank(client(), pool_, AttachTo(pool_, "rank"));
  // The sequence is there, and its successor is its writer, from the first call on.
  const v1::AdmittedSequence again = new_rank.Admit(new_rank.Item(tokens, 100, "key"));
  ASSERT_EQ(again.status().code(), 0) << again.status().message();
  EXPECT_EQ(again.sequence_id(), sequence.id);
  EXPECT_TRUE(again.writer());
  EXPECT_EQ(again.stored_rows(), 64u);
  ASSERT_TRUE(events.superseded.WaitForNotificationWithTimeout(absl::Seconds(10)));
  ASSERT_TRUE(events.ended.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(events.by, new_rank.session().info().session_id());
  EXPECT_EQ(events.end.code(), absl::StatusCode::kAborted) << events.end;
  EXPECT_FALSE(old_rank.Store(sequence, 64, 1).ok());
  EXPECT_EQ(SessionCount(), 1);
  // Names are per pool, and the empty name never supersedes.
  CreatePool(LinearPool("q", 2, 48, 8));
  Rank elsewhere(client(), LinearPool("q", 2, 48, 8), AttachTo(LinearPool("q", 2, 48, 8), "rank"));
  Rank anonymous(client(), pool_, AttachTo(pool_, ""));
  Rank anonymous_too(client(), pool_, AttachTo(pool_, ""));
  EXPECT_EQ(SessionCount(), 4);
}

TEST_F(LifecycleTest, EvictsASession) {
  Events events;
  Rank rank(client(), pool_, AttachTo(pool_, "rank"), events.Options(absl::ZeroDuration()));
  v1::EvictSessionRequest request;
  request.set_session_id(rank.session().info().session_id());
  ASSERT_TRUE(client().EvictSession(request).ok());
  ASSERT_TRUE(events.ended.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_THAT(std::string(events.end.message()), HasSubstr("evicted"));
  EXPECT_EQ(client().EvictSession(request).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return HotBytes() == 0; }));
}

TEST_F(LifecycleTest, DrainsAndUndrains) {
  Events events;
  Rank rank(client(), pool_, AttachTo(pool_, "rank"), events.Options(absl::ZeroDuration()));
  const Sequence sequence = rank.Open(MakeTokens(4, 64), 64);
  ASSERT_TRUE(client().Drain().ok());
  EXPECT_EQ(client().GetStatus()->state(), v1::DAEMON_STATE_DRAINING);
  ASSERT_TRUE(events.draining.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(events.grace_ms, 3000u);
  EXPECT_EQ(client().Attach(AttachTo(pool_, "late")).status().code(), absl::StatusCode::kUnavailable);
  v1::CreatePoolRequest create;
  *create.mutable_spec() = LinearPool("late", 1, 16, 1);
  EXPECT_EQ(client().CreatePool(create).status().code(), absl::StatusCode::kUnavailable);
  // Steps go on.
  const std::vector<BatchRow> batch = {{&sequence, 64, false, true}};
  rank.CheckRows(batch, {{1, 2, 3, 63}}, 4, rank.Step(batch, {{1, 2, 3, 63}}, 4));
  ASSERT_TRUE(client().Undrain().ok());
  EXPECT_EQ(client().GetStatus()->state(), v1::DAEMON_STATE_SERVING);
  Rank late(client(), pool_, AttachTo(pool_, "late"));
  EXPECT_EQ(SessionCount(), 2);
}

TEST_F(LifecycleTest, TellsOfPoolPressureOnceUntilItIsOver) {
  Events events;
  Rank rank(client(), pool_, AttachTo(pool_, "rank"), events.Options(absl::ZeroDuration()));
  for (int round = 1; round <= 2; ++round) {
    const v1::AdmittedSequence large = rank.Admit(rank.Item(MakeTokens(5, 16), 60 * 16, "", false));
    ASSERT_EQ(large.status().code(), 0) << large.status().message();
    EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return events.pressures == round; }));
    ASSERT_TRUE(rank.Close({large.sequence_id(), large.state_row(), {}}).ok());
    // The end of the pressure has no event: a new session is told when it is on, so ask for two rounds of the daemon's
    // housekeeping by what it does visibly.
    const double scraped = Scrape(daemon().metrics_port()).at("stoker_uptime_seconds");
    ASSERT_TRUE(Eventually(
        absl::Seconds(5), [&] { return Scrape(daemon().metrics_port()).at("stoker_uptime_seconds") > scraped + 0.6; }));
    EXPECT_EQ(events.pressures, round);
  }
}

TEST_F(LifecycleTest, ReattachesAfterARestart) {
  Events events;
  client::SessionOptions options = events.Options(absl::Seconds(60));
  options.recreate_pool = true;
  Rank rank(client(), pool_, AttachTo(pool_, "rank"), options);
  const Sequence before = rank.Open(MakeTokens(6, 64), 64);
  const std::string old_token = rank.session().info().token();
  const uint64_t old_epoch = rank.session().info().boot_epoch();
  daemon().process().Kill();  // no farewell; the socket stays behind
  daemon().Restart();
  ASSERT_TRUE(events.reattached.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_EQ(events.generation, 2u);
  EXPECT_NE(rank.session().info().boot_epoch(), old_epoch);
  const Sequence after = rank.Open(MakeTokens(6, 64), 64);
  rank.CheckStored(after, 64);
  const std::vector<BatchRow> batch = {{&after, 64, false, true}};
  rank.CheckRows(batch, {{1, 2, 3, 63}}, 4, rank.Step(batch, {{1, 2, 3, 63}}, 4));
}

TEST_F(LifecycleTest, SurvivesAttachAndDetachChurn) {
  constexpr int kThreads = 8, kRounds = 20;
  const double sessions_before = Scrape(daemon().metrics_port())["stoker_sessions"];
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        // Half of them supersede each other.
        const std::string name = t % 2 == 0 ? "same" : "";
        auto session = client().Attach(AttachTo(pool_, name, 2, 32, 8, 128), WithoutReattach());
        if (!session.ok() && session.status().code() != absl::StatusCode::kAborted) {
          ++failures;
          ADD_FAILURE() << session.status();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return SessionCount() == 0 && HotBytes() == 0; }));
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_sessions"], sessions_before);
  EXPECT_EQ(Usage("p").free_blocks(), 64u);
}

class SmallSessionsTest : public LifecycleTest {
 protected:
  SmallSessionsTest() : LifecycleTest({"--max-hot-bytes-per-session=8388608"}) {}
};

TEST_F(SmallSessionsTest, OneSessionTakesNoMoreThanItsShare) {
  const absl::Status hot = client().Attach(AttachTo(pool_, "a", 4096, 1024)).status();
  EXPECT_EQ(hot.code(), absl::StatusCode::kResourceExhausted) << hot;
  EXPECT_THAT(std::string(hot.message()), HasSubstr("limit max_hot_bytes_per_session 8388608"));
  Rank b(client(), pool_, AttachTo(pool_, "b", 2));
}

class FewSessionsTest : public LifecycleTest {
 protected:
  FewSessionsTest() : LifecycleTest({"--max-sessions=2", "--max-hot-bytes=8388608"}) {}
};

TEST_F(FewSessionsTest, RefusesMoreThanItMayHold) {
  Rank a(client(), pool_, AttachTo(pool_, "a", 2));
  const absl::Status hot = client().Attach(AttachTo(pool_, "b", 4096, 1024)).status();
  EXPECT_EQ(hot.code(), absl::StatusCode::kResourceExhausted) << hot;
  EXPECT_THAT(std::string(hot.message()), HasSubstr("max_hot_bytes 8388608"));
  Rank b(client(), pool_, AttachTo(pool_, "b", 2));
  const absl::Status many = client().Attach(AttachTo(pool_, "c", 2)).status();
  EXPECT_EQ(many.code(), absl::StatusCode::kResourceExhausted) << many;
  EXPECT_THAT(std::string(many.message()), HasSubstr("limit max_sessions 2"));
  // In the place of its namesake one more fits.
  Rank again(client(), pool_, AttachTo(pool_, "b", 2));
  EXPECT_EQ(SessionCount(), 2);
}

}  // namespace
}  // namespace stoker::system_test
