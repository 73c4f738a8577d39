// An engine that writes garbage wherever its mailbox can be written, from kernels, while steps of its plane run: on the
// server plane, where the daemon's kernels read it (MPS), and on the direct plane, where the engine's own do. The
// daemon is another process; a second session of it, on the same plane, is the one that must not notice.
//
// Strategy: each field alone, in one batch row and in all, with every value of one table of edges and some random ones;
// then random values into all fields at once, by a kernel that goes on while steps run.
// Invariants: no fault of the GPU's; a batch row has the status that kernels/plane.h gives to its first mistake; the
// very next step of the engine's own other sequence, and every step of the other session, hands out the right rows, all
// of which are compared; a plane that garbage in a doorbell ended says so, and can be armed anew.
//
// Left out are what only the engine's own client library reads on the direct plane (state.*, the words of sequences):
// there the engine is trusted (proto/stoker/v1/sessions.proto). What the daemon reads of it, the counters of its steps,
// is not left out.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/device_plane.h"
#include "client/direct_plane.h"
#include "client/plane.h"
#include "client/pool_mapping.h"
#include "client/replay/cuda/gpu_plane.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/launch.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/scribble.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using client::DevicePlane;
using client::DirectPlane;
using client::Plane;
using kernels::cuda::LaunchScribble;
using kernels::cuda::LaunchWrite;
using kernels::cuda::MakePinnedMemory;
using kernels::cuda::MakeStream;
using kernels::cuda::PinnedMemory;
using kernels::cuda::ScribbleTarget;
using kernels::cuda::StreamHandle;
using replay::OpenSequence;
using replay::Request;
using ::testing::HasSubstr;

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  DevicePlane::SetUpProcess();
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0;
}();

constexpr int32_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kNoStatus = -1;  // none is written

// The table of edges, of a field whose values end at n.
std::vector<int32_t> Edges(int32_t n, std::mt19937_64& random) {
  return {0, 1, -1, kMin, kMin + 1, kMax, kMax - 1, n - 1, n, n + 1, static_cast<int32_t>(random())};
}

using Enqueue = std::function<void(cudaStream_t)>;
const Enqueue kNothing = [](cudaStream_t) {};

// A plane whose steps the test composes of what the client library enqueues and of writes of its own in between.
class RawPlane {
 public:
  RawPlane(GpuEngine& engine, Plane kind) : kind_(kind), session_(engine.session()) {
    auto stream = MakeStream();
    auto mail = session_.arena()->Mail();
    auto pinned = MakePinnedMemory(kStateRows * (sizeof(uint64_t) + 4 * sizeof(int32_t)) + sizeof(int32_t));
    EXPECT_TRUE(stream.ok()) << stream.status();
    EXPECT_TRUE(mail.ok()) << mail.status();
    EXPECT_TRUE(pinned.ok()) << pinned.status();
    if (!stream.ok() || !mail.ok() || !pinned.ok()) return;
    stream_ = *std::move(stream);
    mail_ = *mail;
    pinned_ = *std::move(pinned);
    ids_ = static_cast<uint64_t*>(pinned_.get());
    state_rows_ = reinterpret_cast<int32_t*>(ids_ + kStateRows);
    lengths_ = state_rows_ + kStateRows;
    commits_ = lengths_ + kStateRows;
    statuses_ = commits_ + kStateRows;
    count_ = statuses_ + kStateRows;
    Open();
  }
  ~RawPlane() {
    if (server_ != nullptr) server_->Abort();
    if (stream_.get() != nullptr) {
      EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
    }
    server_.reset();
    direct_.reset();
  }

  // Begins anew, after an end.
  void Open() {
    server_.reset();
    direct_.reset();
    step_ = 0;
    if (kind_ == Plane::kServer) {
      auto server = DevicePlane::Arm(session_, kTopK);
      EXPECT_TRUE(server.ok()) << server.status();
      if (server.ok()) server_ = *std::move(server);
    } else {
      auto direct = DirectPlane::Open(session_, kTopK, {.stream = stream_.get()});
      EXPECT_TRUE(direct.ok()) << direct.status();
      if (direct.ok()) direct_ = *std::move(direct);
    }
  }

