// Calls with an order, in sessions whose engine the test is: when its work ends is up to the test, so that what must
// wait is seen to wait, and what must not is not. On a device that does not reach the memory of messages, and on the
// CPU.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
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
#include "kernels/order_word.h"
#include "server/core/registry.h"
#include "server/engine/engine.h"
#include "tests/engine/bounced_backend.h"

namespace stoker::core {
namespace {

using ::testing::HasSubstr;

constexpr char kDevice[] = "GPU-test";
constexpr int64_t kLayers = 2;
constexpr int64_t kRowBytes = 16;
constexpr int64_t kBlockRows = 16;
constexpr int64_t kHotRows = 32;
constexpr int64_t kTopK = 8;
constexpr int64_t kPrompt = 60;  // more than hot_rows
constexpr int64_t kMaxRows = 112;
constexpr absl::Duration kLong = absl::Seconds(20);
constexpr absl::Duration kShort = absl::Milliseconds(50);

CallOrder Both(uint64_t number) { return {.given = true, .number = number, .wait = true, .signal = true}; }
CallOrder Wait(uint64_t number) { return {.given = true, .number = number, .wait = true, .signal = false}; }
CallOrder Signal(uint64_t number) { return {.given = true, .number = number, .wait = false, .signal = true}; }

std::string RowBytes(int64_t position, int64_t layer, char version = 'a') {
  std::string row = absl::StrCat(std::string(1, version), " p", position, " l", layer, " ");
  row.resize(kRowBytes, '.');
  return row;
}

// What a callback got, once it was called.
template <typename T>
class Answer {
 public:
  auto Receiver() {
    return [state = state_](absl::StatusOr<T> value) {
      state->value = std::move(value);
      state->there.Notify();
    };
  }
  bool There() const { return state_->there.HasBeenNotified(); }
  absl::StatusOr<T> Get() const {
    if (!state_->there.WaitForNotificationWithTimeout(kLong)) return absl::DeadlineExceededError("no answer");
    return state_->value;
  }

 private:
  struct State {
    absl::Notification there;
    absl::StatusOr<T> value;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// A session, its arena mapped, and the session's end. The mapping stays until the process ends.
struct Attached {
  absl::StatusOr<std::shared_ptr<Session>> session = absl::UnknownError("not attached yet");
  std::shared_ptr<absl::Notification> attached = std::make_shared<absl::Notification>();
  std::shared_ptr<absl::Notification> ended = std::make_shared<absl::Notification>();
  std::shared_ptr<absl::Status> reason = std::make_shared<absl::Status>();
  char* arena = nullptr;
};

class SessionOrderTest : public testing::TestWithParam<bool> {
 protected:
  SessionOrderTest()
      : bounced_(std::move(engine_test::MakeBouncedBackends({kDevice}, 2).front())),
        cpu_(kernels::cpu::MakeCpuBackend(2)) {
    Start(GetParam() ? *bounced_ : *cpu_);
  }

  void Start(kernels::Backend& backend, absl::Duration doorbell_timeout = kLong) {
    registry_.reset();
    engine_ = engine::MakeEngine({&backend}, 1 << 20).value();
    RegistryLimits limits;
    limits.max_pool_bytes = limits.max_hot_bytes = int64_t{1} << 28;
    limits.max_sessions = 8;
    limits.max_armed_sessions = 3;
    limits.doorbell_timeout = doorbell_timeout;
    limits.max_sequences_per_session = limits.max_queued_operations = 64;
    limits.max_batch_items = 512;
    limits.sequence_retention = absl::Hours(1);
    registry_ = std::make_unique<Registry>(engine_.get(), limits, 1, [] { return absl::Now(); });
    PoolSpec pool;
    pool.name = "p";
    pool.layers = kLayers;
    pool.row_layout = RowLayout::kLinear;
    pool.row_bytes = kRowBytes;
    pool.block_rows = kBlockRows;
    pool.blocks = 64;
    Answer<PoolDescription> made;
    registry_->CreatePool(pool, made.Receiver());
    ASSERT_TRUE(made.Get().ok());
  }

  static SessionSpec Spec(const std::string& name = "") {
    SessionSpec spec;
    spec.pool = "p";
    spec.name = name;
    spec.state_rows = 4;
    spec.hot_rows = kHotRows;
    spec.max_top_k = kTopK;
    spec.max_sequence_rows = kMaxRows;
    spec.index_space = IndexSpace::kPosition;
    spec.groups = {{0, 1}};
    spec.staging_bytes = kLayers * kMaxRows * kRowBytes;
    return spec;
  }
  static SessionSpec Ordered(const std::string& name = "") {
    SessionSpec spec = Spec(name);
    spec.ordered_calls = true;
    return spec;
  }

