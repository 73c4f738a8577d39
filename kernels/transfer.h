// Transfer: indexed row copies over all layers, for store, load and commit. Seed kernel: SGLang
// transfer_cache_dsv4_mla.
//
// Row i of the transfer goes from row src_rows[i] of `src` to row dst_rows[i] of `dst` in every listed layer. A pair
// with a negative row is skipped. The two stores must have equal part sizes; their strides and layouts may differ, so a
// dense buffer of a message or of the staging area (DenseLayout) is a store like any other.
//
// Where *skip is not 0 nothing is moved.
//
// No row of `dst` may occur twice, or be a row of `src` that another pair reads.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/copy_limits.h"
#include "kernels/row_layout.h"

namespace stoker::kernels {

struct TransferArgs {
  RowStore src;
  RowStore dst;
  int64_t src_row_limit = 0;  // rows at or above it are skipped on either side
  int64_t dst_row_limit = 0;
  const int32_t* src_layers = nullptr;  // host memory, read before the call returns: layer of src ...
  const int32_t* dst_layers = nullptr;  //   ... and the layer of dst that it goes to
  int32_t layer_count = 0;
  const int32_t* src_rows = nullptr;  // device memory [count]
  const int32_t* dst_rows = nullptr;  // device memory [count]
  int64_t count = 0;
  uint64_t* transferred_bytes = nullptr;  // optional [1]: added to, atomically
  const uint32_t* skip = nullptr;         // optional [1], device memory; the same from the begin to the end
  CopyLimits limits = {};
};

// A part of a transfer as a transfer of its own.
inline TransferArgs PartOf(TransferArgs args, const TransferPart& part) {
  args.src_rows += part.first_pair;
  args.dst_rows += part.first_pair;
  args.count = part.pairs;
  args.src_layers += part.first_layer;
  args.dst_layers += part.first_layer;
  args.layer_count = part.layers;
  return args;
}

absl::Status Validate(const TransferArgs& args);

// The layout of message bytes: rows of one layer one after the other, the parts of a row adjacent, with the parts of
// `like`. A RowStore with it has layer_stride = rows * row_bytes.
RowLayout DenseLayout(const RowLayout& like, int64_t rows);

}  // namespace stoker::kernels
