// stoker-pool-bench: seconds to make, map and free pool memory, one JSON object a line.
//
//   stoker-pool-bench SECONDS GIB [GIB ...]
//
// Begins nothing more once SECONDS have passed, and says what was left out.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/available_memory.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/pool_memory.h"

namespace stoker::kernels::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Contender {
  const char* memory;
  bool numa;
  PoolPlan plan;  // chunk_bytes 0: all in one
};

constexpr size_t kGiB = size_t{1} << 30;

void Measure(const std::shared_ptr<const PoolDriver>& driver, const Contender& contender, size_t bytes) {
  PoolPlan plan = contender.plan;
  if (plan.chunk_bytes == 0) plan.chunk_bytes = bytes;
  double fault_seconds = 0, pin_seconds = 0;
  Clock::time_point begin = Clock::now();
  const auto progress = [&](PoolPhase phase, size_t done_bytes) {
    if (phase == PoolPhase::kPin && done_bytes == 0) {
      fault_seconds = Since(begin);
      begin = Clock::now();
    }
    if (phase == PoolPhase::kPin) pin_seconds = Since(begin);
    return true;
  };
  cpu::MemoryBank bank;
  absl::StatusOr<std::unique_ptr<Buffer>> pool = absl::InternalError("");
  if (contender.numa) {
    pool = AllocateNumaPool(driver, {0}, bytes, plan, progress);
  } else {
    pool = bank.Allocate("stoker-pool-bench", bytes, cpu::MemoryBank::Sharing::kShared);
    if (pool.ok()) pool = RegisterPool(driver, {0}, *std::move(pool), plan, progress);
  }
  std::string result;
  if (pool.ok()) {
    const bool zero = (*pool)->data()[0] == std::byte{0} && (*pool)->data()[bytes - 1] == std::byte{0};
    begin = Clock::now();
    pool->reset();
    char text[256];
    std::snprintf(text, sizeof text,
                  "\"fault_s\": %.3f, \"pin_s\": %.3f, \"gb_per_s\": %.2f, \"free_s\": %.3f, \"zero\": %s",
                  fault_seconds, pin_seconds, static_cast<double>(bytes) / 1e9 / (fault_seconds + pin_seconds),
                  Since(begin), zero ? "true" : "false");
    result = text;
  } else {
    result = "\"error\": \"" + std::string(pool.status().message()) + "\"";
  }
  std::printf(
      "{\"name\": \"pool\", \"memory\": \"%s\", \"gib\": %zu, \"chunk_gib\": %.3f, \"fault_threads\": %d, "
      "\"pin_threads\": %d, %s}\n",
      contender.memory, bytes / kGiB, static_cast<double>(plan.chunk_bytes) / kGiB, plan.fault_threads,
      plan.pin_threads, result.c_str());
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: stoker-pool-bench SECONDS GIB [GIB ...]\n");
    return 2;
  }
  const double seconds = std::atof(argv[1]);
  const Clock::time_point begin = Clock::now();
  const auto backend = MakeCudaBackend(0);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  cudaDeviceProp properties{};
  int driver_version = 0;
  cudaGetDeviceProperties(&properties, 0);
  cudaDriverGetVersion(&driver_version);
  const AvailableMemory available = ReadAvailableMemory();
  std::printf(
      "{\"name\": \"run\", \"gpu\": \"%s\", \"cuda_driver\": %d, \"available_gib\": %.1f, \"limit\": \"%s\", "
      "\"free_huge_page_gib\": %.1f}\n",
      properties.name, driver_version, static_cast<double>(available.bytes) / kGiB, available.limit.c_str(),
      static_cast<double>(ReadFreeHugePageBytes()) / kGiB);
  const std::shared_ptr<const PoolDriver> driver = LoadPoolDriver();
  // What the backend uses first: time may run out.
  const std::vector<Contender> contenders = {
      {"registered", false, {0, 8, 1}},    {"numa", true, {kGiB, 1, 1}},         {"numa", true, {0, 1, 1}},
      {"numa", true, {kGiB, 8, 1}},        {"numa", true, {kGiB, 16, 1}},        {"numa", true, {kGiB, 16, 8}},
      {"registered", false, {kGiB, 8, 1}}, {"registered", false, {kGiB, 16, 1}}, {"registered", false, {kGiB, 16, 8}},
      {"registered", false, {0, 16, 1}},   {"registered", false, {kGiB, 1, 1}}};
  int left_out = 0;
  for (int i = 2; i < argc; ++i) {
    for (const Contender& contender : contenders) {
      if (Since(begin) > seconds) {
        ++left_out;
        continue;
      }
      Measure(driver, contender, std::strtoull(argv[i], nullptr, 10) * kGiB);
    }
  }
  std::printf("{\"name\": \"end\", \"seconds\": %.1f, \"left_out\": %d}\n", Since(begin), left_out);
  return 0;
}

}  // namespace
}  // namespace stoker::kernels::cuda

int main(int argc, char** argv) { return stoker::kernels::cuda::Main(argc, argv); }