  void Begin(const SessionSpec& spec, Attached* attached) {
    Registry::SessionEvents events;
    events.draining = [](absl::Duration) {};
    events.pool_pressure = [](const BlockCounts&) {};
    events.superseded = [](SessionId) {};
    events.ended = [ended = attached->ended, reason = attached->reason](const absl::Status& status) {
      *reason = status;
      ended->Notify();
    };
    registry_->Attach(spec, std::move(events), [attached, there = attached->attached](auto session) {
      attached->session = std::move(session);
      there->Notify();
    });
  }
  Attached Attach(const SessionSpec& spec) {
    auto attached = std::make_unique<Attached>();
    Begin(spec, attached.get());
    EXPECT_TRUE(attached->attached->WaitForNotificationWithTimeout(kLong));
    if (attached->session.ok()) Map(attached.get());
    return std::move(*attached);
  }
  static void Map(Attached* attached) {
    const FileDescriptor memory((*attached->session)->DuplicateArenaDescriptor().value());
    void* const mapped =
        mmap(nullptr, (*attached->session)->arena().size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
    ASSERT_NE(mapped, MAP_FAILED);
    attached->arena = static_cast<char*>(mapped);
  }

  static char* Tensor(const Attached& attached, const std::string& name) {
    for (const ArenaTensor& tensor : (*attached.session)->arena().tensors) {
      if (tensor.name == name) return attached.arena + tensor.offset_bytes;
    }
    ADD_FAILURE() << name;
    return nullptr;
  }
  static int32_t* Entries(const Attached& attached) {
    return reinterpret_cast<int32_t*>(Tensor(attached, "indices.0"));
  }
  static int32_t* HotRows(const Attached& attached) {
    return reinterpret_cast<int32_t*>(Tensor(attached, "hot_rows.0"));
  }
  static std::string HotRow(const Attached& attached, int64_t layer, int64_t row) {
    return std::string(Tensor(attached, absl::StrCat("hot.", layer)) + row * kRowBytes, kRowBytes);
  }
  static void WriteNewest(const Attached& attached, int32_t state_row, int64_t position) {
    const ArenaLayout& arena = (*attached.session)->arena();
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      std::memcpy(Tensor(attached, absl::StrCat("hot.", layer)) +
                      (int64_t{state_row} * arena.region_rows + arena.newest_row) * kRowBytes,
                  RowBytes(position, layer).data(), kRowBytes);
    }
  }
  static void WriteStaging(const Attached& attached, int64_t first, int64_t count, char version = 'a') {
    char* next = Tensor(attached, "staging");
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t row = first; row < first + count; ++row, next += kRowBytes) {
        std::memcpy(next, RowBytes(row, layer, version).data(), kRowBytes);
      }
    }
  }

  AdmittedSequence Admit(const Attached& attached, const std::string& key = "") {
    AdmitItem item;
    item.key = key;
    item.prompt_rows = kPrompt;
    item.max_rows = kMaxRows;
    Answer<std::vector<AdmittedSequence>> admitted;
    (*attached.session)->Admit({item}, admitted.Receiver());
    const auto result = admitted.Get();
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return {};
    EXPECT_TRUE((*result)[0].status.ok()) << (*result)[0].status;
    return (*result)[0];
  }
  // Rows [first, first + count) from the staging area.
  static Answer<BatchResult> Store(const Attached& attached, SequenceId id, int64_t first, int64_t count,
                                   CallOrder order) {
    StoreItem item;
    item.range = {id, first, count};
    item.source = RowSource::kStaging;
    Answer<BatchResult> stored;
    (*attached.session)->Store({item}, order, stored.Receiver());
    return stored;
  }
  AdmittedSequence Open(const Attached& attached, const std::string& key = "") {
    const AdmittedSequence sequence = Admit(attached, key);
    WriteStaging(attached, 0, kPrompt);
    const auto stored = Store(attached, sequence.id, 0, kPrompt, {}).Get();
    EXPECT_TRUE(stored.ok() && stored->statuses[0].ok());
    return sequence;
  }
  // Loads of one row each.
  static Answer<BatchResult> LoadMany(const Attached& attached, SequenceId id, CallOrder order) {
    LoadItem item;
    item.range = {id, 0, 1};
    item.target = RowTarget::kStaging;
    Answer<BatchResult> loaded;
    (*attached.session)->Load(std::vector<LoadItem>(512, item), order, loaded.Receiver());
    return loaded;
  }

  static std::string Read(const Attached& attached, SequenceId id, int64_t position) {
    const std::vector<uint32_t> positions = {static_cast<uint32_t>(position)};
    ReadRequest request;
    request.id = id;
    request.values = positions;
    std::string bytes(kLayers * kRowBytes, '\0');
    Answer<uint64_t> read;
    (*attached.session)->Read(request, bytes.data(), read.Receiver());
    const auto result = read.Get();
    return result.ok() ? bytes : std::string(result.status().message());
  }
  static std::string AllLayers(int64_t position, char version = 'a') {
    return RowBytes(position, 0, version) + RowBytes(position, 1, version);
  }

