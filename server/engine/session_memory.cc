#include "server/engine/session_memory.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/plane.h"
#include "kernels/plane_step.h"
#include "kernels/resolve.h"
#include "server/engine/row_formats.h"

namespace stoker::engine {
namespace {

static_assert(kernels::kStats <= kGatheredBytes);

// Handles of exported memory cover whole pages of this size on a GPU, so an arena is a multiple of it.
constexpr int64_t kArenaAlignment = int64_t{2} << 20;
constexpr int64_t kPartAlignment = 256;
// More than any machine has, and far from overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 46;

// Hands out aligned parts of one piece of memory.
class Cursor {
 public:
  int64_t Take(int64_t bytes) {
    const int64_t offset = used_;
    used_ = RoundUp(used_ + bytes, kPartAlignment);
    return offset;
  }
  int64_t used() const { return used_; }

 private:
  int64_t used_ = 0;
};

core::ArenaTensor Dense(std::string name, int64_t offset, std::vector<uint64_t> shape, std::string element,
                        uint64_t element_bytes) {
  core::ArenaTensor tensor{std::move(name), static_cast<uint64_t>(offset), std::move(shape), {}, std::move(element)};
  tensor.stride_bytes.resize(tensor.shape.size());
  uint64_t stride = element_bytes;
  for (size_t i = tensor.shape.size(); i > 0; --i) {
    tensor.stride_bytes[i - 1] = stride;
    stride *= tensor.shape[i - 1];
  }
  return tensor;
}

void AddHotTensors(SessionMemory& memory, int64_t layer) {
  const kernels::RowLayout& layout = memory.hot_layout;
  const int64_t base = memory.hot + layer * memory.hot_layer_stride;
  const uint64_t rows = static_cast<uint64_t>(memory.hot_total_rows);
  const std::string name = absl::StrCat("hot.", layer);
  for (int p = 0; p < layout.part_count; ++p) {
    const kernels::RowPart& part = layout.part[p];
    core::ArenaTensor tensor;
    tensor.offset_bytes = static_cast<uint64_t>(base + part.offset);
    tensor.element = "u8";
    const uint64_t bytes = static_cast<uint64_t>(part.bytes);
    switch (layout.kind) {
      case kernels::RowLayoutKind::kLinear:
      case kernels::RowLayoutKind::kSplitKv:
        tensor.name = layout.kind == kernels::RowLayoutKind::kLinear ? name : absl::StrCat(name, p == 0 ? ".k" : ".v");
        tensor.shape = {rows, bytes};
        tensor.stride_bytes = {static_cast<uint64_t>(part.row_stride), 1};
        break;
      case kernels::RowLayoutKind::kDsv4Paged:
        tensor.name = absl::StrCat(name, p == 0 ? ".values" : ".scales");
        tensor.shape = {rows / static_cast<uint64_t>(layout.page_rows), static_cast<uint64_t>(layout.page_rows), bytes};
        tensor.stride_bytes = {static_cast<uint64_t>(part.page_stride), static_cast<uint64_t>(part.row_stride), 1};
        break;
    }
    memory.arena.tensors.push_back(std::move(tensor));
  }
}

// What the client library follows on the direct plane.
void AddStateTensors(SessionMemory& memory, const core::SessionSpec& session) {
  const uint64_t state_rows = static_cast<uint64_t>(session.state_rows);
  const uint64_t hot_rows = static_cast<uint64_t>(session.hot_rows);
  const uint64_t batch = static_cast<uint64_t>(session.max_batch_rows);
  const uint64_t top_k = static_cast<uint64_t>(session.max_top_k);
  const auto add = [&](std::string name, int64_t offset, std::vector<uint64_t> shape, std::string element,
                       uint64_t element_bytes) {
    memory.arena.tensors.push_back(Dense(absl::StrCat("state.", name), memory.state_offset + offset, std::move(shape),
                                         std::move(element), element_bytes));
  };
  for (size_t g = 0; g < memory.groups.size(); ++g) {
    const SessionMemory::Group& group = memory.groups[g];
    add(absl::StrCat("slot_key.", g), group.slot_key, {state_rows, hot_rows}, "i32", 4);
    add(absl::StrCat("lru.", g), group.lru, {state_rows, hot_rows}, "i16", 2);
    add(absl::StrCat("miss_pool_rows.", g), group.miss_pool_rows, {batch, top_k}, "i32", 4);
    add(absl::StrCat("miss_hot_rows.", g), group.miss_hot_rows, {batch, top_k}, "i32", 4);
    add(absl::StrCat("miss_counts.", g), group.miss_counts, {batch}, "i32", 4);
  }
  add("block_table", memory.block_table, {state_rows, static_cast<uint64_t>(memory.table_columns)}, "i32", 4);
  if (memory.allowed_words > 0) {
    add("allowed_blocks", memory.allowed_blocks, {state_rows, static_cast<uint64_t>(memory.allowed_words)}, "u64", 8);
  }
  add("entries", memory.entries, {state_rows, sizeof(kernels::StateRowEntry) / 8}, "u64", 8);
  add("plane", memory.plane_state, {sizeof(kernels::PlaneState) / 8}, "u64", 8);
  add("counters", memory.plane_counters, {kernels::kPlaneCounters}, "u64", 8);
  add("batch_plan", memory.batch_plan, {kPlanArrays, batch}, "i32", 4);
  add("plan_rows", memory.plan_rows, {1}, "i32", 4);
  add("claims", memory.claims, {state_rows}, "i32", 4);
}

}  // namespace

absl::StatusOr<SessionMemory> SessionMemory::Make(const core::PoolSpec& pool, const core::SessionSpec& session) {
  SessionMemory memory;
  // The newest rows lie in a block of their own behind the hot rows, so that pages of a paged layout are not shared.
  const int64_t newest_row = RoundUp(session.hot_rows, pool.block_rows);
  const int64_t region_rows = newest_row + pool.block_rows;
  memory.hot_total_rows = session.state_rows * region_rows;
  if (memory.hot_total_rows >= INT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("state_rows: ", session.state_rows, " x ", region_rows, " hot rows given, limit ", INT32_MAX - 1));
  }
  absl::StatusOr<kernels::RowLayout> layout = kernels::RowLayout::Make(FormatOf(pool), memory.hot_total_rows);
  if (!layout.ok()) return layout.status();
  memory.hot_layout = *layout;
  memory.hot_layer_stride = RoundUp(layout->layer_bytes, kLayerAlignment);
  memory.table_columns = (session.max_sequence_rows + pool.block_rows - 1) / pool.block_rows;
  const bool by_pool_row = session.index_space == core::IndexSpace::kPoolRow;
  memory.allowed_words = by_pool_row ? (pool.blocks + 63) / 64 : 0;
  if (memory.hot_layer_stride > kMaxBytes / pool.layers || session.state_rows * memory.table_columns > kMaxBytes / 8) {
    return absl::ResourceExhaustedError(absl::StrCat("state_rows: hot buffers and state of ", session.state_rows,
                                                     " state rows need more than ", kMaxBytes, " bytes"));
  }

