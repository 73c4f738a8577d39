// The host-side checks: good arguments pass, and every field that can be wrong is named with its value and its limit.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gather.h"
#include "kernels/invalidate.h"
#include "kernels/order_word.h"
#include "kernels/plane.h"
#include "kernels/resolve.h"
#include "kernels/transfer.h"

namespace stoker::kernels {
namespace {

using testing::HasSubstr;

// Memory that pointers may point to. Nothing reads it.
alignas(64) std::byte memory[64];
template <typename T>
T* Some() {
  return reinterpret_cast<T*>(memory);
}
template <typename T>
T* Odd() {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) + 1);
}

template <typename Args>
struct Wrong {
  std::function<void(Args&)> change;
  std::string message;
};

template <typename Args>
void ExpectRefused(const Args& good, const std::vector<Wrong<Args>>& cases) {
  ASSERT_TRUE(Validate(good).ok()) << Validate(good);
  for (const Wrong<Args>& wrong : cases) {
    Args args = good;
    wrong.change(args);
    const absl::Status status = Validate(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.message));
  }
}

Residency GoodResidency() {
  return {.slot_key = Some<int32_t>(), .lru = Some<int16_t>(), .state_rows = 4, .hot_rows = 128};
}

ResolveArgs GoodResolve() {
  ResolveArgs args;
  args.residency = GoodResidency();
  args.rows = 2;
  args.top_k = 64;
  args.entries = Some<int32_t>();
  args.entry_stride = 64;
  args.lengths = {memory, false};
  args.state_rows = {memory, true};
  args.block_table = Some<int32_t>();
  args.block_table_stride = 16;
  args.block_table_rows = 4;
  args.block_table_columns = 16;
  args.pool_rows = 4096;
  args.region_rows = 192;
  args.newest_row = 128;
  args.hot_rows_out = Some<int32_t>();
  args.hot_rows_out_stride = 64;
  return args;
}

