// Steps replayed from a program, which is a CUDA graph: the same kernels, with the same arguments, on inputs that
// change between replays.
//
// The program is recorded once: resolve with its gather, a transfer out of the pool, an invalidate of what has just
// become hot, resolve with its gather once more, and a transfer into the pool. Each kernel reads what the one before
// has written, and may have been launched before that one has ended. Between replays entries, lengths, state rows,
// block tables, the number of real rows and all lists change in device memory. After each replay all memory is compared
// with the oracle's: outputs, residency, hot rows, pool.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_gather_case.h"
#include "tests/kernels/resolve_random.h"
#include "tests/reference/reference.h"

namespace stoker::kernels::cuda {
namespace {

enum class Gathering { kFused, kCompact, kDense };

struct GraphCase {
  std::string name;
  Gathering gathering = Gathering::kFused;
  IndexSpace index_space = IndexSpace::kPosition;
  int32_t rows = 5;
  int32_t top_k = 128;
  int32_t hot_rows = 256;
  int32_t positions = 1000;
  bool plain = false;
  int32_t replays = 200;
  RowFormat format = {.row_bytes = 24};

  friend void PrintTo(const GraphCase& graph, std::ostream* out) { *out << graph.name; }
};

std::vector<GraphCase> GraphCases() {
  constexpr IndexSpace kPool = IndexSpace::kPoolRow;
  return {
      {.name = "fused_plain", .plain = true},
      {.name = "fused_plain_512_1024", .rows = 3, .top_k = 512, .hot_rows = 1024, .positions = 4000, .plain = true},
      {.name = "fused_plain_2048_4096",
       .rows = 2,
       .top_k = 2048,
       .hot_rows = 4096,
       .positions = 70000,
       .plain = true,
       .replays = 100},
      {.name = "fused_options", .rows = 12, .format = {.kind = RowLayoutKind::kDsv4Paged, .row_bytes = 584}},
      {.name = "fused_pool_row", .index_space = kPool, .rows = 20},
      {.name = "fused_batch_of_70", .rows = 70, .plain = true, .replays = 40, .format = {.row_bytes = 16}},
      {.name = "fused_odd", .hot_rows = 257, .plain = true},
      {.name = "compact_plain", .gathering = Gathering::kCompact, .plain = true},
      {.name = "compact_pool_row",
       .gathering = Gathering::kCompact,
       .index_space = kPool,
       .format = {.kind = RowLayoutKind::kSplitKv, .row_bytes = 16, .v_row_bytes = 20}},
      {.name = "dense_options", .gathering = Gathering::kDense},
      {.name = "dense_pool_row", .gathering = Gathering::kDense, .index_space = kPool, .rows = 9},
  };
}

// One operation after the other, on the backend's stream or on the oracle.
class OnStream {
 public:
  explicit OnStream(Stream& stream) : stream_(stream) {}
  void ResolveGather(const ResolveArgs& resolve, const GatherCompactArgs& gather) {
    status_.Update(stream_.ResolveGather(resolve, gather));
  }
  void Do(const ResolveArgs& args) { status_.Update(stream_.Resolve(args)); }
  void Do(const GatherCompactArgs& args) { status_.Update(stream_.Gather(args)); }
  void Do(const GatherDenseArgs& args) { status_.Update(stream_.Gather(args)); }
  void Do(const TransferArgs& args) { status_.Update(stream_.Transfer(args)); }
  void Do(const InvalidateArgs& args) { status_.Update(stream_.Invalidate(args)); }
  const absl::Status& status() const { return status_; }

 private:
  Stream& stream_;
  absl::Status status_;
};

class OnOracle {
 public:
  void ResolveGather(const ResolveArgs& resolve, const GatherCompactArgs& gather) {
    reference::Resolve(resolve);
    reference::Gather(gather);
  }
  void Do(const ResolveArgs& args) { reference::Resolve(args); }
  void Do(const GatherCompactArgs& args) { reference::Gather(args); }
  void Do(const GatherDenseArgs& args) { reference::Gather(args); }
  void Do(const TransferArgs& args) { reference::Transfer(args); }
  void Do(const InvalidateArgs& args) { reference::Invalidate(args); }
};

// The operations of one step, their memory and their inputs.
class GraphStep {
 public:
  static constexpr int32_t kTransfers = 100;
  static constexpr int32_t kInvalidated = 60;

