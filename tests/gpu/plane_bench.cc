// stoker-plane-bench: what a decode step costs on each plane, with an engine whose own kernels do next to nothing.
//
//   stoker-plane-bench --server unix:/path --plane same,direct,server,rpc,rpc_group --entries empty,hot,FILE.stkw
//       --arena ipc --layers 61 --group 4 --batch 1 --steps 500 --waits separate,fused --commit "$(git rev-parse
//       --short HEAD)"
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
#include "client/direct_plane.h"
#include "client/replay/workload_file.h"
#include "client/session.h"
#include "client/status.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/device_uuid.h"
#include "kernels/cuda/handles.h"
#include "kernels/plane_step.h"
#include "tests/bench/samples.h"
#include "tests/gpu/plane_kernels.h"

ABSL_FLAG(std::string, server, "", "address of a running stokerd, for the planes but \"same\"");
ABSL_FLAG(std::string, arena, "ipc", "how the session's arena is shared: ipc, descriptor");
ABSL_FLAG(std::vector<std::string>, plane, std::vector<std::string>({"same"}), "same, direct, server, rpc, rpc_group");
ABSL_FLAG(std::vector<std::string>, entries, std::vector<std::string>({"empty"}), "empty, hot, or workload files");
ABSL_FLAG(std::vector<std::string>, waits, std::vector<std::string>({"separate"}), "server plane: separate, fused");
ABSL_FLAG(int32_t, layers, 61, "layers of the model, 1 to 1024");
ABSL_FLAG(int32_t, group, 4, "layers of an index group, 1 to layers");
ABSL_FLAG(int32_t, batch, 1, "sequences, one row each, 1 to 4096; at most those of a workload file");
ABSL_FLAG(int32_t, steps, 500, "timed steps");
ABSL_FLAG(int32_t, warmup, 100, "steps before them");
ABSL_FLAG(int32_t, top_k, 2048, "entries of a row, where there is no workload file");
ABSL_FLAG(int32_t, hot_rows, 4096, "likewise");
ABSL_FLAG(int32_t, row_bytes, 656, "likewise");
ABSL_FLAG(int32_t, context, 8192, "likewise: rows of a sequence before the first step");
ABSL_FLAG(int32_t, idle_sessions, 0, "other sessions that are armed meanwhile and never ring, 0 to 15; they need MPS");
ABSL_FLAG(std::string, commit, "", "of the source, for the result lines");

