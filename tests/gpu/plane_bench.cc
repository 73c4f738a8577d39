// stoker-plane-bench: what a decode step costs on each plane, with an engine whose own kernels do next to nothing.
//
//   stoker-plane-bench --server unix:/path --plane same,direct,server,rpc,rpc_group --entries empty,hot,FILE.stkw
//       --arena ipc --layers 61 --group 4 --batch 1 --steps 500 --waits separate,fused --commit COMMIT
//
// Planes: "same" is the daemon's kernels, commits included, in this process, with the engine's between them, as one
// graph on one stream, and no daemon; "direct" is the same graph, of the direct plane, on the arena and the pool of a
// daemon, which does nothing for a step; "server" is the server plane against a daemon, both sides graphs, and needs
// MPS; "rpc" is one Step of all groups for each step, "rpc_group" one for each group (with --group 1: for each layer).
//
// A step: each group's entries are brought to the mailbox by a kernel, resolved and gathered, then a kernel for each of
// its layers runs; at the end every row's newest token is committed. Entries: "empty" are all -1; "hot" are the same in
// every step; a workload file (client/replay/workload_file.h) brings its own shape, and every group gets its entries.
// Waits of the server plane on the engine's side: "separate" are kernels of one thread, "fused" are inside the first
// kernel of a layer that needs the answer.
//
// Times of "same", "direct" and "server" are the GPU's, from the end of a step to the end of the next; those of "rpc"
// the host's. With --idle_sessions others are armed beside all planes but "same". misses_per_step is counted, over all
// groups and rows. Rows are not compared here: plane_process_gpu_test, direct_plane_gpu_test and stoker-replay do that.
// One JSON object a line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
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
#include "client/session.h"
#include "client/status.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/handles.h"
#include "kernels/plane_step.h"
#include "tests/bench/samples.h"
#include "tests/gpu/decode_engine.h"
#include "tests/gpu/decode_session.h"
#include "tests/gpu/plane_kernels.h"

ABSL_FLAG(std::string, server, "", "address of a running stokerd, for the planes but \"same\"");
ABSL_FLAG(std::string, arena, "ipc", "how the session's arena is shared: ipc, descriptor");
ABSL_FLAG(std::vector<std::string>, plane, std::vector<std::string>({"same"}), "same, direct, server, rpc, rpc_group");
ABSL_FLAG(std::vector<std::string>, entries, std::vector<std::string>({"empty"}), "empty, hot, or workload files");
ABSL_FLAG(std::vector<std::string>, waits, std::vector<std::string>({"separate"}), "server plane: separate, fused");
ABSL_FLAG(int32_t, layers, 61, "layers of the model, 1 to 1024");
ABSL_FLAG(int32_t, group, 4, "layers of an index group, 1 to layers");
ABSL_FLAG(int32_t, batch, 1, "sequences, one row each, 1 to 4096; at most those of a workload file");
ABSL_FLAG(int32_t, idle_sessions, 0, "other sessions that are armed meanwhile and never ring, 0 to 15; they need MPS");
ABSL_FLAG(int32_t, steps, 500, "timed steps");
ABSL_FLAG(int32_t, warmup, 100, "steps before them");
ABSL_FLAG(int32_t, top_k, 2048, "entries of a row, where there is no workload file");
ABSL_FLAG(int32_t, hot_rows, 4096, "likewise");
ABSL_FLAG(int32_t, row_bytes, 656, "likewise");
ABSL_FLAG(int32_t, context, 8192, "likewise: rows of a sequence before the first step");
ABSL_FLAG(std::string, commit, "", "of the source, for the result lines");

