#include "kernels/cuda/device_waits.h"

#include <atomic>
#include <semaphore>
#include <thread>

#include "gtest/gtest.h"

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

}  // namespace
}  // namespace stoker::kernels::cuda
