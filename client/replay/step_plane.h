// A plane on which the mock engine's steps are no calls: the server or the direct one, of an arena in host memory
// (host_plane.h) or on a GPU (cuda/gpu_plane.h).
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/plane_batch.h"

namespace stoker::replay {

class StepPlane {
 public:
  // A step that was not committed is given up.
  virtual ~StepPlane() = default;

  // Runs the batch's step up to its hot rows: the entries are in the mailbox. Waits for them. The status is that of the
  // wait, or of the first batch row that was refused.
  virtual absl::Status RunGroups(absl::Span<const client::PlaneRow> rows) = 0;
  // Valid from RunGroups to the next one.
  virtual absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const = 0;
  virtual int32_t Misses(uint32_t group, size_t row) const = 0;
  // Stores the newest rows with a flag that is not 0, one for each batch row, and waits for that. Status as of
  // RunGroups.
  virtual absl::Status Commit(absl::Span<const int32_t> commits) = 0;
};

}  // namespace stoker::replay
