// An arena by descriptor between two processes: this one is the engine, the daemon is another one. Its memory goes back
// to the GPU with the session, also while another session is armed, and whoever still maps it afterwards sees no other
// session's rows. That steps work on it is in plane_process_gpu_test and direct_plane_gpu_test.
//
// With MPS another session is armed meanwhile, so that a kernel of the daemon's waits: calls that wait for all of a
// GPU's work, as cudaFree does, would then not return. Without MPS there is no such session.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/descriptor_exchange.h"
#include "client/device_mapping.h"
#include "client/device_plane.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using client::DevicePlane;
using ::testing::HasSubstr;

constexpr uint32_t kTopK = 16;
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kStagingBytes = 8 * kMiB;
// For a call that does not wait for the session that is armed.
constexpr absl::Duration kSoon = absl::Seconds(5);

// Before the daemon is started, which reads the first, and before anything uses CUDA.
const bool process_is_set_up = [] {
  DevicePlane::SetUpProcess();
  return setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/1) == 0;
}();

uint64_t FreeBytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

class ArenaGpuTest : public DaemonTest {
 protected:
  ArenaGpuTest() : pool_(CreatePool(LinearPool("p", 4, 656, 512))) {
    armed_ = std::make_unique<Rank>(client(), pool_, AttachTo(pool_, "armed"), WithoutReattach());
    armed_hot_bytes_ = client().GetStatus()->hot_bytes();
    if (!client().GetStatus()->mps_enabled()) {
      GTEST_LOG_(INFO) << "no MPS: no session is armed";
      return;
    }
    auto plane = DevicePlane::Arm(armed_->session(), kTopK);
    EXPECT_TRUE(plane.ok()) << plane.status();
    if (plane.ok()) plane_ = *std::move(plane);
  }
  void TearDown() override {
    plane_.reset();
    armed_.reset();
    DaemonTest::TearDown();
  }

  // Hot buffers of 656 MiB, and what belongs to them.
  v1::AttachRequest Large(v1::ArenaSharing sharing) const {
    v1::AttachRequest request = AttachTo(pool_, "large", 32, 8192, kTopK, 8192);
    request.set_arena_sharing(sharing);
    request.set_staging_bytes(kStagingBytes);
    return request;
  }
  // A session that has ended is not listed any more; its memory counts until it is freed.
  bool OnlyTheArmedOneIsThere() const {
    return SessionCount() == 1 && client().GetStatus()->hot_bytes() == armed_hot_bytes_;
  }
  static std::vector<std::byte> Read(const client::Arena& arena) {
    std::vector<std::byte> bytes(arena.bytes().size(), std::byte{0xee});
    const absl::Status status = arena.CopyOut(arena.bytes(), bytes.data());
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }
  static void Fill(const client::Arena& arena, std::byte value) {
    const std::vector<std::byte> bytes(arena.bytes().size(), value);
    const absl::Status status = arena.CopyIn(bytes.data(), arena.bytes());
    EXPECT_TRUE(status.ok()) << status;
  }

  const v1::PoolSpec pool_;
  std::unique_ptr<Rank> armed_;
  uint64_t armed_hot_bytes_ = 0;
  std::unique_ptr<DevicePlane> plane_;
};

