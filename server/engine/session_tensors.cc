// Bulk row movement between the pool and tensors of the engine: one transfer for each tensor, of the parts that it has.
#include <algorithm>

#include "kernels/cuda/launch_shape.h"
#include "server/engine/session_storage.h"

namespace stoker::engine {
namespace {

// Of a change of tables and of what is hot.
constexpr int64_t kPlanPieces = 8;

// Where the rows of a tensor lie. Normalize has checked that they are inside its memory.
kernels::RowStore TensorStore(const core::Tensor& tensor, const kernels::RowLayout& pool) {
  kernels::RowStore store;
  store.base = tensor.memory->data();
  store.layer_stride = static_cast<int64_t>(tensor.spec.layer_stride_bytes);
  store.layers = static_cast<int32_t>(tensor.spec.layers.size());
  store.layout.kind = pool.kind;
  store.layout.part_count = static_cast<int32_t>(tensor.spec.parts.size());
  store.layout.page_rows = static_cast<int32_t>(tensor.spec.page_rows);
  store.layout.rows = tensor.spec.rows;
  for (size_t p = 0; p < tensor.spec.parts.size(); ++p) {
    const core::TensorPart& part = tensor.spec.parts[p];
    kernels::RowPart& row_part = store.layout.part[p];
    row_part.offset = static_cast<int64_t>(part.offset_bytes);
    row_part.row_stride = static_cast<int64_t>(part.row_stride_bytes);
    row_part.page_stride = static_cast<int64_t>(part.page_stride_bytes);
    row_part.bytes = pool.part[part.part].bytes;
  }
  return store;
}

// The pool, with the parts that the tensor has.
kernels::RowStore PartsOf(const kernels::RowStore& pool, const core::Tensor& tensor) {
  kernels::RowStore store = pool;
  store.layout.part_count = static_cast<int32_t>(tensor.spec.parts.size());
  for (size_t p = 0; p < tensor.spec.parts.size(); ++p) {
    store.layout.part[p] = pool.layout.part[tensor.spec.parts[p].part];
  }
  return store;
}

}  // namespace

absl::Status SessionStorage::TransferTensor(const core::Tensor& tensor, bool store, const int32_t* pool_rows,
                                            const int32_t* tensor_rows, int64_t count) {
  const std::vector<int32_t> pool_layers(tensor.spec.layers.begin(), tensor.spec.layers.end());
  const kernels::RowStore rows = TensorStore(tensor, pool_.layout);
  const kernels::RowStore parts = PartsOf(pool_, tensor);
  kernels::TransferArgs args;
  args.src = store ? rows : parts;
  args.dst = store ? parts : rows;
  args.src_row_limit = args.src.layout.rows;
  args.dst_row_limit = args.dst.layout.rows;
  args.src_layers = store ? all_layers_.data() : pool_layers.data();
  args.dst_layers = store ? pool_layers.data() : all_layers_.data();
  args.layer_count = static_cast<int32_t>(pool_layers.size());
  args.src_rows = store ? tensor_rows : pool_rows;
  args.dst_rows = store ? pool_rows : tensor_rows;
  args.count = count;
  args.limits = copies_.bulk;
  args.skip = aborted();
  return stream_->Transfer(args);
}

int64_t SessionStorage::PiecesOf(int64_t rows, absl::Span<const core::Tensor* const> tensors) const {
  const int64_t chunk = std::min(rows, kChunkRows);
  // As a GPU launches them; and one that a backend may count beside.
  const auto launches = [&](int64_t layers) {
    return 1 + kernels::TransferParts(chunk, static_cast<int32_t>(layers), pool_.layout.row_bytes(), copies_.bulk,
                                      kernels::cuda::kMaxLaunchPairs, kernels::cuda::kMaxLaunchLayers);
  };
  int64_t pieces = tensors.empty() ? launches(pool_spec_.layers) : 0;
  for (const core::Tensor* tensor : tensors) pieces += launches(static_cast<int64_t>(tensor->spec.layers.size()));
  // Two lists of rows are uploaded, and a write changes tables before.
  return (rows + kChunkRows - 1) / kChunkRows * (pieces + 2) + kPlanPieces;
}

// The row lists are the same for all tensors: they are uploaded once for each chunk.
absl::Status SessionStorage::TransferTensors(const core::TensorWork& work, bool store) {
  const int64_t count = static_cast<int64_t>(work.pool_rows.size());
  int32_t* const pool_rows = InState<int32_t>(memory_.source_rows);
  int32_t* const tensor_rows = InState<int32_t>(memory_.target_rows);
  for (int64_t begin = 0; begin < count; begin += kChunkRows) {
    const int64_t chunk = std::min(kChunkRows, count - begin);
    if (absl::Status status = Upload(pool_rows, work.pool_rows.data() + begin, chunk * 4); !status.ok()) return status;
    if (absl::Status status = Upload(tensor_rows, work.tensor_rows.data() + begin, chunk * 4); !status.ok()) {
      return status;
    }
    for (const core::Tensor* tensor : work.tensors) {
      absl::Status status = TransferTensor(*tensor, store, pool_rows, tensor_rows, chunk);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status SessionStorage::StoreTensors(const core::TensorWork& work) { return TransferTensors(work, true); }

absl::Status SessionStorage::LoadTensors(const core::TensorWork& work) { return TransferTensors(work, false); }

}  // namespace stoker::engine
