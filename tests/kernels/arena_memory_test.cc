// Arenas with a descriptor on a driver that the test plays: what is asked of it, what is exported, and that nothing is
// left when any call fails.
#include "kernels/cuda/arena_memory.h"

#include <fcntl.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/fake_driver.h"

namespace stoker::kernels::cuda {
namespace {

using testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kDevice = 3;

class ArenaMemoryTest : public testing::Test {
 protected:
  explicit ArenaMemoryTest(size_t granularity = 64 << 10) : driver_(CU_MEM_LOCATION_TYPE_DEVICE, granularity) {
    driver_.node = kDevice;
  }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) {
    return AllocateArena(driver_.shared(), kDevice, bytes);
  }

  FakeDriver driver_;
};

TEST_F(ArenaMemoryTest, AnArenaIsOneAllocationOfTheDevice) {
  const int before = OpenDescriptors();
  {
    const auto arena = Allocate(5 * kMiB + 1).value();
    EXPECT_EQ(arena->bytes(), 5 * kMiB + 1);
    EXPECT_EQ(arena->descriptor(), -1);  // of no file that could be mapped as such
    EXPECT_EQ(arena->ipc_handle(), "");
    const ExportedMemory exported = arena->exported();
    EXPECT_EQ(exported.kind, ExportedMemory::Kind::kCudaAllocation);
    ASSERT_EQ(exported.parts.size(), 1);
    EXPECT_EQ(exported.parts[0].bytes, 6 * kMiB);
    EXPECT_EQ(fcntl(exported.parts[0].descriptor, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    std::memset(arena->data(), 7, 6 * kMiB);
    // That device alone.
    EXPECT_THAT(driver_.accesses,
                testing::ElementsAre(std::set<std::pair<int, int>>{{CU_MEM_LOCATION_TYPE_DEVICE, kDevice}}));
  }
  EXPECT_TRUE(driver_.AllGivenBack());
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(ArenaMemoryTest, SizesAreWholeMultiplesOf2MiB) {
  for (const size_t bytes : {size_t{1}, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1}) {
    EXPECT_EQ(Allocate(bytes).value()->exported().parts[0].bytes, bytes <= 2 * kMiB ? 2 * kMiB : 4 * kMiB) << bytes;
  }
  EXPECT_EQ(Allocate(0).status().code(), absl::StatusCode::kInvalidArgument);
  // Rounded up, it would be nothing.
  EXPECT_EQ(Allocate(~size_t{0}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ImportArena(driver_.shared(), kDevice, 0, ~size_t{0}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

class CoarseArenaMemoryTest : public ArenaMemoryTest {
 protected:
  CoarseArenaMemoryTest() : ArenaMemoryTest(32 * kMiB) {}
};

TEST_F(CoarseArenaMemoryTest, AndOfTheDevicesGranularity) {
  EXPECT_EQ(Allocate(33 * kMiB).value()->exported().parts[0].bytes, 64 * kMiB);
}

TEST_F(ArenaMemoryTest, NothingIsLeftWhenAnyCallFails) {
  const int before = OpenDescriptors();
  for (const char* call : {"granularity", "reserve", "create", "export", "map", "access"}) {
    SCOPED_TRACE(call);
    driver_.FailAt(call, 0);
    EXPECT_EQ(Allocate(kMiB).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(driver_.calls(call), 1);
    EXPECT_TRUE(driver_.AllGivenBack());
    EXPECT_EQ(OpenDescriptors(), before);
  }
  driver_.FailAt("", 0);
  const auto arena = Allocate(kMiB).value();
  const ExportedMemory::Part part = arena->exported().parts[0];
  const int with_arena = OpenDescriptors();
  for (const char* call : {"reserve", "import", "map", "access"}) {
    SCOPED_TRACE(call);
    driver_.FailAt(call, 0);
    EXPECT_EQ(ImportArena(driver_.shared(), kDevice, part.descriptor, part.bytes).status().code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(OpenDescriptors(), with_arena);
  }
}

TEST_F(ArenaMemoryTest, SaysWhatIsMissing) {
  struct Missing {
    std::function<void(FakeDriver&)> take_away;
    const char* reason;
  };
  for (const Missing& c :
       {Missing{[](FakeDriver& d) { d.supported = 0; }, "cuda:3 has no virtual memory management"},
        Missing{[](FakeDriver& d) { d.table().set_access = nullptr; }, "the driver has no cuMemSetAccess"},
        Missing{[](FakeDriver& d) {
                  d.table().device_get_attribute = [](int* value, CUdevice_attribute attribute, CUdevice device) {
                    EXPECT_EQ(device, kDevice);
                    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
                    return CUDA_SUCCESS;
                  };
                },
                "cuda:3 has no descriptors of allocations"}}) {
    FakeDriver driver(CU_MEM_LOCATION_TYPE_DEVICE, kMiB);
    c.take_away(driver);
    for (const absl::Status& status :
         {CheckArenaSupport(*driver.shared(), kDevice), AllocateArena(driver.shared(), kDevice, kMiB).status(),
          ImportArena(driver.shared(), kDevice, 0, kMiB).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.reason));
    }
    EXPECT_EQ(driver.calls("reserve"), 0);
  }
  EXPECT_EQ(CheckArenaSupport(*driver_.shared(), kDevice), absl::OkStatus());
}

TEST_F(ArenaMemoryTest, AnImporterKeepsTheMemoryAndNoOther) {
  auto arena = Allocate(3 * kMiB).value();
  arena->data()[3 * kMiB - 1] = std::byte{9};
  const ExportedMemory::Part part = arena->exported().parts[0];
  auto imported = ImportArena(driver_.shared(), kDevice, part.descriptor, part.bytes).value();
  EXPECT_NE(imported->data(), arena->data());
  EXPECT_EQ(imported->data()[3 * kMiB - 1], std::byte{9});
  imported->data()[0] = std::byte{11};
  EXPECT_EQ(arena->data()[0], std::byte{11});
  EXPECT_EQ(imported->exported().kind, ExportedMemory::Kind::kNone);
  arena.reset();
  const auto next = Allocate(3 * kMiB).value();
  next->data()[3 * kMiB - 1] = std::byte{1};
  EXPECT_EQ(imported->data()[3 * kMiB - 1], std::byte{9});
}

TEST_F(ArenaMemoryTest, AnotherSizeIsRefused) {
  const auto arena = Allocate(3 * kMiB).value();
  const ExportedMemory::Part part = arena->exported().parts[0];
  for (const size_t bytes : {2 * kMiB, 6 * kMiB}) {
    const absl::Status status = ImportArena(driver_.shared(), kDevice, part.descriptor, bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuMemMap of"));
  }
  EXPECT_EQ(ImportArena(driver_.shared(), kDevice, part.descriptor, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stoker::kernels::cuda