  bool open() const { return server_ != nullptr || direct_ != nullptr; }
  absl::Status status() { return server_ != nullptr ? server_->status() : direct_->status(); }
  cudaStream_t stream() const { return stream_.get(); }
  const client::PlaneMail& mail() const { return mail_; }
  // Number of the step that comes next.
  uint64_t next_step() const { return (server_ != nullptr ? server_->first_step() : 1) + step_; }

  // Brings the batch, padded to all rows of the mailbox, to the mailbox, and what `garbage` enqueues behind it.
  void Begin(absl::Span<const replay::BatchRow> batch, const Enqueue& garbage) {
    for (uint32_t row = 0; row < kStateRows; ++row) {
      const bool real = row < batch.size();
      ids_[row] = real ? batch[row].sequence->id : 0;
      state_rows_[row] = real ? static_cast<int32_t>(batch[row].sequence->state_row) : -1;
      lengths_[row] = real ? static_cast<int32_t>(batch[row].length) : 0;
      commits_[row] = 0;
      statuses_[row] = kNoStatus;
    }
    *count_ = static_cast<int32_t>(kStateRows);
    if (server_ != nullptr) {
      ASSERT_EQ(server_->PublishBatch({count_, ids_, state_rows_, lengths_}, stream()), absl::OkStatus());
    } else {
      Copy(mail_.batch_rows, count_, 1);
      Copy(mail_.sequence_ids.data(), ids_, kStateRows);
      Copy(mail_.state_rows.data(), state_rows_, kStateRows);
      Copy(mail_.lengths.data(), lengths_, kStateRows);
    }
    Copy(const_cast<int32_t*>(mail_.statuses.data()), statuses_, kStateRows);
    garbage(stream());
    ++step_;
    if (direct_ != nullptr) {
      ASSERT_EQ(direct_->EnqueueBegin(), absl::OkStatus());
    }
  }
  void Group(uint32_t group) {
    absl::Status status;
    if (server_ != nullptr) {
      status = server_->Ring(group, stream());
      status.Update(server_->Await(group, stream()));
    } else {
      status = direct_->EnqueueGroup(group);
    }
    ASSERT_EQ(status, absl::OkStatus());
  }
  // `commits` of the first rows; then `garbage`.
  void Commit(absl::Span<const int32_t> commits, const Enqueue& garbage) {
    std::copy(commits.begin(), commits.end(), commits_);
    absl::Status status;
    if (server_ != nullptr) {
      status = server_->PublishCommits(commits_, stream());
    } else {
      Copy(mail_.commits.data(), commits_, kStateRows);
    }
    garbage(stream());
    if (server_ != nullptr) {
      status.Update(server_->RingCommit(stream()));
      status.Update(server_->AwaitCommit(stream()));
    } else {
      status.Update(direct_->EnqueueCommit());
    }
    ASSERT_EQ(status, absl::OkStatus());
  }
  void Await() { ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess); }
  // Server plane: enqueues a wait for an answer that nobody has asked for.
  void AwaitUnasked(uint32_t doorbell) {
    ASSERT_EQ(doorbell < kGroups ? server_->Await(doorbell, stream()) : server_->AwaitCommit(stream()),
              absl::OkStatus());
  }
  // Waits for the stream.
  std::vector<int32_t> Statuses() {
    std::vector<int32_t> statuses(kStateRows);
    EXPECT_EQ(cudaMemcpyAsync(statuses_, mail_.statuses.data(), kStateRows * 4, cudaMemcpyDeviceToHost, stream()),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
    std::copy_n(statuses_, kStateRows, statuses.begin());
    return statuses;
  }

 private:
  template <typename T>
  void Copy(T* target, const T* source, size_t count) {
    ASSERT_EQ(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyHostToDevice, stream()), cudaSuccess);
  }

  const Plane kind_;
  client::Session& session_;
  StreamHandle stream_;
  client::PlaneMail mail_;
  PinnedMemory pinned_;  // the step's arrays, [kStateRows]: written when the step before is done
  uint64_t* ids_ = nullptr;
  int32_t *state_rows_ = nullptr, *lengths_ = nullptr, *commits_ = nullptr, *statuses_ = nullptr, *count_ = nullptr;
  uint64_t step_ = 0;
  std::unique_ptr<DevicePlane> server_;
  std::unique_ptr<DirectPlane> direct_;
};

