// Tensors of an engine on a GPU: this process is the engine, the daemon is another one.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tensor_memory.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/host_tensor.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kRows = 96;
constexpr uint32_t kSequenceRows = 70;

// Before the daemon is started, which reads it.
const bool device_is_set = setenv("STOKER_TEST_DEVICE", "cuda", /*overwrite=*/0) == 0;

// A third process, neither daemon nor engine, which allocates memory when it is asked to, and ends when it is let go.
// Made before this process uses CUDA or has threads.
class OtherProcess {
 public:
  OtherProcess() {
    int commands[2], replies[2];
    // Not for the daemon, which the test starts: the pipe would not end with this process's end of it.
    if (pipe2(commands, O_CLOEXEC) != 0 || pipe2(replies, O_CLOEXEC) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      close(commands[1]);
      close(replies[0]);
      Serve(commands[0], replies[1]);
    }
    close(commands[0]);
    close(replies[1]);
    commands_ = commands[1];
    replies_ = replies[0];
  }

  // The handle of its memory; empty when there is none.
  std::string Handle() {
    std::string handle(sizeof(cudaIpcMemHandle_t), '\0');
    const bool there = write(commands_, "a", 1) == 1 &&
                       read(replies_, handle.data(), handle.size()) == static_cast<ssize_t>(handle.size());
    return there ? handle : "";
  }
  // Its exit status.
  int End() {
    close(commands_);
    int status = -1;
    return waitpid(pid_, &status, 0) == pid_ && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  [[noreturn]] static void Serve(int commands, int replies) {
    char command = 0;
    cudaIpcMemHandle_t handle;
    void* memory = nullptr;
    // This one's end, whatever it is, ends it as well.
    if (read(commands, &command, 1) != 1) _exit(0);
    if (cudaMalloc(&memory, size_t{8} << 20) != cudaSuccess || cudaIpcGetMemHandle(&handle, memory) != cudaSuccess) {
      _exit(1);
    }
    if (write(replies, &handle, sizeof handle) != static_cast<ssize_t>(sizeof handle)) _exit(1);
    static_cast<void>(!read(commands, &command, 1));
    _exit(0);
  }

  pid_t pid_ = -1;
  int commands_ = -1;
  int replies_ = -1;
};
OtherProcess other_process;

// Memory of cudaMalloc.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xa5, bytes), cudaSuccess);
  }
  ~DeviceBytes() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }
  void Write(size_t at, const std::string& bytes) const {
    EXPECT_EQ(cudaMemcpy(data() + at, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  std::string Read(size_t at, size_t count) const {
    std::string bytes(count, '\0');
    EXPECT_EQ(cudaMemcpy(bytes.data(), data() + at, count, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

 private:
  void* data_ = nullptr;
  const size_t bytes_;
};

class TensorsGpuTest : public DaemonTest {
 protected:
  static absl::Status Register(Rank& rank, const v1::RegisterTensorRequest& request, uint64_t* id) {
    v1::RegisterTensorResponse response;
    const absl::Status status = rank.session().RegisterTensor(request, &response);
    *id = response.tensor_id();
    return status;
  }
  static absl::Status Unregister(Rank& rank, uint64_t id) {
    v1::UnregisterTensorRequest request;
    request.set_tensor_id(id);
    v1::UnregisterTensorResponse response;
    return rank.session().UnregisterTensor(request, &response);
  }
  double Mapped(const std::string& session) {
    return Scrape(daemon().metrics_port())[absl::StrCat("stoker_client_mapped_bytes{session=\"", session, "\"}")];
  }
};

// A tensor of each layer, all in one allocation, behind one another with a gap.
TEST_F(TensorsGpuTest, MovesRowsBothWays) {
  for (const v1::PoolSpec& spec : {LinearPool("linear", 3, 656, 64), LinearPool("narrow", 2, 20, 64),
                                   SplitPool("split", 3, 48, 32, 64), PagedPool("paged", 2, 16)}) {
    SCOPED_TRACE(spec.name());
    const v1::PoolSpec pool = CreatePool(spec);
    Rank rank(client(), pool, AttachTo(pool, pool.name()));
    const double before = Mapped(pool.name());
    const uint32_t row_bytes = RowBytes(pool);
    const size_t layer_bytes = size_t{kRows} * row_bytes + 64;
    const DeviceBytes memory(pool.layers() * layer_bytes + 256);
    v1::StoreRequest store;
    v1::StoreItem* item = store.add_items();
    std::vector<uint64_t> ids(pool.layers());
    for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
      // A row's parts lie side by side.
      v1::RegisterTensorRequest request;
      request.add_layers(layer);
      request.set_rows(kRows);
      uint64_t offset = 0;
      for (uint32_t p = 0; p < PartCountOf(pool); ++p) {
        v1::TensorPart* part = request.add_parts();
        part->set_part(p);
        part->set_offset_bytes(offset);
        part->set_row_stride_bytes(row_bytes);
        offset += PartBytesOf(pool, p);
      }
      absl::Status status =
          client::DescribeDeviceMemory(memory.data() + layer * layer_bytes, size_t{kRows} * row_bytes, &request);
      ASSERT_TRUE(status.ok()) << status;
      status = Register(rank, request, &ids[layer]);
      ASSERT_TRUE(status.ok()) << status;
      item->mutable_tensor()->add_tensor_ids(ids[layer]);
    }
    EXPECT_EQ(Mapped(pool.name()), before + static_cast<double>(size_t{pool.layers()} * kRows * row_bytes));
    Sequence sequence{0, 0, MakeTokens(1, kSequenceRows)};
    sequence.id = rank.Admit(rank.Item(sequence.tokens, kSequenceRows)).sequence_id();
    std::vector<uint32_t> rows(kRows);
    std::iota(rows.begin(), rows.end(), 0u);
    std::shuffle(rows.begin(), rows.end(), std::mt19937(3));
    rows.resize(kSequenceRows);
    for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
      for (uint32_t i = 0; i < kSequenceRows; ++i) {
        memory.Write(layer * layer_bytes + size_t{rows[i]} * row_bytes, RowOf(pool, layer, sequence.tokens[i]));
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    item->mutable_range()->set_sequence_id(sequence.id);
    item->mutable_range()->set_row_count(kSequenceRows);
    item->set_source(v1::DATA_SOURCE_TENSOR);
    item->mutable_tensor()->mutable_rows()->Add(rows.begin(), rows.end());
    v1::StoreResponse stored;
    absl::Status status = rank.session().Store(store, &stored);
    ASSERT_TRUE(status.ok()) << status;
    status = client::FirstError(stored.statuses());
    ASSERT_TRUE(status.ok()) << status;
    rank.CheckStored(sequence, kSequenceRows);

    ASSERT_EQ(cudaMemset(memory.data(), 0xa5, memory.bytes()), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    v1::LoadRequest load;
    *load.add_items()->mutable_range() = item->range();
    load.mutable_items(0)->set_target(v1::LOAD_TARGET_TENSOR);
    *load.mutable_items(0)->mutable_tensor() = item->tensor();
    v1::LoadResponse loaded;
    status = rank.session().Load(load, &loaded);
    ASSERT_TRUE(status.ok()) << status;
    status = client::FirstError(loaded.statuses());
    ASSERT_TRUE(status.ok()) << status;
    std::string expected(memory.bytes(), '\xa5');
    for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
      for (uint32_t i = 0; i < kSequenceRows; ++i) {
        expected.replace(layer * layer_bytes + size_t{rows[i]} * row_bytes, row_bytes,
                         RowOf(pool, layer, sequence.tokens[i]));
      }
    }
    EXPECT_TRUE(memory.Read(0, memory.bytes()) == expected);
    // All but the last: that one ends with the session.
    for (size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_TRUE(Unregister(rank, ids[i]).ok());
    EXPECT_EQ(Mapped(pool.name()), before + static_cast<double>(size_t{kRows} * row_bytes));
  }
}

TEST_F(TensorsGpuTest, RefusesHandlesThatAreNone) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 1, 64, 64));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  const DeviceBytes memory(size_t{8} << 20);
  const v1::RegisterTensorRequest geometry = DenseTensor(pool, kRows);
  v1::RegisterTensorRequest good = geometry;
  ASSERT_TRUE(client::DescribeDeviceMemory(memory.data(), geometry.size_bytes(), &good).ok());
  uint64_t id = 0;
  const auto refused = [&](const v1::RegisterTensorRequest& request, const std::string& part) {
    const absl::Status status = Register(rank, request, &id);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  };
  v1::RegisterTensorRequest bad = good;
  bad.mutable_cuda_ipc()->set_handle(std::string(64, '\0'));
  refused(bad, "cuda_ipc.handle: cannot be opened");
  bad.mutable_cuda_ipc()->set_handle(std::string(64, '\xff'));
  refused(bad, "cuda_ipc.handle: cannot be opened");
  std::mt19937 random(5);
  for (int i = 0; i < 50; ++i) {
    std::string handle(64, '\0');
    for (char& byte : handle) byte = static_cast<char>(random());
    bad.mutable_cuda_ipc()->set_handle(handle);
    refused(bad, "expandable_segments:False");
  }
  // The daemon's own memory.
  bad.mutable_cuda_ipc()->set_handle(rank.session().info().arena().cuda_ipc_handle());
  refused(bad, "an arena");
  bad = good;
  bad.mutable_cuda_ipc()->set_device("GPU-00000000-0000-0000-0000-000000000000");
  refused(bad, "the session is on");
  bad = good;
  bad.set_size_bytes(memory.bytes() + (size_t{4} << 20));
  refused(bad, "the memory has");
  bad = good;
  bad.set_offset_bytes(memory.bytes() + (size_t{4} << 20));
  refused(bad, "the memory has");
  // The daemon and its device are as before.
  const absl::Status status = Register(rank, good, &id);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Unregister(rank, id).ok());
}

// A handle that was good, of memory that has been freed, and of a process that has ended.
TEST_F(TensorsGpuTest, RefusesHandlesOfMemoryThatIsGone) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 1, 64, 64));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  const DeviceBytes lasting(size_t{8} << 20);
  v1::RegisterTensorRequest good = DenseTensor(pool, kRows);
  ASSERT_TRUE(client::DescribeDeviceMemory(lasting.data(), good.size_bytes(), &good).ok());
  const double before = Mapped("rank");
  uint64_t id = 0;
  const auto refused = [&](const v1::RegisterTensorRequest& request) {
    const absl::Status status = Register(rank, request, &id);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda_ipc.handle: cannot be opened"));
    EXPECT_EQ(Mapped("rank"), before);
    // The daemon and its device are as before.
    ASSERT_EQ(Register(rank, good, &id), absl::OkStatus());
    EXPECT_EQ(Unregister(rank, id), absl::OkStatus());
  };
  v1::RegisterTensorRequest freed = DenseTensor(pool, kRows);
  {
    const DeviceBytes memory(size_t{64} << 20);
    ASSERT_TRUE(client::DescribeDeviceMemory(memory.data(), freed.size_bytes(), &freed).ok());
    ASSERT_EQ(Register(rank, freed, &id), absl::OkStatus());
    EXPECT_EQ(Unregister(rank, id), absl::OkStatus());
  }
  refused(freed);

  // Of somebody else's memory, as long as that lives: whoever has a handle may use it.
  v1::RegisterTensorRequest others = good;
  others.set_offset_bytes(0);
  others.mutable_cuda_ipc()->set_handle(other_process.Handle());
  ASSERT_EQ(others.cuda_ipc().handle().size(), sizeof(cudaIpcMemHandle_t));
  ASSERT_EQ(Register(rank, others, &id), absl::OkStatus());
  EXPECT_EQ(Unregister(rank, id), absl::OkStatus());
  EXPECT_EQ(other_process.End(), 0);
  refused(others);
}

