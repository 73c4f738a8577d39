// The GPUs as this build sees them: gpus_cuda.cc, or gpus_none.cc in a build without CUDA.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/device_choice.h"

namespace stoker::server {

// At least one, or NOT_FOUND or UNIMPLEMENTED with the reason why none can be used. Before anything else that uses
// CUDA.
absl::StatusOr<std::vector<Gpu>> ListGpus();

// As kernels::cuda::MakeCudaBackend.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeGpuBackend(const Gpu& gpu);

}  // namespace stoker::server
