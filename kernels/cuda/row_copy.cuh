// Copies rows between two row stores with a flat loop over equal pieces.
//
// Layout: piece c of a layer is piece c % row_pieces of pair c / row_pieces. Consecutive threads take consecutive
// pieces, so that a warp reads whole rows, and each thread has kInFlight reads under way before its first write, of
// several layers where one has fewer: with few rows it is latency that limits, and a warp for each row had 17.6 GB/s
// where the flat loop had 19.5 (200 rows of 656 bytes, whole GPU, H200).
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

// What a thread copies: pieces first, first + stride, ... of each of the layers first_layer, first_layer +
// layer_stride, ...
struct Share {
  uint32_t first;
  uint32_t stride;
  int32_t first_layer = 0;
  int32_t layer_stride = 1;
};

// Copies a share of the pieces of pairs 0 <= i < rows. SourceOf(i) and TargetOf(i) give the rows of pair i: a negative
// target is skipped, a negative source is zero-filled. `ready` is called between the first reads and the first
// TargetOf, by every thread that calls this, once.
template <int kBytes, typename SourceOf, typename TargetOf, typename Ready>
__device__ void CopyRows(const RowCopy& copy, int32_t rows, const Share& share, SourceOf source_of, TargetOf target_of,
                         Ready ready) {
  using Piece = typename PieceOf<kBytes>::Type;
  const uint32_t row_pieces = static_cast<uint32_t>(copy.row_bytes()) / kBytes;
  const uint32_t part0_pieces = static_cast<uint32_t>(copy.part_bytes[0]) / kBytes;
  const auto place_in = [&](const RowCopy::Side& side, int32_t layer, int32_t row, uint32_t v) {
    const int part = v >= part0_pieces;
    return side.base + layer * side.layer_stride + side.Offset(part, static_cast<uint32_t>(row)) +
           (v - (part ? part0_pieces : 0)) * kBytes;
  };
  const uint32_t end = static_cast<uint32_t>(rows) * row_pieces;
  bool is_ready = false;
  uint32_t c = share.first;
  int32_t layer = share.first < end ? share.first_layer : copy.layers.count;
  while (layer < copy.layers.count) {
    Piece piece[kInFlight];
    uint32_t at[kInFlight];
    int32_t layer_of[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      at[k] = c;
      layer_of[k] = layer;
      if (layer >= copy.layers.count) continue;
      const int32_t src_row = source_of(c / row_pieces);
      if (src_row < 0) {
        piece[k] = Zero(piece[k]);
      } else {
        piece[k] =
            __ldcg(reinterpret_cast<const Piece*>(place_in(copy.src, copy.layers.src[layer], src_row, c % row_pieces)));
      }
      c += share.stride;
      if (c >= end) {
        c = share.first;
        layer += share.layer_stride;
      }
    }
    if (!is_ready) ready();
    is_ready = true;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (layer_of[k] >= copy.layers.count) continue;
      const int32_t dst_row = target_of(at[k] / row_pieces);
      if (dst_row < 0) continue;
      __stcg(reinterpret_cast<Piece*>(place_in(copy.dst, copy.layers.dst[layer_of[k]], dst_row, at[k] % row_pieces)),
             piece[k]);
    }
  }
  if (!is_ready) ready();
}

// The copy for the piece size that a launcher found.
template <typename SourceOf, typename TargetOf, typename Ready>
__device__ void CopyRows(int piece_bytes, const RowCopy& copy, int32_t rows, const Share& share, SourceOf source_of,
                         TargetOf target_of, Ready ready) {
  if (piece_bytes == 16) {
    CopyRows<16>(copy, rows, share, source_of, target_of, ready);
  } else if (piece_bytes == 8) {
    CopyRows<8>(copy, rows, share, source_of, target_of, ready);
  } else {
    CopyRows<4>(copy, rows, share, source_of, target_of, ready);
  }
}

template <typename SourceOf, typename TargetOf>
__device__ void CopyRows(int piece_bytes, const RowCopy& copy, int32_t rows, const Share& share, SourceOf source_of,
                         TargetOf target_of) {
  CopyRows(piece_bytes, copy, rows, share, source_of, target_of, [] {});
}

#endif  // __CUDACC__

}  // namespace stoker::kernels::cuda
