// Resolve and the gather of its misses as one operation. Seed kernel: SGLang load_cache_to_device_buffer.
#pragma once

#include "absl/status/status.h"
#include "kernels/gather.h"
#include "kernels/resolve.h"

namespace stoker::kernels {

// Checks both, and that the gather reads the compact lists that the resolve writes: equal rows, top_k and pointers.
absl::Status Validate(const ResolveArgs& resolve, const GatherCompactArgs& gather);

}  // namespace stoker::kernels
