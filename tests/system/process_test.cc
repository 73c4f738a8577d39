// The daemon as a process: command line, sockets, signals, health, reflection, log, metrics.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kHealthServing[] = "\x08\x01";
constexpr char kHealthNotServing[] = "\x08\x02";

std::string HealthRequest(const std::string& service) {
  return service.empty() ? "" : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
}

class ProcessTest : public DaemonTest {
 protected:
  ProcessTest() : pool_(CreatePool(LinearPool("p", 2, 48, 64))) {}

  std::shared_ptr<grpc::Channel> Channel() {
    return grpc::CreateChannel(daemon().address(), grpc::InsecureChannelCredentials());
  }

  std::vector<std::string> Command(std::vector<std::string> flags) {
    flags.insert(flags.begin(), StokerdPath());
    return flags;
  }

  v1::PoolSpec pool_;
};

TEST_F(ProcessTest, RefusesASecondDaemonOnItsSocket) {
  const Finished second =
      RunToEnd(Command({"--socket-path=" + daemon().socket(), "--metrics-address="}), daemon().folder());
  EXPECT_EQ(second.status, 1) << second.output;
  EXPECT_THAT(second.output, HasSubstr(daemon().socket()));
  EXPECT_THAT(second.output, HasSubstr(absl::StrCat(daemon().process().pid())));
  EXPECT_EQ(SessionCount(), 0);  // the first one still serves
}

TEST_F(ProcessTest, ReplacesAStaleSocketAndKeepsItsModes) {
  daemon().process().Kill();
  struct stat info = {};
  ASSERT_EQ(stat(daemon().socket().c_str(), &info), 0);  // left behind
  daemon().Restart();
  for (const std::string& path : {daemon().socket(), daemon().socket() + ".fd"}) {
    ASSERT_EQ(stat(path.c_str(), &info), 0) << path;
    EXPECT_TRUE(S_ISSOCK(info.st_mode)) << path;
    EXPECT_EQ(info.st_mode & 07777, 0660u) << path;
  }
  // The channel to the old daemon may take a call to notice its end.
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return client().ListSessions().ok(); }));
  EXPECT_EQ(daemon().Stop(), 0);
  EXPECT_NE(stat(daemon().socket().c_str(), &info), 0);  // taken along
  EXPECT_NE(stat((daemon().socket() + ".fd").c_str(), &info), 0);
}

TEST_F(ProcessTest, RefusesPathsAndPortsThatItCannotHave) {
  const std::string file = daemon().folder().Write("file", "not a socket");
  struct Case {
    std::vector<std::string> flags;
    const char* message;
  };
  const std::string other = "--socket-path=" + daemon().folder().File("other");
  const std::string metrics = absl::StrCat("127.0.0.1:", daemon().metrics_port());
  for (const Case& c :
       {Case{{"--socket-path=" + file, "--metrics-address="}, "socket"},
        Case{{"--socket-path=" + daemon().folder().File("no/s"), "--metrics-address="}, "no"},
        Case{{other, "--metrics-address=" + metrics}, "metrics"},
        Case{{other, "--metrics-address=", "--insecure-loopback", "--tcp-address=" + metrics}, "tcp_address"}}) {
    const Finished refused = RunToEnd(Command(c.flags), daemon().folder());
    EXPECT_EQ(refused.status, 1) << refused.output;
    EXPECT_THAT(refused.output, HasSubstr(c.message));
  }
  EXPECT_EQ(ReadFile(file), "not a socket");
}