  // A shared step of one row with a commit of its newest row.
  static StepRequest Step(const AdmittedSequence& sequence, int64_t length, CallOrder order) {
    StepRequest request;
    StepRowRequest row;
    row.id = sequence.id;
    row.length = length;
    row.commit = true;
    request.rows = {row};
    request.groups.resize(1);
    request.top_k = kTopK;
    request.shared = true;
    request.order = order;
    return request;
  }
  static uint64_t& Word(const Attached& attached, const std::string& name) {
    return *reinterpret_cast<uint64_t*>(Tensor(attached, name));
  }
  // The engine's work for call `number` is done.
  static void Finish(const Attached& attached, uint64_t number) {
    std::atomic_ref<uint64_t>(Word(attached, "engine_word")).store(number, std::memory_order_release);
  }
  static uint64_t Done(const Attached& attached) {
    return std::atomic_ref<uint64_t>(Word(attached, "daemon_word")).load(std::memory_order_acquire);
  }
  static void AwaitDone(const Attached& attached, uint64_t number) {
    const absl::Time limit = absl::Now() + kLong;
    while (Done(attached) < number && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(Done(attached), number);
  }
  // An operation ends a moment after its answer.
  static void AwaitQueued(const Session& session, int64_t operations) {
    const absl::Time limit = absl::Now() + kLong;
    while (session.queued_operations() != operations && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(session.queued_operations(), operations);
  }
  void Detach(const Attached& attached) {
    EXPECT_TRUE(registry_->EndSession((*attached.session)->id(), absl::OkStatus(), false).ok());
  }
  absl::Status Lose(const Attached& attached) {
    return registry_->EndSession((*attached.session)->id(), absl::CancelledError("the engine is gone"), true);
  }

  const std::unique_ptr<engine_test::BouncedBackend> bounced_;
  const std::unique_ptr<kernels::Backend> cpu_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Registry> registry_;
};

INSTANTIATE_TEST_SUITE_P(Devices, SessionOrderTest, testing::Values(true, false),
                         [](const auto& param) { return param.param ? "Bounced" : "Cpu"; });

// What the CPU has not: it takes as much work as max_queued_operations allows, and is never lost.
class DeviceOrderTest : public SessionOrderTest {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceOrderTest, testing::Values(true), [](const auto&) { return "Bounced"; });

// The engine's kernels write the newest row and the entries last, long after the call was made and answered.
TEST_P(SessionOrderTest, StepsBeginAfterTheEnginesWorkAndAreAnsweredBefore) {
  const Attached attached = Attach(Ordered());
  Session& session = **attached.session;
  EXPECT_EQ(session.no_ordered_calls(), "");
  const AdmittedSequence sequence = Open(attached);
  const uint64_t steps_before = session.Info().steps;
  for (int64_t step = 0; step < 5; ++step) {
    SCOPED_TRACE(step);
    const int64_t length = kPrompt + 1 + step;
    std::fill_n(Entries(attached), kTopK, -1);
    std::fill_n(HotRows(attached), kTopK, -7);
    const uint64_t number = 10 + 3 * static_cast<uint64_t>(step);
    StepRequest request = Step(sequence, length, Both(number));
    StepResult finished;
    absl::Notification told;
    request.finished = [&](const StepResult& r) {
      finished = r;
      told.Notify();
    };
    Answer<StepResult> answer;
    session.Step(&request, answer.Receiver());
    const auto result = answer.Get();
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(result->statuses[0].ok()) << result->statuses[0];
    EXPECT_EQ(result->gathered_bytes, 0u);
    request = {};  // it is not used any more
    absl::SleepFor(kShort);
    EXPECT_LT(Done(attached), number);
    EXPECT_EQ(HotRows(attached)[0], -7);
    AwaitQueued(session, 1);
    for (int64_t k = 0; k < kTopK; ++k) Entries(attached)[k] = static_cast<int32_t>((length - 1) - k * (7 - step));
    WriteNewest(attached, sequence.state_row, length - 1);
    // One less is not enough, one more is.
    Finish(attached, number - 1);
    absl::SleepFor(absl::Milliseconds(5));
    EXPECT_LT(Done(attached), number);
    Finish(attached, number + step % 2);
    AwaitDone(attached, number);
    for (int64_t k = 0; k < kTopK; ++k) {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(HotRow(attached, layer, HotRows(attached)[k]), RowBytes(Entries(attached)[k], layer)) << k;
      }
    }
    ASSERT_TRUE(told.WaitForNotificationWithTimeout(kLong));
    EXPECT_GT(finished.device_ns, 0u);
    if (step == 0) {
      EXPECT_GT(finished.gathered_bytes, 0u);
    }
    EXPECT_EQ(Read(attached, sequence.id, length - 1), AllLayers(length - 1));
    EXPECT_EQ(session.Info().steps, steps_before + static_cast<uint64_t>(step) + 1);
  }
  // Counted when they were done: every entry has an outcome.
  uint64_t lookups = 0;
  for (const uint64_t count : session.Info().lookups) lookups += count;
  EXPECT_EQ(lookups, 5u * kTopK);
  Detach(attached);
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
}

// Calls one behind the other while none of them can begin; each sees what the one before will have done.
TEST_P(SessionOrderTest, CallsAreEnqueuedBehindEachOther) {
  const Attached attached = Attach(Ordered());
  Session& session = **attached.session;
  const AdmittedSequence sequence = Admit(attached);
  const auto stored = Store(attached, sequence.id, 0, kPrompt, Both(1)).Get();
  ASSERT_TRUE(stored.ok() && stored->statuses[0].ok());
  EXPECT_EQ(stored->bytes, static_cast<uint64_t>(kPrompt * kLayers * kRowBytes));
  StepRequest step = Step(sequence, kPrompt + 1, Both(2));
  step.gather = false;
  Answer<StepResult> resolved;
  session.Step(&step, resolved.Receiver());
  ASSERT_TRUE(resolved.Get().ok());
  ASSERT_TRUE(resolved.Get()->statuses[0].ok()) << resolved.Get()->statuses[0];
  Answer<uint64_t> gathered;
  session.Gather(0, {}, Both(3), gathered.Receiver());
  ASSERT_TRUE(gathered.Get().ok());
  EXPECT_EQ(*gathered.Get(), 0u);
  Answer<BatchResult> committed;
  session.Commit({{sequence.id, kPrompt, 2}}, Both(4), committed.Receiver());
  ASSERT_TRUE(committed.Get().ok());
  ASSERT_TRUE(committed.Get()->statuses[0].ok()) << committed.Get()->statuses[0];
  LoadItem load;
  load.range = {sequence.id, kPrompt, 1};
  load.target = RowTarget::kStaging;
  load.staging_offset = (kLayers * kPrompt * kRowBytes);
  Answer<BatchResult> loaded;
  session.Load({load}, Both(5), loaded.Receiver());
  ASSERT_TRUE(loaded.Get().ok());
  ASSERT_TRUE(loaded.Get()->statuses[0].ok()) << loaded.Get()->statuses[0];
  AwaitQueued(session, 5);
  EXPECT_EQ(Done(attached), 0u);

  WriteStaging(attached, 0, kPrompt);
  for (int64_t k = 0; k < kTopK; ++k) Entries(attached)[k] = static_cast<int32_t>(k * 8);
  WriteNewest(attached, sequence.state_row, kPrompt);
  Finish(attached, 4);
  AwaitDone(attached, 4);
  AwaitQueued(session, 1);
  Finish(attached, 5);
  AwaitDone(attached, 5);
  for (int64_t k = 0; k < kTopK; ++k) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(HotRow(attached, layer, HotRows(attached)[k]), RowBytes(k * 8, layer)) << k;
    }
  }
  EXPECT_EQ(std::string(Tensor(attached, "staging") + load.staging_offset, kRowBytes), RowBytes(kPrompt, 0));
  EXPECT_EQ(Read(attached, sequence.id, kPrompt), AllLayers(kPrompt));
  Detach(attached);
}

// Each of the two is of use without the other.
TEST_P(SessionOrderTest, WaitAloneIsAnsweredWhenDoneAndSignalAloneDoesNotWait) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Admit(attached);
  WriteStaging(attached, 0, kPrompt);
  const auto signalled = Store(attached, sequence.id, 0, 8, Signal(1)).Get();
  ASSERT_TRUE(signalled.ok() && signalled->statuses[0].ok());
  AwaitDone(attached, 1);  // though the engine is at work
  const Answer<BatchResult> waiting = Store(attached, sequence.id, 8, 8, Wait(2));
  absl::SleepFor(kShort);
  EXPECT_FALSE(waiting.There());
  Finish(attached, 2);
  ASSERT_TRUE(waiting.Get().ok() && waiting.Get()->statuses[0].ok());
  EXPECT_EQ(Done(attached), 1u);
  Detach(attached);
}

