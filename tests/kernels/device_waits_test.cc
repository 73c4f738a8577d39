#include "kernels/cuda/device_waits.h"

#include <atomic>
#include <semaphore>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/slabs.h"

namespace stoker::kernels::cuda {
namespace {

TEST(DeviceWaitsTest, NothingIsFreedWhileAStreamMayWait) {
  DeviceWaits waits;
  int freed = 0;
  const auto free = [&] { ++freed; };
  EXPECT_TRUE(waits.UnlessAny(free));
  EXPECT_EQ(freed, 1);
  waits.Add();
  waits.Add();
  EXPECT_FALSE(waits.UnlessAny(free));
  waits.Remove();
  EXPECT_FALSE(waits.UnlessAny(free));
  EXPECT_EQ(freed, 1);
  waits.Remove();
  EXPECT_TRUE(waits.UnlessAny(free));
  EXPECT_EQ(freed, 2);
}

TEST(DeviceWaitsTest, AStreamDoesNotBeginToWaitWhileSomethingIsFreed) {
  DeviceWaits waits;
  std::binary_semaphore frees(0), adds(0);
  std::atomic<bool> added = false;
  std::thread stream([&] {
    frees.acquire();
    adds.release();
    waits.Add();
    added = true;
  });
  EXPECT_TRUE(waits.UnlessAny([&] {
    frees.release();
    adds.acquire();
    // The other thread is before Add or in it: it cannot have come back.
    for (int i = 0; i < 1000; ++i) ASSERT_FALSE(added);
  }));
  stream.join();
  EXPECT_TRUE(added);
  EXPECT_FALSE(waits.UnlessAny([] {}));
}

// Who is refused sees that there is memory, and why it cannot be had.
TEST(DeviceWaitsTest, ARefusalNamesWhatIsKept) {
  const absl::Status refused = absl::ResourceExhaustedError("4096 bytes of device memory: out of memory");
  EXPECT_EQ(RefusedBesideKept(refused, 0), refused);
  EXPECT_EQ(RefusedBesideKept(absl::InternalError("a fault"), 2097152), absl::InternalError("a fault"));
  const absl::Status status = RefusedBesideKept(refused, 2097152);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("4096 bytes"), testing::HasSubstr("2097152 bytes"),
                             testing::HasSubstr("while a session waits")));
}

}  // namespace
}  // namespace stoker::kernels::cuda