// Opened once in the daemon, whoever registers it.
TEST_F(TensorsGpuTest, SharesAnAllocationAmongTensorsAndSessions) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 1, 64, 64));
  const DeviceBytes memory(size_t{8} << 20);
  v1::RegisterTensorRequest request = DenseTensor(pool, kRows);
  ASSERT_TRUE(client::DescribeDeviceMemory(memory.data() + 4096, request.size_bytes(), &request).ok());
  auto first = std::make_unique<Rank>(client(), pool, AttachTo(pool, "first"));
  Rank second(client(), pool, AttachTo(pool, "second"));
  std::vector<uint64_t> ids(3);
  for (uint64_t& id : ids) ASSERT_TRUE(Register(*first, request, &id).ok());
  uint64_t other = 0;
  ASSERT_TRUE(Register(second, request, &other).ok());
  for (const uint64_t id : ids) EXPECT_TRUE(Unregister(*first, id).ok());
  first.reset();
  // Still there for the other one.
  Sequence sequence{0, 0, MakeTokens(1, 20)};
  sequence.id = second.Admit(second.Item(sequence.tokens, 20)).sequence_id();
  for (uint32_t i = 0; i < 20; ++i) memory.Write(4096 + size_t{i} * 64, RowOf(pool, 0, sequence.tokens[i]));
  v1::StoreRequest store;
  v1::StoreItem* item = store.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_row_count(20);
  item->set_source(v1::DATA_SOURCE_TENSOR);
  item->mutable_tensor()->add_tensor_ids(other);
  v1::StoreResponse stored;
  ASSERT_TRUE(second.session().Store(store, &stored).ok());
  EXPECT_TRUE(client::FirstError(stored.statuses()).ok());
  second.CheckStored(sequence, 20);
}