TEST_F(ProcessTest, ChecksItsConfiguration) {
  const TemporaryFolder& folder = daemon().folder();
  struct Case {
    std::vector<std::string> flags;
    int status;
    const char* output;
  };
  const std::string unknown = folder.Write("unknown.conf", "max_sessions: 3\nmax_sesions: 4\n");
  const std::string good = folder.Write("good.conf",
                                        "max_sessions: 3\npool { name: \"a\" layers: 1 row_layout: ROW_LAYOUT_LINEAR "
                                        "row_bytes: 16 blocks: 4 }\n");
  const std::string bad_pool = folder.Write("pool.conf",
                                            "pool { name: \"a\" layers: 1 row_layout: ROW_LAYOUT_LINEAR row_bytes: 18 "
                                            "blocks: 4 }\n");
  for (const Case& c :
       {Case{{"--config=" + unknown}, 2, "max_sesions"},
        Case{{"--config=" + unknown, "--check-config"}, 2, "max_sesions"},
        Case{{"--config=" + good, "--check-config"}, 0, ""},
        Case{{"--config=" + bad_pool, "--check-config"}, 2, "row_bytes"},
        Case{{"--config=" + folder.File("missing.conf")}, 2, "missing.conf"},
        Case{{"--max-sessions=0"}, 2, "max_sessions"}, Case{{"--max-sessions=4097"}, 2, "4096"},
        Case{{"--no-such-flag=1"}, 2, "no-such-flag"}, Case{{"--tcp-address=127.0.0.1:0"}, 2, "insecure_loopback"},
        Case{{"--tcp-address=0.0.0.0:0", "--insecure-loopback"}, 2, "loopback"}, Case{{"--version"}, 0, "0."},
        Case{{"--help"}, 0, "--drain-grace-ms"}}) {
    const Finished run = RunToEnd(Command(c.flags), folder);
    EXPECT_EQ(run.status, c.status) << ::testing::PrintToString(c.flags) << run.output;
    EXPECT_THAT(run.output, HasSubstr(c.output));
  }
  // What it prints is what it reads.
  const Finished printed = RunToEnd(Command({"--config=" + good, "--print-config", "--max-batch-items=7"}), folder);
  ASSERT_EQ(printed.status, 0) << printed.output;
  const std::string again = folder.Write("printed.conf", printed.output);
  const Finished reprinted = RunToEnd(Command({"--config=" + again, "--print-config"}), folder);
  EXPECT_EQ(reprinted.output, printed.output);
  EXPECT_THAT(printed.output, HasSubstr("max_batch_items: 7"));
}

TEST_F(ProcessTest, StartsWithThePoolsOfItsConfiguration) {
  const std::string config = daemon().folder().Write(
      "pools.conf", "pool { name: \"a\" layers: 2 row_layout: ROW_LAYOUT_LINEAR row_bytes: 16 blocks: 4 }\n");
  TestDaemon other({"--config=" + config});
  const auto pools = other.Connect().ListPools();
  ASSERT_TRUE(pools.ok());
  ASSERT_EQ(pools->pools_size(), 1);
  EXPECT_EQ(pools->pools(0).spec().name(), "a");
  EXPECT_EQ(pools->pools(0).usage().free_blocks(), 4u);
  EXPECT_EQ(other.Stop(), 0) << other.process().Output();
}