TEST_P(SessionOrderTest, RefusesWhatAReplyAheadOfTheWorkCannotCarry) {
  const Attached attached = Attach(Ordered());
  Session& session = **attached.session;
  const AdmittedSequence sequence = Open(attached);
  uint64_t number = 0;
  const auto refused = [&](StepRequest request, absl::StatusCode code, const std::string& part) {
    Answer<StepResult> answer;
    session.Step(&request, answer.Receiver());
    EXPECT_EQ(answer.Get().status().code(), code) << answer.Get().status();
    EXPECT_THAT(std::string(answer.Get().status().message()), HasSubstr(part));
    // Whoever waits for the answer goes on.
    AwaitDone(attached, number);
  };
  StepRequest request = Step(sequence, kPrompt + 1, Both(++number));
  const std::vector<int32_t> indices(kTopK, -1);
  request.shared = false;
  request.groups[0].indices = indices;
  refused(request, absl::StatusCode::kInvalidArgument, "source: INLINE given with order.signal");
  request = Step(sequence, kPrompt + 1, Both(++number));
  const std::string newest(kLayers * kRowBytes, 'n');
  request.rows[0].newest_row = newest;
  refused(request, absl::StatusCode::kInvalidArgument, "newest_row: 32 bytes given at row 0 with order.signal");
  StoreItem item;
  item.range = {sequence.id, kPrompt, 1};
  item.rows = newest;
  Answer<BatchResult> stored;
  session.Store({item}, Both(++number), stored.Receiver());
  EXPECT_EQ(stored.Get().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(stored.Get().status().message()), HasSubstr("source: INLINE given in item 0"));
  AwaitDone(attached, number);
  AwaitQueued(session, 0);
  // The wait alone goes with messages.
  Answer<BatchResult> plain;
  session.Store({item}, Wait(++number), plain.Receiver());
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(plain.There());
  Finish(attached, number);
  EXPECT_TRUE(plain.Get().ok() && plain.Get()->statuses[0].ok());
  Detach(attached);
}