TEST(ValidateTest, Resolve) {
  using A = ResolveArgs;
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  ExpectRefused<A>(
      GoodResolve(),
      {
          {[](A& a) { a.index_space = static_cast<IndexSpace>(0); }, "resolve.index_space: 0 is outside [1, 2]"},
          {[](A& a) { a.index_space = static_cast<IndexSpace>(3); }, "resolve.index_space: 3 is outside [1, 2]"},
          {[](A& a) { a.rows = -1; }, "resolve.rows: -1 is outside [0, 4096]"},
          {[](A& a) { a.rows = 4097; }, "resolve.rows: 4097 is outside [0, 4096]"},
          {[](A& a) { a.top_k = 0; }, "resolve.top_k: 0 is outside [1, 8192]"},
          {[](A& a) { a.top_k = 8193; }, "resolve.top_k: 8193 is outside [1, 8192]"},
          {[](A& a) { a.top_k = 129; }, "resolve.top_k: 129 is above residency.hot_rows = 128"},
          {[](A& a) { a.residency.hot_rows = 0; }, "resolve.residency.hot_rows: 0 is outside [1, 32768]"},
          {[](A& a) { a.residency.hot_rows = 32769; }, "resolve.residency.hot_rows: 32769 is outside [1, 32768]"},
          {[](A& a) { a.residency.state_rows = 0; }, "resolve.residency.state_rows: 0 is outside"},
          {[](A& a) { a.residency.slot_key = nullptr; }, "resolve.residency.slot_key: is null"},
          {[](A& a) { a.residency.lru = nullptr; }, "resolve.residency.lru: is null"},
          {[](A& a) { a.residency.lru = Odd<int16_t>(); }, "is not a multiple of 2"},
          {[](A& a) { a.entries = nullptr; }, "resolve.entries: is null"},
          {[](A& a) { a.entries = Odd<int32_t>(); }, "resolve.entries: 0x"},
          {[](A& a) { a.entry_stride = 63; }, "resolve.entry_stride: 63 is below top_k = 64"},
          {[](A& a) { a.lengths.data = nullptr; }, "resolve.lengths: is null"},
          {[](A& a) {
             a.lengths = {memory + 4, true};
           },
           "resolve.lengths: 0x"},
          {[](A& a) { a.state_rows.data = nullptr; }, "resolve.state_rows: is null"},
          {[](A& a) { a.request_states = Some<int32_t>(), a.request_count = -1; }, "resolve.request_count: -1"},
          {[](A& a) { a.block_table = nullptr; }, "resolve.block_table: is null"},
          {[](A& a) { a.block_table_stride = 15; }, "resolve.block_table_stride: 15 is below block_table_columns = 16"},
          {[](A& a) { a.block_table_rows = -1; }, "resolve.block_table_rows: -1 is outside"},
          {[](A& a) { a.block_table_columns = -1; }, "resolve.block_table_columns: -1 is outside"},
          {[](A& a) { a.block_rows = 0; }, "resolve.block_rows: 0 is outside [1, 65536]"},
          {[](A& a) { a.pool_rows = -1; }, "resolve.pool_rows: -1 is outside [0, 2147483647]"},
          {[](A& a) { a.pool_rows = int64_t{1} << 31; }, "resolve.pool_rows: 2147483648 is outside"},
          {[](A& a) { a.allowed_blocks = Some<uint64_t>(); }, "resolve.allowed_blocks: is set, but needs index_space"},
          {[](A& a) {
             a.index_space = IndexSpace::kPoolRow;
             a.allowed_blocks = Some<uint64_t>();
           },
           "resolve.allowed_stride: 0 is outside"},
          {[](A& a) {
             a.index_space = IndexSpace::kPoolRow;
             a.resident_table = Some<int32_t>();
           },
           "resolve.resident_table: is set, but needs index_space kPosition"},
          {[](A& a) { a.resident_table = Some<int32_t>(), a.resident_columns = 2; },
           "resolve.resident_stride: 0 is below resident_columns = 2"},
          {[](A& a) { a.newest_row = 127; }, "resolve.newest_row: 127 is below residency.hot_rows = 128"},
          {[](A& a) { a.region_rows = 128; }, "resolve.region_rows: 128 is below newest_row + 1 = 129"},
          {[](A& a) { a.region_rows = kMax; },
           "resolve.residency.state_rows x region_rows: 8589934588 is above 2^31 - 1"},
          {[](A& a) { a.hot_block_rows = 0; }, "resolve.hot_block_rows: 0 is outside [1, 65536]"},
          {[](A& a) { a.hot_block_table = Some<int32_t>(), a.hot_block_stride = 2; },
           "resolve.hot_block_stride: 2 is outside [3, "},
          {[](A& a) { a.hot_rows_out = nullptr; }, "resolve.hot_rows_out: is null"},
          {[](A& a) { a.hot_rows_out_stride = 60; }, "resolve.hot_rows_out_stride: 60 is below top_k = 64"},
          {[](A& a) { a.attention_indices = Some<int32_t>(), a.attention_block_stride = 64; },
           "resolve.attention_stride: 0 is below top_k = 64"},
          {[](A& a) {
             a.attention_indices = Some<int32_t>();
             a.attention_stride = 64;
             a.attention_block_stride = 63;
           },
           "resolve.attention_block_stride: 63 is below hot_block_rows = 64"},
          {[](A& a) { a.valid_counts = Some<int32_t>(), a.valid_count_stride = 0; },
           "resolve.valid_count_stride: 0 is outside"},
          {[](A& a) { a.miss_counts = Some<int32_t>(); },
           "resolve.miss_pool_rows, miss_hot_rows, miss_counts: 1 of 3 are set, which must be 0 or 3"},
          {[](A& a) { a.told_miss_counts = Odd<int32_t>(); }, "resolve.told_miss_counts: 0x"},
          {[](A& a) { a.stats = Odd<uint64_t>(); }, "resolve.stats: 0x"},
      });
}

