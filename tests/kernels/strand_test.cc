// Strands by themselves: errors of the work, fairness, and events of somebody else.
#include "kernels/cpu/strand.h"

#include <atomic>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace stoker::kernels::cpu {
namespace {

absl::Status Collect(Strand& strand) {
  absl::Status result = absl::UnknownError("not notified");
  strand.Notify([&](absl::Status status) { result = std::move(status); });
  strand.Drain();
  return result;
}

TEST(StrandTest, NotifyTellsTheFirstErrorOnce) {
  StrandPool pool(2);
  const auto strand = std::make_shared<Strand>(&pool);
  EXPECT_TRUE(Collect(*strand).ok());
  strand->Run([] { return absl::OkStatus(); });
  strand->Run([] { return absl::InternalError("first"); });
  strand->Run([] { return absl::DataLossError("second"); });
  strand->Run([] { return absl::OkStatus(); });
  EXPECT_EQ(Collect(*strand), absl::InternalError("first"));
  EXPECT_TRUE(Collect(*strand).ok());
  strand->Run([] { return absl::DataLossError("third"); });
  EXPECT_EQ(Collect(*strand), absl::DataLossError("third"));
}

TEST(StrandTest, AnErrorStaysOnItsStrand) {
  StrandPool pool(1);
  const auto bad = std::make_shared<Strand>(&pool);
  const auto good = std::make_shared<Strand>(&pool);
  bad->Run([] { return absl::InternalError("mine"); });
  good->Wait(bad->Record());
  EXPECT_TRUE(Collect(*good).ok());
  EXPECT_FALSE(Collect(*bad).ok());
}

// A strand that never runs dry must not keep the only thread from the others.
TEST(StrandTest, EndlessWorkLeavesTurnsToOthers) {
  StrandPool pool(1);
  const auto busy = std::make_shared<Strand>(&pool);
  const auto other = std::make_shared<Strand>(&pool);
  std::atomic<bool> stop = false;
  // Every item enqueues the next before it ends.
  std::function<void()> again = [&] {
    busy->Run([&] {
      if (!stop) again();
      return absl::OkStatus();
    });
  };
  again();
  EXPECT_TRUE(Collect(*other).ok());
  stop = true;
  busy->Drain();
}

// Work that lets others ends its strand's turn; the order of the strand's own work stays.
TEST(StrandTest, WorkCanLetOthersHaveTheirTurn) {
  StrandPool pool(1);
  const auto gate = std::make_shared<Strand>(&pool);
  const auto busy = std::make_shared<Strand>(&pool);
  const auto other = std::make_shared<Strand>(&pool);
  std::binary_semaphore entered(0), go_on(0);
  std::vector<int> order;  // written by the pool's only thread
  const auto note = [&order](int what) {
    return [&order, what] {
      order.push_back(what);
      return absl::OkStatus();
    };
  };
  gate->Run([&] {
    entered.release();
    go_on.acquire();
    return absl::OkStatus();
  });
  entered.acquire();
  busy->Run(note(1), Strand::Then::kLetOthers);
  busy->Run(note(2));
  busy->Run(note(3), Strand::Then::kLetOthers);
  busy->Run(note(4), Strand::Then::kLetOthers);
  other->Run(note(10));
  other->Run(note(11));
  go_on.release();
  EXPECT_TRUE(Collect(*busy).ok());
  EXPECT_TRUE(Collect(*other).ok());
  EXPECT_EQ(order, (std::vector<int>{1, 10, 11, 2, 3, 4}));
}

class ForeignEvent : public Event {
 public:
  bool Done() const override {
    ++looks;
    return done;
  }
  mutable std::atomic<int> looks = 0;
  std::atomic<bool> done = false;
};

TEST(StrandTest, WaitsForAnEventOfAnotherBackend) {
  StrandPool pool(1);
  const auto waiting = std::make_shared<Strand>(&pool);
  const auto other = std::make_shared<Strand>(&pool);
  const auto event = std::make_shared<ForeignEvent>();
  waiting->Wait(event);
  std::atomic<bool> ran = false;
  waiting->Run([&] {
    ran = true;
    return absl::OkStatus();
  });
  EXPECT_TRUE(Collect(*other).ok()) << "the thread is free for others meanwhile";
  EXPECT_FALSE(ran);
  event->done = true;
  waiting->Drain();
  EXPECT_TRUE(ran);
}

// Tells where work ran.
absl::AnyInvocable<absl::Status() &&> NoteThread(std::thread::id* thread) {
  return [thread] {
    *thread = std::this_thread::get_id();
    return absl::OkStatus();
  };
}

TEST(StrandTest, HeldWorkRunsOnTheThreadThatReleasesIt) {
  StrandPool pool(2);
  const auto strand = std::make_shared<Strand>(&pool);
  std::thread::id first, second;
  bool notified = false;
  strand->Hold();
  strand->Run(NoteThread(&first));
  const std::shared_ptr<Event> event = strand->Record();
  strand->Run(NoteThread(&second));
  strand->Notify([&](absl::Status) { notified = true; });
  EXPECT_FALSE(event->Done());
  EXPECT_EQ(first, std::thread::id());
  strand->Release();
  EXPECT_TRUE(event->Done());
  EXPECT_TRUE(notified);
  EXPECT_EQ(first, std::this_thread::get_id());
  EXPECT_EQ(second, std::this_thread::get_id());
  std::thread::id later;
  strand->Run(NoteThread(&later));
  strand->Drain();
  EXPECT_NE(later, std::this_thread::get_id()) << "nothing is held any more";
}

TEST(StrandTest, ReleaseOfARunningStrandLeavesTheWorkToIt) {
  StrandPool pool(1);
  const auto strand = std::make_shared<Strand>(&pool);
  std::binary_semaphore running(0), go_on(0);
  strand->Run([&] {
    running.release();
    go_on.acquire();
    return absl::OkStatus();
  });
  running.acquire();
  std::thread::id thread;
  strand->Hold();
  strand->Run(NoteThread(&thread));
  strand->Release();  // would not return if it ran the strand
  EXPECT_EQ(thread, std::thread::id());
  go_on.release();
  strand->Drain();
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(StrandTest, OneThreadIsLentAtATime) {
  StrandPool pool(1);
  const auto lent = std::make_shared<Strand>(&pool);
  const auto other = std::make_shared<Strand>(&pool);
  std::binary_semaphore running(0), go_on(0);
  std::thread lender([&] {
    lent->Hold();
    lent->Run([&] {
      running.release();
      go_on.acquire();
      return absl::OkStatus();
    });
    lent->Release();
  });
  running.acquire();
  std::thread::id thread;
  other->Hold();
  other->Run(NoteThread(&thread));
  other->Release();
  other->Drain();
  EXPECT_NE(thread, std::this_thread::get_id());
  go_on.release();
  lender.join();
}

// The rest goes to the pool, so that the lender can go on.
TEST(StrandTest, AThreadIsLentForOneTurn) {
  StrandPool pool(1);
  const auto strand = std::make_shared<Strand>(&pool);
  std::thread::id first, last;
  strand->Hold();
  strand->Run(NoteThread(&first));
  for (int i = 0; i < 100; ++i) strand->Run([] { return absl::OkStatus(); });
  strand->Run(NoteThread(&last));
  strand->Release();
  strand->Drain();
  EXPECT_EQ(first, std::this_thread::get_id());
  EXPECT_NE(last, std::this_thread::get_id());
}

TEST(StrandTest, CapturesDieBeforeTheStrandIsIdle) {
  StrandPool pool(1);
  const auto strand = std::make_shared<Strand>(&pool);
  std::weak_ptr<int> watched;
  {
    auto owned = std::make_shared<int>(1);
    watched = owned;
    strand->Run([owned = std::move(owned)] { return absl::OkStatus(); });
  }
  strand->Drain();
  EXPECT_TRUE(watched.expired());
}

TEST(StrandTest, PoolsOfManyThreadsStartAndStop) {
  for (const int threads : {1, 2, 16}) {
    for (int i = 0; i < 20; ++i) {
      StrandPool pool(threads);
      if (i % 2 == 0) continue;
      const auto strand = std::make_shared<Strand>(&pool);
      EXPECT_TRUE(Collect(*strand).ok());
    }
  }
}

}  // namespace
}  // namespace stoker::kernels::cpu
