// Work in chunks: every byte once, progress that only grows, errors and stops.
#include "kernels/populate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::kernels {
namespace {

TEST(ForEachChunkTest, CoversEverythingOnceAndTellsOfIt) {
  constexpr size_t kChunk = 64;
  for (const size_t bytes : {size_t{0}, size_t{1}, kChunk - 1, kChunk, kChunk + 1, 10 * kChunk, 10 * kChunk + 7}) {
    for (const int threads : {0, 1, 2, 16}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes, " << threads << " threads");
      std::mutex mutex;
      std::map<size_t, size_t> chunks;
      std::vector<size_t> told;
      const absl::Status status = ForEachChunk(
          bytes, kChunk, threads,
          [&](size_t done_bytes) {
            told.push_back(done_bytes);  // one at a time, or ThreadSanitizer says so
            return true;
          },
          [&](size_t offset, size_t chunk) {
            const std::lock_guard lock(mutex);
            EXPECT_TRUE(chunks.emplace(offset, chunk).second);
            return absl::OkStatus();
          });
      ASSERT_TRUE(status.ok()) << status;
      size_t next = 0;
      for (const auto& [offset, chunk] : chunks) {
        ASSERT_EQ(offset, next);
        next += chunk;
      }
      EXPECT_EQ(next, bytes);
      ASSERT_EQ(told.size(), chunks.size() + 1);
      EXPECT_EQ(told.front(), 0);
      EXPECT_EQ(told.back(), bytes);
      EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
    }
  }
}

TEST(ForEachChunkTest, ReturnsTheFirstErrorAndBeginsNothingMore) {
  for (const int threads : {1, 4}) {
    std::atomic<int> chunks{0}, told{0};
    const absl::Status status = ForEachChunk(
        1000, 1, threads,
        [&](size_t) {
          ++told;
          return true;
        },
        [&](size_t offset, size_t) {
          ++chunks;
          return offset == 5 ? absl::InternalError("five") : absl::OkStatus();
        });
    EXPECT_EQ(status, absl::InternalError("five"));
    EXPECT_GE(chunks, 6);
    EXPECT_LT(told, 1001);
    EXPECT_TRUE(threads > 1 || chunks == 6);
  }
}

TEST(ForEachChunkTest, StopsWhenToldTo) {
  for (const int threads : {1, 4}) {
    for (const int allowed : {0, 1, 7}) {
      std::atomic<int> chunks{0};
      int told = 0;
      const absl::Status status = ForEachChunk(
          1000, 1, threads, [&](size_t) { return told++ < allowed; },
          [&](size_t, size_t) {
            ++chunks;
            return absl::OkStatus();
          });
      EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
      EXPECT_EQ(told, allowed + 1) << "nobody is told of anything after a stop";
      // Each other thread may have had one chunk in work.
      EXPECT_LE(chunks, allowed + threads);
    }
  }
}

TEST(ForEachChunkTest, RefusesChunksOfNothing) {
  EXPECT_EQ(ForEachChunk(1, 0, 1, nullptr, [](size_t, size_t) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PopulateTest, FaultsInEveryPage) {
  constexpr size_t kBytes = size_t{100} << 20;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_TRUE(Populate(static_cast<std::byte*>(memory), kBytes, 4, nullptr).ok());
  std::vector<unsigned char> present(kBytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  ASSERT_EQ(mincore(memory, kBytes, present.data()), 0);
  EXPECT_TRUE(std::all_of(present.begin(), present.end(), [](unsigned char page) { return page & 1; }));
  munmap(memory, kBytes);
}

TEST(PopulateTest, SaysWhyNot) {
  constexpr size_t kBytes = 1 << 20;
  void* const memory = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  munmap(memory, kBytes);
  // Not mapped.
  const absl::Status status = Populate(static_cast<std::byte*>(memory), kBytes, 1, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("1048576 bytes cannot be faulted in: "));
}

TEST(PopulateTest, ThreadsAreBounded) {
  EXPECT_GE(PopulateThreads(), 1);
  EXPECT_LE(PopulateThreads(), 8);
}

}  // namespace
}  // namespace stoker::kernels
