#include "tests/gpu/decode_session.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/arena.h"
#include "client/device_plane.h"
#include "client/direct_plane.h"
#include "client/status.h"

namespace stoker::bench {
namespace {

using kernels::cuda::GraphExecHandle;

constexpr uint64_t kStagingBytes = uint64_t{64} << 20;
constexpr uint32_t kMaxPageSize = 10000;  // of ListSequences; a batch has fewer sequences

}  // namespace

v1::AttachRequest AttachTo(const Shape& shape, const std::string& pool, v1::Plane plane, v1::ArenaSharing sharing) {
  v1::AttachRequest attach;
  attach.set_pool(pool);
  attach.set_plane(plane);
  attach.set_arena_sharing(sharing);
  attach.set_name(program_invocation_short_name);
  attach.set_state_rows(static_cast<uint32_t>(shape.batch));
  attach.set_hot_rows(static_cast<uint32_t>(shape.hot_rows));
  attach.set_max_top_k(static_cast<uint32_t>(shape.top_k));
  attach.set_max_batch_rows(static_cast<uint32_t>(shape.batch));
  attach.set_max_sequence_rows(static_cast<uint32_t>(shape.max_sequence_rows()));
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  for (int32_t g = 0; g < shape.groups(); ++g) {
    v1::IndexGroup* group = attach.add_groups();
    for (int32_t l = shape.GroupBegin(g); l < shape.GroupBegin(g + 1); ++l) {
      group->add_layers(static_cast<uint32_t>(l));
    }
  }
  return attach;
}

client::SessionOptions SessionOnDevice() {
  client::SessionOptions options;
  options.reattach_timeout = absl::ZeroDuration();
  options.arena_mapping = client::ArenaMapping::kDevice;
  return options;
}

DecodeSession::DecodeSession(const Shape& shape, const client::Client& client, const std::string& pool, v1::Plane plane,
                             v1::ArenaSharing sharing)
    : shape_(shape) {
  v1::AttachRequest attach = AttachTo(shape, pool, plane, sharing);
  const uint64_t row_bytes = static_cast<uint64_t>(shape.layers) * static_cast<uint64_t>(shape.row_bytes);
  attach.set_staging_bytes((std::max(kStagingBytes, row_bytes) + 63) / 64 * 64);
  session_ = Get(client.Attach(attach, SessionOnDevice()), "Attach");
  arena_ = session_->arena();
  if (!arena_->on_device()) Require(absl::FailedPreconditionError("the session is not on a GPU"), "Attach");
  cudaPointerAttributes attributes{};
  Require(cudaPointerGetAttributes(&attributes, arena_->bytes().data()), "arena");
  if (attributes.device != 0) Require(absl::UnimplementedError("the session is not on the first GPU"), "Attach");
  for (int32_t g = 0; g < shape.groups(); ++g) {
    const auto indices = Get(arena_->Indices(static_cast<uint32_t>(g)), "arena");
    const auto hot_rows = Get(arena_->HotRows(static_cast<uint32_t>(g)), "arena");
    const auto misses = Get(arena_->Misses(static_cast<uint32_t>(g)), "arena");
    mailboxes_.push_back(
        {indices[0].data(), indices.row_stride_bytes() / sizeof(int32_t), hot_rows[0].data(), misses.data()});
  }
  for (int32_t i = 0; i < shape.batch; ++i) Open(attach.staging_bytes() / row_bytes);
  stream_ = Get(kernels::cuda::MakeStream(), "stream");
}

void DecodeSession::RunServer(const std::string& waits, const PlaneRun& run) {
  const cudaStream_t stream = stream_.get();
  Engine engine(shape_, mailboxes_);
  const auto plane = Get(client::DevicePlane::Arm(*session_, static_cast<uint32_t>(shape_.top_k)), "Arm");
  const client::DeviceBatch batch = {engine.rows(), engine.Device(ids_), engine.Device(state_rows_), engine.lengths()};
  const bool fused = waits == "fused";
  const GraphExecHandle graph = Capture(stream, [&] {
    engine.Begin(stream);
    Require(plane->PublishBatch(batch, stream), "batch");
    for (int32_t g = 0; g < shape_.groups(); ++g) {
      engine.Indexer(g, &plane->view(), stream);
      if (!fused) Require(plane->Await(static_cast<uint32_t>(g), stream), "await");
      engine.Layers(g, fused ? &plane->view() : nullptr, stream);
    }
    Require(plane->PublishCommits(engine.commits(), stream), "commits");
    Require(plane->RingCommit(stream), "commit");
    Require(plane->AwaitCommit(stream), "commit");
    engine.End(stream);
  });
  run.drive([&](int32_t steps) { LaunchSteps(graph, steps, stream); });
  Require(plane->status(), "server plane");
  const uint64_t steps = Get(plane->Disarm(), "Disarm");
  if (steps != static_cast<uint64_t>(shape_.total_steps())) {
    Require(absl::InternalError(absl::StrCat(steps, " steps were finished")), "Disarm");
  }
  CheckStatuses("server plane");
  run.report(engine);
}

void DecodeSession::RunDirect(const client::Client& client, const PlaneRun& run) {
  const cudaStream_t stream = stream_.get();
  const client::PlaneMail mail = Get(arena_->Mail(), "arena");
  Engine engine(shape_, mailboxes_, mail.lengths.data());
  // Of the batch all but the lengths is the same in every step.
  const std::vector<int32_t> commits(ids_.size(), 1);
  Require(arena_->CopyIn(&shape_.batch, absl::MakeSpan(mail.batch_rows, 1)), "batch");
  Require(arena_->CopyIn(ids_.data(), mail.sequence_ids), "batch");
  Require(arena_->CopyIn(state_rows_.data(), mail.state_rows), "batch");
  Require(arena_->CopyIn(commits.data(), mail.commits), "batch");
  const auto plane =
      Get(client::DirectPlane::Open(*session_, static_cast<uint32_t>(shape_.top_k), {.stream = stream}), "Open");
  const GraphExecHandle graph = Capture(stream, [&] {
    engine.Begin(stream);
    Require(plane->EnqueueBegin(), "begin");
    for (int32_t g = 0; g < shape_.groups(); ++g) {
      engine.Indexer(g, nullptr, stream);
      Require(plane->EnqueueGroup(static_cast<uint32_t>(g)), "group");
      engine.Layers(g, nullptr, stream);
    }
    Require(plane->EnqueueCommit(), "commit");
    engine.End(stream);
  });
  run.drive([&](int32_t steps) { LaunchSteps(graph, steps, stream, [&] { return plane->status(); }); });
  Require(plane->status(), "direct plane");
  CheckStatuses("direct plane");
  CheckStored(client);
  run.report(engine);
}

void DecodeSession::Open(uint64_t chunk_rows) {
  v1::AdmitRequest admit;
  v1::AdmitItem* item = admit.add_items();
  item->set_prompt_rows(static_cast<uint32_t>(shape_.context));
  item->set_max_rows(static_cast<uint32_t>(shape_.max_sequence_rows()));
  v1::AdmitResponse admitted;
  Require(session_->Admit(admit, &admitted), "Admit");
  Require(client::FromItem(admitted.sequences(0).status()), "Admit");
  ids_.push_back(admitted.sequences(0).sequence_id());
  state_rows_.push_back(static_cast<int32_t>(admitted.sequences(0).state_row()));
  for (uint64_t first = 0; first < static_cast<uint64_t>(shape_.context); first += chunk_rows) {
    v1::StoreRequest store;
    v1::StoreItem* rows = store.add_items();
    rows->mutable_range()->set_sequence_id(ids_.back());
    rows->mutable_range()->set_first_row(static_cast<uint32_t>(first));
    rows->mutable_range()->set_row_count(
        static_cast<uint32_t>(std::min(chunk_rows, static_cast<uint64_t>(shape_.context) - first)));
    rows->set_source(v1::DATA_SOURCE_SHARED);
    v1::StoreResponse stored;
    Require(session_->Store(store, &stored), "Store");
    Require(client::FirstError(stored.statuses()), "Store");
  }
}

void DecodeSession::CheckStatuses(const char* plane) const {
  const absl::Span<const int32_t> in_arena = Get(arena_->Mail(), "arena").statuses;
  std::vector<int32_t> statuses(in_arena.size());
  Require(arena_->CopyOut(in_arena, statuses.data()), "statuses");
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i] == 0) continue;
    Require(absl::InternalError(absl::StrCat("batch row ", i, " has the status ", statuses[i])), plane);
  }
}

