// stoker-neighbour-bench: an engine's decode steps while a neighbour moves rows in bulk, on one GPU, one daemon and one
// pool.
//
//   stoker-neighbour-bench --server=unix:/path --entries FILE.stkw --plane direct,server --batch 8,1
//       --work idle,load,store --limits "--max-bulk-copy-blocks=16" --commit "$(git rev-parse --short HEAD)"
//
// The engine is this process: the steps of stoker-plane-bench, each a graph. The neighbour is another process of this
// program (--role=neighbour) with a session of its own, whose tensor of --neighbour_rows rows in all layers lies on the
// same GPU. While the engine steps it does nothing (idle), loads a sequence into the tensor again and again (load), or
// admits, stores and releases one from there (store).
//
// Times are the GPU's, from the end of a step to the end of the next; the neighbour's rate is over the whole of its
// calls, from before the engine's warm-up to behind its last step. The daemon's limits are its flags: --limits only
// names them in the result. One JSON object a line. tests/bench/gpu/neighbour.sh runs it for several limits.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/device_plane.h"
#include "client/session.h"
#include "client/status.h"
#include "client/tensor_memory.h"
#include "kernels/cuda/handles.h"
#include "tests/bench/samples.h"
#include "tests/gpu/decode_engine.h"
#include "tests/gpu/decode_session.h"

ABSL_FLAG(std::string, server, "", "address of a running stokerd");
ABSL_FLAG(std::string, role, "engine", "engine, or neighbour: what the engine starts");
ABSL_FLAG(std::vector<std::string>, plane, std::vector<std::string>({"direct"}), "direct, server (needs MPS)");
ABSL_FLAG(std::string, entries, "hot", "a workload file, or hot or empty");
ABSL_FLAG(std::vector<std::string>, batch, std::vector<std::string>({"8", "1"}), "sequences, one row each");
ABSL_FLAG(std::vector<std::string>, work, std::vector<std::string>({"idle", "load", "store"}), "of the neighbour");
ABSL_FLAG(int32_t, layers, 61, "layers of the model, 1 to 1024");
ABSL_FLAG(int32_t, group, 4, "layers of an index group, 1 to layers");
ABSL_FLAG(int32_t, steps, 2000, "timed steps of each work at batch 1; at larger batches fewer, at least 250");
ABSL_FLAG(int32_t, warmup, 50, "steps before them");
ABSL_FLAG(int32_t, top_k, 2048, "entries of a row, where there is no workload file");
ABSL_FLAG(int32_t, hot_rows, 4096, "likewise");
ABSL_FLAG(int32_t, row_bytes, 656, "likewise; the neighbour's");
ABSL_FLAG(int32_t, context, 8192, "likewise: rows of a sequence before the first step");
ABSL_FLAG(int32_t, neighbour_rows, 32768, "rows that the neighbour moves in a call, 1 to 1048576");
ABSL_FLAG(std::string, limits, "off", "the daemon's limits, for the result lines");
ABSL_FLAG(std::string, commit, "", "of the source, for the result lines");

namespace stoker::bench {
namespace {

constexpr char kPool[] = "neighbour-bench";
constexpr absl::Duration kPoolTimeout = absl::Minutes(5);
constexpr int32_t kMinSteps = 250;

// ---- the neighbour ----

// The other process: told what to do by lines on its standard input, each of which it answers with a line.
class Neighbour {
 public:
  Neighbour() {
    const auto rows = static_cast<uint32_t>(absl::GetFlag(FLAGS_neighbour_rows));
    const auto layers = static_cast<uint32_t>(absl::GetFlag(FLAGS_layers));
    const auto row_bytes = static_cast<uint32_t>(absl::GetFlag(FLAGS_row_bytes));
    const client::Client client = Get(client::Client::Connect(absl::GetFlag(FLAGS_server)), "--server");
    v1::AttachRequest attach;
    attach.set_pool(kPool);
    attach.set_name("neighbour");
    attach.set_state_rows(2);
    attach.set_hot_rows(64);
    attach.set_max_top_k(16);
    attach.set_max_batch_rows(2);
    attach.set_max_sequence_rows(rows);
    attach.set_index_space(v1::INDEX_SPACE_POSITION);
    v1::IndexGroup* group = attach.add_groups();
    for (uint32_t layer = 0; layer < layers; ++layer) group->add_layers(layer);
    client::SessionOptions options;
    options.reattach_timeout = absl::ZeroDuration();
    session_ = Get(client.Attach(attach, options), "Attach");

    const size_t layer_bytes = size_t{rows} * row_bytes;
    memory_ = Get(kernels::cuda::MakeDeviceMemory(layers * layer_bytes), "tensor");
    Require(cudaMemset(memory_.get(), 1, layers * layer_bytes), "tensor");
    Require(cudaDeviceSynchronize(), "tensor");
    v1::RegisterTensorRequest tensor;
    tensor.set_rows(rows);
    tensor.set_layer_stride_bytes(layer_bytes);
    tensor.add_parts()->set_row_stride_bytes(row_bytes);
    Require(client::DescribeDeviceMemory(memory_.get(), layers * layer_bytes, &tensor), "tensor");
    v1::RegisterTensorResponse registered;
    Require(session_->RegisterTensor(tensor, &registered), "RegisterTensor");
    tensor_id_ = registered.tensor_id();
    rows_ = rows;
    call_bytes_ = layers * layer_bytes;
    loaded_id_ = Admit();
    Store(loaded_id_);
  }

