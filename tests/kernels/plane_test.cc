// Doorbells, waits and programs on every backend, and whole planes beside a test that plays the engine.
//
// The test and the plane tell each other how far they are by the doorbells themselves, and by the plane's words, which
// the test looks at through another stream. Nothing sleeps.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/batch_case.h"
#include "tests/kernels/image.h"
#include "tests/kernels/resolve_random.h"

namespace stoker::kernels {
namespace {

using testing::HasSubstr;

constexpr uint64_t kMilliseconds = 1'000'000;  // in nanoseconds

// Words in host memory that a plane and its engine share.
class Doorbells {
 public:
  explicit Doorbells(Backend& backend) : memory_(backend.AllocateHost(4096).value()) {}

  uint64_t* request(int32_t g) { return Words() + g; }
  uint64_t* done(int32_t g) { return Words() + 64 + g; }
  uint32_t* abort() { return reinterpret_cast<uint32_t*>(Words() + 128); }

  void Request(int32_t g, uint64_t step) { std::atomic_ref(*request(g)).store(step, std::memory_order_release); }
  uint64_t Done(int32_t g) { return std::atomic_ref(*done(g)).load(std::memory_order_acquire); }
  void AwaitDone(int32_t g, uint64_t step) {
    while (Done(g) != step) std::this_thread::yield();
  }
  void Abort() { std::atomic_ref(*abort()).store(1, std::memory_order_release); }

 private:
  uint64_t* Words() { return reinterpret_cast<uint64_t*>(memory_->data()); }

  const std::unique_ptr<Buffer> memory_;
};

// Copies pageable memory once, so that the stream has what it takes for that: to get it may wait for streams that wait.
void Warm(Stream& stream, void* device) {
  uint64_t value = 0;
  EXPECT_TRUE(stream.Copy(device, &value, 8).ok());
  EXPECT_TRUE(stream.Copy(&value, device, 8).ok());
  EXPECT_TRUE(Finish(stream).ok());
}

class PlaneTest : public BackendTest {
 protected:
  PlaneTest() {
    Warm(stream(), stamps());
    Warm(side(), stamps());
  }
  void TearDown() override {
    // Whatever failed: no wait outlives the words.
    bells_.Abort();
    EXPECT_TRUE(Finish(stream()).ok());
  }

  Backend& backend() { return bench().backend(); }
  Stream& stream() { return bench().stream(); }
  Stream& side() { return *side_; }
  Doorbells& bells() { return bells_; }
  PlaneState* state() { return reinterpret_cast<PlaneState*>(memory_->data()); }
  uint64_t* stamps() { return reinterpret_cast<uint64_t*>(memory_->data() + 1024); }

  PlaneState State() {
    PlaneState state_now;
    EXPECT_TRUE(side().Copy(&state_now, state(), sizeof(state_now)).ok());
    EXPECT_TRUE(Finish(side()).ok());
    return state_now;
  }
  PlaneOutcome Outcome() { return static_cast<PlaneOutcome>(State().outcome); }
  void SetState(const PlaneState& value) {
    ASSERT_TRUE(side().Copy(state(), &value, sizeof(value)).ok());
    ASSERT_TRUE(Finish(side()).ok());
  }
  // Gives what should not happen the time of some round trips to happen.
  void LookForAWhile() {
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(Finish(side()).ok());
  }

  AwaitDoorbellArgs Await(int32_t g, bool begins_step, uint64_t limit_ns = 0) {
    return {.state = state(),
            .request = bells().request(g),
            .abort = bells().abort(),
            .begins_step = begins_step,
            .limit_ns = limit_ns};
  }
  RingDoorbellArgs Ring(int32_t g) { return {.state = state(), .done = bells().done(g)}; }

