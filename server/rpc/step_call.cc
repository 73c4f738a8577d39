#include "server/rpc/step_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::rpc {
namespace {

static_assert(sizeof(int32_t) * 2 == sizeof(uint64_t));

// Bytes of a reply beside its arrays: statuses, counts, framing.
constexpr int64_t kReplyBytesPerRow = 64;

}  // namespace

absl::Status StepCall::Begin(const google::protobuf::RepeatedPtrField<v1::StepRow>& rows, uint32_t top_k,
                             v1::DataSource source, int groups, bool plan, core::CallOrder order) {
  if (source != v1::DATA_SOURCE_INLINE && source != v1::DATA_SOURCE_SHARED) {
    return absl::InvalidArgumentError(
        absl::StrCat("source: ", static_cast<int>(source), " given, allowed are INLINE (1) and SHARED (2)"));
  }
  request_.shared = source == v1::DATA_SOURCE_SHARED;
  request_.top_k = top_k;
  request_.gather = !plan;
  request_.order = order;
  if (order.signal && request_.finished == nullptr) {
    // The reply has gone out by then, and this call with it.
    request_.finished = [metrics = service_.metrics](const core::StepResult& result) { Observe(metrics, result); };
  }
  request_.groups.clear();
  request_.rows.clear();
  for (const v1::StepRow& row : rows) {
    core::StepRowRequest& r = request_.rows.emplace_back();
    r.id = core::SequenceId{row.sequence_id()};
    r.length = row.length();
    r.commit = row.commit();
    r.newest_row = row.newest_row();
    r.resident_pages = absl::MakeConstSpan(row.resident_pages().data(), static_cast<size_t>(row.resident_pages_size()));
  }
  // The limits of rows and top_k are core's to check; here they only must not overflow.
  const int64_t entries = std::min<int64_t>(rows.size(), INT32_MAX) * std::min<int64_t>(top_k, INT32_MAX);
  const int64_t arrays = (request_.shared ? 0 : 1) + (plan ? 2 : 0);
  const int64_t bytes = groups * (arrays * std::min<int64_t>(entries, INT64_MAX / 64 / std::max(groups, 1)) * 4 +
                                  rows.size() * kReplyBytesPerRow);
  if (bytes > service_.max_message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("groups: a reply of ", groups, " groups x ", rows.size(),
                                                     " rows x ", top_k, " entries may need ", bytes,
                                                     " bytes, limit max_message_bytes ", service_.max_message_bytes));
  }
  counts_.assign(static_cast<size_t>(groups) * static_cast<size_t>(rows.size()) * core::kOutcomeCount, 0);
  return absl::OkStatus();
}

void StepCall::AddGroup(const v1::StepGroup& group, v1::StepGroupResult* result) {
  const size_t rows = request_.rows.size();
  core::StepGroupRequest& g = request_.groups.emplace_back();
  g.group = group.group();
  g.indices = absl::MakeConstSpan(group.indices().data(), static_cast<size_t>(group.indices_size()));
  g.counts = counts_.data() + (request_.groups.size() - 1) * rows * core::kOutcomeCount;
  result->set_group(group.group());
  if (!request_.shared) {
    result->mutable_hot_rows()->Resize(static_cast<int>(rows) * static_cast<int>(request_.top_k), -1);
    g.hot_rows = result->mutable_hot_rows()->mutable_data();
  }
}

void StepCall::FinishGroup(size_t g, v1::StepGroupResult* result) const {
  const size_t rows = request_.rows.size();
  for (size_t row = 0; row < rows; ++row) {
    const int32_t* counts = counts_.data() + (g * rows + row) * core::kOutcomeCount;
    v1::LookupCounts* proto = result->add_counts();
    proto->set_hot(static_cast<uint32_t>(counts[0]));
    proto->set_newest(static_cast<uint32_t>(counts[1]));
    proto->set_resident(static_cast<uint32_t>(counts[2]));
    proto->set_miss(static_cast<uint32_t>(counts[3]));
    proto->set_duplicate(static_cast<uint32_t>(counts[4]));
    proto->set_invalid(static_cast<uint32_t>(counts[5]));
  }
}