TEST(ValidateTest, ResolveWithoutRowsNeedsNoBatch) {
  ResolveArgs args = GoodResolve();
  args.rows = 0;
  args.entries = nullptr;
  args.lengths.data = nullptr;
  args.state_rows.data = nullptr;
  args.hot_rows_out = nullptr;
  args.block_table = nullptr;
  EXPECT_TRUE(Validate(args).ok()) << Validate(args);
}

TEST(ValidateTest, ResolveOfPoolRowsNeedsNoLengthsOrTable) {
  ResolveArgs args = GoodResolve();
  args.index_space = IndexSpace::kPoolRow;
  args.lengths.data = nullptr;
  args.block_table = nullptr;
  EXPECT_TRUE(Validate(args).ok()) << Validate(args);
}

RowStore GoodStore(int32_t row_bytes = 656) {
  const RowLayout layout = RowLayout::Make({.row_bytes = row_bytes}, 100).value();
  return {.base = memory, .layer_stride = layout.layer_bytes, .layers = 3, .layout = layout};
}

const int32_t kGoodLayers[] = {0, 2};
const int32_t kBadLayers[] = {1, 3};
const int32_t kNegativeLayers[] = {-1, 0};

// What both gathers check alike.
template <typename A>
std::vector<Wrong<A>> WrongGathers() {
  return {
      {[](A& a) { a.rows = 5000; }, "gather.rows: 5000 is outside [0, 4096]"},
      {[](A& a) { a.top_k = 0; }, "gather.top_k: 0 is outside [1, 8192]"},
      {[](A& a) { a.layer_count = 1025; }, "gather.layer_count: 1025 is outside [0, 1024]"},
      {[](A& a) { a.pool.base = nullptr; }, "gather.pool.base: is null"},
      {[](A& a) { a.hot.base = Odd<std::byte>(); }, "gather.hot.base: 0x"},
      {[](A& a) { a.pool.layers = 0; }, "gather.pool.layers: 0 is outside [1, 1024]"},
      {[](A& a) { a.pool.layer_stride -= 4; }, "gather.pool.layer_stride: 65596 is below layout.layer_bytes = 65600"},
      {[](A& a) { a.pool.layer_stride += 2; }, "gather.pool.layer_stride: 65602 is not a multiple of 4"},
      {[](A& a) { a.hot.layout.page_rows = 0; }, "gather.hot.layout.page_rows: 0 is outside"},
      {[](A& a) { a.pool_rows = 101; }, "gather.pool_rows: 101 is outside [0, 100]"},
      {[](A& a) { a.hot_rows = 101; }, "gather.hot_rows: 101 is outside [0, 100]"},
      {[](A& a) { a.hot = GoodStore(640); }, "gather.pool.layout.part[0].bytes: 656 is outside [640, 640]"},
      {[](A& a) { a.layers = nullptr; }, "gather.layers: is null"},
      {[](A& a) { a.layers = kBadLayers; }, "gather.layers[1]: 3 is outside [0, 2]"},
      {[](A& a) { a.layers = kNegativeLayers; }, "gather.layers[0]: -1 is outside [0, 2]"},
      {[](A& a) { a.hot.layers = 2; }, "gather.layers[1]: 2 is outside [0, 1]"},
      {[](A& a) { a.gathered_bytes = Odd<uint64_t>(); }, "gather.gathered_bytes: 0x"},
  };
}

