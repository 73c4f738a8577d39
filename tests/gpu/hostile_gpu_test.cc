// The CUDA backend's operations while another stream writes random values into everything that a client can write: no
// fault, no write outside of the arrays, every output in range, and the first step after a Reset is right.
// tests/kernels/hostile_test.cc is the same for the CPU backend.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/handles.h"
#include "tests/gpu/scribble.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_gather_case.h"
#include "tests/kernels/resolve_random.h"
#include "tests/reference/reference.h"

namespace stoker::kernels::cuda {
namespace {

// Operations of one round beside one scribbling kernel, which is stopped behind them.
constexpr int kRounds = 20;
constexpr int kOperations = 20;
constexpr int32_t kScribbles = 10'000'000;
// Where the cases are reduced, for a tool that lets one kernel run at a time, it ends by itself.
constexpr int32_t kScribblesAlone = 50'000;

class HostileGpuTest : public testing::Test {
 protected:
  // Brings the images up and runs `operation` many times beside scribbles of `targets`, which hold addresses on the
  // device. `check` sees the device's image after each round. Then brings both back.
  void Hammer(Image& image, Image& pool, const std::function<std::vector<ScribbleTarget>(std::byte* device)>& targets,
              const std::function<absl::Status(std::byte* device, std::byte* pool)>& operation,
              const std::function<void()>& check) {
    device_ = backend_->AllocateShared(image.bytes()).value();
    pool_ = backend_->AllocatePool(std::max<size_t>(pool.bytes(), 64)).value();
    std::memcpy(pool_->data(), pool.data(), pool.bytes());
    ASSERT_TRUE(stream_->Copy(device_->data(), image.data(), image.bytes()).ok());
    ASSERT_TRUE(Finish(*stream_).ok());
    const StreamHandle scribbler = MakeStream().value();
    int overlapped = 0;
    const PinnedMemory pinned = MakePinnedMemory(sizeof(uint32_t)).value();
    auto* const stop = static_cast<volatile uint32_t*>(pinned.get());
    const int32_t rounds = Cases(BackendCases().front(), kRounds, kRounds);
    const int32_t scribbles = rounds == kRounds ? kScribbles : kScribblesAlone;
    for (int32_t round = 0; round < rounds; ++round) {
      *stop = 0;
      ASSERT_EQ(LaunchScribble(targets(device_->data()), static_cast<uint32_t>(round), scribbles,
                               static_cast<const uint32_t*>(pinned.get()), scribbler.get()),
                cudaSuccess);
      for (int i = 0; i < kOperations; ++i) {
        const absl::Status status = operation(device_->data(), pool_->data());
        ASSERT_TRUE(status.ok()) << status;
      }
      ASSERT_TRUE(stream_->Copy(image.data(), device_->data(), image.bytes()).ok());
      const absl::Status done = Finish(*stream_);
      ASSERT_TRUE(done.ok()) << done;
      overlapped += cudaStreamQuery(scribbler.get()) == cudaErrorNotReady;
      cudaGetLastError();  // which also is "not ready" then, and would be the next launch's
      *stop = 1;
      ASSERT_EQ(cudaStreamSynchronize(scribbler.get()), cudaSuccess);
      ASSERT_NO_FATAL_FAILURE(check()) << "round " << round;
    }
    std::memcpy(pool.data(), pool_->data(), pool.bytes());
    if (rounds == kRounds) {
      EXPECT_EQ(overlapped, rounds) << "not every round's operations ended while something was written";
    }
  }

  Bench& bench() { return bench_; }

  Bench bench_{BackendCases().front()};
  const std::unique_ptr<Backend> backend_ = BackendCases().front().make(1);
  const std::unique_ptr<Stream> stream_ = backend_->CreateStream().value();
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> pool_;
};

struct HostileCase {
  std::string name;
  IndexSpace index_space = IndexSpace::kPosition;
  int32_t rows = 3;
  int32_t top_k = 64;
  int32_t hot_rows = 128;
  int32_t positions = 512;
  bool plain = false;
  bool tables = false;  // hot_block_table, resident_table, request_states too
  bool gathers = false;
  int32_t block_rows = 16;

