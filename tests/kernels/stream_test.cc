// Streams of every backend: order, waiting across streams, notifications, and destruction with work in flight.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

// A notification that does not return before it is told to: the work behind it stays queued. Backends do not want that
// in production; a test that orders threads does.
class Gate {
 public:
  void CloseOn(Stream& stream) {
    stream.Notify([this](absl::Status) {
      std::unique_lock lock(mutex_);
      entered_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return open_; });
    });
  }
  void AwaitEntered() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return entered_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool entered_ = false;
  bool open_ = false;
};

class StreamTest : public testing::TestWithParam<BackendCase> {
 protected:
  std::unique_ptr<Backend> Make(int threads) { return GetParam().make(threads); }
};
STOKER_FOR_EVERY_BACKEND(StreamTest);

TEST_P(StreamTest, WorkRunsInOrder) {
  const auto backend = Make(4);
  const auto stream = backend->CreateStream().value();
  const auto memory = backend->AllocateHost(8).value();
  auto* const value = reinterpret_cast<uint64_t*>(memory->data());
  std::vector<uint64_t> sources(1000);
  for (uint64_t i = 0; i < sources.size(); ++i) sources[i] = i;
  std::vector<uint64_t> seen(sources.size());
  std::vector<size_t> notified;
  for (size_t i = 0; i < sources.size(); ++i) {
    ASSERT_TRUE(stream->Copy(value, &sources[i], 8).ok());
    ASSERT_TRUE(stream->Copy(&seen[i], value, 8).ok());
    stream->Notify([&notified, i](absl::Status) { notified.push_back(i); });
  }
  ASSERT_TRUE(Finish(*stream).ok());
  EXPECT_EQ(seen, sources);
  ASSERT_EQ(notified.size(), sources.size());
  for (size_t i = 0; i < notified.size(); ++i) ASSERT_EQ(notified[i], i);
}

TEST_P(StreamTest, CallsReturnBeforeTheWorkIsDone) {
  const auto backend = Make(1);
  const auto stream = backend->CreateStream().value();
  Gate gate;
  gate.CloseOn(*stream);
  gate.AwaitEntered();
  const uint64_t from = 5;
  uint64_t to = 0;
  ASSERT_TRUE(stream->Copy(&to, &from, 8).ok());
  const std::shared_ptr<Event> event = stream->Record();
  EXPECT_FALSE(event->Done());
  EXPECT_EQ(to, 0);
  gate.Open();
  ASSERT_TRUE(Finish(*stream).ok());
  EXPECT_TRUE(event->Done());
  EXPECT_EQ(to, 5);
}

TEST_P(StreamTest, AnEventOfAnIdleStreamIsDone) {
  const auto backend = Make(1);
  const auto stream = backend->CreateStream().value();
  stream->Wait(stream->Record());
  stream->Wait(nullptr);
  EXPECT_TRUE(Finish(*stream).ok());
}

TEST_P(StreamTest, StreamsRunIndependently) {
  const auto backend = Make(2);
  const auto blocked = backend->CreateStream().value();
  const auto free = backend->CreateStream().value();
  Gate gate;
  gate.CloseOn(*blocked);
  gate.AwaitEntered();
  EXPECT_TRUE(Finish(*free).ok());
  gate.Open();
}

TEST_P(StreamTest, WaitHoldsBackLaterWorkOnly) {
  const auto backend = Make(2);
  const auto first = backend->CreateStream().value();
  const auto second = backend->CreateStream().value();
  Gate gate;
  gate.CloseOn(*first);
  gate.AwaitEntered();
  const uint64_t one = 1;
  uint64_t before = 0;
  uint64_t after = 0;
  uint64_t source = 0;
  ASSERT_TRUE(first->Copy(&source, &one, 8).ok());
  const std::shared_ptr<Event> event = first->Record();
  ASSERT_TRUE(second->Copy(&before, &one, 8).ok());
  ASSERT_TRUE(Finish(*second).ok());
  EXPECT_EQ(before, 1);
  second->Wait(event);
  ASSERT_TRUE(second->Copy(&after, &source, 8).ok());
  const std::shared_ptr<Event> end = second->Record();
  EXPECT_FALSE(end->Done());
  gate.Open();
  ASSERT_TRUE(Finish(*second).ok());
  EXPECT_EQ(after, 1);
  ASSERT_TRUE(Finish(*first).ok());
}

