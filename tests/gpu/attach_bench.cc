// stoker-attach-bench: how long a fresh engine process takes from nothing to its first step, with a daemon on a GPU
// that has its pool ready.
//
//   stoker-attach-bench --server=unix:/path --pool=NAME --plane=direct [--phases] --commit=COMMIT
//
// One process is one measurement, and one JSON object on a line; attach.sh starts as many as are wanted. The context of
// the GPU, with all kernels loaded, is made before the clock starts (context_ms). Then, in order:
//
//   attach_ms      Attach: the call, and what the client library maps (the arena; on the direct plane also the pool)
//   open_ms        rows and entries of the engine's own, the plane (DirectPlane::Open, DevicePlane::Arm), two graphs
//   prompt_ms      Admit and Store of one sequence of --prompt rows, which a step needs; no part of attaching
//   first_step_ms  the first step, from its entries to its commit
//
// and attach_to_first_step_ms, the sum but for the prompt. Every row of the step is compared with what it must hold; a
// wrong one fails. With --phases the attach alone is taken apart, as no library would do it: attach_call_ms,
// arena_map_ms and, on the direct plane, pool_map_ms.
#include <cuda_runtime_api.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/device_plane.h"
#include "client/plane.h"
#include "client/pool_mapping.h"
#include "client/replay/cuda/gpu_plane.h"
#include "client/replay/cuda/gpu_rows.h"
#include "client/session.h"
#include "client/status.h"
#include "kernels/cuda/handles.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/bench/samples.h"

ABSL_FLAG(std::string, server, "", "address of a running stokerd: unix:/path");
ABSL_FLAG(std::string, pool, "attach", "name of a pool of LINEAR rows that it has");
ABSL_FLAG(std::string, plane, "direct", "direct, server or rpc");
ABSL_FLAG(bool, phases, false, "takes the attach apart, and makes no step");
ABSL_FLAG(int32_t, group, 4, "layers of an index group, at least 1");
ABSL_FLAG(int32_t, state_rows, 8, "hot buffers of the session, 1 to 4096");
ABSL_FLAG(int32_t, top_k, 2048, "entries of a row");
ABSL_FLAG(int32_t, hot_rows, 4096, "rows of a hot buffer, at least top_k");
ABSL_FLAG(int32_t, prompt, 4096, "rows of the sequence, at least top_k");
ABSL_FLAG(std::string, commit, "", "of the source, for the result line");

namespace stoker::bench {
namespace {

// The benchmark's own work: whatever goes wrong ends it.
void Require(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "stoker-attach-bench: %s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Get(absl::StatusOr<T> value, const char* what) {
  Require(value.status(), what);
  return *std::move(value);
}

// Milliseconds since it was made, or since the last lap.
class Laps {
 public:
  double Lap() {
    const double before = std::exchange(last_us_, watch_.us());
    return (last_us_ - before) / 1e3;
  }

