// Random calls against a Pool and its model (see pool_model.h).
//
// STOKER_MODEL_OPERATIONS: calls in all (default 1,000,000). STOKER_MODEL_SEED: the seed (default 1).
#include "tests/core/pool_model.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace stoker::core {
namespace {

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

class PoolModelTest : public testing::TestWithParam<ModelShape> {};

TEST_P(PoolModelTest, RandomCalls) {
  const int64_t all = FromEnvironment("STOKER_MODEL_OPERATIONS", 1000000);
  const int64_t seed = FromEnvironment("STOKER_MODEL_SEED", 1);
  // Each of the shapes has its share, in several runs so that the final checks are made often.
  const int64_t share = all / 5;
  const int64_t runs = std::max<int64_t>(1, share / 100000);
  int64_t operations = 0;
  const auto begin = std::chrono::steady_clock::now();
  PoolCounters total;
  for (int64_t run = 0; run < runs; ++run) {
    SCOPED_TRACE("STOKER_MODEL_SEED=" + std::to_string(seed) + " run " + std::to_string(run));
    ModelRun model(GetParam(), Mix(static_cast<uint64_t>(seed), static_cast<uint64_t>(run)));
    for (int64_t i = 0; i < share / runs; ++i) {
      model.Operate();
      if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "at operation " << i;
    }
    model.Finish();
    if (HasFatalFailure()) return;
    operations += model.operations();
    total.prefix_hit_rows += model.counters().prefix_hit_rows;
    total.evicted_blocks += model.counters().evicted_blocks;
    total.copied_blocks += model.counters().copied_blocks;
    total.rejected_admissions += model.counters().rejected_admissions;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  std::printf(
      "%s, seed %lld: %lld operations, %.0f a second; %llu prefix rows matched, %llu blocks evicted, %llu copied "
      "on write, %llu admissions rejected\n",
      GetParam().name, static_cast<long long>(seed), static_cast<long long>(operations),
      static_cast<double>(operations) / elapsed.count(), static_cast<unsigned long long>(total.prefix_hit_rows),
      static_cast<unsigned long long>(total.evicted_blocks), static_cast<unsigned long long>(total.copied_blocks),
      static_cast<unsigned long long>(total.rejected_admissions));
  EXPECT_GT(total.prefix_hit_rows, 0u);
  EXPECT_GT(total.copied_blocks, 0u);
}

INSTANTIATE_TEST_SUITE_P(Shapes, PoolModelTest,
                         testing::Values(ModelShape{"roomy", 2000, 16, 16, 300, 100000},
                                         ModelShape{"one_block_prefixes", 130, 16, 16, 300, 100},
                                         ModelShape{"four_block_prefixes", 130, 16, 64, 300, 100},
                                         ModelShape{"tight", 24, 16, 32, 200, 1000},
                                         ModelShape{"wide_blocks", 60, 64, 128, 700, 30}),
                         [](const testing::TestParamInfo<ModelShape>& shape) { return std::string(shape.param.name); });

}  // namespace
}  // namespace stoker::core
