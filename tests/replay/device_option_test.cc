#include "client/replay/device_option.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

const std::string kFirst = "GPU-00000000-1111-2222-3333-444444444444";
const std::string kSecond = "GPU-00000000-1111-2222-3333-555555555555";

TEST(DeviceOptionTest, Form) {
  for (const std::string& good : std::vector<std::string>{"auto", "cpu", "cuda", "cuda:0", "cuda:12", "cuda:all",
                                                          "cuda:" + kFirst, "cuda:1,cuda:" + kFirst}) {
    EXPECT_TRUE(CheckDeviceForm(good).ok()) << good;
  }
  for (const char* bad : {"", "gpu", "cuda:", "cuda0", "cuda:-1", "cuda:+1", "cuda:x", "cuda,", "cuda,cpu", "auto,cuda",
                          "CPU", " cuda"}) {
    EXPECT_EQ(CheckDeviceForm(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_FALSE(NamesGpu("auto"));
  EXPECT_FALSE(NamesGpu("cpu"));
  EXPECT_TRUE(NamesGpu("cuda"));
}

TEST(DeviceOptionTest, ChoosesAmongADaemonsDevices) {
  const std::vector<std::string> gpus = {kFirst, kSecond};
  EXPECT_EQ(*ChooseDevice("auto", gpus, 3), kFirst);
  EXPECT_EQ(*ChooseDevice("auto", {"cpu"}, 0), "cpu");
  EXPECT_EQ(*ChooseDevice("cpu", {"cpu"}, 7), "cpu");
  EXPECT_EQ(*ChooseDevice("cuda", gpus, 1), kFirst);
  EXPECT_EQ(*ChooseDevice("cuda:1", gpus, 0), kSecond);
  EXPECT_EQ(*ChooseDevice("cuda:" + kSecond, gpus, 0), kSecond);
  EXPECT_EQ(*ChooseDevice("cuda:1,cuda:0", gpus, 0), kSecond);
  for (uint32_t process = 0; process < 4; ++process) {
    EXPECT_EQ(*ChooseDevice("cuda:all", gpus, process), gpus[process % 2]);
  }
}

TEST(DeviceOptionTest, ADeviceThatIsNotThere) {
  for (const char* option : {"cuda", "cuda:0", "cuda:all", "cuda:GPU-00000000-1111-2222-3333-444444444444"}) {
    const auto chosen = ChooseDevice(option, {"cpu"}, 0);
    EXPECT_EQ(chosen.status().code(), absl::StatusCode::kNotFound) << option;
    EXPECT_THAT(std::string(chosen.status().message()),
                HasSubstr(std::string("--device is \"") + option + "\"; the daemon has cpu"));
  }
  EXPECT_FALSE(ChooseDevice("cpu", {kFirst}, 0).ok());
  EXPECT_FALSE(ChooseDevice("cuda:2", {kFirst, kSecond}, 0).ok());
  EXPECT_FALSE(ChooseDevice("cuda:1,cuda:2", {kFirst, kSecond}, 0).ok());
  EXPECT_FALSE(ChooseDevice("auto", {}, 0).ok());
}

}  // namespace
}  // namespace stoker::replay
