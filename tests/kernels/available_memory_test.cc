// How the machine's figures are read, from made-up files.
#include "kernels/available_memory.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/fake_root.h"

namespace stoker::kernels {
namespace {

using testing::HasSubstr;

TEST(AvailableMemoryTest, NothingToReadMeansNoLimit) {
  FakeRoot root;
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(ReadResidentBytes(root.path()), 0);
}

TEST(AvailableMemoryTest, TakesTheLeastOfMachineAndGroups) {
  FakeRoot root;
  root.Write("/proc/meminfo", "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    4000 kB\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 4000 * 1024);
  // Version 2, two levels below the root.
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  root.Write("/sys/fs/cgroup/a/b/memory.current", "1000\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 4000 * 1024);
  root.Write("/sys/fs/cgroup/a/memory.max", "3000000\n");
  root.Write("/sys/fs/cgroup/a/memory.current", "2000000\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 1000000);
  root.Write("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 1500000);
  root.Write("/sys/fs/cgroup/a/b/memory.max", "900\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 0) << "over its limit";
}

TEST(AvailableMemoryTest, ReadsVersionOneAndThePathOfTheHost) {
  FakeRoot root;
  root.Write("/proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/host/only\n0::/\n");
  root.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
  root.Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4500\n");
  root.Write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 200\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).bytes, 700);
}

TEST(AvailableMemoryTest, ResidentIsAnonymousAndShared) {
  FakeRoot root;
  root.Write("/proc/self/status", "VmRSS: 99 kB\nRssAnon:\t     10 kB\nRssFile:  50 kB\nRssShmem:\t 5 kB\n");
  EXPECT_EQ(ReadResidentBytes(root.path()), 15 * 1024);
}

TEST(AvailableMemoryTest, NamesTheLimitThatBinds) {
  FakeRoot root;
  EXPECT_EQ(ReadAvailableMemory(root.path()).limit, "none");
  root.Write("/proc/meminfo", "MemAvailable:    4000 kB\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).limit, "MemAvailable");
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/memory.max", "1000\n");
  root.Write("/sys/fs/cgroup/memory.current", "0\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).limit, "/sys/fs/cgroup/memory.max");
  root.Write("/sys/fs/cgroup/a/b/memory.max", "900\n");
  root.Write("/sys/fs/cgroup/a/b/memory.current", "0\n");
  EXPECT_EQ(ReadAvailableMemory(root.path()).limit, "/sys/fs/cgroup/a/b/memory.max");
}

TEST(AvailableMemoryTest, ChecksWithWhatIsNotTouchedYet) {
  FakeRoot root;
  root.Write("/proc/meminfo", "MemAvailable: 10 kB\n");
  EXPECT_TRUE(CheckAvailableMemory("x", 10240, 0, root.path()).ok());
  EXPECT_TRUE(CheckAvailableMemory("x", 240, 10000, root.path()).ok());
  for (const uint64_t untouched : {uint64_t{10000}, uint64_t{99999}}) {
    const absl::Status status = CheckAvailableMemory("x", 241, untouched, root.path());
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("memory for x: asked for 241 bytes, available "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("limit MemAvailable"));
  }
}

TEST(AvailableMemoryTest, FreeHugePagesAreThoseThatNobodyWasPromised) {
  FakeRoot root;
  EXPECT_EQ(ReadFreeHugePageBytes(root.path()), 0);
  root.Write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n");
  EXPECT_EQ(ReadFreeHugePageBytes(root.path()), 20 << 20);
  root.Write("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "7\n");
  EXPECT_EQ(ReadFreeHugePageBytes(root.path()), 6 << 20);
  root.Write("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "11\n");
  EXPECT_EQ(ReadFreeHugePageBytes(root.path()), 0);
}

}  // namespace
}  // namespace stoker::kernels
