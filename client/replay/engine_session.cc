#include "client/replay/engine_session.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/replay/cuda/gpu_plane.h"
#include "client/replay/cuda/gpu_rows.h"
#include "client/replay/device_option.h"
#include "client/replay/host_plane.h"
#include "client/replay/host_rows.h"
#include "client/status.h"

namespace stoker::replay {
namespace {

// In host memory a staging area of this size keeps a Store's copy in the last-level cache, and one call still moves
// thousands of rows.
constexpr uint64_t kHostStagingBytes = uint64_t{8} << 20;
constexpr uint64_t kStagingAlignment = 64;
// Room in a message for what is not row bytes.
constexpr uint64_t kMessageOverhead = 4096;
constexpr uint64_t kMaxInlineStoreBytes = uint64_t{4} << 20;
// An admission may wait while another engine stores a prefix of up to a few GB.
constexpr absl::Duration kAdmitTimeout = absl::Seconds(120);
constexpr absl::Duration kMapTimeout = absl::Seconds(10);
constexpr uint32_t kMaxReadRows = 65536;

uint64_t RoundUp(uint64_t bytes, uint64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

v1::RowLayout LayoutOf(const Options& options) {
  if (options.row_layout == "split_kv") return v1::ROW_LAYOUT_SPLIT_KV;
  if (options.row_layout == "dsv4_paged") return v1::ROW_LAYOUT_DSV4_PAGED;
  return v1::ROW_LAYOUT_LINEAR;
}

v1::ArenaSharing SharingOf(const Options& options) {
  if (options.arena == "ipc") return v1::ARENA_SHARING_IPC_HANDLE;
  if (options.arena == "descriptor") return v1::ARENA_SHARING_DESCRIPTOR;
  return v1::ARENA_SHARING_UNSPECIFIED;
}

using Clock = std::chrono::steady_clock;

// Runs `call` and adds its duration to the histogram.
template <typename F>
absl::Status Timed(RankReport* report, Call kind, F&& call) {
  const auto begin = Clock::now();
  absl::Status status = call();
  const auto took = Clock::now() - begin;
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
  auto status = client.GetStatus();
  if (!status.ok()) return client::Annotate(status.status(), "GetStatus");
  // The private daemon has the devices that the option names, and no others.
  const bool all = options_.server.empty() && NamesGpu(options_.device);
  auto device =
      ChooseDevice(all ? "cuda:all" : options_.device,
                   std::vector<std::string>(status->devices().begin(), status->devices().end()), needs.process);
  if (!device.ok()) return device.status();
  const bool maps_gpu = *device != "cpu" && options_.transfer != "inline" && HasGpuRows();

  const uint64_t row_bytes = uint64_t{oracle_.shape().bytes()} * options_.layers;
  v1::AttachRequest attach;
  attach.set_pool(options_.pool);
  attach.set_name(needs.name);
  attach.set_device(*device);
  attach.set_arena_sharing(SharingOf(options_));
  attach.set_state_rows(needs.state_rows);
  attach.set_hot_rows(options_.hot_rows);
  attach.set_max_top_k(options_.top_k);
  attach.set_max_batch_rows(needs.batch_rows);
  attach.set_max_sequence_rows(needs.max_sequence_rows);
  attach.set_index_space(options_.by_pool_row() ? v1::INDEX_SPACE_POOL_ROW : v1::INDEX_SPACE_POSITION);
  for (uint32_t group = 0; group < options_.groups; ++group) {
    v1::IndexGroup* layers = attach.add_groups();
    for (uint32_t layer = options_.GroupBegin(group); layer < options_.GroupBegin(group + 1); ++layer) {
      layers->add_layers(layer);
    }
  }
  if (needs.stores && options_.transfer != "inline") {
    const uint64_t piece = maps_gpu ? kGpuStagingPieceBytes : kHostStagingBytes;
    const uint64_t bytes = std::max(std::min(piece, row_bytes * needs.max_sequence_rows), row_bytes);
    attach.set_staging_bytes((maps_gpu ? 2 : 1) * RoundUp(bytes, kStagingAlignment));
  }

  client::SessionOptions session_options;
  // A restarted daemon has none of the sequences: the replay has failed then.
  session_options.reattach_timeout = absl::ZeroDuration();
  session_options.arena_mapping = options_.transfer == "inline"   ? client::ArenaMapping::kNever
                                  : options_.transfer == "shared" ? client::ArenaMapping::kDevice
                                                                  : client::ArenaMapping::kWherePossible;
  // Nothing is mapped for a plane where no step is made, or everything goes in messages.
  const bool by_calls = !needs.steps || options_.transfer == "inline";
  const auto wanted = client::ParsePlane("--plane", by_calls ? "rpc" : options_.plane);
  if (!wanted.ok()) return wanted.status();
  auto session = client::AttachOnPlane(client, attach, *wanted, session_options);
  if (!session.ok()) {
    return client::Annotate(session.status(),
                            *wanted == client::Plane::kDirect ? "Attach, --plane is \"direct\"" : "Attach");
  }
  session_ = *std::move(session);
  if (options_.by_pool_row()) {
    tables_.resize(attach.state_rows());
  }

  const v1::Attached info = session_->info();
  report_->SetDevice(info.device());
  region_rows_ = info.arena().region_rows();
  newest_row_ = info.arena().newest_row();
  const uint64_t message_bytes = std::max(info.limits().max_message_bytes(), 2 * kMessageOverhead) - kMessageOverhead;
  read_chunk_bytes_ = message_bytes;
  store_chunk_bytes_ = std::min(message_bytes, kMaxInlineStoreBytes);
  if (absl::Status mapped = MapRows(attach, needs); !mapped.ok()) return client::Annotate(mapped, "arena");
  if (shared() && needs.stores) {
    store_chunk_bytes_ = attach.staging_bytes() / rows_->staging_pieces() / kStagingAlignment * kStagingAlignment;
  }
  report_->shared_arena = shared();
  if (needs.steps) {
    if (absl::Status opened = OpenPlane(*wanted); !opened.ok()) return opened;
  }
  if (!shared() && row_bytes > store_chunk_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a row of all layers has ", row_bytes, " bytes; a message carries at most ", store_chunk_bytes_));
  }
  return absl::OkStatus();
}

absl::Status EngineSession::MapRows(const v1::AttachRequest& attach, const SessionNeeds& needs) {
  if (options_.transfer == "inline") return absl::OkStatus();
  std::shared_ptr<const client::Arena> arena = session_->arena();
  const v1::Attached info = session_->info();
  const bool local = absl::StartsWith(needs.address, "unix:");
  if (!arena->status().ok() && local && client::Arena::IsOnDevice(info.arena()) && HasGpuRows()) {
    // Not every process sees the GPU (CUDA_VISIBLE_DEVICES).
    auto on_gpu = client::Arena::MapDevice(attach, info, absl::Now() + kMapTimeout);
    if (on_gpu.ok()) {
      arena = *std::move(on_gpu);
    } else {
      std::fprintf(stderr, "stoker-replay: rows and entries go in messages: %s\n",
                   std::string(on_gpu.status().message()).c_str());
    }
  }
  if (!arena->status().ok()) return absl::OkStatus();

  RowDeviceSpec spec;
  spec.shape = oracle_.shape();
  for (uint32_t group = 0; group <= options_.groups; ++group) spec.group_begin.push_back(options_.GroupBegin(group));
  spec.top_k = options_.top_k;
  spec.hot_rows = options_.hot_rows;
  spec.state_rows = needs.state_rows;
  spec.batch_rows = needs.batch_rows;
  spec.max_sequence_rows = needs.max_sequence_rows;
  spec.by_pool_row = options_.by_pool_row();
  spec.seed = options_.seed;
  auto rows = arena->on_device() ? MakeGpuRows(spec, arena) : HostRows::Make(spec, arena);
  if (!rows.ok()) return rows.status();
  rows_ = *std::move(rows);
  return absl::OkStatus();
}

absl::Status EngineSession::OpenPlane(client::Plane wanted) {
  report_->SetPlane("rpc");
  const v1::Attached info = session_->info();
  const auto chosen = client::ChoosePlane(info, wanted);
  if (chosen.ok() && *chosen == client::Plane::kRpc) return absl::OkStatus();
  absl::Status status = chosen.status();
  if (status.ok() && !shared()) status = session_->arena()->status();
  if (status.ok()) {
    auto plane = info.device() == "cpu" ? MakeHostPlane(*session_, *chosen, options_.top_k)
                                        : MakeGpuPlane(*session_, *chosen, options_.top_k);
    if (plane.ok()) {
      plane_ = *std::move(plane);
      report_->SetPlane(std::string(client::PlaneName(*chosen)));
      return absl::OkStatus();
    }
    status = plane.status();
  }
  // Steps of a session on the direct plane cannot be calls. RESOURCE_EXHAUSTED: other sessions are armed.
  const bool calls_will_do = wanted == client::Plane::kAuto && !info.has_direct() &&
                             (absl::IsFailedPrecondition(status) || absl::IsResourceExhausted(status));
  if (calls_will_do) return absl::OkStatus();
  return client::Annotate(status, absl::StrCat("--plane is \"", options_.plane, "\""));
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
  const OpenSequence sequence{&request, admitted.sequence_id(), admitted.state_row(), admitted.matched_rows(),
                              admitted.writer()};
  if (shared()) {
    if (status = rows_->Open(sequence); !status.ok()) return status;
  }
  if (options_.by_pool_row()) {
    if (status = LearnBlocks(sequence); !status.ok()) return status;
  }
  return sequence;
}

absl::Status EngineSession::Store(const OpenSequence& sequence, uint32_t first, uint32_t end) {
  const uint64_t row_bytes = uint64_t{oracle_.shape().bytes()} * options_.layers;
  const uint32_t chunk_rows =
      static_cast<uint32_t>(std::min<uint64_t>(store_chunk_bytes_ / row_bytes, kMaxSequenceRows));
  const uint32_t pieces = shared() ? rows_->staging_pieces() : 1;
  const auto offset = [&](uint32_t chunk) { return chunk % pieces * store_chunk_bytes_; };
  const auto fill = [&](uint32_t chunk, uint32_t from) {
    return rows_->FillStaging(sequence, from, std::min(chunk_rows, end - from), offset(chunk));
  };
  for (uint32_t chunk = 0; first < end; ++chunk) {
    const uint32_t count = std::min(chunk_rows, end - first);
    if (store_request_.items_size() == 0) store_request_.add_items();
    v1::StoreItem* item = store_request_.mutable_items(0);
    item->mutable_range()->set_sequence_id(sequence.id);
    item->mutable_range()->set_first_row(first);
    item->mutable_range()->set_row_count(count);
    absl::Status status;
    if (shared()) {
      item->set_source(v1::DATA_SOURCE_SHARED);
      item->set_staging_offset_bytes(offset(chunk));
      // With two pieces the next one is filled while the daemon stores this one.
      if (chunk == 0 || pieces == 1) status = fill(chunk, first);
      if (status.ok()) status = rows_->AwaitStaging();
      if (status.ok() && pieces > 1 && count < end - first) status = fill(chunk + 1, first + count);
      if (!status.ok()) return status;
    } else {
      item->set_source(v1::DATA_SOURCE_INLINE);
      item->mutable_rows()->resize(row_bytes * count);
      std::byte* out = reinterpret_cast<std::byte*>(item->mutable_rows()->data());
      for (uint32_t layer = 0; layer < options_.layers; ++layer) {
        out = FillRequestRows(oracle_, *sequence.request, layer, first, count, out);
      }
    }
    status = Timed(report_, Call::kStore, [&] { return session_->Store(store_request_, &store_response_); });
    if (status.ok()) status = client::FirstError(store_response_.statuses());
    if (!status.ok()) return client::Annotate(status, absl::StrCat("request ", sequence.request->number));
    report_->stored_bytes.Add(store_response_.stored_bytes());
    report_->stored_rows.Add(store_response_.stored_bytes() / row_bytes);
    first += count;
  }
  return absl::OkStatus();
}

absl::Status EngineSession::Release(absl::Span<const uint64_t> ids) {
  release_request_.Clear();
  release_request_.mutable_sequence_ids()->Add(ids.begin(), ids.end());
  absl::Status status =
      Timed(report_, Call::kRelease, [&] { return session_->Release(release_request_, &release_response_); });
  if (status.ok()) status = client::Annotate(client::FirstError(release_response_.statuses()), "Release");
  return status;
}

void EngineSession::BeginStep(v1::StepRequest* request) {
  request->set_top_k(options_.top_k);
  request->set_source(shared() ? v1::DATA_SOURCE_SHARED : v1::DATA_SOURCE_INLINE);
  while (request->groups_size() < static_cast<int>(options_.groups)) {
    const int group = request->groups_size();
    request->add_groups()->set_group(static_cast<uint32_t>(group));
  }
  if (shared()) return;
  for (v1::StepGroup& group : *request->mutable_groups()) {
    group.mutable_indices()->Resize(request->rows_size() * static_cast<int>(options_.top_k), -1);
  }
  batch_rows_ = static_cast<size_t>(request->rows_size());
  if (options_.by_pool_row()) positions_.resize(options_.groups * batch_rows_ * options_.top_k);
}

absl::Span<int32_t> EngineSession::Entries(v1::StepRequest* request, uint32_t group, size_t row) {
  if (shared()) return rows_->Entries(group, row);
  if (options_.by_pool_row()) {
    return absl::MakeSpan(positions_).subspan((group * batch_rows_ + row) * options_.top_k, options_.top_k);
  }
  int32_t* all = request->mutable_groups(static_cast<int>(group))->mutable_indices()->mutable_data();
  return absl::MakeSpan(all + row * options_.top_k, options_.top_k);
}

absl::Span<const int32_t> EngineSession::HotRows(const v1::StepResponse& response, uint32_t group, size_t row) const {
  if (shared()) return rows_->HotRows(group, row);
  return absl::MakeConstSpan(response.groups(static_cast<int>(group)).hot_rows().data() + row * options_.top_k,
                             options_.top_k);
}

absl::Status EngineSession::LearnBlocks(const OpenSequence& sequence) {
  v1::GetBlockTablesRequest request;
  request.add_sequence_ids(sequence.id);
  v1::GetBlockTablesResponse response;
  absl::Status status = session_->GetBlockTables(request, &response);
  if (status.ok() && response.tables_size() != 1) status = absl::InternalError("the reply has not one table");
  if (status.ok()) status = client::FromItem(response.tables(0).status());
  if (!status.ok()) return client::Annotate(status, "GetBlockTables");
  const auto& blocks = response.tables(0).blocks();
  tables_[sequence.state_row].assign(blocks.begin(), blocks.end());
  return absl::OkStatus();
}

void EngineSession::NameEntries(absl::Span<const BatchRow> batch, v1::StepRequest* request) {
  const auto block_rows = static_cast<int32_t>(options_.block_rows);
  for (size_t row = 0; row < batch.size(); ++row) {
    if (batch[row].sequence == nullptr) continue;  // what stands there is not looked at
    const std::vector<int32_t>& blocks = tables_[batch[row].sequence->state_row];
    for (uint32_t group = 0; group < options_.groups; ++group) {
      const absl::Span<int32_t> positions = Entries(request, group, row);
      const absl::Span<int32_t> names =
          shared()
              ? rows_->Names(group, row)
              : absl::MakeSpan(request->mutable_groups(static_cast<int>(group))->mutable_indices()->mutable_data() +
                                   row * options_.top_k,
                               options_.top_k);
      for (size_t i = 0; i < positions.size(); ++i) {
        const int32_t position = positions[i];
        names[i] =
            position < 0 ? -1 : blocks[static_cast<size_t>(position / block_rows)] * block_rows + position % block_rows;
      }
    }
  }
}

absl::Status EngineSession::Step(absl::Span<const BatchRow> batch, v1::StepRequest* request,
                                 v1::StepResponse* response) {
  if (options_.by_pool_row()) NameEntries(batch, request);
  if (shared()) {
    absl::Status published = rows_->Publish(batch.size());
    if (!published.ok()) return published;
  }
  if (plane_ != nullptr) {
    return client::Annotate(StepOnPlane(batch, request, response), absl::StrCat(report_->plane, " plane"));
  }
  const auto begin = Clock::now();
  absl::Status status = session_->Step(*request, response);
  CountStep(Clock::now() - begin);
  if (status.ok()) status = client::FirstError(response->statuses());
  return client::Annotate(status, "Step");
}

absl::Status EngineSession::StepOnPlane(absl::Span<const BatchRow> batch, v1::StepRequest* request,
                                        v1::StepResponse* response) {
  plane_rows_.clear();
  for (const BatchRow& row : batch) {
    plane_rows_.push_back(row.sequence == nullptr
                              ? client::PlaneRow()
                              : client::PlaneRow{row.sequence->id, row.sequence->state_row, row.length});
  }
  const auto begin = Clock::now();
  if (absl::Status status = plane_->RunGroups(plane_rows_); !status.ok()) return status;
  step_took_ = Clock::now() - begin;

  // As the reply of a call.
  response->Clear();
  for (size_t row = 0; row < batch.size(); ++row) response->add_statuses();
  uint64_t gathered_rows = 0;
  for (uint32_t group = 0; group < options_.groups; ++group) {
    v1::StepGroupResult& result = *response->add_groups();
    result.set_group(group);
    for (size_t row = 0; row < batch.size(); ++row) {
      v1::LookupCounts& counts = *result.add_counts();
      if (absl::Status status = CountOutcomes(batch[row], Entries(request, group, row), plane_->HotRows(group, row),
                                              plane_->Misses(group, row), &counts);
          !status.ok()) {
        return client::Annotate(status, absl::StrCat("group ", group, ", batch row ", row));
      }
      gathered_rows += uint64_t{counts.miss()} * (options_.GroupBegin(group + 1) - options_.GroupBegin(group));
    }
  }
  response->set_gathered_bytes(gathered_rows * oracle_.shape().bytes());
  return absl::OkStatus();
}

absl::Status EngineSession::CountOutcomes(const BatchRow& row, absl::Span<const int32_t> positions,
                                          absl::Span<const int32_t> hot_rows, int32_t misses,
                                          v1::LookupCounts* counts) const {
  const auto newest = static_cast<int32_t>(row.length) - 1 - static_cast<int32_t>(row.newest_index);
  uint32_t newest_count = 0, invalid = 0, others = 0;
  for (size_t i = 0; row.sequence != nullptr && i < positions.size(); ++i) {
    if (positions[i] < 0) continue;
    uint32_t& outcome = positions[i] >= newest ? newest_count : hot_rows[i] < 0 ? invalid : others;
    ++outcome;
  }
  if (misses < 0 || static_cast<uint32_t>(misses) > others) {
    return absl::InternalError(absl::StrCat("misses is ", misses, "; ", others, " entries may have missed"));
  }
  counts->set_newest(newest_count);
  counts->set_invalid(invalid);
  counts->set_miss(static_cast<uint32_t>(misses));
  counts->set_hot(others - static_cast<uint32_t>(misses));
  return absl::OkStatus();
}

absl::Status EngineSession::FinishStep(const v1::StepRequest& request) {
  if (plane_ == nullptr) return absl::OkStatus();
  commits_.clear();
  for (const v1::StepRow& row : request.rows()) commits_.push_back(row.commit() ? 1 : 0);
  const auto begin = Clock::now();
  const absl::Status status = plane_->Commit(commits_);
  CountStep(step_took_ + (Clock::now() - begin));
  return client::Annotate(status, absl::StrCat(report_->plane, " plane"));
}

void EngineSession::CountStep(std::chrono::nanoseconds took) {
  const auto ns = static_cast<uint64_t>(took.count());
  report_->calls[static_cast<int>(Call::kStep)].Add(ns);
  report_->step_ns.Add(ns);
}

void EngineSession::WriteNewest(const BatchRow& row, v1::StepRow* message) {
  if (shared()) {
    rows_->WriteNewest(row);
    return;
  }
  const RowShape& shape = oracle_.shape();
  const TokenIdentity token = row.sequence->request->Token(row.length - 1);
  message->mutable_newest_row()->resize(size_t{shape.bytes()} * options_.layers);
  std::byte* out = reinterpret_cast<std::byte*>(message->mutable_newest_row()->data());
  for (uint32_t layer = 0; layer < options_.layers; ++layer, out += shape.bytes()) {
    oracle_.Fill(RowOracle::Key(layer, token), out);
  }
}

void EngineSession::CountWrong(const BatchRow& row, size_t batch_row, size_t entry, uint32_t layer, int32_t position,
                               int32_t hot_row, absl::Span<const std::byte> bytes) {
  report_->wrong_rows.Add(1);
  if (report_->wrong_row[0] != '\0') return;
  report_->SetWrongRow(DescribeWrongRow(oracle_, row, batch_row, entry, layer, position, hot_row, bytes).c_str());
}

absl::Status EngineSession::CheckStep(absl::Span<const BatchRow> batch, v1::StepRequest* request,
                                      const v1::StepResponse& response) {
  for (uint32_t group = 0; group < options_.groups; ++group) {
    const bool there = static_cast<int>(group) < response.groups_size();
    const v1::StepGroupResult& result =
        there ? response.groups(static_cast<int>(group)) : v1::StepGroupResult::default_instance();
    if (there && result.group() == group && result.counts_size() == static_cast<int>(batch.size()) &&
        (shared() || result.hot_rows_size() == static_cast<int>(batch.size() * options_.top_k))) {
      continue;
    }
    return absl::InternalError(absl::StrCat("Step: group ", group, " of the reply has ", result.counts_size(),
                                            " counts and ", result.hot_rows_size(), " hot rows for ", batch.size(),
                                            " rows of ", options_.top_k, " entries"));
  }
  if (shared()) {
    auto check = rows_->Check(batch);
    if (!check.ok()) return check.status();
    report_->checked_on_device.Add(check->on_device);
    report_->checked_on_host.Add(check->on_host);
    report_->checked_rows.Add(check->on_device > 0 ? check->on_device : check->on_host);
    report_->wrong_rows.Add(check->wrong);
    if (check->wrong > 0) report_->SetWrongRow(check->first_wrong.c_str());
    return absl::OkStatus();
  }
  for (uint32_t group = 0; group < options_.groups; ++group) {
    for (size_t row = 0; row < batch.size(); ++row) {
      absl::Status status =
          CheckInline(batch[row], row, group, Entries(request, group, row), HotRows(response, group, row));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status EngineSession::CheckInline(const BatchRow& row, size_t batch_row, uint32_t group,
                                        absl::Span<const int32_t> positions, absl::Span<const int32_t> hot_rows) {
  HotRegion region;
  if (row.sequence != nullptr) {
    region = {int64_t{row.sequence->state_row} * region_rows_, options_.hot_rows, newest_row_};
  }
  const uint32_t first_layer = options_.GroupBegin(group), end_layer = options_.GroupBegin(group + 1);
  uint64_t checked = 0;
  read_request_.Clear();
  read_entries_.clear();
  for (size_t i = 0; i < positions.size(); ++i) {
    // An answer that cannot be right is as bad as wrong bytes: a row for no entry, none for an entry, or one of others.
    if (!region.CanAnswer(positions[i], row.length, row.newest_index, hot_rows[i])) {
      CountWrong(row, batch_row, i, first_layer, positions[i], hot_rows[i], {});
      continue;
    }
    if (hot_rows[i] < 0) continue;
    checked += end_layer - first_layer;
    read_request_.mutable_hot_rows()->add_values(static_cast<uint32_t>(hot_rows[i]));
    read_entries_.push_back({positions[i], i});
  }
  report_->checked_rows.Add(checked);
  report_->checked_on_host.Add(checked);
  return read_entries_.empty() ? absl::OkStatus() : CheckThroughRead(row, batch_row, group);
}

absl::Status EngineSession::CheckThroughRead(const BatchRow& row, size_t batch_row, uint32_t group) {
  const OpenSequence& sequence = *row.sequence;
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
      for (size_t i = first; i < first + count; ++i, bytes += row_bytes) {
        const auto [position, entry] = read_entries_[i];
        const uint64_t key = RowOracle::Key(layer, sequence.request->Token(static_cast<uint32_t>(position)));
        if (oracle_.Check(key, bytes)) continue;
        CountWrong(row, batch_row, entry, layer, position, static_cast<int32_t>(hot_rows[i]),
                   absl::MakeConstSpan(bytes, row_bytes));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::replay
