// Devices that fail the daemon. Needs bounced_daemon: its first device is lost on SIGUSR2.
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "absl/synchronization/mutex.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

TEST(SlowDeviceTest, TheDaemonDoesNotWaitForADeviceToEnd) {
  setenv("STOKER_TEST_SLOW_END", "1", /*overwrite=*/1);
  TestDaemon daemon;
  unsetenv("STOKER_TEST_SLOW_END");
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
  // It has cleaned up nonetheless.
  EXPECT_NE(access(daemon.socket().c_str(), F_OK), 0);
}

}  // namespace
}  // namespace stoker::system_test
