// What a CUDA stream does beside the operations that the shared suites compare.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/gpu/scribble.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels::cuda {
namespace {

class CudaStreamTest : public testing::TestWithParam<BackendCase> {};
STOKER_FOR_EVERY_BACKEND(CudaStreamTest);

// To ask whether an event has come is no error of what is enqueued next.
TEST_P(CudaStreamTest, AnEventThatHasNotComeIsNoError) {
  const std::unique_ptr<Backend> backend = GetParam().make(1);
  const auto device = backend->AllocateShared(4096).value();
  const auto stream = backend->CreateStream().value();
  ASSERT_TRUE(stream->Copy(device->data(), std::vector<std::byte>(4096).data(), 4096).ok());
  ASSERT_TRUE(Finish(*stream).ok());
  auto* const values = reinterpret_cast<int32_t*>(device->data());
  const auto never = MakePinnedMemory(sizeof(uint32_t)).value();
  *static_cast<uint32_t*>(never.get()) = 0;
  ASSERT_EQ(LaunchScribble({{values + 512, 512, 4, 9}}, 1, 200000, static_cast<const uint32_t*>(never.get()),
                           static_cast<CudaStream&>(*stream).get()),
            cudaSuccess);
  const std::shared_ptr<Event> event = stream->Record();
  EXPECT_FALSE(event->Done()) << "it is to be asked for too early";
  const absl::Status status = stream->Reset({.residency = {.slot_key = values,
                                                           .lru = reinterpret_cast<int16_t*>(values + 256),
                                                           .state_rows = 1,
                                                           .hot_rows = 64},
                                             .state_rows = values + 400,
                                             .count = 1});
  EXPECT_TRUE(status.ok()) << status;
  const absl::Status finished = Finish(*stream);
  EXPECT_TRUE(finished.ok()) << finished;
  EXPECT_TRUE(event->Done());
}

// Copies from and to pageable memory that no Notify has followed do not keep a stream from ending.
TEST_P(CudaStreamTest, EndsWithCopiesThatNobodyAskedFor) {
  struct Shared {
    std::unique_ptr<Backend> backend = GetParam().make(1);
    std::unique_ptr<Buffer> device = backend->AllocateShared(4096).value();
    std::vector<std::byte> host{4096};
    std::promise<void> ended;
  };
  const auto shared = std::make_shared<Shared>();
  std::future<void> ended = shared->ended.get_future();
  // On a thread of its own, which is left behind where it does not come back.
  std::thread([shared] {
    auto stream = shared->backend->CreateStream().value();
    EXPECT_TRUE(stream->Copy(shared->device->data(), shared->host.data(), shared->host.size()).ok());
    EXPECT_TRUE(stream->Copy(shared->host.data(), shared->device->data(), shared->host.size()).ok());
    stream.reset();
    shared->ended.set_value();
  }).detach();
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(10)), std::future_status::ready);
}

// A program cannot stage bytes: those that it copied when it was recorded would be copied for ever.
TEST_P(CudaStreamTest, ProgramsCopyNoPageableMemory) {
  const std::unique_ptr<Backend> backend = GetParam().make(1);
  const auto device = backend->AllocateShared(4096).value();
  const auto pinned = backend->AllocateHost(4096).value();
  const auto stream = backend->CreateStream().value();
  std::vector<std::byte> host(8);
  const auto from = stream->MakeProgram([&](Stream& on) { return on.Copy(device->data(), host.data(), 8); });
  EXPECT_EQ(from.status().code(), absl::StatusCode::kInvalidArgument) << from.status();
  const auto to = stream->MakeProgram([&](Stream& on) { return on.Copy(host.data(), device->data(), 8); });
  EXPECT_EQ(to.status().code(), absl::StatusCode::kInvalidArgument) << to.status();
  auto program = stream->MakeProgram([&](Stream& on) { return on.Copy(device->data(), pinned->data(), 8); });
  ASSERT_TRUE(program.ok()) << program.status();
  pinned->data()[0] = std::byte{9};
  ASSERT_TRUE((*program)->Enqueue().ok());
  ASSERT_TRUE(stream->Copy(host.data(), device->data(), 8).ok());
  ASSERT_TRUE(Finish(*stream).ok());
  EXPECT_EQ(host[0], std::byte{9});
}

}  // namespace
}  // namespace stoker::kernels::cuda
