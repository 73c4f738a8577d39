// Memory of other processes on a driver that the test plays: each handle is opened once, and nothing is left open when
// any call fails.
#include "kernels/cuda/ipc_memory.h"

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::kernels::cuda {
namespace {

using testing::HasSubstr;

constexpr size_t kBytes = 4096;
constexpr int kDevice = 1;

// Opens any handle that begins with "good"; an open one cannot be opened again, as with older drivers.
class FakeDriver {
 public:
  IpcDriver table() {
    IpcDriver driver;
    driver.set_device = [this](int device) {
      EXPECT_EQ(device, kDevice);
      return Call("set_device");
    };
    driver.open = [this](void** memory, cudaIpcMemHandle_t handle) {
      const std::string name(handle.reserved, sizeof handle.reserved);
      if (const cudaError_t error = Call("open"); error != cudaSuccess) return error;
      if (name.substr(0, 4) != "good") return cudaErrorInvalidValue;
      EXPECT_EQ(open_.count(name), 0u) << "a handle is opened twice";
      *memory = open_[name] = new char[kBytes]();
      ++opened;
      return cudaSuccess;
    };
    driver.close = [this](void* memory) {
      for (auto it = open_.begin(); it != open_.end(); ++it) {
        if (it->second != memory) continue;
        delete[] it->second;
        open_.erase(it);
        return cudaSuccess;
      }
      ADD_FAILURE() << "closes what is not open";
      return cudaErrorInvalidValue;
    };
    driver.bytes_behind = [this](size_t* bytes, void*) {
      *bytes = kBytes;
      return Call("bytes_behind");
    };
    driver.device_of = [this](int* device, void*) {
      *device = memory_device;
      return Call("device_of");
    };
    return driver;
  }

  size_t open() const { return open_.size(); }
  void Fail(const std::string& call, cudaError_t error) { failing_[call] = error; }
  void Succeed() { failing_.clear(); }

  int memory_device = kDevice;
  int opened = 0;

 private:
  cudaError_t Call(const std::string& name) const {
    const auto it = failing_.find(name);
    return it == failing_.end() ? cudaSuccess : it->second;
  }

  std::map<std::string, char*> open_;
  std::map<std::string, cudaError_t> failing_;
};

std::string Handle(const std::string& name) {
  std::string handle = name;
  handle.resize(sizeof(cudaIpcMemHandle_t::reserved), '.');
  return handle;
}

class IpcMemoryTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Buffer>> Open(const std::string& name, uint64_t offset = 0, uint64_t size = kBytes) {
    const std::string handle = Handle(name);
    return memory_.Open({.ipc_handle = handle, .descriptor = -1, .offset_bytes = offset, .size_bytes = size});
  }

  FakeDriver driver_;
  IpcMemory memory_{kDevice, "GPU-1", driver_.table()};
};

TEST_F(IpcMemoryTest, OpensEachHandleOnceAndClosesItBehindTheLastUse) {
  auto first = Open("good a", 0, 1024);
  auto second = Open("good a", 1024, 1024);
  auto other = Open("good b");
  ASSERT_TRUE(first.ok() && second.ok() && other.ok());
  EXPECT_EQ(driver_.opened, 2);
  EXPECT_EQ((*second)->data() - (*first)->data(), 1024);
  EXPECT_EQ((*second)->bytes(), 1024u);
  first->reset();
  EXPECT_EQ(driver_.open(), 2u);
  second->reset();
  EXPECT_EQ(driver_.open(), 1u);
  ASSERT_TRUE(Open("good a").ok());  // anew
  EXPECT_EQ(driver_.opened, 3);
  EXPECT_EQ(driver_.open(), 1u);
  other->reset();
  EXPECT_EQ(driver_.open(), 0u);
  EXPECT_EQ(memory_.open_handles(), 0u);
}

TEST_F(IpcMemoryTest, ChecksAgainstTheRealSize) {
  constexpr uint64_t kMax = UINT64_MAX;
  for (const bool used : {false, true}) {
    absl::StatusOr<std::unique_ptr<Buffer>> user = absl::NotFoundError("");
    if (used) user = Open("good a", 0, 4);
    for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{{0, kBytes + 1},
                                                                                 {1, kBytes},
                                                                                 {kBytes, 1},
                                                                                 {kBytes + 1, 0},
                                                                                 {0, 0},
                                                                                 {kMax, kMax},
                                                                                 {kMax - 3, 8},
                                                                                 {4, kMax}}) {
      const auto refused = Open("good a", offset, size);
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << offset << " " << size;
      EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the memory has 4096 bytes"));
      EXPECT_EQ(driver_.open(), used ? 1u : 0u);
    }
    EXPECT_TRUE(Open("good a", kBytes - 1, 1).ok());
  }
  EXPECT_EQ(driver_.open(), 0u);
}

