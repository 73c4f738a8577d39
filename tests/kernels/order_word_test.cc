// Order words on every backend, beside a test that plays the other process: it sets the word that a stream waits for by
// another stream, and looks at what has been signalled. Nothing sleeps.
#include "kernels/order_word.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

class OrderWordTest : public BackendTest {
 protected:
  OrderWordTest() {
    // What the streams take for copies of pageable memory, before one of them waits.
    EXPECT_EQ(Word(kTheirs), 0u);
    uint64_t value = 0;
    EXPECT_TRUE(stream().Copy(&value, word(kOwn), 8).ok());
    EXPECT_TRUE(Finish(stream()).ok());
  }
  void TearDown() override {
    // Whatever failed: no wait outlives the words.
    Abort();
    EXPECT_TRUE(backend().ReleaseOrder(word(kTheirs)).ok());
    EXPECT_TRUE(Finish(stream()).ok());
    EXPECT_TRUE(backend().AwaitReleases().ok());
  }

  // A cache line each.
  static constexpr int kTheirs = 0, kOwn = 16, kAborted = 32, kData = 48;

  Backend& backend() { return bench().backend(); }
  Stream& stream() { return bench().stream(); }
  uint64_t* word(int place) { return reinterpret_cast<uint64_t*>(memory_->data()) + place; }
  uint32_t* aborted() { return reinterpret_cast<uint32_t*>(word(kAborted)); }
  uint32_t* abort() { return reinterpret_cast<uint32_t*>(flag_->data()); }
  void Abort() { std::atomic_ref(*abort()).store(1, std::memory_order_release); }

  uint64_t Word(int place) {
    uint64_t value = 0;
    EXPECT_TRUE(side_->Copy(&value, word(place), 8).ok());
    EXPECT_TRUE(Finish(*side_).ok());
    return value;
  }
  void Set(int place, uint64_t value) {
    ASSERT_TRUE(side_->Write(word(place), value).ok());
    ASSERT_TRUE(Finish(*side_).ok());
  }
  // Gives what should not happen the time of some round trips to happen.
  void LookForAWhile() {
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(Finish(*side_).ok());
  }

  absl::Status Await(uint64_t number) {
    return stream().AwaitOrder({.word = word(kTheirs), .number = number, .abort = abort(), .aborted = aborted()});
  }
  absl::Status Signal(uint64_t number) {
    return stream().SignalOrder({.word = word(kOwn), .number = number, .aborted = aborted()});
  }

 private:
  const std::unique_ptr<Buffer> memory_ = backend().AllocatePrivate(4096).value();
  const std::unique_ptr<Buffer> flag_ = backend().AllocateHost(4).value();
  const std::unique_ptr<Stream> side_ = backend().CreateStream().value();
};
STOKER_FOR_EVERY_BACKEND(OrderWordTest);

TEST_P(OrderWordTest, TheBackendHasThem) { EXPECT_EQ(backend().no_order_words(), ""); }

TEST_P(OrderWordTest, ANumberThatHasComeIsNotWaitedFor) {
  Set(kTheirs, 7);
  for (uint64_t number = 1; number <= 7; ++number) {
    ASSERT_TRUE(Await(number).ok());
    ASSERT_TRUE(Signal(number).ok());
  }
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kOwn), 7u);
  EXPECT_EQ(Word(kAborted), 0u);
}

TEST_P(OrderWordTest, WorkBeginsWhenTheNumberHasComeAndIsSignalledWhenItIsDone) {
  for (uint64_t number = 1; number <= 50; ++number) {
    ASSERT_TRUE(Await(2 * number).ok());
    ASSERT_TRUE(stream().Write(word(kData), number).ok());
    ASSERT_TRUE(Signal(number).ok());
    const std::shared_ptr<Event> end = stream().Record();
    Set(kTheirs, 2 * number - 1);
    if (number % 10 == 0) LookForAWhile();
    EXPECT_FALSE(end->Done());
    EXPECT_EQ(Word(kData), number - 1);
    EXPECT_EQ(Word(kOwn), number - 1);
    Set(kTheirs, 2 * number + number % 2);
    while (Word(kOwn) != number) continue;
    EXPECT_EQ(Word(kData), number);
    ASSERT_TRUE(Finish(stream()).ok());
  }
}