  const int64_t batch = session.max_batch_rows;
  const int64_t entries = batch * session.max_top_k;
  Cursor arena;
  Cursor state;
  memory.hot = arena.Take(memory.hot_layer_stride * pool.layers);
  memory.groups.resize(session.groups.size());
  for (Group& group : memory.groups) {
    group.indices = arena.Take(entries * 4);
    group.hot_rows = arena.Take(entries * 4);
    group.misses = arena.Take(batch * 4);
    group.slot_key = state.Take(session.state_rows * session.hot_rows * 4);
    group.lru = state.Take(session.state_rows * session.hot_rows * 2);
    group.miss_pool_rows = state.Take(entries * 4);
    group.miss_hot_rows = state.Take(entries * 4);
    group.miss_counts = state.Take(batch * 4);
    group.counts = state.Take(batch * core::kOutcomeCount * 4);
  }
  memory.staging = arena.Take(session.staging_bytes);
  memory.block_table = state.Take(session.state_rows * memory.table_columns * 4);
  memory.resident_table = state.Take(session.state_rows * memory.table_columns * 4);
  memory.allowed_blocks = state.Take(session.state_rows * memory.allowed_words * 8);
  memory.step_arguments = state.Take(kStepArguments * batch * 4);
  memory.source_rows = state.Take(kChunkRows * 4);
  memory.target_rows = state.Take(kChunkRows * 4);
  memory.keys = state.Take(kChunkRows * 8);
  memory.counters = state.Take(kCounters * 8);
  memory.newest = state.Take(batch * pool.layers * pool.bytes_per_row());
  const int64_t doorbells = static_cast<int64_t>(session.groups.size()) + 1;
  memory.requests = arena.Take(doorbells * kDoorbellBytes);
  memory.dones = arena.Take(doorbells * kDoorbellBytes);
  memory.ended = arena.Take(4);
  memory.batch_rows = arena.Take(4);
  memory.sequence_ids = arena.Take(batch * 8);
  memory.state_rows = arena.Take(batch * 4);
  memory.lengths = arena.Take(batch * 4);
  memory.commits = arena.Take(batch * 4);
  memory.statuses = arena.Take(batch * 4);
  memory.engine_word = arena.Take(kDoorbellBytes);
  memory.daemon_word = arena.Take(kDoorbellBytes);
  memory.aborted = state.Take(4);
  memory.entries = state.Take(session.state_rows * static_cast<int64_t>(sizeof(kernels::StateRowEntry)));
  memory.plane_state = state.Take(sizeof(kernels::PlaneState));
  memory.plane_counters = state.Take(kernels::kPlaneCounters * 8);
  memory.batch_plan = state.Take(kPlanArrays * batch * 4);
  memory.plan_rows = state.Take(4);
  memory.claims = state.Take(session.state_rows * 4);
  if (session.direct) {
    memory.state_offset = arena.Take(state.used());
  } else {
    memory.private_bytes = state.used();
  }
  memory.arena_bytes = RoundUp(arena.used(), kArenaAlignment);