// Each refused with field, value and limits, and without a trace.
TEST_P(SessionOrderTest, RefusesNumbersThatDoNotRise) {
  const Attached attached = Attach(Ordered());
  Session& session = **attached.session;
  const AdmittedSequence sequence = Open(attached);
  const auto refused = [&](CallOrder order, const std::string& message) {
    const absl::Status status = Store(attached, sequence.id, kPrompt, 1, order).Get().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  refused({.given = true, .number = 0, .wait = true, .signal = true},
          absl::StrCat("order.number: 0 given, limits 1 and ", kernels::kMaxOrder));
  refused(Both(kernels::kMaxOrder + 1),
          absl::StrCat("order.number: ", kernels::kMaxOrder + 1, " given, limits 1 and "));
  refused(Both(UINT64_MAX), absl::StrCat("order.number: ", UINT64_MAX, " given, limits 1 and "));
  refused({.given = true, .number = 7, .wait = false, .signal = false}, "order: neither wait nor signal given");
  EXPECT_EQ(Done(attached), 0u);
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Signal(5)).Get().ok());
  AwaitDone(attached, 5);
  refused(Both(5), "order.number: 5 given, limits 6, one above an earlier call's, and ");
  refused(Both(4), "order.number: 4 given, limits 6, one above an earlier call's, and ");
  // Gaps are allowed, up to the largest of all.
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Signal(kernels::kMaxOrder)).Get().ok());
  AwaitDone(attached, kernels::kMaxOrder);
  refused(Both(kernels::kMaxOrder), "order.number: ");
  AwaitQueued(session, 0);
  Detach(attached);
}

// A call that is refused while others wait: whoever waits for its answer goes on when they are done, and not before.
TEST_P(SessionOrderTest, ARefusedCallsNumberComesBehindTheWorkBeforeIt) {
  const Attached attached = Attach(Ordered());
  Session& session = **attached.session;
  const AdmittedSequence sequence = Open(attached);
  const auto refused = [&](uint64_t number) {
    StepRequest request = Step(sequence, kPrompt + 1, Both(number));
    request.top_k = kTopK + 1;
    Answer<StepResult> answer;
    session.Step(&request, answer.Receiver());
    EXPECT_EQ(answer.Get().status().code(), absl::StatusCode::kInvalidArgument) << answer.Get().status();
  };
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Both(1)).Get().ok());
  refused(2);
  refused(3);
  absl::SleepFor(kShort);
  EXPECT_EQ(Done(attached), 0u);
  Finish(attached, 1);
  AwaitDone(attached, 3);
  // And with a call behind it that waits.
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt + 1, 1, Both(4)).Get().ok());
  refused(5);
  const Answer<BatchResult> waiting = Store(attached, sequence.id, kPrompt + 2, 1, Wait(6));
  Finish(attached, 4);
  AwaitDone(attached, 5);
  EXPECT_FALSE(waiting.There());
  Finish(attached, 6);
  EXPECT_TRUE(waiting.Get().ok());
  // As many as may be are queued; one more is refused, and its number comes, too.
  std::vector<Answer<BatchResult>> queued;
  uint64_t number = 6;
  for (int i = 0; i < 64; ++i) queued.push_back(Store(attached, sequence.id, kPrompt, 1, Both(++number)));
  const absl::Status full = Store(attached, sequence.id, kPrompt, 1, Both(++number)).Get().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  Finish(attached, number - 1);
  AwaitDone(attached, number);
  Detach(attached);
}