TEST_F(IpcMemoryTest, SaysWhyAHandleCannotBeOpened) {
  const auto garbage = Open("garbage");
  EXPECT_EQ(garbage.status().code(), absl::StatusCode::kInvalidArgument);
  for (const char* part : {"cudaErrorInvalidValue", "cudaMalloc", "expandable_segments:False", "an arena"}) {
    EXPECT_THAT(std::string(garbage.status().message()), HasSubstr(part));
  }
  for (const std::string& handle : {std::string(1, 'a'), std::string(63, 'a'), std::string(65, 'a')}) {
    const auto wrong = memory_.Open({.ipc_handle = handle, .descriptor = -1, .offset_bytes = 0, .size_bytes = 4});
    EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(wrong.status().message()),
                HasSubstr(absl::StrCat(handle.size(), " bytes given, limit 64")));
  }
  const auto file = memory_.Open({.ipc_handle = "", .descriptor = 3, .offset_bytes = 0, .size_bytes = 4});
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("GPU-1"));
}

TEST_F(IpcMemoryTest, RefusesMemoryOfAnotherGpu) {
  driver_.memory_device = 0;
  const auto other = Open("good a");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("ordinal 0 here, the session is on GPU-1"));
  EXPECT_EQ(driver_.open(), 0u);
}

TEST_F(IpcMemoryTest, LeavesNothingOpenWhenACallFails) {
  struct Case {
    const char* call;
    cudaError_t error;
    absl::StatusCode code;
  };
  for (const Case& c : {Case{"set_device", cudaErrorUnknown, absl::StatusCode::kUnavailable},
                        Case{"open", cudaErrorIllegalAddress, absl::StatusCode::kUnavailable},
                        Case{"open", cudaErrorMemoryAllocation, absl::StatusCode::kResourceExhausted},
                        Case{"open", cudaErrorDeviceUninitialized, absl::StatusCode::kInvalidArgument},
                        Case{"device_of", cudaErrorInvalidValue, absl::StatusCode::kInternal},
                        Case{"bytes_behind", cudaErrorInvalidValue, absl::StatusCode::kInternal}}) {
    driver_.Fail(c.call, c.error);
    EXPECT_EQ(Open("good a").status().code(), c.code) << c.call;
    EXPECT_EQ(driver_.open(), 0u) << c.call;
    driver_.Succeed();
  }
  IpcDriver blind = driver_.table();
  blind.bytes_behind = nullptr;
  IpcMemory memory(kDevice, "GPU-1", blind);
  const std::string handle = Handle("good a");
  EXPECT_EQ(memory.Open({.ipc_handle = handle, .descriptor = -1, .offset_bytes = 0, .size_bytes = 4}).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(driver_.open(), 0u);
}

TEST_F(IpcMemoryTest, CountsOnAllThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::unique_ptr<Buffer>> held;
      for (int i = 0; i < 2000; ++i) {
        auto opened = Open(absl::StrCat("good ", random() % 3), random() % 1024, 4);
        ASSERT_TRUE(opened.ok());
        EXPECT_EQ((*opened)->data()[0], std::byte{0});  // it is there
        if (held.size() < 4) {
          held.push_back(*std::move(opened));
        } else {
          held[random() % 4] = *std::move(opened);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver_.open(), 0u);
}

}  // namespace
}  // namespace stoker::kernels::cuda
