// What only the CUDA backend has: memory that is used again and exported, staging in pieces, a device that is lost.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

using ::testing::HasSubstr;

class CudaBackendTest : public ::testing::Test {
 protected:
  static std::unique_ptr<Backend> Make() {
    auto backend = cuda::MakeCudaBackend(0);
    if (!backend.ok()) {
      std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
      std::abort();
    }
    return *std::move(backend);
  }

  std::vector<std::byte> Read(const std::byte* device, size_t bytes) {
    std::vector<std::byte> host(bytes, std::byte{0xee});
    EXPECT_TRUE(stream_->Copy(host.data(), device, bytes).ok());
    EXPECT_TRUE(Finish(*stream_).ok());
    return host;
  }
  void Write(std::byte* device, const std::vector<std::byte>& host) {
    EXPECT_TRUE(stream_->Copy(device, host.data(), host.size()).ok());
    EXPECT_TRUE(Finish(*stream_).ok());
  }

  const std::unique_ptr<Backend> backend_ = Make();
  const std::unique_ptr<Stream> stream_ = backend_->CreateStream().value();
};

TEST_F(CudaBackendTest, IsAListedDevice) {
  const auto devices = cuda::ListDevices();
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_EQ(devices->front().ordinal, 0);
  EXPECT_EQ(devices->front().uuid, backend_->device());
  EXPECT_THAT(devices->front().uuid, ::testing::StartsWith("GPU-"));
  EXPECT_EQ(devices->front().uuid.size(), 40u);
  EXPECT_FALSE(backend_->reaches_pageable_memory());
  EXPECT_STREQ(std::getenv("CUDA_MODULE_LOADING"), "EAGER");
}

TEST_F(CudaBackendTest, HostMemoryIsGivenOutAgainWithoutItsBytes) {
  const auto fill = [&](size_t bytes) {
    const auto memory = backend_->AllocateHost(bytes).value();
    std::memset(memory->data(), 0xff, bytes);
    return memory->data();
  };
  const std::byte* const address = fill(700);
  // Of one size for the driver, of two for who asks.
  for (const size_t bytes : {size_t{3000}, size_t{4096}, size_t{1}}) {
    const auto again = backend_->AllocateHost(bytes).value();
    EXPECT_EQ(again->data(), address);
    EXPECT_EQ(again->bytes(), bytes);
    EXPECT_EQ(std::count(again->data(), again->data() + bytes, std::byte{0}), static_cast<ptrdiff_t>(bytes));
    std::memset(again->data(), 0xff, bytes);
  }
  const auto held = backend_->AllocateHost(4096).value();
  EXPECT_NE(backend_->AllocateHost(4096).value()->data(), held->data());
}

TEST_F(CudaBackendTest, ArenasAreGivenOutAgainWithoutTheirBytes) {
  constexpr size_t kBytes = (size_t{5} << 20) + 4096;
  auto first = backend_->AllocateShared(kBytes).value();
  const std::byte* const address = first->data();
  const std::string handle(first->ipc_handle());
  EXPECT_EQ(handle.size(), 64u);
  Write(first->data(), std::vector<std::byte>(kBytes, std::byte{0xab}));
  first.reset();
  auto second = backend_->AllocateShared(kBytes).value();
  EXPECT_EQ(second->data(), address);
  EXPECT_EQ(second->ipc_handle(), handle);
  EXPECT_EQ(second->bytes(), kBytes);
  EXPECT_EQ(Read(second->data(), kBytes), std::vector<std::byte>(kBytes));
}

TEST_F(CudaBackendTest, PrivateMemoryIsNeverMemoryThatWasExported) {
  constexpr size_t kBytes = size_t{2} << 20;
  auto arena = backend_->AllocateShared(kBytes).value();
  const std::byte* const address = arena->data();
  arena.reset();
  auto state = backend_->AllocatePrivate(kBytes).value();
  EXPECT_NE(state->data(), address);
  EXPECT_EQ(state->ipc_handle(), "");
  EXPECT_EQ(backend_->AllocateShared(kBytes).value()->data(), address);
}

size_t FreeBytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

TEST_F(CudaBackendTest, ArenasWithADescriptorGoBackToTheDevice) {
  ASSERT_EQ(backend_->NoSharing(Sharing::kDescriptor), "");
  constexpr size_t kBytes = (size_t{512} << 20) + 4096;
  const size_t before = FreeBytes();
  for (int round = 0; round < 3; ++round) {
    const auto arena = backend_->AllocateShared(kBytes, Sharing::kDescriptor).value();
    EXPECT_EQ(arena->bytes(), kBytes);
    EXPECT_EQ(arena->ipc_handle(), "");
    const ExportedMemory exported = arena->exported();
    ASSERT_EQ(exported.kind, ExportedMemory::Kind::kCudaAllocation);
    ASSERT_EQ(exported.parts.size(), 1u);
    const size_t allocated = exported.parts[0].bytes;
    EXPECT_EQ(allocated, size_t{514} << 20);
    EXPECT_LE(FreeBytes(), before - allocated);
    // All of it, whatever was there before.
    EXPECT_EQ(Read(arena->data(), allocated), std::vector<std::byte>(allocated));
    Write(arena->data(), std::vector<std::byte>(allocated, std::byte{0xab}));
  }
  // The driver may have grown by what a first stream takes.
  EXPECT_GE(FreeBytes() + (size_t{16} << 20), before);
}

