// Core's Engine on kernel backends, one for each device: pools are one buffer of all layers, allocated once for all
// devices; sessions are a shared arena and private state on one of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/core/engine.h"

namespace stoker::engine {

// What one launch may take that copies rows, for each kind of work. Bulk work is what an engine need not wait for in
// its decode loop: store, load, read, and copies of blocks that are written. A step gathers, commits, and takes newest
// rows.
struct CopyPolicy {
  kernels::CopyLimits bulk;
  kernels::CopyLimits step;
};

// `backends`, at least one, all CPU or all GPUs, must outlive the engine, the engine everything that it creates.
// `message_bytes`: the most bytes that one call brings or takes. Where the backends do not reach pageable memory, as
// much is pinned now. RESOURCE_EXHAUSTED: that cannot be had.
absl::StatusOr<std::unique_ptr<core::Engine>> MakeEngine(std::vector<kernels::Backend*> backends, int64_t message_bytes,
                                                         const CopyPolicy& copies = {});

}  // namespace stoker::engine