  GraphStep(const GraphCase& graph, std::mt19937_64& rng)
      : gathering_(graph.gathering),
        case_(Shape(graph), graph.format, {1, 0}, KeyLimit(Shape(graph)) - 5, rng),
        staging_(image(), "staging", DenseLayout(RowLayout::Make(graph.format, kTransfers).value(), kTransfers), 2, 0,
                 rng) {
    for (Region<int32_t>* list : {&out_pool_rows_, &out_staging_rows_, &in_pool_rows_, &in_staging_rows_}) {
      *list = image().Add("transfer list", std::vector<int32_t>(kTransfers, -1));
    }
    invalidated_states_ = image().Add("invalidated states", std::vector<int32_t>(kInvalidated, -1));
    invalidated_keys_ = image().Add("invalidated keys", std::vector<int64_t>(kInvalidated, -1));
    resolve().FillState(rng, KeyLimit(shape()), 0.7);
  }

  ResolveCase& resolve() { return case_.resolve(); }
  Image& image() { return case_.resolve().image(); }
  Image& pool() { return case_.pool(); }

  void ChangeInputs(std::mt19937_64& rng) {
    RandomTables(resolve(), rng);
    RandomInputs(resolve(), rng);
    const int32_t pool_rows = static_cast<int32_t>(case_.GatherArgs(image().data(), pool().data()).pool_rows);
    for (const auto& list : {out_pool_rows_, in_pool_rows_}) SetDistinct(list, pool_rows, rng);
    for (const auto& list : {out_staging_rows_, in_staging_rows_}) SetDistinct(list, kTransfers, rng);
    // Half of them entries of the step, which its resolve makes hot.
    const ResolveArgs args = resolve().Args(image().data());
    for (int32_t i = 0; i < kInvalidated; ++i) {
      const int32_t r = Draw(rng, 0, shape().rows - 1);
      const int32_t state_row = Draw(rng, -1, shape().state_rows);
      image().At(invalidated_states_)[i] = state_row;
      image().At(invalidated_keys_)[i] = Chance(rng, 0.5) || state_row < 0 || state_row >= shape().state_rows
                                             ? args.entries[r * args.entry_stride + Draw(rng, 0, args.top_k - 1)]
                                             : resolve().slot_key(state_row)[Draw(rng, 0, shape().hot_rows - 1)];
    }
  }

  // The step over the copies of the two images.
  template <typename Executor>
  void Run(std::byte* device, std::byte* pool, Executor& on) const {
    ResolveAndGather(device, pool, on);
    TransferArgs out = Pairs();
    out.src = case_.GatherArgs(device, pool).pool;
    out.dst = staging_.In(device);
    out.src_row_limit = out.src.layout.rows;
    out.dst_row_limit = kTransfers;
    out.src_rows = out_pool_rows_.In(device);
    out.dst_rows = out_staging_rows_.In(device);
    on.Do(out);
    on.Do(InvalidateArgs{.residency = case_.resolve().Args(device).residency,
                         .state_rows = invalidated_states_.In(device),
                         .keys = invalidated_keys_.In(device),
                         .count = kInvalidated});
    ResolveAndGather(device, pool, on);
    TransferArgs in = Pairs();
    in.src = out.dst;
    in.dst = out.src;
    in.src_row_limit = out.dst_row_limit;
    in.dst_row_limit = out.src_row_limit;
    in.src_rows = in_staging_rows_.In(device);
    in.dst_rows = in_pool_rows_.In(device);
    on.Do(in);
  }

 private:
  static ResolveShape Shape(const GraphCase& graph) {
    ResolveShape shape;
    shape.index_space = graph.index_space;
    shape.state_rows = shape.table_rows = shape.rows = graph.rows;
    shape.top_k = graph.top_k;
    shape.hot_rows = graph.hot_rows;
    shape.positions = graph.positions;
    shape.blocks = graph.positions / shape.block_rows + 2;
    shape.real_rows = true;
    shape.newest_pool_rows = graph.index_space == IndexSpace::kPoolRow;
    if (graph.plain) return Plain(shape);
    shape.int64_lengths = true;
    shape.resident_table = graph.index_space == IndexSpace::kPosition;
    shape.request_states = true;
    return shape;
  }

  const ResolveShape& shape() { return resolve().shape(); }