TEST_F(ArenaGpuTest, MemoryGoesBackWithTheSession) {
  // What the driver and the daemon keep for later: private state, staging.
  { Rank first(client(), pool_, Large(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach()); }
  ASSERT_TRUE(Eventually(kSoon, [&] { return OnlyTheArmedOneIsThere(); }));
  const uint64_t before = FreeBytes();
  for (int round = 0; round < 5; ++round) {
    const absl::Time begin = absl::Now();
    auto rank = std::make_unique<Rank>(client(), pool_, Large(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach());
    EXPECT_LT(absl::Now() - begin, kSoon);
    const v1::ArenaLayout layout = rank->session().info().arena();
    EXPECT_EQ(layout.cuda_ipc_handle(), "");
    EXPECT_GE(layout.allocation_bytes(), layout.size_bytes());
    EXPECT_EQ(layout.allocation_bytes() % (2 * kMiB), 0u);
    EXPECT_GE(layout.size_bytes(), 656 * kMiB);
    EXPECT_TRUE(rank->session().arena()->on_device());
    EXPECT_LE(FreeBytes(), before - layout.allocation_bytes());
    EXPECT_GE(client().GetStatus()->hot_bytes(), armed_hot_bytes_ + layout.size_bytes());
    EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_client_mapped_bytes{session=\"large\"}"],
              static_cast<double>(layout.size_bytes()));
    // It serves steps.
    const Sequence sequence = rank->Open(MakeTokens(7, 200), 200);
    const std::vector<BatchRow> batch = {{&sequence, 200}};
    const std::vector<std::vector<int32_t>> entries = {{5, 50, 98, 3}};
    const StepOutcome outcome = rank->Step(batch, entries, 4, v1::DATA_SOURCE_SHARED);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    rank->CheckRows(batch, entries, 4, outcome);
    rank.reset();
    ASSERT_TRUE(Eventually(kSoon, [&] { return OnlyTheArmedOneIsThere() && FreeBytes() + 16 * kMiB >= before; }))
        << before - FreeBytes() << " bytes are missing";
    EXPECT_EQ(Scrape(daemon().metrics_port()).count("stoker_client_mapped_bytes{session=\"large\"}"), 0u);
  }
  if (plane_ != nullptr) {
    EXPECT_TRUE(plane_->status().ok()) << plane_->status();
  }
  // What it is compared with: a slab stays.
  { Rank slab(client(), pool_, Large(v1::ARENA_SHARING_IPC_HANDLE), WithoutReattach()); }
  ASSERT_TRUE(Eventually(kSoon, [&] { return OnlyTheArmedOneIsThere(); }));
  EXPECT_LE(FreeBytes(), before - 600 * kMiB);
}

TEST_F(ArenaGpuTest, WhoeverStillMapsItSeesNoOtherSession) {
  std::shared_ptr<const client::Arena> old_arena;
  {
    Rank old_rank(client(), pool_, Large(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach());
    old_arena = old_rank.session().arena();
    ASSERT_TRUE(old_arena->status().ok()) << old_arena->status();
  }
  ASSERT_TRUE(Eventually(kSoon, [&] { return OnlyTheArmedOneIsThere(); }));
  Fill(*old_arena, std::byte{0xab});
  const uint64_t allocated = old_arena->bytes().size();
  const uint64_t with_old = FreeBytes();
  {
    Rank next(client(), pool_, Large(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach());
    // Memory of its own, in which nothing is yet.
    EXPECT_LE(FreeBytes(), with_old - allocated);
    const auto staging = next.session().arena()->Staging();
    ASSERT_TRUE(staging.ok()) << staging.status();
    std::vector<std::byte> fresh(staging->size(), std::byte{0xee});
    ASSERT_TRUE(next.session().arena()->CopyOut(*staging, fresh.data()).ok());
    EXPECT_EQ(fresh, std::vector<std::byte>(kStagingBytes));
    const Sequence sequence = next.Open(MakeTokens(7, 200), 200);
    const std::vector<BatchRow> batch = {{&sequence, 200}};
    const std::vector<std::vector<int32_t>> entries = {{5, 50, 98, 3}};
    const auto step = [&] {
      const StepOutcome outcome = next.Step(batch, entries, 4, v1::DATA_SOURCE_SHARED);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      next.CheckRows(batch, entries, 4, outcome);
    };
    step();
    EXPECT_EQ(Read(*old_arena), std::vector<std::byte>(old_arena->bytes().size(), std::byte{0xab}));
    // Nor does it write there.
    Fill(*old_arena, std::byte{0x11});
    step();
  }
  ASSERT_TRUE(Eventually(kSoon, [&] { return OnlyTheArmedOneIsThere(); }));
  // What is mapped here the GPU does not get back before.
  const uint64_t held = FreeBytes();
  old_arena.reset();
  EXPECT_GE(FreeBytes(), held + allocated);
}

TEST_F(ArenaGpuTest, OtherDescriptorsAreRefusedAndTheNextIsMapped) {
  Rank rank(client(), pool_, Large(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach());
  const v1::Attached info = rank.session().info();
  const uint64_t bytes = info.arena().allocation_bytes();
  const client::FileDescriptor file(memfd_create("other", MFD_CLOEXEC));
  ASSERT_TRUE(file.valid());
  const absl::Status none = client::DeviceMapping::Import(file.get(), info.device(), bytes).status();
  EXPECT_FALSE(none.ok());
  EXPECT_THAT(std::string(none.message()), HasSubstr("cuMemImportFromShareableHandle"));
  const auto descriptor = client::FetchDescriptor(info.arena().descriptor_socket(), info.token(), absl::Now() + kSoon);
  ASSERT_TRUE(descriptor.ok()) << descriptor.status();
  const absl::Status larger = client::DeviceMapping::Import(descriptor->get(), info.device(), 2 * bytes).status();
  EXPECT_FALSE(larger.ok());
  // A second mapping of the same memory.
  const auto again = client::DeviceMapping::Import(descriptor->get(), info.device(), bytes);
  ASSERT_TRUE(again.ok()) << again.status();
  const auto staging = rank.session().arena()->Staging();
  ASSERT_TRUE(staging.ok()) << staging.status();
  const std::vector<std::byte> written(staging->size(), std::byte{0x5c});
  ASSERT_TRUE(rank.session().arena()->CopyIn(written.data(), *staging).ok());
  std::vector<std::byte> read(staging->size());
  const auto offset = staging->data() - rank.session().arena()->bytes().data();
  ASSERT_TRUE((*again)->Copy(read.data(), (*again)->data() + offset, read.size()).ok());
  EXPECT_EQ(read, written);
}

}  // namespace
}  // namespace stoker::system_test