class GarbagePlaneGpuTest : public DaemonTest, public testing::WithParamInterface<Plane> {
 protected:
  static constexpr uint32_t kSequences = 3;  // of the hostile engine: two that garbage is about, and one that it is not

  GarbagePlaneGpuTest() { pool_ = CreatePool(LinearPool("p", kLayers, kRowBytes, 1200)); }

  // False: the plane cannot be had, and was refused as it must be.
  bool Start() {
    const v1::Plane attach = GetParam() == Plane::kDirect ? v1::PLANE_DIRECT : v1::PLANE_UNSPECIFIED;
    hostile_ = std::make_unique<GpuEngine>(client(), pool_, "hostile", attach);
    other_ = std::make_unique<GpuEngine>(client(), pool_, "other", attach);
    if (GetParam() == Plane::kServer && !client().GetStatus()->mps_enabled()) {
      const absl::Status refused = DevicePlane::Arm(hostile_->session(), kTopK).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("MPS does not run"));
      return false;
    }
    for (uint32_t i = 0; i <= kSequences; ++i) requests_[i] = Prompt(i);
    for (uint32_t i = 0; i < kSequences; ++i) sequences_[i] = hostile_->Open(requests_[i]);
    victim_ = other_->Open(requests_[kSequences]);
    auto plane = replay::MakeGpuPlane(other_->session(), GetParam(), kTopK);
    EXPECT_TRUE(plane.ok()) << plane.status();
    if (plane.ok()) other_plane_ = *std::move(plane);
    plane_ = std::make_unique<RawPlane>(*hostile_, GetParam());
    return true;
  }
  bool ready() const { return other_plane_ != nullptr && plane_ != nullptr && plane_->open() && !HasFailure(); }
  void TearDown() override {
    plane_.reset();
    other_plane_.reset();
    other_.reset();
    hostile_.reset();
    DaemonTest::TearDown();
  }

  uint32_t NextLength(const OpenSequence& sequence) const {
    for (const v1::SequenceInfo& info : Sequences("p")) {
      if (info.sequence_id() == sequence.id) return info.stored_rows() + 1;
    }
    return 1;
  }
  // A step of the hostile engine's sequences as it should be, and one of the other session's, with all rows compared.
  void StepWell(absl::Span<const OpenSequence> sequences) {
    std::vector<replay::BatchRow> batch;
    for (const OpenSequence& sequence : sequences) batch.push_back({&sequence, NextLength(sequence)});
    hostile_->Publish(batch, random_);
    ASSERT_FALSE(HasFatalFailure());
    plane_->Begin(batch, kNothing);
    for (uint32_t group = 0; group < kGroups && !HasFatalFailure(); ++group) plane_->Group(group);
    ASSERT_FALSE(HasFatalFailure());
    plane_->Commit(std::vector<int32_t>(batch.size(), 1), kNothing);
    for (const int32_t status : plane_->Statuses()) ASSERT_EQ(status, v1::BATCH_ROW_STATUS_UNSPECIFIED);
    ASSERT_EQ(plane_->status(), absl::OkStatus());
    hostile_->Check(batch);
    ASSERT_FALSE(HasFatalFailure());
    for (const replay::BatchRow& row : batch) ASSERT_EQ(NextLength(*row.sequence), row.length + 1);
    StepOfOther();
  }
  void StepOfOther() {
    // A sequence has room for some 1,400 steps.
    if (other_length_ == kMaxRows) {
      other_->Close(victim_);
      victim_ = other_->Open(requests_[kSequences]);
      other_length_ = kPrompt;
    }
    other_->Step(*other_plane_, std::vector<replay::BatchRow>{{&victim_, ++other_length_}}, random_);
  }
  // The two that garbage is about begin anew: it may have stored rows of theirs.
  void Reopen() {
    for (uint32_t i = 0; i + 1 < kSequences; ++i) {
      hostile_->Close(sequences_[i]);
      sequences_[i] = hostile_->Open(requests_[i]);
    }
    if (NextLength(sequences_[kSequences - 1]) > kMaxRows - 100) {
      hostile_->Close(sequences_[kSequences - 1]);
      sequences_[kSequences - 1] = hostile_->Open(requests_[kSequences - 1]);
    }
  }
  std::vector<replay::BatchRow> Targets() const {
    return {{&sequences_[0], NextLength(sequences_[0])}, {&sequences_[1], NextLength(sequences_[1])}};
  }
  // A step about the first two sequences with garbage in it. The statuses of its batch rows are the result.
  std::vector<int32_t> StepWithGarbage(const Enqueue& in_batch, const Enqueue& in_commits) {
    const std::vector<replay::BatchRow> batch = Targets();
    hostile_->Publish(batch, random_);
    plane_->Begin(batch, in_batch);
    for (uint32_t group = 0; group < kGroups && !HasFatalFailure(); ++group) plane_->Group(group);
    if (HasFatalFailure()) return {};
    plane_->Commit({}, in_commits);
    return plane_->Statuses();
  }
  // What must hold behind each garbage.
  void ExpectNoHarm() {
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(plane_->status(), absl::OkStatus());
    StepWell(absl::MakeConstSpan(sequences_).last(1));
  }

  v1::PoolSpec pool_;
  std::unique_ptr<GpuEngine> hostile_, other_;
  std::unique_ptr<replay::StepPlane> other_plane_;
  std::unique_ptr<RawPlane> plane_;
  Request requests_[kSequences + 1];
  OpenSequence sequences_[kSequences];
  OpenSequence victim_;
  uint32_t other_length_ = kPrompt;
  std::mt19937_64 random_{11};
};

