// The engine's side of order words in host memory; the test is the daemon.
#include "client/session_order.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/order_word.h"
#include "tests/client/fake_arena.h"

namespace stoker::client {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(20);

class SessionOrderTest : public testing::Test {
 protected:
  SessionOrderTest() {
    attached_.mutable_pool()->CopyFrom(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR));
    *attached_.mutable_arena() = FakeArenaLayout(request_, attached_.pool());
  }
  // A cache line each, behind all other tensors.
  v1::ArenaTensor* AddWord(const std::string& name) {
    v1::ArenaLayout& layout = *attached_.mutable_arena();
    v1::ArenaTensor* const tensor = layout.add_tensors();
    tensor->set_name(name);
    tensor->set_element("u64");
    tensor->set_offset_bytes(layout.size_bytes());
    tensor->add_shape(1);
    tensor->add_stride_bytes(8);
    layout.set_size_bytes(layout.size_bytes() + 128);
    return tensor;
  }
  absl::StatusOr<std::shared_ptr<SessionOrder>> Make() {
    auto arena = Arena::FromDescriptor(request_, attached_, MakeMemory(attached_.arena().size_bytes()));
    if (!arena.ok()) return arena.status();
    arena_ = *arena;
    return SessionOrder::Make(*std::move(arena));
  }
  std::shared_ptr<SessionOrder> MakeGood() {
    AddWord("engine_word");
    AddWord("daemon_word");
    auto order = Make();
    EXPECT_TRUE(order.ok()) << order.status();
    return order.ok() ? *std::move(order) : nullptr;
  }
  std::atomic_ref<uint64_t> Word(const std::string& name) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>((*arena_->Tensor(name))->data));
  }

  const v1::AttachRequest request_ = FakeAttachRequest("kv");
  v1::Attached attached_;
  std::shared_ptr<const Arena> arena_;
};

TEST_F(SessionOrderTest, NumbersRiseAndOnlySignalsSetTheWord) {
  const auto order = MakeGood();
  ASSERT_NE(order, nullptr);
  EXPECT_EQ(order->Signal(nullptr).value(), 1u);
  EXPECT_EQ(Word("engine_word").load(), 1u);
  EXPECT_EQ(order->Next(), 2u);
  EXPECT_EQ(Word("engine_word").load(), 1u);
  EXPECT_EQ(order->Signal(nullptr).value(), 3u);
  EXPECT_EQ(Word("engine_word").load(), 3u);
  EXPECT_EQ(Word("daemon_word").load(), 0u);
}

TEST_F(SessionOrderTest, AWaitEndsWithItsNumberItsDeadlineOrARelease) {
  const auto order = MakeGood();
  ASSERT_NE(order, nullptr);
  Word("daemon_word").store(4);
  EXPECT_TRUE(order->Await(4, nullptr, absl::InfinitePast()).ok());
  const absl::Status late = order->Await(5, nullptr, absl::Now() + absl::Milliseconds(20));
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("daemon_word did not come to 5"));
  for (const bool release : {false, true}) {
    const uint64_t number = release ? kernels::kMaxOrder : 6;
    std::atomic<bool> over = false;
    std::thread waiting([&] {
      EXPECT_TRUE(order->Await(number, nullptr, absl::Now() + kLong).ok());
      over = true;
    });
    absl::SleepFor(absl::Milliseconds(5));
    EXPECT_FALSE(over);
    if (release) {
      order->Release();
    } else {
      Word("daemon_word").store(7);
    }
    waiting.join();
  }
  // Those that come later end, too.
  EXPECT_TRUE(order->Await(kernels::kMaxOrder, nullptr, absl::InfinitePast()).ok());
  EXPECT_TRUE(order->Idle());
}

TEST_F(SessionOrderTest, NumbersOfSeveralThreadsAreTheirOwn) {
  const auto order = MakeGood();
  ASSERT_NE(order, nullptr);
  std::vector<std::thread> threads;
  std::vector<std::atomic<int>> seen(401);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) ++seen[order->Signal(nullptr).value()];
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t number = 1; number <= 400; ++number) EXPECT_EQ(seen[number], 1) << number;
  EXPECT_EQ(Word("engine_word").load(), 400u);
}

TEST_F(SessionOrderTest, RefusesAStreamWhereThereIsNone) {
  const auto order = MakeGood();
  ASSERT_NE(order, nullptr);
  auto* const stream = reinterpret_cast<CUstream_st*>(this);
  EXPECT_EQ(order->Signal(stream).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(order->Await(1, stream, absl::InfiniteFuture()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Word("engine_word").load(), 0u);
}

TEST_F(SessionOrderTest, SaysWhatIsWrongWithTheArena) {
  absl::Status status = SessionOrder::Make(Arena::Unmapped(absl::NotFoundError("elsewhere"))).status();
  EXPECT_EQ(status, absl::NotFoundError("elsewhere"));
  status = Make().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon is of a version without"));
  AddWord("engine_word");
  v1::ArenaTensor* const word = AddWord("daemon_word");
  EXPECT_TRUE(Make().ok());
  word->set_element("i32");
  status = Make().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'daemon_word'"));
  word->set_element("u64");
  word->set_shape(0, 2);
  EXPECT_EQ(Make().status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace stoker::client
