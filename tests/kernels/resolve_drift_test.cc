// Decoding: a thousand steps, each of which replaces some entries of the one before. All memory is compared after each
// step, the order of all slots included.
//
// The cases are the shapes for which the CUDA backend has kernels of their own, and those at which it changes from one
// to another: with optional inputs and outputs or without; up to 2,048 entries of 8,192 slots in fours or not; one
// query row or several; sequences that become longer than 65,536 positions on the way (32,768 with 8,192 slots).
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/resolve.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/resolve_random.h"

namespace stoker::kernels {
namespace {

struct DriftCase {
  std::string name;
  IndexSpace index_space = IndexSpace::kPosition;
  int32_t top_k = 0;
  int32_t hot_rows = 0;
  std::vector<int32_t> query_rows = {1};  // of each sequence
  bool plain = false;
  bool wide = false;      // int64, and padded batches with real_rows
  bool corrupts = false;  // the order is broken now and then
  int32_t block_rows = 64;
  int32_t first_length = 0;  // 0: four times the slots
  int32_t quick_steps = 0;
  int32_t full_steps = 1000;

  friend void PrintTo(const DriftCase& drift, std::ostream* out) { *out << drift.name; }
};

std::vector<DriftCase> DriftCases() {
  constexpr IndexSpace kPool = IndexSpace::kPoolRow;
  std::vector<DriftCase> cases;
  const auto add = [&](DriftCase drift) { cases.push_back(std::move(drift)); };
  add({.name = "plain_100_300", .top_k = 100, .hot_rows = 300, .plain = true, .quick_steps = 1000});
  add({.name = "plain_512_1024", .top_k = 512, .hot_rows = 1024, .plain = true, .quick_steps = 100});
  add({.name = "plain_1024_2048", .top_k = 1024, .hot_rows = 2048, .plain = true, .quick_steps = 50});
  add({.name = "plain_2048_4096", .top_k = 2048, .hot_rows = 4096, .plain = true, .quick_steps = 50});
  add({.name = "plain_2048_4096_across_65536",
       .top_k = 2048,
       .hot_rows = 4096,
       .plain = true,
       .first_length = 65536 - 60,
       .quick_steps = 80,
       .full_steps = 120});
  add({.name = "plain_2048_4096_of_131072",
       .top_k = 2048,
       .hot_rows = 4096,
       .plain = true,
       .first_length = 131072,
       .quick_steps = 20,
       .full_steps = 300});
  add({.name = "plain_2048_8192_across_32768",
       .top_k = 2048,
       .hot_rows = 8192,
       .plain = true,
       .first_length = 32768 - 30,
       .quick_steps = 40,
       .full_steps = 200});
  add({.name = "plain_1000_8196",
       .top_k = 1000,
       .hot_rows = 8196,
       .plain = true,
       .quick_steps = 20,
       .full_steps = 100});
  add({.name = "plain_2052_8192",
       .top_k = 2052,
       .hot_rows = 8192,
       .plain = true,
       .quick_steps = 20,
       .full_steps = 100});
  add({.name = "plain_8192_32768",
       .top_k = 8192,
       .hot_rows = 32768,
       .plain = true,
       .quick_steps = 3,
       .full_steps = 10});
  add({.name = "plain_100_301", .top_k = 100, .hot_rows = 301, .plain = true, .quick_steps = 100});
  add({.name = "plain_512_1024_corrupt",
       .top_k = 512,
       .hot_rows = 1024,
       .plain = true,
       .corrupts = true,
       .quick_steps = 50,
       .full_steps = 300});
  add({.name = "plain_512_1024_unions",
       .top_k = 512,
       .hot_rows = 1024,
       .query_rows = {1, 3, 2},
       .plain = true,
       .quick_steps = 20,
       .full_steps = 200});
  for (const IndexSpace index_space : {IndexSpace::kPosition, kPool}) {
    const std::string space = index_space == kPool ? "pool_row_" : "position_";
    add({.name = space + "100_300",
         .index_space = index_space,
         .top_k = 100,
         .hot_rows = 300,
         .wide = true,
         .block_rows = 48,
         .quick_steps = 1000});
    add({.name = space + "512_1024", .index_space = index_space, .top_k = 512, .hot_rows = 1024, .quick_steps = 50});
    add({.name = space + "1024_2048", .index_space = index_space, .top_k = 1024, .hot_rows = 2048, .quick_steps = 20});
    add({.name = space + "2048_4096",
         .index_space = index_space,
         .top_k = 2048,
         .hot_rows = 4096,
         .wide = true,
         .first_length = 131072,
         .quick_steps = 20});
    add({.name = space + "3000_8192",
         .index_space = index_space,
         .top_k = 3000,
         .hot_rows = 8192,
         .quick_steps = 10,
         .full_steps = 60});
    // Four rows of 100 entries that differ want more slots than there are.
    add({.name = space + "100_300_unions",
         .index_space = index_space,
         .top_k = 100,
         .hot_rows = 300,
         .query_rows = {2, 3, 1, 4},
         .wide = true,
         .quick_steps = 200});
    add({.name = space + "100_300_corrupt",
         .index_space = index_space,
         .top_k = 100,
         .hot_rows = 300,
         .query_rows = {1, 2},
         .corrupts = true,
         .quick_steps = 300});
  }
  return cases;
}

class ResolveDriftTest : public testing::TestWithParam<std::tuple<BackendCase, DriftCase>> {
 protected:
  const DriftCase& drift() const { return std::get<1>(GetParam()); }
  Bench bench_{std::get<0>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Backends, ResolveDriftTest,
                         testing::Combine(testing::ValuesIn(BackendCases()), testing::ValuesIn(DriftCases())),
                         [](const auto& param) {
                           return std::get<0>(param.param).name + "_" + std::get<1>(param.param).name;
                         });

// The entries of one query row. Distinct, as an indexer gives them.
class Entries {
 public:
  Entries(int32_t count, int32_t limit, std::mt19937_64& rng) {
    while (std::ssize(entries_) < count) {
      const int32_t key = Draw(rng, 0, limit - 1);
      if (members_.insert(key).second) entries_.push_back(key);
    }
  }