INSTANTIATE_TEST_SUITE_P(Planes, GarbagePlaneGpuTest, testing::Values(Plane::kServer, Plane::kDirect),
                         [](const auto& plane) { return plane.param == Plane::kServer ? "Server" : "Direct"; });

// One field of the batch. `first` and `all` of its values are written.
template <typename T>
Enqueue Write(const T* field, size_t count, T value) {
  return [=](cudaStream_t stream) {
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(LaunchWrite(const_cast<T*>(field) + i, value, stream), cudaSuccess);
  };
}

TEST_P(GarbagePlaneGpuTest, EachFieldOfTheBatchAlone) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  const client::PlaneMail& mail = plane_->mail();
  const auto ok = static_cast<int32_t>(v1::BATCH_ROW_STATUS_UNSPECIFIED);
  // Fields, the values that they end at, and the status that a value gives the first row, if it is known.
  struct Field {
    const char* name;
    const int32_t* values;
    int32_t n;
    std::function<std::optional<int32_t>(int32_t value)> status;
    bool in_commits = false;
    size_t rows = kStateRows;
  };
  const auto own_row = static_cast<int32_t>(sequences_[0].state_row);
  std::vector<Field> fields = {
      {"batch_rows", mail.batch_rows, static_cast<int32_t>(kStateRows),
       [&](int32_t value) {
         return value == 0 ? kNoStatus
                : value < 0 || value > static_cast<int32_t>(kStateRows)
                    ? static_cast<int32_t>(v1::BATCH_ROW_STATUS_BAD_COUNT)
                    : ok;
       },
       false, 1},
      {"state_rows", mail.state_rows.data(), static_cast<int32_t>(kStateRows),
       [&](int32_t value) {
         return value < 0 || value == own_row ? ok : static_cast<int32_t>(v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE);
       }},
      {"lengths", mail.lengths.data(), static_cast<int32_t>(kMaxRows),
       [&](int32_t value) {
         if (value < 1 || value > static_cast<int32_t>(kMaxRows)) {
           return static_cast<int32_t>(v1::BATCH_ROW_STATUS_BAD_LENGTH);
         }
         return value <= static_cast<int32_t>(kPrompt) + 1 ? ok : static_cast<int32_t>(v1::BATCH_ROW_STATUS_NOT_STORED);
       }},
      {"lengths around the stored rows", mail.lengths.data(), static_cast<int32_t>(kPrompt) + 1,
       [&](int32_t value) {
         if (value < 1 || value > static_cast<int32_t>(kMaxRows)) {
           return static_cast<int32_t>(v1::BATCH_ROW_STATUS_BAD_LENGTH);
         }
         return value <= static_cast<int32_t>(kPrompt) + 1 ? ok : static_cast<int32_t>(v1::BATCH_ROW_STATUS_NOT_STORED);
       }},
      // Any value but 0 commits the row, which may be committed.
      {"commits", mail.commits.data(), 1, [&](int32_t) { return ok; }, true},
      // These are the plane's to write.
      {"statuses", mail.statuses.data(), v1::BATCH_ROW_STATUS_NOT_APPENDED, [&](int32_t) { return ok; }},
  };
  for (uint32_t group = 0; group < kGroups; ++group) {
    const auto misses = hostile_->session().arena()->Misses(group);
    const auto hot_rows = hostile_->session().arena()->HotRows(group);
    ASSERT_TRUE(misses.ok() && hot_rows.ok());
    fields.push_back({"misses", misses->data(), kTopK, [&](int32_t) { return ok; }});
    fields.push_back(
        {"hot_rows", (*hot_rows)[0].data(), static_cast<int32_t>(kStateRows * kHotRows), [&](int32_t) { return ok; }});
  }
  for (const Field& field : fields) {
    for (const int32_t value : Edges(field.n, random_)) {
      for (const size_t rows : {size_t{1}, field.rows}) {
        SCOPED_TRACE(absl::StrCat(field.name, " is ", value, " in ", rows, " rows"));
        const Enqueue write = Write(field.values, rows, value);
        const std::vector<int32_t> statuses =
            StepWithGarbage(field.in_commits ? kNothing : write, field.in_commits ? write : kNothing);
        ASSERT_FALSE(HasFatalFailure());
        if (const auto expected = field.status(value); expected.has_value()) {
          EXPECT_EQ(statuses[0], *expected);
        }
        if (rows == 1 && field.rows > 1) {
          EXPECT_EQ(statuses[1], ok);
        }
        ExpectNoHarm();
        ASSERT_FALSE(HasFailure());
        if (field.in_commits || NextLength(sequences_[0]) != kPrompt + 1) Reopen();
        ASSERT_FALSE(HasFailure());
      }
    }
    // Those that it was about as well.
    StepWell(sequences_);
    Reopen();
    ASSERT_FALSE(HasFailure());
  }
}