void DecodeSession::CheckStored(const client::Client& client) const {
  v1::ListSequencesRequest request;
  request.set_pool(session_->info().pool().name());
  request.set_page_size(kMaxPageSize);
  const v1::ListSequencesResponse response = Get(client.ListSequences(request), "ListSequences");
  const auto expected = static_cast<uint32_t>(shape_.context + shape_.total_steps());
  for (const uint64_t id : ids_) {
    const auto found = std::find_if(response.sequences().begin(), response.sequences().end(),
                                    [id](const v1::SequenceInfo& info) { return info.sequence_id() == id; });
    const uint32_t stored = found == response.sequences().end() ? 0 : found->stored_rows();
    if (stored == expected) continue;
    Require(absl::InternalError(absl::StrCat("sequence ", id, " has ", stored, " stored rows, not ", expected)),
            "direct plane");
  }
}

v1::PoolSpec PoolOf(const Shape& shape, const std::string& name, uint32_t blocks) {
  v1::PoolSpec spec;
  spec.set_name(name);
  spec.set_layers(static_cast<uint32_t>(shape.layers));
  spec.set_row_layout(v1::ROW_LAYOUT_LINEAR);
  spec.set_row_bytes(static_cast<uint32_t>(shape.row_bytes));
  spec.set_block_rows(kBlockRows);
  spec.set_blocks(blocks);
  return spec;
}

}  // namespace stoker::bench