namespace stoker::bench {
namespace {

using kernels::cuda::DeviceMemory;
using kernels::cuda::GraphExecHandle;

constexpr absl::Duration kPoolTimeout = absl::Minutes(5);

Shape ShapeOfFlags() {
  Shape shape;
  shape.layers = absl::GetFlag(FLAGS_layers);
  shape.group_layers = absl::GetFlag(FLAGS_group);
  shape.batch = absl::GetFlag(FLAGS_batch);
  shape.steps = absl::GetFlag(FLAGS_steps);
  shape.warmup = absl::GetFlag(FLAGS_warmup);
  shape.top_k = absl::GetFlag(FLAGS_top_k);
  shape.hot_rows = absl::GetFlag(FLAGS_hot_rows);
  shape.row_bytes = absl::GetFlag(FLAGS_row_bytes);
  shape.context = absl::GetFlag(FLAGS_context);
  return shape;
}

void Report(const Shape& shape, const char* plane, const std::string& waits, const Samples& samples, double mean_us,
            uint64_t misses, int32_t counted_steps, bool mps) {
  cudaDeviceProp properties{};
  Require(cudaGetDeviceProperties(&properties, 0), "device");
  const bool remote = std::strcmp(plane, "same") != 0;
  std::printf(
      "{\"bench\": \"plane\", \"plane\": \"%s\", \"waits\": \"%s\", \"entries\": \"%s\", \"batch\": %d, "
      "\"layers\": %d, \"group_layers\": %d, \"top_k\": %d, \"hot_rows\": %d, \"row_bytes\": %d, \"context\": %d, "
      "\"arena\": \"%s\", \"steps\": %d, \"misses_per_step\": %.1f, \"us_per_layer\": %.3f, \"us_per_step\": %.2f, "
      "\"p50\": %.2f, \"p99\": %.2f, \"idle_sessions\": %d, \"mps\": %s, \"device\": \"%s\", \"commit\": \"%s\"}\n",
      plane, waits.c_str(), shape.name.c_str(), shape.batch, shape.layers, shape.group_layers, shape.top_k,
      shape.hot_rows, shape.row_bytes, shape.context, remote ? absl::GetFlag(FLAGS_arena).c_str() : "none", shape.steps,
      static_cast<double>(misses) / counted_steps, mean_us / shape.layers, mean_us, samples.p50(), samples.p99(),
      remote ? absl::GetFlag(FLAGS_idle_sessions) : 0, mps ? "true" : "false", properties.name,
      absl::GetFlag(FLAGS_commit).c_str());
  std::fflush(stdout);
}

double MeanOf(const Samples& samples, double total_us) { return total_us / static_cast<double>(samples.count()); }

// The first timed step's time has the host's pause between the two rounds in it, so it is left out.
void ReportGraphs(const Shape& shape, const char* plane, const std::string& waits, const Engine& engine, bool mps) {
  const std::vector<double> times = engine.step_times();
  Samples samples;
  double total = 0;
  for (size_t i = static_cast<size_t>(shape.warmup) + 1; i < times.size(); ++i) {
    samples.Add(times[i]);
    total += times[i];
  }
  Report(shape, plane, waits, samples, MeanOf(samples, total), engine.misses(), shape.total_steps(), mps);
}

// Warm-up, then the timed steps.
PlaneRun RunOf(const Shape& shape, const char* plane, const std::string& waits, bool mps) {
  return {[&shape](const std::function<void(int32_t)>& launch) {
            launch(shape.warmup);
            launch(shape.steps);
          },
          [&shape, plane, waits, mps](const Engine& engine) { ReportGraphs(shape, plane, waits, engine, mps); }};
}

// The daemon's kernels over memory of this process.
class LocalPlane {
 public:
  explicit LocalPlane(const Shape& shape) : shape_(shape) {
    backend_ = Get(kernels::cuda::MakeCudaBackend(0), "backend");
    stream_ = Get(backend_->CreateStream(), "stream");
    const int64_t newest_row = (int64_t{shape.hot_rows} + kBlockRows - 1) / kBlockRows * kBlockRows;
    const int64_t region_rows = newest_row + kBlockRows;
    const int64_t pool_rows = int64_t{shape.batch} * shape.columns() * kBlockRows;
    memory_.pool = Lay(pool_rows);
    memory_.hot = Lay(region_rows * shape.batch);
    pool_ = Get(backend_->AllocatePool(static_cast<size_t>(memory_.pool.layer_stride) * Layers()), "pool");
    memory_.pool.base = pool_->data();
    memory_.hot.base = Private(static_cast<size_t>(memory_.hot.layer_stride) * Layers());
    host_ = Get(backend_->AllocateHost(sizeof(kernels::PlaneResult) + 16 + WordsBytes()), "host memory");
    auto* const words = reinterpret_cast<kernels::SequenceWord*>(host_->data());
    for (int32_t i = 0; i < shape.batch; ++i) words[i] = {shape.context, shape.max_sequence_rows(), kSession};
    result_ = reinterpret_cast<kernels::PlaneResult*>(host_->data() + WordsBytes());

    for (int32_t l = 0; l < shape.layers; ++l) memory_.layers.push_back(l);
    kernels::BatchArgs& batch = memory_.batch;
    const auto rows = static_cast<size_t>(shape.batch);
    std::vector<uint64_t> ids(rows);
    std::vector<int32_t> state_rows(rows);
    std::vector<kernels::StateRowEntry> entries(rows);
    for (size_t i = 0; i < rows; ++i) {
      ids[i] = i + 1;
      state_rows[i] = static_cast<int32_t>(i);
      entries[i] = {i + 1, static_cast<int32_t>(i), 0};
    }
    std::vector<int32_t> table(rows * static_cast<size_t>(shape.columns()));
    std::iota(table.begin(), table.end(), 0);
    batch.state = Zeroed<kernels::PlaneState>(1);
    batch.raises_step = true;
    batch.mail.sequence_ids = Device(ids);
    batch.mail.state_rows = Device(state_rows);
    batch.mail.statuses = Zeroed<int32_t>(rows);
    batch.plan.rows = Zeroed<int32_t>(1);
    for (int32_t** array :
         {&batch.plan.state_rows, &batch.plan.lengths, &batch.plan.newest_pool_rows, &batch.plan.newest_hot_rows,
          &batch.plan.words, &batch.plan.commit_hot_rows, &batch.plan.commit_pool_rows}) {
      *array = Zeroed<int32_t>(rows);
    }
    batch.plan.claims = Device(std::vector<int32_t>(rows, kernels::kUnclaimed));
    batch.max_rows = shape.batch;
    batch.top_k = shape.top_k;
    batch.hot_rows = shape.hot_rows;
    batch.max_sequence_rows = shape.max_sequence_rows();
    batch.session = kSession;
    batch.entries = Device(entries);
    batch.state_rows = shape.batch;
    batch.words = words;
    batch.word_count = shape.batch;
    batch.block_table = Device(table);
    batch.block_table_stride = shape.columns();
    batch.block_table_columns = shape.columns();
    batch.block_rows = kBlockRows;
    batch.pool_rows = pool_rows;
    batch.region_rows = static_cast<int32_t>(region_rows);
    batch.newest_row = static_cast<int32_t>(newest_row);
    memory_.counters = Zeroed<uint64_t>(kernels::kPlaneCounters);
    batch.committed_rows = memory_.counters + kernels::kPlaneCommittedRows;
    memory_.mailbox_stride = shape.top_k;
    const size_t all_entries = rows * static_cast<size_t>(shape.top_k);
    const size_t slots = rows * static_cast<size_t>(shape.hot_rows);
    for (int32_t g = 0; g < shape.groups(); ++g) {
      kernels::PlaneGroup group;
      for (int32_t l = shape.GroupBegin(g); l < shape.GroupBegin(g + 1); ++l) group.layers.push_back(l);
      int32_t* const indices = Zeroed<int32_t>(all_entries);
      group.indices = indices;
      group.hot_rows = Zeroed<int32_t>(all_entries);
      group.misses = Zeroed<int32_t>(rows);
      group.residency.slot_key = Zeroed<int32_t>(slots);
      group.residency.lru = Zeroed<int16_t>(slots);
      group.residency.state_rows = shape.batch;
      group.residency.hot_rows = shape.hot_rows;
      group.miss_pool_rows = Zeroed<int32_t>(all_entries);
      group.miss_hot_rows = Zeroed<int32_t>(all_entries);
      group.miss_counts = Zeroed<int32_t>(rows);
      Require(cudaStreamSynchronize(nullptr), "zeroes");
      kernels::ResetArgs reset;
      reset.residency = group.residency;
      reset.state_rows = batch.mail.state_rows;
      reset.count = shape.batch;
      Require(stream_->Reset(reset), "reset");
      mailboxes_.push_back({indices, static_cast<uint64_t>(shape.top_k), group.hot_rows, group.misses});
      memory_.groups.push_back(std::move(group));
    }
    Require(cudaStreamSynchronize(stream()), "reset");
  }

