// Which memory of a client is mapped, that it is the client's, and that nothing stays behind.
#include "kernels/cpu/sealed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr char kName[] = "sealed-file-test";

// A memfd, closed at the end.
class Memory {
 public:
  explicit Memory(uint64_t bytes, int seals = F_SEAL_SHRINK, unsigned flags = MFD_ALLOW_SEALING)
      : descriptor_(memfd_create(kName, MFD_CLOEXEC | flags)) {
    EXPECT_EQ(ftruncate(descriptor_, static_cast<off_t>(bytes)), 0);
    EXPECT_TRUE(seals == 0 || fcntl(descriptor_, F_ADD_SEALS, seals) == 0);
  }
  ~Memory() { close(descriptor_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

int Mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(kName) != std::string::npos ? 1 : 0;
  return count;
}

TEST(SealedFileTest, MapsTheClientsBytes) {
  const Memory memory(3 * 4096 + 100);
  constexpr uint64_t kOffset = 4096 + 12;
  constexpr uint64_t kSize = 2 * 4096 + 88;
  ASSERT_EQ(pwrite(memory.get(), "client", 6, kOffset), 6);
  {
    auto mapped = MapSealedFile(memory.get(), kOffset, kSize);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    EXPECT_EQ((*mapped)->bytes(), kSize);
    EXPECT_EQ(std::memcmp((*mapped)->data(), "client", 6), 0);
    std::memcpy((*mapped)->data() + kSize - 6, "daemon", 6);
    EXPECT_EQ(Mappings(), 1);
  }
  EXPECT_EQ(Mappings(), 0);
  char bytes[6];
  ASSERT_EQ(pread(memory.get(), bytes, 6, kOffset + kSize - 6), 6);
  EXPECT_EQ(std::memcmp(bytes, "daemon", 6), 0);
}

TEST(SealedFileTest, RefusesWhatReachesBeyondTheRealSize) {
  const Memory memory(8192);
  constexpr uint64_t kMax = UINT64_MAX;
  struct Range {
    uint64_t offset, size;
    bool good;
  };
  for (const Range& range :
       {Range{0, 8192, true}, Range{8188, 4, true}, Range{0, 8193, false}, Range{1, 8192, false}, Range{8192, 1, false},
        Range{8192, 0, false}, Range{kMax - 3, 4, false}, Range{4, kMax, false},
        Range{uint64_t{1} << 63, uint64_t{1} << 63, false}, Range{kMax, kMax, false}}) {
    const auto mapped = MapSealedFile(memory.get(), range.offset, range.size);
    EXPECT_EQ(mapped.ok(), range.good) << range.offset << " " << range.size << ": " << mapped.status();
    if (range.good) continue;
    EXPECT_EQ(mapped.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("the memory has 8192 bytes"));
  }
  EXPECT_EQ(Mappings(), 0);
}

TEST(SealedFileTest, RefusesMemoryThatItsOwnerCanTakeAway) {
  const Memory unsealed(4096, 0);
  const Memory grows_only(4096, F_SEAL_GROW);
  const Memory cannot_be_sealed(4096, 0, 0);
  for (const Memory* memory : {&unsealed, &grows_only, &cannot_be_sealed}) {
    const auto mapped = MapSealedFile(memory->get(), 0, 4096);
    EXPECT_EQ(mapped.status().code(), absl::StatusCode::kFailedPrecondition) << mapped.status();
    EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("F_SEAL_SHRINK"));
  }
}

TEST(SealedFileTest, RefusesMemoryThatCannotBeWritten) {
  const Memory memory(4096, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE);
  const auto mapped = MapSealedFile(memory.get(), 0, 4096);
  EXPECT_EQ(mapped.status().code(), absl::StatusCode::kFailedPrecondition) << mapped.status();
  EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("reading and writing"));
}

TEST(SealedFileTest, RefusesHugePages) {
  const int descriptor = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (descriptor < 0) GTEST_SKIP() << "this kernel has no huge pages";
  ASSERT_EQ(ftruncate(descriptor, 2 << 20), 0);
  ASSERT_EQ(fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const auto mapped = MapSealedFile(descriptor, 0, 4096);
  EXPECT_EQ(mapped.status().code(), absl::StatusCode::kFailedPrecondition) << mapped.status();
  EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("MFD_HUGETLB"));
  close(descriptor);
}

TEST(SealedFileTest, RefusesWhatIsNoMemory) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const int device = open("/dev/zero", O_RDWR | O_CLOEXEC);
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  const int path = open("/", O_PATH | O_CLOEXEC);
  for (const int descriptor : {-1, pipes[0], pipes[1], device, file, path}) {
    const auto mapped = MapSealedFile(descriptor, 0, 4096);
    EXPECT_EQ(mapped.status().code(), absl::StatusCode::kInvalidArgument) << mapped.status();
    EXPECT_THAT(std::string(mapped.status().message()), HasSubstr("memfd_create"));
  }
  for (const int descriptor : {pipes[0], pipes[1], device, file, path}) close(descriptor);
}

// The owner may do what the seal allows, while it is mapped.
TEST(SealedFileTest, OutlivesWhatTheOwnerDoes) {
  const Memory memory(8192);
  auto mapped = MapSealedFile(memory.get(), 0, 8192);
  ASSERT_TRUE(mapped.ok());
  std::memset((*mapped)->data(), 1, 8192);
  EXPECT_NE(ftruncate(memory.get(), 0), 0);
  ASSERT_EQ(fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192), 0);
  EXPECT_EQ(std::to_integer<int>((*mapped)->data()[8191]), 0);
}

}  // namespace
}  // namespace stoker::kernels::cpu
