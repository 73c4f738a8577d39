// Memory: what is asked for and refused, what the descriptors allow, and pools that are populated.
#include "kernels/cpu/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/available_memory.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/fake_root.h"

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

TEST_P(BufferTest, SharesByADescriptorWhereItIsAskedTo) {
  const auto backend = GetParam().make(1);
  EXPECT_EQ(backend->NoSharing(Sharing::kDefault), "");
  EXPECT_EQ(backend->NoSharing(Sharing::kDescriptor), "");
  const auto memory = backend->AllocateShared(4097, Sharing::kDescriptor).value();
  EXPECT_EQ(memory->bytes(), 4097u);
  const ExportedMemory exported = memory->exported();
  EXPECT_NE(exported.kind, ExportedMemory::Kind::kNone);
  ASSERT_EQ(exported.parts.size(), 1u);
  EXPECT_GE(exported.parts[0].descriptor, 0);
  EXPECT_GE(exported.parts[0].bytes, 4097u);
  EXPECT_EQ(memory->ipc_handle(), "");
  if (backend->device() != "cpu") return;
  EXPECT_NE(backend->NoSharing(Sharing::kIpcHandle), "");
  EXPECT_EQ(backend->AllocateShared(4097, Sharing::kIpcHandle).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(BufferTest, PopulatesAPoolAndTellsOfIt) {
  const auto backend = GetParam().make(2);
  constexpr size_t kBytes = (size_t{200} << 20) + 5;
  std::vector<PoolProgress> told;
  PoolOptions options;
  options.populate = true;
  options.progress = [&](const PoolProgress& progress) {
    told.push_back(progress);
    return true;
  };
  const uint64_t before = ReadResidentBytes();
  const auto pool = backend->AllocatePool(kBytes, options).value();
  EXPECT_TRUE(backend->device() != "cpu" || ReadResidentBytes() >= before + kBytes);
  ASSERT_FALSE(told.empty());
  // In each phase from nothing to everything, and never back.
  for (size_t i = 0; i < told.size(); ++i) {
    EXPECT_EQ(told[i].total_bytes, kBytes);
    EXPECT_FALSE(told[i].memory.empty());
    if (i == 0 || told[i].phase != told[i - 1].phase) {
      EXPECT_EQ(told[i].done_bytes, 0);
      if (i == 0) continue;
      EXPECT_EQ(told[i - 1].done_bytes, kBytes);
      EXPECT_GT(told[i].phase, told[i - 1].phase);
    } else {
      EXPECT_GT(told[i].done_bytes, told[i - 1].done_bytes);
    }
  }
  EXPECT_EQ(told.back().done_bytes, kBytes);
}

TEST_P(BufferTest, StopsPopulatingAndGivesTheMemoryBack) {
  const auto backend = GetParam().make(2);
  constexpr size_t kBytes = size_t{1} << 30;
  const uint64_t before = ReadResidentBytes();
  int calls = 0;
  PoolOptions options;
  options.populate = true;
  options.progress = [&](const PoolProgress&) { return ++calls < 2; };
  EXPECT_EQ(backend->AllocatePool(kBytes, options).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 2);
  EXPECT_LT(ReadResidentBytes(), before + kBytes / 4);
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
  const uint64_t available = ReadAvailableMemory().bytes;
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

TEST(MemoryBankTest, RefusalNamesTheLimit) {
  FakeRoot root;
  root.Write("/proc/meminfo", "MemAvailable: 4000 kB\n");
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/a/memory.max", "3000000\n");
  root.Write("/sys/fs/cgroup/a/memory.current", "2000000\n");
  MemoryBank bank(root.path());
  EXPECT_TRUE(bank.Check("stoker-test", 1000000).ok());
  EXPECT_TRUE(bank.Allocate("stoker-test", 1000000, MemoryBank::Sharing::kShared).ok());
  for (const absl::Status& status : {bank.Check("stoker-test", 1000001),
                                     bank.Allocate("stoker-test", 1000001, MemoryBank::Sharing::kShared).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("asked for 1000001 bytes, available 1000000, limit /sys/fs/cgroup/a/memory.max"));
  }
}

// What the machine has none of is refused by name, and by the kernel where the figures are made up.
TEST(MemoryBankTest, HugePagesAreThoseThatAreReserved) {
  FakeRoot root;
  MemoryBank bank(root.path());
  EXPECT_EQ(bank.AllocateHugePages("stoker-test", 0).status().code(), absl::StatusCode::kInvalidArgument);
  absl::Status status = bank.AllocateHugePages("stoker-test", 1 << 20).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("asked for 1048576 bytes of 2 MiB pages, available 0"));
  root.Write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3000000\n");
  const size_t more_than_there_is = size_t{3000000} << 21;
  status = bank.AllocateHugePages("stoker-test", more_than_there_is).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace cpu
}  // namespace stoker::kernels
