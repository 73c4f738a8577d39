// Tensors: rows of the pool's layers in memory that an engine owns, for Store and Load.
//
// Thread safety: values; functions without state.
//
// Invariants of a TensorSpec that Normalize has passed:
//  1. Every byte of every row lies in [0, size_bytes) from the tensor's begin, computed without overflow.
//  2. Layers and parts are the pool's, each at most once; offsets and strides are multiples of 4.
//  3. Rows of one part and layer do not overlap. Those of different ones may: that is the engine's own loss.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/core/pool_spec.h"

namespace stoker::core {

// Where one part of the rows lies, from the tensor's begin.
struct TensorPart {
  int64_t part = 0;  // of the pool's row layout
  uint64_t offset_bytes = 0;
  uint64_t row_stride_bytes = 0;
  uint64_t page_stride_bytes = 0;
};

struct TensorSpec {
  uint64_t offset_bytes = 0;  // of the tensor, in its memory
  uint64_t size_bytes = 0;
  std::vector<int64_t> layers;  // of the pool, in the order in which they lie; empty: all
  uint64_t layer_stride_bytes = 0;
  int64_t rows = 0;
  int64_t page_rows = 0;  // 0: 1, no pages
  std::vector<TensorPart> parts;

  // Fills in defaults and checks every field against the pool and the limits of proto/stoker/v1/sessions.proto.
  // INVALID_ARGUMENT names the field, its value and its limit.
  absl::Status Normalize(const PoolSpec& pool);
};

// Parts of a row, and the bytes of one of them.
int64_t PartCount(const PoolSpec& pool);
int64_t PartBytes(const PoolSpec& pool, int64_t part);

// Memory of an engine, mapped here. Unmapped by the destructor, which must not run before the work that uses it is
// done, and may take a system call's time.
class ClientMemory {
 public:
  virtual ~ClientMemory() = default;
  virtual std::byte* data() const = 0;
};

struct Tensor {
  TensorSpec spec;                       // normalized
  std::unique_ptr<ClientMemory> memory;  // size_bytes from offset_bytes on
};

// Whether the tensors have each part of each layer exactly once. INVALID_ARGUMENT names the first that is missing or
// there twice.
absl::Status CheckCoverage(const PoolSpec& pool, absl::Span<const Tensor* const> tensors);

}  // namespace stoker::core
