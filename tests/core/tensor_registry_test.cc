#include "server/core/tensor_registry.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/core/descriptor_offers.h"

namespace stoker::core {
namespace {

using ::testing::HasSubstr;

constexpr SessionId kSession{7};

std::unique_ptr<Tensor> NewTensor() { return std::make_unique<Tensor>(); }

TEST(TensorRegistryTest, GivesIdsThatNobodyHadBefore) {
  TensorRegistry registry(kSession, {.max_tensors = 2, .max_bytes = 100});
  std::set<uint64_t> seen;
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(registry.Reserve(10), absl::OkStatus());
    const TensorId id = registry.Add(NewTensor());
    EXPECT_TRUE(seen.insert(id.value).second);
    EXPECT_EQ(id.session(), 7u);
    EXPECT_TRUE(registry.Find(id).ok());
    EXPECT_TRUE(registry.Remove(id).ok());
    registry.Release(10);
    EXPECT_EQ(registry.Find(id).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(registry.Remove(id).status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(TensorRegistryTest, KnowsItsOwnIdsOnly) {
  TensorRegistry registry(kSession, {.max_tensors = 2, .max_bytes = 100});
  ASSERT_EQ(registry.Reserve(10), absl::OkStatus());
  const TensorId id = registry.Add(NewTensor());
  for (const TensorId other : {TensorId{0}, TensorId{id.value + 1}, TensorId{id.number()},
                               TensorId::Make(SessionId{8}, id.number()), TensorId{UINT64_MAX}}) {
    EXPECT_EQ(registry.Find(other).status().code(), absl::StatusCode::kNotFound) << other.value;
    EXPECT_EQ(registry.Remove(other).status().code(), absl::StatusCode::kNotFound) << other.value;
  }
  EXPECT_EQ(registry.count(), 1);
}

TEST(TensorRegistryTest, CountsPlacesUntilTheyAreReleased) {
  TensorRegistry registry(kSession, {.max_tensors = 2, .max_bytes = 100});
  EXPECT_THAT(std::string(registry.Reserve(101).message()), HasSubstr("size_bytes: 101 given, 0 are registered"));
  ASSERT_EQ(registry.Reserve(60), absl::OkStatus());
  EXPECT_EQ(registry.Reserve(41).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(registry.Reserve(40), absl::OkStatus());
  // Both are still being mapped.
  EXPECT_THAT(std::string(registry.Reserve(0).message()), HasSubstr("has 2 tensors registered, limit max_tensors 2"));
  const TensorId id = registry.Add(NewTensor());
  // Removed, and not yet unmapped.
  EXPECT_TRUE(registry.Remove(id).ok());
  EXPECT_EQ(registry.Reserve(0).code(), absl::StatusCode::kResourceExhausted);
  registry.Release(60);
  EXPECT_EQ(registry.bytes(), 40u);
  EXPECT_EQ(registry.Reserve(UINT64_MAX).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(registry.Reserve(60), absl::OkStatus());
}

FileDescriptor NewFile(int* number) {
  FileDescriptor file(memfd_create("offer", MFD_CLOEXEC));
  *number = file.get();
  return file;
}
bool IsOpen(int number) { return fcntl(number, F_GETFD) >= 0; }

TEST(DescriptorOffersTest, GivesEachOnce) {
  DescriptorOffers offers;
  const absl::Time now = absl::UnixEpoch();
  int first = -1, second = -1;
  const uint64_t a = offers.Add(NewFile(&first), now).value();
  const uint64_t b = offers.Add(NewFile(&second), now).value();
  EXPECT_NE(a, b);
  EXPECT_EQ(offers.Take(b, now)->get(), second);
  EXPECT_FALSE(IsOpen(second));  // its owner let go of it
  EXPECT_EQ(offers.Take(b, now).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(offers.Take(0, now).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(offers.Take(b + 1, now).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(IsOpen(first));
  EXPECT_TRUE(offers.Take(a, now).ok());
}

TEST(DescriptorOffersTest, KeepsFewAndNotForLong) {
  DescriptorOffers offers;
  const absl::Time now = absl::UnixEpoch();
  std::vector<int> numbers(DescriptorOffers::kMaxWaiting);
  uint64_t first = 0;
  for (int& number : numbers) {
    const uint64_t offer = offers.Add(NewFile(&number), now).value();
    if (first == 0) first = offer;
  }
  int refused = -1;
  EXPECT_EQ(offers.Add(NewFile(&refused), now).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(IsOpen(refused));
  const absl::Time late = now + DescriptorOffers::kTimeToTake;
  EXPECT_TRUE(offers.Take(first, late).ok());
  EXPECT_EQ(offers.Take(first + 1, late + absl::Nanoseconds(1)).status().code(), absl::StatusCode::kNotFound);
  for (const int number : numbers) EXPECT_FALSE(IsOpen(number));
  EXPECT_TRUE(offers.Add(NewFile(&refused), late).ok());
  offers.Expire(late + 2 * DescriptorOffers::kTimeToTake);
  EXPECT_FALSE(IsOpen(refused));
}

}  // namespace
}  // namespace stoker::core
