// RowDevice of an arena on a GPU: gpu_rows.cc, or gpu_rows_none.cc in a build without CUDA.
//
// Thread safety: free functions; any thread.
#pragma once

#include <memory>

#include "client/replay/row_device.h"

namespace stoker::replay {

// Whether this build can work on a GPU's memory.
bool HasGpuRows();

// `arena` is on_device(). UNIMPLEMENTED: this build has no CUDA; RESOURCE_EXHAUSTED: no memory on the GPU or no pinned
// memory; INTERNAL: the arena is not as the spec says.
absl::StatusOr<std::unique_ptr<RowDevice>> MakeGpuRows(const RowDeviceSpec& spec,
                                                       std::shared_ptr<const client::Arena> arena);

}  // namespace stoker::replay
