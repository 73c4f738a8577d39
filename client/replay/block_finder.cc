#include "client/replay/block_finder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/status.h"

namespace stoker::replay {
namespace {

// Blocks of one call: 32,768 rows in blocks of 64.
constexpr uint32_t kMaxEntries = 512;

}  // namespace

absl::StatusOr<std::unique_ptr<BlockFinder>> BlockFinder::Attach(const client::Client& client,
                                                                 const v1::AttachRequest& beside, uint32_t block_rows) {
  v1::AttachRequest attach = beside;
  attach.set_name(absl::StrCat(beside.name(), ".b"));
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  attach.set_hot_rows(kMaxEntries);
  attach.set_max_top_k(kMaxEntries);
  attach.set_max_batch_rows(1);
  attach.set_staging_bytes(0);
  attach.clear_groups();
  attach.add_groups()->add_layers(beside.groups(0).layers(0));
  client::SessionOptions options;
  options.reattach_timeout = absl::ZeroDuration();
  options.arena_mapping = client::ArenaMapping::kNever;
  auto session = client.Attach(attach, options);
  if (!session.ok()) return client::Annotate(session.status(), "Attach of the block finder");
  auto finder = std::unique_ptr<BlockFinder>(new BlockFinder(beside.state_rows(), block_rows));
  finder->session_ = *std::move(session);
  return finder;
}

absl::Status BlockFinder::Open(const v1::AdmitItem& item, const OpenSequence& sequence) {
  v1::AdmitRequest request;
  *request.add_items() = item;
  v1::AdmitResponse response;
  absl::Status status = session_->Admit(request, &response);
  if (!status.ok()) return client::Annotate(status, "Admit of the block finder");
  if (response.sequences_size() != 1) return absl::InternalError("Admit: the reply has not one sequence");
  status = client::FromItem(response.sequences(0).status());
  if (!status.ok()) return client::Annotate(status, "Admit of the block finder");
  known_[sequence.state_row] = {response.sequences(0).sequence_id(), {}};
  state_row_of_[sequence.id] = sequence.state_row;
  return absl::OkStatus();
}

absl::Status BlockFinder::Release(absl::Span<const uint64_t> ids) {
  v1::ReleaseRequest request;
  for (const uint64_t id : ids) {
    const auto it = state_row_of_.find(id);
    if (it == state_row_of_.end()) return absl::InternalError(absl::StrCat("sequence ", id, " is not open"));
    request.add_sequence_ids(known_[it->second].id);
    state_row_of_.erase(it);
  }
  v1::ReleaseResponse response;
  absl::Status status = session_->Release(request, &response);
  if (status.ok()) status = client::FirstError(response.statuses());
  return client::Annotate(status, "Release of the block finder");
}

absl::Status BlockFinder::Learn(const OpenSequence& sequence, uint32_t rows) {
  Known& known = known_[sequence.state_row];
  const uint32_t prompt_rows = sequence.request->input_rows;
  const auto can_be_known = [&](uint64_t block) {
    return (block + 1) * block_rows_ <= std::min(prompt_rows, rows) ||
           rows > std::max<uint64_t>(prompt_rows, block * block_rows_);
  };
  while (can_be_known(known.blocks.size())) {
    v1::ResolveRequest request;
    request.set_source(v1::DATA_SOURCE_INLINE);
    request.add_rows()->set_sequence_id(known.id);
    request.mutable_rows(0)->set_length(rows + 1);
    auto* entries = request.mutable_group()->mutable_indices();
    for (uint64_t block = known.blocks.size(); entries->size() < static_cast<int>(kMaxEntries) && can_be_known(block);
         ++block) {
      entries->Add(static_cast<int32_t>(block * block_rows_));
    }
    request.set_top_k(static_cast<uint32_t>(entries->size()));
    v1::ResolveResponse response;
    absl::Status status = session_->Resolve(request, &response);
    if (status.ok()) status = client::FirstError(response.statuses());
    if (!status.ok()) return client::Annotate(status, "Resolve of the block finder");
    const auto& hot_rows = response.result().hot_rows();
    if (hot_rows.size() != entries->size() || response.miss_pool_rows_size() != entries->size() ||
        response.miss_hot_rows_size() != entries->size()) {
      return absl::InternalError(absl::StrCat("Resolve: the plan has ", response.miss_pool_rows_size(), " rows and ",
                                              hot_rows.size(), " answers for ", entries->size(), " new positions"));
    }
    absl::flat_hash_map<int32_t, int32_t> pool_row_at;  // by hot row
    for (int i = 0; i < entries->size(); ++i) pool_row_at[response.miss_hot_rows(i)] = response.miss_pool_rows(i);
    for (const int32_t hot_row : hot_rows) {
      const auto it = pool_row_at.find(hot_row);
      if (it == pool_row_at.end() || it->second % static_cast<int32_t>(block_rows_) != 0) {
        return absl::InternalError(
            absl::StrCat("Resolve: hot row ", hot_row, " is not in the plan as a block's first"));
      }
      known.blocks.push_back(it->second / static_cast<int32_t>(block_rows_));
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::replay