TEST(ValidateTest, GatherCompact) {
  using A = GatherCompactArgs;
  const A good{.pool = GoodStore(),
               .hot = GoodStore(),
               .pool_rows = 100,
               .hot_rows = 100,
               .layers = kGoodLayers,
               .layer_count = 2,
               .miss_pool_rows = Some<int32_t>(),
               .miss_hot_rows = Some<int32_t>(),
               .miss_counts = Some<int32_t>(),
               .rows = 2,
               .top_k = 64,
               .gathered_bytes = nullptr};
  std::vector<Wrong<A>> cases = WrongGathers<A>();
  cases.push_back({[](A& a) { a.miss_pool_rows = nullptr; }, "gather.miss_pool_rows: is null"});
  cases.push_back({[](A& a) { a.limits.max_blocks = -1; }, "gather.limits.max_blocks: -1 is outside [0, 2147483647]"});
  cases.push_back({[](A& a) { a.limits.max_bytes = -2; }, "gather.limits.max_bytes: -2 is outside [0, "});
  cases.push_back({[](A& a) { a.miss_hot_rows = nullptr; }, "gather.miss_hot_rows: is null"});
  cases.push_back({[](A& a) { a.miss_counts = nullptr; }, "gather.miss_counts: is null"});
  ExpectRefused(good, cases);
  A none = good;
  none.rows = 0;
  none.miss_counts = nullptr;
  EXPECT_TRUE(Validate(none).ok());
}

TEST(ValidateTest, GatherDense) {
  using A = GatherDenseArgs;
  A good;
  good.pool = GoodStore();
  good.hot = GoodStore();
  good.pool_rows = 100;
  good.hot_rows = 100;
  good.layers = kGoodLayers;
  good.layer_count = 2;
  good.entry_pool_rows = Some<int32_t>();
  good.entry_hot_rows = Some<int32_t>();
  good.miss_mask = Some<int32_t>();
  good.rows = 2;
  good.top_k = 64;
  std::vector<Wrong<A>> cases = WrongGathers<A>();
  cases.push_back({[](A& a) { a.entry_pool_rows = nullptr; }, "gather.entry_pool_rows: is null"});
  cases.push_back({[](A& a) { a.entry_hot_rows = nullptr; }, "gather.entry_hot_rows: is null"});
  cases.push_back({[](A& a) { a.miss_mask = nullptr; }, "gather.miss_mask: is null"});
  cases.push_back({[](A& a) { a.state_rows = Odd<int32_t>(); }, "gather.state_rows: 0x"});
  cases.push_back({[](A& a) { a.hot_block_rows = 0; }, "gather.hot_block_rows: 0 is outside"});
  cases.push_back({[](A& a) { a.attention_indices = Some<int32_t>(), a.attention_block_stride = 8; },
                   "gather.attention_block_stride: 8 is below hot_block_rows = 64"});
  ExpectRefused(good, cases);
}

TEST(ValidateTest, Transfer) {
  using A = TransferArgs;
  const A good{.src = GoodStore(),
               .dst = GoodStore(),
               .src_row_limit = 100,
               .dst_row_limit = 50,
               .src_layers = kGoodLayers,
               .dst_layers = kGoodLayers,
               .layer_count = 2,
               .src_rows = Some<int32_t>(),
               .dst_rows = Some<int32_t>(),
               .count = 10,
               .transferred_bytes = nullptr};
  ExpectRefused<A>(
      good, {
                {[](A& a) { a.count = -1; }, "transfer.count: -1 is outside"},
                {[](A& a) { a.layer_count = -1; }, "transfer.layer_count: -1 is outside [0, 1024]"},
                {[](A& a) { a.limits.max_blocks = -1; }, "transfer.limits.max_blocks: -1 is outside [0, 2147483647]"},
                {[](A& a) { a.limits.max_bytes = -2; }, "transfer.limits.max_bytes: -2 is outside [0, "},
                {[](A& a) { a.src.base = nullptr; }, "transfer.src.base: is null"},
                {[](A& a) { a.dst.base = nullptr; }, "transfer.dst.base: is null"},
                {[](A& a) { a.src_row_limit = 101; }, "transfer.src_row_limit: 101 is outside [0, 100]"},
                {[](A& a) { a.dst_row_limit = -1; }, "transfer.dst_row_limit: -1 is outside [0, 100]"},
                {[](A& a) { a.dst = GoodStore(20); }, "transfer.src.layout.part[0].bytes: 656 is outside [20, 20]"},
                {[](A& a) { a.dst.layout.part_count = 2; }, "transfer.src.layout.part_count: 1 is outside [2, 2]"},
                {[](A& a) { a.src_layers = kBadLayers; }, "transfer.src_layers[1]: 3 is outside [0, 2]"},
                {[](A& a) { a.dst_layers = kNegativeLayers; }, "transfer.dst_layers[0]: -1 is outside [0, 2]"},
                {[](A& a) { a.src_rows = nullptr; }, "transfer.src_rows: is null"},
                {[](A& a) { a.dst_rows = nullptr; }, "transfer.dst_rows: is null"},
            });
}

