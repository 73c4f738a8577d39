// The host-side checks of every operation. A backend runs them before it enqueues anything, so an implementation may
// rely on them; values in device memory are its own to check.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/field_check.h"
#include "kernels/gather.h"
#include "kernels/invalidate.h"
#include "kernels/order_word.h"
#include "kernels/plane.h"
#include "kernels/resolve.h"
#include "kernels/transfer.h"

namespace stoker::kernels {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxStateRows = 1 << 20;
constexpr int64_t kMaxStride = int64_t{1} << 40;

static_assert(kMaxStateRows * kMaxHotRows < kMaxStride);

void CheckIndexSpace(FieldCheck& check, IndexSpace index_space) {
  check.InRange("index_space", static_cast<int64_t>(index_space), static_cast<int64_t>(IndexSpace::kPosition),
                static_cast<int64_t>(IndexSpace::kPoolRow));
}

void CheckResidency(FieldCheck& check, const Residency& residency) {
  check.InRange("residency.state_rows", residency.state_rows, 1, kMaxStateRows)
      .InRange("residency.hot_rows", residency.hot_rows, 1, kMaxHotRows)
      .Required("residency.slot_key", residency.slot_key)
      .Required("residency.lru", residency.lru);
}

FieldCheck& CheckIntArray(FieldCheck& check, absl::string_view field, const IntArray& array) {
  const size_t alignment = array.is_int64 ? alignof(int64_t) : alignof(int32_t);
  return check.Required(field, static_cast<const std::byte*>(array.data), alignment);
}

void CheckStore(FieldCheck& check, absl::string_view field, const RowStore& store) {
  check.Within(field)
      .InRange("layers", store.layers, 1, kMaxLayers)
      .InRange("layer_stride", store.layer_stride, 0, kMaxStride)
      .MultipleOf("layer_stride", store.layer_stride, 4)
      .InRange("layout.part_count", store.layout.part_count, 1, 2)
      .InRange("layout.page_rows", store.layout.page_rows, 1, kMaxBlockRows)
      .Required("base", store.base, 4);
  if (store.layers > 1) {
    check.AtLeast("layer_stride", store.layer_stride, store.layout.layer_bytes, "layout.layer_bytes");
  }
  check.Within("");
}

void CheckEqualParts(FieldCheck& check, absl::string_view field, const RowLayout& a, const RowLayout& b) {
  check.Within(field).InRange("layout.part_count", a.part_count, b.part_count, b.part_count);
  for (int32_t p = 0; check.ok() && p < a.part_count; ++p) {
    check.InRange(p == 0 ? "layout.part[0].bytes" : "layout.part[1].bytes", a.part[p].bytes, b.part[p].bytes,
                  b.part[p].bytes);
  }
  check.Within("");
}

void CheckLayers(FieldCheck& check, absl::string_view field, const int32_t* layers, int32_t count, int32_t limit) {
  check.Required(field, layers);
  for (int32_t i = 0; check.ok() && i < count; ++i) {
    if (layers[i] < 0 || layers[i] >= limit) check.InRange(absl::StrCat(field, "[", i, "]"), layers[i], 0, limit - 1);
  }
}

void CheckAttention(FieldCheck& check, int64_t attention_block_stride, int32_t hot_block_rows) {
  check.AtLeast("attention_block_stride", attention_block_stride, hot_block_rows, "hot_block_rows")
      .InRange("attention_block_stride", attention_block_stride, 1, kMaxInt32);
}

void CheckResolveTables(FieldCheck& check, const ResolveArgs& args) {
  check.InRange("block_rows", args.block_rows, 1, kMaxBlockRows).InRange("pool_rows", args.pool_rows, 0, kMaxInt32);
  if (args.index_space == IndexSpace::kPosition) {
    check.InRange("block_table_rows", args.block_table_rows, 0, kMaxInt32)
        .InRange("block_table_columns", args.block_table_columns, 0, kMaxInt32)
        .AtLeast("block_table_stride", args.block_table_stride, args.block_table_columns, "block_table_columns")
        .InRange("block_table_stride", args.block_table_stride, 0, kMaxStride);
  } else {
    check.Holds("resident_table", args.resident_table == nullptr, "is set, but needs index_space kPosition");
  }
  if (args.allowed_blocks != nullptr) {
    check.Holds("allowed_blocks", args.index_space == IndexSpace::kPoolRow, "is set, but needs index_space kPoolRow")
        .InRange("allowed_stride", args.allowed_stride, 1, kMaxStride)
        .Aligned("allowed_blocks", args.allowed_blocks);
  }
  if (args.resident_table != nullptr) {
    check.InRange("resident_rows", args.resident_rows, 0, kMaxInt32)
        .InRange("resident_columns", args.resident_columns, 0, kMaxInt32)
        .AtLeast("resident_stride", args.resident_stride, args.resident_columns, "resident_columns")
        .InRange("resident_stride", args.resident_stride, 0, kMaxStride)
        .Aligned("resident_table", args.resident_table);
  }
  if (args.request_states != nullptr) {
    check.InRange("request_count", args.request_count, 0, kMaxInt32).Aligned("request_states", args.request_states);
  }
}

void CheckResolveHotRows(FieldCheck& check, const ResolveArgs& args) {
  check.InRange("hot_block_rows", args.hot_block_rows, 1, kMaxBlockRows)
      .AtLeast("newest_row", args.newest_row, args.residency.hot_rows, "residency.hot_rows");
  if (!check.ok()) return;
  if (args.hot_block_table == nullptr) {
    check.AtLeast("region_rows", args.region_rows, int64_t{args.newest_row} + 1, "newest_row + 1")
        .AtMost("residency.state_rows x region_rows", int64_t{args.residency.state_rows} * args.region_rows, kMaxInt32,
                "2^31 - 1");
  } else {
    check
        .InRange("hot_block_stride", args.hot_block_stride, int64_t{args.newest_row} / args.hot_block_rows + 1,
                 kMaxStride)
        .Aligned("hot_block_table", args.hot_block_table);
  }
}

void CheckResolveOutputs(FieldCheck& check, const ResolveArgs& args) {
  check.AtLeast("hot_rows_out_stride", args.hot_rows_out_stride, args.top_k, "top_k")
      .InRange("hot_rows_out_stride", args.hot_rows_out_stride, 1, kMaxStride);
  if (args.attention_indices != nullptr) {
    check.AtLeast("attention_stride", args.attention_stride, args.top_k, "top_k")
        .InRange("attention_stride", args.attention_stride, 1, kMaxStride)
        .Aligned("attention_indices", args.attention_indices);
    CheckAttention(check, args.attention_block_stride, args.hot_block_rows);
  }
  if (args.valid_counts != nullptr) {
    check.InRange("valid_count_stride", args.valid_count_stride, 1, kMaxStride)
        .Aligned("valid_counts", args.valid_counts);
  }
  const int compact =
      (args.miss_pool_rows != nullptr) + (args.miss_hot_rows != nullptr) + (args.miss_counts != nullptr);
  check
      .Holds("miss_pool_rows, miss_hot_rows, miss_counts", compact == 0 || compact == 3,
             absl::StrCat(compact, " of 3 are set, which must be 0 or 3"))
      .Aligned("miss_pool_rows", args.miss_pool_rows)
      .Aligned("miss_hot_rows", args.miss_hot_rows)
      .Aligned("miss_counts", args.miss_counts)
      .Aligned("told_miss_counts", args.told_miss_counts)
      .Aligned("resolved_pool_rows", args.resolved_pool_rows)
      .Aligned("miss_mask", args.miss_mask)
      .Aligned("counts", args.counts)
      .Aligned("stats", args.stats);
}

void CheckLimits(FieldCheck& check, const CopyLimits& limits) {
  check.InRange("limits.max_blocks", limits.max_blocks, 0, kMaxInt32)
      .InRange("limits.max_bytes", limits.max_bytes, 0, std::numeric_limits<int64_t>::max());
}

template <typename Args>
void CheckGather(FieldCheck& check, const Args& args) {
  check.InRange("rows", args.rows, 0, kMaxBatchRows)
      .InRange("top_k", args.top_k, 1, kMaxTopK)
      .InRange("layer_count", args.layer_count, 0, kMaxLayers);
  if constexpr (requires { args.limits; }) CheckLimits(check, args.limits);
  if (args.rows == 0 || args.layer_count == 0) return;
  CheckStore(check, "pool", args.pool);
  CheckStore(check, "hot", args.hot);
  check.InRange("pool_rows", args.pool_rows, 0, args.pool.layout.rows)
      .InRange("hot_rows", args.hot_rows, 0, args.hot.layout.rows);
  CheckEqualParts(check, "pool", args.pool.layout, args.hot.layout);
  CheckLayers(check, "layers", args.layers, args.layer_count, std::min(args.pool.layers, args.hot.layers));
  check.Aligned("gathered_bytes", args.gathered_bytes);
}

void CheckMail(FieldCheck& check, const BatchMail& mail) {
  check.Within("mail")
      .Required("rows", mail.rows)
      .Required("sequence_ids", mail.sequence_ids)
      .Required("state_rows", mail.state_rows)
      .Required("lengths", mail.lengths)
      .Required("commits", mail.commits)
      .Required("statuses", mail.statuses)
      .Within("");
}

void CheckPlan(FieldCheck& check, const BatchPlan& plan) {
  check.Within("plan")
      .Required("rows", plan.rows)
      .Required("state_rows", plan.state_rows)
      .Required("lengths", plan.lengths)
      .Required("newest_pool_rows", plan.newest_pool_rows)
      .Required("newest_hot_rows", plan.newest_hot_rows)
      .Required("words", plan.words)
      .Required("commit_hot_rows", plan.commit_hot_rows)
      .Required("commit_pool_rows", plan.commit_pool_rows)
      .Required("claims", plan.claims)
      .Within("");
}

}  // namespace