TEST_P(GarbagePlaneGpuTest, SequenceIdsOfOthersAndOfNobody) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  const uint64_t own = sequences_[0].id;
  // Also its index with another generation, and a sequence that was released.
  const OpenSequence gone = hostile_->Open(requests_[0]);
  hostile_->Close(gone);
  std::vector<uint64_t> ids = {0,
                               1,
                               ~uint64_t{0},
                               uint64_t{1} << 63,
                               ~(uint64_t{1} << 63),
                               own - 1,
                               own + 1,
                               own + (uint64_t{1} << 32),
                               own ^ (uint64_t{1} << 63),
                               gone.id,
                               victim_.id,
                               sequences_[1].id};
  for (int i = 0; i < 10; ++i) ids.push_back(random_());
  for (const uint64_t id : ids) {
    for (const size_t rows : {size_t{1}, size_t{kStateRows}}) {
      SCOPED_TRACE(absl::StrCat("sequence_ids is ", id, " in ", rows, " rows"));
      const std::vector<int32_t> statuses = StepWithGarbage(Write(plane_->mail().sequence_ids.data(), rows, id),
                                                            Write(plane_->mail().commits.data(), kStateRows, 1));
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_EQ(statuses[0], id == 0 ? v1::BATCH_ROW_STATUS_UNSPECIFIED : v1::BATCH_ROW_STATUS_UNKNOWN_SEQUENCE);
      EXPECT_EQ(NextLength(sequences_[0]), kPrompt + 1);
      ExpectNoHarm();
      ASSERT_FALSE(HasFailure());
      Reopen();
    }
  }
}