  friend void PrintTo(const HostileCase& hostile, std::ostream* out) { *out << hostile.name; }
};

ResolveShape Shape(const HostileCase& hostile) {
  ResolveShape shape;
  shape.index_space = hostile.index_space;
  shape.rows = shape.state_rows = shape.table_rows = hostile.rows;
  shape.top_k = hostile.top_k;
  shape.hot_rows = hostile.hot_rows;
  shape.positions = hostile.positions;
  shape.block_rows = hostile.block_rows;
  shape.blocks = hostile.positions / shape.block_rows + 1;
  const bool pool_rows = hostile.index_space == IndexSpace::kPoolRow;
  shape.newest_pool_rows = shape.allowed_blocks = pool_rows;
  shape.resident_table = hostile.tables && !pool_rows;
  shape.hot_block_table = hostile.tables;
  return hostile.plain ? Plain(shape) : shape;
}

template <typename T>
ScribbleTarget Target(const T* values, size_t count, int64_t limit) {
  return {const_cast<T*>(values), static_cast<int32_t>(count), static_cast<int32_t>(sizeof(T)),
          static_cast<uint32_t>(std::clamp<int64_t>(limit, 1, INT32_MAX))};
}

// What a client writes of a resolve: all inputs but the batch's state rows.
std::vector<ScribbleTarget> TargetsOf(const ResolveArgs& args) {
  const size_t slots = size_t{1} * args.residency.state_rows * args.residency.hot_rows;
  const int64_t keys = args.pool_rows;
  std::vector<ScribbleTarget> targets = {
      Target(args.residency.slot_key, slots, keys),
      Target(args.residency.lru, slots, args.residency.hot_rows),
      Target(args.entries, static_cast<size_t>(args.rows * args.entry_stride), keys),
      Target(static_cast<const int32_t*>(args.lengths.data), static_cast<size_t>(args.rows), keys + 1),
  };
  const int64_t blocks = args.pool_rows / args.block_rows;
  if (args.block_table != nullptr) {
    targets.push_back(
        Target(args.block_table, static_cast<size_t>(args.block_table_rows * args.block_table_stride), blocks));
  }
  if (args.resident_table != nullptr) {
    targets.push_back(
        Target(args.resident_table, static_cast<size_t>(args.resident_rows * args.resident_stride), blocks));
  }
  if (args.hot_block_table != nullptr) {
    targets.push_back(
        Target(args.hot_block_table, static_cast<size_t>(args.residency.state_rows * args.hot_block_stride), blocks));
  }
  if (args.newest_pool_rows != nullptr) {
    targets.push_back(Target(args.newest_pool_rows, static_cast<size_t>(args.rows), keys));
  }
  if (args.allowed_blocks != nullptr) {
    targets.push_back(
        Target(args.allowed_blocks, static_cast<size_t>(args.residency.state_rows * args.allowed_stride), INT32_MAX));
  }
  return targets;
}

// Takes over from `before` what may have changed in `after`, so that the rest can be compared.
class Mask {
 public:
  Mask(Image& before, Image& after) : before_(before), after_(after) {}
  void Allow(const void* in_after, size_t bytes) {
    if (in_after == nullptr) return;
    const size_t offset = static_cast<size_t>(static_cast<const std::byte*>(in_after) - after_.data());
    std::memcpy(after_.data() + offset, before_.data() + offset, bytes);
  }
  void AllowOutputs(const ResolveArgs& args) {
    const size_t entries = size_t{4} * args.rows * args.top_k;
    for (const int32_t* const output : {args.hot_rows_out, args.attention_indices, args.resolved_pool_rows,
                                        args.miss_mask, args.miss_pool_rows, args.miss_hot_rows}) {
      Allow(output, entries);
    }
    Allow(args.miss_counts, size_t{4} * args.rows);
    Allow(args.told_miss_counts, size_t{4} * args.rows);
    Allow(args.counts, size_t{4} * args.rows * kOutcomes);
    Allow(args.stats, kStats * 8);
    for (int32_t r = 0; args.valid_counts != nullptr && r < args.rows; ++r) {
      Allow(args.valid_counts + r * args.valid_count_stride, 4);
    }
  }

