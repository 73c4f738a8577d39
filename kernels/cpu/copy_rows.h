// The one loop that moves row bytes. Gather and transfer say which; it knows how to keep the memory busy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace stoker::kernels::cpu {

// One piece of a row, or of several that lie one after the other on both sides. Offsets are from a layer's base.
struct PieceCopy {
  int64_t src;
  int64_t dst;
  int64_t bytes;
};

// Copies the pieces, which must not overlap each other. A piece onto itself is left alone.
void CopyPieces(std::byte* dst, const std::byte* src, absl::Span<const PieceCopy> pieces);

}  // namespace stoker::kernels::cpu