// One stream that waits, and another one that works.
TEST_P(OrderWordTest, AWaitHoldsUpNoOtherStream) {
  const auto other = backend().CreateStream().value();
  ASSERT_TRUE(Await(1).ok());
  const std::shared_ptr<Event> end = stream().Record();
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(other->Write(word(kData), i).ok());
    ASSERT_TRUE(Finish(*other).ok());
  }
  EXPECT_FALSE(end->Done());
  Set(kTheirs, 1);
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_TRUE(end->Done());
}

TEST_P(OrderWordTest, AReleasedWordEndsAllWaitsAndTheFlagSaysSo) {
  for (const uint64_t number : {uint64_t{1}, uint64_t{2}, kMaxOrder}) ASSERT_TRUE(Await(number).ok());
  ASSERT_TRUE(Signal(kMaxOrder).ok());
  LookForAWhile();
  Abort();
  ASSERT_TRUE(backend().ReleaseOrder(word(kTheirs)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  ASSERT_TRUE(backend().AwaitReleases().ok());
  EXPECT_EQ(Word(kTheirs), kReleasedOrder);
  EXPECT_EQ(Word(kAborted), 1u);
  EXPECT_EQ(Word(kOwn), 0u);
}

// What waits is behind an aborted wait for good, though the flag may be taken back.
TEST_P(OrderWordTest, AnAbortedWaitStaysOne) {
  Set(kTheirs, 1);
  Abort();
  ASSERT_TRUE(Await(1).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  std::atomic_ref(*abort()).store(0, std::memory_order_release);
  ASSERT_TRUE(Await(1).ok());
  ASSERT_TRUE(Signal(1).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kAborted), 1u);
  EXPECT_EQ(Word(kOwn), 0u);
}

// Whoever waits for the word may have released it.
TEST_P(OrderWordTest, ASignalRaisesAndNeverLowers) {
  Set(kOwn, 5);
  ASSERT_TRUE(Signal(4).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kOwn), 5u);
  ASSERT_TRUE(stream().SignalOrder({.word = word(kOwn), .number = 6}).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kOwn), 6u);
  ASSERT_TRUE(backend().ReleaseOrder(word(kOwn)).ok());
  ASSERT_TRUE(backend().AwaitReleases().ok());
  ASSERT_TRUE(Signal(kMaxOrder).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kOwn), kReleasedOrder);
}

// Two streams, each of which waits for the other's number before it sets its own.
TEST_P(OrderWordTest, TwoStreamsInTurns) {
  const auto other = backend().CreateStream().value();
  const uint64_t rounds = Cases(50, 500);
  for (uint64_t number = 1; number <= rounds; ++number) {
    ASSERT_TRUE(Await(number).ok());
    ASSERT_TRUE(Signal(number).ok());
    if (number > 1) {
      ASSERT_TRUE(
          other->AwaitOrder({.word = word(kOwn), .number = number - 1, .abort = abort(), .aborted = aborted()}).ok());
    }
    ASSERT_TRUE(other->SignalOrder({.word = word(kTheirs), .number = number}).ok());
    // A stream takes no more than some 1,000 operations that wait.
    if (number % 50 == 0) {
      ASSERT_TRUE(Finish(*other).ok());
    }
  }
  ASSERT_TRUE(Finish(*other).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Word(kOwn), rounds);
  EXPECT_EQ(Word(kTheirs), rounds);
}

TEST_P(OrderWordTest, RefusesWhatIsNoNumber) {
  for (const uint64_t number : {uint64_t{0}, kMaxOrder + 1, kReleasedOrder, UINT64_MAX}) {
    EXPECT_EQ(Await(number).code(), absl::StatusCode::kInvalidArgument) << number;
    EXPECT_EQ(Signal(number).code(), absl::StatusCode::kInvalidArgument) << number;
  }
  EXPECT_EQ(Word(kOwn), 0u);
}

}  // namespace
}  // namespace stoker::kernels
