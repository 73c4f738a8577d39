// Resolve and its gather where everything that a client can write is garbage: residency, entries, lengths, tables. The
// oracle says what comes out, and that nothing else is written. Then a Reset, and all is right.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_gather_case.h"
#include "tests/kernels/resolve_random.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

class GarbageTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(GarbageTest);

// Half of the values in [0, limit), some at the ends of their type, the rest anything.
template <typename T>
void Fill(const T* values, int64_t count, int64_t limit, std::mt19937_64& rng) {
  if (values == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    const auto kind = rng() % 16;
    const_cast<T*>(values)[i] = kind < 8    ? static_cast<T>(rng() % static_cast<uint64_t>(std::max<int64_t>(limit, 1)))
                                : kind == 8 ? std::numeric_limits<T>::max()
                                : kind == 9 ? std::numeric_limits<T>::min()
                                : kind == 10 ? static_cast<T>(-1)
                                : kind == 11 ? static_cast<T>(limit)
                                             : static_cast<T>(rng());
  }
}

void FillInts(const IntArray& array, int64_t count, int64_t limit, std::mt19937_64& rng) {
  if (array.is_int64) {
    Fill(static_cast<const int64_t*>(array.data), count, limit, rng);
  } else {
    Fill(static_cast<const int32_t*>(array.data), count, limit, rng);
  }
}

// Every value. State rows are garbage or their own, so that no sequence is in two places of the batch, and the first
// two rows are one sequence.
void FillAll(ResolveCase& c, std::mt19937_64& rng) {
  const ResolveArgs args = c.Args(c.image().data());
  const int64_t slots = int64_t{args.residency.state_rows} * args.residency.hot_rows;
  const int64_t keys = KeyLimit(c.shape());
  const int64_t table_rows = c.shape().table_rows;
  Fill(args.residency.slot_key, slots, keys, rng);
  Fill(args.residency.lru, slots, args.residency.hot_rows, rng);
  Fill(args.entries, args.rows * args.entry_stride, keys, rng);
  FillInts(args.lengths, args.rows, keys + 1, rng);
  Fill(args.block_table, table_rows * args.block_table_stride, c.shape().blocks, rng);
  Fill(args.resident_table, table_rows * args.resident_stride, 30, rng);
  Fill(args.newest_pool_rows, args.rows, keys, rng);
  Fill(args.allowed_blocks, args.residency.state_rows * args.allowed_stride, 1 << 30, rng);
  Fill(args.real_rows, 1, args.rows + 1, rng);
  if (args.real_rows != nullptr && Chance(rng, 0.5)) *c.real_rows() = args.rows;
  FillInts(args.state_rows, args.rows, 1, rng);
  for (int32_t r = 0; r < args.rows; ++r) {
    const int32_t own = std::max(r, 1);
    const bool garbage = r > 1 && Chance(rng, 0.2);
    c.SetStateRow(r, garbage ? (Chance(rng, 0.5) ? INT32_MIN : INT32_MAX) : own);
  }
  if (args.request_states != nullptr) {
    for (int32_t i = 0; i < table_rows; ++i) {
      c.request_states()[i] = i >= args.residency.state_rows || Chance(rng, 0.2) ? INT32_MAX - i : i;
    }
  }
}

TEST_P(GarbageTest, Resolve) {
  for (int32_t i = 0; i < Cases(150, 500); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    std::mt19937_64 rng(40001 + i);
    ResolveShape shape = RandomShape(rng, i % 50 == 49 ? RandomSize::kLarge : RandomSize::kSmall);
    shape.state_rows = shape.rows = Draw(rng, 2, 9);
    shape.table_rows = shape.rows + Draw(rng, 0, 2);
    shape.compact_list = true;
    const int64_t pool_rows = std::clamp(KeyLimit(shape) / 2, 1, 5000);
    ResolveGatherCase c(shape, {.row_bytes = 8}, {0}, pool_rows, rng);
    for (int32_t step = 0; step < 2; ++step) {
      FillAll(c.resolve(), rng);
      if (step == 0) {
        ASSERT_TRUE(c.resolve().Step(bench(), /*consistent=*/false));
      } else {
        ASSERT_TRUE(c.Step(bench()));
      }
    }
    // A good step after a Reset.
    Image& image = c.resolve().image();
    std::vector<int32_t> all(shape.state_rows);
    std::iota(all.begin(), all.end(), 0);
    const Region<int32_t> reset = image.Add("reset", all);
    const absl::Status status = bench().Run(image, [&](Stream& stream, std::byte* device, std::byte*) {
      return stream.Reset(
          {.residency = c.resolve().Args(device).residency, .state_rows = reset.In(device), .count = shape.state_rows});
    });
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(c.resolve().CheckResidency());
    RandomTables(c.resolve(), rng);
    RandomInputs(c.resolve(), rng);
    ASSERT_TRUE(c.resolve().Step(bench()));
  }
}

}  // namespace
}  // namespace stoker::kernels
