// Memory: what is asked for and refused, what the descriptors allow, and how the machine's figures are read.
#include "kernels/cpu/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

using testing::HasSubstr;

class BufferTest : public testing::TestWithParam<BackendCase> {
 protected:
  using Allocate = absl::StatusOr<std::unique_ptr<Buffer>> (Backend::*)(size_t);
  static std::vector<Allocate> All() {
    return {&Backend::AllocatePool, &Backend::AllocateShared, &Backend::AllocatePrivate, &Backend::AllocateHost};
  }
};
STOKER_FOR_EVERY_BACKEND(BufferTest);

TEST_P(BufferTest, MemoryIsZeroAndWritable) {
  const auto backend = GetParam().make(1);
  const auto stream = backend->CreateStream().value();
  for (const Allocate allocate : All()) {
    for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, size_t{5} << 20}) {
      const auto buffer = ((*backend).*allocate)(bytes).value();
      ASSERT_EQ(buffer->bytes(), bytes);
      std::vector<std::byte> host(bytes, std::byte{1});
      ASSERT_TRUE(stream->Copy(host.data(), buffer->data(), bytes).ok());
      ASSERT_TRUE(Finish(*stream).ok());
      ASSERT_EQ(std::count(host.begin(), host.end(), std::byte{0}), static_cast<int64_t>(bytes));
      std::fill(host.begin(), host.end(), std::byte{7});
      ASSERT_TRUE(stream->Copy(buffer->data(), host.data(), bytes).ok());
      ASSERT_TRUE(Finish(*stream).ok());
    }
  }
}

TEST_P(BufferTest, RefusesNothingAndTooMuch) {
  const auto backend = GetParam().make(1);
  for (const Allocate allocate : All()) {
    EXPECT_EQ(((*backend).*allocate)(0).status().code(), absl::StatusCode::kInvalidArgument);
    for (const size_t bytes : {size_t{1} << 46, std::numeric_limits<size_t>::max()}) {
      const absl::Status status = ((*backend).*allocate)(bytes).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("asked for " + std::to_string(bytes) + " bytes, available "));
    }
  }
}

TEST_P(BufferTest, DeviceHasAName) { EXPECT_FALSE(GetParam().make(1)->device().empty()); }

}  // namespace

namespace cpu {
namespace {

TEST(MemoryBankTest, SharedMemoryCanBeMappedButNotResized) {
  MemoryBank bank;
  const auto buffer = bank.Allocate("stoker-test", 10000, MemoryBank::Sharing::kShared).value();
  const int descriptor = buffer->descriptor();
  ASSERT_GE(descriptor, 0);
  EXPECT_EQ(fcntl(descriptor, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_NE(ftruncate(descriptor, 0), 0);
  EXPECT_NE(ftruncate(descriptor, 1 << 20), 0);
  struct stat file;
  ASSERT_EQ(fstat(descriptor, &file), 0);
  EXPECT_GE(file.st_size, 10000);
  EXPECT_THAT(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string(),
              HasSubstr("stoker-test"));
  void* const second = mmap(nullptr, 10000, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ASSERT_NE(second, MAP_FAILED);
  buffer->data()[9999] = std::byte{42};
  EXPECT_EQ(static_cast<std::byte*>(second)[9999], std::byte{42});
  munmap(second, 10000);
}

TEST(MemoryBankTest, PrivateMemoryHasNoDescriptor) {
  MemoryBank bank;
  EXPECT_EQ(bank.Allocate("stoker-test", 1, MemoryBank::Sharing::kPrivate).value()->descriptor(), -1);
}

// Memory that nobody has touched is not in the kernel's figures yet, but it is spoken for.
TEST(MemoryBankTest, UntouchedMemoryCountsAsUsed) {
  const uint64_t available = AvailableMemoryBytes();
  ASSERT_LT(available, std::numeric_limits<uint64_t>::max());
  MemoryBank bank;
  auto first = bank.Allocate("stoker-test", available / 4 * 3, MemoryBank::Sharing::kShared);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = bank.Allocate("stoker-test", available / 4 * 3, MemoryBank::Sharing::kShared);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("not touched yet"));
  first->reset();
  EXPECT_TRUE(bank.Allocate("stoker-test", available / 4 * 3, MemoryBank::Sharing::kShared).ok());
}

TEST(MemoryBankTest, BuffersOutliveTheirBank) {
  std::unique_ptr<Buffer> buffer;
  {
    MemoryBank bank;
    buffer = bank.Allocate("stoker-test", 100, MemoryBank::Sharing::kPrivate).value();
  }
  buffer->data()[0] = std::byte{1};
}

// A tree of made-up system files.
class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = testing::TempDir() + "/stoker_memory_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path file = path_ + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(AvailableMemoryTest, NothingToReadMeansNoLimit) {
  FakeRoot root;
  EXPECT_EQ(AvailableMemoryBytes(root.path()), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(ResidentBytes(root.path()), 0);
}

TEST(AvailableMemoryTest, TakesTheLeastOfMachineAndGroups) {
  FakeRoot root;
  root.Write("/proc/meminfo", "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    4000 kB\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 4000 * 1024);
  // Version 2, two levels below the root.
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  root.Write("/sys/fs/cgroup/a/b/memory.current", "1000\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 4000 * 1024);
  root.Write("/sys/fs/cgroup/a/memory.max", "3000000\n");
  root.Write("/sys/fs/cgroup/a/memory.current", "2000000\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 1000000);
  root.Write("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 1500000);
  root.Write("/sys/fs/cgroup/a/b/memory.max", "900\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 0) << "over its limit";
}

TEST(AvailableMemoryTest, ReadsVersionOneAndThePathOfTheHost) {
  FakeRoot root;
  root.Write("/proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/host/only\n0::/\n");
  root.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
  root.Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4500\n");
  root.Write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 200\n");
  EXPECT_EQ(AvailableMemoryBytes(root.path()), 700);
}

TEST(AvailableMemoryTest, ResidentIsAnonymousAndShared) {
  FakeRoot root;
  root.Write("/proc/self/status", "VmRSS: 99 kB\nRssAnon:\t     10 kB\nRssFile:  50 kB\nRssShmem:\t 5 kB\n");
  EXPECT_EQ(ResidentBytes(root.path()), 15 * 1024);
}

}  // namespace
}  // namespace cpu
}  // namespace stoker::kernels
