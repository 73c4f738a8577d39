// stoker-gpu-bench: steps of a workload file through the CUDA kernels, timed as the peers' bench times the seeds'.
//
//   stoker-gpu-bench [--pool-gib N] [--rates] [--cold] WORKLOAD...
//
// The state is reset; one pass over all steps warms it; then five passes, each one CUDA graph of all steps; the median
// pass divided by the steps is us_per_step. misses_per_step is counted over the timed passes. Every gathered row of the
// last step is compared with its source. One JSON object a line.
//
// --rates adds the best rate found for random rows of the same pool, in launches of 16,384, the copy engine's, and
// those of commit, store and load; lines of steps then tell their share of the first two, and of the best rate of
// launches that read as many random rows as the step misses on average. --cold adds steps before each of which the L2
// cache was overwritten, launched one by one and timed with events.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"
#include "tests/gpu/compare_rows.h"
#include "tests/gpu/gather_probe.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kTimedPasses = 5;
constexpr int64_t kBlockRows = 64;

#define CHECK_CUDA(call)                                                                    \
  do {                                                                                      \
    const cudaError_t status_ = (call);                                                     \
    if (status_ != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

struct Workload {
  uint32_t version, steps, rows, top_k, context, hot_rows, row_bytes, reserved;
  std::vector<int32_t> positions;
};

Workload ReadWorkload(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  char magic[4];
  Workload w;
  if (file == nullptr || std::fread(magic, 1, 4, file) != 4 || std::memcmp(magic, "STKW", 4) != 0 ||
      std::fread(&w.version, 4, 8, file) != 8 || w.version != 1) {
    std::fprintf(stderr, "%s: not a workload file of version 1\n", path);
    std::exit(2);
  }
  w.positions.resize(size_t{w.steps} * w.rows * w.top_k);
  if (std::fread(w.positions.data(), 4, w.positions.size(), file) != w.positions.size()) {
    std::fprintf(stderr, "%s: truncated\n", path);
    std::exit(2);
  }
  std::fclose(file);
  return w;
}

// Pinned memory that is kept from workload to workload: to pin it, and to write its rows, takes longer than to time
// them.
class Pool {
 public:
  // With any contents.
  static char* Memory(size_t bytes) {
    Pool& pool = Kept();
    if (bytes > pool.bytes_) {
      if (pool.memory_ != nullptr) CHECK_CUDA(cudaFreeHost(pool.memory_));
      CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&pool.memory_), bytes, cudaHostAllocMapped));
      pool.bytes_ = bytes;
    }
    pool.rows_ = 0;
    return pool.memory_;
  }
  // Each row says which it is, in its first word and its last.
  static char* Rows(int64_t rows, int64_t row_bytes) {
    Pool& pool = Kept();
    const size_t bytes = static_cast<size_t>(rows * row_bytes);
    if (bytes > pool.bytes_ || row_bytes != pool.row_bytes_) Memory(bytes);
    for (int64_t r = pool.rows_; r < rows; ++r) {
      auto* const words = reinterpret_cast<int32_t*>(pool.memory_ + r * row_bytes);
      words[0] = static_cast<int32_t>(r);
      words[row_bytes / 4 - 1] = ~static_cast<int32_t>(r);
    }
    pool.rows_ = std::max(pool.rows_, rows);
    pool.row_bytes_ = row_bytes;
    return pool.memory_;
  }

 private:
  static Pool& Kept() {
    static Pool pool;
    return pool;
  }

  char* memory_ = nullptr;
  size_t bytes_ = 0;
  int64_t rows_ = 0;  // that say so
  int64_t row_bytes_ = 0;
};

class WorkloadBench {
 public:
  ~WorkloadBench() {
    for (void* const memory : memory_) CHECK_CUDA(cudaFree(memory));
    CHECK_CUDA(cudaStreamDestroy(stream_));
  }