  memory.arena.size_bytes = static_cast<uint64_t>(memory.arena_bytes);
  memory.arena.region_rows = static_cast<int32_t>(region_rows);
  memory.arena.newest_row = static_cast<int32_t>(newest_row);
  for (int64_t layer = 0; layer < pool.layers; ++layer) AddHotTensors(memory, layer);
  const uint64_t rows = static_cast<uint64_t>(batch), top_k = static_cast<uint64_t>(session.max_top_k);
  for (size_t g = 0; g < memory.groups.size(); ++g) {
    const Group& group = memory.groups[g];
    memory.arena.tensors.push_back(Dense(absl::StrCat("indices.", g), group.indices, {rows, top_k}, "i32", 4));
    memory.arena.tensors.push_back(Dense(absl::StrCat("hot_rows.", g), group.hot_rows, {rows, top_k}, "i32", 4));
    memory.arena.tensors.push_back(Dense(absl::StrCat("misses.", g), group.misses, {rows}, "i32", 4));
  }
  memory.arena.tensors.push_back(
      Dense("staging", memory.staging, {static_cast<uint64_t>(session.staging_bytes)}, "u8", 1));
  for (const auto& [name, offset] : {std::pair("request", memory.requests), std::pair("done", memory.dones)}) {
    core::ArenaTensor tensor = Dense(name, offset, {static_cast<uint64_t>(doorbells)}, "u64", 8);
    tensor.stride_bytes = {static_cast<uint64_t>(kDoorbellBytes)};
    memory.arena.tensors.push_back(std::move(tensor));
  }
  memory.arena.tensors.push_back(Dense("ended", memory.ended, {1}, "i32", 4));
  memory.arena.tensors.push_back(Dense("batch_rows", memory.batch_rows, {1}, "i32", 4));
  memory.arena.tensors.push_back(Dense("sequence_ids", memory.sequence_ids, {rows}, "u64", 8));
  memory.arena.tensors.push_back(Dense("state_rows", memory.state_rows, {rows}, "i32", 4));
  memory.arena.tensors.push_back(Dense("lengths", memory.lengths, {rows}, "i32", 4));
  memory.arena.tensors.push_back(Dense("commits", memory.commits, {rows}, "i32", 4));
  memory.arena.tensors.push_back(Dense("statuses", memory.statuses, {rows}, "i32", 4));
  memory.arena.tensors.push_back(Dense("engine_word", memory.engine_word, {1}, "u64", 8));
  memory.arena.tensors.push_back(Dense("daemon_word", memory.daemon_word, {1}, "u64", 8));
  if (session.direct) AddStateTensors(memory, session);
  return memory;
}

}  // namespace stoker::engine