  void Serve() {
    Answer("ready");
    for (std::string line; std::getline(std::cin, line);) {
      if (line == "stop") {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
        Answer(absl::StrCat(calls_.load(), " ", calls_.load() * call_bytes_, " ", seconds_));
      } else {
        stop_ = false;
        calls_ = 0;
        seconds_ = 0;
        if (line != "idle") {
          thread_ = std::thread([this, loads = line == "load"] { Work(loads); });
          calls_.wait(0);  // the first call has ended: the next is under way
        }
        Answer("begun");
      }
    }
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  static void Answer(const std::string& line) { std::cout << line << std::endl; }

  uint64_t Admit() {
    v1::AdmitRequest admit;
    admit.add_items()->set_prompt_rows(rows_);
    admit.mutable_items(0)->set_max_rows(rows_);
    v1::AdmitResponse admitted;
    Require(session_->Admit(admit, &admitted), "Admit");
    Require(client::FromItem(admitted.sequences(0).status()), "Admit");
    return admitted.sequences(0).sequence_id();
  }
  void SetRange(uint64_t id, v1::RowRange* range) const {
    range->set_sequence_id(id);
    range->set_row_count(rows_);
  }
  void Store(uint64_t id) {
    v1::StoreRequest store;
    v1::StoreItem* item = store.add_items();
    SetRange(id, item->mutable_range());
    item->set_source(v1::DATA_SOURCE_TENSOR);
    item->mutable_tensor()->add_tensor_ids(tensor_id_);
    v1::StoreResponse stored;
    Require(session_->Store(store, &stored), "Store");
    Require(client::FirstError(stored.statuses()), "Store");
  }
  void Load() {
    v1::LoadRequest load;
    v1::LoadItem* item = load.add_items();
    SetRange(loaded_id_, item->mutable_range());
    item->set_target(v1::LOAD_TARGET_TENSOR);
    item->mutable_tensor()->add_tensor_ids(tensor_id_);
    v1::LoadResponse loaded;
    Require(session_->Load(load, &loaded), "Load");
    Require(client::FirstError(loaded.statuses()), "Load");
  }
  void Release(uint64_t id) {
    v1::ReleaseRequest release;
    release.add_sequence_ids(id);
    v1::ReleaseResponse released;
    Require(session_->Release(release, &released), "Release");
    Require(client::FirstError(released.statuses()), "Release");
  }
  void Work(bool loads) {
    const Stopwatch watch;
    while (!stop_) {
      if (loads) {
        Load();
      } else {
        const uint64_t id = Admit();
        Store(id);
        Release(id);
      }
      ++calls_;
      calls_.notify_all();
    }
    seconds_ = watch.us() / 1e6;
  }

  kernels::cuda::DeviceMemory memory_;
  std::unique_ptr<client::Session> session_;
  uint64_t tensor_id_ = 0, loaded_id_ = 0, call_bytes_ = 0;
  uint32_t rows_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<uint64_t> calls_ = 0;
  double seconds_ = 0;  // of the thread's work; read when it has ended
  std::thread thread_;
};

// That process, as the engine sees it.
class NeighbourProcess {
 public:
  // The child makes only system calls before it executes the program.
  explicit NeighbourProcess(const std::vector<std::string>& arguments) {
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    int in[2], out[2];
    if (pipe(in) != 0 || pipe(out) != 0) Fail("pipe");
    pid_ = fork();
    if (pid_ < 0) Fail("fork");
    if (pid_ == 0) {
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      for (const int descriptor : {in[0], in[1], out[0], out[1]}) close(descriptor);
      execv("/proc/self/exe", argv.data());
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = fdopen(out[0], "r");
  }
  // It ends when its input does.
  ~NeighbourProcess() {
    close(to_);
    fclose(from_);
    waitpid(pid_, nullptr, 0);
  }
  NeighbourProcess(const NeighbourProcess&) = delete;
  NeighbourProcess& operator=(const NeighbourProcess&) = delete;

  std::string Ask(const std::string& line) {
    const std::string bytes = line + "\n";
    if (write(to_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) Fail("a neighbour that listens");
    return Read();
  }
  std::string Read() {
    char line[256];
    if (fgets(line, sizeof line, from_) == nullptr) Fail("an answer of the neighbour's");
    return std::string(line, std::string(line).find('\n'));
  }

 private:
  static void Fail(const char* what) { Require(absl::UnavailableError("there is none"), what); }

  pid_t pid_ = -1;
  int to_ = -1;
  FILE* from_ = nullptr;
};

// ---- the engine ----

struct WorkResult {
  std::string work;
  uint64_t calls = 0;
  double gb_per_s = 0;
};

Shape ShapeOf(int32_t batch, int32_t works) {
  Shape shape;
  shape.layers = absl::GetFlag(FLAGS_layers);
  shape.group_layers = absl::GetFlag(FLAGS_group);
  shape.batch = batch;
  shape.top_k = absl::GetFlag(FLAGS_top_k);
  shape.hot_rows = absl::GetFlag(FLAGS_hot_rows);
  shape.row_bytes = absl::GetFlag(FLAGS_row_bytes);
  shape.context = absl::GetFlag(FLAGS_context);
  // Of each work, one after the other.
  const int32_t steps = std::max(absl::GetFlag(FLAGS_steps) / batch, kMinSteps);
  shape.warmup = absl::GetFlag(FLAGS_warmup);
  shape.steps = works * (shape.warmup + steps) - shape.warmup;
  return WithEntries(shape, absl::GetFlag(FLAGS_entries));
}

void Report(const Shape& shape, const std::string& plane, const WorkResult& result, const Samples& samples,
            double misses_per_step, bool mps, const std::string& command) {
  cudaDeviceProp properties{};
  Require(cudaGetDeviceProperties(&properties, 0), "device");
  double total = 0, most = 0;
  for (const double us : samples.values()) {
    total += us;
    most = std::max(most, us);
  }
  std::printf(
      "{\"bench\": \"neighbour\", \"plane\": \"%s\", \"work\": \"%s\", \"limits\": \"%s\", \"batch\": %d, "
      "\"us_per_step\": %.2f, \"p50\": %.2f, \"p99\": %.2f, \"max\": %.2f, \"neighbour_gb_per_s\": %.2f, "
      "\"neighbour_calls\": %llu, \"neighbour_rows\": %d, \"entries\": \"%s\", \"layers\": %d, \"group_layers\": %d, "
      "\"top_k\": %d, \"hot_rows\": %d, \"row_bytes\": %d, \"context\": %d, \"steps\": %zu, "
      "\"misses_per_step\": %.1f, \"mps\": %s, \"device\": \"%s\", \"commit\": \"%s\", \"command\": \"%s\"}\n",
      plane.c_str(), result.work.c_str(), absl::GetFlag(FLAGS_limits).c_str(), shape.batch,
      total / static_cast<double>(samples.count()), samples.p50(), samples.p99(), most, result.gb_per_s,
      static_cast<unsigned long long>(result.calls), absl::GetFlag(FLAGS_neighbour_rows), shape.name.c_str(),
      shape.layers, shape.group_layers, shape.top_k, shape.hot_rows, shape.row_bytes, shape.context, samples.count(),
      misses_per_step, mps ? "true" : "false", properties.name, absl::GetFlag(FLAGS_commit).c_str(), command.c_str());
  std::fflush(stdout);
}

void RunPlane(const Shape& shape, const client::Client& client, const std::string& plane, NeighbourProcess& neighbour,
              const std::string& command) {
  const std::vector<std::string> works = absl::GetFlag(FLAGS_work);
  const bool mps = Get(client.GetStatus(), "GetStatus").mps_enabled();
  const int32_t of_work = shape.total_steps() / static_cast<int32_t>(works.size());
  std::vector<WorkResult> results;
  PlaneRun run;
  run.drive = [&](const std::function<void(int32_t)>& launch) {
    for (const std::string& work : works) {
      neighbour.Ask(work);
      launch(shape.warmup);
      launch(of_work - shape.warmup);
      const std::vector<std::string> told = absl::StrSplit(neighbour.Ask("stop"), ' ');
      WorkResult result;
      result.work = work;
      uint64_t bytes = 0;
      double seconds = 0;
      if (told.size() != 3 || !absl::SimpleAtoi(told[0], &result.calls) || !absl::SimpleAtoi(told[1], &bytes) ||
          !absl::SimpleAtod(told[2], &seconds)) {
        Require(absl::InternalError(absl::StrJoin(told, " ")), "the neighbour's answer");
      }
      if (seconds > 0) result.gb_per_s = static_cast<double>(bytes) / seconds / 1e9;
      results.push_back(result);
    }
  };
  run.report = [&](const Engine& engine) {
    const std::vector<double> times = engine.step_times();
    const double misses = static_cast<double>(engine.misses()) / shape.total_steps();
    for (size_t w = 0; w < results.size(); ++w) {
      // The first timed step has the host's pause behind the warm-up in it, so it is left out.
      const size_t begin = w * static_cast<size_t>(of_work) + static_cast<size_t>(shape.warmup) + 1;
      const size_t end = (w + 1) * static_cast<size_t>(of_work);
      Samples samples;
      for (size_t i = begin; i < end; ++i) samples.Add(times[i]);
      Report(shape, plane, results[w], samples, misses, mps, command);
    }
  };
  DecodeSession session(shape, client, kPool, plane == "direct" ? v1::PLANE_DIRECT : v1::PLANE_UNSPECIFIED);
  if (plane == "direct") {
    session.RunDirect(client, run);
  } else {
    session.RunServer("separate", run);
  }
}

// The command line for the result, without the folders of the machine.
std::string CommandOf(int argc, char** argv) {
  std::string command = "stoker-neighbour-bench";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (absl::StartsWith(argument, "--server=")) continue;
    const size_t slash = argument.rfind('/');
    const size_t equals = argument.find('=');
    const bool has_folder = slash != std::string::npos && equals != std::string::npos && slash > equals;
    absl::StrAppend(&command, " ", has_folder ? argument.substr(0, equals + 1) + argument.substr(slash + 1) : argument);
  }
  return command;
}

void Run(const std::string& command, const std::string& program) {
  const std::vector<std::string> works = absl::GetFlag(FLAGS_work);
  for (const std::string& work : works) {
    if (work == "idle" || work == "load" || work == "store") continue;
    Require(absl::InvalidArgumentError(absl::StrCat("\"", work, "\" is none of idle, load, store")), "--work");
  }
  for (const std::string& plane : absl::GetFlag(FLAGS_plane)) {
    if (plane == "direct" || plane == "server") continue;
    Require(absl::InvalidArgumentError(absl::StrCat("\"", plane, "\" is none of direct, server")), "--plane");
  }
  const int32_t rows = absl::GetFlag(FLAGS_neighbour_rows);
  if (rows < 1 || rows > 1 << 20) {
    Require(absl::InvalidArgumentError(absl::StrCat(rows, " is out of range: 1 to 1048576")), "--neighbour_rows");
  }
  std::vector<Shape> shapes;
  for (const std::string& text : absl::GetFlag(FLAGS_batch)) {
    int32_t batch = 0;
    if (!absl::SimpleAtoi(text, &batch) || batch < 1) {
      Require(absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not a number from 1")), "--batch");
    }
    shapes.push_back(ShapeOf(batch, static_cast<int32_t>(works.size())));
  }
  if (shapes.empty() || works.empty()) Require(absl::InvalidArgumentError("is empty"), "--batch or --work");

  // Of the largest session, and of the neighbour's two sequences.
  int32_t blocks = 0;
  for (const Shape& shape : shapes) blocks = std::max(blocks, shape.batch * shape.columns());
  blocks += 2 * ((rows + kBlockRows - 1) / kBlockRows);
  const client::Client client = Get(client::Client::Connect(absl::GetFlag(FLAGS_server)), "--server");
  v1::CreatePoolRequest create;
  *create.mutable_spec() = PoolOf(shapes[0], kPool, static_cast<uint32_t>(blocks));
  client::CallOptions call;
  call.timeout = kPoolTimeout;
  Require(client.CreatePool(create, call).status(), "CreatePool");

  NeighbourProcess neighbour({program, "--role=neighbour", absl::StrCat("--server=", absl::GetFlag(FLAGS_server)),
                              absl::StrCat("--layers=", shapes[0].layers),
                              absl::StrCat("--row_bytes=", shapes[0].row_bytes),
                              absl::StrCat("--neighbour_rows=", rows)});
  neighbour.Read();
  for (const Shape& shape : shapes) {
    for (const std::string& plane : absl::GetFlag(FLAGS_plane)) RunPlane(shape, client, plane, neighbour, command);
  }
}

}  // namespace
}  // namespace stoker::bench

int main(int argc, char** argv) {
  const std::string command = stoker::bench::CommandOf(argc, argv);
  absl::SetProgramUsageMessage(
      "Times decode steps beside a neighbour that loads and stores; see the head of tests/gpu/neighbour_bench.cc.");
  absl::ParseCommandLine(argc, argv);
  stoker::client::DevicePlane::SetUpProcess();
  if (absl::GetFlag(FLAGS_role) == "neighbour") {
    stoker::bench::Neighbour().Serve();
  } else {
    stoker::bench::Run(command, argv[0]);
  }
  return 0;
}