  WorkloadBench(const Workload& workload, int64_t pool_gib) : w_(workload) {
    cudaDeviceProp properties{};
    CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
    limits_.multiprocessors = properties.multiProcessorCount;
    limits_.max_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin) - 1024;
    limits_.clusters = properties.major >= 9;
    CHECK_CUDA(PrepareKernels(limits_));
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));

    const int64_t row_bytes = w_.row_bytes;
    int64_t spread = std::max<int64_t>(w_.context, (pool_gib << 30) / row_bytes / w_.rows);
    spread = (spread + kBlockRows - 1) / kBlockRows * kBlockRows;
    pool_rows_ = spread * w_.rows;
    pool_ = Pool::Rows(pool_rows_, row_bytes);
    const int64_t hot_rows = w_.hot_rows;
    const int64_t newest = (hot_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
    region_ = newest + kBlockRows;
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&hot_), static_cast<size_t>(w_.rows * region_ * row_bytes)));
    memory_.push_back(hot_);

    const int64_t columns = (w_.context + kBlockRows - 1) / kBlockRows;
    std::vector<int32_t> table(static_cast<size_t>(w_.rows * columns)), ids(w_.rows),
        lengths(w_.rows, static_cast<int32_t>(w_.context));
    for (int64_t r = 0; r < w_.rows; ++r) {
      ids[static_cast<size_t>(r)] = static_cast<int32_t>(r);
      for (int64_t c = 0; c < columns; ++c) {
        table[static_cast<size_t>(r * columns + c)] = static_cast<int32_t>(r * (spread / kBlockRows) + c);
      }
    }
    std::vector<int32_t> pool_rows_of(w_.positions.size());
    for (size_t i = 0; i < pool_rows_of.size(); ++i) {
      pool_rows_of[i] = static_cast<int32_t>(static_cast<int64_t>(i / w_.top_k % w_.rows) * spread + w_.positions[i]);
    }
    entries_ = Device(w_.positions);
    wanted_ = Device(pool_rows_of);
    state_rows_ = Device(ids);

    const size_t batch = size_t{w_.rows} * w_.top_k;
    resolve_.index_space = IndexSpace::kPosition;
    Residency& residency = resolve_.residency;
    residency.slot_key = Device(std::vector<int32_t>(w_.rows * static_cast<size_t>(hot_rows)));
    residency.lru = Device(std::vector<int16_t>(w_.rows * static_cast<size_t>(hot_rows)));
    residency.state_rows = static_cast<int32_t>(w_.rows);
    residency.hot_rows = static_cast<int32_t>(hot_rows);
    resolve_.rows = static_cast<int32_t>(w_.rows);
    resolve_.top_k = static_cast<int32_t>(w_.top_k);
    resolve_.entry_stride = w_.top_k;
    resolve_.lengths.data = Device(lengths);
    resolve_.state_rows.data = state_rows_;
    resolve_.block_table = Device(table);
    resolve_.block_table_stride = columns;
    resolve_.block_table_rows = static_cast<int32_t>(w_.rows);
    resolve_.block_table_columns = static_cast<int32_t>(columns);
    resolve_.pool_rows = pool_rows_;
    resolve_.region_rows = static_cast<int32_t>(region_);
    resolve_.newest_row = static_cast<int32_t>(newest);
    resolve_.hot_rows_out = Device(std::vector<int32_t>(batch));
    resolve_.hot_rows_out_stride = w_.top_k;
    resolve_.miss_pool_rows = Device(std::vector<int32_t>(batch));
    resolve_.miss_hot_rows = Device(std::vector<int32_t>(batch));
    resolve_.miss_counts = Device(std::vector<int32_t>(w_.rows));
    resolve_.stats = Device(std::vector<uint64_t>(kStats));

    RowFormat format;
    format.row_bytes = static_cast<int32_t>(row_bytes);
    gather_.pool.base = reinterpret_cast<std::byte*>(pool_);
    gather_.pool.layers = gather_.hot.layers = 1;
    gather_.pool.layout = RowLayout::Make(format, pool_rows_).value();
    gather_.hot.base = reinterpret_cast<std::byte*>(hot_);
    gather_.hot.layout = RowLayout::Make(format, w_.rows * region_).value();
    gather_.pool_rows = pool_rows_;
    gather_.hot_rows = w_.rows * region_;
    gather_.layers = &layer_;
    gather_.layer_count = 1;
    gather_.rows = resolve_.rows;
    gather_.top_k = resolve_.top_k;
    gather_.miss_pool_rows = resolve_.miss_pool_rows;
    gather_.miss_hot_rows = resolve_.miss_hot_rows;
    gather_.miss_counts = resolve_.miss_counts;
  }

  void Run(bool cold) {
    const auto fused = [this](uint32_t step) {
      CHECK_CUDA(LaunchResolveGather(At(step), gather_, nullptr, limits_, stream_));
    };
    Report("stoker_fused", true, fused);
    if (cold) Report("stoker_fused_cold", true, fused, true);
    Report("stoker_resolve_gather", true, [this](uint32_t step) {
      CHECK_CUDA(LaunchResolve(At(step), limits_, stream_));
      CHECK_CUDA(LaunchGather(gather_, stream_));
    });
    Report("stoker_resolve_only", false,
           [this](uint32_t step) { CHECK_CUDA(LaunchResolve(At(step), limits_, stream_)); });
  }

  // The best rate at which random rows of this pool can be read, and the copy engine's.
  void GatherRates() {
    best_gather_ = BestGather(16384, true);
    char* const target = reinterpret_cast<char*>(Device(std::vector<char>(size_t{1} << 30)));
    const double us = Time(
        4, [&](uint32_t) { CHECK_CUDA(cudaMemcpyAsync(target, pool_, 1 << 30, cudaMemcpyDefault, stream_)); }, [] {});
    copy_engine_ = Rate("copy_engine", "whole", 0, us, int64_t{1} << 30);
  }

  // The best rate in launches that read so many random rows of the pool: over the order of the rows and the number of
  // blocks. In sequence order the rows of a sequence follow one another; sorted, by position too. GB/s.
  double BestGather(int64_t rows, bool prints) {
    std::mt19937_64 random(1);
    constexpr int kRounds = 16;
    const int64_t spread = pool_rows_ / w_.rows;
    const int64_t hot_total = w_.rows * region_;
    std::vector<int32_t> hot_rows(static_cast<size_t>(rows));
    for (size_t i = 0; i < hot_rows.size(); ++i)
      hot_rows[i] = static_cast<int32_t>(static_cast<int64_t>(i) % hot_total);
    TransferArgs args = Transfer(gather_.pool, gather_.hot, rows);
    args.dst_rows = Device(hot_rows);
    double best = 0;
    for (const char* const order : {"random", "sequences", "sorted"}) {
      std::vector<int32_t> pool_rows(static_cast<size_t>(rows * kRounds));
      for (int64_t i = 0; i < rows * kRounds; ++i) {
        const int64_t sequence = order[0] == 'r' ? static_cast<int64_t>(random() % w_.rows) : i % rows * w_.rows / rows;
        pool_rows[static_cast<size_t>(i)] =
            static_cast<int32_t>(sequence * spread + static_cast<int64_t>(random() % w_.context));
      }
      for (int round = 0; round < kRounds && std::strcmp(order, "sorted") == 0; ++round) {
        std::sort(pool_rows.begin() + round * rows, pool_rows.begin() + (round + 1) * rows);
      }
      const int32_t* const device_pool = Device(pool_rows);
      for (const int blocks : {16, 32, 64, 132}) {
        const double us = Time(
            kRounds,
            [&](uint32_t round) {
              TransferArgs part = args;
              part.src_rows = device_pool + round * rows;
              CHECK_CUDA(LaunchProbe(part, blocks, stream_));
            },
            [] {});
        best = std::max(best, prints ? Rate("random_gather", order, blocks, us, rows * w_.row_bytes)
                                     : static_cast<double>(rows * w_.row_bytes) / us / 1e3);
      }
    }
    return best;
  }

  // Commit of 1, 8 and 64 newest rows, and store and load of 32,768 tokens, in 61 layers; against the same bytes in one
  // copy.
  void TransferRates() {
    constexpr int32_t kLayers = 61;
    constexpr int64_t kTokens = 32768;
    const int64_t layer_bytes = kTokens * w_.row_bytes;
    char* const host = Pool::Memory(static_cast<size_t>(kLayers * layer_bytes));
    char* const device = reinterpret_cast<char*>(Device(std::vector<char>(static_cast<size_t>(kLayers * layer_bytes))));
    std::vector<int32_t> layers(kLayers), rows(kTokens);
    for (int32_t l = 0; l < kLayers; ++l) layers[static_cast<size_t>(l)] = l;
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    const int32_t* const in_order = Device(rows);
    // Blocks of a pool in no order.
    std::vector<int32_t> blocks(kTokens / kBlockRows);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(1));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<int32_t>(blocks[i / kBlockRows] * kBlockRows + static_cast<int64_t>(i) % kBlockRows);
    }
    const int32_t* const shuffled = Device(rows);
    RowFormat format;
    format.row_bytes = static_cast<int32_t>(w_.row_bytes);
    RowStore pool, dense;
    pool.layout = dense.layout = RowLayout::Make(format, kTokens).value();
    pool.layer_stride = dense.layer_stride = layer_bytes;
    pool.layers = dense.layers = kLayers;
    pool.base = reinterpret_cast<std::byte*>(host);
    dense.base = reinterpret_cast<std::byte*>(device);
    const auto transfer = [&](const RowStore& from, const RowStore& to, const int32_t* from_rows,
                              const int32_t* to_rows, int64_t count) {
      TransferArgs args = Transfer(from, to, count);
      args.src_layers = args.dst_layers = layers.data();
      args.layer_count = kLayers;
      args.src_rows = from_rows;
      args.dst_rows = to_rows;
      return Time(
          4, [&, args](uint32_t) { CHECK_CUDA(LaunchTransfer(args, stream_)); }, [] {});
    };
    for (const int64_t count : {1, 8, 64}) {
      Rate("stoker_commit", (std::to_string(count) + " rows x 61 layers").c_str(), 0,
           transfer(dense, pool, in_order, shuffled, count), count * kLayers * int64_t{w_.row_bytes});
    }
    Rate("stoker_store", "32768 rows x 61 layers", 0, transfer(dense, pool, in_order, shuffled, kTokens),
         kLayers * layer_bytes);
    Rate("stoker_load", "32768 rows x 61 layers", 0, transfer(pool, dense, shuffled, in_order, kTokens),
         kLayers * layer_bytes);
    const size_t bytes = static_cast<size_t>(kLayers * layer_bytes);
    Rate("copy_engine", "to the pool", 0,
         Time(
             4, [&](uint32_t) { CHECK_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, stream_)); }, [] {}),
         kLayers * layer_bytes);
    Rate("copy_engine", "from the pool", 0,
         Time(
             4, [&](uint32_t) { CHECK_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyDefault, stream_)); }, [] {}),
         kLayers * layer_bytes);
  }

 private:
  template <typename T>
  T* Device(const std::vector<T>& values) {
    T* memory;
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory), values.size() * sizeof(T)));
    CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    memory_.push_back(memory);
    return memory;
  }

  TransferArgs Transfer(const RowStore& from, const RowStore& to, int64_t count) const {
    TransferArgs args;
    args.src = from;
    args.dst = to;
    args.src_row_limit = from.layout.rows;
    args.dst_row_limit = to.layout.rows;
    args.src_layers = args.dst_layers = &layer_;
    args.layer_count = 1;
    args.count = count;
    return args;
  }

  // Returns GB/s.
  double Rate(const char* system, const char* what, int blocks, double us, int64_t bytes) const {
    std::printf(
        "{\"system\": \"%s\", \"what\": \"%s\", \"blocks\": %d, \"rows\": %u, \"row_bytes\": %u, \"pool_gib\": %.2f, "
        "\"us\": %.2f, \"gb_per_s\": %.2f}\n",
        system, what, blocks, w_.rows, w_.row_bytes, PoolGib(), us, static_cast<double>(bytes) / us / 1e3);
    std::fflush(stdout);
    return static_cast<double>(bytes) / us / 1e3;
  }

  double PoolGib() const { return static_cast<double>(pool_rows_) * w_.row_bytes / (1 << 30); }

  const ResolveArgs& At(uint32_t step) {
    resolve_.entries = entries_ + size_t{step} * w_.rows * w_.top_k;
    return resolve_;
  }

  void Reset() {
    ResetArgs args;
    args.residency = resolve_.residency;
    args.state_rows = state_rows_;
    args.count = static_cast<int32_t>(w_.rows);
    CHECK_CUDA(LaunchReset(args, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  // Median microseconds per step.
  double Time(uint32_t steps, const std::function<void(uint32_t)>& step, const std::function<void()>& warmed) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    for (uint32_t s = 0; s < steps; ++s) step(s);
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(exec, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    warmed();
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    std::vector<float> us;
    for (int pass = 0; pass < kTimedPasses; ++pass) {
      CHECK_CUDA(cudaEventRecord(begin, stream_));
      CHECK_CUDA(cudaGraphLaunch(exec, stream_));
      CHECK_CUDA(cudaEventRecord(end, stream_));
      CHECK_CUDA(cudaEventSynchronize(end));
      float ms;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
      us.push_back(ms * 1000 / static_cast<float>(steps));
    }
    std::sort(us.begin(), us.end());
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return us[us.size() / 2];
  }

  // The same with a cold L2 cache.
  double TimeCold(uint32_t steps, const std::function<void(uint32_t)>& step, const std::function<void()>& warmed) {
    constexpr size_t kL2Bytes = size_t{128} << 20;  // more than any GPU has
    void* const flushed = Device(std::vector<char>(kL2Bytes));
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    std::vector<float> us;
    for (int pass = 0; pass <= kTimedPasses; ++pass) {
      if (pass == 1) warmed();
      float sum = 0;
      for (uint32_t s = 0; s < steps; ++s) {
        CHECK_CUDA(cudaMemsetAsync(flushed, pass, kL2Bytes, stream_));
        CHECK_CUDA(cudaEventRecord(begin, stream_));
        step(s);
        CHECK_CUDA(cudaEventRecord(end, stream_));
        CHECK_CUDA(cudaEventSynchronize(end));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
        sum += ms * 1000;
      }
      if (pass > 0) us.push_back(sum / static_cast<float>(steps));
    }
    CHECK_CUDA(cudaEventDestroy(begin));
    CHECK_CUDA(cudaEventDestroy(end));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
  }

  void Report(const char* system, bool gathers, const std::function<void(uint32_t)>& step, bool cold = false) {
    Reset();
    const auto warmed = [this] { CHECK_CUDA(cudaMemset(resolve_.stats, 0, kStats * sizeof(uint64_t))); };
    const double us = cold ? TimeCold(w_.steps, step, warmed) : Time(w_.steps, step, warmed);
    uint64_t stats[kStats];
    CHECK_CUDA(cudaMemcpy(stats, resolve_.stats, sizeof stats, cudaMemcpyDeviceToHost));
    const double misses = static_cast<double>(stats[kMiss]) / kTimedPasses / w_.steps;
    int bad = 0;
    if (gathers) {
      const int n = static_cast<int>(w_.rows * w_.top_k);
      bad = CountWrongRows(wanted_ + size_t{w_.steps - 1} * static_cast<size_t>(n), resolve_.hot_rows_out, hot_,
                           w_.row_bytes, n, stream_);
    }
    const double rate = misses * w_.row_bytes / us / 1e3;
    std::printf(
        "{\"system\": \"%s\", \"rows\": %u, \"top_k\": %u, \"hot_rows\": %u, \"row_bytes\": %u, \"pool_gib\": %.2f, "
        "\"us_per_step\": %.2f, \"misses_per_step\": %.1f, \"gathered_gb_per_s\": %.2f, \"bad_rows\": %d",
        system, w_.rows, w_.top_k, w_.hot_rows, w_.row_bytes, PoolGib(), us, misses, rate, bad);
    if (gathers && best_gather_ > 0) {
      const auto rows = static_cast<int64_t>(misses);
      const double equal = rows > 0 ? BestGather(rows, false) : 0;
      std::printf(", \"share_of_random_gather\": %.3f, \"share_of_copy_engine\": %.3f", rate / best_gather_,
                  rate / copy_engine_);
      if (rows > 0) {
        std::printf(", \"random_gather_of_as_many_rows_gb_per_s\": %.2f, \"share_of_it\": %.3f", equal, rate / equal);
      }
    }
    std::printf("}\n");
    std::fflush(stdout);
    if (bad != 0) std::exit(1);
  }

  const Workload& w_;
  DeviceLimits limits_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  int64_t pool_rows_ = 0;
  int64_t region_ = 0;
  char* pool_ = nullptr;
  char* hot_ = nullptr;
  int32_t* entries_ = nullptr;
  int32_t* wanted_ = nullptr;
  int32_t* state_rows_ = nullptr;
  double best_gather_ = 0;  // GB/s, 0 while not measured
  double copy_engine_ = 0;
  const int32_t layer_ = 0;
  ResolveArgs resolve_;
  GatherCompactArgs gather_;
};

}  // namespace
}  // namespace stoker::kernels::cuda

int main(int argc, char** argv) {
  int64_t pool_gib = 0;
  bool rates = false;
  bool cold = false;
  std::vector<const char*> paths;
  bool usage = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--pool-gib") == 0 && i + 1 < argc) {
      pool_gib = std::atoll(argv[++i]);
    } else if (std::strcmp(argv[i], "--rates") == 0) {
      rates = true;
    } else if (std::strcmp(argv[i], "--cold") == 0) {
      cold = true;
    } else if (argv[i][0] != '-') {
      paths.push_back(argv[i]);
    } else {
      usage = true;
    }
  }
  if (usage || paths.empty()) {
    std::fprintf(stderr, "usage: stoker-gpu-bench [--pool-gib N] [--rates] [--cold] WORKLOAD...\n");
    return 2;
  }
  for (const char* const path : paths) {
    const stoker::kernels::cuda::Workload workload = stoker::kernels::cuda::ReadWorkload(path);
    stoker::kernels::cuda::WorkloadBench bench(workload, pool_gib);
    if (rates) bench.GatherRates();
    bench.Run(cold);
    if (rates) bench.TransferRates();
  }
  return 0;
}
