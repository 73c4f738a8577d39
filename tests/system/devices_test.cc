// A daemon with several devices that do not reach the memory of messages: bounced_daemon, or the GPUs of this machine.
// The other suites run on both as well; here is what they do not see.
#include <future>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMessageBytes = 1 << 20;

class DevicesTest : public DaemonTest {
 protected:
  DevicesTest()
      : DaemonTest({absl::StrCat("--max-message-bytes=", kMessageBytes)}),
        pool_(CreatePool(LinearPool("p", 4, 656, 512))) {
    const auto status = client().GetStatus();
    EXPECT_TRUE(status.ok()) << status.status();
    if (status.ok()) devices_.assign(status->devices().begin(), status->devices().end());
  }

  // The same one where there is only one.
  const std::string& first() const { return devices_.front(); }
  const std::string& last() const { return devices_.back(); }

  v1::AttachRequest On(const std::string& device, const std::string& name) const {
    v1::AttachRequest request = AttachTo(pool_, name, 8, 64, 16, 512);
    request.set_device(device);
    return request;
  }

  const v1::PoolSpec pool_;
  std::vector<std::string> devices_;
};

TEST_F(DevicesTest, SessionsChooseADeviceByName) {
  EXPECT_THAT(devices_, ::testing::Each(::testing::StartsWith("GPU-")));
  Rank any(client(), pool_, On("", "any")), named(client(), pool_, On(last(), "named"));
  EXPECT_EQ(any.session().info().device(), first());
  EXPECT_EQ(named.session().info().device(), last());
  const auto sessions = client().ListSessions();
  ASSERT_TRUE(sessions.ok());
  for (const v1::SessionInfo& info : sessions->sessions()) {
    EXPECT_EQ(info.device(), info.name() == "any" ? first() : last());
  }
  auto series = Scrape(daemon().metrics_port());
  for (const std::string& device : devices_) {
    EXPECT_EQ(series[absl::StrCat("stoker_device_info{device=\"", device, "\",backend=\"cuda\"}")], 1);
  }
}

TEST_F(DevicesTest, ADeviceThatIsNotThereIsRefusedWithThoseThatAre) {
  for (const std::string& device : {std::string("cpu"), std::string("GPU-third"), first() + " ", std::string("\n")}) {
    const absl::Status status = client().Attach(On(device, "rank")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("device: \""), HasSubstr(absl::StrJoin(devices_, ", "))));
  }
}

TEST_F(DevicesTest, OnePoolServesAllDevices) {
  Rank writer(client(), pool_, On(first(), "writer")), reader(client(), pool_, On(last(), "reader"));
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
  Rank rank(client(), pool_, On(last(), "rank"));
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
  Rank rank(client(), pool_, On(first(), "rank"));
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

}  // namespace
}  // namespace stoker::system_test