TEST(ValidateTest, InvalidateResetPlace) {
  using I = InvalidateArgs;
  ExpectRefused<I>({.residency = GoodResidency(), .state_rows = Some<int32_t>(), .keys = Some<int64_t>(), .count = 3},
                   {
                       {[](I& a) { a.residency.lru = nullptr; }, "invalidate.residency.lru: is null"},
                       {[](I& a) { a.count = -1; }, "invalidate.count: -1 is outside"},
                       {[](I& a) { a.state_rows = nullptr; }, "invalidate.state_rows: is null"},
                       {[](I& a) { a.keys = nullptr; }, "invalidate.keys: is null"},
                   });
  using R = ResetArgs;
  ExpectRefused<R>({.residency = GoodResidency(), .state_rows = Some<int32_t>(), .count = 3},
                   {
                       {[](R& a) { a.residency.slot_key = nullptr; }, "reset.residency.slot_key: is null"},
                       {[](R& a) { a.count = -1; }, "reset.count: -1 is outside"},
                       {[](R& a) { a.state_rows = nullptr; }, "reset.state_rows: is null"},
                   });
  using P = PlaceArgs;
  ExpectRefused<P>(
      {.residency = GoodResidency(), .state_row = 3, .first_position = 100, .count = 28},
      {
          {[](P& a) { a.state_row = 4; }, "place.state_row: 4 is outside [0, 3]"},
          {[](P& a) { a.state_row = -1; }, "place.state_row: -1 is outside [0, 3]"},
          {[](P& a) { a.first_position = -1; }, "place.first_position: -1 is outside [0, 128]"},
          {[](P& a) { a.count = -1; }, "place.count: -1 is outside [0, 128]"},
          {[](P& a) { a.count = 29; }, "place.first_position + count: 129 is above residency.hot_rows = 128"},
      });
}

TEST(ValidateTest, AwaitDoorbell) {
  using A = AwaitDoorbellArgs;
  ExpectRefused<A>({.state = Some<PlaneState>(), .request = Some<uint64_t>(), .abort = Some<uint32_t>()},
                   {
                       {[](A& a) { a.state = nullptr; }, "await_doorbell.state: is null"},
                       {[](A& a) { a.state = Odd<PlaneState>(); }, "is not a multiple of 8"},
                       {[](A& a) { a.request = nullptr; }, "await_doorbell.request: is null"},
                       {[](A& a) { a.request = Odd<uint64_t>(); }, "is not a multiple of 8"},
                       {[](A& a) { a.abort = nullptr; }, "await_doorbell.abort: is null"},
                       {[](A& a) { a.abort = Odd<uint32_t>(); }, "is not a multiple of 4"},
                   });
}

TEST(ValidateTest, RingDoorbell) {
  using A = RingDoorbellArgs;
  ExpectRefused<A>({.state = Some<PlaneState>(), .done = Some<uint64_t>()},
                   {
                       {[](A& a) { a.state = nullptr; }, "ring_doorbell.state: is null"},
                       {[](A& a) { a.done = nullptr; }, "ring_doorbell.done: is null"},
                       {[](A& a) { a.done = Odd<uint64_t>(); }, "is not a multiple of 8"},
                   });
}

TEST(ValidateTest, AwaitQuiet) {
  using A = AwaitQuietArgs;
  ExpectRefused<A>({.state = Some<PlaneState>(), .abort = nullptr, .limit_ns = 0},
                   {
                       {[](A& a) { a.state = nullptr; }, "await_quiet.state: is null"},
                       {[](A& a) { a.abort = Odd<uint32_t>(); }, "is not a multiple of 4"},
                   });
}

