// Tensors of sessions without gRPC. First in the order that the test drives by hand: what ends while something else is
// under way. Then on threads: sessions register, store, load, unregister and end with all of that under way; nothing
// may race, and no mapping and no descriptor may be left.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/core/registry.h"
#include "server/engine/engine.h"

namespace stoker::core {
namespace {

using ::testing::HasSubstr;

constexpr char kName[] = "session-tensors-test";
constexpr int64_t kLayers = 2;
constexpr int64_t kRowBytes = 16;
constexpr int64_t kRows = 32;  // of tensors and sequences
constexpr uint64_t kTensorBytes = kLayers * kRows * kRowBytes;

int Mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(kName) != std::string::npos ? 1 : 0;
  return count;
}

FileDescriptor NewMemory() {
  FileDescriptor memory(memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(memory.get(), kTensorBytes), 0);
  EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  return memory;
}

FileDescriptor Duplicate(const FileDescriptor& descriptor) {
  return FileDescriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
}

TensorRequest DenseRequest(uint64_t descriptor) {
  TensorRequest request;
  request.spec.size_bytes = kTensorBytes;
  request.spec.layer_stride_bytes = kRows * kRowBytes;
  request.spec.rows = kRows;
  request.spec.parts = {{.part = 0, .offset_bytes = 0, .row_stride_bytes = kRowBytes}};
  request.descriptor = descriptor;
  return request;
}

PoolSpec SmallPool() {
  PoolSpec pool;
  pool.name = "p";
  pool.layers = kLayers;
  pool.row_layout = RowLayout::kLinear;
  pool.row_bytes = kRowBytes;
  pool.block_rows = 16;
  pool.blocks = 64;
  EXPECT_EQ(pool.Normalize(), absl::OkStatus());
  return pool;
}

SessionSpec SmallSession(const std::string& name) {
  SessionSpec spec;
  spec.pool = "p";
  spec.name = name;
  spec.device = "cpu";
  spec.state_rows = 4;
  spec.hot_rows = 32;
  spec.max_top_k = 8;
  spec.max_batch_rows = 4;
  spec.max_sequence_rows = kRows;
  spec.index_space = IndexSpace::kPosition;
  spec.groups = {{0, 1}};
  return spec;
}

// One session whose posted work the test runs.
class PostedTest : public testing::Test {
 protected:
  PostedTest() : backend_(kernels::cpu::MakeCpuBackend(1)) {
    engine_ = engine::MakeEngine({backend_.get()}, 1 << 20).value();
    pool_ = std::make_shared<PoolEntry>(SmallPool(), absl::ZeroDuration());
    pool_->storage = engine_->CreatePool(pool_->pool.spec(), {}).value();
    SessionSpec spec = SmallSession("s");
    auto storage = engine_->CreateSession(pool_->pool.spec(), *pool_->storage, spec).value();
    Session::Environment environment;
    environment.find_session = [](SessionId) { return nullptr; };
    environment.map_memory = [this](const std::string& device, const ClientMemorySource& source) {
      return engine_->MapClientMemory(device, source);
    };
    environment.post = [this](absl::AnyInvocable<void() &&> task) {
      absl::MutexLock lock(&mutex_);
      posted_.push_back(std::move(task));
    };
    OperationLimits limits;
    limits.max_batch_items = limits.max_queued_operations = 16;
    limits.max_reserved_blocks = 64;
    limits.tensors = {.max_tensors = 2, .max_bytes = 2 * kTensorBytes};
    session_ = std::make_shared<Session>(SessionId{1}, "token", spec, limits, 0, pool_, std::move(storage), absl::Now(),
                                         std::move(environment));
  }

  uint64_t Offer() { return session_->OfferDescriptor(NewMemory()).value(); }