TEST_P(GarbagePlaneGpuTest, EntriesThatAreNoPositions) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    std::vector<replay::BatchRow> batch = Targets();
    // Rows of the other session's region among them, had they been hot rows.
    hostile_->Publish(batch, [&](const replay::BatchRow& row) {
      if (random_() % 4 == 0) return static_cast<int32_t>(random_() % row.length);
      const std::vector<int32_t> edges =
          Edges(static_cast<int32_t>(random_() % 2 == 0 ? row.length : kMaxRows), random_);
      return edges[random_() % edges.size()];
    });
    ASSERT_FALSE(HasFatalFailure());
    plane_->Begin(batch, kNothing);
    for (uint32_t group = 0; group < kGroups && !HasFatalFailure(); ++group) plane_->Group(group);
    ASSERT_FALSE(HasFatalFailure());
    plane_->Commit(std::vector<int32_t>{1, 1}, kNothing);
    for (const int32_t status : plane_->Statuses()) EXPECT_EQ(status, v1::BATCH_ROW_STATUS_UNSPECIFIED);
    // Those that are none have -1, and the others their rows.
    hostile_->CheckAny(batch);
    ASSERT_FALSE(HasFailure());
    ExpectNoHarm();
    if (round % 20 == 19) Reopen();
  }
}

// All of it, by a kernel that writes while steps run. Doorbells are left alone: garbage there ends the plane.
TEST_P(GarbagePlaneGpuTest, AllFieldsWhileStepsRun) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  const client::PlaneMail& mail = plane_->mail();
  const auto at = [](const auto* values) { return const_cast<void*>(static_cast<const void*>(values)); };
  std::vector<ScribbleTarget> targets = {
      {at(mail.batch_rows), 1, 4, kStateRows + 1},
      {at(mail.sequence_ids.data()), kStateRows, 8, 1u << 16},
      {at(mail.state_rows.data()), kStateRows, 4, kStateRows},
      {at(mail.lengths.data()), kStateRows, 4, kMaxRows},
      {at(mail.commits.data()), kStateRows, 4, 2},
      {at(mail.statuses.data()), kStateRows, 4, 11},
  };
  for (uint32_t group = 0; group < kGroups; ++group) {
    const auto indices = hostile_->session().arena()->Indices(group);
    const auto hot_rows = hostile_->session().arena()->HotRows(group);
    const auto misses = hostile_->session().arena()->Misses(group);
    ASSERT_TRUE(indices.ok() && hot_rows.ok() && misses.ok());
    targets.push_back({at((*indices)[0].data()), static_cast<int32_t>(kStateRows * kTopK), 4, kPrompt});
    targets.push_back({at((*hot_rows)[0].data()), static_cast<int32_t>(kStateRows * kTopK), 4, kStateRows * kHotRows});
    targets.push_back({at(misses->data()), kStateRows, 4, kTopK});
  }
  auto scribbles = MakeStream();
  auto pinned = MakePinnedMemory(4);
  ASSERT_TRUE(scribbles.ok() && pinned.ok());
  auto* const stop = static_cast<volatile uint32_t*>(pinned->get());
  for (uint32_t round = 0; round < 20 && !HasFailure(); ++round) {
    *stop = 0;
    ASSERT_EQ(LaunchScribble(targets, round, kMax, const_cast<const uint32_t*>(stop), scribbles->get()), cudaSuccess);
    for (int step = 0; step < 20 && !HasFatalFailure(); ++step) {
      StepWithGarbage(kNothing, kNothing);
      StepOfOther();
    }
    // It wrote until now.
    EXPECT_EQ(cudaStreamQuery(scribbles->get()), cudaErrorNotReady);
    *stop = 1;
    ASSERT_EQ(cudaStreamSynchronize(scribbles->get()), cudaSuccess);
    ASSERT_FALSE(HasFailure());
    ExpectNoHarm();
    ASSERT_FALSE(HasFailure());
    Reopen();
    StepWell(sequences_);
    Reopen();
  }
}