absl::Status Validate(const ResolveArgs& args) {
  FieldCheck check("resolve");
  CheckIndexSpace(check, args.index_space);
  check.InRange("rows", args.rows, 0, kMaxBatchRows).InRange("top_k", args.top_k, 1, kMaxTopK);
  CheckResidency(check, args.residency);
  check.AtMost("top_k", args.top_k, args.residency.hot_rows, "residency.hot_rows")
      .AtLeast("entry_stride", args.entry_stride, args.top_k, "top_k")
      .InRange("entry_stride", args.entry_stride, 1, kMaxStride);
  CheckResolveTables(check, args);
  CheckResolveHotRows(check, args);
  CheckResolveOutputs(check, args);
  if (args.rows > 0) {
    check.Required("entries", args.entries).Required("hot_rows_out", args.hot_rows_out);
    CheckIntArray(check, "state_rows", args.state_rows).Aligned("real_rows", args.real_rows);
    if (args.index_space == IndexSpace::kPosition) {
      CheckIntArray(check, "lengths", args.lengths).Required("block_table", args.block_table);
    } else {
      check.Aligned("newest_pool_rows", args.newest_pool_rows);
    }
  }
  return check.status();
}

absl::Status Validate(const GatherCompactArgs& args) {
  FieldCheck check("gather");
  CheckGather(check, args);
  if (args.rows > 0 && args.layer_count > 0) {
    check.Required("miss_pool_rows", args.miss_pool_rows)
        .Required("miss_hot_rows", args.miss_hot_rows)
        .Required("miss_counts", args.miss_counts);
  }
  return check.status();
}

