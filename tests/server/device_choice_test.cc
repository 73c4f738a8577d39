#include "server/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stoker::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kUuid0[] = "GPU-00000000-1111-2222-3333-444444444444";
constexpr char kUuid1[] = "GPU-abcdef01-1111-2222-3333-444444444444";

absl::StatusOr<std::vector<Gpu>> TwoGpus() { return std::vector<Gpu>{{0, kUuid0, "One"}, {1, kUuid1, "Two"}}; }
absl::StatusOr<std::vector<Gpu>> NoGpus() { return absl::NotFoundError("no GPU can be used: no driver"); }

// UUIDs of the GPUs chosen, or the error's message.
std::vector<std::string> Chosen(const std::string& device, const absl::StatusOr<std::vector<Gpu>>& gpus = TwoGpus()) {
  const absl::StatusOr<DeviceChoice> choice = ChooseDevices(device, gpus);
  if (!choice.ok()) return {std::string(choice.status().message())};
  std::vector<std::string> uuids;
  for (const Gpu& gpu : choice->gpus) uuids.push_back(gpu.uuid);
  EXPECT_FALSE(choice->reason.empty());
  return uuids;
}

TEST(DeviceChoiceTest, AutoTakesTheFirstGpuOrTheCpuAndSaysWhy) {
  EXPECT_THAT(Chosen("auto"), ::testing::ElementsAre(kUuid0));
  EXPECT_THAT(ChooseDevices("auto", TwoGpus())->reason, HasSubstr("found cuda:0 (GPU-00000000"));
  EXPECT_THAT(Chosen("auto", NoGpus()), ::testing::IsEmpty());
  EXPECT_THAT(ChooseDevices("auto", NoGpus())->reason, HasSubstr("no driver"));
  EXPECT_THAT(Chosen("auto", std::vector<Gpu>()), ::testing::IsEmpty());
}

TEST(DeviceChoiceTest, CpuNeedsNoGpuAndTakesNone) {
  EXPECT_THAT(Chosen("cpu"), ::testing::IsEmpty());
  EXPECT_THAT(Chosen("cpu", NoGpus()), ::testing::IsEmpty());
}

TEST(DeviceChoiceTest, GpusAreNamedByOrdinalUuidOrAll) {
  EXPECT_THAT(Chosen("cuda"), ::testing::ElementsAre(kUuid0));
  EXPECT_THAT(Chosen("cuda:1"), ::testing::ElementsAre(kUuid1));
  EXPECT_THAT(Chosen(std::string("cuda:") + kUuid1), ::testing::ElementsAre(kUuid1));
  EXPECT_THAT(Chosen("cuda:GPU-ABCDEF01-1111-2222-3333-444444444444"), ::testing::ElementsAre(kUuid1));
}

TEST(DeviceChoiceTest, ListsKeepTheirOrder) {
  EXPECT_THAT(Chosen("cuda:all"), ::testing::ElementsAre(kUuid0, kUuid1));
  EXPECT_THAT(Chosen(std::string("cuda:1,cuda:") + kUuid0), ::testing::ElementsAre(kUuid1, kUuid0));
}

TEST(DeviceChoiceTest, AGpuThatIsNotThereIsAnErrorWithFieldValueAndReason) {
  for (const char* device : {"cuda", "cuda:0", "cuda:all", "cuda:GPU-00000000-1111-2222-3333-444444444444"}) {
    const absl::Status status = ChooseDevices(device, NoGpus()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << device;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("device: \""), HasSubstr(device), HasSubstr("no driver")));
  }
  for (const char* device : {"cuda:2", "cuda:0,cuda:7", "cuda:GPU-00000000-0000-0000-0000-000000000000"}) {
    const absl::Status status = ChooseDevices(device, TwoGpus()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << device;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("is not there"), HasSubstr(kUuid0), HasSubstr(kUuid1)));
  }
}

TEST(DeviceChoiceTest, AGpuMayBeNamedOnceOnly) {
  for (const std::string& device :
       {std::string("cuda,cuda:0"), std::string("cuda:all,cuda:1"), std::string("cuda:0,cuda:") + kUuid0}) {
    const absl::Status status = ChooseDevices(device, TwoGpus()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << device;
    EXPECT_THAT(std::string(status.message()), HasSubstr("twice")) << device;
  }
}

TEST(DeviceChoiceTest, OtherFormsAreRefusedWithTheValue) {
  for (const char* device :
       {"", "tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1024", "cuda:99999999999", "cudax", "cuda0", "cuda:0,",
        ",cuda:0", "cuda:0,cpu", "auto,cuda", "cuda:0 ,cuda:1", "CUDA", "cuda:GPU-1",
        "cuda:GPU-0000000g-1111-2222-3333-444444444444", "GPU-00000000-1111-2222-3333-444444444444"}) {
    EXPECT_EQ(CheckDeviceForm(device).code(), absl::StatusCode::kInvalidArgument) << device;
    const absl::Status status = ChooseDevices(device, TwoGpus()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << device;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("device: \""), HasSubstr(device))) << device;
  }
}

}  // namespace
}  // namespace stoker::server
