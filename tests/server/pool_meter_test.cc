// Lines that are due, and the seconds of phases.
#include "server/pool_meter.h"

#include "gtest/gtest.h"

namespace stoker::server {
namespace {

using Phase = core::PoolProgress::Phase;

class PoolMeterTest : public ::testing::Test {
 protected:
  std::optional<PoolMeter::Line> At(double seconds, Phase phase, int64_t done, const char* memory = "m",
                                    const char* reason = "") {
    now_ = absl::UnixEpoch() + absl::Seconds(seconds);
    return meter_.Observe("p", {phase, done, 10000000000, memory, reason});
  }

  absl::Time now_;
  PoolMeter meter_{[this] { return now_; }, absl::Seconds(3)};
};

TEST_F(PoolMeterTest, ALineEveryPeriod) {
  EXPECT_FALSE(At(10, Phase::kFault, 0));
  EXPECT_FALSE(At(12.9, Phase::kFault, 1000000000));
  const auto line = At(14, Phase::kFault, 2000000000);
  ASSERT_TRUE(line);
  EXPECT_EQ(line->phase, "fault");
  EXPECT_EQ(line->bytes, 2000000000);
  EXPECT_EQ(line->total_bytes, 10000000000);
  EXPECT_DOUBLE_EQ(line->percent, 20);
  EXPECT_DOUBLE_EQ(line->gb_per_second, 0.5);
  EXPECT_FALSE(At(16.9, Phase::kFault, 3000000000));
  EXPECT_TRUE(At(17, Phase::kFault, 4000000000));
  EXPECT_FALSE(At(18, Phase::kFault, 10000000000));
  const auto begin = At(20, Phase::kPin, 0);
  ASSERT_TRUE(begin);
  EXPECT_EQ(begin->phase, "pin");
  EXPECT_EQ(begin->gb_per_second, 0);
  EXPECT_FALSE(At(22, Phase::kPin, 10000000000));
  const PoolMeter::Summary summary = meter_.Finish("p");
  EXPECT_DOUBLE_EQ(summary.fault_seconds, 8);
  EXPECT_DOUBLE_EQ(summary.pin_seconds, 2);
  EXPECT_EQ(summary.memory, "m");
  EXPECT_EQ(summary.reason, "");
}

TEST_F(PoolMeterTest, WhatWasGivenUpDoesNotCount) {
  At(0, Phase::kFault, 0, "best");
  At(5, Phase::kFault, 10000000000, "best");
  At(5, Phase::kPin, 0, "best");
  At(6, Phase::kPin, 1, "best");
  At(7, Phase::kFault, 0, "good", "best: no");
  At(9, Phase::kFault, 10000000000, "good", "best: no");
  const PoolMeter::Summary summary = meter_.Finish("p");
  EXPECT_DOUBLE_EQ(summary.fault_seconds, 2);
  EXPECT_DOUBLE_EQ(summary.pin_seconds, 0);
  EXPECT_EQ(summary.memory, "good");
  EXPECT_EQ(summary.reason, "best: no");
}

TEST_F(PoolMeterTest, ForgetsFinishedPools) {
  At(0, Phase::kFault, 0);
  At(2, Phase::kFault, 1);
  EXPECT_EQ(meter_.Finish("p").memory, "m");
  EXPECT_EQ(meter_.Finish("p").memory, "");
  EXPECT_EQ(meter_.Finish("never seen").fault_seconds, 0);
}

}  // namespace
}  // namespace stoker::server
