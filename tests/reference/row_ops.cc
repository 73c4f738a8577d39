// Gather and transfer, byte by byte.
#include <cstdint>
#include <limits>

#include "tests/reference/reference.h"

namespace stoker::reference {
namespace {

using kernels::RowStore;

// Byte `b` of part `p` of a row, by the formula at the top of row_layout.h.
std::byte& ByteAt(const RowStore& store, int64_t layer, int32_t p, int64_t row, int64_t b) {
  const kernels::RowPart& part = store.layout.part[p];
  const int64_t page = row / store.layout.page_rows;
  const int64_t row_in_page = row - page * store.layout.page_rows;
  return store
      .base[layer * store.layer_stride + part.offset + page * part.page_stride + row_in_page * part.row_stride + b];
}

void CopyRow(const RowStore& src, int64_t src_layer, int64_t src_row, const RowStore& dst, int64_t dst_layer,
             int64_t dst_row) {
  for (int32_t p = 0; p < src.layout.part_count; ++p) {
    for (int64_t b = 0; b < src.layout.part[p].bytes; ++b) {
      ByteAt(dst, dst_layer, p, dst_row, b) = ByteAt(src, src_layer, p, src_row, b);
    }
  }
}

void ZeroRow(const RowStore& store, int64_t layer, int64_t row) {
  for (int32_t p = 0; p < store.layout.part_count; ++p) {
    for (int64_t b = 0; b < store.layout.part[p].bytes; ++b) ByteAt(store, layer, p, row, b) = std::byte{0};
  }
}

// Gathers one row into all layers. Returns the bytes that were copied.
template <typename Args>
uint64_t GatherRow(const Args& args, int64_t pool_row, int64_t hot_row) {
  if (hot_row < 0 || hot_row >= args.hot_rows) return 0;
  uint64_t bytes = 0;
  for (int32_t l = 0; l < args.layer_count; ++l) {
    if (pool_row < 0 || pool_row >= args.pool_rows) {
      ZeroRow(args.hot, args.layers[l], hot_row);
    } else {
      CopyRow(args.pool, args.layers[l], pool_row, args.hot, args.layers[l], hot_row);
      bytes += args.pool.layout.row_bytes();
    }
  }
  return bytes;
}

}  // namespace

void Gather(const kernels::GatherCompactArgs& args) {
  uint64_t bytes = 0;
  for (int32_t r = 0; r < args.rows; ++r) {
    for (int32_t i = 0; i < args.top_k && i < args.miss_counts[r]; ++i) {
      const int64_t at = int64_t{r} * args.top_k + i;
      bytes += GatherRow(args, args.miss_pool_rows[at], args.miss_hot_rows[at]);
    }
  }
  if (args.gathered_bytes != nullptr) *args.gathered_bytes += bytes;
}

void Gather(const kernels::GatherDenseArgs& args) {
  uint64_t bytes = 0;
  for (int32_t r = 0; r < args.rows; ++r) {
    const bool padding = args.state_rows != nullptr && args.state_rows[r] < 0;
    for (int32_t i = 0; i < args.top_k; ++i) {
      const int64_t at = int64_t{r} * args.top_k + i;
      const int64_t hot_row = args.entry_hot_rows[at];
      if (args.attention_indices != nullptr) {
        int64_t index = -1;
        if (!padding && hot_row >= 0) {
          index = hot_row / args.hot_block_rows * args.attention_block_stride + hot_row % args.hot_block_rows;
        }
        if (index > std::numeric_limits<int32_t>::max()) index = -1;
        args.attention_indices[at] = static_cast<int32_t>(index);
      }
      if (!padding && args.miss_mask[at] != 0) bytes += GatherRow(args, args.entry_pool_rows[at], hot_row);
    }
  }
  if (args.gathered_bytes != nullptr) *args.gathered_bytes += bytes;
}

void Transfer(const kernels::TransferArgs& args) {
  if (args.skip != nullptr && *args.skip != 0) return;
  uint64_t bytes = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t src_row = args.src_rows[i];
    const int64_t dst_row = args.dst_rows[i];
    if (src_row < 0 || dst_row < 0 || src_row >= args.src_row_limit || dst_row >= args.dst_row_limit) continue;
    for (int32_t l = 0; l < args.layer_count; ++l) {
      CopyRow(args.src, args.src_layers[l], src_row, args.dst, args.dst_layers[l], dst_row);
      bytes += args.src.layout.row_bytes();
    }
  }
  if (args.transferred_bytes != nullptr) *args.transferred_bytes += bytes;
}

}  // namespace stoker::reference
