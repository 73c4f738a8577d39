// Pool memory on a real GPU: both kinds are zero, are read by kernels here and in another process, and go back.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/available_memory.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/pool_memory.h"
#include "tests/gpu/pool_rows.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels::cuda {
namespace {

constexpr size_t kGiB = size_t{1} << 30;
// Two whole chunks and a bit.
constexpr size_t kPoolBytes = 2 * kGiB + (size_t{10} << 20);

struct Kind {
  const char* name;
  bool numa;
};

class PoolMemoryGpuTest : public ::testing::TestWithParam<Kind> {
 protected:
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes, const PhaseProgress& progress = nullptr) {
    if (GetParam().numa) return AllocateNumaPool(driver_, {0}, bytes, PlanNumaPool(bytes), progress);
    auto memory = bank_.Allocate("stoker-test", bytes, cpu::MemoryBank::Sharing::kShared);
    if (!memory.ok()) return memory;
    return RegisterPool(driver_, {0}, *std::move(memory), PlanRegisteredPool(bytes), progress);
  }

  const std::unique_ptr<Backend> backend_ = MakeCudaBackend(0).value();
  const std::shared_ptr<const PoolDriver> driver_ = LoadPoolDriver();
  cpu::MemoryBank bank_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, PoolMemoryGpuTest, testing::Values(Kind{"numa", true}, Kind{"registered", false}),
                         [](const auto& kind) { return kind.param.name; });

bool IsZero(const std::byte* data, size_t bytes) {
  // Equal to itself moved by a word, and the first word is zero.
  constexpr std::byte kZero[8] = {};
  return std::memcmp(data, kZero, 8) == 0 && std::memcmp(data, data + 8, bytes - 8) == 0;
}

// Runs pool_reader with the pool's descriptors; its exit status.
int ReadInAnotherProcess(const ExportedMemory& exported) {
  const std::string reader = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "pool_reader";
  std::vector<std::string> arguments = {reader, std::to_string(static_cast<int>(exported.kind))};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFirstDescriptor = 200;
  for (size_t i = 0; i < exported.parts.size(); ++i) {
    const int inherited = kFirstDescriptor + static_cast<int>(i);
    posix_spawn_file_actions_adddup2(&actions, exported.parts[i].descriptor, inherited);
    arguments.push_back(std::to_string(inherited));
    arguments.push_back(std::to_string(exported.parts[i].bytes));
  }
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t child = -1;
  const int error = posix_spawn(&child, reader.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return -error;
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

TEST_P(PoolMemoryGpuTest, IsZeroAlsoAfterOtherUse) {
  for (int round = 0; round < 2; ++round) {
    auto pool = Allocate(kPoolBytes);
    ASSERT_TRUE(pool.ok()) << pool.status();
    EXPECT_EQ((*pool)->bytes(), kPoolBytes);
    ASSERT_TRUE(IsZero((*pool)->data(), kPoolBytes)) << round;
    std::memset((*pool)->data(), 0x5a, kPoolBytes);
  }
}

TEST_P(PoolMemoryGpuTest, KernelsAndCopiesReachAllOfIt) {
  const auto pool = Allocate(kPoolBytes);
  ASSERT_TRUE(pool.ok()) << pool.status();
  WriteRows((*pool)->data(), kPoolBytes);
  EXPECT_EQ(CountWrongRows(*backend_, (*pool)->data(), kPoolBytes), 0);
  // A copy across the boundary of two chunks.
  constexpr size_t kCopyBytes = size_t{8} << 20;
  std::byte* const middle = (*pool)->data() + kGiB - kCopyBytes / 2;
  const auto stream = backend_->CreateStream().value();
  const auto device = backend_->AllocatePrivate(kCopyBytes).value();
  const absl::Status down = stream->Copy(device->data(), middle, kCopyBytes);
  ASSERT_TRUE(down.ok()) << down;
  std::vector<std::byte> copy(kCopyBytes);
  ASSERT_TRUE(stream->Copy(copy.data(), device->data(), kCopyBytes).ok());
  const absl::Status status = Finish(*stream);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(std::memcmp(copy.data(), middle, kCopyBytes), 0);
}

TEST_P(PoolMemoryGpuTest, AnotherProcessMapsIt) {
  const auto pool = Allocate(kPoolBytes);
  ASSERT_TRUE(pool.ok()) << pool.status();
  const ExportedMemory exported = (*pool)->exported();
  ASSERT_EQ(exported.parts.size(), GetParam().numa ? 3 : 1);
  size_t bytes = 0;
  for (const ExportedMemory::Part& part : exported.parts) bytes += part.bytes;
  ASSERT_EQ(bytes, kPoolBytes);
  EXPECT_EQ(ReadInAnotherProcess(exported), 1) << "there are no rows yet";
  WriteRows((*pool)->data(), kPoolBytes);
  EXPECT_EQ(ReadInAnotherProcess(exported), 0);
  EXPECT_EQ((*pool)->data()[kPoolBytes - 1], std::byte{42});
  // The other process has gone, and taken nothing along.
  EXPECT_EQ(CountWrongRows(*backend_, (*pool)->data(), kPoolBytes), 0);
}

TEST_P(PoolMemoryGpuTest, GoesBackToTheSystem) {
  // The machine's figure moves by what others do: eight pools, one after the other, would not fit into this tolerance.
  constexpr uint64_t kTolerance = 4 * kGiB;
  constexpr int kRounds = 8;
  static_assert(kRounds * kPoolBytes > 3 * kTolerance);
  ASSERT_TRUE(Allocate(kPoolBytes).ok());  // what the driver keeps for itself
  const uint64_t before = ReadAvailableMemory().bytes;
  for (int round = 0; round < kRounds; ++round) {
    const auto pool = Allocate(kPoolBytes);
    ASSERT_TRUE(pool.ok()) << pool.status();
    EXPECT_LT(ReadAvailableMemory().bytes + kGiB, before) << "round " << round << ": the memory is not there";
  }
  EXPECT_GT(ReadAvailableMemory().bytes + kTolerance, before);
}

TEST_P(PoolMemoryGpuTest, StopsBetweenChunks) {
  int calls = 0;
  const auto pool = Allocate(kPoolBytes, [&](PoolPhase, size_t done_bytes) {
    ++calls;
    return done_bytes == 0;
  });
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kCancelled) << pool.status();
  EXPECT_EQ(calls, 2);
}

TEST_P(PoolMemoryGpuTest, BackendTellsWhatItMakes) {
  std::string memory, reason;
  size_t pinned = 0;
  PoolOptions options;
  options.progress = [&](const PoolProgress& progress) {
    memory = progress.memory;
    reason = progress.reason;
    if (progress.phase == PoolPhase::kPin) pinned = progress.done_bytes;
    return true;
  };
  const auto pool = backend_->AllocatePool(kPoolBytes, options);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(pinned, kPoolBytes);
  RecordProperty("memory", memory);
  std::printf("pool memory of this machine: %s%s%s\n", memory.c_str(), reason.empty() ? "" : ", because ",
              reason.c_str());
}

}  // namespace
}  // namespace stoker::kernels::cuda
