#include "tests/gpu/decode_engine.h"

#include <errno.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/replay/workload_file.h"

namespace stoker::bench {

using kernels::cuda::GraphExecHandle;
using kernels::cuda::GraphHandle;

void Require(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, status.ToString().c_str());
  std::exit(1);
}
void Require(cudaError_t error, const char* what) { Require(kernels::cuda::ToStatus(error, "CUDA"), what); }

Shape WithEntries(Shape shape, const std::string& entries) {
  if (entries == "empty" || entries == "hot") {
    shape.name = entries;
    shape.context = std::max(shape.context, shape.top_k);
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
      shape.batch < 1 || shape.batch > 4096 || shape.steps < 2 || shape.warmup < 1) {
    Require(absl::InvalidArgumentError("--layers, --group, --batch, --steps or --warmup is out of its range"), "flags");
  }
  return shape;
}

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

void LaunchSteps(const GraphExecHandle& graph, int32_t steps, cudaStream_t stream,
                 const std::function<absl::Status()>& status) {
  for (int32_t i = 0; i < steps; ++i) {
    if (status != nullptr) Require(status(), "steps");
    Require(cudaGraphLaunch(graph.get(), stream), "launch");
  }
  Require(cudaStreamSynchronize(stream), "steps");
}

bool SeesMps() {
  int enabled = 0;
  if (cudaDeviceGetAttribute(&enabled, cudaDevAttrMpsEnabled, 0) == cudaSuccess) return enabled != 0;
  cudaGetLastError();
  return false;
}

}  // namespace stoker::bench