  void Run() {
    const PlaneRun run = RunOf(shape_, "same", "none", SeesMps());
    Engine engine(shape_, mailboxes_);
    memory_.batch.mail.rows = engine.rows();
    memory_.batch.mail.lengths = engine.lengths();
    memory_.batch.mail.commits = engine.commits();
    const kernels::PlaneStep step(memory_);
    const GraphExecHandle graph = Capture(stream(), [&] {
      engine.Begin(stream());
      Require(step.Begin(*stream_), "begin");
      for (int32_t g = 0; g < shape_.groups(); ++g) {
        engine.Indexer(g, nullptr, stream());
        Require(step.Group(*stream_, g), "group");
        engine.Layers(g, nullptr, stream());
      }
      Require(step.Commit(*stream_), "commit");
      Require(step.Report(*stream_, result_), "report");
      engine.End(stream());
    });
    run.drive([&](int32_t steps) { LaunchSteps(graph, steps, stream()); });
    const auto* const words = memory_.batch.words;
    for (int32_t i = 0; i < shape_.batch; ++i) {
      if (words[i].stored_rows == shape_.context + shape_.total_steps()) continue;
      Require(absl::InternalError(absl::StrCat("sequence ", i, " has ", words[i].stored_rows, " stored rows, not ",
                                               shape_.context + shape_.total_steps())),
              "same");
    }
    run.report(engine);
  }