TEST_P(GarbagePlaneGpuTest, DoorbellsWithNumbersOfNoStep) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  // On the direct plane nobody looks at them.
  const bool ends = GetParam() == Plane::kServer;
  for (uint32_t doorbell = 0; doorbell <= kGroups; ++doorbell) {
    for (const int64_t relative : {int64_t{1}, int64_t{-2}, int64_t{1} << 32, std::numeric_limits<int64_t>::min(),
                                   std::numeric_limits<int64_t>::max(), static_cast<int64_t>(random_() | 2)}) {
      SCOPED_TRACE(absl::StrCat("request[", doorbell, "] is the step's number + ", relative));
      // Behind two good ones, so that its number - 2 is not below 0.
      StepWell(absl::MakeConstSpan(sequences_).last(1));
      StepWell(absl::MakeConstSpan(sequences_).last(1));
      ASSERT_FALSE(HasFailure());
      const uint64_t bad = plane_->next_step() + static_cast<uint64_t>(relative);
      uint64_t* const request = &plane_->mail().request[doorbell];
      if (ends) {
        // A step that has begun goes on up to the doorbell.
        plane_->Begin(Targets(), Write(request, 1, bad));
        for (uint32_t group = 0; group < doorbell && !HasFatalFailure(); ++group) plane_->Group(group);
        // The wait ends, since the plane has.
        plane_->AwaitUnasked(doorbell);
        plane_->Await();
        ASSERT_FALSE(HasFatalFailure());
        EXPECT_EQ(plane_->status().code(), absl::StatusCode::kInternal) << plane_->status();
        EXPECT_THAT(std::string(plane_->status().message()), HasSubstr("another step's number"));
        StepOfOther();
        plane_->Open();
        ASSERT_TRUE(ready());
      } else {
        StepWithGarbage(Write(request, 1, bad), kNothing);
      }
      ASSERT_FALSE(HasFatalFailure());
      ExpectNoHarm();
      ASSERT_FALSE(HasFailure());
    }
  }
}

// What the daemon tells, and the engine alone reads: the engine may deceive itself, and nobody else.
TEST_P(GarbagePlaneGpuTest, AnswersThatTheEngineSpoils) {
  if (!Start()) return;
  ASSERT_TRUE(ready());
  std::vector<Enqueue> garbage;
  const client::PlaneMail& mail = plane_->mail();
  for (const int32_t value : {1, 2, 3, 4, -1, kMin, kMax}) garbage.push_back(Write(mail.ended, 1, value));
  for (uint32_t doorbell = 0; doorbell <= kGroups; ++doorbell) {
    for (const uint64_t value : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63, random_()}) {
      garbage.push_back(Write(&mail.done[doorbell], 1, value));
    }
  }
  for (size_t i = 0; i < garbage.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("garbage ", i));
    garbage[i](plane_->stream());
    plane_->Await();
    // With that in its mailbox the engine may believe that the plane has ended.
    StepWithGarbage(kNothing, kNothing);
    ASSERT_FALSE(HasFatalFailure());
    StepOfOther();
    plane_.reset();
    plane_ = std::make_unique<RawPlane>(*hostile_, GetParam());
    ASSERT_TRUE(ready());
    ExpectNoHarm();
    ASSERT_FALSE(HasFailure());
  }
}

// The counters that a step of the direct plane leaves for the daemon.
TEST_P(GarbagePlaneGpuTest, CountersOfADirectStep) {
  if (GetParam() != Plane::kDirect) return;
  ASSERT_TRUE(Start());
  ASSERT_TRUE(ready());
  const auto pool = client::PoolMapping::Map(hostile_->session().info(), absl::Now() + absl::Seconds(10));
  ASSERT_TRUE(pool.ok()) << pool.status();
  auto* const words = reinterpret_cast<uint64_t*>((*pool)->result());
  constexpr size_t kWords = sizeof(kernels::PlaneResult) / sizeof(uint64_t);
  for (const uint64_t value :
       {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{1} << 63, ~(uint64_t{1} << 63), random_()}) {
    for (size_t first = 0; first <= kWords; ++first) {
      // One word, or all.
      const Enqueue write = first < kWords ? Write(words + first, 1, value) : Write(words, kWords, value);
      write(plane_->stream());
      plane_->Await();
      ASSERT_FALSE(HasFatalFailure());
      // The daemon looks at them for its metrics, and when it is asked about sessions.
      EXPECT_FALSE(Scrape(daemon().metrics_port()).empty());
      EXPECT_EQ(SessionCount(), 2);
    }
    ExpectNoHarm();
    ASSERT_FALSE(HasFailure());
  }
}

}  // namespace
}  // namespace stoker::system_test