// One thread must carry any number of streams that wait for each other, so a wait may not hold it.
TEST_P(StreamTest, ChainOfManyStreamsOnOneThread) {
  constexpr int kStreams = 100;
  const auto backend = Make(1);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kStreams; ++i) streams.push_back(backend->CreateStream().value());
  Gate gate;
  gate.CloseOn(*streams[0]);
  gate.AwaitEntered();
  // Value i + 1 is copied from value i once stream i is done; enqueued from the end, so that all wait.
  std::vector<uint64_t> values(kStreams + 1, 0);
  const uint64_t seven = 7;
  ASSERT_TRUE(streams[0]->Copy(&values[0], &seven, 8).ok());
  std::vector<std::shared_ptr<Event>> events;
  for (int i = 0; i < kStreams; ++i) {
    if (i > 0) streams[i]->Wait(events[i - 1]);
    ASSERT_TRUE(streams[i]->Copy(&values[i + 1], &values[i], 8).ok());
    events.push_back(streams[i]->Record());
  }
  gate.Open();
  ASSERT_TRUE(Finish(*streams.back()).ok());
  EXPECT_THAT(values, testing::Each(7));
}

TEST_P(StreamTest, ManyStreamsWaitForOneEvent) {
  const auto backend = Make(3);
  const auto source = backend->CreateStream().value();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 50; ++i) streams.push_back(backend->CreateStream().value());
  for (int round = 0; round < 20; ++round) {
    const uint64_t value = round + 1;
    uint64_t shared = 0;
    Gate gate;
    gate.CloseOn(*source);
    ASSERT_TRUE(source->Copy(&shared, &value, 8).ok());
    const std::shared_ptr<Event> event = source->Record();
    std::vector<uint64_t> seen(streams.size());
    std::vector<std::shared_ptr<Event>> ends;
    for (size_t i = 0; i < streams.size(); ++i) {
      streams[i]->Wait(event);
      ASSERT_TRUE(streams[i]->Copy(&seen[i], &shared, 8).ok());
      ends.push_back(streams[i]->Record());
    }
    gate.Open();
    for (const auto& end : ends) source->Wait(end);
    ASSERT_TRUE(Finish(*source).ok());
    EXPECT_THAT(seen, testing::Each(value));
  }
}

TEST_P(StreamTest, EventsOutliveTheirStream) {
  const auto backend = Make(1);
  const auto other = backend->CreateStream().value();
  std::shared_ptr<Event> event;
  {
    const auto stream = backend->CreateStream().value();
    stream->Notify([](absl::Status) {});
    event = stream->Record();
  }
  EXPECT_TRUE(event->Done());
  other->Wait(event);
  EXPECT_TRUE(Finish(*other).ok());
}

TEST_P(StreamTest, DestructionWaitsForTheWork) {
  const auto backend = Make(2);
  std::atomic<int> notified = 0;
  std::vector<uint64_t> values(300, 0);
  const uint64_t one = 1;
  {
    const auto stream = backend->CreateStream().value();
    for (uint64_t& value : values) {
      ASSERT_TRUE(stream->Copy(&value, &one, 8).ok());
      stream->Notify([&](absl::Status) { ++notified; });
    }
  }
  EXPECT_THAT(values, testing::Each(1));
  EXPECT_EQ(notified, 300);
}

TEST_P(StreamTest, DestructionWaitsForAParkedStream) {
  const auto backend = Make(1);
  const auto first = backend->CreateStream().value();
  Gate gate;
  gate.CloseOn(*first);
  gate.AwaitEntered();
  const uint64_t one = 1;
  uint64_t value = 0;
  auto second = backend->CreateStream().value();
  second->Wait(first->Record());
  ASSERT_TRUE(second->Copy(&value, &one, 8).ok());
  std::thread opener([&] { gate.Open(); });
  second.reset();
  EXPECT_EQ(value, 1);
  opener.join();
}