 private:
  const std::unique_ptr<Stream> side_ = backend().CreateStream().value();
  const std::unique_ptr<Buffer> memory_ = backend().AllocatePrivate(4096).value();
  Doorbells bells_{backend()};
};
STOKER_FOR_EVERY_BACKEND(PlaneTest);

TEST_P(PlaneTest, RequestBeforeTheWait) {
  bells().Request(0, 1);
  bells().Request(1, 1);
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
  ASSERT_TRUE(stream().RingDoorbell(Ring(0)).ok());
  ASSERT_TRUE(stream().AwaitDoorbell(Await(1, false, 1)).ok());
  ASSERT_TRUE(stream().RingDoorbell(Ring(1)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(State().step, 1);
  EXPECT_EQ(Outcome(), PlaneOutcome::kRunning);
  EXPECT_EQ(bells().Done(0), 1);
  EXPECT_EQ(bells().Done(1), 1);
}

TEST_P(PlaneTest, RequestAfterTheWait) {
  for (uint64_t step = 1; step <= 50; ++step) {
    ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
    ASSERT_TRUE(stream().RingDoorbell(Ring(0)).ok());
    ASSERT_TRUE(stream().AwaitDoorbell(Await(1, false)).ok());
    ASSERT_TRUE(stream().RingDoorbell(Ring(1)).ok());
    const std::shared_ptr<Event> end = stream().Record();
    while (State().step != step) continue;  // it waits now
    EXPECT_EQ(bells().Done(0), step - 1);
    bells().Request(0, step);
    bells().AwaitDone(0, step);
    EXPECT_FALSE(end->Done());
    EXPECT_EQ(bells().Done(1), step - 1);
    bells().Request(1, step);
    ASSERT_TRUE(Finish(stream()).ok());
    EXPECT_TRUE(end->Done());
    ASSERT_EQ(bells().Done(1), step);
  }
  EXPECT_EQ(Outcome(), PlaneOutcome::kRunning);
}

// Two streams, one that waits for as long as the other likes to work.
TEST_P(PlaneTest, AWaitHoldsUpNoOtherStream) {
  const auto other = backend().CreateStream().value();
  Warm(*other, stamps());
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
  const std::shared_ptr<Event> end = stream().Record();
  for (uint64_t i = 0; i < 1000; ++i) {
    uint64_t back = ~i;
    ASSERT_TRUE(other->Copy(stamps(), &i, 8).ok());
    ASSERT_TRUE(other->Copy(&back, stamps(), 8).ok());
    ASSERT_TRUE(Finish(*other).ok());
    ASSERT_EQ(back, i);
  }
  EXPECT_FALSE(end->Done());
  EXPECT_EQ(State().step, 1);
  bells().Request(0, 1);
  ASSERT_TRUE(Finish(stream()).ok());
}

TEST_P(PlaneTest, NumbersThatCannotBeEndThePlane) {
  for (const bool begins_step : {true, false}) {
    for (const uint64_t request : {uint64_t{0}, uint64_t{40}, uint64_t{43}, uint64_t{1} << 32, ~uint64_t{0}}) {
      SCOPED_TRACE(testing::Message() << request << (begins_step ? " as first" : ""));
      SetState({.step = begins_step ? 41u : 42u});
      bells().Request(0, request);
      ASSERT_TRUE(stream().AwaitDoorbell(Await(0, begins_step)).ok());
      ASSERT_TRUE(Finish(stream()).ok());
      EXPECT_EQ(Outcome(), PlaneOutcome::kBadStep);
    }
    // And while it waits.
    SetState({.step = begins_step ? 41u : 42u});
    bells().Request(0, 41);
    ASSERT_TRUE(stream().AwaitDoorbell(Await(0, begins_step)).ok());
    const std::shared_ptr<Event> end = stream().Record();
    LookForAWhile();
    EXPECT_FALSE(end->Done());
    bells().Request(0, 44);
    ASSERT_TRUE(Finish(stream()).ok());
    EXPECT_EQ(Outcome(), PlaneOutcome::kBadStep);
  }
}

TEST_P(PlaneTest, AbortEndsAWait) {
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
  while (State().step != 1) continue;
  EXPECT_EQ(Outcome(), PlaneOutcome::kRunning);
  bells().Abort();
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Outcome(), PlaneOutcome::kAborted);
}

// Before other ends, and behind a request that is there.
TEST_P(PlaneTest, AbortBeforeTheWait) {
  bells().Abort();
  const struct {
    uint64_t request;
    PlaneOutcome want;
  } cases[] = {{41, PlaneOutcome::kAborted}, {42, PlaneOutcome::kRunning}, {43, PlaneOutcome::kAborted}};
  for (const auto& c : cases) {
    SetState({.step = 42});
    bells().Request(0, c.request);
    ASSERT_TRUE(stream().AwaitDoorbell(Await(0, false, 1)).ok());
    ASSERT_TRUE(Finish(stream()).ok());
    EXPECT_EQ(Outcome(), c.want) << c.request;
  }
}

TEST_P(PlaneTest, AWaitWithinAStepHasALimit) {
  for (const uint64_t limit_ns : {uint64_t{1}, kMilliseconds, 3 * kMilliseconds}) {
    SetState({.step = 1});
    stream().Timestamp(stamps());
    ASSERT_TRUE(stream().AwaitDoorbell(Await(0, false, limit_ns)).ok());
    stream().Timestamp(stamps() + 1);
    uint64_t ns[2];
    ASSERT_TRUE(stream().Copy(ns, stamps(), sizeof(ns)).ok());
    ASSERT_TRUE(Finish(stream()).ok());
    EXPECT_EQ(Outcome(), PlaneOutcome::kTimedOut);
    EXPECT_GE(ns[1] - ns[0], limit_ns);
  }
}

// Limits that are so long that a sum with the time would not hold them are none.
TEST_P(PlaneTest, ALimitMayBeLongerThanTime) {
  SetState({.step = 1});
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, false, ~uint64_t{0})).ok());
  const std::shared_ptr<Event> end = stream().Record();
  LookForAWhile();
  EXPECT_FALSE(end->Done());
  bells().Request(0, 1);
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Outcome(), PlaneOutcome::kRunning);
}

