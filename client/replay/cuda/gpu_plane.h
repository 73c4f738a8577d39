// The steps of the mock engine on the server plane of a GPU: DevicePlane with a stream, and two graphs of a step, made
// once for the largest batch: one of the batch and all index groups, one of the commits. Sequences join and leave
// between steps without another capture. gpu_plane.cc, or gpu_plane_none.cc in a build without CUDA.
//
// Between the two the host compares rows (row_device.h), which a decoder would do on the GPU: steps are not enqueued
// ahead.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/plane_batch.h"
#include "client/session.h"

namespace stoker::replay {

class GpuPlane {
 public:
  virtual ~GpuPlane() = default;

  // Runs the batch's step up to its hot rows: the entries are in the mailbox. Waits for them. The status is that of the
  // wait, or of the first batch row that the daemon has refused.
  virtual absl::Status RunGroups(absl::Span<const client::PlaneRow> rows) = 0;
  // Valid from RunGroups to the next one.
  virtual absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const = 0;
  virtual int32_t Misses(uint32_t group, size_t row) const = 0;
  // Stores the newest rows with a flag that is not 0, one for each batch row, and waits for that.
  virtual absl::Status Commit(absl::Span<const int32_t> commits) = 0;
};

// Arms the session, whose arena is on a GPU, and which must outlive what is returned. UNIMPLEMENTED: this build has no
// CUDA; errors as DevicePlane::Arm.
absl::StatusOr<std::unique_ptr<GpuPlane>> MakeGpuPlane(client::Session& session, uint32_t top_k);

}  // namespace stoker::replay