namespace stoker::bench {
namespace {

using kernels::cuda::DeviceMemory;
using kernels::cuda::GraphExecHandle;
using kernels::cuda::GraphHandle;
using kernels::cuda::StreamHandle;

constexpr int32_t kBlockRows = 64;
constexpr uint64_t kStagingBytes = uint64_t{64} << 20;
constexpr uint32_t kMaxPageSize = 10000;  // of ListSequences; a batch has fewer sequences
constexpr absl::Duration kPoolTimeout = absl::Minutes(5);

// The benchmark's own work: whatever goes wrong ends it.
void Require(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "stoker-plane-bench: %s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}
void Require(cudaError_t error, const char* what) { Require(kernels::cuda::ToStatus(error, "CUDA"), what); }
template <typename T>
T Get(absl::StatusOr<T> value, const char* what) {
  Require(value.status(), what);
  return *std::move(value);
}

struct Shape {
  int32_t groups() const { return (layers + group_layers - 1) / group_layers; }
  int32_t GroupBegin(int32_t group) const { return std::min(group * group_layers, layers); }
  int32_t total_steps() const { return warmup + steps; }
  int32_t max_sequence_rows() const { return context + total_steps() + 1; }
  int32_t columns() const { return (max_sequence_rows() + kBlockRows - 1) / kBlockRows; }

  std::string name;  // of the entries
  int32_t layers = 0, group_layers = 0, batch = 0, steps = 0, warmup = 0;
  int32_t top_k = 0, hot_rows = 0, row_bytes = 0, context = 0;
  int32_t entry_steps = 1;
  std::vector<int32_t> entries;  // [entry_steps][batch][top_k]
};

Shape MakeShape(const std::string& entries) {
  Shape shape;
  shape.layers = absl::GetFlag(FLAGS_layers);
  shape.group_layers = absl::GetFlag(FLAGS_group);
  shape.batch = absl::GetFlag(FLAGS_batch);
  shape.steps = absl::GetFlag(FLAGS_steps);
  shape.warmup = absl::GetFlag(FLAGS_warmup);
  if (entries == "empty" || entries == "hot") {
    shape.name = entries;
    shape.top_k = absl::GetFlag(FLAGS_top_k);
    shape.hot_rows = absl::GetFlag(FLAGS_hot_rows);
    shape.row_bytes = absl::GetFlag(FLAGS_row_bytes);
    shape.context = std::max(absl::GetFlag(FLAGS_context), shape.top_k);
    shape.entries.assign(static_cast<size_t>(shape.batch) * static_cast<size_t>(shape.top_k), -1);
    for (size_t i = 0; i < shape.entries.size() && entries == "hot"; ++i) {
      shape.entries[i] = static_cast<int32_t>(i % static_cast<size_t>(shape.top_k));
    }
  } else {
    const replay::Workload workload = Get(replay::ReadWorkload(entries), "workload");
    shape.name = entries.substr(entries.find_last_of('/') + 1);
    shape.top_k = static_cast<int32_t>(workload.top_k);
    shape.hot_rows = static_cast<int32_t>(workload.hot_rows);
    shape.row_bytes = static_cast<int32_t>(workload.row_bytes);
    shape.context = static_cast<int32_t>(workload.context);
    shape.entry_steps = static_cast<int32_t>(workload.steps);
    if (shape.batch > static_cast<int32_t>(workload.rows)) {
      Require(absl::InvalidArgumentError(
                  absl::StrCat("--batch is ", shape.batch, "; ", entries, " has ", workload.rows, " rows")),
              "workload");
    }
    for (uint32_t step = 0; step < workload.steps; ++step) {
      for (int32_t row = 0; row < shape.batch; ++row) {
        const absl::Span<const int32_t> of_row = workload.Entries(step, static_cast<uint32_t>(row));
        shape.entries.insert(shape.entries.end(), of_row.begin(), of_row.end());
      }
    }
  }
  if (shape.layers < 1 || shape.layers > 1024 || shape.group_layers < 1 || shape.group_layers > shape.layers ||
      shape.batch < 1 || shape.batch > 4096 || shape.steps < 2 || shape.warmup < 1 ||
      absl::GetFlag(FLAGS_idle_sessions) < 0 || absl::GetFlag(FLAGS_idle_sessions) > 15) {
    Require(absl::InvalidArgumentError(
                "--layers, --group, --batch, --steps, --warmup or --idle_sessions is out of its range"),
            "flags");
  }
  return shape;
}

// Where the engine finds a group's mailbox.
struct Mailbox {
  int32_t* indices = nullptr;
  uint64_t stride = 0;  // elements
  const int32_t* hot_rows = nullptr;
  const int32_t* misses = nullptr;
};

// The engine's memory, and its kernels.
class Engine {
 public:
  // Writes the lengths of each step to `lengths`, on the GPU; null: to memory of its own.
  Engine(const Shape& shape, std::vector<Mailbox> mailboxes, int32_t* lengths = nullptr)
      : shape_(shape), mailboxes_(std::move(mailboxes)) {
    Require(PrepareEngineKernels(), "kernels");
    const std::vector<int32_t> ones(static_cast<size_t>(shape.batch), 1);
    batch_.clock = Device(std::vector<EngineClock>(1));
    batch_.lengths = lengths != nullptr ? lengths : Device(std::vector<int32_t>(static_cast<size_t>(shape.batch)));
    batch_.rows = shape.batch;
    batch_.first_length = shape.context;
    entries_ = Device(shape.entries);
    commits_ = Device(ones);
    rows_ = Device(std::vector<int32_t>{shape.batch});
    sink_ = Device(std::vector<int32_t>(1));
    std::vector<const int32_t*> misses;
    for (const Mailbox& mailbox : mailboxes_) misses.push_back(mailbox.misses);
    end_.clock = batch_.clock;
    end_.misses = Device(misses);
    end_.groups = shape.groups();
    end_.rows = shape.batch;
    end_.count = static_cast<uint64_t>(shape.total_steps());
    end_.times = Device(std::vector<uint64_t>(end_.count));
  }

  // Copies values to the GPU, for as long as the engine lives.
  template <typename T>
  T* Device(const std::vector<T>& values) {
    memory_.push_back(Get(kernels::cuda::MakeDeviceMemory(values.size() * sizeof(T)), "memory"));
    Require(cudaMemcpy(memory_.back().get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    // From pageable memory the call may return before the bytes are there, and other streams do not wait for it.
    Require(cudaStreamSynchronize(nullptr), "copy");
    return static_cast<T*>(memory_.back().get());
  }

  void Begin(cudaStream_t stream) const { Require(LaunchBeginStep(batch_, stream), "begin"); }
  void Indexer(int32_t group, const client::DoorbellView* view, cudaStream_t stream) const {
    const Mailbox& mailbox = mailboxes_[static_cast<size_t>(group)];
    EngineEntries args;
    args.entries = entries_;
    args.clock = batch_.clock;
    args.steps = static_cast<uint64_t>(shape_.entry_steps);
    args.rows = shape_.batch;
    args.top_k = shape_.top_k;
    args.mailbox = mailbox.indices;
    args.mailbox_stride = mailbox.stride;
    Require(LaunchIndexer(args, view, static_cast<uint32_t>(group), stream), "indexer");
  }
  // Of the group; with a view the first of them waits.
  void Layers(int32_t group, const client::DoorbellView* view, cudaStream_t stream) const {
    for (int32_t layer = shape_.GroupBegin(group); layer < shape_.GroupBegin(group + 1); ++layer) {
      Require(LaunchLayer({mailboxes_[static_cast<size_t>(group)].hot_rows, sink_}, view, static_cast<uint32_t>(group),
                          stream),
              "layer");
      view = nullptr;
    }
  }
  void End(cudaStream_t stream) const { Require(LaunchEndStep(end_, stream), "end"); }

  const int32_t* rows() const { return rows_; }
  const int32_t* lengths() const { return batch_.lengths; }
  const int32_t* commits() const { return commits_; }

  uint64_t misses() const {
    EngineClock clock;
    Require(cudaMemcpy(&clock, batch_.clock, sizeof clock, cudaMemcpyDeviceToHost), "copy");
    return clock.misses;
  }
  // Microseconds of the timed steps.
  Samples times() const {
    std::vector<uint64_t> ns(end_.count);
    Require(cudaMemcpy(ns.data(), end_.times, ns.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost), "copy");
    Samples samples;
    for (size_t i = static_cast<size_t>(shape_.warmup); i < ns.size(); ++i) {
      samples.Add(static_cast<double>(ns[i] - ns[i - 1]) / 1e3);
    }
    return samples;
  }

 private:
  const Shape& shape_;
  const std::vector<Mailbox> mailboxes_;
  std::vector<DeviceMemory> memory_;
  EngineBatch batch_;
  EngineEnd end_;
  const int32_t* entries_ = nullptr;
  const int32_t* commits_ = nullptr;
  const int32_t* rows_ = nullptr;
  int32_t* sink_ = nullptr;
};

// What `enqueue` puts on the stream, to be launched again and again.
GraphExecHandle Capture(cudaStream_t stream, const std::function<void()>& enqueue) {
  Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  cudaGraph_t captured = nullptr;
  Require(cudaStreamEndCapture(stream, &captured), "capture");
  const GraphHandle graph(captured);
  cudaGraphExec_t exec = nullptr;
  Require(cudaGraphInstantiate(&exec, captured, 0), "graph");
  GraphExecHandle handle(exec);
  Require(cudaGraphUpload(exec, stream), "graph");
  return handle;
}

bool SeesMps() {
  int enabled = 0;
  if (cudaDeviceGetAttribute(&enabled, cudaDevAttrMpsEnabled, 0) == cudaSuccess) return enabled != 0;
  cudaGetLastError();
  return false;
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

// Launches all steps of a plane whose step is one graph. `status`, if any, must be OK before each launch.
void LaunchSteps(const Shape& shape, const GraphExecHandle& graph, cudaStream_t stream,
                 const std::function<absl::Status()>& status = nullptr) {
  const auto launch = [&](int32_t steps, const char* what) {
    for (int32_t i = 0; i < steps; ++i) {
      if (status != nullptr) Require(status(), what);
      Require(cudaGraphLaunch(graph.get(), stream), "launch");
    }
    Require(cudaStreamSynchronize(stream), what);
  };
  launch(shape.warmup, "warm-up");
  launch(shape.steps, "steps");
}

// The first timed step's time has the host's pause between the two rounds in it, so it is left out.
void ReportGraphs(const Shape& shape, const char* plane, const std::string& waits, const Engine& engine, bool mps) {
  const Samples all = engine.times();
  Samples samples;
  double total = 0;
  size_t i = 0;
  for (const double us : all.values()) {
    if (i++ == 0) continue;
    samples.Add(us);
    total += us;
  }
  Report(shape, plane, waits, samples, MeanOf(samples, total), engine.misses(), shape.total_steps(), mps);
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
    LaunchSteps(shape_, graph, stream());
    const auto* const words = memory_.batch.words;
    for (int32_t i = 0; i < shape_.batch; ++i) {
      if (words[i].stored_rows == shape_.context + shape_.total_steps()) continue;
      Require(absl::InternalError(absl::StrCat("sequence ", i, " has ", words[i].stored_rows, " stored rows, not ",
                                               shape_.context + shape_.total_steps())),
              "same");
    }
    ReportGraphs(shape_, "same", "none", engine, SeesMps());
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

uint64_t BytesOfARow(const Shape& shape) {
  return static_cast<uint64_t>(shape.layers) * static_cast<uint64_t>(shape.row_bytes);
}

// A session of the shape, with room for so many sequences. `plane` as AttachRequest.plane.
v1::AttachRequest AttachTo(const Shape& shape, const std::string& pool, const std::string& name, v1::Plane plane,
                           int32_t state_rows) {
  v1::AttachRequest attach;
  attach.set_pool(pool);
  attach.set_plane(plane);
  attach.set_arena_sharing(absl::GetFlag(FLAGS_arena) == "descriptor" ? v1::ARENA_SHARING_DESCRIPTOR
                                                                      : v1::ARENA_SHARING_IPC_HANDLE);
  attach.set_name(name);
  attach.set_state_rows(static_cast<uint32_t>(state_rows));
  attach.set_hot_rows(static_cast<uint32_t>(shape.hot_rows));
  attach.set_max_top_k(static_cast<uint32_t>(shape.top_k));
  attach.set_max_batch_rows(static_cast<uint32_t>(state_rows));
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

// Sessions that are armed, and whose doorbells nobody rings.
class IdleSessions {
 public:
  IdleSessions(const Shape& shape, const client::Client& client, const std::string& pool) {
    client::SessionOptions options;
    options.reattach_timeout = absl::ZeroDuration();
    options.arena_mapping = client::ArenaMapping::kDevice;
    for (int32_t i = 0; i < absl::GetFlag(FLAGS_idle_sessions); ++i) {
      const v1::AttachRequest attach =
          AttachTo(shape, pool, absl::StrCat("plane-bench-idle-", i), v1::PLANE_UNSPECIFIED, 1);
      sessions_.push_back(Get(client.Attach(attach, options), "Attach, idle"));
      planes_.push_back(Get(client::DevicePlane::Arm(*sessions_.back(), attach.max_top_k()), "Arm, idle"));
    }
  }

 private:
  std::vector<std::unique_ptr<client::Session>> sessions_;
  std::vector<std::unique_ptr<client::DevicePlane>> planes_;
};

// A session with a daemon, whose sequences are stored.
class RemoteSession {
 public:
  // `plane` as AttachRequest.plane: PLANE_DIRECT, or none for the others.
  RemoteSession(const Shape& shape, const client::Client& client, const std::string& pool, v1::Plane plane)
      : shape_(shape) {
    v1::AttachRequest attach = AttachTo(shape, pool, "plane-bench", plane, shape.batch);
    const uint64_t row_bytes = BytesOfARow(shape);
    attach.set_staging_bytes((std::max(kStagingBytes, row_bytes) + 63) / 64 * 64);
    client::SessionOptions options;
    options.reattach_timeout = absl::ZeroDuration();
    options.arena_mapping = client::ArenaMapping::kDevice;
    session_ = Get(client.Attach(attach, options), "Attach");
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

  void RunServer(const std::string& waits, bool mps) {
    const cudaStream_t stream = stream_.get();
    Engine engine(shape_, mailboxes_);
    const auto plane = Get(client::DevicePlane::Arm(*session_, static_cast<uint32_t>(shape_.top_k)), "Arm");
    const client::DeviceBatch batch = {engine.rows(), engine.Device(ids_), engine.Device(state_rows_),
                                       engine.lengths()};
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
    LaunchSteps(shape_, graph, stream);
    Require(plane->status(), "server plane");
    const uint64_t steps = Get(plane->Disarm(), "Disarm");
    if (steps != static_cast<uint64_t>(shape_.total_steps())) {
      Require(absl::InternalError(absl::StrCat(steps, " steps were finished")), "Disarm");
    }
    CheckStatuses("server plane");
    ReportGraphs(shape_, "server", waits, engine, mps);
  }

  // `client` is of the session's daemon.
  void RunDirect(const client::Client& client, bool mps) {
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
    LaunchSteps(shape_, graph, stream, [&] { return plane->status(); });
    Require(plane->status(), "direct plane");
    CheckStatuses("direct plane");
    CheckStored(client);
    ReportGraphs(shape_, "direct", "none", engine, mps);
  }

  void RunCalls(bool each_group, bool mps) {
    const cudaStream_t stream = stream_.get();
    const Engine engine(shape_, mailboxes_);
    const int32_t calls = each_group ? shape_.groups() : 1;
    // Of each call: what comes before it and what comes after.
    std::vector<GraphExecHandle> before, after;
    std::vector<v1::StepRequest> requests(static_cast<size_t>(calls));
    for (int32_t call = 0; call < calls; ++call) {
      const int32_t first = each_group ? call : 0, end = each_group ? call + 1 : shape_.groups();
      before.push_back(Capture(stream, [&] {
        if (call == 0) engine.Begin(stream);
        for (int32_t g = first; g < end; ++g) engine.Indexer(g, nullptr, stream);
      }));
      after.push_back(Capture(stream, [&] {
        for (int32_t g = first; g < end; ++g) engine.Layers(g, nullptr, stream);
        if (call + 1 == calls) engine.End(stream);
      }));
      v1::StepRequest& request = requests[static_cast<size_t>(call)];
      request.set_top_k(static_cast<uint32_t>(shape_.top_k));
      request.set_source(v1::DATA_SOURCE_SHARED);
      for (int32_t g = first; g < end; ++g) request.add_groups()->set_group(static_cast<uint32_t>(g));
      for (const uint64_t id : ids_) {
        v1::StepRow* row = request.add_rows();
        row->set_sequence_id(id);
        row->set_commit(call == 0);
      }
    }
    Require(cudaStreamSynchronize(stream), "graphs");
    Samples samples;
    double total = 0;
    v1::StepResponse response;
    for (int32_t step = 1; step <= shape_.total_steps(); ++step) {
      const Stopwatch watch;
      for (size_t call = 0; call < requests.size(); ++call) {
        for (v1::StepRow& row : *requests[call].mutable_rows()) {
          row.set_length(static_cast<uint32_t>(shape_.context + step));
        }
        Require(cudaGraphLaunch(before[call].get(), stream), "launch");
        Require(cudaStreamSynchronize(stream), "indexer");
        Require(session_->Step(requests[call], &response), "Step");
        Require(client::FirstError(response.statuses()), "Step");
        Require(cudaGraphLaunch(after[call].get(), stream), "launch");
      }
      Require(cudaStreamSynchronize(stream), "layers");
      if (step <= shape_.warmup) continue;
      samples.Add(watch.us());
      total += watch.us();
    }
    Report(shape_, each_group ? "rpc_group" : "rpc", "call", samples, MeanOf(samples, total), engine.misses(),
           shape_.total_steps(), mps);
  }

 private:
  // Opens a sequence, and stores `context` rows of whatever the staging area holds.
  void Open(uint64_t chunk_rows) {
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

  // Of the last step, which is taken only if all before it have stored their rows.
  void CheckStatuses(const char* plane) const {
    const absl::Span<const int32_t> in_arena = Get(arena_->Mail(), "arena").statuses;
    std::vector<int32_t> statuses(in_arena.size());
    Require(arena_->CopyOut(in_arena, statuses.data()), "statuses");
    for (size_t i = 0; i < statuses.size(); ++i) {
      if (statuses[i] == 0) continue;
      Require(absl::InternalError(absl::StrCat("batch row ", i, " has the status ", statuses[i])), plane);
    }
  }

  // That every step has stored a row of each sequence, as the daemon sees it.
  void CheckStored(const client::Client& client) const {
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

  const Shape& shape_;
  std::unique_ptr<client::Session> session_;
  std::shared_ptr<const client::Arena> arena_;
  std::vector<Mailbox> mailboxes_;
  std::vector<uint64_t> ids_;
  std::vector<int32_t> state_rows_;
  StreamHandle stream_;
};

v1::PoolSpec PoolOf(const Shape& shape) {
  v1::PoolSpec spec;
  spec.set_name("plane-bench");
  spec.set_layers(static_cast<uint32_t>(shape.layers));
  spec.set_row_layout(v1::ROW_LAYOUT_LINEAR);
  spec.set_row_bytes(static_cast<uint32_t>(shape.row_bytes));
  spec.set_block_rows(kBlockRows);
  spec.set_blocks(static_cast<uint32_t>(shape.batch * shape.columns()));
  return spec;
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
  RemoteSession session(shape, client, create.spec().name(),
                        plane == "direct" ? v1::PLANE_DIRECT : v1::PLANE_UNSPECIFIED);
  if (plane == "server") {
    session.RunServer(waits, mps);
  } else if (plane == "direct") {
    session.RunDirect(client, mps);
  } else {
    session.RunCalls(plane == "rpc_group", mps);
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
  for (const std::string& entries : absl::GetFlag(FLAGS_entries)) {
    const Shape shape = MakeShape(entries);
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
