// PoolMapping: the pool of a session on the direct plane, mapped into this process.
//
// Thread safety: immutable; the memory is shared with the daemon and with all sessions of the pool. Steps write there,
// as kernels/plane.h says, and nothing else does.
//
// Invariants:
//  1. Every byte that rows(), words() and result() reach lies inside the mapping, and the three do not overlap: the
//     layout is checked once, with overflow-checked arithmetic, against part_bytes, and these against the files' real
//     sizes, before any of it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "kernels/backend.h"
#include "kernels/plane.h"
#include "kernels/plane_step.h"
#include "kernels/row_layout.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// How rows of the pool lie, and those of the hot caches. INTERNAL: a spec that cannot be, or of a later version.
absl::StatusOr<kernels::RowFormat> RowFormatOf(const v1::PoolSpec& pool);

class PoolMapping {
 public:
  // Fetches the descriptors from direct.descriptor_socket with the session's token, and maps them.
  //
  // FAILED_PRECONDITION: the session is not on the direct plane; errors of FetchPoolDescriptors
  // (descriptor_exchange.h) and of FromDescriptors.
  static absl::StatusOr<std::shared_ptr<const PoolMapping>> Map(const v1::Attached& attached, absl::Time deadline);
  // Checks the layout and maps the descriptors, on a GPU for kernels there as well. INTERNAL: a layout that cannot be
  // (the message names field, value and limit); errors of pool_memory.h.
  static absl::StatusOr<std::shared_ptr<const PoolMapping>> FromDescriptors(const v1::Attached& attached,
                                                                            std::vector<FileDescriptor> descriptors);

  PoolMapping(const PoolMapping&) = delete;
  PoolMapping& operator=(const PoolMapping&) = delete;

  uint64_t bytes() const { return memory_->bytes(); }
  const kernels::RowStore& rows() const { return rows_; }
  absl::Span<kernels::SequenceWord> words() const { return words_; }
  // Where the session's steps leave what they have counted.
  kernels::PlaneResult* result() const { return result_; }

 private:
  PoolMapping() = default;

  std::unique_ptr<kernels::Buffer> memory_;
  kernels::RowStore rows_;
  absl::Span<kernels::SequenceWord> words_;
  kernels::PlaneResult* result_ = nullptr;
};

}  // namespace stoker::client
