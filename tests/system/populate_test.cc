// A real stokerd that populates a pool of 2 GB.
#include <signal.h>

#include "absl/strings/str_cat.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

// 2,097,152,000 bytes of rows: half a second of faults on a fast machine, two on a slow one.
constexpr char kPool[] = "--pool=name: \"kv\" layers: 2 row_layout: ROW_LAYOUT_LINEAR row_bytes: 1024 blocks: 16000";
// And what planes share: 128,000 words of sequences and 64 results of steps.
constexpr double kPoolBytes = 2097152000 + 128000 * 16 + 64 * 256;

double Metric(const TestDaemon& daemon, const std::string& name) { return Scrape(daemon.metrics_port()).at(name); }

TEST(PopulateTest, ListensFirstAndServesWhenThePoolIsThere) {
  TestDaemon daemon({"--populate-pools", kPool});
  const std::string log = daemon.process().Output();
  const size_t listening = log.find("\"listening\""), created = log.find("\"pool created\""),
               serving = log.find("\"serving\"");
  ASSERT_NE(created, std::string::npos) << log;
  EXPECT_LT(listening, created);
  EXPECT_LT(created, serving);
  EXPECT_EQ(daemon.LogField("pool created", "memory"), "shared memory");
  EXPECT_NE(daemon.LogField("pool created", "fault_seconds"), "0");
  EXPECT_EQ(Metric(daemon, "stoker_pool_populated_bytes{pool=\"kv\"}"), kPoolBytes);
  EXPECT_EQ(Metric(daemon, "stoker_pool_capacity_bytes{pool=\"kv\"}"), kPoolBytes);
  EXPECT_GE(Metric(daemon, "process_resident_memory_bytes"), kPoolBytes);
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
}

TEST(PopulateTest, TouchesNothingUnlessToldTo) {
  TestDaemon daemon({kPool});
  EXPECT_EQ(Metric(daemon, "stoker_pool_populated_bytes{pool=\"kv\"}"), 0);
  EXPECT_LT(Metric(daemon, "process_resident_memory_bytes"), kPoolBytes / 4);
  EXPECT_EQ(daemon.LogField("pool created", "fault_seconds"), "0");
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
}

class StartTest : public ::testing::Test {
 protected:
  // Before it serves, unlike TestDaemon.
  std::unique_ptr<ChildProcess> Start(const std::vector<std::string>& flags) {
    std::vector<std::string> arguments = {StokerdPath(), "--socket-path=" + folder_.File("s"), "--log-format=json",
                                          "--metrics-address=127.0.0.1:0"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    auto process = std::make_unique<ChildProcess>(arguments, folder_.File("log"));
    EXPECT_TRUE(process->AwaitOutput("\"listening\"", absl::Seconds(60))) << process->Output();
    return process;
  }
  TemporaryFolder folder_;
};

TEST_F(StartTest, EndsPromptlyWhileItPopulates) {
  const auto process = Start({"--populate-pools", kPool});
  const absl::Time begin = absl::Now();
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(absl::Seconds(30)).value_or(-1), 0) << process->Output();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  EXPECT_THAT(process->Output(), HasSubstr("\"stopped\""));
  EXPECT_THAT(process->Output(), ::testing::Not(HasSubstr("\"cannot start\"")));
}

TEST_F(StartTest, SaysHowMuchMemoryIsMissing) {
  // A thousand times as much as machines have; the daemon may hold it, the machine cannot.
  const auto process = Start({"--max-pool-bytes=1125899906842624",
                              "--pool=name: \"kv\" layers: 512 row_layout: ROW_LAYOUT_LINEAR row_bytes: 65536 "
                              "blocks: 320000"});
  EXPECT_EQ(process->Wait(absl::Seconds(30)).value_or(-1), 1) << process->Output();
  EXPECT_THAT(process->Output(),
              HasSubstr("pool kv: memory for stoker-pool: asked for 687194771570688 bytes, available"));
  EXPECT_THAT(process->Output(), HasSubstr(", limit "));
}

TEST_F(StartTest, EndsOnlyForASignalOfItsOwn) {
  const auto process = Start({});
  process->Signal(SIGUSR1);  // what the daemon tells itself with
  EXPECT_FALSE(process->Wait(absl::Milliseconds(300)).has_value()) << process->Output();
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(absl::Seconds(30)).value_or(-1), 0) << process->Output();
}

}  // namespace
}  // namespace stoker::system_test
