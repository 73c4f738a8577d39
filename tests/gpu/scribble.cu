#include "tests/gpu/scribble.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kThreads = 64;
// Writes between two looks at *stop, which is behind the link.
constexpr int32_t kLookEvery = 256;

struct Targets {
  ScribbleTarget target[kMaxScribbleTargets];
};

__global__ void ScribbleKernel(const __grid_constant__ Targets targets, uint32_t seed, int32_t rounds,
                               const uint32_t* stop) {
  const ScribbleTarget target = targets.target[blockIdx.x];
  uint64_t state = (uint64_t{seed} << 32 | blockIdx.x * kThreads + threadIdx.x) * 0x9e3779b97f4a7c15u + 1;
  for (int32_t i = 0; i < rounds; ++i) {
    if (i % kLookEvery == 0 && *static_cast<const volatile uint32_t*>(stop) == 1) return;
    // A linear congruential generator, of which the upper bits are used.
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto at = static_cast<uint32_t>(state >> 33) % static_cast<uint32_t>(target.count);
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto random = static_cast<uint32_t>(state >> 32);
    const uint64_t value = (random & 1) != 0 ? random / 2 % target.limit : random * 0x100000001u;
    if (target.element_bytes == 2) {
      static_cast<volatile uint16_t*>(target.values)[at] = static_cast<uint16_t>(value);
    } else if (target.element_bytes == 4) {
      static_cast<volatile uint32_t*>(target.values)[at] = static_cast<uint32_t>(value);
    } else {
      static_cast<volatile uint64_t*>(target.values)[at] = value;
    }
  }
}

}  // namespace

cudaError_t LaunchScribble(const std::vector<ScribbleTarget>& targets, uint32_t seed, int32_t rounds,
                           const uint32_t* stop, cudaStream_t stream) {
  if (targets.empty() || targets.size() > kMaxScribbleTargets) return cudaErrorInvalidValue;
  Targets all = {};
  for (size_t i = 0; i < targets.size(); ++i) all.target[i] = targets[i];
  ScribbleKernel<<<static_cast<unsigned>(targets.size()), kThreads, 0, stream>>>(all, seed, rounds, stop);
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