  // Replaces one of `share`, some by what was there lately.
  void Drift(int32_t share, int32_t limit, std::mt19937_64& rng) {
    for (int32_t i = 0; i < std::max<int32_t>(1, static_cast<int32_t>(std::ssize(entries_)) / share); ++i) {
      int32_t& entry = entries_[Draw(rng, 0, static_cast<int32_t>(std::ssize(entries_)) - 1)];
      int32_t key = Draw(rng, 0, limit - 1);
      if (!left_.empty() && Chance(rng, 0.3)) key = left_[Draw(rng, 0, static_cast<int32_t>(left_.size()) - 1)];
      if (!members_.insert(key).second) continue;
      members_.erase(entry);
      left_.push_back(entry);
      entry = key;
    }
    if (left_.size() > 4 * entries_.size()) left_.erase(left_.begin(), left_.begin() + std::ssize(left_) / 2);
  }

  // As they stand, or with repeats of hits and of what is new, and with what means nothing, among them.
  std::vector<int32_t> Take(bool disturbed, int32_t length, std::mt19937_64& rng) const {
    std::vector<int32_t> taken = entries_;
    if (!disturbed) return taken;
    const auto at = [&]() -> int32_t& { return taken[Draw(rng, 0, static_cast<int32_t>(taken.size()) - 1)]; };
    for (size_t i = 0; i < taken.size() / 10 + 1; ++i) at() = at();
    const int32_t unseen = Draw(rng, 0, length - 1);
    at() = unseen;
    at() = unseen;
    at() = length - 1;
    at() = length;
    at() = -1;
    return taken;
  }

 private:
  std::vector<int32_t> entries_;
  std::vector<int32_t> left_;
  std::unordered_set<int32_t> members_;
};

TEST_P(ResolveDriftTest, Steps) {
  const int32_t steps = Cases(std::get<0>(GetParam()), drift().quick_steps, drift().full_steps);
  const int32_t first_length = drift().first_length != 0 ? drift().first_length : 4 * drift().hot_rows;
  std::mt19937_64 rng(6);
  ResolveShape shape;
  shape.index_space = drift().index_space;
  shape.state_rows = static_cast<int32_t>(drift().query_rows.size()) + 1;
  shape.rows = std::accumulate(drift().query_rows.begin(), drift().query_rows.end(), drift().wide ? 2 : 0);
  shape.top_k = drift().top_k;
  shape.hot_rows = drift().hot_rows;
  shape.block_rows = drift().block_rows;
  shape.positions = first_length + drift().full_steps + 8;
  shape.blocks = shape.positions / shape.block_rows + 10;
  shape.int64_lengths = shape.int64_state_rows = shape.real_rows = drift().wide;
  shape.newest_pool_rows = shape.index_space == IndexSpace::kPoolRow;
  shape.allowed_blocks = shape.index_space == IndexSpace::kPoolRow && drift().wide;
  if (drift().plain) shape = Plain(shape);
  ResolveCase c(shape);
  for (int32_t s = 0; s < shape.state_rows; ++s) std::shuffle(c.lru(s), c.lru(s) + shape.hot_rows, rng);
  std::vector<Entries> entries;
  for (int32_t r = 0; r < shape.rows; ++r) entries.emplace_back(shape.top_k, first_length - 1, rng);
  for (int32_t step = 0; step < steps; ++step) {
    int32_t r = 0;
    for (int32_t sequence = 0; sequence < std::ssize(drift().query_rows); ++sequence) {
      for (int32_t q = 0; q < drift().query_rows[sequence]; ++q, ++r) {
        const int32_t length = first_length + step + q;
        entries[r].Drift(15, length - 1, rng);
        c.SetStateRow(r, shape.state_rows - 1 - sequence);
        c.SetLength(r, length);
        if (shape.newest_pool_rows) c.newest_pool_rows()[r] = length - 1;
        c.SetEntries(r, entries[r].Take(step % 4 == 3, length, rng));
      }
    }
    for (; r < shape.rows; ++r) c.SetStateRow(r, r % 2 == 0 ? -1 : shape.state_rows);
    if (shape.real_rows) *c.real_rows() = step % 3 == 0 ? Draw(rng, 0, shape.rows) : shape.rows + step % 2;
    if (drift().corrupts && step % 3 == 1) CorruptState(c, rng);
    ASSERT_TRUE(c.Step(bench_, !drift().corrupts)) << "step " << step;
  }
}

}  // namespace
}  // namespace stoker::kernels
