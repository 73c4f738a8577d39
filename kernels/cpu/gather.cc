// Gather on the CPU. The plan may lie in memory that a client writes: it is read once, checked, and turned into offsets
// that serve all layers.
#include "kernels/gather.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/cpu_backend.h"

namespace stoker::kernels::cpu {
namespace {

// Collects checked (pool row, hot row) pairs and moves them, in batches that fit the second-level cache.
class Mover {
 public:
  template <typename Args>
  explicit Mover(const Args& args)
      : pool_(args.pool),
        hot_(args.hot),
        pool_rows_(args.pool_rows),
        hot_rows_(args.hot_rows),
        layers_(args.layers, args.layer_count),
        gathered_bytes_(args.gathered_bytes) {
    copies_.reserve(kBatch);
    zeros_.reserve(kBatch);
  }
  ~Mover() { Flush(); }

  void Put(int32_t pool_row, int32_t hot_row) {
    if (hot_row < 0 || hot_row >= hot_rows_) return;
    if (pool_row < 0 || pool_row >= pool_rows_) {
      zeros_.push_back(hot_row);
    } else {
      copies_.push_back({pool_row, hot_row});
    }
    if (copies_.size() + zeros_.size() == kBatch) Flush();
  }

 private:
  static constexpr size_t kBatch = 2048;
  struct Pair {
    int32_t pool_row;
    int32_t hot_row;
  };

  void Flush() {
    for (int32_t p = 0; p < hot_.layout.part_count; ++p) {
      const int32_t bytes = hot_.layout.part[p].bytes;
      pieces_.clear();
      for (const Pair& pair : copies_) {
        pieces_.push_back({pool_.layout.Offset(p, pair.pool_row), hot_.layout.Offset(p, pair.hot_row), bytes});
      }
      for (const int32_t layer : layers_) {
        CopyPieces(hot_.base + layer * hot_.layer_stride, pool_.base + layer * pool_.layer_stride, pieces_);
        for (const int32_t hot_row : zeros_) std::memset(hot_.At(layer, p, hot_row), 0, bytes);
      }
    }
    Add(gathered_bytes_, uint64_t{copies_.size()} * layers_.size() * hot_.layout.row_bytes());
    copies_.clear();
    zeros_.clear();
  }

  const RowStore pool_;
  const RowStore hot_;
  const int64_t pool_rows_;
  const int64_t hot_rows_;
  const absl::Span<const int32_t> layers_;
  uint64_t* const gathered_bytes_;
  static thread_local std::vector<Pair> copies_;
  static thread_local std::vector<int32_t> zeros_;
  static thread_local std::vector<PieceCopy> pieces_;
};

thread_local std::vector<Mover::Pair> Mover::copies_;
thread_local std::vector<int32_t> Mover::zeros_;
thread_local std::vector<PieceCopy> Mover::pieces_;

}  // namespace

void Gather(const GatherCompactArgs& args) {
  Mover mover(args);
  for (int32_t r = 0; r < args.rows; ++r) {
    const int32_t count = std::clamp(Load(args.miss_counts + r), 0, args.top_k);
    const int64_t first = int64_t{r} * args.top_k;
    for (int64_t i = first; i < first + count; ++i) {
      mover.Put(Load(args.miss_pool_rows + i), Load(args.miss_hot_rows + i));
    }
  }
}

void Gather(const GatherDenseArgs& args) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  Mover mover(args);
  for (int32_t r = 0; r < args.rows; ++r) {
    const bool padding = args.state_rows != nullptr && Load(args.state_rows + r) < 0;
    for (int32_t e = 0; e < args.top_k; ++e) {
      const int64_t i = int64_t{r} * args.top_k + e;
      const int32_t hot_row = Load(args.entry_hot_rows + i);
      if (args.attention_indices != nullptr) {
        const int64_t index =
            hot_row / args.hot_block_rows * args.attention_block_stride + hot_row % args.hot_block_rows;
        args.attention_indices[i] = padding || hot_row < 0 || index > kMaxInt32 ? -1 : static_cast<int32_t>(index);
      }
      if (!padding && Load(args.miss_mask + i) != 0) mover.Put(Load(args.entry_pool_rows + i), hot_row);
    }
  }
}

}  // namespace stoker::kernels::cpu
