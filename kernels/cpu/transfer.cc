// Transfer on the CPU. Rows that lie one after the other on both sides move as one piece, which is what store and load
// mostly see.
#include "kernels/transfer.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/cpu_backend.h"

namespace stoker::kernels::cpu {
namespace {

// Pairs taken at once: their offsets are used by every layer, so they should stay in the cache.
constexpr int64_t kBatch = 2048;

struct Pair {
  int32_t src_row;
  int32_t dst_row;
};

void AppendPiece(std::vector<PieceCopy>& pieces, int64_t src, int64_t dst, int64_t bytes) {
  if (!pieces.empty()) {
    PieceCopy& last = pieces.back();
    if (last.src + last.bytes == src && last.dst + last.bytes == dst) {
      last.bytes += bytes;
      return;
    }
  }
  pieces.push_back({src, dst, bytes});
}

}  // namespace

void Transfer(const TransferArgs& args) {
  if (args.skip != nullptr && Load(args.skip) != 0) return;
  thread_local std::vector<Pair> pairs;
  thread_local std::vector<PieceCopy> pieces;
  uint64_t moved_rows = 0;
  for (int64_t first = 0; first < args.count; first += kBatch) {
    pairs.clear();
    for (int64_t i = first; i < std::min(first + kBatch, args.count); ++i) {
      const Pair pair{Load(args.src_rows + i), Load(args.dst_rows + i)};
      if (pair.src_row < 0 || pair.dst_row < 0 || pair.src_row >= args.src_row_limit ||
          pair.dst_row >= args.dst_row_limit) {
        continue;
      }
      pairs.push_back(pair);
    }
    moved_rows += pairs.size();
    for (int32_t p = 0; p < args.src.layout.part_count; ++p) {
      pieces.clear();
      for (const Pair& pair : pairs) {
        AppendPiece(pieces, args.src.layout.Offset(p, pair.src_row), args.dst.layout.Offset(p, pair.dst_row),
                    args.src.layout.part[p].bytes);
      }
      for (int32_t l = 0; l < args.layer_count; ++l) {
        CopyPieces(args.dst.base + args.dst_layers[l] * args.dst.layer_stride,
                   args.src.base + args.src_layers[l] * args.src.layer_stride, pieces);
      }
    }
  }
  Add(args.transferred_bytes, moved_rows * args.layer_count * args.src.layout.row_bytes());
}

}  // namespace stoker::kernels::cpu