  void SetDistinct(const Region<int32_t>& list, int32_t limit, std::mt19937_64& rng) {
    std::vector<int32_t> rows(limit);
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), rng);
    rows.resize(kTransfers, -1);
    rows[Draw(rng, 0, kTransfers - 1)] = Draw(rng, 0, 1) == 0 ? -1 : limit;
    std::copy(rows.begin(), rows.end(), image().At(list));
  }

  static TransferArgs Pairs() {
    TransferArgs args;
    args.src_layers = args.dst_layers = kLayers;
    args.layer_count = 2;
    args.count = kTransfers;
    return args;
  }

  template <typename Executor>
  void ResolveAndGather(std::byte* device, std::byte* pool, Executor& on) const {
    const ResolveArgs resolve = case_.resolve().Args(device);
    const GatherCompactArgs gather = case_.GatherArgs(device, pool);
    if (gathering_ == Gathering::kFused) return on.ResolveGather(resolve, gather);
    on.Do(resolve);
    if (gathering_ == Gathering::kCompact) return on.Do(gather);
    GatherDenseArgs dense;
    dense.pool = gather.pool;
    dense.hot = gather.hot;
    dense.pool_rows = gather.pool_rows;
    dense.hot_rows = gather.hot_rows;
    dense.layers = gather.layers;
    dense.layer_count = gather.layer_count;
    dense.entry_pool_rows = resolve.resolved_pool_rows;
    dense.entry_hot_rows = resolve.hot_rows_out;
    dense.miss_mask = resolve.miss_mask;
    dense.rows = resolve.rows;
    dense.top_k = resolve.top_k;
    dense.attention_indices = resolve.attention_indices;
    dense.attention_block_stride = resolve.attention_block_stride;
    dense.hot_block_rows = resolve.hot_block_rows;
    on.Do(dense);
  }

  static constexpr int32_t kLayers[] = {1, 0};

  const Gathering gathering_;
  ResolveGatherCase case_;
  StoreCase staging_;
  Region<int32_t> out_pool_rows_;
  Region<int32_t> out_staging_rows_;
  Region<int32_t> in_pool_rows_;
  Region<int32_t> in_staging_rows_;
  Region<int32_t> invalidated_states_;
  Region<int64_t> invalidated_keys_;
};

class GraphGpuTest : public testing::TestWithParam<GraphCase> {
 protected:
  const std::unique_ptr<Backend> backend_ = BackendCases().front().make(1);
  const std::unique_ptr<Stream> stream_ = backend_->CreateStream().value();
};
INSTANTIATE_TEST_SUITE_P(Cases, GraphGpuTest, testing::ValuesIn(GraphCases()),
                         [](const auto& graph) { return graph.param.name; });

TEST_P(GraphGpuTest, Replays) {
  std::mt19937_64 rng(61);
  GraphStep step(GetParam(), rng);
  const auto device = backend_->AllocateShared(step.image().bytes()).value();
  const auto pool = backend_->AllocatePool(step.pool().bytes()).value();
  std::memcpy(pool->data(), step.pool().data(), step.pool().bytes());

  auto program = stream_->MakeProgram([&](Stream& stream) {
    OnStream on_stream(stream);
    step.Run(device->data(), pool->data(), on_stream);
    return on_stream.status();
  });
  ASSERT_TRUE(program.ok()) << program.status();

  for (int32_t replay = 0; replay < Cases(BackendCases().front(), GetParam().replays, GetParam().replays); ++replay) {
    SCOPED_TRACE(testing::Message() << "replay " << replay);
    step.ChangeInputs(rng);
    step.resolve().PoisonOutputs();
    Image want = step.image();
    Image want_pool = step.pool();
    OnOracle on_oracle;
    step.Run(want.data(), want_pool.data(), on_oracle);
    ASSERT_TRUE(stream_->Copy(device->data(), step.image().data(), step.image().bytes()).ok());
    ASSERT_TRUE((*program)->Enqueue().ok());
    ASSERT_TRUE(stream_->Copy(step.image().data(), device->data(), step.image().bytes()).ok());
    const absl::Status done = Finish(*stream_);
    ASSERT_TRUE(done.ok()) << done;
    std::memcpy(step.pool().data(), pool->data(), step.pool().bytes());
    ASSERT_TRUE(step.image().Equals(want));
    ASSERT_TRUE(step.pool().Equals(want_pool));
    ASSERT_TRUE(step.resolve().CheckResidency());
  }
}

}  // namespace
}  // namespace stoker::kernels::cuda