 private:
  const Stopwatch watch_;
  double last_us_ = 0;
};

v1::AttachRequest AttachTo(const v1::PoolSpec& pool, client::Plane plane) {
  const auto flag = [](const auto& value) { return static_cast<uint32_t>(absl::GetFlag(value)); };
  v1::AttachRequest attach;
  attach.set_pool(pool.name());
  attach.set_name("attach-bench");
  if (plane == client::Plane::kDirect) attach.set_plane(v1::PLANE_DIRECT);
  attach.set_state_rows(flag(FLAGS_state_rows));
  attach.set_hot_rows(flag(FLAGS_hot_rows));
  attach.set_max_top_k(flag(FLAGS_top_k));
  attach.set_max_batch_rows(flag(FLAGS_state_rows));
  attach.set_max_sequence_rows(flag(FLAGS_prompt) + 1);
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  attach.set_staging_bytes((uint64_t{pool.row_bytes()} * pool.layers() * flag(FLAGS_prompt) + 63) / 64 * 64);
  for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
    if (layer % flag(FLAGS_group) == 0) attach.add_groups();
    attach.mutable_groups()->rbegin()->add_layers(layer);
  }
  return attach;
}

// Fields that both kinds of lines begin with.
std::string Head(const char* what, const v1::PoolSpec& pool, const v1::AttachRequest& attach, bool mps,
                 double context_ms) {
  const uint64_t pool_bytes = uint64_t{pool.blocks()} * pool.block_rows() * pool.layers() * pool.row_bytes();
  return absl::StrCat("{\"bench\": \"attach\", \"what\": \"", what, "\", \"plane\": \"", absl::GetFlag(FLAGS_plane),
                      "\", \"pool_bytes\": ", pool_bytes, ", \"layers\": ", pool.layers(),
                      ", \"groups\": ", attach.groups_size(), ", \"state_rows\": ", attach.state_rows(),
                      ", \"hot_rows\": ", attach.hot_rows(), ", \"top_k\": ", attach.max_top_k(),
                      ", \"row_bytes\": ", pool.row_bytes(), ", \"mps\": ", mps ? "true" : "false", ", \"commit\": \"",
                      absl::GetFlag(FLAGS_commit), "\", \"context_ms\": ", context_ms);
}

void Phases(const v1::AttachRequest& attach, const std::string& head) {
  const auto stub =
      v1::Sessions::NewStub(grpc::CreateChannel(absl::GetFlag(FLAGS_server), grpc::InsecureChannelCredentials()));
  Laps laps;
  grpc::ClientContext context;
  const auto stream = stub->Attach(&context, attach);
  v1::AttachResponse first;
  if (!stream->Read(&first)) Require(client::FromGrpc(stream->Finish()), "Attach");
  const double call_ms = laps.Lap();
  const auto arena = Get(client::Arena::MapDevice(attach, first.attached(), absl::Now() + absl::Seconds(30)), "arena");
  const double arena_ms = laps.Lap();
  std::string pool_ms = "null";
  if (first.attached().has_direct()) {
    const auto pool = Get(client::PoolMapping::Map(first.attached(), absl::Now() + absl::Seconds(30)), "pool");
    pool_ms = absl::StrCat(laps.Lap());
  }
  std::printf("%s, \"attach_call_ms\": %.3f, \"arena_map_ms\": %.3f, \"pool_map_ms\": %s, \"arena_bytes\": %zu}\n",
              head.c_str(), call_ms, arena_ms, pool_ms.c_str(), arena->bytes().size());
  context.TryCancel();
}

// Admits the request and stores its prompt.
replay::OpenSequence OpenSequence(client::Session& session, const replay::Request& request, replay::RowDevice& rows) {
  v1::AdmitRequest admit;
  v1::AdmitItem* item = admit.add_items();
  item->set_prompt_rows(request.input_rows);
  item->set_max_rows(request.total_rows());
  v1::AdmitResponse admitted;
  Require(session.Admit(admit, &admitted), "Admit");
  Require(client::FromItem(admitted.sequences(0).status()), "Admit");
  const replay::OpenSequence sequence{&request, admitted.sequences(0).sequence_id(), admitted.sequences(0).state_row(),
                                      0, true};
  Require(rows.Open(sequence), "rows");
  Require(rows.FillStaging(sequence, 0, request.input_rows, 0), "rows");
  Require(rows.AwaitStaging(), "rows");
  v1::StoreRequest store;
  v1::StoreItem* stored = store.add_items();
  stored->mutable_range()->set_sequence_id(sequence.id);
  stored->mutable_range()->set_row_count(request.input_rows);
  stored->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse response;
  Require(session.Store(store, &response), "Store");
  Require(client::FirstError(response.statuses()), "Store");
  return sequence;
}

void StepOnce(client::Session& session, replay::StepPlane* plane, const replay::BatchRow& row) {
  if (plane != nullptr) {
    Require(plane->RunGroups({{row.sequence->id, row.sequence->state_row, row.length}}), "step");
    Require(plane->Commit({1}), "step");
    return;
  }
  v1::StepRequest request;
  request.set_top_k(static_cast<uint32_t>(absl::GetFlag(FLAGS_top_k)));
  request.set_source(v1::DATA_SOURCE_SHARED);
  for (size_t group = 0; group < session.arena()->groups(); ++group) {
    request.add_groups()->set_group(static_cast<uint32_t>(group));
  }
  v1::StepRow* only = request.add_rows();
  only->set_sequence_id(row.sequence->id);
  only->set_length(row.length);
  only->set_commit(true);
  v1::StepResponse response;
  Require(session.Step(request, &response), "step");
  Require(client::FirstError(response.statuses()), "step");
}

void Whole(const client::Client& client, const v1::PoolSpec& pool, const v1::AttachRequest& attach,
           client::Plane plane_kind, const std::string& head) {
  client::SessionOptions options;
  options.reattach_timeout = absl::ZeroDuration();
  options.arena_mapping = client::ArenaMapping::kDevice;
  Laps laps;
  const auto session = Get(client.Attach(attach, options), "Attach");
  const double attach_ms = laps.Lap();

  const auto top_k = attach.max_top_k();
  replay::RowDeviceSpec spec;
  spec.shape.part_bytes[0] = pool.row_bytes();
  uint32_t layer = 0;
  for (const v1::IndexGroup& group : attach.groups()) {
    spec.group_begin.push_back(layer);
    layer += static_cast<uint32_t>(group.layers_size());
  }
  spec.group_begin.push_back(layer);
  spec.top_k = top_k;
  spec.hot_rows = attach.hot_rows();
  spec.state_rows = spec.batch_rows = attach.state_rows();
  spec.max_sequence_rows = attach.max_sequence_rows();
  const auto rows = Get(replay::MakeGpuRows(spec, session->arena()), "rows");
  std::unique_ptr<replay::StepPlane> plane;
  if (plane_kind != client::Plane::kRpc) plane = Get(replay::MakeGpuPlane(*session, plane_kind, top_k), "plane");
  const double open_ms = laps.Lap();

  replay::Request request;
  request.input_rows = attach.max_sequence_rows() - 1;
  request.output_rows = 1;
  const replay::OpenSequence sequence = OpenSequence(*session, request, *rows);
  const double prompt_ms = laps.Lap();

  const std::vector<replay::BatchRow> batch = {{&sequence, request.total_rows()}};
  rows->WriteNewest(batch[0]);
  for (uint32_t group = 0; group < spec.groups(); ++group) {
    // The last top_k of the sequence, the newest among them: none is in the hot buffer yet.
    const absl::Span<int32_t> entries = rows->Entries(group, 0);
    std::iota(entries.begin(), entries.end(), static_cast<int32_t>(request.total_rows() - top_k));
  }
  Require(rows->Publish(1), "entries");
  StepOnce(*session, plane.get(), batch[0]);
  const double step_ms = laps.Lap();

  const replay::RowCheck check = Get(rows->Check(batch), "comparison");
  if (check.wrong != 0 || check.on_device != uint64_t{top_k} * pool.layers()) {
    Require(
        absl::InternalError(absl::StrCat(check.wrong, " of ", check.on_device, " rows are wrong: ", check.first_wrong)),
        "comparison");
  }
  std::printf(
      "%s, \"attach_ms\": %.3f, \"open_ms\": %.3f, \"prompt_ms\": %.3f, \"first_step_ms\": %.3f, "
      "\"attach_to_first_step_ms\": %.3f, \"arena_bytes\": %zu, \"checked_rows\": %llu, \"wrong_rows\": 0}\n",
      head.c_str(), attach_ms, open_ms, prompt_ms, step_ms, attach_ms + open_ms + step_ms,
      session->arena()->bytes().size(), static_cast<unsigned long long>(check.on_device));
}

void CheckFlags() {
  const auto range = [](const char* name, int32_t value, int32_t min, int32_t max) {
    if (value >= min && value <= max) return;
    Require(absl::InvalidArgumentError(absl::StrCat("is ", value, "; it must be ", min, " to ", max)), name);
  };
  range("--group", absl::GetFlag(FLAGS_group), 1, 1024);
  range("--state_rows", absl::GetFlag(FLAGS_state_rows), 1, 4096);
  range("--top_k", absl::GetFlag(FLAGS_top_k), 1, 8192);
  range("--hot_rows", absl::GetFlag(FLAGS_hot_rows), absl::GetFlag(FLAGS_top_k), 32768);
  range("--prompt", absl::GetFlag(FLAGS_prompt), absl::GetFlag(FLAGS_top_k), 1 << 20);
  if (absl::GetFlag(FLAGS_plane) == "auto") {
    Require(absl::InvalidArgumentError("is auto; it must be direct, server or rpc"), "--plane");
  }
}

void Run() {
  CheckFlags();
  const client::Plane plane = Get(client::ParsePlane("--plane", absl::GetFlag(FLAGS_plane)), "flags");
  Laps laps;
  Require(kernels::cuda::ToStatus(cudaFree(nullptr), "CUDA"), "context");
  const double context_ms = laps.Lap();
  const client::Client client = Get(client::Client::Connect(absl::GetFlag(FLAGS_server)), "--server");
  v1::GetPoolRequest get;
  get.set_name(absl::GetFlag(FLAGS_pool));
  const v1::PoolSpec pool = Get(client.GetPool(get), "--pool").pool().spec();
  if (pool.row_layout() != v1::ROW_LAYOUT_LINEAR) Require(absl::InvalidArgumentError("is not LINEAR"), "--pool");
  const bool mps = Get(client.GetStatus(), "GetStatus").mps_enabled();
  const v1::AttachRequest attach = AttachTo(pool, plane);
  const bool phases = absl::GetFlag(FLAGS_phases);
  const std::string head = Head(phases ? "phases" : "whole", pool, attach, mps, context_ms);
  if (phases) {
    Phases(attach, head);
  } else {
    Whole(client, pool, attach, plane, head);
  }
}

}  // namespace
}  // namespace stoker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Times a fresh engine's attach and first step; see the head of tests/gpu/attach_bench.cc.");
  absl::ParseCommandLine(argc, argv);
  stoker::client::DevicePlane::SetUpProcess();
  // gRPC 1.51 may wait up to ten seconds when the last channel goes; so it stays.
  grpc_init();
  stoker::bench::Run();
  return 0;
}
