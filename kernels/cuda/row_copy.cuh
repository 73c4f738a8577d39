// Copies rows between two row stores with a flat loop over equal pieces.
//
// Layout: piece c of a copy of `rows` row pairs in `layers` layers is piece c % row_pieces of pair c / row_pieces %
// rows of layer c / (row_pieces * rows). Consecutive threads take consecutive pieces, so that a warp reads whole rows,
// and each thread has kInFlight reads under way before its first write: with few rows it is latency that limits, and a
// warp for each row had 17.6 GB/s where the flat loop had 19.5 (200 rows of 656 bytes, whole GPU, H200).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_layout.h"

namespace stoker::kernels::cuda {

// Layers of one launch, by value.
struct LayerPairs {
  static constexpr int kMax = 64;  // more layers take more launches
  int32_t count = 0;
  int16_t src[kMax];
  int16_t dst[kMax];
};

// Two row stores with equal parts, as the device needs them.
struct RowCopy {
  struct Side {
    char* base = nullptr;
    int64_t layer_stride = 0;
    int32_t page_rows = 1;
    int64_t offset[2] = {};
    int64_t row_stride[2] = {};
    int64_t page_stride[2] = {};

    __host__ __device__ int64_t Offset(int part, uint32_t row) const {
      if (page_rows == 1) return offset[part] + row * page_stride[part];
      return offset[part] + row / page_rows * page_stride[part] + row % page_rows * row_stride[part];
    }
  };

  Side src;
  Side dst;
  int32_t part_bytes[2] = {};
  int32_t part_count = 1;
  LayerPairs layers;

  __host__ __device__ int32_t row_bytes() const { return part_bytes[0] + part_bytes[1]; }
};

inline RowCopy::Side MakeSide(const RowStore& store) {
  RowCopy::Side side;
  side.base = reinterpret_cast<char*>(store.base);
  side.layer_stride = store.layer_stride;
  side.page_rows = store.layout.page_rows;
  for (int p = 0; p < store.layout.part_count; ++p) {
    side.offset[p] = store.layout.part[p].offset;
    side.row_stride[p] = store.layout.part[p].row_stride;
    side.page_stride[p] = store.layout.part[p].page_stride;
  }
  return side;
}

inline RowCopy MakeRowCopy(const RowStore& src, const RowStore& dst) {
  RowCopy copy;
  copy.src = MakeSide(src);
  copy.dst = MakeSide(dst);
  copy.part_count = src.layout.part_count;
  for (int p = 0; p < copy.part_count; ++p) copy.part_bytes[p] = src.layout.part[p].bytes;
  return copy;
}

// Bytes of the largest piece that every row of both sides is a multiple of and aligned to: 16, 8 or 4.
inline int PieceBytes(const RowCopy& copy) {
  uint64_t bits = 16;
  for (const RowCopy::Side* side : {&copy.src, &copy.dst}) {
    bits |= reinterpret_cast<uintptr_t>(side->base) | static_cast<uint64_t>(side->layer_stride);
    for (int p = 0; p < copy.part_count; ++p) {
      bits |= static_cast<uint64_t>(side->offset[p] | side->row_stride[p] | side->page_stride[p]);
      bits |= static_cast<uint64_t>(copy.part_bytes[p]);
    }
  }
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : 4;
}

#ifdef __CUDACC__

template <int kBytes>
struct PieceOf;
template <>
struct PieceOf<16> {
  using Type = uint4;
};
template <>
struct PieceOf<8> {
  using Type = uint2;
};
template <>
struct PieceOf<4> {
  using Type = uint32_t;
};

__device__ inline uint32_t Zero(uint32_t) { return 0; }
__device__ inline uint2 Zero(uint2) { return make_uint2(0, 0); }
__device__ inline uint4 Zero(uint4) { return make_uint4(0, 0, 0, 0); }

inline constexpr int kInFlight = 4;

// Copies pieces [first, end) of every layer, of which this thread takes first, first + stride, ... SourceOf(i) and
// TargetOf(i) give the rows of pair i: a negative target is skipped, a negative source is zero-filled. `ready` is
// called between the first reads and the first TargetOf, by every thread that calls this, once.
template <int kBytes, typename SourceOf, typename TargetOf, typename Ready>
__device__ void CopyPieces(const RowCopy& copy, uint32_t first, uint32_t end, uint32_t stride, SourceOf source_of,
                           TargetOf target_of, Ready ready) {
  using Piece = typename PieceOf<kBytes>::Type;
  const uint32_t row_pieces = static_cast<uint32_t>(copy.row_bytes()) / kBytes;
  const uint32_t part0_pieces = static_cast<uint32_t>(copy.part_bytes[0]) / kBytes;
  bool is_ready = false;
  for (int32_t l = 0; l < copy.layers.count; ++l) {
    const char* const src = copy.src.base + copy.layers.src[l] * copy.src.layer_stride;
    char* const dst = copy.dst.base + copy.layers.dst[l] * copy.dst.layer_stride;
    for (uint32_t c = first; c < end; c += stride * kInFlight) {
      Piece piece[kInFlight];
      uint32_t pair[kInFlight];
      uint32_t v[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const uint32_t at = c + k * stride;
        if (at >= end) continue;
        pair[k] = at / row_pieces;
        v[k] = at % row_pieces;
        const int32_t src_row = source_of(pair[k]);
        if (src_row < 0) {
          piece[k] = Zero(piece[k]);
          continue;
        }
        const int part = v[k] >= part0_pieces;
        const char* const from =
            src + copy.src.Offset(part, static_cast<uint32_t>(src_row)) + (v[k] - (part ? part0_pieces : 0)) * kBytes;
        piece[k] = __ldcg(reinterpret_cast<const Piece*>(from));
      }
      if (!is_ready) ready();
      is_ready = true;
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (c + k * stride >= end) continue;
        const int32_t dst_row = target_of(pair[k]);
        if (dst_row < 0) continue;
        const int part = v[k] >= part0_pieces;
        char* const to =
            dst + copy.dst.Offset(part, static_cast<uint32_t>(dst_row)) + (v[k] - (part ? part0_pieces : 0)) * kBytes;
        __stcg(reinterpret_cast<Piece*>(to), piece[k]);
      }
    }
  }
  if (!is_ready) ready();
}

// The copy for the piece size that a launcher found.
template <typename SourceOf, typename TargetOf, typename Ready>
__device__ void CopyPieces(int piece_bytes, const RowCopy& copy, uint32_t first, uint32_t end, uint32_t stride,
                           SourceOf source_of, TargetOf target_of, Ready ready) {
  if (piece_bytes == 16) {
    CopyPieces<16>(copy, first, end, stride, source_of, target_of, ready);
  } else if (piece_bytes == 8) {
    CopyPieces<8>(copy, first, end, stride, source_of, target_of, ready);
  } else {
    CopyPieces<4>(copy, first, end, stride, source_of, target_of, ready);
  }
}

// All pieces of pairs 0 <= i < rows.
template <typename SourceOf, typename TargetOf>
__device__ void CopyRows(int piece_bytes, const RowCopy& copy, int32_t rows, uint32_t first, uint32_t stride,
                         SourceOf source_of, TargetOf target_of) {
  const uint32_t row_pieces = static_cast<uint32_t>(copy.row_bytes()) / static_cast<uint32_t>(piece_bytes);
  CopyPieces(piece_bytes, copy, first, static_cast<uint32_t>(rows) * row_pieces, stride, source_of, target_of, [] {});
}

#endif  // __CUDACC__

}  // namespace stoker::kernels::cuda