 private:
  static constexpr uint64_t kSession = 1;

  size_t Layers() const { return static_cast<size_t>(shape_.layers); }
  size_t WordsBytes() const { return sizeof(kernels::SequenceWord) * static_cast<size_t>(shape_.batch); }
  cudaStream_t stream() const { return static_cast<kernels::cuda::CudaStream&>(*stream_).get(); }
  kernels::RowStore Lay(int64_t rows) const {
    kernels::RowFormat format;
    format.row_bytes = shape_.row_bytes;
    kernels::RowStore store;
    store.layout = Get(kernels::RowLayout::Make(format, rows), "layout");
    store.layers = shape_.layers;
    store.layer_stride = (store.layout.layer_bytes + 255) / 256 * 256;
    return store;
  }
  std::byte* Private(size_t bytes) {
    buffers_.push_back(Get(kernels::cuda::MakeDeviceMemory(bytes), "device memory"));
    Require(cudaMemset(buffers_.back().get(), 0, bytes), "device memory");
    return static_cast<std::byte*>(buffers_.back().get());
  }
  template <typename T>
  T* Zeroed(size_t count) {
    return reinterpret_cast<T*>(Private(count * sizeof(T)));
  }
  template <typename T>
  T* Device(const std::vector<T>& values) {
    T* const memory = Zeroed<T>(values.size());
    Require(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    // From pageable memory the call may return before the bytes are there, and other streams do not wait for it.
    Require(cudaStreamSynchronize(nullptr), "copy");
    return memory;
  }

  const Shape& shape_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::Buffer> pool_, host_;
  std::vector<DeviceMemory> buffers_;
  kernels::PlaneMemory memory_;
  kernels::PlaneResult* result_ = nullptr;
  std::vector<Mailbox> mailboxes_;
  std::unique_ptr<kernels::Stream> stream_;  // last: its destructor waits for work that uses the rest
};

v1::ArenaSharing Sharing() {
  return absl::GetFlag(FLAGS_arena) == "descriptor" ? v1::ARENA_SHARING_DESCRIPTOR : v1::ARENA_SHARING_IPC_HANDLE;
}

// Sessions that are armed, and whose doorbells nobody rings.
class IdleSessions {
 public:
  IdleSessions(const Shape& shape, const client::Client& client, const std::string& pool) {
    for (int32_t i = 0; i < absl::GetFlag(FLAGS_idle_sessions); ++i) {
      v1::AttachRequest attach = AttachTo(shape, pool, v1::PLANE_UNSPECIFIED, Sharing());
      attach.set_name(absl::StrCat("plane-bench-idle-", i));
      attach.set_state_rows(1);
      attach.set_max_batch_rows(1);
      sessions_.push_back(Get(client.Attach(attach, SessionOnDevice()), "Attach, idle"));
      planes_.push_back(Get(client::DevicePlane::Arm(*sessions_.back(), attach.max_top_k()), "Arm, idle"));
    }
  }

