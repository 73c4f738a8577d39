// Waits of the CPU backend by themselves: many streams on one thread, and the poller's start and end.
#include "kernels/cpu/doorbell.h"

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_random.h"

namespace stoker::kernels::cpu {
namespace {

// A plane of doorbells alone.
struct Bells {
  PlaneState state;
  uint64_t request = 0;
  uint64_t done = 0;
  uint32_t abort = 0;

  AwaitDoorbellArgs Await() {
    return {.state = &state, .request = &request, .abort = &abort, .begins_step = true, .limit_ns = 0};
  }
  RingDoorbellArgs Ring() { return {.state = &state, .done = &done}; }
};

// Far more streams than threads wait at once, and their requests come in any order.
TEST(DoorbellTest, ManyStreamsWaitOnOneThread) {
  constexpr int kStreams = 64;
  constexpr uint64_t kSteps = 20;
  const auto backend = MakeCpuBackend(1);
  std::vector<Bells> bells(kStreams);
  std::vector<std::unique_ptr<Stream>> streams;
  for (Bells& plane : bells) {
    streams.push_back(backend->CreateStream().value());
    for (uint64_t step = 0; step < kSteps; ++step) {
      ASSERT_TRUE(streams.back()->AwaitDoorbell(plane.Await()).ok());
      ASSERT_TRUE(streams.back()->RingDoorbell(plane.Ring()).ok());
    }
  }
  std::mt19937_64 rng(91);
  std::vector<int> waiting;
  for (int i = 0; i < kStreams; ++i) waiting.push_back(i);
  while (!waiting.empty()) {
    const size_t at = static_cast<size_t>(Draw(rng, 0, static_cast<int32_t>(waiting.size()) - 1));
    Bells& plane = bells[waiting[at]];
    const uint64_t step = LoadAcquire(&plane.done) + 1;
    StoreRelease(&plane.request, step);
    while (LoadAcquire(&plane.done) != step) std::this_thread::yield();
    if (step == kSteps) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
  }
  for (const auto& stream : streams) EXPECT_TRUE(Finish(*stream).ok());
}

TEST(DoorbellTest, StreamsThatWaitEndBehindAnAbort) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Bells> bells(8);
    const auto backend = MakeCpuBackend(2);
    std::vector<std::unique_ptr<Stream>> streams;
    for (Bells& plane : bells) {
      streams.push_back(backend->CreateStream().value());
      ASSERT_TRUE(streams.back()->AwaitDoorbell(plane.Await()).ok());
      ASSERT_TRUE(streams.back()->RingDoorbell(plane.Ring()).ok());
    }
    for (Bells& plane : bells) StoreRelease(&plane.abort, uint32_t{1});
    streams.clear();
    for (const Bells& plane : bells) {
      EXPECT_EQ(plane.state.outcome, static_cast<uint32_t>(PlaneOutcome::kAborted));
      EXPECT_EQ(plane.done, 0);
    }
  }
}

TEST(DoorbellTest, PollersStartAndEnd) {
  { const DoorbellPoller unused; }
  StrandPool pool(1);
  for (int round = 0; round < 20; ++round) {
    DoorbellPoller poller;
    std::atomic<bool> over = false;
    std::atomic<int> looks = 0;
    auto event = std::make_shared<StrandEvent>();
    poller.Await(
        [&] {
          ++looks;
          return over.load();
        },
        event);
    while (looks < 3) std::this_thread::yield();
    EXPECT_FALSE(event->Done());
    over = true;
    while (!event->Done()) std::this_thread::yield();
  }
}

// One that has paused for long takes a new wait at once, and the old one too.
TEST(DoorbellTest, WaitsJoinOthersThatWait) {
  DoorbellPoller poller;
  std::atomic<int> released = 0;
  std::vector<std::shared_ptr<StrandEvent>> events;
  for (int i = 0; i < 100; ++i) {
    events.push_back(std::make_shared<StrandEvent>());
    poller.Await([&released, i] { return released > i; }, events.back());
    EXPECT_FALSE(events.back()->Done());
    if (i % 2 == 0) continue;
    released = i;
    while (!events[i - 1]->Done()) std::this_thread::yield();
    EXPECT_FALSE(events[i]->Done());
  }
  released = 100;
  while (!events.back()->Done()) std::this_thread::yield();
}

}  // namespace
}  // namespace stoker::kernels::cpu
