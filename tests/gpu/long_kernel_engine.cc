// An engine in a process of its own that runs a long kernel on its arena. Says when that has begun, and stays there to
// be killed.
//
//   long_kernel_engine ADDRESS POOL KERNEL_MS
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "client/client.h"
#include "client/device_plane.h"
#include "tests/gpu/long_kernel.h"
#include "tests/system/rank.h"

namespace stoker::system_test {
namespace {

absl::Status Run(const char* address, const char* pool, uint64_t kernel_ns) {
  const auto client = client::Client::Connect(address);
  if (!client.ok()) return client.status();
  v1::GetPoolRequest get;
  get.set_name(pool);
  const auto found = client->GetPool(get);
  if (!found.ok()) return found.status();
  client::SessionOptions options = WithoutReattach();
  options.arena_mapping = client::ArenaMapping::kDevice;
  auto session = client->Attach(AttachTo(found->pool().spec(), "long"), options);
  if (!session.ok()) return session.status();
  const auto arena = (*session)->arena();
  const cudaError_t error =
      gpu_test::LaunchLongKernel(reinterpret_cast<uint64_t*>(arena->bytes().data()), kernel_ns, nullptr);
  if (error != cudaSuccess) return absl::InternalError(cudaGetErrorString(error));
  // Not before it runs: a kernel that has not begun is nothing to be killed in.
  usleep(100'000);
  std::printf("runs\n");
  std::fflush(stdout);
  for (;;) pause();
}

}  // namespace
}  // namespace stoker::system_test

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: long_kernel_engine ADDRESS POOL KERNEL_MS\n");
    return 2;
  }
  stoker::client::DevicePlane::SetUpProcess();
  const absl::Status status =
      stoker::system_test::Run(argv[1], argv[2], 1'000'000 * std::strtoull(argv[3], nullptr, 10));
  std::fprintf(stderr, "long_kernel_engine: %s\n", status.ToString().c_str());
  return 1;
}