// What fails when it is enqueued is answered with the error, and its number comes as well.
TEST_P(SessionOrderTest, ACallWithoutWorkHasItsNumberComeToo) {
  const Attached attached = Attach(Ordered());
  Answer<uint64_t> gathered;
  (*attached.session)->Gather(0, {}, Signal(1), gathered.Receiver());
  EXPECT_EQ(gathered.Get().status().code(), absl::StatusCode::kFailedPrecondition) << gathered.Get().status();
  AwaitDone(attached, 1);
  const auto stored = Store(attached, SequenceId{77}, 0, 1, Signal(2)).Get();
  ASSERT_TRUE(stored.ok());
  EXPECT_EQ(stored->statuses[0].code(), absl::StatusCode::kNotFound);
  AwaitDone(attached, 2);
  Detach(attached);
}

TEST_P(SessionOrderTest, RefusesAnOrderInASessionWithoutOrderedCalls) {
  const Attached attached = Attach(Spec());
  Session& session = **attached.session;
  const AdmittedSequence sequence = Open(attached);
  const auto check = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("order: given, session "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("was attached without ordered_calls"));
  };
  for (const CallOrder& order : {Wait(1), Signal(1)}) {
    StepRequest request = Step(sequence, kPrompt + 1, order);
    Answer<StepResult> stepped;
    session.Step(&request, stepped.Receiver());
    check(stepped.Get().status());
    check(Store(attached, sequence.id, kPrompt, 1, order).Get().status());
    LoadItem load;
    load.range = {sequence.id, 0, 1};
    Answer<BatchResult> batch;
    session.Load({load}, order, batch.Receiver());
    check(batch.Get().status());
    Answer<BatchResult> committed;
    session.Commit({{sequence.id, kPrompt, 1}}, order, committed.Receiver());
    check(committed.Get().status());
    Answer<uint64_t> gathered;
    session.Gather(0, {}, order, gathered.Receiver());
    check(gathered.Get().status());
  }
  AwaitQueued(session, 0);
  EXPECT_EQ(Done(attached), 0u);
  Detach(attached);
}

// Sessions with ordered calls and armed ones are counted together, and leave room when they go.
TEST_P(SessionOrderTest, AsManySessionsAsMayWait) {
  std::vector<Attached> attached;
  for (int i = 0; i < 2; ++i) attached.push_back(Attach(Ordered()));
  const Attached armed = Attach(Spec());
  const auto arm = [](const Attached& session) {
    Answer<ArmResult> result;
    (*session.session)->Arm(kTopK, {}, result.Receiver());
    return result.Get().status();
  };
  ASSERT_TRUE(arm(armed).ok());
  EXPECT_EQ(registry_->Usage().armed_sessions, 1);
  EXPECT_EQ(registry_->Usage().ordered_sessions, 2);
  const std::string figures = "sessions: 1 are armed, 2 have ordered calls, limit max_armed_sessions 3";
  const Attached refused = Attach(Ordered());
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kResourceExhausted) << refused.session.status();
  EXPECT_EQ(refused.session.status().message(), figures);
  EXPECT_EQ(arm(attached[0]).message(), figures);
  Detach(attached[1]);
  EXPECT_TRUE(attached[1].ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(registry_->Usage().ordered_sessions, 1);
  EXPECT_TRUE(arm(attached[0]).ok());
  Detach(attached[0]);
  EXPECT_TRUE(attached[0].ended->WaitForNotificationWithTimeout(kLong));
  const Attached next = Attach(Ordered());
  EXPECT_TRUE(next.session.ok()) << next.session.status();
  Detach(next);
  Detach(armed);
}

// What of the session's work has begun is done; what waits is not, and nothing of it is.
TEST_P(SessionOrderTest, ADetachedSessionDoesNotWait) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached);
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Both(1)).Get().ok());
  Detach(attached);
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(Done(attached), 0u);
}

