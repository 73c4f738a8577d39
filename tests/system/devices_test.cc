// A daemon with several devices that do not reach the memory of messages. The other suites run on it as well, as
// NAME_bounced; here is what they do not see.
#include <signal.h>

#include <future>

#include "absl/strings/match.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMessageBytes = 1 << 20;

class DevicesTest : public DaemonTest {
 protected:
  DevicesTest()
      : DaemonTest({absl::StrCat("--max-message-bytes=", kMessageBytes)}),
        pool_(CreatePool(LinearPool("p", 4, 656, 512))) {}

  v1::AttachRequest On(const std::string& device, const std::string& name) const {
    v1::AttachRequest request = AttachTo(pool_, name, 8, 64, 16, 512);
    request.set_device(device);
    return request;
  }

  const v1::PoolSpec pool_;
};

TEST_F(DevicesTest, SessionsChooseADeviceByName) {
  const auto status = client().GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_THAT(status->devices(), ElementsAre("GPU-first", "GPU-second"));
  Rank any(client(), pool_, On("", "any")), second(client(), pool_, On("GPU-second", "second"));
  EXPECT_EQ(any.session().info().device(), "GPU-first");
  EXPECT_EQ(second.session().info().device(), "GPU-second");
  const auto sessions = client().ListSessions();
  ASSERT_TRUE(sessions.ok());
  for (const v1::SessionInfo& info : sessions->sessions()) {
    EXPECT_EQ(info.device(), info.name() == "any" ? "GPU-first" : "GPU-second");
  }
  auto series = Scrape(daemon().metrics_port());
  EXPECT_EQ(series["stoker_device_info{device=\"GPU-first\",backend=\"cuda\"}"], 1);
  EXPECT_EQ(series["stoker_device_info{device=\"GPU-second\",backend=\"cuda\"}"], 1);
}

TEST_F(DevicesTest, ADeviceThatIsNotThereIsRefusedWithThoseThatAre) {
  for (const std::string device : {"cpu", "GPU-third", "GPU-first ", "\n"}) {
    const absl::Status status = client().Attach(On(device, "rank")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("device: \""), HasSubstr("GPU-first, GPU-second")));
  }
}

TEST_F(DevicesTest, OnePoolServesAllDevices) {
  Rank writer(client(), pool_, On("GPU-first", "writer")), reader(client(), pool_, On("GPU-second", "reader"));
  const Tokens tokens = MakeTokens(7, 200);
  const Sequence written = writer.Open(tokens, 200, "shared");
  const Sequence read = reader.Open(tokens, 200, "shared");
  EXPECT_EQ(read.id, written.id);
  std::vector<int32_t> positions;
  for (int32_t k = 0; k < 16; ++k) positions.push_back(k * 11);
  for (auto* user : {&writer, &reader}) {
    const std::vector<BatchRow> batch = {{user == &writer ? &written : &read, 200}};
    const StepOutcome outcome = user->Step(batch, {positions}, 16);
    user->CheckRows(batch, {positions}, 16, outcome);
    EXPECT_EQ(outcome.Sum(&v1::LookupCounts::miss), 16u);
  }
}

// Far more than the memory through which rows pass at a time: all are served, and each gets its own rows.
TEST_F(DevicesTest, MessagesWaitForEachOther) {
  constexpr uint32_t kRows = 380;  // 4 layers of 656 bytes each: just under a message
  static_assert(kRows * 4 * 656 < kMessageBytes - 4096);
  Rank rank(client(), pool_, On("GPU-second", "rank"));
  std::vector<Sequence> sequences;
  for (int i = 0; i < 8; ++i) {
    const Tokens tokens = MakeTokens(100 + i, kRows);
    const v1::AdmittedSequence admitted = rank.Admit(rank.Item(tokens, kRows));
    ASSERT_EQ(admitted.status().code(), 0) << admitted.status().message();
    sequences.push_back({admitted.sequence_id(), admitted.state_row(), tokens});
  }
  std::vector<std::future<absl::Status>> stores;
  for (const Sequence& sequence : sequences) {
    // Whole messages beside small ones.
    stores.push_back(std::async(std::launch::async, [&] { return rank.Store(sequence, 0, kRows); }));
  }
  for (auto& store : stores) {
    const absl::Status status = store.get();
    EXPECT_TRUE(status.ok()) << status;
  }
  std::vector<std::future<void>> reads;
  for (const Sequence& sequence : sequences) {
    reads.push_back(std::async(std::launch::async, [&] { rank.CheckStored(sequence, kRows); }));
  }
  for (auto& read : reads) read.get();
}

// Rows of a message are copied before the work that moves them, and an operation behind it sees them.
TEST_F(DevicesTest, AStoreAnswersWhenItsRowsAreThere) {
  Rank rank(client(), pool_, On("GPU-first", "rank"));
  const Sequence sequence = rank.Open(MakeTokens(9, 64), 128);
  for (uint32_t pass = 0; pass < 20; ++pass) {
    Sequence rewritten = sequence;
    rewritten.tokens = MakeTokens(200 + pass, 64);
    const absl::Status status = rank.Store(rewritten, 0, 64);
    ASSERT_TRUE(status.ok()) << status;
    rank.CheckStored(rewritten, 64);
    ASSERT_FALSE(HasFailure()) << pass;
  }
}

class LostDeviceTest : public ::testing::Test {
 protected:
  TestDaemon daemon_;
  const client::Client client_ = daemon_.Connect();
};

TEST_F(LostDeviceTest, TheDaemonTellsItsSessionsAndEndsWithAStatusOfItsOwn) {
  v1::CreatePoolRequest create;
  *create.mutable_spec() = LinearPool("p", 2, 48, 64);
  const auto pool = client_.CreatePool(create);
  ASSERT_TRUE(pool.ok()) << pool.status();
  absl::Mutex mutex;
  absl::Status end;
  client::SessionOptions options = WithoutReattach();
  options.on_ended = [&](const absl::Status& status) {
    absl::MutexLock lock(&mutex);
    end = status;
  };
  v1::AttachRequest request = AttachTo(pool->pool().spec(), "rank");
  Rank rank(client_, pool->pool().spec(), request, options);
  const Sequence sequence = rank.Open(MakeTokens(1, 32), 32);
  daemon_.process().Signal(SIGUSR2);
  EXPECT_EQ(daemon_.process().Wait(absl::Seconds(20)), 3) << daemon_.process().Output();
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] {
    absl::MutexLock lock(&mutex);
    return !end.ok();
  }));
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable) << end;
  EXPECT_THAT(std::string(end.message()), HasSubstr("device is lost"));
  EXPECT_THAT(daemon_.process().Output(),
              AllOf(HasSubstr("a device is lost; the process ends"), HasSubstr("a test took it away")));
  daemon_.Restart();
  EXPECT_EQ(daemon_.Stop(), 0);
}

}  // namespace
}  // namespace stoker::system_test