absl::Status Validate(const GatherDenseArgs& args) {
  FieldCheck check("gather");
  CheckGather(check, args);
  check.InRange("hot_block_rows", args.hot_block_rows, 1, kMaxBlockRows);
  if (args.attention_indices != nullptr) {
    CheckAttention(check, args.attention_block_stride, args.hot_block_rows);
    check.Aligned("attention_indices", args.attention_indices);
  }
  if (args.rows > 0) {
    check.Required("entry_pool_rows", args.entry_pool_rows)
        .Required("entry_hot_rows", args.entry_hot_rows)
        .Required("miss_mask", args.miss_mask)
        .Aligned("state_rows", args.state_rows);
  }
  return check.status();
}

absl::Status Validate(const TransferArgs& args) {
  FieldCheck check("transfer");
  check.InRange("count", args.count, 0, kMaxInt32).InRange("layer_count", args.layer_count, 0, kMaxLayers);
  CheckLimits(check, args.limits);
  if (!check.ok() || args.count == 0 || args.layer_count == 0) return check.status();
  CheckStore(check, "src", args.src);
  CheckStore(check, "dst", args.dst);
  check.InRange("src_row_limit", args.src_row_limit, 0, args.src.layout.rows)
      .InRange("dst_row_limit", args.dst_row_limit, 0, args.dst.layout.rows);
  CheckEqualParts(check, "src", args.src.layout, args.dst.layout);
  CheckLayers(check, "src_layers", args.src_layers, args.layer_count, args.src.layers);
  CheckLayers(check, "dst_layers", args.dst_layers, args.layer_count, args.dst.layers);
  check.Required("src_rows", args.src_rows)
      .Required("dst_rows", args.dst_rows)
      .Aligned("transferred_bytes", args.transferred_bytes)
      .Aligned("skip", args.skip);
  return check.status();
}