TEST_P(PlaneTest, TheFirstWaitOfAStepHasNoLimit) {
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true, 1)).ok());
  const std::shared_ptr<Event> end = stream().Record();
  while (State().step != 1) continue;
  // Until the device's clock has gone on by far more than the limit.
  uint64_t first = 0, now = 0;
  while (now < first + 2 * kMilliseconds) {
    side().Timestamp(stamps());
    ASSERT_TRUE(side().Copy(&now, stamps(), 8).ok());
    ASSERT_TRUE(Finish(side()).ok());
    if (first == 0) first = now;
  }
  EXPECT_FALSE(end->Done());
  bells().Request(0, 1);
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(Outcome(), PlaneOutcome::kRunning);
}

// The batch operations: PlaneBatchTest.AfterThePlanesEndNothingIsToldButThat.
TEST_P(PlaneTest, AfterThePlanesEndNothingHappens) {
  const PlaneState ended = {
      .step = 9, .accepted = 9, .finished = 8, .outcome = static_cast<uint32_t>(PlaneOutcome::kTimedOut)};
  SetState(ended);
  bells().Request(0, 50);
  bells().Abort();
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
  ASSERT_TRUE(stream().RingDoorbell(Ring(0)).ok());
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, false, 1)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(bells().Done(0), 0);
  const PlaneState after = State();
  EXPECT_EQ(std::memcmp(&after, &ended, sizeof(ended)), 0);
}

TEST_P(PlaneTest, QuietIsAtOnceWhereNoStepRuns) {
  for (const uint64_t steps : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) {
    SetState({.step = steps, .accepted = steps, .finished = steps});
    ASSERT_TRUE(stream().AwaitQuiet({.state = state()}).ok());
    ASSERT_TRUE(Finish(stream()).ok());
  }
  // A step that has begun and waits for its request has read nothing yet.
  SetState({.step = 8, .accepted = 7, .finished = 7});
  ASSERT_TRUE(stream().AwaitQuiet({.state = state()}).ok());
  ASSERT_TRUE(Finish(stream()).ok());
}

