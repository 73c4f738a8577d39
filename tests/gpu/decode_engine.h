// The engine of the benchmarks of decode steps: its shape, its memory, and its kernels, which do next to nothing.
//
// Thread safety: one thread.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/doorbell.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/handles.h"
#include "tests/gpu/plane_kernels.h"

namespace stoker::bench {

inline constexpr int32_t kBlockRows = 64;

// A benchmark's own work: whatever goes wrong ends it.
void Require(const absl::Status& status, const char* what);
void Require(cudaError_t error, const char* what);
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

// The shape with its entries: "empty" are all -1, "hot" are the same in every step; a workload file brings its own
// top_k, hot_rows, row_bytes and context. Ends the program where `shape` is out of range.
Shape WithEntries(Shape shape, const std::string& entries);

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
  // Microseconds of each step from the end of the one before; of the first nothing, 0.
  std::vector<double> step_times() const {
    std::vector<uint64_t> ns(end_.count);
    Require(cudaMemcpy(ns.data(), end_.times, ns.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost), "copy");
    std::vector<double> times(ns.size());
    for (size_t i = 1; i < ns.size(); ++i) times[i] = static_cast<double>(ns[i] - ns[i - 1]) / 1e3;
    return times;
  }

 private:
  const Shape& shape_;
  const std::vector<Mailbox> mailboxes_;
  std::vector<kernels::cuda::DeviceMemory> memory_;
  EngineBatch batch_;
  EngineEnd end_;
  const int32_t* entries_ = nullptr;
  const int32_t* commits_ = nullptr;
  const int32_t* rows_ = nullptr;
  int32_t* sink_ = nullptr;
};

// What `enqueue` puts on the stream, to be launched again and again.
kernels::cuda::GraphExecHandle Capture(cudaStream_t stream, const std::function<void()>& enqueue);

// Launches the graph, which is a step, so often, and waits. `status`, if any, must be OK before each launch.
void LaunchSteps(const kernels::cuda::GraphExecHandle& graph, int32_t steps, cudaStream_t stream,
                 const std::function<absl::Status()>& status = nullptr);

// Whether this process is under MPS, as the driver says.
bool SeesMps();

}  // namespace stoker::bench