absl::Status Validate(const InvalidateArgs& args) {
  FieldCheck check("invalidate");
  CheckResidency(check, args.residency);
  check.InRange("count", args.count, 0, kMaxInt32);
  if (args.count > 0) check.Required("state_rows", args.state_rows).Required("keys", args.keys);
  return check.status();
}

absl::Status Validate(const ResetArgs& args) {
  FieldCheck check("reset");
  CheckResidency(check, args.residency);
  check.InRange("count", args.count, 0, kMaxInt32);
  if (args.count > 0) check.Required("state_rows", args.state_rows);
  return check.status();
}

absl::Status Validate(const PlaceArgs& args) {
  FieldCheck check("place");
  CheckResidency(check, args.residency);
  check.InRange("state_row", args.state_row, 0, int64_t{args.residency.state_rows} - 1)
      .InRange("first_position", args.first_position, 0, args.residency.hot_rows)
      .InRange("count", args.count, 0, args.residency.hot_rows)
      .AtMost("first_position + count", int64_t{args.first_position} + args.count, args.residency.hot_rows,
              "residency.hot_rows");
  return check.status();
}

absl::Status Validate(const AwaitDoorbellArgs& args) {
  FieldCheck check("await_doorbell");
  check.Required("state", args.state).Required("request", args.request).Required("abort", args.abort);
  return check.status();
}

absl::Status Validate(const RingDoorbellArgs& args) {
  FieldCheck check("ring_doorbell");
  check.Required("state", args.state).Required("done", args.done);
  return check.status();
}

absl::Status Validate(const AwaitQuietArgs& args) {
  FieldCheck check("await_quiet");
  check.Required("state", args.state).Aligned("abort", args.abort);
  return check.status();
}

absl::Status Validate(const AwaitOrderArgs& args) {
  FieldCheck check("await_order");
  check.Required("word", args.word)
      .InRange("number", static_cast<int64_t>(args.number), 1, static_cast<int64_t>(kMaxOrder))
      .Required("abort", args.abort)
      .Required("aborted", args.aborted);
  return check.status();
}

absl::Status Validate(const SignalOrderArgs& args) {
  FieldCheck check("signal_order");
  check.Required("word", args.word)
      .InRange("number", static_cast<int64_t>(args.number), 1, static_cast<int64_t>(kMaxOrder))
      .Aligned("aborted", args.aborted);
  return check.status();
}

absl::Status Validate(const BatchArgs& args) {
  FieldCheck check("batch");
  check.Required("state", args.state);
  CheckMail(check, args.mail);
  CheckPlan(check, args.plan);
  check.InRange("max_rows", args.max_rows, 1, kMaxBatchRows)
      .InRange("hot_rows", args.hot_rows, 1, kMaxHotRows)
      .InRange("top_k", args.top_k, 1, kMaxTopK)
      .AtMost("top_k", args.top_k, args.hot_rows, "hot_rows")
      .InRange("max_sequence_rows", args.max_sequence_rows, 1, kMaxInt32)
      .Holds("session", args.session != 0, "0 is nobody's, the smallest is 1")
      .InRange("state_rows", args.state_rows, 1, kMaxStateRows)
      .Required("entries", args.entries)
      .InRange("word_count", args.word_count, 1, kMaxInt32)
      .Required("words", args.words)
      .InRange("block_table_columns", args.block_table_columns, 0, kMaxInt32)
      .AtLeast("block_table_stride", args.block_table_stride, args.block_table_columns, "block_table_columns")
      .InRange("block_table_stride", args.block_table_stride, 0, kMaxStride)
      .Required("block_table", args.block_table)
      .InRange("block_rows", args.block_rows, 1, kMaxBlockRows)
      .InRange("pool_rows", args.pool_rows, 0, kMaxInt32)
      .AtLeast("newest_row", args.newest_row, args.hot_rows, "hot_rows")
      .AtLeast("region_rows", args.region_rows, int64_t{args.newest_row} + args.block_rows, "newest_row + block_rows")
      .AtMost("state_rows x region_rows", int64_t{args.state_rows} * args.region_rows, kMaxInt32, "2^31 - 1")
      .Aligned("committed_rows", args.committed_rows)
      .Aligned("ended", args.ended);
  return check.status();
}

}  // namespace stoker::kernels