TEST(DescribeDeviceMemoryTest, SaysWhyMemoryHasNoHandle) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  v1::RegisterTensorRequest request;
  std::vector<char> pageable(4096);
  EXPECT_EQ(client::DescribeDeviceMemory(pageable.data(), 4096, &request).code(), absl::StatusCode::kInvalidArgument);
  const DeviceBytes plain(size_t{8} << 20);
  EXPECT_TRUE(client::DescribeDeviceMemory(plain.data() + 1024, 4096, &request).ok());
  EXPECT_EQ(request.offset_bytes(), 1024u);
  EXPECT_EQ(request.size_bytes(), 4096u);
  EXPECT_EQ(request.cuda_ipc().handle().size(), 64u);
  EXPECT_EQ(client::DescribeDeviceMemory(plain.data() + 1024, size_t{16} << 20, &request).code(),
            absl::StatusCode::kInvalidArgument);

  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pooled, size_t{4} << 20, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  absl::Status status = client::DescribeDeviceMemory(pooled, 4096, &request);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaMallocAsync"));
  EXPECT_EQ(cudaFreeAsync(pooled, nullptr), cudaSuccess);

  // The driver's functions without linking it.
  const auto find = [](const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result), cudaSuccess);
    return function;
  };
  const auto reserve = reinterpret_cast<decltype(&cuMemAddressReserve)>(find("cuMemAddressReserve"));
  const auto create = reinterpret_cast<decltype(&cuMemCreate)>(find("cuMemCreate"));
  const auto map = reinterpret_cast<decltype(&cuMemMap)>(find("cuMemMap"));
  const auto set_access = reinterpret_cast<decltype(&cuMemSetAccess)>(find("cuMemSetAccess"));
  const auto unmap = reinterpret_cast<decltype(&cuMemUnmap)>(find("cuMemUnmap"));
  const auto release = reinterpret_cast<decltype(&cuMemRelease)>(find("cuMemRelease"));
  const auto free_address = reinterpret_cast<decltype(&cuMemAddressFree)>(find("cuMemAddressFree"));
  constexpr size_t kBytes = size_t{2} << 20;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(reserve(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(create(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
  ASSERT_EQ(map(address, kBytes, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(set_access(address, kBytes, &access, 1), CUDA_SUCCESS);
  status = client::DescribeDeviceMemory(reinterpret_cast<void*>(address), 4096, &request);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuMemCreate"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("expandable_segments:False"));
  EXPECT_EQ(unmap(address, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(release(handle), CUDA_SUCCESS);
  EXPECT_EQ(free_address(address, kBytes), CUDA_SUCCESS);
}

}  // namespace
}  // namespace stoker::system_test
