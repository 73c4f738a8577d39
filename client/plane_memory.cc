#include "client/plane_memory.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace stoker::client {
namespace {

// Arrays of state.batch_plan, in the daemon's order (server/engine/session_memory.h).
enum PlanArray : int64_t {
  kPlanStateRows,
  kPlanLengths,
  kPlanNewestPoolRows,
  kPlanNewestHotRows,
  kPlanWords,
  kPlanCommitHotRows,
  kPlanCommitPoolRows,
  kPlanArrays
};

// Hands out the arena's tensors as dense arrays, and keeps the first error.
class Tensors {
 public:
  explicit Tensors(const Arena& arena) : arena_(arena) {}

  // Null after an error. `element` is u64, i32 or i16; T may be a struct of several.
  template <typename T>
  T* Dense(const std::string& name, absl::string_view element, std::initializer_list<uint64_t> shape) {
    const TensorView* const tensor = Find(name, element, shape);
    if (tensor == nullptr) return nullptr;
    uint64_t stride = element == "u64" ? 8 : element == "i32" ? 4 : 2;
    for (size_t i = tensor->shape.size(); i-- > 0;) {
      if (tensor->shape[i] > 1 && tensor->stride_bytes[i] != stride) {
        Fail(name, absl::StrCat("stride_bytes[", i, "] is ", tensor->stride_bytes[i], ", not ", stride));
        return nullptr;
      }
      stride *= tensor->shape[i];
    }
    return reinterpret_cast<T*>(tensor->data);
  }

  // The tensor, which must have that element and shape.
  const TensorView* Find(const std::string& name, absl::string_view element, std::initializer_list<uint64_t> shape) {
    if (!status_.ok()) return nullptr;
    const absl::StatusOr<const TensorView*> tensor = arena_.Tensor(name);
    if (!tensor.ok()) {
      Fail(name, "is missing");
    } else if ((*tensor)->element != element) {
      Fail(name, absl::StrCat("element is '", (*tensor)->element, "', not '", element, "'"));
    } else if (!std::equal(shape.begin(), shape.end(), (*tensor)->shape.begin(), (*tensor)->shape.end())) {
      Fail(name, absl::StrCat("shape is [", absl::StrJoin((*tensor)->shape, ", "), "], not [",
                              absl::StrJoin(shape, ", "), "]"));
    }
    return status_.ok() ? *tensor : nullptr;
  }

  void Fail(absl::string_view name, absl::string_view what) {
    if (status_.ok()) status_ = absl::InternalError(absl::StrCat("arena tensor '", name, "': ", what));
  }
  const absl::Status& status() const { return status_; }
  const Arena& arena() const { return arena_; }

 private:
  const Arena& arena_;
  absl::Status status_;
};

// Name of part `p` of a layer's hot cache.
std::string HotName(const kernels::RowLayout& layout, int32_t layer, int32_t p) {
  const std::string name = absl::StrCat("hot.", layer);
  switch (layout.kind) {
    case kernels::RowLayoutKind::kLinear:
      return name;
    case kernels::RowLayoutKind::kSplitKv:
      return absl::StrCat(name, p == 0 ? ".k" : ".v");
    case kernels::RowLayoutKind::kDsv4Paged:
      return absl::StrCat(name, p == 0 ? ".values" : ".scales");
  }
  return name;
}

// The hot caches of all layers, which must lie as the kernels' layout has them.
kernels::RowStore HotStore(Tensors& tensors, const kernels::RowLayout& layout, int32_t layers) {
  kernels::RowStore store;
  store.layout = layout;
  store.layers = layers;
  store.layer_stride = layout.layer_bytes;
  const absl::Span<std::byte> bytes = tensors.arena().bytes();
  const auto rows = static_cast<uint64_t>(layout.rows);
  const auto page_rows = static_cast<uint64_t>(layout.page_rows);
  for (int32_t layer = 0; layer < layers; ++layer) {
    for (int32_t p = 0; p < layout.part_count; ++p) {
      const kernels::RowPart& part = layout.part[p];
      const std::string name = HotName(layout, layer, p);
      const auto part_bytes = static_cast<uint64_t>(part.bytes);
      const bool paged = layout.kind == kernels::RowLayoutKind::kDsv4Paged;
      const TensorView* const tensor = paged ? tensors.Find(name, "u8", {rows / page_rows, page_rows, part_bytes})
                                             : tensors.Find(name, "u8", {rows, part_bytes});
      if (tensor == nullptr) return store;
      const size_t row_dimension = paged ? 1 : 0;
      if (tensor->stride_bytes[row_dimension] != static_cast<uint64_t>(part.row_stride) ||
          (paged && tensor->stride_bytes[0] != static_cast<uint64_t>(part.page_stride))) {
        tensors.Fail(name, absl::StrCat("stride_bytes [", absl::StrJoin(tensor->stride_bytes, ", "),
                                        "] are not those of the row layout"));
        return store;
      }
      const int64_t offset = tensor->data - bytes.data();
      if (layer == 0 && p == 0) store.base = tensor->data - part.offset;
      if (layer == 1 && p == 0) store.layer_stride = tensor->data - part.offset - store.base;
      const int64_t begin = store.base - bytes.data() + layer * store.layer_stride;
      if (begin < 0 || store.layer_stride < layout.layer_bytes || offset != begin + part.offset ||
          static_cast<int64_t>(bytes.size()) - begin < layout.layer_bytes) {
        tensors.Fail(name, absl::StrCat("offset_bytes ", offset, " is not where the row layout has it: layers of ",
                                        layout.layer_bytes, " bytes, ", store.layer_stride, " apart, in ", bytes.size(),
                                        " bytes"));
        return store;
      }
    }
  }
  return store;
}

}  // namespace