TEST_F(CudaBackendTest, KeptMemoryGivesWayToArenasWithADescriptor) {
  constexpr size_t kKept = size_t{4} << 30;
  for (const bool exported : {true, false}) {
    (exported ? backend_->AllocateShared(kKept) : backend_->AllocatePrivate(kKept)).value().reset();
    const auto arena = backend_->AllocateShared(FreeBytes() + kKept / 2, Sharing::kDescriptor);
    EXPECT_TRUE(arena.ok()) << arena.status();
  }
}

TEST_F(CudaBackendTest, WhatDoesNotFitIsRefusedAndTheDeviceStaysUsable) {
  for (const Sharing sharing : {Sharing::kIpcHandle, Sharing::kDescriptor}) {
    const absl::Status status = backend_->AllocateShared(size_t{1} << 46, sharing).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(backend_->AllocateShared(4096, sharing).ok());
  }
  EXPECT_TRUE(Finish(*stream_).ok());
}

TEST_F(CudaBackendTest, PageableBytesAreStagedInPieces) {
  for (const size_t bytes : {size_t{1}, size_t{1} << 20, (size_t{1} << 20) + 1, (size_t{5} << 20) + 3}) {
    std::vector<std::byte> host(bytes);
    for (size_t i = 0; i < bytes; ++i) host[i] = static_cast<std::byte>(i * 7 + i / 4099);
    auto device = backend_->AllocatePrivate(bytes).value();
    std::vector<std::byte> source = host;
    EXPECT_TRUE(stream_->Copy(device->data(), source.data(), bytes).ok());
    // The source was read within the call.
    source.assign(bytes, std::byte{0});
    EXPECT_EQ(Read(device->data(), bytes), host) << bytes;
  }
}

TEST_F(CudaBackendTest, HostMemoryIsReachedByOperations) {
  auto host = backend_->AllocateHost(4096).value();
  auto device = backend_->AllocatePrivate(4096).value();
  std::fill_n(host->data(), 4096, std::byte{0x5a});
  EXPECT_TRUE(stream_->Copy(device->data(), host->data(), 4096).ok());
  stream_->Timestamp(reinterpret_cast<uint64_t*>(host->data()));
  EXPECT_TRUE(Finish(*stream_).ok());
  uint64_t ns = 0;
  std::memcpy(&ns, host->data(), sizeof ns);
  EXPECT_NE(ns, 0x5a5a5a5a5a5a5a5aull);
  EXPECT_EQ(Read(device->data(), 4096), std::vector<std::byte>(4096, std::byte{0x5a}));
}

// In a process of its own, since nothing works on the device afterwards.
void LoseTheDevice(Backend& backend) {
  std::atomic<int> told{0};
  std::string reason;
  backend.OnLost([&](absl::Status status) {
    reason = status.ToString();
    ++told;
  });
  auto stream = backend.CreateStream().value();
  auto rows = backend.AllocatePrivate(4096).value();
  auto store = backend.AllocatePrivate(4096).value();
  const int32_t layer = 0;
  TransferArgs args;
  args.src.layout = args.dst.layout = RowLayout::Make({RowLayoutKind::kLinear, 16, 0, 0}, 4).value();
  args.src.layers = args.dst.layers = 1;
  args.src.layer_stride = args.dst.layer_stride = 64;
  args.src.base = reinterpret_cast<std::byte*>(uintptr_t{1} << 44);  // nobody's
  args.dst.base = store->data();
  args.src_row_limit = args.dst_row_limit = 4;
  args.src_layers = args.dst_layers = &layer;
  args.layer_count = 1;
  args.src_rows = args.dst_rows = reinterpret_cast<const int32_t*>(rows->data());
  args.count = 1;
  if (absl::Status status = stream->Transfer(args); !status.ok())
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  const absl::Status work = Finish(*stream), later = Finish(*stream);
  const absl::Status memory = backend.AllocateShared(size_t{64} << 20).status();
  const absl::Status arena = backend.AllocateShared(size_t{64} << 20, Sharing::kDescriptor).status();
  std::fprintf(stderr, "work %s; later %s; memory %s; arena %s; told %d: %s\n", work.ToString().c_str(),
               later.ToString().c_str(), memory.ToString().c_str(), arena.ToString().c_str(), told.load(),
               reason.c_str());
  const bool right = absl::IsUnavailable(work) && absl::IsUnavailable(later) && absl::IsUnavailable(memory) &&
                     absl::IsUnavailable(arena) && told.load() == 1 &&
                     reason.find(std::string(backend.device())) != std::string::npos;
  std::_Exit(right ? 7 : 8);
}

TEST(CudaBackendDeathTest, ALostDeviceIsToldOnceAndFailsAllWork) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto backend = cuda::MakeCudaBackend(0);
        if (!backend.ok()) std::_Exit(9);
        LoseTheDevice(**backend);
      },
      ::testing::ExitedWithCode(7), "UNAVAILABLE");
}

}  // namespace
}  // namespace stoker::kernels