// The engine dies before its kernels have written what the session's work waits for: the session ends all the same,
// nothing that they did not write is stored, and rows that were to be written anew are the old ones.
TEST_P(SessionOrderTest, AnEngineThatDiesInTheMiddleOfItsWork) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence appended = Open(attached, "appended");
  const AdmittedSequence rewritten = Open(attached, "rewritten");
  const AdmittedSequence untouched = Open(attached, "untouched");
  // This is what the engine was to overwrite.
  WriteStaging(attached, 20, 8, 'x');
  ASSERT_TRUE(Store(attached, appended.id, kPrompt, 8, Both(1)).Get()->statuses[0].ok());
  ASSERT_TRUE(Store(attached, rewritten.id, 20, 8, Both(2)).Get()->statuses[0].ok());
  StepRequest step = Step(appended, kPrompt + 9, Both(3));
  step.finished = [](const StepResult&) { ADD_FAILURE() << "the step is said to be done"; };
  Answer<StepResult> stepped;
  (*attached.session)->Step(&step, stepped.Receiver());
  ASSERT_TRUE(stepped.Get()->statuses[0].ok()) << stepped.Get()->statuses[0];
  // Not in the middle of the engine's work: this one is answered when it is over.
  const Answer<BatchResult> waiting = Store(attached, untouched.id, kPrompt, 1, Wait(4));
  // Nor does this wait, but for the others.
  const Answer<BatchResult> behind = Store(attached, untouched.id, 20, 8, {});
  EXPECT_TRUE(Lose(attached).ok());
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  for (const Answer<BatchResult>& answer : {waiting, behind}) {
    ASSERT_TRUE(answer.Get().ok());
    EXPECT_EQ(answer.Get()->statuses[0].code(), absl::StatusCode::kUnavailable) << answer.Get()->statuses[0];
    EXPECT_THAT(std::string(answer.Get()->statuses[0].message()), HasSubstr("has ended before its work was known"));
  }
  // Who waits for the daemon is told by the end of the session, before the wait ends.
  EXPECT_EQ(Done(attached), 0u);

  const Attached next = Attach(Ordered());
  EXPECT_EQ(Admit(next, "appended").stored_rows, kPrompt);
  const AdmittedSequence again = Admit(next, "rewritten");
  const AdmittedSequence same = Admit(next, "untouched");
  EXPECT_EQ(again.stored_rows, kPrompt);
  EXPECT_EQ(same.stored_rows, kPrompt);
  for (int64_t position = 0; position < kPrompt; ++position) {
    ASSERT_EQ(Read(next, again.id, position), AllLayers(position)) << position;
    ASSERT_EQ(Read(next, same.id, position), AllLayers(position)) << position;
  }
  Detach(next);
}

// Nor are rows taken to where the engine's kernels may still be at work.
TEST_P(SessionOrderTest, AnAbortedLoadMovesNothing) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached);
  WriteStaging(attached, 0, 8, 'x');
  LoadItem load;
  load.range = {sequence.id, 0, 8};
  load.target = RowTarget::kStaging;
  Answer<BatchResult> loaded;
  (*attached.session)->Load({load}, Both(1), loaded.Receiver());
  ASSERT_TRUE(loaded.Get().ok() && loaded.Get()->statuses[0].ok());
  EXPECT_TRUE(Lose(attached).ok());
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(std::string(Tensor(attached, "staging"), kRowBytes), RowBytes(0, 0, 'x'));
}

// Its name is taken by another session while the engine's work hangs: that one need not wait for it, nor for an engine
// that sets its word back. Several times: the stream may see the word before it is set back.
TEST_P(SessionOrderTest, ASupersededSessionWhoseEngineHangs) {
  Attached first = Attach(Ordered("rank0"));
  AdmittedSequence sequence = Open(first, "key");
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE(round);
    ASSERT_TRUE(Store(first, sequence.id, kPrompt, 8, Both(5)).Get()->statuses[0].ok());
    std::thread engine([word = &Word(first, "engine_word")] {
      while (std::atomic_ref<uint64_t>(*word).load() != kernels::kReleasedOrder) continue;
      std::atomic_ref<uint64_t>(*word).store(1);
    });
    Attached second;
    Begin(Ordered("rank0"), &second);
    engine.join();
    ASSERT_TRUE(second.attached->WaitForNotificationWithTimeout(kLong));
    ASSERT_TRUE(second.session.ok()) << second.session.status();
    EXPECT_TRUE(first.ended->WaitForNotificationWithTimeout(kLong));
    Map(&second);
    EXPECT_EQ(Word(second, "engine_word"), 0u);
    sequence = Admit(second, "key");
    EXPECT_EQ(sequence.stored_rows, kPrompt);
    first = std::move(second);
  }
  Detach(first);
}

// The limit is of one wait, and not of all that are queued.
TEST_P(SessionOrderTest, AnEngineThatDoesNotComeLosesItsSession) {
  constexpr absl::Duration kTimeout = absl::Milliseconds(400);
  Start(GetParam() ? *bounced_ : *cpu_, kTimeout);
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached, "key");
  const absl::Time begin = absl::Now();
  for (uint64_t number = 1; number <= 5; ++number) {
    ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Both(number)).Get().ok());
  }
  for (uint64_t number = 1; number <= 4; ++number) {
    absl::SleepFor(kTimeout / 2);
    Finish(attached, number);
    AwaitDone(attached, number);
  }
  EXPECT_GT(absl::Now() - begin, 3 * kTimeout / 2);
  const absl::Time last = absl::Now();
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_GE(absl::Now() - last, kTimeout / 2);
  EXPECT_EQ(attached.reason->code(), absl::StatusCode::kDeadlineExceeded) << *attached.reason;
  EXPECT_THAT(std::string(attached.reason->message()), HasSubstr("engine_word did not come to 5, or the work"));
  EXPECT_THAT(std::string(attached.reason->message()), HasSubstr("within doorbell_timeout_ms 400"));
  EXPECT_EQ(Done(attached), 4u);
  // What was stored stays.
  const Attached next = Attach(Ordered());
  EXPECT_EQ(Admit(next, "key").stored_rows, kPrompt + 1);
  Detach(next);
}

