// Which limits the copies of a session have: those of bulk work, or those of a step.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/engine/bounced_backend.h"

namespace stoker::engine_test {
namespace {

using ::testing::Each;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kRows = 32;
const engine::CopyPolicy kPolicy = {.bulk = {.max_blocks = 3, .max_bytes = 300},
                                    .step = {.max_blocks = 5, .max_bytes = 500}};

auto HasLimits(const kernels::CopyLimits& limits) {
  return Field(&BouncedCopy::limits, testing::AllOf(Field(&kernels::CopyLimits::max_blocks, limits.max_blocks),
                                                    Field(&kernels::CopyLimits::max_bytes, limits.max_bytes)));
}

class CopyPolicyTest : public ::testing::Test {
 protected:
  CopyPolicyTest() : backend_(std::move(MakeBouncedBackends({"d"}, 1)[0])) {
    engine_ = engine::MakeEngine({backend_.get()}, 1 << 16, kPolicy).value();
    core::PoolSpec pool;
    pool.name = "p";
    pool.layers = 2;
    pool.row_layout = core::RowLayout::kLinear;
    pool.row_bytes = 16;
    pool.block_rows = 16;
    pool.blocks = 64;
    EXPECT_TRUE(pool.Normalize().ok());
    pool_ = engine_->CreatePool(pool, {}).value();
    core::SessionSpec spec;
    spec.pool = "p";
    spec.name = "s";
    spec.device = "d";
    spec.state_rows = 4;
    spec.hot_rows = 32;
    spec.max_top_k = 8;
    spec.max_batch_rows = 4;
    spec.max_sequence_rows = kRows;
    spec.index_space = core::IndexSpace::kPosition;
    spec.groups = {{0, 1}};
    session_ = engine_->CreateSession(pool, *pool_, spec).value();
    bytes_ = backend_->AllocateHost(kRows * 2 * 16).value();
    work_.pool_rows = {5, 6, 7, 8};
    EXPECT_TRUE(session_->Open(0, core::SequenceId{1}, {0, 1}).ok());
    EXPECT_TRUE(Finish().ok());
    backend_->TakeCopies();
  }

  char* bytes() const { return reinterpret_cast<char*>(bytes_->data()); }

  absl::Status Finish() {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<absl::Status> result;
    session_->Notify([&](absl::Status status) {
      const std::lock_guard lock(mutex);
      result = std::move(status);
      changed.notify_one();
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return result.has_value(); });
    return *result;
  }

  // What the operation, which has enqueued its work with this status, has copied.
  std::vector<BouncedCopy> Copies(const absl::Status& enqueued) {
    EXPECT_TRUE(enqueued.ok()) << enqueued;
    const absl::Status status = Finish();
    EXPECT_TRUE(status.ok()) << status;
    return backend_->TakeCopies();
  }

  core::StepWork Step(bool gather) {
    core::StepWork step;
    step.top_k = 8;
    step.rows = {{.state_row = 0,
                  .length = 20,
                  .newest_index = 0,
                  .commit = true,
                  .commit_pool_row = 4,
                  .newest_bytes = bytes(),
                  .resident_pages = {}}};
    core::StepGroupWork group;
    group.indices = entries_.data();
    group.gather = gather;
    step.groups = {group};
    return step;
  }

  const std::unique_ptr<BouncedBackend> backend_;
  std::unique_ptr<core::Engine> engine_;
  std::unique_ptr<core::PoolStorage> pool_;
  std::unique_ptr<kernels::Buffer> bytes_;
  core::RowsWork work_;
  const std::vector<int32_t> entries_ = {0, 1, 2, 3, 4, 5, 6, 7};
  std::unique_ptr<core::SessionStorage> session_;
};

testing::Matcher<std::vector<BouncedCopy>> AllWith(const kernels::CopyLimits& limits) {
  return testing::AllOf(Not(IsEmpty()), Each(HasLimits(limits)));
}

TEST_F(CopyPolicyTest, BulkWork) {
  core::RowsWork store = work_, load = work_;
  store.source_bytes = bytes();
  load.target_bytes = bytes();
  EXPECT_THAT(Copies(session_->Store(store)), AllWith(kPolicy.bulk));
  EXPECT_THAT(Copies(session_->Load(load)), AllWith(kPolicy.bulk));
  EXPECT_THAT(Copies(session_->LoadHot(0, 0, work_)), AllWith(kPolicy.bulk));
  core::ReadWork read;
  read.layers = {1};
  read.rows = {5, 6};
  read.target_bytes = bytes();
  EXPECT_THAT(Copies(session_->Read(read)), AllWith(kPolicy.bulk));
  const core::BlockCopy copy = {.source_block = 0, .target_block = 9, .rows = 3};
  EXPECT_THAT(Copies(session_->CopyBlocks({copy})), AllWith(kPolicy.bulk));
}

TEST_F(CopyPolicyTest, TensorsAreBulkWork) {
  // Memory of this process stands for the engine's.
  class Memory final : public core::ClientMemory {
   public:
    explicit Memory(std::byte* data) : data_(data) {}
    std::byte* data() const override { return data_; }

   private:
    std::byte* const data_;
  };
  core::Tensor tensor;
  tensor.memory = std::make_unique<Memory>(bytes_->data());
  tensor.spec.layers = {0, 1};
  tensor.spec.rows = kRows;
  tensor.spec.page_rows = 1;
  tensor.spec.layer_stride_bytes = kRows * 16;
  tensor.spec.parts = {{.part = 0, .offset_bytes = 0, .row_stride_bytes = 16, .page_stride_bytes = 16}};
  core::TensorWork work;
  work.pool_rows = {5, 6};
  work.tensor_rows = {0, 1};
  work.tensors = {&tensor};
  EXPECT_THAT(Copies(session_->StoreTensors(work)), AllWith(kPolicy.bulk));
  EXPECT_THAT(Copies(session_->LoadTensors(work)), AllWith(kPolicy.bulk));
}

TEST_F(CopyPolicyTest, Steps) {
  core::StepWork step = Step(/*gather=*/true);
  const std::vector<BouncedCopy> copies = Copies(session_->Step(step));
  EXPECT_THAT(copies, AllWith(kPolicy.step));
  EXPECT_EQ(copies.size(), 3u);  // the newest row comes, is committed, misses are gathered
  core::StepWork resolve = Step(/*gather=*/false);
  EXPECT_THAT(Copies(session_->Step(resolve)), AllWith(kPolicy.step));
  core::DeviceTotals totals;
  EXPECT_THAT(Copies(session_->Gather(0, {0, 1}, &totals)), AllWith(kPolicy.step));
  EXPECT_THAT(Copies(session_->Commit({.hot_rows = {32}, .pool_rows = {4}})), AllWith(kPolicy.step));
}

TEST_F(CopyPolicyTest, StepsOfTheServerPlane) {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  core::PlaneSetup setup;
  setup.session = core::SessionId{1};
  setup.top_k = 8;
  setup.doorbell_timeout = absl::Seconds(10);
  setup.stepped = [](const core::PlaneSample&) {};
  setup.ended = [&](const core::PlaneEnding&) {
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_one();
  };
  const std::vector<BouncedCopy> copies = Copies(session_->Arm(std::move(setup)));
  EXPECT_THAT(copies, AllWith(kPolicy.step));
  EXPECT_THAT(copies, testing::Contains(Field(&BouncedCopy::gathers, true)));
  EXPECT_THAT(copies, testing::Contains(Field(&BouncedCopy::gathers, false)));
  session_->Disarm();
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return over; });
}

}  // namespace
}  // namespace stoker::engine_test
