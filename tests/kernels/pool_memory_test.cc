// Pool memory on a driver that the test plays: which kind is taken, what is told, and that nothing is left when any
// call fails.
#include "kernels/cuda/pool_memory.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/available_memory.h"
#include "tests/kernels/fake_driver.h"
#include "tests/kernels/fake_root.h"

namespace stoker::kernels::cuda {
namespace {

using testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGranularity = 2 * kMiB;

class PoolMemoryTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 9 * kMiB;  // no multiple of the granularity, nor of the chunk
  const PoolPlan plan_ = {4 * kMiB, 3, 2};

  absl::StatusOr<std::unique_ptr<Buffer>> Numa(const PhaseProgress& progress = nullptr) {
    return AllocateNumaPool(driver_.shared(), {0, 3}, kBytes, plan_, progress);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Registered(const PhaseProgress& progress = nullptr) {
    auto memory = bank_.Allocate("stoker-test", kBytes, cpu::MemoryBank::Sharing::kShared).value();
    return RegisterPool(driver_.shared(), {0}, std::move(memory), plan_, progress);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Best(PoolOptions options = {}) {
    options.progress = [this](const PoolProgress& progress) {
      memory_ = progress.memory;
      reason_ = progress.reason;
      return true;
    };
    return AllocatePinnedPool(driver_.shared(), &bank_, {0}, kBytes, options);
  }

  FakeDriver driver_{CU_MEM_LOCATION_TYPE_HOST_NUMA, kGranularity};
  FakeRoot root_;  // nothing in it: no limits, no huge pages
  cpu::MemoryBank bank_{root_.path()};
  std::string memory_, reason_;
};

TEST_F(PoolMemoryTest, NumaPoolIsOneRangeOfZeroesWithADescriptorAChunk) {
  const int before = OpenDescriptors();
  {
    const auto pool = Numa().value();
    EXPECT_EQ(pool->bytes(), kBytes);
    EXPECT_EQ(pool->descriptor(), -1);
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(pool->data()[i], std::byte{0});
    std::memset(pool->data(), 7, kBytes);
    const ExportedMemory exported = pool->exported();
    EXPECT_EQ(exported.kind, ExportedMemory::Kind::kCudaAllocation);
    ASSERT_EQ(exported.parts.size(), 3);
    EXPECT_EQ(exported.parts[0].bytes, 4 * kMiB);
    EXPECT_EQ(exported.parts[1].bytes, 4 * kMiB);
    EXPECT_EQ(exported.parts[2].bytes, 2 * kMiB);  // 9 MiB rounded up to the granularity
    for (const ExportedMemory::Part& part : exported.parts) {
      EXPECT_EQ(fcntl(part.descriptor, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
    // The CPU and both devices, for every chunk.
    EXPECT_THAT(
        driver_.accesses,
        testing::ElementsAre(std::set<std::pair<int, int>>{
            {CU_MEM_LOCATION_TYPE_DEVICE, 0}, {CU_MEM_LOCATION_TYPE_DEVICE, 3}, {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}}));
    EXPECT_EQ(driver_.calls("access"), 3);
  }
  EXPECT_TRUE(driver_.AllGivenBack());
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(PoolMemoryTest, RegisteredPoolIsPinnedInChunks) {
  const auto pool = Registered().value();
  EXPECT_GE(pool->descriptor(), 0);
  EXPECT_EQ(pool->exported().kind, ExportedMemory::Kind::kFile);
  const std::map<void*, size_t> want = {
      {pool->data(), 4 * kMiB}, {pool->data() + 4 * kMiB, 4 * kMiB}, {pool->data() + 8 * kMiB, kMiB}};
  EXPECT_EQ(driver_.registered, want);
}

TEST_F(PoolMemoryTest, NothingIsLeftWhenAnyCallFails) {
  const int before = OpenDescriptors();
  for (const char* call : {"granularity", "reserve", "create", "export", "map", "access", "register"}) {
    const bool numa = std::string(call) != "register";
    for (int nth = 0; nth < 4; ++nth) {
      SCOPED_TRACE(testing::Message() << call << " number " << nth);
      driver_.FailAt(call, nth);
      const absl::Status status = numa ? Numa().status() : Registered().status();
      const bool reached = driver_.calls(call) > nth;
      EXPECT_EQ(status.ok(), !reached) << status;
      EXPECT_TRUE(reached || nth > 0);
      EXPECT_EQ(status.code(), reached ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk) << status;
      EXPECT_TRUE(driver_.AllGivenBack());
      EXPECT_EQ(OpenDescriptors(), before);
    }
  }
}

TEST_F(PoolMemoryTest, TellsOfBothPhasesAndStopsInBoth) {
  for (const bool numa : {true, false}) {
    std::vector<std::pair<PoolPhase, size_t>> told;
    const auto record = [&](PoolPhase phase, size_t done_bytes) {
      told.emplace_back(phase, done_bytes);
      return true;
    };
    ASSERT_TRUE((numa ? Numa(record) : Registered(record)).ok());
    EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
    EXPECT_EQ(told.front(), std::make_pair(PoolPhase::kFault, size_t{0}));
    EXPECT_EQ(told.back(), std::make_pair(PoolPhase::kPin, kBytes));
    EXPECT_TRUE(std::count(told.begin(), told.end(), std::make_pair(PoolPhase::kFault, kBytes)) == 1);
    for (size_t allowed = 0; allowed < told.size(); ++allowed) {
      size_t calls = 0;
      const auto stop = [&](PoolPhase, size_t) { return calls++ < allowed; };
      EXPECT_EQ((numa ? Numa(stop) : Registered(stop)).status().code(), absl::StatusCode::kCancelled);
      EXPECT_EQ(calls, allowed + 1);
      EXPECT_TRUE(driver_.AllGivenBack());
    }
  }
}

TEST_F(PoolMemoryTest, PrefersTheDriversAllocations) {
  const auto pool = Best().value();
  EXPECT_EQ(pool->exported().kind, ExportedMemory::Kind::kCudaAllocation);
  EXPECT_THAT(memory_, HasSubstr("NUMA node"));
  EXPECT_EQ(reason_, "");
}

TEST_F(PoolMemoryTest, FallsBackWithAReason) {
  struct Case {
    const char* what;
    std::function<void(FakeDriver&)> break_it;
    const char* reason;
  };
  for (const Case& c :
       {Case{"attribute", [](FakeDriver& d) { d.supported = 0; }, "cuda:0 has no allocations on a host NUMA node"},
        Case{"node", [](FakeDriver& d) { d.node = -1; }, "the host NUMA node of cuda:0 is not known"},
        Case{"function", [](FakeDriver& d) { d.table().create = nullptr; }, "the driver has no cuMemCreate"},
        Case{"create", [](FakeDriver& d) { d.FailAt("create", 0); }, "cuMemCreate of 10485760 bytes: error 2"},
        Case{"access", [](FakeDriver& d) { d.FailAt("access", 0); }, "cuMemSetAccess of 10485760 bytes: error 2"}}) {
    SCOPED_TRACE(c.what);
    FakeDriver broken(CU_MEM_LOCATION_TYPE_HOST_NUMA, kGranularity);
    c.break_it(broken);
    PoolOptions options;
    std::string memory, reason;
    options.progress = [&](const PoolProgress& progress) {
      memory = progress.memory;
      reason = progress.reason;
      return true;
    };
    {
      const auto pool = AllocatePinnedPool(broken.shared(), &bank_, {0}, kBytes, options);
      ASSERT_TRUE(pool.ok()) << pool.status();
      EXPECT_EQ((*pool)->exported().kind, ExportedMemory::Kind::kFile);
      EXPECT_EQ(memory, "registered shared memory");
      EXPECT_THAT(reason, HasSubstr(c.reason));
    }
    EXPECT_TRUE(broken.AllGivenBack());
  }
}

// Where the machine has reserved pages they are taken; where only the figures say so, the kernel refuses them.
TEST_F(PoolMemoryTest, PrefersHugePagesToOtherSharedMemory) {
  root_.Write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3000000\n");
  driver_.supported = 0;
  const bool reserved = ReadFreeHugePageBytes() >= kBytes + 2 * kMiB;
  const auto pool = Best();
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(memory_, reserved ? "registered shared memory, 2 MiB pages" : "registered shared memory");
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ((*pool)->data()[i], std::byte{0});
  EXPECT_EQ((*pool)->exported().parts[0].bytes, reserved ? 10 * kMiB : kBytes);
}

TEST_F(PoolMemoryTest, AStopIsNoReasonToFallBack) {
  PoolOptions options;
  int calls = 0;
  options.progress = [&](const PoolProgress&) { return ++calls != 2; };  // would let the next kind pass
  const auto pool = AllocatePinnedPool(driver_.shared(), &bank_, {0}, kBytes, options);
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(driver_.calls("register"), 0);
  EXPECT_TRUE(driver_.AllGivenBack());
}

TEST_F(PoolMemoryTest, RefusesMoreThanThereIsWithoutTrying) {
  root_.Write("/proc/meminfo", "MemAvailable: 9000 kB\n");
  const auto pool = Best();
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(pool.status().message()),
              HasSubstr("asked for 9437184 bytes, available 9216000, limit MemAvailable"));
  EXPECT_EQ(driver_.calls("reserve") + driver_.calls("register"), 0);
}

TEST_F(PoolMemoryTest, SaysThatPinningIsLimited) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const rlimit small = {kMiB, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  driver_.supported = 0;
  driver_.FailAt("register", 0);
  const absl::Status status = Best().status();
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"asked for 9437184 bytes", "RLIMIT_MEMLOCK is 1048576 bytes", "LimitMEMLOCK",
                           "before: allocations on the GPU's NUMA node: cuda:0 has no"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST_F(PoolMemoryTest, ImportsBothKinds) {
  for (const bool numa : {true, false}) {
    const auto pool = (numa ? Numa() : Registered()).value();
    pool->data()[5 * kMiB] = std::byte{9};
    {
      const auto imported = ImportPool(driver_.shared(), {0}, pool->exported()).value();
      EXPECT_GE(imported->bytes(), kBytes);
      EXPECT_NE(imported->data(), pool->data());
      EXPECT_EQ(imported->data()[5 * kMiB], std::byte{9});
      imported->data()[kBytes - 1] = std::byte{11};
      EXPECT_EQ(imported->exported().kind, ExportedMemory::Kind::kNone);
    }
    EXPECT_EQ(pool->data()[kBytes - 1], std::byte{11});
  }
  EXPECT_TRUE(driver_.AllGivenBack());
  EXPECT_EQ(ImportPool(driver_.shared(), {0}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  ExportedMemory uneven{ExportedMemory::Kind::kCudaAllocation, {{1, 2 * kMiB}, {1, 4 * kMiB}}};
  EXPECT_EQ(ImportPool(driver_.shared(), {0}, uneven).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PoolMemoryTest, PartsAreFewWhateverTheSize) {
  for (const size_t gib : {1, 63, 64, 65, 200, 2048}) {
    const size_t bytes = gib << 30;
    const PoolPlan plan = PlanNumaPool(bytes);
    EXPECT_LE((bytes + plan.chunk_bytes - 1) / plan.chunk_bytes, kMaxParts) << gib;
    EXPECT_EQ(plan.chunk_bytes % (1 << 30), 0);
  }
}

}  // namespace
}  // namespace stoker::kernels::cuda