TEST(ValidateTest, AwaitOrder) {
  using A = AwaitOrderArgs;
  ExpectRefused<A>({.word = Some<uint64_t>(), .number = 1, .abort = Some<uint32_t>(), .aborted = Some<uint32_t>()},
                   {
                       {[](A& a) { a.word = nullptr; }, "await_order.word: is null"},
                       {[](A& a) { a.word = Odd<uint64_t>(); }, "is not a multiple of 8"},
                       {[](A& a) { a.number = 0; }, "await_order.number: 0 is outside [1, 4611686018427387904]"},
                       {[](A& a) { a.number = kMaxOrder + 1; }, "await_order.number: "},
                       {[](A& a) { a.number = UINT64_MAX; }, "await_order.number: "},
                       {[](A& a) { a.abort = nullptr; }, "await_order.abort: is null"},
                       {[](A& a) { a.aborted = nullptr; }, "await_order.aborted: is null"},
                   });
}

TEST(ValidateTest, SignalOrder) {
  using A = SignalOrderArgs;
  ExpectRefused<A>({.word = Some<uint64_t>(), .number = kMaxOrder, .aborted = nullptr},
                   {
                       {[](A& a) { a.word = nullptr; }, "signal_order.word: is null"},
                       {[](A& a) { a.number = 0; }, "signal_order.number: 0 is outside"},
                       {[](A& a) { a.number = kReleasedOrder; }, "signal_order.number: "},
                       {[](A& a) { a.aborted = Odd<uint32_t>(); }, "is not a multiple of 4"},
                   });
}

