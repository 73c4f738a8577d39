#include "server/engine/bounce_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <random>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/engine/bounced_backend.h"

namespace stoker::engine {
namespace {

using Memory = core::Bounce::Memory;

class BounceMemoryTest : public ::testing::Test {
 protected:
  void Make(int64_t bytes) { bounce_ = BounceMemory::Create(*backend_, bytes).value(); }
  // Waits for it.
  Memory Take(int64_t bytes) {
    Memory memory;
    absl::Notification taken;
    bounce_->Take(bytes, [&](Memory m) {
      memory = std::move(m);
      taken.Notify();
    });
    taken.WaitForNotification();
    return memory;
  }
  // Waits until the thread has done all that it can.
  void Settle() {
    absl::Notification done;
    bounce_->Post([&] { done.Notify(); });
    done.WaitForNotification();
  }

  const std::unique_ptr<engine_test::BouncedBackend> backend_ =
      std::move(engine_test::MakeBouncedBackends({"GPU-test"}, 1).front());
  std::unique_ptr<BounceMemory> bounce_;
};

TEST_F(BounceMemoryTest, GivesItsWholeCapacity) {
  Make(1000);
  EXPECT_EQ(bounce_->capacity_bytes(), 1024);
  const Memory whole = Take(1000);
  std::memset(whole.get(), 1, 1000);
}

TEST_F(BounceMemoryTest, WaitersAreServedInOrderWhenMemoryComesBack) {
  Make(1024);
  Memory first = Take(768);
  std::vector<int> order;
  std::vector<Memory> taken;
  absl::Notification last;
  bounce_->Take(512, [&](Memory m) {
    order.push_back(1);
    taken.push_back(std::move(m));
  });
  // Would fit at once, and must not go first: a large request would otherwise wait for ever.
  bounce_->Take(256, [&](Memory m) {
    order.push_back(2);
    taken.push_back(std::move(m));
    last.Notify();
  });
  Settle();
  EXPECT_THAT(order, ::testing::IsEmpty());
  first.reset();
  last.WaitForNotification();
  EXPECT_THAT(order, ::testing::ElementsAre(1, 2));
}

TEST_F(BounceMemoryTest, GapsGrowTogether) {
  Make(1024);
  for (const std::array<int, 4> order : {std::array{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {0, 2, 1, 3}}) {
    std::vector<Memory> pieces;
    for (int i = 0; i < 4; ++i) pieces.push_back(Take(256));
    for (const int i : order) pieces[static_cast<size_t>(i)].reset();
    EXPECT_NE(Take(1024), nullptr);
  }
}

// Random sizes and orders against the plain rule: pieces that are out are disjoint, and keep their bytes.
TEST_F(BounceMemoryTest, PiecesNeverOverlap) {
  Make(16 << 10);
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  struct Piece {
    Memory memory;
    size_t bytes;
    char fill;
  };
  absl::Mutex mutex;
  std::deque<Piece> pieces;
  int out = 0;
  constexpr int kPieces = 3000;
  for (int i = 0; i < kPieces; ++i) {
    const size_t bytes = 1 + random() % 5000;
    const char fill = static_cast<char>(i);
    bounce_->Take(static_cast<int64_t>(bytes), [&, bytes, fill](Memory memory) {
      std::memset(memory.get(), fill, bytes);
      absl::MutexLock lock(&mutex);
      pieces.push_back({std::move(memory), bytes, fill});
      ++out;
    });
    absl::MutexLock lock(&mutex);
    if (pieces.empty() || random() % 2 == 0) continue;
    const size_t chosen = random() % pieces.size();
    Piece piece = std::move(pieces[chosen]);
    pieces.erase(pieces.begin() + static_cast<ptrdiff_t>(chosen));
    ASSERT_EQ(std::string(piece.memory.get(), piece.bytes), std::string(piece.bytes, piece.fill));
  }
  for (;;) {
    absl::MutexLock lock(&mutex);
    for (const Piece& piece : pieces) {
      ASSERT_EQ(std::string(piece.memory.get(), piece.bytes), std::string(piece.bytes, piece.fill));
    }
    pieces.clear();
    if (out == kPieces) break;
    const auto came = [&] { return !pieces.empty(); };
    mutex.Await(absl::Condition(&came));
  }
}

TEST_F(BounceMemoryTest, TellsWhenTheMemoryCannotBeHad) {
  backend_->Lose();
  EXPECT_EQ(BounceMemory::Create(*backend_, 1024).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace stoker::engine
