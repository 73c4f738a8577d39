// Events of sessions, on devices whose engine the test is: when its work ends is up to the test, so that what must wait
// is seen to wait, and what must not is not.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
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
#include "tests/engine/bounced_backend.h"

// The lock order graph of absl::Mutex: see tests/tsan.supp.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "race:libabsl_graphcycles_internal.so\n"; }

namespace stoker::core {
namespace {

using engine_test::BouncedEngine;
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
constexpr CallEvents kBoth = {.wait = true, .signal = true};

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

// A session, its arena mapped, and the session's end.
struct Attached {
  absl::StatusOr<std::shared_ptr<Session>> session = absl::UnknownError("not attached yet");
  std::shared_ptr<absl::Notification> attached = std::make_shared<absl::Notification>();
  std::shared_ptr<absl::Notification> ended = std::make_shared<absl::Notification>();
  char* arena = nullptr;
};

class SessionEventsTest : public testing::Test {
 protected:
  SessionEventsTest() : backend_(std::move(engine_test::MakeBouncedBackends({kDevice}, 2).front())) {
    Start(*backend_);
  }

  // What a test that fails has left waiting ends.
  void TearDown() override { peer_.Finish(); }

  void Start(kernels::Backend& backend) {
    registry_.reset();
    engine_ = engine::MakeEngine({&backend}, 1 << 20).value();
    RegistryLimits limits;
    limits.max_pool_bytes = limits.max_hot_bytes = int64_t{1} << 28;
    limits.max_sessions = 8;
    limits.max_sequences_per_session = limits.max_batch_items = limits.max_queued_operations = 64;
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
  static SessionSpec WithEvents(const BouncedEngine& engine, const std::string& name = "") {
    SessionSpec spec = Spec(name);
    spec.engine_event = {engine.ipc_handle(), kDevice};
    return spec;
  }

  void Begin(const SessionSpec& spec, Attached* attached) {
    Registry::SessionEvents events;
    events.draining = [](absl::Duration) {};
    events.pool_pressure = [](const BlockCounts&) {};
    events.superseded = [](SessionId) {};
    events.ended = [ended = attached->ended](const absl::Status&) { ended->Notify(); };
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
                                   CallEvents events) {
    StoreItem item;
    item.range = {id, first, count};
    item.source = RowSource::kStaging;
    Answer<BatchResult> stored;
    (*attached.session)->Store({item}, events, stored.Receiver());
    return stored;
  }
  AdmittedSequence Open(const Attached& attached, const std::string& key = "") {
    const AdmittedSequence sequence = Admit(attached, key);
    WriteStaging(attached, 0, kPrompt);
    const auto stored = Store(attached, sequence.id, 0, kPrompt, {}).Get();
    EXPECT_TRUE(stored.ok() && stored->statuses[0].ok());
    return sequence;
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
  static StepRequest Step(const AdmittedSequence& sequence, int64_t length, CallEvents events = kBoth) {
    StepRequest request;
    StepRowRequest row;
    row.id = sequence.id;
    row.length = length;
    row.commit = true;
    request.rows = {row};
    request.groups.resize(1);
    request.top_k = kTopK;
    request.shared = true;
    request.events = events;
    return request;
  }
  static void AwaitComplete(const Attached& attached) {
    const absl::Time limit = absl::Now() + kLong;
    while (!BouncedEngine::IsComplete((*attached.session)->event_handle()) && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_TRUE(BouncedEngine::IsComplete((*attached.session)->event_handle()));
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

  const std::unique_ptr<engine_test::BouncedBackend> backend_;
  BouncedEngine peer_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Registry> registry_;
};

// The engine's kernels write the newest row and the entries last, long after the call was made and answered.
TEST_F(SessionEventsTest, StepsBeginAfterTheEnginesWorkAndAreAnsweredBefore) {
  const Attached attached = Attach(WithEvents(peer_));
  Session& session = **attached.session;
  EXPECT_EQ(session.event_handle().size(), 64u);
  const AdmittedSequence sequence = Open(attached);
  const uint64_t steps_before = session.Info().steps;
  for (int64_t step = 0; step < 5; ++step) {
    SCOPED_TRACE(step);
    const int64_t length = kPrompt + 1 + step;
    std::fill_n(Entries(attached), kTopK, -1);
    std::fill_n(HotRows(attached), kTopK, -7);
    peer_.Record();
    StepRequest request = Step(sequence, length);
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
    EXPECT_FALSE(BouncedEngine::IsComplete(session.event_handle()));
    EXPECT_EQ(HotRows(attached)[0], -7);
    AwaitQueued(session, 1);
    for (int64_t k = 0; k < kTopK; ++k) Entries(attached)[k] = static_cast<int32_t>((length - 1) - k * (7 - step));
    WriteNewest(attached, sequence.state_row, length - 1);
    peer_.Finish();
    AwaitComplete(attached);
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
  EXPECT_EQ(peer_.opened(), 0);
}

// Calls one behind the other while none of them can begin; each sees what the one before will have done.
TEST_F(SessionEventsTest, CallsAreEnqueuedBehindEachOther) {
  const Attached attached = Attach(WithEvents(peer_));
  Session& session = **attached.session;
  const AdmittedSequence sequence = Admit(attached);
  peer_.Record();
  const auto stored = Store(attached, sequence.id, 0, kPrompt, kBoth).Get();
  ASSERT_TRUE(stored.ok() && stored->statuses[0].ok());
  EXPECT_EQ(stored->bytes, static_cast<uint64_t>(kPrompt * kLayers * kRowBytes));
  StepRequest step = Step(sequence, kPrompt + 1);
  step.gather = false;
  Answer<StepResult> resolved;
  session.Step(&step, resolved.Receiver());
  ASSERT_TRUE(resolved.Get().ok());
  ASSERT_TRUE(resolved.Get()->statuses[0].ok()) << resolved.Get()->statuses[0];
  Answer<uint64_t> gathered;
  session.Gather(0, {}, kBoth, gathered.Receiver());
  ASSERT_TRUE(gathered.Get().ok());
  EXPECT_EQ(*gathered.Get(), 0u);
  Answer<BatchResult> committed;
  session.Commit({{sequence.id, kPrompt, 2}}, kBoth, committed.Receiver());
  ASSERT_TRUE(committed.Get().ok());
  ASSERT_TRUE(committed.Get()->statuses[0].ok()) << committed.Get()->statuses[0];
  LoadItem load;
  load.range = {sequence.id, kPrompt, 1};
  load.target = RowTarget::kStaging;
  load.staging_offset = (kLayers * kPrompt * kRowBytes);
  Answer<BatchResult> loaded;
  session.Load({load}, kBoth, loaded.Receiver());
  ASSERT_TRUE(loaded.Get().ok());
  ASSERT_TRUE(loaded.Get()->statuses[0].ok()) << loaded.Get()->statuses[0];
  AwaitQueued(session, 5);
  EXPECT_FALSE(BouncedEngine::IsComplete(session.event_handle()));

  WriteStaging(attached, 0, kPrompt);
  for (int64_t k = 0; k < kTopK; ++k) Entries(attached)[k] = static_cast<int32_t>(k * 8);
  WriteNewest(attached, sequence.state_row, kPrompt);
  peer_.Finish();
  AwaitComplete(attached);
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
TEST_F(SessionEventsTest, WaitAloneIsAnsweredWhenDoneAndSignalAloneDoesNotWait) {
  const Attached attached = Attach(WithEvents(peer_));
  const AdmittedSequence sequence = Admit(attached);
  peer_.Record();
  WriteStaging(attached, 0, kPrompt);
  const auto signalled = Store(attached, sequence.id, 0, 8, {.wait = false, .signal = true}).Get();
  ASSERT_TRUE(signalled.ok() && signalled->statuses[0].ok());
  AwaitComplete(attached);  // though the engine is at work
  const Answer<BatchResult> waiting = Store(attached, sequence.id, 8, 8, {.wait = true, .signal = false});
  absl::SleepFor(kShort);
  EXPECT_FALSE(waiting.There());
  peer_.Finish();
  ASSERT_TRUE(waiting.Get().ok() && waiting.Get()->statuses[0].ok());
  Detach(attached);
}

TEST_F(SessionEventsTest, RefusesWhatAReplyAheadOfTheWorkCannotCarry) {
  const Attached attached = Attach(WithEvents(peer_));
  Session& session = **attached.session;
  const AdmittedSequence sequence = Open(attached);
  const auto refused = [&](StepRequest request, absl::StatusCode code, const std::string& part) {
    Answer<StepResult> answer;
    session.Step(&request, answer.Receiver());
    EXPECT_EQ(answer.Get().status().code(), code) << answer.Get().status();
    EXPECT_THAT(std::string(answer.Get().status().message()), HasSubstr(part));
  };
  StepRequest request = Step(sequence, kPrompt + 1);
  const std::vector<int32_t> indices(kTopK, -1);
  request.shared = false;
  request.groups[0].indices = indices;
  refused(request, absl::StatusCode::kInvalidArgument, "source: INLINE given with signal_event");
  request = Step(sequence, kPrompt + 1);
  const std::string newest(kLayers * kRowBytes, 'n');
  request.rows[0].newest_row = newest;
  refused(request, absl::StatusCode::kInvalidArgument, "newest_row: 32 bytes given at row 0 with signal_event");
  StoreItem item;
  item.range = {sequence.id, kPrompt, 1};
  item.rows = newest;
  Answer<BatchResult> stored;
  session.Store({item}, kBoth, stored.Receiver());
  EXPECT_EQ(stored.Get().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(stored.Get().status().message()), HasSubstr("source: INLINE given in item 0"));
  AwaitQueued(session, 0);
  // The wait alone goes with messages.
  Answer<BatchResult> plain;
  session.Store({item}, {.wait = true, .signal = false}, plain.Receiver());
  EXPECT_TRUE(plain.Get().ok() && plain.Get()->statuses[0].ok());
  Detach(attached);
}

TEST_F(SessionEventsTest, RefusesEventsOfASessionWithoutThem) {
  const Attached attached = Attach(Spec());
  Session& session = **attached.session;
  EXPECT_EQ(session.event_handle(), "");
  const AdmittedSequence sequence = Open(attached);
  const auto check = [](const absl::Status& status, const std::string& field) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(field, ": given")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("attached without engine_event"));
  };
  for (const CallEvents events : {CallEvents{true, false}, CallEvents{false, true}}) {
    const std::string field = events.wait ? "wait_event" : "signal_event";
    StepRequest request = Step(sequence, kPrompt + 1, events);
    Answer<StepResult> stepped;
    session.Step(&request, stepped.Receiver());
    check(stepped.Get().status(), field);
    check(Store(attached, sequence.id, kPrompt, 1, events).Get().status(), field);
    LoadItem load;
    load.range = {sequence.id, 0, 1};
    Answer<BatchResult> batch;
    session.Load({load}, events, batch.Receiver());
    check(batch.Get().status(), field);
    Answer<BatchResult> committed;
    session.Commit({{sequence.id, kPrompt, 1}}, events, committed.Receiver());
    check(committed.Get().status(), field);
    Answer<uint64_t> gathered;
    session.Gather(0, {}, events, gathered.Receiver());
    check(gathered.Get().status(), field);
  }
  AwaitQueued(session, 0);
  Detach(attached);
}

TEST_F(SessionEventsTest, AttachRefusesEventsThatAreNone) {
  SessionSpec spec = WithEvents(peer_);
  spec.engine_event->ipc_handle = std::string(64, '\xff');
  Attached refused = Attach(spec);
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kInvalidArgument) << refused.session.status();
  EXPECT_THAT(std::string(refused.session.status().message()), HasSubstr("engine_event.handle"));
  spec = WithEvents(peer_);
  spec.engine_event->device = "GPU-other";
  refused = Attach(spec);
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kInvalidArgument) << refused.session.status();
  EXPECT_EQ(refused.session.status().message(), "engine_event.device: \"GPU-other\" given, the session is on GPU-test");
  EXPECT_EQ(peer_.opened(), 0);
  EXPECT_EQ(registry_->Usage().hot_bytes, 0);

  // Opened, and then the device is found to be lost.
  backend_->Lose();
  refused = Attach(WithEvents(peer_));
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kUnavailable) << refused.session.status();
  EXPECT_EQ(peer_.opened(), 0);

  const auto cpu = kernels::cpu::MakeCpuBackend(1);
  Start(*cpu);
  spec = WithEvents(peer_);
  spec.engine_event->device = "cpu";
  refused = Attach(spec);
  EXPECT_EQ(refused.session.status().code(), absl::StatusCode::kFailedPrecondition) << refused.session.status();
  EXPECT_EQ(refused.session.status().message(),
            "engine_event: given, the session is on cpu, and only GPUs have interprocess events");
  registry_.reset();
}

// Both events are kept until what was enqueued has run.
TEST_F(SessionEventsTest, ADetachedSessionKeepsItsEventsUntilItIsDrained) {
  const Attached attached = Attach(WithEvents(peer_));
  const AdmittedSequence sequence = Open(attached);
  peer_.Record();
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, kBoth).Get().ok());
  const std::string own = (*attached.session)->event_handle();
  Detach(attached);
  EXPECT_FALSE(attached.ended->WaitForNotificationWithTimeout(kShort));
  EXPECT_EQ(peer_.opened(), 1);
  EXPECT_FALSE(BouncedEngine::IsComplete(own));
  peer_.Finish();
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  EXPECT_EQ(peer_.opened(), 0);
  // Another session has another one.
  const Attached next = Attach(WithEvents(peer_));
  EXPECT_NE((*next.session)->event_handle(), own);
  Detach(next);
}

// The engine dies before its kernels have written what the session's work waits for: the session ends all the same, and
// nothing that they did not write counts as stored.
TEST_F(SessionEventsTest, AnEngineThatDiesInTheMiddleOfItsWork) {
  const Attached attached = Attach(WithEvents(peer_));
  const AdmittedSequence appended = Open(attached, "appended");
  const AdmittedSequence rewritten = Open(attached, "rewritten");
  const AdmittedSequence untouched = Open(attached, "untouched");
  peer_.Record();
  ASSERT_TRUE(Store(attached, appended.id, kPrompt, 8, kBoth).Get()->statuses[0].ok());
  ASSERT_TRUE(Store(attached, rewritten.id, 20, 8, kBoth).Get()->statuses[0].ok());
  StepRequest step = Step(appended, kPrompt + 9);
  step.finished = [](const StepResult&) { ADD_FAILURE() << "the step is said to be done"; };
  Answer<StepResult> stepped;
  (*attached.session)->Step(&step, stepped.Receiver());
  ASSERT_TRUE(stepped.Get()->statuses[0].ok()) << stepped.Get()->statuses[0];
  // Not in the middle of the engine's work: this one is answered when it is over.
  const Answer<BatchResult> waiting = Store(attached, untouched.id, kPrompt, 1, {.wait = true, .signal = false});
  EXPECT_TRUE(Lose(attached).ok());
  EXPECT_TRUE(attached.ended->WaitForNotificationWithTimeout(kLong));
  ASSERT_TRUE(waiting.Get().ok());
  EXPECT_EQ(waiting.Get()->statuses[0].code(), absl::StatusCode::kUnavailable) << waiting.Get()->statuses[0];
  EXPECT_THAT(std::string(waiting.Get()->statuses[0].message()), HasSubstr("wait_event: the engine of session"));
  EXPECT_EQ(peer_.opened(), 0);

  const Attached next = Attach(Spec());
  EXPECT_EQ(Admit(next, "appended").stored_rows, kPrompt);
  EXPECT_EQ(Admit(next, "untouched").stored_rows, kPrompt);
  EXPECT_EQ(Admit(next, "rewritten").stored_rows, 0);
  Detach(next);
}

// Its name is taken by another session while the engine's work hangs; only when the engine is found to be gone is the
// name free.
TEST_F(SessionEventsTest, ASupersededSessionWhoseEngineDiesLater) {
  const Attached first = Attach(WithEvents(peer_, "rank0"));
  const AdmittedSequence sequence = Open(first, "key");
  peer_.Record();
  ASSERT_TRUE(Store(first, sequence.id, kPrompt, 8, kBoth).Get()->statuses[0].ok());
  BouncedEngine other;
  Attached second;
  Begin(WithEvents(other, "rank0"), &second);
  EXPECT_FALSE(second.attached->WaitForNotificationWithTimeout(kShort));
  EXPECT_EQ(Lose(first).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(first.ended->WaitForNotificationWithTimeout(kLong));
  ASSERT_TRUE(second.attached->WaitForNotificationWithTimeout(kLong));
  ASSERT_TRUE(second.session.ok()) << second.session.status();
  EXPECT_EQ(peer_.opened(), 0);
  EXPECT_EQ(other.opened(), 1);
  EXPECT_EQ(Admit(second, "key").stored_rows, kPrompt);
  Detach(second);
}

// What fails after its reply is told by the next call.
TEST_F(SessionEventsTest, WorkThatFailsLateFailsTheNextCall) {
  const Attached attached = Attach(WithEvents(peer_));
  const AdmittedSequence sequence = Open(attached);
  peer_.Record();
  ASSERT_TRUE(Store(attached, sequence.id, kPrompt, 1, kBoth).Get()->statuses[0].ok());
  backend_->Lose();
  peer_.Finish();
  AwaitQueued(**attached.session, 0);
  Answer<BatchResult> next;
  (*attached.session)->Release({sequence.id}, next.Receiver());
  const absl::Status told = next.Get().status();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("an earlier call with signal_event failed after its reply"));
  Detach(attached);
}

}  // namespace
}  // namespace stoker::core