absl::StatusOr<kernels::PlaneMemory> MakePlaneMemory(const v1::AttachRequest& request, const v1::Attached& attached,
                                                     const Arena& arena, const PoolMapping& pool, uint32_t top_k) {
  if (!arena.status().ok()) return arena.status();
  if (top_k < 1 || top_k > request.max_top_k()) {
    return absl::InvalidArgumentError(absl::StrCat("top_k ", top_k, " is not 1 to max_top_k, ", request.max_top_k()));
  }
  const uint64_t state_rows = request.state_rows(), hot_rows = request.hot_rows();
  const uint64_t max_rows = request.max_batch_rows() != 0 ? request.max_batch_rows() : request.state_rows();
  const uint64_t max_top_k = request.max_top_k();
  const uint64_t block_rows = attached.pool().block_rows();
  if (block_rows == 0) return absl::InternalError("pool.block_rows is 0");
  const uint64_t columns = (uint64_t{request.max_sequence_rows()} + block_rows - 1) / block_rows;
  const bool by_pool_row = request.index_space() == v1::INDEX_SPACE_POOL_ROW;
  const uint64_t allowed_words = by_pool_row ? (uint64_t{attached.pool().blocks()} + 63) / 64 : 0;

  const absl::StatusOr<kernels::RowFormat> format = RowFormatOf(attached.pool());
  if (!format.ok()) return format.status();
  const absl::StatusOr<kernels::RowLayout> layout =
      kernels::RowLayout::Make(*format, static_cast<int64_t>(state_rows * arena.region_rows()));
  if (!layout.ok()) return absl::InternalError(absl::StrCat("hot caches: ", layout.status().message()));

  const absl::StatusOr<PlaneMail> mail = arena.Mail();
  if (!mail.ok()) return mail.status();

  Tensors tensors(arena);
  kernels::PlaneMemory plane;
  kernels::BatchArgs& batch = plane.batch;
  batch.state = tensors.Dense<kernels::PlaneState>("state.plane", "u64", {sizeof(kernels::PlaneState) / 8});
  batch.raises_step = true;
  batch.mail.rows = mail->batch_rows;
  batch.mail.sequence_ids = mail->sequence_ids.data();
  batch.mail.state_rows = mail->state_rows.data();
  batch.mail.lengths = mail->lengths.data();
  batch.mail.commits = mail->commits.data();
  batch.mail.statuses = tensors.Dense<int32_t>("statuses", "i32", {max_rows});
  int32_t* const plan = tensors.Dense<int32_t>("state.batch_plan", "i32", {kPlanArrays, max_rows});
  const auto array = [&](PlanArray index) { return plan + index * static_cast<int64_t>(max_rows); };
  batch.plan.rows = tensors.Dense<int32_t>("state.plan_rows", "i32", {1});
  batch.plan.claims = tensors.Dense<int32_t>("state.claims", "i32", {state_rows});
  batch.max_rows = static_cast<int32_t>(max_rows);
  batch.top_k = static_cast<int32_t>(top_k);
  batch.hot_rows = static_cast<int32_t>(hot_rows);
  batch.max_sequence_rows = request.max_sequence_rows();
  batch.session = attached.session_id();
  batch.entries =
      tensors.Dense<kernels::StateRowEntry>("state.entries", "u64", {state_rows, sizeof(kernels::StateRowEntry) / 8});
  batch.state_rows = static_cast<int32_t>(state_rows);
  batch.words = pool.words().data();
  batch.word_count = static_cast<int32_t>(pool.words().size());
  batch.block_table = tensors.Dense<int32_t>("state.block_table", "i32", {state_rows, columns});
  batch.block_table_stride = static_cast<int64_t>(columns);
  batch.block_table_columns = static_cast<int32_t>(columns);
  batch.block_rows = static_cast<int32_t>(block_rows);
  batch.pool_rows = pool.rows().layout.rows;
  batch.region_rows = static_cast<int32_t>(arena.region_rows());
  batch.newest_row = static_cast<int32_t>(arena.newest_row());
  plane.counters = tensors.Dense<uint64_t>("state.counters", "u64", {kernels::kPlaneCounters});
  batch.ended = reinterpret_cast<uint32_t*>(tensors.Dense<int32_t>("ended", "i32", {1}));
  batch.one_row = by_pool_row;
  plane.index_space = by_pool_row ? kernels::IndexSpace::kPoolRow : kernels::IndexSpace::kPosition;
  if (by_pool_row) {
    plane.allowed_blocks = tensors.Dense<uint64_t>("state.allowed_blocks", "u64", {state_rows, allowed_words});
    plane.allowed_stride = static_cast<int64_t>(allowed_words);
  }
  plane.mailbox_stride = static_cast<int64_t>(max_top_k);
  for (int g = 0; g < request.groups_size(); ++g) {
    kernels::PlaneGroup& group = plane.groups.emplace_back();
    for (const uint32_t layer : request.groups(g).layers()) {
      if (layer >= attached.pool().layers()) {
        return absl::InternalError(
            absl::StrCat("groups[", g, "]: layer ", layer, " is not below pool.layers ", attached.pool().layers()));
      }
      group.layers.push_back(static_cast<int32_t>(layer));
    }
    const auto of_group = [g](absl::string_view name) { return absl::StrCat(name, ".", g); };
    group.indices = tensors.Dense<int32_t>(of_group("indices"), "i32", {max_rows, max_top_k});
    group.hot_rows = tensors.Dense<int32_t>(of_group("hot_rows"), "i32", {max_rows, max_top_k});
    group.misses = tensors.Dense<int32_t>(of_group("misses"), "i32", {max_rows});
    group.residency.slot_key = tensors.Dense<int32_t>(of_group("state.slot_key"), "i32", {state_rows, hot_rows});
    group.residency.lru = tensors.Dense<int16_t>(of_group("state.lru"), "i16", {state_rows, hot_rows});
    group.residency.state_rows = batch.state_rows;
    group.residency.hot_rows = batch.hot_rows;
    group.miss_pool_rows = tensors.Dense<int32_t>(of_group("state.miss_pool_rows"), "i32", {max_rows, max_top_k});
    group.miss_hot_rows = tensors.Dense<int32_t>(of_group("state.miss_hot_rows"), "i32", {max_rows, max_top_k});
    group.miss_counts = tensors.Dense<int32_t>(of_group("state.miss_counts"), "i32", {max_rows});
  }
  plane.layers.resize(static_cast<size_t>(pool.rows().layers));
  std::iota(plane.layers.begin(), plane.layers.end(), 0);
  plane.pool = pool.rows();
  plane.hot = HotStore(tensors, *layout, pool.rows().layers);
  // A daemon of a later version may allow more than a launch can have, which is no limit.
  const v1::DirectAccess& direct = attached.direct();
  plane.limits.max_blocks =
      static_cast<int32_t>(std::min<uint64_t>(direct.max_copy_blocks(), std::numeric_limits<int32_t>::max()));
  plane.limits.max_bytes =
      static_cast<int64_t>(std::min<uint64_t>(direct.max_copy_bytes(), std::numeric_limits<int64_t>::max()));
  if (!tensors.status().ok()) return tensors.status();
  // Only now: before, one of the two may be null.
  batch.plan.state_rows = array(kPlanStateRows);
  batch.plan.lengths = array(kPlanLengths);
  batch.plan.newest_pool_rows = array(kPlanNewestPoolRows);
  batch.plan.newest_hot_rows = array(kPlanNewestHotRows);
  batch.plan.words = array(kPlanWords);
  batch.plan.commit_hot_rows = array(kPlanCommitHotRows);
  batch.plan.commit_pool_rows = array(kPlanCommitPoolRows);
  batch.committed_rows = plane.counters + kernels::kPlaneCommittedRows;
  if (absl::Status status = kernels::Validate(batch); !status.ok()) {
    return absl::InternalError(absl::StrCat("direct plane: ", status.message()));
  }
  return plane;
}

}  // namespace stoker::client