TEST_P(StreamTest, RefusedCallsEnqueueNothingAndLeaveTheStreamWell) {
  const auto backend = Make(1);
  const auto stream = backend->CreateStream().value();
  ResolveArgs resolve;
  EXPECT_EQ(stream->Resolve(resolve).code(), absl::StatusCode::kInvalidArgument);
  InvalidateArgs invalidate;
  EXPECT_EQ(stream->Invalidate(invalidate).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stream->Reset(ResetArgs{}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stream->Place(PlaceArgs{}).code(), absl::StatusCode::kInvalidArgument);
  GatherCompactArgs compact;
  compact.rows = 1;
  compact.layer_count = 1;
  EXPECT_EQ(stream->Gather(compact).code(), absl::StatusCode::kInvalidArgument);
  GatherDenseArgs dense;
  dense.rows = 1;
  EXPECT_EQ(stream->Gather(dense).code(), absl::StatusCode::kInvalidArgument);
  TransferArgs transfer;
  transfer.count = 1;
  transfer.layer_count = 1;
  EXPECT_EQ(stream->Transfer(transfer).code(), absl::StatusCode::kInvalidArgument);
  uint64_t value = 3;
  EXPECT_THAT(std::string(stream->Copy(nullptr, &value, 8).message()), testing::HasSubstr("copy.dst: is null"));
  EXPECT_THAT(std::string(stream->Copy(&value, nullptr, 8).message()), testing::HasSubstr("copy.src: is null"));
  EXPECT_TRUE(stream->Copy(nullptr, nullptr, 0).ok());
  EXPECT_TRUE(Finish(*stream).ok());
}

TEST_P(StreamTest, TimestampsRise) {
  const auto backend = Make(2);
  const auto stream = backend->CreateStream().value();
  const auto memory = backend->AllocateShared(16).value();
  auto* const ns = reinterpret_cast<uint64_t*>(memory->data());
  for (int i = 0; i < 100; ++i) {
    stream->Timestamp(ns);
    stream->Timestamp(ns + 1);
    uint64_t host[2];
    ASSERT_TRUE(stream->Copy(host, ns, 16).ok());
    ASSERT_TRUE(Finish(*stream).ok());
    ASSERT_GT(host[0], 0);
    ASSERT_LE(host[0], host[1]);
  }
}

// Host arrays of layers may go away as soon as the call has returned.
TEST_P(StreamTest, LayersAreReadBeforeTheCallReturns) {
  const auto backend = Make(1);
  const auto stream = backend->CreateStream().value();
  constexpr int32_t kLayers = 61;
  const RowLayout layout = RowLayout::Make({.row_bytes = 16}, 4).value();
  const auto pool = backend->AllocatePool(kLayers * layout.layer_bytes).value();
  const auto device = backend->AllocateShared(kLayers * layout.layer_bytes + 8).value();
  std::memset(pool->data(), 0x5a, pool->bytes());
  auto* const rows = reinterpret_cast<int32_t*>(device->data() + kLayers * layout.layer_bytes);
  const int32_t zero_and_one[2] = {0, 1};
  ASSERT_TRUE(stream->Copy(rows, zero_and_one, 8).ok());
  Gate gate;
  gate.CloseOn(*stream);
  const RowStore from{.base = pool->data(), .layer_stride = layout.layer_bytes, .layers = kLayers, .layout = layout};
  const RowStore to{.base = device->data(), .layer_stride = layout.layer_bytes, .layers = kLayers, .layout = layout};
  auto layers = std::make_unique<std::vector<int32_t>>(kLayers);
  for (int32_t l = 0; l < kLayers; ++l) (*layers)[l] = l;
  ASSERT_TRUE(stream
                  ->Transfer({.src = from,
                              .dst = to,
                              .src_row_limit = 4,
                              .dst_row_limit = 4,
                              .src_layers = layers->data(),
                              .dst_layers = layers->data(),
                              .layer_count = kLayers,
                              .src_rows = rows,
                              .dst_rows = rows,
                              .count = 2,
                              .transferred_bytes = nullptr})
                  .ok());
  GatherCompactArgs gather{.pool = from,
                           .hot = to,
                           .pool_rows = 4,
                           .hot_rows = 4,
                           .layers = layers->data(),
                           .layer_count = kLayers,
                           .miss_pool_rows = rows,
                           .miss_hot_rows = rows + 1,
                           .miss_counts = rows + 1,
                           .rows = 1,
                           .top_k = 1,
                           .gathered_bytes = nullptr};
  ASSERT_TRUE(stream->Gather(gather).ok());
  std::fill(layers->begin(), layers->end(), -1);
  layers.reset();
  gate.Open();
  std::vector<std::byte> host(device->bytes());
  ASSERT_TRUE(stream->Copy(host.data(), device->data(), host.size()).ok());
  ASSERT_TRUE(Finish(*stream).ok());
  for (int32_t l = 0; l < kLayers; ++l) {
    const std::byte* const layer = host.data() + l * layout.layer_bytes;
    EXPECT_EQ(std::count(layer, layer + 32, std::byte{0x5a}), 32) << "layer " << l;
    EXPECT_EQ(std::count(layer + 32, layer + 64, std::byte{0}), 32) << "layer " << l;
  }
}

TEST_P(StreamTest, ManyThreadsEnqueueOnTheirStreams) {
  const auto backend = Make(3);
  std::vector<std::thread> threads;
  std::atomic<int> done = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const auto stream = backend->CreateStream().value();
      const uint64_t one = 1;
      for (int i = 0; i < 300; ++i) {
        uint64_t value = 0;
        ASSERT_TRUE(stream->Copy(&value, &one, 8).ok());
        ASSERT_TRUE(Finish(*stream).ok());
        ASSERT_EQ(value, 1);
        ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 1200);
}

}  // namespace
}  // namespace stoker::kernels