void StepCall::Observe(server::Metrics* metrics, const core::StepResult& result) {
  const double seconds = static_cast<double>(result.device_ns) * 1e-9;
  metrics->ObserveStep(server::StepPlane::kRpc, seconds);
  if (result.gathered_bytes > 0 && seconds > 0) {
    metrics->ObserveGatherRate(static_cast<double>(result.gathered_bytes) / seconds);
  }
}

void StepCall::Run(core::Session& session, const v1::StepRequest& request, v1::StepResponse* response,
                   absl::AnyInvocable<void(absl::Status) &&> done) {
  response->set_boot_epoch(service_.registry->epoch());
  // Core checks the count of entries before anything is written, but the reply is sized here: check what it is sized
  // by.
  absl::Status status = session.CheckStepShape(request.rows_size(), request.top_k(), request.groups_size());
  if (status.ok())
    status = Begin(request.rows(), request.top_k(), request.source(), request.groups_size(), false, OrderOf(request));
  if (!status.ok()) {
    session.RefuseOrder(OrderOf(request));
    std::move(done)(std::move(status));
    return;
  }
  for (const v1::StepGroup& group : request.groups()) AddGroup(group, response->add_groups());
  session.Step(&request_, [this, response, done = std::move(done)](absl::StatusOr<core::StepResult> result) mutable {
    if (result.ok()) {
      for (const absl::Status& s : result->statuses) ToProto(s, response->add_statuses());
    }
    if (result.ok() && !request_.order.signal) {
      for (int g = 0; g < response->groups_size(); ++g)
        FinishGroup(static_cast<size_t>(g), response->mutable_groups(g));
      response->set_gathered_bytes(result->gathered_bytes);
      response->set_device_ns(result->device_ns);
      Observe(service_.metrics, *result);
    }
    std::move(done)(result.status());
  });
}

void StepCall::Run(core::Session& session, const v1::ResolveRequest& request, v1::ResolveResponse* response,
                   absl::AnyInvocable<void(absl::Status) &&> done) {
  response->set_boot_epoch(service_.registry->epoch());
  absl::Status status = session.CheckStepShape(request.rows_size(), request.top_k(), 1);
  if (status.ok()) status = Begin(request.rows(), request.top_k(), request.source(), 1, true, OrderOf(request));
  if (!status.ok()) {
    session.RefuseOrder(OrderOf(request));
    std::move(done)(std::move(status));
    return;
  }
  AddGroup(request.group(), response->mutable_result());
  const size_t rows = request_.rows.size();
  const size_t entries = rows * static_cast<size_t>(request_.top_k);
  plan_.assign(2 * entries + rows, 0);
  request_.groups[0].miss_pool_rows = plan_.data();
  request_.groups[0].miss_hot_rows = plan_.data() + entries;
  request_.groups[0].miss_counts = plan_.data() + 2 * entries;
  session.Step(&request_, [this, response, rows, entries,
                           done = std::move(done)](absl::StatusOr<core::StepResult> result) mutable {
    if (result.ok()) {
      for (const absl::Status& s : result->statuses) ToProto(s, response->add_statuses());
    }
    if (result.ok() && !request_.order.signal) {
      FinishGroup(0, response->mutable_result());
      const size_t top_k = static_cast<size_t>(request_.top_k);
      for (size_t row = 0; row < rows; ++row) {
        const int32_t* pool_rows = plan_.data() + row * top_k;
        const int32_t* hot_rows = pool_rows + entries;
        const int32_t misses = plan_[2 * entries + row];
        response->mutable_miss_pool_rows()->Add(pool_rows, pool_rows + misses);
        response->mutable_miss_hot_rows()->Add(hot_rows, hot_rows + misses);
      }
      Observe(service_.metrics, *result);
    }
    std::move(done)(result.status());
  });
}

}  // namespace stoker::rpc