TEST_F(ProcessTest, AnswersHealthChecksPerService) {
  const auto channel = Channel();
  for (const std::string service :
       {"", "stoker.v1.Pools", "stoker.v1.Sessions", "stoker.v1.Sequences", "stoker.v1.Residency", "stoker.v1.Admin"}) {
    std::string reply;
    const absl::Status status = RawBytesCall(channel, "/grpc.health.v1.Health/Check", HealthRequest(service), &reply);
    EXPECT_TRUE(status.ok()) << service << status;
    EXPECT_EQ(reply, kHealthServing) << service;
  }
  EXPECT_EQ(RawBytesCall(channel, "/grpc.health.v1.Health/Check", HealthRequest("stoker.v1.None"), nullptr).code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ProcessTest, ListsItsServicesByReflection) {
  std::string reply;
  const absl::Status status = RawBytesCall(Channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                           std::string("\x3a\x01*", 3), &reply);
  EXPECT_TRUE(status.ok()) << status;
  for (const char* service : {"stoker.v1.Pools", "stoker.v1.Sessions", "stoker.v1.Sequences", "stoker.v1.Residency",
                              "stoker.v1.Admin", "grpc.health.v1.Health"}) {
    EXPECT_THAT(reply, HasSubstr(service));
  }
}

TEST_F(ProcessTest, LogsJsonAndScrapesWhatItReplied) {
  v1::LookupCounts sums;
  uint64_t gathered = 0;
  Rank rank(client(), pool_, AttachTo(pool_, "rank-1", 8, 32), {});
  const Sequence sequence = rank.Open(MakeTokens(1, 200), 230);
  for (uint32_t step = 0; step < 30; ++step) {
    Sequence growing = sequence;
    growing.tokens.resize(201 + step, 5);
    std::vector<int32_t> entries;
    for (int32_t k = 0; k < 12; ++k) entries.push_back((static_cast<int32_t>(step) * 3 + k * k) % 200);
    // One beyond the end, none, the newest, a repeat of a row that is in no page.
    entries.insert(entries.end(), {900, -1, static_cast<int32_t>(200 + step), entries[11]});
    const std::vector<BatchRow> batch = {{&growing, 201 + step, true, true, {-1, 3}}};
    const StepOutcome outcome = rank.Step(batch, {entries}, 16);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    const v1::LookupCounts& counts = outcome.response.groups(0).counts(0);
    sums.set_hot(sums.hot() + counts.hot());
    sums.set_newest(sums.newest() + counts.newest());
    sums.set_resident(sums.resident() + counts.resident());
    sums.set_miss(sums.miss() + counts.miss());
    sums.set_duplicate(sums.duplicate() + counts.duplicate());
    sums.set_invalid(sums.invalid() + counts.invalid());
    gathered += outcome.response.gathered_bytes();
  }
  auto series = Scrape(daemon().metrics_port());
  const auto lookups = [&](const char* outcome) {
    return series.at(absl::StrCat("stoker_lookups_total{pool=\"p\",outcome=\"", outcome, "\"}"));
  };
  EXPECT_EQ(lookups("hot"), sums.hot());
  EXPECT_EQ(lookups("newest"), sums.newest());
  EXPECT_EQ(lookups("resident"), sums.resident());
  EXPECT_EQ(lookups("miss"), sums.miss());
  EXPECT_EQ(lookups("duplicate"), sums.duplicate());
  EXPECT_EQ(lookups("invalid"), sums.invalid());
  for (const char* outcome : {"hot", "newest", "resident", "miss", "duplicate", "invalid"}) {
    EXPECT_GT(lookups(outcome), 0) << outcome;
  }
  EXPECT_EQ(series.at("stoker_gathered_bytes_total{pool=\"p\"}"), static_cast<double>(gathered));
  EXPECT_EQ(gathered, uint64_t{sums.miss()} * 2 * 48);
  EXPECT_EQ(series.at("stoker_committed_bytes_total{pool=\"p\"}"), 30 * 2 * 48);
  EXPECT_EQ(series.at("stoker_stored_bytes_total{pool=\"p\"}"), 200 * 2 * 48);
  EXPECT_EQ(series.at("stoker_lru_repairs_total{pool=\"p\"}"), 0);
  EXPECT_EQ(series.at("stoker_sessions"), 1);
  const auto listed = client().ListSessions();
  ASSERT_TRUE(listed.ok());
  EXPECT_EQ(listed->sessions(0).steps(), 30u);
  EXPECT_EQ(listed->sessions(0).lookups().miss(), sums.miss());
  EXPECT_EQ(listed->sessions(0).lookups().hot(), sums.hot());

  int lines = 0;
  for (const absl::string_view line : absl::StrSplit(daemon().process().Output(), '\n', absl::SkipEmpty())) {
    google::protobuf::Struct parsed;
    const std::string text(line);
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(text, &parsed).ok()) << text;
    EXPECT_TRUE(parsed.fields().contains("message") && parsed.fields().contains("level")) << text;
    ++lines;
  }
  EXPECT_GE(lines, 2);
}

// Runs steps from a thread until one fails, and tells how many went well.
class Stepper {
 public:
  Stepper(const client::Client& client, const v1::PoolSpec& pool, const std::string& name)
      : rank_(client, pool, AttachTo(pool, name, 2, 64, 16, 512), WithoutReattach()) {
    sequence_ = rank_.Open(MakeTokens(9, 256), 256);
    thread_ = std::thread([this] { Run(); });
  }
  ~Stepper() { Join(); }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  int steps() const { return steps_; }
  int wrong() const { return wrong_; }
  absl::Status end() const { return end_; }

 private:
  void Run() {
    for (;; ++steps_) {
      std::vector<int32_t> entries;
      for (int32_t k = 0; k < 16; ++k) entries.push_back((steps_ * 5 + k * 11) % 255);
      const std::vector<BatchRow> batch = {{&sequence_, 256}};
      const StepOutcome outcome = rank_.Step(batch, {entries}, 16);
      if (end_ = outcome.status; !end_.ok()) return;
      for (size_t k = 0; k < 16; ++k) {
        wrong_ += rank_.ArenaRow(1, static_cast<uint32_t>(outcome.hot_rows[0][k])) !=
                  RowOf(rank_.pool(), 1, sequence_.tokens[static_cast<size_t>(entries[k])]);
      }
    }
  }

  Rank rank_;
  Sequence sequence_;
  std::atomic<int> steps_{0};
  std::atomic<int> wrong_{0};
  absl::Status end_;
  std::thread thread_;
};

