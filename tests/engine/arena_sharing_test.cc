// The memory that a session gets for its arena, by how it is to be shared: what the layout says of it, and a driver
// that gives no handle.
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "tests/engine/bounced_backend.h"

namespace stoker::core {
namespace {

using ::testing::HasSubstr;

constexpr char kDevice[] = "GPU-made-up";

PoolSpec SmallPool() {
  PoolSpec pool;
  pool.name = "p";
  pool.layers = 2;
  pool.row_layout = RowLayout::kLinear;
  pool.row_bytes = 16;
  pool.block_rows = 16;
  pool.blocks = 64;
  EXPECT_EQ(pool.Normalize(), absl::OkStatus());
  return pool;
}

SessionSpec SmallSession(ArenaSharing sharing) {
  SessionSpec spec;
  spec.pool = "p";
  spec.device = kDevice;
  spec.arena_sharing = sharing;
  spec.state_rows = 2;
  spec.hot_rows = 16;
  spec.max_top_k = 8;
  spec.max_batch_rows = 2;
  spec.max_sequence_rows = 64;
  spec.index_space = IndexSpace::kPosition;
  spec.groups = {{0, 1}};
  spec.max_reserved_blocks = 64;
  return spec;
}

// An engine on one device, with a pool.
struct OneDevice {
  explicit OneDevice(std::unique_ptr<kernels::Backend> made) : backend(std::move(made)) {
    auto made_engine = engine::MakeEngine({backend.get()}, 1 << 20);
    EXPECT_TRUE(made_engine.ok()) << made_engine.status();
    engine = *std::move(made_engine);
    auto made_pool = engine->CreatePool(spec, {});
    EXPECT_TRUE(made_pool.ok()) << made_pool.status();
    pool = *std::move(made_pool);
  }
  absl::StatusOr<std::unique_ptr<SessionStorage>> Create(ArenaSharing sharing) {
    return engine->CreateSession(spec, *pool, SmallSession(sharing));
  }

  const PoolSpec spec = SmallPool();
  std::unique_ptr<kernels::Backend> backend;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<PoolStorage> pool;
};

TEST(ArenaSharingTest, TheLayoutSaysWhatIsBehindTheDescriptor) {
  auto backends = engine_test::MakeBouncedBackends({kDevice}, 1);
  OneDevice device(std::move(backends[0]));
  const auto file = device.Create(ArenaSharing::kUnspecified).value();
  EXPECT_TRUE(file->arena().has_descriptor);
  EXPECT_GE(file->arena_descriptor(), 0);
  EXPECT_EQ(file->arena().allocation_bytes, 0u);
  EXPECT_EQ(device.engine->NoArenaSharing(kDevice, ArenaSharing::kDescriptor), "");
  const auto allocation = device.Create(ArenaSharing::kDescriptor).value();
  EXPECT_TRUE(allocation->arena().has_descriptor);
  EXPECT_GE(allocation->arena_descriptor(), 0);
  EXPECT_EQ(allocation->arena().size_bytes, file->arena().size_bytes);
  EXPECT_EQ(allocation->arena().allocation_bytes, uint64_t{2} << 20);
}

TEST(ArenaSharingTest, WhatCannotBeHadIsSaid) {
  auto backends = engine_test::MakeBouncedBackends({kDevice}, 1);
  OneDevice device(std::move(backends[0]));
  EXPECT_THAT(device.engine->NoArenaSharing(kDevice, ArenaSharing::kIpcHandle), HasSubstr("no handle"));
  EXPECT_EQ(device.Create(ArenaSharing::kIpcHandle).status().code(), absl::StatusCode::kFailedPrecondition);
}

// A device that has handles, with a driver that gives none: it is seen when the memory is there.
class HandlelessBackend final : public kernels::Backend {
 public:
  std::string_view device() const override { return kDevice; }
  std::string_view NoSharing(kernels::Sharing) const override { return {}; }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocatePool(size_t bytes,
                                                                const kernels::PoolOptions& options) override {
    return cpu_->AllocatePool(bytes, options);
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocateShared(size_t bytes, kernels::Sharing) override {
    return cpu_->AllocatePrivate(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocatePrivate(size_t bytes) override {
    return cpu_->AllocatePrivate(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocateHost(size_t bytes) override {
    return cpu_->AllocateHost(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Stream>> CreateStream() override { return cpu_->CreateStream(); }

 private:
  const std::unique_ptr<kernels::Backend> cpu_ = kernels::cpu::MakeCpuBackend(1);
};

TEST(ArenaSharingTest, AHandleThatTheDriverDoesNotGiveIsMissedOnlyWhereItIsAskedFor) {
  OneDevice device(std::make_unique<HandlelessBackend>());
  const absl::Status status = device.Create(ArenaSharing::kIpcHandle).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("arena_sharing: ARENA_SHARING_IPC_HANDLE given"));
  const auto unmapped = device.Create(ArenaSharing::kUnspecified);
  ASSERT_TRUE(unmapped.ok()) << unmapped.status();
  EXPECT_FALSE((*unmapped)->arena().has_descriptor);
  EXPECT_EQ((*unmapped)->arena().ipc_handle, "");
}

}  // namespace
}  // namespace stoker::core