TEST_P(PlaneTest, QuietComesWithTheEndOfTheStepInFlight) {
  BatchCase c(BatchShape{.raises_step = true});
  const auto memory = backend().AllocatePrivate(c.image().bytes()).value();
  const auto host = backend().AllocateHost(4096).value();
  BatchArgs args = c.Args(memory->data(), host->data());
  args.state = state();
  c.rows() = 0;
  ASSERT_TRUE(stream().Copy(memory->data(), c.image().data(), c.image().bytes()).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  const auto quiet = backend().CreateStream().value();
  Warm(*quiet, stamps());
  for (uint64_t step = 1; step <= 20; ++step) {
    ASSERT_TRUE(stream().BeginBatch(args).ok());
    ASSERT_TRUE(Finish(stream()).ok());
    uint64_t finished = 0;
    ASSERT_TRUE(quiet->AwaitQuiet({.state = state()}).ok());
    ASSERT_TRUE(quiet->Copy(&finished, &state()->finished, 8).ok());
    const std::shared_ptr<Event> end = quiet->Record();
    LookForAWhile();
    ASSERT_FALSE(end->Done());
    ASSERT_TRUE(stream().EndBatch(args).ok());
    ASSERT_TRUE(Finish(*quiet).ok());
    ASSERT_EQ(finished, step);
    ASSERT_TRUE(Finish(stream()).ok());
  }
}

// The engine of a direct plane that dies in a step leaves one in flight for ever.
TEST_P(PlaneTest, QuietOfAStepThatNeverEnds) {
  const auto host = backend().AllocateHost(64).value();
  auto* const abort = reinterpret_cast<uint32_t*>(host->data());
  const PlaneState in_flight{.step = 7, .accepted = 7, .finished = 6};
  ASSERT_TRUE(stream().Copy(state(), &in_flight, sizeof(in_flight)).ok());
  ASSERT_TRUE(stream().AwaitQuiet({.state = state(), .limit_ns = 2'000'000}).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  ASSERT_TRUE(stream().AwaitQuiet({.state = state(), .abort = abort}).ok());
  const std::shared_ptr<Event> end = stream().Record();
  LookForAWhile();
  ASSERT_FALSE(end->Done());
  std::atomic_ref<uint32_t>(*abort).store(1);
  ASSERT_TRUE(Finish(stream()).ok());
}

// The plane goes on as if nothing had been: only the wait ends.
TEST_P(PlaneTest, QuietHasEndsOfItsOwn) {
  const PlaneState running = {.step = 3, .accepted = 3, .finished = 2};
  SetState(running);
  stream().Timestamp(stamps());
  ASSERT_TRUE(stream().AwaitQuiet({.state = state(), .abort = bells().abort(), .limit_ns = 2 * kMilliseconds}).ok());
  stream().Timestamp(stamps() + 1);
  uint64_t ns[2];
  ASSERT_TRUE(stream().Copy(ns, stamps(), sizeof(ns)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_GE(ns[1] - ns[0], 2 * kMilliseconds);
  ASSERT_TRUE(stream().AwaitQuiet({.state = state(), .abort = bells().abort(), .limit_ns = 0}).ok());
  const std::shared_ptr<Event> end = stream().Record();
  LookForAWhile();
  EXPECT_FALSE(end->Done());
  bells().Abort();
  ASSERT_TRUE(Finish(stream()).ok());
  const PlaneState after = State();
  EXPECT_EQ(std::memcmp(&after, &running, sizeof(running)), 0);
}

TEST_P(PlaneTest, WordsAreWrittenInOrderAndWhole) {
  EXPECT_THAT(std::string(stream().Write(static_cast<uint64_t*>(nullptr), 1).message()),
              HasSubstr("write.target: is null"));
  EXPECT_THAT(std::string(stream().Write(static_cast<int32_t*>(nullptr), 1).message()),
              HasSubstr("write.target: is null"));
  auto* const words = reinterpret_cast<int32_t*>(stamps() + 8);
  uint64_t poison[12];
  std::fill(std::begin(poison), std::end(poison), ~uint64_t{0});
  ASSERT_TRUE(stream().Copy(stamps(), poison, sizeof(poison)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  for (uint64_t i = 0; i < 300; ++i) {
    ASSERT_TRUE(stream().Write(stamps() + 1, i << 32 | i).ok());
    ASSERT_TRUE(stream().Write(words + 1, static_cast<int32_t>(i)).ok());
    uint64_t seen = 0;
    ASSERT_TRUE(side().Copy(&seen, stamps() + 1, 8).ok());
    ASSERT_TRUE(Finish(side()).ok());
    ASSERT_TRUE(seen == ~uint64_t{0} || (seen >> 32 == (seen & 0xffffffff) && (seen >> 32) <= i)) << seen;
  }
  uint64_t after[12];
  ASSERT_TRUE(stream().Copy(after, stamps(), sizeof(after)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(after[0], ~uint64_t{0});
  EXPECT_EQ(after[1], uint64_t{299} << 32 | 299);
  EXPECT_EQ(after[2], ~uint64_t{0});
  EXPECT_EQ(after[8], uint64_t{299} << 32 | 0xffffffff);
  EXPECT_EQ(after[9], ~uint64_t{0});
}

// A daemon takes a sequence from its state row while steps run, and waits for quiet. Steps that still found the
// sequence must have ended then.
TEST_P(PlaneTest, QuietSeparatesStepsFromWhatIsWrittenBeforeIt) {
  constexpr int32_t kSteps = 40;
  const auto two = GetParam().make(2);
  const auto memory = two->AllocatePrivate(64 << 10).value();
  const auto host = two->AllocateHost(64 << 10).value();
  auto* const statuses = reinterpret_cast<int32_t*>(host->data() + (32 << 10));
  auto* const finished = reinterpret_cast<uint64_t*>(host->data() + (48 << 10));
  const auto plane = two->CreateStream().value();
  const auto daemon = two->CreateStream().value();
  BatchCase c(BatchShape{.max_rows = 1, .raises_step = true});
  c.SetRow(0, 1, 1);
  c.word(1) = {.stored_rows = 0, .max_rows = 32, .writer = 0};
  const BatchArgs args = c.Args(memory->data(), host->data());
  std::copy_n(&c.word(0), c.shape().word_count, args.words);
  ASSERT_LE(c.image().bytes(), memory->bytes());
  ASSERT_TRUE(plane->Copy(memory->data(), c.image().data(), c.image().bytes()).ok());
  ASSERT_TRUE(Finish(*plane).ok());
  const StateRowEntry held = c.entry(1);
  const StateRowEntry nobodys;
  auto* const entry = const_cast<StateRowEntry*>(args.entries + 1);
  const int32_t rounds = Cases(100, 200);
  for (int32_t round = 0; round < rounds; ++round) {
    const uint64_t before = static_cast<uint64_t>(round) * kSteps;
    for (int32_t step = 0; step < kSteps; ++step) {
      ASSERT_TRUE(plane->BeginBatch(args).ok());
      ASSERT_TRUE(plane->Copy(statuses + step, args.mail.statuses, 4).ok());
      ASSERT_TRUE(plane->EndBatch(args).ok());
    }
    ASSERT_TRUE(daemon->Copy(entry, &nobodys, sizeof(nobodys)).ok());
    ASSERT_TRUE(daemon->AwaitQuiet({.state = args.state}).ok());
    ASSERT_TRUE(daemon->Copy(finished, &args.state->finished, 8).ok());
    ASSERT_TRUE(Finish(*daemon).ok());
    ASSERT_TRUE(Finish(*plane).ok());
    for (int32_t step = 0; step < kSteps; ++step) {
      const auto status = static_cast<BatchStatus>(statuses[step]);
      ASSERT_TRUE(status == BatchStatus::kOk || status == BatchStatus::kUnknownSequence);
      if (status != BatchStatus::kOk) continue;
      ASSERT_LE(before + static_cast<uint64_t>(step) + 1, *finished) << "round " << round;
    }
    ASSERT_TRUE(daemon->Copy(entry, &held, sizeof(held)).ok());
    ASSERT_TRUE(Finish(*daemon).ok());
  }
}

TEST_P(PlaneTest, ProgramsRunWhatTheyRecordedEachTime) {
  uint64_t values[3] = {1, 0, 0};
  ASSERT_TRUE(stream().Copy(stamps(), values, sizeof(values)).ok());
  const auto program = stream()
                           .MakeProgram([this](Stream& on) {
                             on.Timestamp(stamps() + 2);
                             return on.Copy(stamps() + 1, stamps(), 8);
                           })
                           .value();
  ASSERT_TRUE(stream().Copy(values, stamps(), sizeof(values)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(values[1], 0) << "it was not enqueued";
  for (uint64_t i = 2; i < 20; ++i) {
    ASSERT_TRUE(stream().Copy(stamps(), &i, 8).ok());
    ASSERT_TRUE(program->Enqueue().ok());
    const uint64_t before = values[2];
    ASSERT_TRUE(stream().Copy(values, stamps(), sizeof(values)).ok());
    ASSERT_TRUE(Finish(stream()).ok());
    EXPECT_EQ(values[1], i);
    EXPECT_GE(values[2], before);
  }
}

TEST_P(PlaneTest, ProgramsThatCannotBe) {
  EXPECT_THAT(std::string(stream().MakeProgram(nullptr).status().message()), HasSubstr("program.body: is null"));
  // Of a body's error one of the two tells.
  const auto tell = [this](const std::function<absl::Status(Stream&)>& body) {
    auto program = stream().MakeProgram(body);
    return program.ok() ? (*program)->Enqueue() : program.status();
  };
  EXPECT_EQ(tell([](Stream&) { return absl::DataLossError("no"); }), absl::DataLossError("no"));
  EXPECT_EQ(tell([](Stream& on) { return on.BeginBatch(BatchArgs{}); }).code(), absl::StatusCode::kInvalidArgument);
  // The stream is as it was.
  bells().Request(0, 1);
  ASSERT_TRUE(stream().AwaitDoorbell(Await(0, true)).ok());
  ASSERT_TRUE(Finish(stream()).ok());
  EXPECT_EQ(State().step, 1);
}

TEST_P(PlaneTest, WrongArgumentsAreRefused) {
  for (const absl::Status& status : {stream().AwaitDoorbell({}), stream().RingDoorbell({}), stream().AwaitQuiet({}),
                                     stream().BeginBatch({}), stream().PlanCommits({}), stream().EndBatch({})}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  }
}

// A plane with two groups of a layer each, and the engine that drives it: sequences that speculate up to two rows a
// step, of which some are accepted.
class WholePlane {
 public:
  static constexpr int32_t kGroups = 2;
  static constexpr int32_t kCommit = kGroups;  // its doorbell
  static constexpr int32_t kSequences = 3;
  static constexpr int32_t kRows = 2 * kSequences;
  static constexpr int32_t kTopK = 4;
  static constexpr int32_t kRowBytes = 16;
  using Content = std::array<uint64_t, kRowBytes / 8>;

  static BatchShape Shape(int32_t steps) {
    BatchShape shape{.max_rows = kRows, .top_k = kTopK, .hot_rows = 2 * kTopK, .state_rows = kSequences};
    shape.newest_row = shape.hot_rows;
    shape.region_rows = shape.hot_rows + shape.block_rows;
    shape.columns = (2 * steps + 2) / shape.block_rows + 1;
    shape.blocks = kSequences * shape.columns;
    shape.max_sequence_rows = shape.columns * shape.block_rows;
    return shape;
  }

  WholePlane(Backend& backend, int32_t steps, uint64_t seed)
      : rng_(seed),
        bells_(backend),
        case_(Shape(steps)),
        plane_(backend.CreateStream().value()),
        engine_(backend.CreateStream().value()) {
    const BatchShape& shape = case_.shape();
    Image& image = case_.image();
    hot_layout_ = RowLayout::Make({.row_bytes = kRowBytes}, int64_t{shape.region_rows} * kSequences).value();
    pool_layout_ = RowLayout::Make({.row_bytes = kRowBytes}, int64_t{shape.blocks} * shape.block_rows).value();
    hot_ = image.Add<uint8_t>("hot cache", static_cast<size_t>(hot_layout_.layer_bytes) * kGroups);
    std::vector<int16_t> order;
    for (int32_t i = 0; i < kSequences; ++i) {
      for (int32_t slot = 0; slot < shape.hot_rows; ++slot) order.push_back(static_cast<int16_t>(slot));
    }
    for (Group& group : groups_) {
      group.slot_key = image.Add("slot_key", std::vector<int32_t>(order.size(), -1));
      group.lru = image.Add("lru", order);
      group.entries = image.Add<int32_t>("entries", kRows * kTopK);
      group.hot_rows = image.Add<int32_t>("hot_rows_out", kRows * kTopK);
      group.miss_pool_rows = image.Add<int32_t>("miss_pool_rows", kRows * kTopK);
      group.miss_hot_rows = image.Add<int32_t>("miss_hot_rows", kRows * kTopK);
      group.miss_counts = image.Add<int32_t>("miss_counts", kRows);
    }
    device_ = backend.AllocateShared(image.bytes()).value();
    pool_ = backend.AllocatePool(static_cast<size_t>(pool_layout_.layer_bytes) * kGroups).value();
    words_ = backend.AllocateHost(4096).value();
    args_ = case_.Args(device_->data(), words_->data());
    std::copy_n(&case_.word(0), kSequences, args_.words);
    contents_.resize(kGroups, std::vector<std::vector<Content>>(
                                  kSequences, std::vector<Content>(static_cast<size_t>(shape.max_sequence_rows))));
    Up(device_->data(), image.data(), image.bytes());
    EXPECT_TRUE(Finish(*engine_).ok());
    program_ = plane_->MakeProgram([this](Stream& stream) { return Step(stream); }).value();
  }

  ~WholePlane() { Stop(); }

  absl::Status EnqueueStep() { return program_->Enqueue(); }

  void Stop() {
    bells_.Abort();
    EXPECT_TRUE(Finish(*plane_).ok());
  }

  // What the engine does in a step.
  void RunStep(uint64_t step) {
    Choose();
    for (int32_t g = 0; g < kGroups; ++g) {
      WriteNewest(g);
      std::vector<int32_t> entries = ChooseEntries();
      Up(groups_[g].entries.In(device_->data()), entries.data(), entries.size() * 4);
      if (g == 0) UpBatch();
      ASSERT_TRUE(Finish(*engine_).ok());
      bells_.Request(g, step);
      bells_.AwaitDone(g, step);
      CheckEntries(g, entries);
      if (testing::Test::HasFatalFailure()) return;
    }
    Up(const_cast<int32_t*>(args_.mail.commits), case_.commits(), kRows * 4);
    ASSERT_TRUE(Finish(*engine_).ok());
    bells_.Request(kCommit, step);
    bells_.AwaitDone(kCommit, step);
    CheckCommits();
  }

  PlaneState State() {
    PlaneState state;
    Down(&state, args_.state, sizeof(state));
    EXPECT_TRUE(Finish(*engine_).ok());
    return state;
  }
  uint32_t Ended() {
    uint32_t ended = 0;
    Down(&ended, args_.ended, sizeof(ended));
    EXPECT_TRUE(Finish(*engine_).ok());
    return ended;
  }

 private:
  struct Group {
    Region<int32_t> slot_key;
    Region<int16_t> lru;
    Region<int32_t> entries;
    Region<int32_t> hot_rows;
    Region<int32_t> miss_pool_rows;
    Region<int32_t> miss_hot_rows;
    Region<int32_t> miss_counts;
  };
  struct Drafts {
    int32_t state_row;
    int32_t first_row;  // of the batch
    int32_t rows;
    int32_t accepted;
  };

  RowStore Hot() const {
    return {.base = device_->data() + hot_.offset,
            .layer_stride = hot_layout_.layer_bytes,
            .layers = kGroups,
            .layout = hot_layout_};
  }
  RowStore Pool() const {
    return {.base = pool_->data(), .layer_stride = pool_layout_.layer_bytes, .layers = kGroups, .layout = pool_layout_};
  }

  // The plane's program.
  absl::Status Step(Stream& stream) {
    absl::Status status;
    const auto await = [&](int32_t g) {
      status.Update(stream.AwaitDoorbell({.state = args_.state,
                                          .request = bells_.request(g),
                                          .abort = bells_.abort(),
                                          .begins_step = g == 0,
                                          .limit_ns = 200'000 * kMilliseconds}));
    };
    const auto ring = [&](int32_t g) { return RingDoorbellArgs{.state = args_.state, .done = bells_.done(g)}; };
    for (int32_t g = 0; g < kGroups; ++g) {
      await(g);
      if (g == 0) status.Update(stream.BeginBatch(args_));
      const ResolveArgs resolve = Resolve(groups_[g]);
      GatherCompactArgs gather;
      gather.pool = Pool();
      gather.hot = Hot();
      gather.pool_rows = pool_layout_.rows;
      gather.hot_rows = hot_layout_.rows;
      gather.layers = &kAllLayers[g];
      gather.layer_count = 1;
      gather.miss_pool_rows = resolve.miss_pool_rows;
      gather.miss_hot_rows = resolve.miss_hot_rows;
      gather.miss_counts = resolve.miss_counts;
      gather.rows = kRows;
      gather.top_k = kTopK;
      // One operation, and two.
      if (g % 2 == 0) {
        status.Update(stream.ResolveGather(resolve, gather, ring(g)));
      } else {
        status.Update(stream.ResolveGather(resolve, gather));
        status.Update(stream.RingDoorbell(ring(g)));
      }
    }
    await(kCommit);
    status.Update(stream.PlanCommits(args_));
    status.Update(stream.Transfer({.src = Hot(),
                                   .dst = Pool(),
                                   .src_row_limit = hot_layout_.rows,
                                   .dst_row_limit = pool_layout_.rows,
                                   .src_layers = kAllLayers,
                                   .dst_layers = kAllLayers,
                                   .layer_count = kGroups,
                                   .src_rows = args_.plan.commit_hot_rows,
                                   .dst_rows = args_.plan.commit_pool_rows,
                                   .count = kRows,
                                   .transferred_bytes = nullptr}));
    status.Update(stream.EndBatch(args_));
    status.Update(stream.RingDoorbell(ring(kCommit)));
    return status;
  }

  ResolveArgs Resolve(const Group& group) const {
    std::byte* const base = device_->data();
    ResolveArgs resolve;
    resolve.residency = {.slot_key = group.slot_key.In(base),
                         .lru = group.lru.In(base),
                         .state_rows = kSequences,
                         .hot_rows = args_.hot_rows};
    resolve.rows = kRows;
    resolve.real_rows = args_.plan.rows;
    resolve.top_k = kTopK;
    resolve.entries = group.entries.In(base);
    resolve.entry_stride = kTopK;
    resolve.lengths.data = args_.plan.lengths;
    resolve.state_rows.data = args_.plan.state_rows;
    resolve.block_table = args_.block_table;
    resolve.block_table_stride = args_.block_table_stride;
    resolve.block_table_rows = kSequences;
    resolve.block_table_columns = args_.block_table_columns;
    resolve.block_rows = args_.block_rows;
    resolve.pool_rows = args_.pool_rows;
    resolve.region_rows = args_.region_rows;
    resolve.newest_row = args_.newest_row;
    resolve.hot_rows_out = group.hot_rows.In(base);
    resolve.hot_rows_out_stride = kTopK;
    resolve.miss_pool_rows = group.miss_pool_rows.In(base);
    resolve.miss_hot_rows = group.miss_hot_rows.In(base);
    resolve.miss_counts = group.miss_counts.In(base);
    return resolve;
  }

  // Which sequences run, with how many rows.
  void Choose() {
    std::vector<int32_t> order(kSequences);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    order.resize(Draw(rng_, 0, kSequences));
    drafts_.clear();
    int32_t rows = 0;
    for (const int32_t r : order) {
      const int32_t count = Draw(rng_, 1, 2);
      const int32_t accepted = Draw(rng_, 0, count);
      drafts_.push_back({r, rows, count, accepted});
      for (int32_t k = 0; k < count; ++k) case_.SetRow(rows++, r, stored_[r] + 1 + k, k < accepted);
    }
    case_.rows() = rows;
    for (int32_t i = rows; i < kRows; ++i) case_.SetRow(i, Draw(rng_, -1, kSequences), Draw(rng_, -1, 50), 1);
  }

  void UpBatch() {
    Up(const_cast<int32_t*>(args_.mail.rows), &case_.rows(), 4);
    Up(const_cast<uint64_t*>(args_.mail.sequence_ids), case_.sequence_ids(), kRows * 8);
    Up(const_cast<int32_t*>(args_.mail.state_rows), case_.state_rows(), kRows * 4);
    Up(const_cast<int32_t*>(args_.mail.lengths), case_.lengths(), kRows * 4);
  }

  void WriteNewest(int32_t g) {
    for (const Drafts& drafts : drafts_) {
      for (int32_t k = 0; k < drafts.rows; ++k) {
        Content& content = contents_[g][drafts.state_row][stored_[drafts.state_row] + k];
        for (uint64_t& word : content) word = rng_();
        const int64_t hot_row = int64_t{drafts.state_row} * args_.region_rows + args_.newest_row + k;
        Up(Hot().base + g * hot_layout_.layer_bytes + hot_layout_.Offset(0, hot_row), content.data(), kRowBytes);
      }
    }
  }

  std::vector<int32_t> ChooseEntries() {
    std::vector<int32_t> entries(kRows * kTopK, -1);
    for (int32_t i = 0; i < kRows * kTopK; ++i) {
      const int32_t row = i / kTopK;
      if (row < case_.rows() && !Chance(rng_, 0.05)) {
        entries[i] =
            Draw(rng_, std::max(0, Chance(rng_, 0.5) ? case_.lengths()[row] - 10 : 0), case_.lengths()[row] - 1);
      }
    }
    return entries;
  }

  // Every entry's hot row has its content.
  void CheckEntries(int32_t g, const std::vector<int32_t>& entries) {
    std::vector<int32_t> hot_rows(kRows * kTopK);
    std::vector<Content> hot(static_cast<size_t>(hot_layout_.rows));
    Down(hot_rows.data(), groups_[g].hot_rows.In(device_->data()), hot_rows.size() * 4);
    Down(hot.data(), Hot().base + g * hot_layout_.layer_bytes, hot.size() * kRowBytes);
    ASSERT_TRUE(Finish(*engine_).ok());
    for (int32_t i = 0; i < kRows * kTopK; ++i) {
      if (entries[i] < 0) {
        ASSERT_EQ(hot_rows[i], -1);
        continue;
      }
      ASSERT_GE(hot_rows[i], 0) << "position " << entries[i];
      const int32_t state_row = case_.state_rows()[i / kTopK];
      ASSERT_EQ(hot[hot_rows[i]], contents_[g][state_row][entries[i]]) << "position " << entries[i];
    }
  }

  void CheckCommits() {
    std::vector<int32_t> statuses(kRows);
    Down(statuses.data(), args_.mail.statuses, kRows * 4);
    ASSERT_TRUE(Finish(*engine_).ok());
    for (int32_t i = 0; i < case_.rows(); ++i) ASSERT_EQ(statuses[i], 0);
    for (const Drafts& drafts : drafts_) {
      for (int32_t k = 0; k < drafts.accepted; ++k) {
        const int32_t position = stored_[drafts.state_row]++;
        const int64_t pool_row = int64_t{drafts.state_row} * case_.shape().max_sequence_rows + position;
        for (int32_t g = 0; g < kGroups; ++g) {
          Content content;
          std::memcpy(content.data(), pool_->data() + g * pool_layout_.layer_bytes + pool_layout_.Offset(0, pool_row),
                      kRowBytes);
          ASSERT_EQ(content, contents_[g][drafts.state_row][position]);
        }
      }
    }
    for (int32_t r = 0; r < kSequences; ++r) {
      ASSERT_EQ(std::atomic_ref(args_.words[r].stored_rows).load(std::memory_order_acquire), stored_[r]);
    }
  }

  void Up(void* device, const void* host, size_t bytes) { EXPECT_TRUE(engine_->Copy(device, host, bytes).ok()); }
  void Down(void* host, const void* device, size_t bytes) { EXPECT_TRUE(engine_->Copy(host, device, bytes).ok()); }

  static constexpr int32_t kAllLayers[] = {0, 1};

  std::mt19937_64 rng_;
  Doorbells bells_;
  BatchCase case_;
  RowLayout hot_layout_;
  RowLayout pool_layout_;
  Region<uint8_t> hot_;
  Group groups_[kGroups];
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> pool_;
  std::unique_ptr<Buffer> words_;
  BatchArgs args_;
  // By group, state row and position: what the engine has written last.
  std::vector<std::vector<std::vector<Content>>> contents_;
  int32_t stored_[kSequences] = {};
  std::vector<Drafts> drafts_;
  const std::unique_ptr<Stream> plane_;
  const std::unique_ptr<Stream> engine_;
  std::unique_ptr<Program> program_;
};

TEST_P(PlaneTest, AnEngineDrivesProgramsThatAreEnqueuedAhead) {
  const int32_t steps = Cases(1000, 3000);
  WholePlane plane(backend(), steps, 81);
  for (int ahead = 0; ahead < 2; ++ahead) ASSERT_TRUE(plane.EnqueueStep().ok());
  for (int32_t step = 1; step <= steps; ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step);
    plane.RunStep(static_cast<uint64_t>(step));
    if (HasFatalFailure()) return;
    ASSERT_TRUE(plane.EnqueueStep().ok());
  }
  const auto last = static_cast<uint64_t>(steps);
  EXPECT_EQ(plane.State().outcome, 0);
  plane.Stop();
  const PlaneState state = plane.State();
  EXPECT_EQ(state.step, last + 1);
  EXPECT_EQ(state.accepted, last);
  EXPECT_EQ(state.finished, last);
  EXPECT_EQ(state.outcome, static_cast<uint32_t>(PlaneOutcome::kAborted));
  EXPECT_EQ(plane.Ended(), static_cast<uint32_t>(PlaneOutcome::kAborted));
}

}  // namespace
}  // namespace stoker::kernels