// No more is enqueued behind a wait than a GPU takes without a wait of the caller's.
TEST_P(DeviceOrderTest, AsManyPiecesOfWorkAsMayBeAreQueued) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached);
  absl::Status status;
  uint64_t number = 0;
  std::vector<Answer<StepResult>> answers;
  while (status.ok() && number < 64) {
    StepRequest step = Step(sequence, kPrompt + 1, Both(++number));
    step.rows[0].commit = false;
    (*attached.session)->Step(&step, answers.emplace_back().Receiver());
    status = answers.back().Get().status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("pieces of work queued on the device, limit 640"));
  Finish(attached, number);
  AwaitDone(attached, number);
  AwaitQueued(**attached.session, 0);
  // Calls that are refused add nothing to it.
  for (int i = 0; i < 1000; ++i) {
    const CallOrder order = i == 0 ? Both(++number) : Signal(++number);
    StepRequest step = Step(sequence, i == 0 ? kPrompt + 1 : kMaxRows + 1, order);
    Answer<StepResult> answer;
    (*attached.session)->Step(&step, answer.Receiver());
    EXPECT_EQ(answer.Get().ok(), i == 0) << answer.Get().status();
  }
  StepRequest step = Step(sequence, kPrompt + 1, Both(++number));
  Answer<StepResult> more;
  (*attached.session)->Step(&step, more.Receiver());
  EXPECT_TRUE(more.Get().ok()) << more.Get().status();
  Finish(attached, number);
  AwaitDone(attached, number);
  Detach(attached);
}

// Items of one call, too: who enqueues them holds the session's mutex.
TEST_P(DeviceOrderTest, ItemsThatFindNoRoomBehindAWaitAreRefused) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached);
  const auto loaded = LoadMany(attached, sequence.id, Both(1)).Get();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->statuses.front().ok()) << loaded->statuses.front();
  const absl::Status refused = loaded->statuses.back();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("that wait for engine_word, limit 896"));
  const auto done = static_cast<uint64_t>(
      std::count_if(loaded->statuses.begin(), loaded->statuses.end(), [](const absl::Status& s) { return s.ok(); }));
  EXPECT_EQ(loaded->bytes, done * kLayers * kRowBytes);
  Finish(attached, 1);
  AwaitDone(attached, 1);
  AwaitQueued(**attached.session, 0);
  // Without a wait there is room for all of them: the device makes it.
  const auto all = LoadMany(attached, sequence.id, {}).Get();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(all->statuses, testing::Each(absl::OkStatus()));
  Detach(attached);
}

// Who writes to a sequence that another session has open enqueues work there, and must not wait for that one's engine.
TEST_P(DeviceOrderTest, ASessionWithoutRoomForOthersIsEnded) {
  const Attached writer = Attach(Spec("writer"));
  const Attached reader = Attach(Ordered("reader"));
  const AdmittedSequence sequence = Open(writer, "shared");
  ASSERT_EQ(Admit(reader, "shared").id, sequence.id);
  ASSERT_TRUE(LoadMany(reader, sequence.id, Both(1)).Get().ok());
  std::vector<Answer<BatchResult>> stores;
  for (int i = 0; i < 40; ++i) stores.push_back(Store(writer, sequence.id, 0, 1, {}));
  ASSERT_TRUE(reader.ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(reader.reason->code(), absl::StatusCode::kResourceExhausted) << *reader.reason;
  EXPECT_THAT(std::string(reader.reason->message()), HasSubstr("more than 896 pieces of work wait for engine_word"));
  for (const Answer<BatchResult>& stored : stores) {
    const auto result = stored.Get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->statuses[0].ok()) << result->statuses[0];
  }
  Detach(writer);
}

// An engine's stream may write its words when the session has ended: they must not be another session's.
TEST_P(SessionOrderTest, NoHandleOfMemoryThatOthersGet) {
  SessionSpec spec = Ordered();
  spec.arena_sharing = ArenaSharing::kIpcHandle;
  const absl::Status status = Attach(spec).session.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("ARENA_SHARING_IPC_HANDLE given with ordered_calls"));
}

// What fails after its reply is told by the next call.
TEST_P(DeviceOrderTest, WorkThatFailsLateFailsTheNextCall) {
  const Attached attached = Attach(Ordered());
  const AdmittedSequence sequence = Open(attached);
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, Both(1)).Get()->statuses[0].ok());
  bounced_->Lose();
  Finish(attached, 1);
  AwaitQueued(**attached.session, 0);
  Answer<BatchResult> next;
  (*attached.session)->Release({sequence.id}, next.Receiver());
  const absl::Status told = next.Get().status();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("an earlier call with order.signal failed after its reply"));
  Detach(attached);
}

}  // namespace
}  // namespace stoker::core