TEST(ValidateTest, Batch) {
  using A = BatchArgs;
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  A good;
  good.state = Some<PlaneState>();
  good.mail = {.rows = Some<int32_t>(),
               .sequence_ids = Some<uint64_t>(),
               .state_rows = Some<int32_t>(),
               .lengths = Some<int32_t>(),
               .commits = Some<int32_t>(),
               .statuses = Some<int32_t>()};
  good.plan = {.rows = Some<int32_t>(),
               .state_rows = Some<int32_t>(),
               .lengths = Some<int32_t>(),
               .newest_pool_rows = Some<int32_t>(),
               .newest_hot_rows = Some<int32_t>(),
               .words = Some<int32_t>(),
               .commit_hot_rows = Some<int32_t>(),
               .commit_pool_rows = Some<int32_t>(),
               .claims = Some<int32_t>()};
  good.max_rows = 8;
  good.top_k = 64;
  good.hot_rows = 128;
  good.max_sequence_rows = 1024;
  good.session = 1;
  good.entries = Some<StateRowEntry>();
  good.state_rows = 4;
  good.words = Some<SequenceWord>();
  good.word_count = 4;
  good.block_table = Some<int32_t>();
  good.block_table_stride = 16;
  good.block_table_columns = 16;
  good.pool_rows = 4096;
  good.region_rows = 192;
  good.newest_row = 128;
  ExpectRefused<A>(
      good,
      {
          {[](A& a) { a.state = nullptr; }, "batch.state: is null"},
          {[](A& a) { a.mail.rows = nullptr; }, "batch.mail.rows: is null"},
          {[](A& a) { a.mail.sequence_ids = nullptr; }, "batch.mail.sequence_ids: is null"},
          {[](A& a) { a.mail.sequence_ids = Odd<uint64_t>(); }, "is not a multiple of 8"},
          {[](A& a) { a.mail.state_rows = nullptr; }, "batch.mail.state_rows: is null"},
          {[](A& a) { a.mail.lengths = nullptr; }, "batch.mail.lengths: is null"},
          {[](A& a) { a.mail.commits = nullptr; }, "batch.mail.commits: is null"},
          {[](A& a) { a.mail.statuses = Odd<int32_t>(); }, "is not a multiple of 4"},
          {[](A& a) { a.mail.statuses = nullptr; }, "batch.mail.statuses: is null"},
          {[](A& a) { a.plan.rows = nullptr; }, "batch.plan.rows: is null"},
          {[](A& a) { a.plan.state_rows = nullptr; }, "batch.plan.state_rows: is null"},
          {[](A& a) { a.plan.lengths = nullptr; }, "batch.plan.lengths: is null"},
          {[](A& a) { a.plan.newest_pool_rows = nullptr; }, "batch.plan.newest_pool_rows: is null"},
          {[](A& a) { a.plan.newest_hot_rows = nullptr; }, "batch.plan.newest_hot_rows: is null"},
          {[](A& a) { a.plan.words = nullptr; }, "batch.plan.words: is null"},
          {[](A& a) { a.plan.commit_hot_rows = nullptr; }, "batch.plan.commit_hot_rows: is null"},
          {[](A& a) { a.plan.commit_pool_rows = nullptr; }, "batch.plan.commit_pool_rows: is null"},
          {[](A& a) { a.plan.claims = nullptr; }, "batch.plan.claims: is null"},
          {[](A& a) { a.max_rows = 0; }, "batch.max_rows: 0 is outside [1, 4096]"},
          {[](A& a) { a.max_rows = 4097; }, "batch.max_rows: 4097 is outside [1, 4096]"},
          {[](A& a) { a.hot_rows = 0; }, "batch.hot_rows: 0 is outside [1, 32768]"},
          {[](A& a) { a.hot_rows = 32769; }, "batch.hot_rows: 32769 is outside [1, 32768]"},
          {[](A& a) { a.top_k = 0; }, "batch.top_k: 0 is outside [1, 8192]"},
          {[](A& a) { a.top_k = 129; }, "batch.top_k: 129 is above hot_rows = 128"},
          {[](A& a) { a.max_sequence_rows = 0; }, "batch.max_sequence_rows: 0 is outside [1, 2147483647]"},
          {[](A& a) { a.max_sequence_rows = int64_t{kMax} + 1; }, "batch.max_sequence_rows: 2147483648 is outside"},
          {[](A& a) { a.session = 0; }, "batch.session: 0 is nobody's"},
          {[](A& a) { a.state_rows = 0; }, "batch.state_rows: 0 is outside [1, 1048576]"},
          {[](A& a) { a.entries = nullptr; }, "batch.entries: is null"},
          {[](A& a) { a.word_count = 0; }, "batch.word_count: 0 is outside [1, 2147483647]"},
          {[](A& a) { a.words = nullptr; }, "batch.words: is null"},
          {[](A& a) { a.words = Odd<SequenceWord>(); }, "is not a multiple of 16"},
          {[](A& a) { a.block_table_columns = -1; }, "batch.block_table_columns: -1 is outside [0, 2147483647]"},
          {[](A& a) { a.block_table_stride = 15; }, "batch.block_table_stride: 15 is below block_table_columns = 16"},
          {[](A& a) { a.block_table = nullptr; }, "batch.block_table: is null"},
          {[](A& a) { a.block_rows = 0; }, "batch.block_rows: 0 is outside [1, 65536]"},
          {[](A& a) { a.pool_rows = -1; }, "batch.pool_rows: -1 is outside [0, 2147483647]"},
          {[](A& a) { a.newest_row = 127; }, "batch.newest_row: 127 is below hot_rows = 128"},
          {[](A& a) { a.region_rows = 191; }, "batch.region_rows: 191 is below newest_row + block_rows = 192"},
          {[](A& a) { a.region_rows = kMax / 3; }, "batch.state_rows x region_rows: 2863311528 is above 2^31 - 1"},
          {[](A& a) { a.committed_rows = Odd<uint64_t>(); }, "is not a multiple of 8"},
          {[](A& a) { a.ended = Odd<uint32_t>(); }, "is not a multiple of 4"},
      });
}

}  // namespace
}  // namespace stoker::kernels