  // Waits until something was posted, and runs it.
  void RunPosted() {
    absl::AnyInvocable<void() &&> task;
    {
      absl::MutexLock lock(&mutex_);
      const auto some = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !posted_.empty(); };
      ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&some), absl::Seconds(20))) << "nothing was posted";
      task = std::move(posted_.front());
      posted_.pop_front();
    }
    std::move(task)();
  }

  struct Registered {
    bool done = false;
    absl::Status status;
    TensorId id;
  };
  std::shared_ptr<Registered> Register(uint64_t descriptor) {
    auto result = std::make_shared<Registered>();
    session_->RegisterTensor(DenseRequest(descriptor), [result](absl::StatusOr<TensorId> id) {
      result->done = true;
      result->status = id.status();
      if (id.ok()) result->id = *id;
    });
    return result;
  }
  std::shared_ptr<Registered> Unregister(TensorId id) {
    auto result = std::make_shared<Registered>();
    session_->UnregisterTensor(id, [result](absl::Status status) {
      result->done = true;
      result->status = std::move(status);
    });
    return result;
  }
  void EndAndDestroy() {
    absl::Notification drained;
    session_->End(absl::FailedPreconditionError("over"), /*engine_gone=*/true, [&] { drained.Notify(); });
    drained.WaitForNotification();
    session_->Destroy(false, absl::Now());
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<PoolEntry> pool_;
  std::shared_ptr<Session> session_;
  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void() &&>> posted_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(PostedTest, CountsATensorFromItsMappingToItsUnmapping) {
  const auto registered = Register(Offer());
  EXPECT_FALSE(registered->done);
  EXPECT_EQ(session_->tensor_bytes(), 0u);
  RunPosted();
  ASSERT_TRUE(registered->done && registered->status.ok()) << registered->status;
  EXPECT_EQ(session_->tensor_bytes(), kTensorBytes);
  EXPECT_EQ(Mappings(), 1);
  const auto unregistered = Unregister(registered->id);
  EXPECT_EQ(Unregister(registered->id)->status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(unregistered->done);
  // It cannot be named any more, and still has its place.
  const auto second = Register(Offer());
  const auto third = Register(Offer());
  EXPECT_EQ(third->status.code(), absl::StatusCode::kResourceExhausted);
  RunPosted();
  RunPosted();
  EXPECT_TRUE(unregistered->done && unregistered->status.ok());
  EXPECT_TRUE(second->done && second->status.ok());
  EXPECT_EQ(Mappings(), 1);
  EXPECT_EQ(session_->tensor_bytes(), kTensorBytes);
  EXPECT_EQ(session_->queued_operations(), 0);
  EndAndDestroy();
  EXPECT_EQ(Mappings(), 0);
  EXPECT_EQ(session_->tensor_bytes(), 0u);
}

TEST_F(PostedTest, AMappingThatFailsGivesItsPlaceBack) {
  for (int i = 0; i < 5; ++i) {
    FileDescriptor small(memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(ftruncate(small.get(), kTensorBytes - 1), 0);
    ASSERT_EQ(fcntl(small.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    const auto registered = Register(session_->OfferDescriptor(std::move(small)).value());
    RunPosted();
    EXPECT_EQ(registered->status.code(), absl::StatusCode::kInvalidArgument) << registered->status;
  }
  EXPECT_EQ(session_->queued_operations(), 0);
  EXPECT_EQ(Mappings(), 0);
  EndAndDestroy();
}

// A session that ends waits for a mapping that was asked for, and keeps none.
TEST_F(PostedTest, AMappingThatComesAfterTheEndIsUndone) {
  const uint64_t waiting = Offer();
  const auto registered = Register(Offer());
  absl::Notification drained;
  session_->End(absl::FailedPreconditionError("over"), /*engine_gone=*/true, [&] { drained.Notify(); });
  EXPECT_FALSE(drained.HasBeenNotified());
  RunPosted();
  drained.WaitForNotification();
  EXPECT_THAT(std::string(registered->status.message()), HasSubstr("over"));
  EXPECT_EQ(Mappings(), 0);
  EXPECT_EQ(session_->tensor_bytes(), 0u);
  EXPECT_THAT(std::string(Register(waiting)->status.message()), HasSubstr("over"));
  EXPECT_THAT(std::string(Unregister(TensorId::Make(SessionId{1}, 1))->status.message()), HasSubstr("over"));
  EXPECT_FALSE(session_->OfferDescriptor(NewMemory()).ok());
  session_->Destroy(false, absl::Now());
}

TEST_F(PostedTest, ASessionEndsBehindAnUnmapping) {
  const auto registered = Register(Offer());
  RunPosted();
  ASSERT_TRUE(registered->status.ok());
  const auto unregistered = Unregister(registered->id);
  absl::Notification drained;
  session_->End(absl::FailedPreconditionError("over"), /*engine_gone=*/true, [&] { drained.Notify(); });
  RunPosted();
  drained.WaitForNotification();
  EXPECT_TRUE(unregistered->status.ok());
  EXPECT_EQ(Mappings(), 0);
  session_->Destroy(false, absl::Now());
}

class TensorThreadsTest : public testing::Test {
 protected:
  TensorThreadsTest() : backend_(kernels::cpu::MakeCpuBackend(2)) {
    engine_ = engine::MakeEngine({backend_.get()}, 1 << 20).value();
    RegistryLimits limits;
    limits.max_pool_bytes = limits.max_hot_bytes = int64_t{1} << 28;
    limits.max_sessions = 16;
    limits.max_sequences_per_session = 16;
    limits.max_batch_items = 16;
    limits.max_queued_operations = 64;
    limits.max_tensors_per_session = 8;
    limits.max_tensor_bytes_per_session = 8 * kTensorBytes;
    registry_ = std::make_unique<Registry>(engine_.get(), limits, 1, [] { return absl::Now(); });
    absl::Notification made;
    registry_->CreatePool(SmallPool(), [&](const absl::StatusOr<PoolDescription>& description) {
      EXPECT_TRUE(description.ok()) << description.status();
      made.Notify();
    });
    made.WaitForNotification();
  }

  std::shared_ptr<Session> Attach(absl::Notification* ended) {
    Registry::SessionEvents events;
    events.draining = [](absl::Duration) {};
    events.pool_pressure = [](const BlockCounts&) {};
    events.superseded = [](SessionId) {};
    events.ended = [ended](const absl::Status&) { ended->Notify(); };
    std::shared_ptr<Session> session;
    absl::Notification attached;
    registry_->Attach(SmallSession(""), std::move(events), [&](absl::StatusOr<std::shared_ptr<Session>> result) {
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) session = *std::move(result);
      attached.Notify();
    });
    attached.WaitForNotification();
    return session;
  }

  static TensorId Register(Session& session, const FileDescriptor& memory) {
    const absl::StatusOr<uint64_t> offer = session.OfferDescriptor(Duplicate(memory));
    TensorId id;
    if (!offer.ok()) return id;
    absl::Notification done;
    session.RegisterTensor(DenseRequest(*offer), [&](const absl::StatusOr<TensorId>& result) {
      if (result.ok()) id = *result;
      done.Notify();
    });
    done.WaitForNotification();
    return id;
  }

  // What a call points to until it is done.
  struct Call {
    uint64_t id = 0;
    std::vector<uint32_t> rows;
  };
  static TensorRows RowsOf(const Call& call) {
    return {absl::MakeConstSpan(&call.id, 1), absl::MakeConstSpan(call.rows), 0};
  }

  // `life` of a session: two tensors, a sequence, and whatever the numbers say.
  void Live(std::mt19937_64& random) {
    absl::Notification ended;
    const std::shared_ptr<Session> session = Attach(&ended);
    ASSERT_NE(session, nullptr);
    const FileDescriptor source = NewMemory(), target = NewMemory();
    std::string bytes(kTensorBytes, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    ASSERT_EQ(pwrite(source.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    const TensorId from = Register(*session, source), to = Register(*session, target);
    ASSERT_NE(from.value, 0u);
    ASSERT_NE(to.value, 0u);
    AdmitItem item;
    item.prompt_rows = item.max_rows = kRows;
    SequenceId sequence;
    absl::Notification admitted;
    session->Admit({item}, [&](absl::StatusOr<std::vector<AdmittedSequence>> result) {
      if (result.ok() && (*result)[0].status.ok()) sequence = (*result)[0].id;
      admitted.Notify();
    });
    admitted.WaitForNotification();
    ASSERT_TRUE(sequence);
    // Rows in any order on the one side.
    auto store = std::make_shared<Call>();
    store->id = from.value;
    for (uint32_t row = 0; row < kRows; ++row) store->rows.push_back(row);
    std::shuffle(store->rows.begin(), store->rows.end(), random);
    auto load = std::make_shared<Call>();
    load->id = to.value;
    std::atomic<int> running{0};
    std::atomic<int> good{0};
    const auto count = [&running, &good](const absl::StatusOr<BatchResult>& result) {
      if (result.ok() && result->statuses[0].ok()) good.fetch_add(1);
      running.fetch_sub(1);
    };
    StoreItem store_item;
    store_item.range = {sequence, 0, kRows};
    store_item.source = RowSource::kTensor;
    store_item.tensor = RowsOf(*store);
    LoadItem load_item;
    load_item.range = {sequence, 0, kRows};
    load_item.target = RowTarget::kTensor;
    load_item.tensor = RowsOf(*load);
    running.fetch_add(1);
    session->Store({store_item}, {}, [count, store](const absl::StatusOr<BatchResult>& result) { count(result); });
    while (running.load() != 0) std::this_thread::yield();
    ASSERT_EQ(good.load(), 1);
    running.fetch_add(1);
    session->Load({load_item}, {}, [count, load](const absl::StatusOr<BatchResult>& result) { count(result); });
    while (running.load() != 0) std::this_thread::yield();
    ASSERT_EQ(good.load(), 2);
    std::string loaded(kTensorBytes, '\0');
    ASSERT_EQ(pread(target.get(), loaded.data(), loaded.size(), 0), static_cast<ssize_t>(loaded.size()));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t row = 0; row < kRows; ++row) {
        const size_t to_row = static_cast<size_t>((layer * kRows + row) * kRowBytes);
        const size_t from_row =
            static_cast<size_t>((layer * kRows + store->rows[static_cast<size_t>(row)]) * kRowBytes);
        ASSERT_EQ(std::memcmp(&loaded[to_row], &bytes[from_row], kRowBytes), 0) << layer << " " << row;
      }
    }
    checked_.fetch_add(kLayers * kRows);
    // And now without waiting, until a random moment.
    const int operations = static_cast<int>(random() % 12);
    for (int i = 0; i < operations; ++i) {
      running.fetch_add(1);
      switch (random() % 4) {
        case 0:
          session->Store({store_item}, {},
                         [count, store](const absl::StatusOr<BatchResult>& result) { count(result); });
          break;
        case 1:
          session->Load({load_item}, {}, [count, load](const absl::StatusOr<BatchResult>& result) { count(result); });
          break;
        case 2:
          session->UnregisterTensor(random() % 2 == 0 ? from : to,
                                    [&running](const absl::Status&) { running.fetch_sub(1); });
          break;
        default: {
          const absl::StatusOr<uint64_t> offer = session->OfferDescriptor(Duplicate(source));
          session->RegisterTensor(DenseRequest(offer.ok() ? *offer : 0),
                                  [&running](const absl::StatusOr<TensorId>&) { running.fetch_sub(1); });
        }
      }
    }
    EXPECT_TRUE(registry_->EndSession(session->id(), absl::OkStatus(), /*retain=*/false).ok());
    ended.WaitForNotification();
    while (running.load() != 0) std::this_thread::yield();
    EXPECT_EQ(session->tensor_bytes(), 0u);
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Registry> registry_;
  std::atomic<int64_t> checked_{0};
};

TEST_F(TensorThreadsTest, NothingRacesAndNothingStaysMapped) {
  constexpr int kThreads = 4, kLives = 60;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      for (int life = 0; life < kLives && !HasFatalFailure(); ++life) Live(random);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(checked_.load(), int64_t{kThreads} * kLives * kLayers * kRows);
  EXPECT_EQ(Mappings(), 0);
  EXPECT_TRUE(registry_->Pools()[0]->pool.CheckInvariants().ok());
}

}  // namespace
}  // namespace stoker::core