 private:
  Image& before_;
  Image& after_;
};

// Every output of a resolve is in range.
void CheckOutputs(const ResolveArgs& args, const std::vector<int32_t>& state_rows) {
  for (int32_t r = 0; r < args.rows; ++r) {
    int64_t sum = 0;
    for (int32_t o = 0; o < kOutcomes; ++o) sum += args.counts[r * kOutcomes + o];
    ASSERT_GE(sum, 0);
    ASSERT_LE(sum, args.top_k);
    const bool paged = args.hot_block_table != nullptr;
    const int32_t first = paged ? 0 : state_rows[r] * args.region_rows;
    const int32_t last = paged ? INT32_MAX : first + args.region_rows - 1;
    for (int32_t i = 0; i < args.top_k; ++i) {
      const int32_t hot_row = args.hot_rows_out[r * args.hot_rows_out_stride + i];
      ASSERT_TRUE(hot_row == -1 || (hot_row >= first && hot_row <= last)) << "row " << r << ": " << hot_row;
    }
    ASSERT_GE(args.miss_counts[r], 0);
    ASSERT_LE(args.miss_counts[r], args.top_k);
    ASSERT_EQ(args.told_miss_counts[r], args.miss_counts[r]);
    for (int32_t i = 0; i < args.miss_counts[r]; ++i) {
      const int32_t pool_row = args.miss_pool_rows[r * args.top_k + i];
      // -1 where a block went out of the table between the two looks of a union: the row is zero-filled.
      ASSERT_GE(pool_row, -1);
      ASSERT_LT(pool_row, args.pool_rows);
    }
  }
}

class HostileResolve : public HostileGpuTest, public testing::WithParamInterface<HostileCase> {};
INSTANTIATE_TEST_SUITE_P(
    Cases, HostileResolve,
    testing::Values(
        HostileCase{.name = "plain", .plain = true}, HostileCase{.name = "options"},
        HostileCase{.name = "tables", .tables = true},
        HostileCase{.name = "pool_row", .index_space = IndexSpace::kPoolRow},
        HostileCase{.name = "blocks_of_one", .plain = true, .block_rows = 1},
        HostileCase{.name = "plain_512_1024", .top_k = 512, .hot_rows = 1024, .positions = 3000, .plain = true},
        HostileCase{.name = "plain_2048_4096", .top_k = 2048, .hot_rows = 4096, .positions = 100000, .plain = true},
        HostileCase{.name = "odd", .hot_rows = 129, .plain = true},
        HostileCase{.name = "gathers_plain", .plain = true, .gathers = true},
        HostileCase{.name = "gathers_options", .rows = 9, .gathers = true},
        HostileCase{.name = "gathers_tables", .rows = 9, .tables = true, .gathers = true},
        HostileCase{.name = "gathers_pool_row", .index_space = IndexSpace::kPoolRow, .rows = 17, .gathers = true},
        HostileCase{.name = "gathers_odd", .hot_rows = 129, .plain = true, .gathers = true},
        HostileCase{.name = "gathers_alone", .rows = 70, .plain = true, .gathers = true},
        HostileCase{.name = "gathers_2048_4096",
                    .top_k = 2048,
                    .hot_rows = 4096,
                    .positions = 100000,
                    .plain = true,
                    .gathers = true}),
    [](const auto& hostile) { return hostile.param.name; });

TEST_P(HostileResolve, WhileAClientWrites) {
  std::mt19937_64 rng(71);
  const ResolveShape shape = Shape(GetParam());
  ResolveGatherCase c(shape, {.row_bytes = 16}, {1, 0}, KeyLimit(shape), rng);
  c.resolve().FillState(rng, KeyLimit(shape), 0.8);
  std::vector<int32_t> state_rows;
  for (int32_t r = 0; r < shape.rows; ++r) {
    // The last two are one union.
    state_rows.push_back(r == shape.rows - 1 ? r - 1 : r);
    c.resolve().SetStateRow(r, state_rows[r]);
    std::vector<int32_t> entries(shape.top_k);
    for (int32_t& entry : entries) entry = Draw(rng, 0, KeyLimit(shape) - 1);
    c.resolve().SetEntries(r, entries);
  }
  Image& image = c.resolve().image();
  Image before = image;
  Image pool_before = c.pool();
  ASSERT_NO_FATAL_FAILURE(Hammer(
      image, c.pool(), [&](std::byte* device) { return TargetsOf(c.resolve().Args(device)); },
      [&](std::byte* device, std::byte* pool) {
        const ResolveArgs resolve = c.resolve().Args(device);
        return GetParam().gathers ? stream_->ResolveGather(resolve, c.GatherArgs(device, pool))
                                  : stream_->Resolve(resolve);
      },
      [&] { CheckOutputs(c.resolve().Args(image.data()), state_rows); }));
  const ResolveArgs args = c.resolve().Args(image.data());
  {
    Image after = image;
    Mask mask(before, after);
    const ResolveArgs in_after = c.resolve().Args(after.data());
    for (const ScribbleTarget& target : TargetsOf(in_after)) {
      mask.Allow(target.values, size_t{1} * target.count * target.element_bytes);
    }
    mask.AllowOutputs(in_after);
    const GatherCompactArgs gather = c.GatherArgs(after.data(), c.pool().data());
    mask.Allow(gather.gathered_bytes, 8);
    for (int32_t layer = 0; GetParam().gathers && layer < 2; ++layer) {
      mask.Allow(gather.hot.At(layer, 0, 0), static_cast<size_t>(gather.hot.layout.layer_bytes));
    }
    EXPECT_TRUE(after.Equals(before));
    EXPECT_TRUE(c.pool().Equals(pool_before));
  }

  // Good inputs on the residency that is left: after a Reset all is as if nothing had been.
  const size_t slots = size_t{1} * shape.state_rows * shape.hot_rows;
  Image good = before;
  const ResolveArgs good_args = c.resolve().Args(good.data());
  std::memcpy(good_args.residency.slot_key, args.residency.slot_key, slots * 4);
  std::memcpy(good_args.residency.lru, args.residency.lru, slots * 2);
  image = good;
  std::vector<int32_t> all(shape.state_rows);
  for (int32_t s = 0; s < shape.state_rows; ++s) all[s] = s;
  const Region<int32_t> reset = image.Add("reset", all);
  const auto reset_args = [&](std::byte* base) {
    return ResetArgs{
        .residency = c.resolve().Args(base).residency, .state_rows = reset.In(base), .count = shape.state_rows};
  };
  Image want = image;
  reference::Reset(reset_args(want.data()));
  const absl::Status status = bench().Run(
      image, [&](Stream& stream, std::byte* device, std::byte*) { return stream.Reset(reset_args(device)); });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(image.Equals(want));
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(c.Step(bench()));
  EXPECT_TRUE(c.resolve().CheckResidency());
}

// Invalidate, place and reset, and all that reads lists of rows.
TEST_F(HostileGpuTest, ResidencyOperations) {
  std::mt19937_64 rng(72);
  ResolveShape shape;
  shape.state_rows = 3;
  shape.hot_rows = 300;
  ResolveCase c(shape);
  c.FillState(rng, 512, 0.8);
  const auto states = c.image().Add("states", std::vector<int32_t>(3000, 0));
  const auto keys = c.image().Add("keys", std::vector<int64_t>(3000, 5));
  Image before = c.image();
  Image no_pool;
  int turn = 0;
  const auto targets = [&](std::byte* device) {
    const Residency residency = c.Args(device).residency;
    return std::vector<ScribbleTarget>{Target(residency.slot_key, 900, 512), Target(residency.lru, 900, 300),
                                       Target(states.In(device), 3000, 4), Target(keys.In(device), 3000, 512)};
  };
  ASSERT_NO_FATAL_FAILURE(Hammer(
      c.image(), no_pool, targets,
      [&](std::byte* device, std::byte*) {
        const Residency residency = c.Args(device).residency;
        switch (++turn % 3) {
          case 0:
            return stream_->Invalidate({.residency = residency,
                                        .state_rows = states.In(device),
                                        .keys = keys.In(device),
                                        .count = turn % 2 == 0 ? 40 : 3000});
          case 1:
            return stream_->Reset({.residency = residency, .state_rows = states.In(device), .count = 300});
          default:
            return stream_->Place({.residency = residency, .state_row = 2, .first_position = 100, .count = 150});
        }
      },
      [] {}));
  Mask mask(before, c.image());
  for (const ScribbleTarget& target : targets(c.image().data())) {
    mask.Allow(target.values, size_t{1} * target.count * target.element_bytes);
  }
  EXPECT_TRUE(c.image().Equals(before));
}

TEST_F(HostileGpuTest, RowMoves) {
  std::mt19937_64 rng(73);
  constexpr int32_t kRows = 200;
  constexpr int32_t kTopK = 300;
  constexpr int32_t kEntries = 2 * kTopK;
  Image pool;
  Image image;
  // The last rows exist in memory only.
  const RowLayout layout = RowLayout::Make({.row_bytes = 24}, kRows + 10).value();
  const StoreCase from(pool, "pool", layout, 2, 0, rng);
  const StoreCase to(image, "hot", layout, 2, 0, rng);
  const auto pool_rows = image.Add("pool rows", std::vector<int32_t>(kEntries, 0));
  const auto hot_rows = image.Add("hot rows", std::vector<int32_t>(kEntries, 0));
  const auto mask_region = image.Add("mask", std::vector<int32_t>(kEntries, 1));
  const auto counts = image.Add("counts", std::vector<int32_t>{kTopK, kTopK});
  const auto states = image.Add("states", std::vector<int32_t>{0, 1});
  const auto attention = image.Add<int32_t>("attention", kEntries);
  const auto gathered = image.Add("gathered bytes", std::vector<uint64_t>{0});
  Image before = image;
  Image pool_before = pool;
  const int32_t layers[] = {0, 1};
  int turn = 0;
  const auto targets = [&](std::byte* device) {
    return std::vector<ScribbleTarget>{Target(pool_rows.In(device), kEntries, kRows + 10),
                                       Target(hot_rows.In(device), kEntries, kRows + 10),
                                       Target(mask_region.In(device), kEntries, 2),
                                       Target(counts.In(device), 2, kTopK + 5), Target(states.In(device), 2, 2)};
  };
  ASSERT_NO_FATAL_FAILURE(Hammer(
      image, pool, targets,
      [&](std::byte* device, std::byte* pool_base) {
        GatherDenseArgs dense;
        TransferArgs transfer;
        switch (++turn % 3) {
          case 0:
            return stream_->Gather(GatherCompactArgs{.pool = from.In(pool_base),
                                                     .hot = to.In(device),
                                                     .pool_rows = kRows,
                                                     .hot_rows = kRows,
                                                     .layers = layers,
                                                     .layer_count = 2,
                                                     .miss_pool_rows = pool_rows.In(device),
                                                     .miss_hot_rows = hot_rows.In(device),
                                                     .miss_counts = counts.In(device),
                                                     .rows = 2,
                                                     .top_k = kTopK,
                                                     .gathered_bytes = gathered.In(device)});
          case 1:
            dense.pool = from.In(pool_base);
            dense.hot = to.In(device);
            dense.pool_rows = dense.hot_rows = kRows;
            dense.layers = layers;
            dense.layer_count = 2;
            dense.entry_pool_rows = pool_rows.In(device);
            dense.entry_hot_rows = hot_rows.In(device);
            dense.miss_mask = mask_region.In(device);
            dense.state_rows = states.In(device);
            dense.attention_indices = attention.In(device);
            dense.attention_block_stride = 64;
            dense.rows = 2;
            dense.top_k = kTopK;
            return stream_->Gather(dense);
          default:
            transfer.src = from.In(pool_base);
            transfer.dst = to.In(device);
            transfer.src_row_limit = transfer.dst_row_limit = kRows;
            transfer.src_layers = transfer.dst_layers = layers;
            transfer.layer_count = 2;
            transfer.src_rows = pool_rows.In(device);
            transfer.dst_rows = hot_rows.In(device);
            transfer.count = kEntries;
            return stream_->Transfer(transfer);
        }
      },
      [] {}));
  EXPECT_TRUE(pool.Equals(pool_before));
  Mask mask(before, image);
  for (const ScribbleTarget& target : targets(image.data())) {
    mask.Allow(target.values, size_t{1} * target.count * target.element_bytes);
  }
  mask.Allow(attention.In(image.data()), kEntries * 4);
  mask.Allow(gathered.In(image.data()), 8);
  const RowStore hot = to.In(image.data());
  for (int32_t layer = 0; layer < 2; ++layer) mask.Allow(hot.At(layer, 0, 0), size_t{kRows} * 24);
  EXPECT_TRUE(image.Equals(before)) << "a row beyond the limit was written";
}

// The batch itself changes while it is resolved: state rows, request ids and the number of real rows. Sequences then
// stand in several places at one time, so the outputs say nothing; but nothing is read or written beyond the arrays.
// Last, since a fault takes the device from all tests behind it.
class HostileBatch : public HostileGpuTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Cases, HostileBatch, testing::Bool(),
                         [](const auto& requests) { return requests.param ? "requests" : "state_rows"; });

TEST_P(HostileBatch, TheBatchChangesItself) {
  const bool requests = GetParam();
  std::mt19937_64 rng(74);
  ResolveShape shape;
  shape.rows = 9;
  shape.state_rows = shape.table_rows = 4;
  shape.top_k = 64;
  shape.hot_rows = 128;
  shape.real_rows = true;
  shape.request_states = requests;
  shape.resident_table = shape.hot_block_table = requests;
  ResolveGatherCase c(shape, {.row_bytes = 16}, {0}, KeyLimit(shape), rng);
  c.resolve().FillState(rng, KeyLimit(shape), 0.8);
  for (int32_t r = 0; r < shape.rows; ++r) {
    c.resolve().SetStateRow(r, r / 3);
    std::vector<int32_t> entries(shape.top_k);
    for (int32_t& entry : entries) entry = Draw(rng, 0, KeyLimit(shape) - 1);
    c.resolve().SetEntries(r, entries);
  }
  Image& image = c.resolve().image();
  Image before = image;
  const auto targets = [&](std::byte* device) {
    const ResolveArgs args = c.resolve().Args(device);
    std::vector<ScribbleTarget> all = {Target(static_cast<const int32_t*>(args.state_rows.data), 9, 4),
                                       Target(args.real_rows, 1, 10)};
    if (args.request_states != nullptr) all.push_back(Target(args.request_states, 4, 4));
    return all;
  };
  ASSERT_NO_FATAL_FAILURE(Hammer(
      image, c.pool(), targets,
      [&](std::byte* device, std::byte* pool) {
        return stream_->ResolveGather(c.resolve().Args(device), c.GatherArgs(device, pool));
      },
      [] {}));
  Mask mask(before, image);
  for (const ScribbleTarget& target : targets(image.data())) {
    mask.Allow(target.values, size_t{1} * target.count * target.element_bytes);
  }
  const ResolveArgs args = c.resolve().Args(image.data());
  const size_t slots = size_t{1} * shape.state_rows * shape.hot_rows;
  mask.Allow(args.residency.slot_key, slots * 4);
  mask.Allow(args.residency.lru, slots * 2);
  mask.AllowOutputs(args);
  const GatherCompactArgs gather = c.GatherArgs(image.data(), c.pool().data());
  mask.Allow(gather.gathered_bytes, 8);
  mask.Allow(gather.hot.At(0, 0, 0), static_cast<size_t>(gather.hot.layout.layer_bytes));
  EXPECT_TRUE(image.Equals(before));
}

}  // namespace
}  // namespace stoker::kernels::cuda
