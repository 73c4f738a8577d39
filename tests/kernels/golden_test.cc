// Whole workloads, step by step, against recorded slots and miss counts.
//
// STOKER_SHARED names the folder whose golden/ holds what the seeds' kernels answered. Without it the recording is made
// here, by a model with two lists that knows neither the kernels nor the oracle.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"

namespace stoker::kernels {
namespace {

class GoldenTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(GoldenTest);

struct Golden {
  std::string name;
  int32_t steps = 0;
  int32_t rows = 0;
  int32_t top_k = 0;
  int32_t hot_rows = 0;
  int32_t context = 0;
  std::vector<int32_t> positions;  // [steps][rows][top_k]
  std::vector<int16_t> slots;      // [steps][rows][top_k]
  std::vector<int32_t> misses;     // [steps][rows]
};

class Reader {
 public:
  explicit Reader(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    EXPECT_TRUE(file) << path;
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  template <typename T>
  std::vector<T> Take(size_t count) {
    std::vector<T> values(count);
    EXPECT_LE(at_ + count * sizeof(T), bytes_.size());
    if (at_ + count * sizeof(T) <= bytes_.size()) std::memcpy(values.data(), bytes_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return values;
  }
  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  std::vector<char> bytes_;
  size_t at_ = 0;
};

Golden ReadGolden(const std::string& folder, const std::string& name) {
  Golden golden;
  golden.name = name;
  Reader workload(folder + "/w_" + name);
  EXPECT_EQ(workload.Take<char>(4), (std::vector<char>{'S', 'T', 'K', 'W'}));
  // version, steps, rows, top_k, context, hot_rows, row_bytes, reserved
  const std::vector<uint32_t> w = workload.Take<uint32_t>(8);
  EXPECT_EQ(w[0], 1);
  golden.steps = static_cast<int32_t>(w[1]);
  golden.rows = static_cast<int32_t>(w[2]);
  golden.top_k = static_cast<int32_t>(w[3]);
  golden.context = static_cast<int32_t>(w[4]);
  golden.hot_rows = static_cast<int32_t>(w[5]);
  const size_t entries = size_t{1} * golden.steps * golden.rows * golden.top_k;
  golden.positions = workload.Take<int32_t>(entries);
  EXPECT_TRUE(workload.AtEnd());
  Reader answers(folder + "/g_" + name);
  EXPECT_EQ(answers.Take<char>(4), (std::vector<char>{'S', 'T', 'K', 'G'}));
  EXPECT_EQ(answers.Take<uint32_t>(5), (std::vector<uint32_t>{1, w[1], w[2], w[3], w[5]}));
  golden.slots = answers.Take<int16_t>(entries);
  golden.misses = answers.Take<int32_t>(size_t{1} * golden.steps * golden.rows);
  EXPECT_TRUE(answers.AtEnd());
  return golden;
}

// Unique entries in range, which is all that a recording holds: hits keep their slots and go to the recent end in their
// old order, and so do the misses before them.
Golden MakeGolden(int32_t top_k, int32_t hot_rows) {
  Golden golden{.name = "made here",
                .steps = 60,
                .rows = 3,
                .top_k = top_k,
                .hot_rows = hot_rows,
                .context = 6 * hot_rows,
                .positions = {},
                .slots = {},
                .misses = {}};
  std::mt19937_64 rng(7);
  struct Model {
    std::vector<int32_t> chosen;
    std::deque<int16_t> order;
    std::map<int32_t, int16_t> slot_of;
    std::map<int16_t, int32_t> key_in;
  };
  std::vector<Model> models(golden.rows);
  for (Model& model : models) {
    for (int32_t s = 0; s < hot_rows; ++s) model.order.push_back(static_cast<int16_t>(s));
  }
  for (int32_t step = 0; step < golden.steps; ++step) {
    for (Model& model : models) {
      std::set<int32_t> chosen(model.chosen.begin(), model.chosen.end());
      for (int32_t i = 0; i < top_k / 8 && !chosen.empty(); ++i) {
        chosen.erase(model.chosen[rng() % model.chosen.size()]);
      }
      while (std::ssize(chosen) < top_k) chosen.insert(static_cast<int32_t>(rng() % (golden.context - 1)));
      model.chosen.assign(chosen.begin(), chosen.end());
      std::shuffle(model.chosen.begin(), model.chosen.end(), rng);
      std::deque<int16_t> stale;
      std::vector<int16_t> hits;
      for (const int16_t slot : model.order) {
        const auto held = model.key_in.find(slot);
        if (held != model.key_in.end() && chosen.count(held->second) != 0) {
          hits.push_back(slot);
        } else {
          stale.push_back(slot);
        }
      }
      std::vector<int16_t> loaded;
      for (const int32_t position : model.chosen) {
        if (model.slot_of.count(position) == 0) {
          const int16_t victim = stale.front();
          stale.pop_front();
          if (model.key_in.count(victim) != 0) model.slot_of.erase(model.key_in[victim]);
          model.key_in[victim] = position;
          model.slot_of[position] = victim;
          loaded.push_back(victim);
        }
        golden.slots.push_back(model.slot_of[position]);
      }
      golden.misses.push_back(static_cast<int32_t>(loaded.size()));
      golden.positions.insert(golden.positions.end(), model.chosen.begin(), model.chosen.end());
      model.order = stale;
      model.order.insert(model.order.end(), loaded.begin(), loaded.end());
      model.order.insert(model.order.end(), hits.begin(), hits.end());
    }
  }
  return golden;
}

std::vector<Golden> Goldens() {
  if (const char* shared = std::getenv("STOKER_SHARED"); shared != nullptr) {
    const std::string folder = std::string(shared) + "/golden";
    return {ReadGolden(folder, "64_128"), ReadGolden(folder, "512_1024")};
  }
  return {MakeGolden(64, 128), MakeGolden(512, 1024)};
}

void Replay(const Golden& golden, IndexSpace index_space, Bench* bench) {
  SCOPED_TRACE(golden.name);
  ResolveShape shape;
  shape.index_space = index_space;
  shape.state_rows = golden.rows;
  shape.rows = golden.rows;
  shape.top_k = golden.top_k;
  shape.hot_rows = golden.hot_rows;
  shape.positions = golden.context;
  shape.block_rows = 64;
  shape.blocks = golden.rows * (golden.context / 64 + 1);
  ResolveCase c(shape);
  for (int32_t step = 0; step < golden.steps; ++step) {
    for (int32_t r = 0; r < golden.rows; ++r) {
      const auto first = golden.positions.begin() + (int64_t{step} * golden.rows + r) * golden.top_k;
      c.SetEntries(r, std::vector<int32_t>(first, first + golden.top_k));
    }
    if (bench != nullptr) {
      ASSERT_TRUE(c.Step(*bench));
    } else {
      c.StepOracle();
    }
    for (int32_t r = 0; r < golden.rows; ++r) {
      const int64_t row = int64_t{step} * golden.rows + r;
      const std::vector<int32_t> hot_rows = c.hot_rows(r);
      for (int32_t i = 0; i < golden.top_k; ++i) {
        ASSERT_EQ(hot_rows[i] - r * (golden.hot_rows + shape.newest_capacity), golden.slots[row * golden.top_k + i])
            << "step " << step << " row " << r << " entry " << i;
      }
      ASSERT_EQ(c.misses(r).size(), golden.misses[row]) << "step " << step << " row " << r;
    }
  }
}

TEST_P(GoldenTest, Kernels) {
  for (const Golden& golden : Goldens()) {
    Replay(golden, IndexSpace::kPosition, &bench());
    Replay(golden, IndexSpace::kPoolRow, &bench());
  }
}

TEST(GoldenOracleTest, Oracle) {
  for (const Golden& golden : Goldens()) {
    Replay(golden, IndexSpace::kPosition, nullptr);
    Replay(golden, IndexSpace::kPoolRow, nullptr);
  }
}

}  // namespace
}  // namespace stoker::kernels
