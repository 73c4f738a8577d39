// One daemon on two GPUs, and an engine that names memory of the one to a session on the other. Run by run_two_gpus.sh,
// on a machine that has two; not part of `ctest -L gpu`.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "client/tensor_memory.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/host_tensor.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kRows = 96;
constexpr size_t kBytes = size_t{8} << 20;

// Before the daemon is started, which reads it.
const bool device_is_set = setenv("STOKER_TEST_DEVICE", "cuda:all", /*overwrite=*/1) == 0;

class TwoGpusTest : public DaemonTest {
 protected:
  TwoGpusTest() : pool_(CreatePool(LinearPool("p", 1, 64, 64))) {}

  void SetUp() override {
    int count = 0;
    ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    ASSERT_GE(count, 2) << "this machine has not two GPUs";
    for (int device = 0; device < 2; ++device) {
      ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
      ASSERT_EQ(cudaMalloc(&memory_[device], kBytes), cudaSuccess);
      tensors_[device] = DenseTensor(pool_, kRows);
      const absl::Status status =
          client::DescribeDeviceMemory(memory_[device], tensors_[device].size_bytes(), &tensors_[device]);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_NE(uuid(0), uuid(1));
  }
  void TearDown() override {
    for (int device = 0; device < 2; ++device) {
      EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
      EXPECT_EQ(cudaFree(memory_[device]), cudaSuccess);
    }
    DaemonTest::TearDown();
  }
  const std::string& uuid(int device) const { return tensors_[device].cuda_ipc().device(); }
  v1::AttachRequest On(int device, const std::string& name) const {
    v1::AttachRequest request = AttachTo(pool_, name);
    request.set_device(uuid(device));
    return request;
  }
  static absl::Status Register(Rank& rank, const v1::RegisterTensorRequest& request) {
    v1::RegisterTensorResponse registered;
    absl::Status status = rank.session().RegisterTensor(request, &registered);
    if (!status.ok()) return status;
    v1::UnregisterTensorRequest unregister;
    unregister.set_tensor_id(registered.tensor_id());
    v1::UnregisterTensorResponse unregistered;
    return rank.session().UnregisterTensor(unregister, &unregistered);
  }

  const v1::PoolSpec pool_;
  void* memory_[2] = {};
  v1::RegisterTensorRequest tensors_[2];
};

TEST_F(TwoGpusTest, RefusesMemoryOfTheOtherGpu) {
  for (int device = 0; device < 2; ++device) {
    SCOPED_TRACE(device);
    Rank rank(client(), pool_, On(device, "rank"));
    ASSERT_EQ(rank.session().info().device(), uuid(device));
    const v1::RegisterTensorRequest& own = tensors_[device];
    const v1::RegisterTensorRequest& others = tensors_[1 - device];
    absl::Status status = Register(rank, others);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the session is on " + uuid(device)));
    // And where the engine says that it is the session's.
    v1::RegisterTensorRequest lie = others;
    lie.mutable_cuda_ipc()->set_device(uuid(device));
    status = Register(rank, lie);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda_ipc.handle"));
    // Its own is taken, before and behind that, and the other's where it belongs.
    EXPECT_EQ(Register(rank, own), absl::OkStatus());
    Rank there(client(), pool_, On(1 - device, "there"));
    EXPECT_EQ(Register(there, others), absl::OkStatus());
  }
}

}  // namespace
}  // namespace stoker::system_test