 private:
  std::vector<std::unique_ptr<client::Session>> sessions_;
  std::vector<std::unique_ptr<client::DevicePlane>> planes_;
};

void RunCalls(const Shape& shape, DecodeSession& remote, bool each_group, bool mps) {
  const cudaStream_t stream = remote.stream();
  const Engine engine(shape, remote.mailboxes());
  const int32_t calls = each_group ? shape.groups() : 1;
  // Of each call: what comes before it and what comes after.
  std::vector<GraphExecHandle> before, after;
  std::vector<v1::StepRequest> requests(static_cast<size_t>(calls));
  for (int32_t call = 0; call < calls; ++call) {
    const int32_t first = each_group ? call : 0, end = each_group ? call + 1 : shape.groups();
    before.push_back(Capture(stream, [&] {
      if (call == 0) engine.Begin(stream);
      for (int32_t g = first; g < end; ++g) engine.Indexer(g, nullptr, stream);
    }));
    after.push_back(Capture(stream, [&] {
      for (int32_t g = first; g < end; ++g) engine.Layers(g, nullptr, stream);
      if (call + 1 == calls) engine.End(stream);
    }));
    v1::StepRequest& request = requests[static_cast<size_t>(call)];
    request.set_top_k(static_cast<uint32_t>(shape.top_k));
    request.set_source(v1::DATA_SOURCE_SHARED);
    for (int32_t g = first; g < end; ++g) request.add_groups()->set_group(static_cast<uint32_t>(g));
    for (const uint64_t id : remote.ids()) {
      v1::StepRow* row = request.add_rows();
      row->set_sequence_id(id);
      row->set_commit(call == 0);
    }
  }
  Require(cudaStreamSynchronize(stream), "graphs");
  Samples samples;
  double total = 0;
  v1::StepResponse response;
  for (int32_t step = 1; step <= shape.total_steps(); ++step) {
    const Stopwatch watch;
    for (size_t call = 0; call < requests.size(); ++call) {
      for (v1::StepRow& row : *requests[call].mutable_rows()) {
        row.set_length(static_cast<uint32_t>(shape.context + step));
      }
      Require(cudaGraphLaunch(before[call].get(), stream), "launch");
      Require(cudaStreamSynchronize(stream), "indexer");
      Require(remote.session().Step(requests[call], &response), "Step");
      Require(client::FirstError(response.statuses()), "Step");
      Require(cudaGraphLaunch(after[call].get(), stream), "launch");
    }
    Require(cudaStreamSynchronize(stream), "layers");
    if (step <= shape.warmup) continue;
    samples.Add(watch.us());
    total += watch.us();
  }
  Report(shape, each_group ? "rpc_group" : "rpc", "call", samples, MeanOf(samples, total), engine.misses(),
         shape.total_steps(), mps);
}

v1::PoolSpec PoolOf(const Shape& shape) {
  return PoolOf(shape, "plane-bench", static_cast<uint32_t>(shape.batch * shape.columns()));
}

// Each run has a session of its own; the pool stays for the others of the shape.
void RunRemote(const Shape& shape, const client::Client& client, const std::string& plane, const std::string& waits) {
  const bool mps = Get(client.GetStatus(), "GetStatus").mps_enabled();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = PoolOf(shape);
  client::CallOptions call;
  call.timeout = kPoolTimeout;
  Require(client.CreatePool(create, call).status(), "CreatePool");
  const IdleSessions idle(shape, client, create.spec().name());
  DecodeSession session(shape, client, create.spec().name(),
                        plane == "direct" ? v1::PLANE_DIRECT : v1::PLANE_UNSPECIFIED, Sharing());
  if (plane == "server") {
    session.RunServer(waits, RunOf(shape, "server", waits, mps));
  } else if (plane == "direct") {
    session.RunDirect(client, RunOf(shape, "direct", "none", mps));
  } else {
    RunCalls(shape, session, plane == "rpc_group", mps);
  }
}

void DropPool(const Shape& shape, const client::Client& client) {
  v1::DeletePoolRequest drop;
  drop.set_name(PoolOf(shape).name());
  client::CallOptions call;
  call.timeout = kPoolTimeout;
  // The session's end is the daemon's to see; until then the pool is in use.
  absl::Status dropped;
  for (int i = 0; i < 100; ++i) {
    dropped = client.DeletePool(drop, call).status();
    if (dropped.ok()) return;
    absl::SleepFor(absl::Milliseconds(50));
  }
  Require(dropped, "DeletePool");
}

void Run() {
  const std::vector<std::string> planes = absl::GetFlag(FLAGS_plane);
  for (const std::string& plane : planes) {
    if (plane != "same" && plane != "direct" && plane != "server" && plane != "rpc" && plane != "rpc_group") {
      Require(
          absl::InvalidArgumentError(absl::StrCat("\"", plane, "\" is none of same, direct, server, rpc, rpc_group")),
          "--plane");
    }
    if (plane != "same" && absl::GetFlag(FLAGS_server).empty()) {
      Require(absl::InvalidArgumentError("is needed for all planes but \"same\""), "--server");
    }
  }
  if (const std::string arena = absl::GetFlag(FLAGS_arena); arena != "ipc" && arena != "descriptor") {
    Require(absl::InvalidArgumentError(absl::StrCat("\"", arena, "\" is none of ipc, descriptor")), "--arena");
  }
  if (const int32_t idle = absl::GetFlag(FLAGS_idle_sessions); idle < 0 || idle > 15) {
    Require(absl::InvalidArgumentError(absl::StrCat(idle, " given, limits 0 and 15")), "--idle_sessions");
  }
  for (const std::string& entries : absl::GetFlag(FLAGS_entries)) {
    const Shape shape = WithEntries(ShapeOfFlags(), entries);
    std::optional<client::Client> client;
    for (const std::string& plane : planes) {
      if (plane == "same") {
        LocalPlane(shape).Run();
        continue;
      }
      if (!client.has_value()) client = Get(client::Client::Connect(absl::GetFlag(FLAGS_server)), "--server");
      for (const std::string& waits : absl::GetFlag(FLAGS_waits)) {
        RunRemote(shape, *client, plane, waits);
        if (plane != "server") break;
      }
    }
    if (client.has_value()) DropPool(shape, *client);
  }
}

}  // namespace
}  // namespace stoker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Times decode steps on each plane; see the head of tests/gpu/plane_bench.cc.");
  absl::ParseCommandLine(argc, argv);
  stoker::client::DevicePlane::SetUpProcess();
  stoker::bench::Run();
  return 0;
}
