// A kernel that writes random values into arrays which other kernels use meanwhile, as a client may.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace stoker::kernels::cuda {

// An array of integers of 2, 4 or 8 bytes. Half of what is written there is in [0, limit), where it does most harm.
struct ScribbleTarget {
  void* values;
  int32_t count;
  int32_t element_bytes;
  uint32_t limit;
};

inline constexpr int kMaxScribbleTargets = 16;

// One block for each of at most kMaxScribbleTargets targets; each of its threads writes `rounds` values, or fewer where
// *stop, in pinned memory, becomes 1.
cudaError_t LaunchScribble(const std::vector<ScribbleTarget>& targets, uint32_t seed, int32_t rounds,
                           const uint32_t* stop, cudaStream_t stream);

}  // namespace stoker::kernels::cuda
