#include "client/replay/engine_session.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/status.h"

namespace stoker::replay {
namespace {

// A staging area of this size keeps a Store's copy in the last-level cache, and one call still moves thousands of rows.
constexpr uint64_t kStagingBytes = uint64_t{8} << 20;
constexpr uint64_t kStagingAlignment = 64;
// Room in a message for what is not row bytes.
constexpr uint64_t kMessageOverhead = 4096;
constexpr uint64_t kMaxInlineStoreBytes = uint64_t{4} << 20;
// An admission may wait while another engine stores a prefix of up to a few GB.
constexpr absl::Duration kAdmitTimeout = absl::Seconds(120);
constexpr uint32_t kMaxReadRows = 65536;

v1::RowLayout LayoutOf(const Options& options) {
  if (options.row_layout == "split_kv") return v1::ROW_LAYOUT_SPLIT_KV;
  if (options.row_layout == "dsv4_paged") return v1::ROW_LAYOUT_DSV4_PAGED;
  return v1::ROW_LAYOUT_LINEAR;
}

// Runs `call` and adds its duration to the histogram.
template <typename F>
absl::Status Timed(RankReport* report, Call kind, F&& call) {
  const auto begin = std::chrono::steady_clock::now();
  absl::Status status = call();
  const auto took = std::chrono::steady_clock::now() - begin;
  report->calls[static_cast<int>(kind)].Add(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()));
  return status.ok() ? status : client::Annotate(status, CallName(kind));
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineSession>> EngineSession::Open(const Options& options, const SessionNeeds& needs,
                                                                   RankReport* report) {
  auto client = client::Client::Connect(needs.address);
  if (!client.ok()) return client.status();
  auto session = std::unique_ptr<EngineSession>(new EngineSession(options, report));
  if (absl::Status status = session->CreatePool(*client, needs); !status.ok()) return status;
  if (absl::Status status = session->Attach(*client, needs); !status.ok()) return status;
  return session;
}

absl::Status EngineSession::CreatePool(const client::Client& client, const SessionNeeds& needs) {
  v1::GetPoolRequest get;
  get.set_name(options_.pool);
  const absl::Status found = client.GetPool(get).status();
  if (!found.ok() && !absl::IsNotFound(found)) return client::Annotate(found, "GetPool");
  // Ranks start together, so several may find it absent; creating it with an equal spec succeeds for all.
  v1::CreatePoolRequest create;
  v1::PoolSpec& spec = *create.mutable_spec();
  spec.set_name(options_.pool);
  spec.set_layers(options_.layers);
  spec.set_row_layout(LayoutOf(options_));
  spec.set_row_bytes(options_.row_bytes);
  spec.set_v_row_bytes(options_.v_row_bytes);
  spec.set_block_rows(options_.block_rows);
  spec.set_prefix_rows(kPrefixBlockRows);
  spec.set_blocks(needs.pool_blocks);
  client::CallOptions call;
  call.timeout = absl::Minutes(5);  // a big pool is touched page by page
  const absl::Status created = client.CreatePool(create, call).status();
  if (!created.ok()) return client::Annotate(created, absl::StrCat("pool \"", options_.pool, "\""));
  report_->created_pool = !found.ok();
  return absl::OkStatus();
}

absl::Status EngineSession::Attach(const client::Client& client, const SessionNeeds& needs) {
  const uint64_t row_bytes = uint64_t{oracle_.shape().bytes()} * options_.layers;
  v1::AttachRequest attach;
  attach.set_pool(options_.pool);
  attach.set_name(needs.name);
  attach.set_state_rows(needs.state_rows);
  attach.set_hot_rows(options_.hot_rows);
  attach.set_max_top_k(options_.top_k);
  attach.set_max_batch_rows(needs.state_rows);
  attach.set_max_sequence_rows(needs.max_sequence_rows);
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  for (uint32_t group = 0; group < options_.groups; ++group) {
    v1::IndexGroup* layers = attach.add_groups();
    for (uint32_t layer = options_.GroupBegin(group); layer < options_.GroupBegin(group + 1); ++layer) {
      layers->add_layers(layer);
    }
  }
  if (needs.stores && options_.transfer != "inline") {
    const uint64_t bytes = std::max(std::min(kStagingBytes, row_bytes * needs.max_sequence_rows), row_bytes);
    attach.set_staging_bytes((bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment);
  }

  client::SessionOptions session_options;
  // A restarted daemon has none of the sequences: the replay has failed then.
  session_options.reattach_timeout = absl::ZeroDuration();
  session_options.arena_mapping = options_.transfer == "inline"   ? client::ArenaMapping::kNever
                                  : options_.transfer == "shared" ? client::ArenaMapping::kRequired
                                                                  : client::ArenaMapping::kWherePossible;
  auto session = client.Attach(attach, session_options);
  if (!session.ok()) return client::Annotate(session.status(), "Attach");
  session_ = *std::move(session);

  const v1::Attached info = session_->info();
  region_rows_ = info.arena().region_rows();
  newest_row_ = info.arena().newest_row();
  const uint64_t message_bytes = std::max(info.limits().max_message_bytes(), 2 * kMessageOverhead) - kMessageOverhead;
  read_chunk_bytes_ = message_bytes;
  store_chunk_bytes_ = std::min(message_bytes, kMaxInlineStoreBytes);
  if (session_->arena()->status().ok()) {
    arena_ = session_->arena();
    if (absl::Status status = MapViews(); !status.ok()) return client::Annotate(status, "arena");
    if (needs.stores) store_chunk_bytes_ = staging_.size();
  }
  report_->shared_arena = shared();
  if (!shared() && row_bytes > store_chunk_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a row of all layers has ", row_bytes, " bytes; a message carries at most ", store_chunk_bytes_));
  }
  return absl::OkStatus();
}

absl::Status EngineSession::MapViews() {
  for (uint32_t layer = 0; layer < options_.layers; ++layer) {
    for (int part = 0; part < oracle_.shape().parts(); ++part) {
      auto view = arena_->HotPart(layer, static_cast<client::RowPart>(part));
      if (!view.ok()) return view.status();
      if (view->row_bytes() != oracle_.shape().part_bytes[part]) {
        return absl::InternalError(absl::StrCat("layer ", layer, " part ", part, " has ", view->row_bytes(),
                                                " bytes a row; ", oracle_.shape().part_bytes[part], " were asked for"));
      }
      hot_parts_.push_back(*view);
    }
  }
  auto staging = arena_->Staging();
  if (!staging.ok()) return staging.status();
  staging_ = *staging;
  return absl::OkStatus();
}

absl::StatusOr<OpenSequence> EngineSession::Admit(const Request& request, const std::string& key, uint32_t max_rows) {
  admit_request_.Clear();
  v1::AdmitItem* item = admit_request_.add_items();
  item->set_sequence_key(key);
  item->set_prompt_rows(request.input_rows);
  item->set_max_rows(max_rows);
  for (const uint64_t id : request.hash_ids) AppendBlockHash(id, item->mutable_block_hashes());
  item->set_wait_for_prefix(true);
  client::CallOptions call;
  call.timeout = kAdmitTimeout;
  absl::Status status =
      Timed(report_, Call::kAdmit, [&] { return session_->Admit(admit_request_, &admit_response_, call); });
  if (!status.ok()) return status;
  if (admit_response_.sequences_size() != 1) return absl::InternalError("Admit: the reply has not one sequence");
  const v1::AdmittedSequence& admitted = admit_response_.sequences(0);
  status = client::FromItem(admitted.status());
  if (!status.ok()) return client::Annotate(status, absl::StrCat("Admit of request ", request.number));
  return OpenSequence{&request, admitted.sequence_id(), admitted.state_row(), admitted.matched_rows(),
                      admitted.writer()};
}

absl::Status EngineSession::Store(const OpenSequence& sequence, uint32_t first, uint32_t end) {
  const uint64_t row_bytes = oracle_.shape().bytes();
  const uint32_t chunk_rows =
      static_cast<uint32_t>(std::min<uint64_t>(store_chunk_bytes_ / (row_bytes * options_.layers), kMaxSequenceRows));
  while (first < end) {
    const uint32_t count = std::min(chunk_rows, end - first);
    if (store_request_.items_size() == 0) store_request_.add_items();
    v1::StoreItem* item = store_request_.mutable_items(0);
    item->mutable_range()->set_sequence_id(sequence.id);
    item->mutable_range()->set_first_row(first);
    item->mutable_range()->set_row_count(count);
    std::byte* out;
    if (shared()) {
      item->set_source(v1::DATA_SOURCE_SHARED);
      out = staging_.data();
    } else {
      item->set_source(v1::DATA_SOURCE_INLINE);
      item->mutable_rows()->resize(row_bytes * options_.layers * count);
      out = reinterpret_cast<std::byte*>(item->mutable_rows()->data());
    }
    for (uint32_t layer = 0; layer < options_.layers; ++layer) {
      out = FillRequestRows(oracle_, *sequence.request, layer, first, count, out);
    }
    absl::Status status =
        Timed(report_, Call::kStore, [&] { return session_->Store(store_request_, &store_response_); });
    if (status.ok()) status = client::FirstError(store_response_.statuses());
    if (!status.ok()) return client::Annotate(status, absl::StrCat("request ", sequence.request->number));
    report_->stored_bytes.Add(store_response_.stored_bytes());
    report_->stored_rows.Add(store_response_.stored_bytes() / (row_bytes * options_.layers));
    first += count;
  }
  return absl::OkStatus();
}

absl::Status EngineSession::Release(absl::Span<const uint64_t> ids) {
  release_request_.Clear();
  release_request_.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  absl::Status status =
      Timed(report_, Call::kRelease, [&] { return session_->Release(release_request_, &release_response_); });
  return status.ok() ? client::Annotate(client::FirstError(release_response_.statuses()), "Release") : status;
}

absl::Status EngineSession::Step(const v1::StepRequest& request, v1::StepResponse* response) {
  absl::Status status = Timed(report_, Call::kStep, [&] { return session_->Step(request, response); });
  if (status.ok()) status = client::Annotate(client::FirstError(response->statuses()), "Step");
  return status;
}

void EngineSession::WriteNewest(const OpenSequence& sequence, uint32_t position, v1::StepRow* row) {
  const RowShape& shape = oracle_.shape();
  const TokenIdentity token = sequence.request->Token(position);
  if (shared()) {
    const size_t hot_row = arena_->RegionBegin(sequence.state_row) + newest_row_;
    const int parts = shape.parts();
    for (uint32_t layer = 0; layer < options_.layers; ++layer) {
      const uint64_t key = RowOracle::Key(layer, token);
      for (int part = 0; part < parts; ++part) {
        oracle_.FillPart(key, part, hot_parts_[layer * static_cast<size_t>(parts) + part][hot_row].data());
      }
    }
    return;
  }
  row->mutable_newest_row()->resize(size_t{shape.bytes()} * options_.layers);
  std::byte* out = reinterpret_cast<std::byte*>(row->mutable_newest_row()->data());
  for (uint32_t layer = 0; layer < options_.layers; ++layer, out += shape.bytes()) {
    oracle_.Fill(RowOracle::Key(layer, token), out);
  }
}

bool EngineSession::RowIsRight(uint32_t layer, uint64_t key, uint32_t hot_row) const {
  const int parts = oracle_.shape().parts();
  const client::HotPartView* views = &hot_parts_[layer * static_cast<size_t>(parts)];
  return oracle_.CheckPart(key, 0, views[0][hot_row].data()) &&
         (parts == 1 || oracle_.CheckPart(key, 1, views[1][hot_row].data()));
}

void EngineSession::CountWrong(const OpenSequence& sequence, uint32_t layer, int32_t position, int32_t hot_row) {
  report_->wrong_rows.Add(1);
  report_->SetWrongRow(absl::StrFormat("request %d, position %d, layer %d: hot row %d of state row %d",
                                       sequence.request->number, position, layer, hot_row, sequence.state_row)
                           .c_str());
}

absl::Status EngineSession::CheckRows(const OpenSequence& sequence, uint32_t group, uint32_t length,
                                      absl::Span<const int32_t> positions, absl::Span<const int32_t> hot_rows) {
  const uint32_t first_layer = options_.GroupBegin(group), end_layer = options_.GroupBegin(group + 1);
  const int64_t region_begin = int64_t{sequence.state_row} * region_rows_;
  uint64_t checked = 0;
  read_request_.Clear();
  read_positions_.clear();
  for (size_t i = 0; i < positions.size(); ++i) {
    const int32_t position = positions[i], hot_row = hot_rows[i];
    const int64_t slot = hot_row - region_begin;
    const bool newest = position == static_cast<int32_t>(length) - 1;
    // An answer that cannot be right is as bad as wrong bytes: a row for no entry, none for an entry, or one of others.
    const bool possible = position < 0 ? hot_row == -1
                          : newest     ? slot == newest_row_
                                       : slot >= 0 && slot < int64_t{options_.hot_rows};
    if (!possible) {
      CountWrong(sequence, first_layer, position, hot_row);
      continue;
    }
    if (position < 0) continue;
    checked += end_layer - first_layer;
    if (!shared()) {
      read_request_.mutable_hot_rows()->add_values(static_cast<uint32_t>(hot_row));
      read_positions_.push_back(position);
      continue;
    }
    const TokenIdentity token = sequence.request->Token(static_cast<uint32_t>(position));
    for (uint32_t layer = first_layer; layer < end_layer; ++layer) {
      if (!RowIsRight(layer, RowOracle::Key(layer, token), static_cast<uint32_t>(hot_row))) [[unlikely]] {
        CountWrong(sequence, layer, position, hot_row);
      }
    }
  }
  report_->checked_rows.Add(checked);
  return read_positions_.empty() ? absl::OkStatus() : CheckThroughRead(sequence, group);
}

absl::Status EngineSession::CheckThroughRead(const OpenSequence& sequence, uint32_t group) {
  const uint32_t first_layer = options_.GroupBegin(group), layers = options_.GroupBegin(group + 1) - first_layer;
  const size_t row_bytes = oracle_.shape().bytes();
  const std::vector<uint32_t> hot_rows(read_request_.hot_rows().values().begin(),
                                       read_request_.hot_rows().values().end());
  const size_t chunk = std::clamp<size_t>(read_chunk_bytes_ / (row_bytes * layers), 1, kMaxReadRows);
  read_request_.set_sequence_id(sequence.id);
  for (uint32_t layer = 0; layer < layers; ++layer) read_request_.add_layers(first_layer + layer);
  for (size_t first = 0; first < hot_rows.size(); first += chunk) {
    const size_t count = std::min(chunk, hot_rows.size() - first);
    auto* values = read_request_.mutable_hot_rows()->mutable_values();
    values->Clear();
    values->Add(hot_rows.begin() + static_cast<ptrdiff_t>(first),
                hot_rows.begin() + static_cast<ptrdiff_t>(first + count));
    absl::Status status = Timed(report_, Call::kRead, [&] { return session_->Read(read_request_, &read_response_); });
    if (!status.ok()) return status;
    if (read_response_.rows().size() != count * layers * row_bytes) {
      return absl::InternalError(absl::StrCat("Read: the reply has ", read_response_.rows().size(), " bytes; ",
                                              count * layers * row_bytes, " were asked for"));
    }
    const std::byte* bytes = reinterpret_cast<const std::byte*>(read_response_.rows().data());
    for (uint32_t layer = first_layer; layer < first_layer + layers; ++layer) {
      for (size_t i = 0; i < count; ++i, bytes += row_bytes) {
        const int32_t position = read_positions_[first + i];
        const uint64_t key = RowOracle::Key(layer, sequence.request->Token(static_cast<uint32_t>(position)));
        if (!oracle_.Check(key, bytes))
          CountWrong(sequence, layer, position, static_cast<int32_t>(hot_rows[first + i]));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::replay