TEST_F(ProcessTest, EndsWellOnSignalsWhileStepsRun) {
  for (const int signal : {SIGTERM, SIGINT}) {
    TestDaemon other({"--drain-grace-ms=700"});
    const client::Client client = other.Connect();
    v1::CreatePoolRequest create;
    *create.mutable_spec() = pool_;
    ASSERT_TRUE(client.CreatePool(create).ok());
    Stepper a(client, pool_, "a"), b(client, pool_, "b");
    ASSERT_TRUE(Eventually(absl::Seconds(20), [&] { return a.steps() > 20 && b.steps() > 20; }));
    const absl::Time begin = absl::Now();
    other.process().Signal(signal);
    const std::optional<int> status = other.process().Wait(absl::Seconds(20));
    EXPECT_EQ(status.value_or(-1), 0) << other.process().Output();
    // The grace time, the time that calls get to notice, and what a loaded machine needs.
    EXPECT_LT(absl::Now() - begin, absl::Milliseconds(700) + absl::Seconds(6));
    a.Join();
    b.Join();
    EXPECT_EQ(a.wrong() + b.wrong(), 0);
    // A step ends well or is refused; none is cut off in the middle.
    for (const Stepper* stepper : {&a, &b}) {
      EXPECT_TRUE(stepper->end().code() == absl::StatusCode::kUnavailable ||
                  stepper->end().code() == absl::StatusCode::kFailedPrecondition)
          << stepper->end();
    }
    EXPECT_THAT(other.process().Output(), HasSubstr("\"stopped\""));
  }
}

TEST_F(ProcessTest, EndsQuicklyWhenNothingRuns) {
  TestDaemon other({"--drain-grace-ms=60000"});
  const client::Client client = other.Connect();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = pool_;
  ASSERT_TRUE(client.CreatePool(create).ok());
  Rank rank(client, pool_, AttachTo(pool_, "idle"), WithoutReattach());
  auto stream = rank.session().RunSteps();  // open and idle
  ASSERT_TRUE(stream.ok());
  const absl::Time begin = absl::Now();
  EXPECT_EQ(other.Stop(), 0) << other.process().Output();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
}

TEST_F(ProcessTest, SaysThatItDrainsBeforeItStops) {
  TestDaemon other({"--drain-grace-ms=4000"});
  const client::Client client = other.Connect();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = pool_;
  ASSERT_TRUE(client.CreatePool(create).ok());
  const auto channel = grpc::CreateChannel(other.address(), grpc::InsecureChannelCredentials());
  Stepper stepper(client, pool_, "a");
  ASSERT_TRUE(Eventually(absl::Seconds(20), [&] { return stepper.steps() > 5; }));
  other.process().Signal(SIGTERM);
  EXPECT_TRUE(Eventually(absl::Seconds(3), [&] {
    std::string reply;
    return RawBytesCall(channel, "/grpc.health.v1.Health/Check", "", &reply).ok() && reply == kHealthNotServing;
  }));
  const auto series = Scrape(other.metrics_port());
  EXPECT_EQ(series.at("stoker_draining"), 1);
  EXPECT_EQ(other.process().Wait(absl::Seconds(20)).value_or(-1), 0);
}

TEST_F(ProcessTest, AnswersScrapesAndHealthWhileTheDataPathIsBusy) {
  // Stores of 8 MiB each keep both threads of the backend at work.
  v1::PoolSpec large = CreatePool(LinearPool("large", 8, 1024, 80));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  std::atomic<int> stores{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      v1::AttachRequest request = AttachTo(large, absl::StrCat("busy", t), 1, 64, 16, 256);
      Rank rank(client(), large, request);
      Sequence sequence = rank.Open(MakeTokens(static_cast<uint64_t>(t), 256), 256);
      while (!stop) stores += rank.Store(sequence, 0, 256).ok();
    });
  }
  const auto channel = Channel();
  ASSERT_TRUE(Eventually(absl::Seconds(20), [&] { return stores > 4; }));
  absl::Duration slowest;
  for (int i = 0; i < 20; ++i) {
    const absl::Time begin = absl::Now();
    EXPECT_FALSE(Scrape(daemon().metrics_port()).empty());
    std::string reply;
    EXPECT_TRUE(RawBytesCall(channel, "/grpc.health.v1.Health/Check", "", &reply).ok());
    slowest = std::max(slowest, absl::Now() - begin);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(slowest, absl::Seconds(5));
}

}  // namespace
}  // namespace stoker::system_test
