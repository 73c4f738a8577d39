#include "client/replay/workload_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "client/replay/normal.h"
#include "tests/replay/lru_simulator.h"

namespace stoker::replay {
namespace {

TEST(NormalTest, MomentsAndTails) {
  const Normal normal;
  Random random(1);
  constexpr int kDraws = 4'000'000;
  double sum[5] = {};
  int beyond[5] = {};  // |z| > 1, 2, 3, 3.6541 (the tail), 4
  const double limits[5] = {1, 2, 3, 3.6541528853610088, 4};
  for (int i = 0; i < kDraws; ++i) {
    const double z = normal(random);
    double power = 1;
    for (double& s : sum) {
      s += power;
      power *= z;
    }
    for (int j = 0; j < 5; ++j) beyond[j] += std::abs(z) > limits[j] ? 1 : 0;
  }
  // Four deviations of each estimate.
  const double root = std::sqrt(double{kDraws});
  EXPECT_NEAR(sum[1] / kDraws, 0, 4 / root);
  EXPECT_NEAR(sum[2] / kDraws, 1, 4 * std::sqrt(2.0) / root);
  EXPECT_NEAR(sum[3] / kDraws, 0, 4 * std::sqrt(15.0) / root);
  EXPECT_NEAR(sum[4] / kDraws, 3, 4 * std::sqrt(96.0) / root);
  for (int j = 0; j < 5; ++j) {
    const double p = std::erfc(limits[j] / std::sqrt(2.0));
    EXPECT_NEAR(beyond[j], p * kDraws, 4 * std::sqrt(p * kDraws)) << "beyond " << limits[j];
  }
}

TEST(WorkloadModelTest, Names) {
  EXPECT_EQ(*ParseModelKind("realistic"), ModelKind::kRealistic);
  EXPECT_EQ(*ParseModelKind("drift"), ModelKind::kDrift);
  EXPECT_EQ(*ParseModelKind("fresh"), ModelKind::kFresh);
  EXPECT_EQ(*ParseModelKind("resident"), ModelKind::kResident);
  EXPECT_THAT(std::string(ParseModelKind("x").status().message()),
              ::testing::HasSubstr("\"x\" is not a workload model; it must be realistic, drift, fresh or resident"));
}

class EachModelTest : public ::testing::TestWithParam<ModelKind> {};
INSTANTIATE_TEST_SUITE_P(Models, EachModelTest,
                         ::testing::Values(ModelKind::kRealistic, ModelKind::kDrift, ModelKind::kFresh,
                                           ModelKind::kResident),
                         [](const auto& parameter) { return std::string(ModelName(parameter.param)); });

TEST_P(EachModelTest, EntriesAreDistinctAndInRangeWhileASequenceGrows) {
  for (const uint32_t top_k : {1u, 2u, 31u, 64u}) {
    for (const uint32_t first : {0u, 1u, top_k - 1, top_k, top_k + 1, 1000u}) {
      const auto model = MakeWorkloadModel(GetParam(), top_k, first + 3 * top_k, 5);
      std::vector<int32_t> entries(top_k);
      for (uint32_t tokens = first; tokens < first + 3 * top_k; ++tokens) {
        std::fill(entries.begin(), entries.end(), -77);
        model->Select(tokens, absl::MakeSpan(entries));
        const uint32_t selected = std::min(tokens, top_k);
        const std::set<int32_t> distinct(entries.begin(), entries.begin() + selected);
        ASSERT_EQ(distinct.size(), selected) << "top_k " << top_k << " tokens " << tokens;
        if (selected > 0) {
          EXPECT_GE(*distinct.begin(), 0);
          EXPECT_LT(*distinct.rbegin(), static_cast<int32_t>(tokens));
        }
        for (uint32_t i = selected; i < top_k; ++i) EXPECT_EQ(entries[i], -1);
      }
    }
  }
}

TEST_P(EachModelTest, SameSeedSameEntries) {
  const auto a = MakeWorkloadModel(GetParam(), 16, 400, 5);
  const auto b = MakeWorkloadModel(GetParam(), 16, 400, 5);
  const auto c = MakeWorkloadModel(GetParam(), 16, 400, 6);
  std::vector<int32_t> x(16), y(16), z(16);
  bool differs = false;
  for (uint32_t tokens = 300; tokens < 400; ++tokens) {
    a->Select(tokens, absl::MakeSpan(x));
    b->Select(tokens, absl::MakeSpan(y));
    c->Select(tokens, absl::MakeSpan(z));
    EXPECT_EQ(x, y);
    differs |= x != z;
  }
  EXPECT_TRUE(differs);
}

TEST_P(EachModelTest, OrderIsNotByPosition) {
  const auto model = MakeWorkloadModel(GetParam(), 256, 4096, 5);
  std::vector<int32_t> entries(256);
  int ascents = 0, pairs = 0;
  for (int step = 0; step < 20; ++step) {
    model->Select(4096, absl::MakeSpan(entries));
    for (size_t i = 1; i < entries.size(); ++i, ++pairs) ascents += entries[i] > entries[i - 1] ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(ascents) / pairs, 0.5, 0.1);
}

// Miss rates in percent of an LRU of 1x, 2x and 4x top_k rows over 140 steps, behind 20 steps that fill it. (From cold,
// the first misses of every row would add 0.5, 0.9 and 1.5 points.)
std::vector<double> MissRates(ModelKind kind, uint32_t tokens, uint32_t top_k, uint32_t sequences, uint64_t seed,
                              const ScoreNoise& noise = {}) {
  constexpr uint32_t kFillSteps = 20, kSteps = 140;
  uint64_t misses[3] = {};
  for (uint32_t s = 0; s < sequences; ++s) {
    const auto model = MakeWorkloadModel(kind, top_k, tokens, seed + s, noise);
    LruSimulator lru[3] = {{top_k, tokens}, {2 * top_k, tokens}, {4 * top_k, tokens}};
    std::vector<int32_t> entries(top_k);
    for (uint32_t step = 0; step < kFillSteps + kSteps; ++step) {
      model->Select(tokens, absl::MakeSpan(entries));
      for (int i = 0; i < 3; ++i) {
        const uint32_t missed = lru[i].Step(entries);
        if (step >= kFillSteps) misses[i] += missed;
      }
    }
  }
  std::vector<double> rates;
  for (const uint64_t m : misses) {
    rates.push_back(100.0 * static_cast<double>(m) / (double{kSteps} * top_k * sequences));
  }
  return rates;
}

// Sequences differ by half a point at this size, so it takes many of them: the standard error is then 0.05 points.
TEST(RealisticModelTest, MissRatesAreThePublishedOnes) {
  const auto rates = MissRates(ModelKind::kRealistic, 16384, 512, 128, 42);
  std::printf("context 16384, top_k 512: %.2f / %.2f / %.2f %%\n", rates[0], rates[1], rates[2]);
  // Published for GLM-5.1.
  EXPECT_NEAR(rates[0], 30.0, 1.0);
  EXPECT_NEAR(rates[1], 13.4, 1.0);
  EXPECT_NEAR(rates[2], 6.7, 1.0);
  // What the model's definition was measured to give; a wrong constant shows up here.
  EXPECT_NEAR(rates[0], 29.1, 0.3);
  EXPECT_NEAR(rates[1], 13.3, 0.3);
  EXPECT_NEAR(rates[2], 6.9, 0.3);
}

TEST(RealisticModelTest, MissRatesHoldForOtherSizesOfTheSameRatio) {
  for (const uint32_t top_k : {128u, 2048u}) {
    const auto rates = MissRates(ModelKind::kRealistic, 32 * top_k, top_k, top_k == 128 ? 64 : 4, 42);
    std::printf("context %u, top_k %u: %.2f / %.2f / %.2f %%\n", 32 * top_k, top_k, rates[0], rates[1], rates[2]);
    EXPECT_NEAR(rates[0], 29.1, 0.6);
    EXPECT_NEAR(rates[1], 13.3, 0.6);
    EXPECT_NEAR(rates[2], 6.9, 0.6);
  }
}

TEST(RealisticModelTest, NoiseSetsTheMissRate) {
  const auto rate = [](float drift, float white) {
    return MissRates(ModelKind::kRealistic, 16384, 512, 4, 42, {drift, white})[1];
  };
  EXPECT_EQ(rate(0, 0), 0);
  EXPECT_NEAR(rate(0.1F, 1), 2, 0.5);
  EXPECT_NEAR(rate(0.65F, 0.65F), 7, 1);
  EXPECT_NEAR(rate(1, 2.9F), 30, 1.5);
}

TEST(FreshModelTest, NothingIsEverHot) {
  for (const double rate : MissRates(ModelKind::kFresh, 16384, 512, 2, 42)) EXPECT_EQ(rate, 100);
}

TEST(ResidentModelTest, EverythingFitsIntoTwiceTopK) {
  const auto rates = MissRates(ModelKind::kResident, 16384, 512, 2, 42);
  EXPECT_GT(rates[0], 30);
  EXPECT_EQ(rates[1], 0);
  EXPECT_EQ(rates[2], 0);
}

TEST(DriftModelTest, HitsReturnsAndMisses) {
  const auto rates = MissRates(ModelKind::kDrift, 16384, 512, 2, 42);
  std::printf("drift: %.1f %.1f %.1f %%\n", rates[0], rates[1], rates[2]);
  EXPECT_GT(rates[0], rates[1] + 0.5);
  EXPECT_GT(rates[1], rates[2]);
  EXPECT_GT(rates[2], 1);
  EXPECT_LT(rates[0], 10);
}

TEST(DriftModelTest, TheLastTokenIsAlwaysSelectedWhileASequenceGrows) {
  const auto model = MakeWorkloadModel(ModelKind::kDrift, 8, 500, 1);
  std::vector<int32_t> entries(8);
  for (uint32_t tokens = 1; tokens < 500; ++tokens) {
    model->Select(tokens, absl::MakeSpan(entries));
    EXPECT_THAT(entries, ::testing::Contains(static_cast<int32_t>(tokens - 1)));
  }
}

TEST(MixInNewestTest, EverySecondStepAndFirstPadding) {
  Random random(3);
  int mixed = 0;
  constexpr int kSteps = 2000;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<int32_t> entries = {4, 5, -1, -1};
    MixInNewest(random, 9, absl::MakeSpan(entries));
    if (entries[2] == 9) ++mixed;
    EXPECT_TRUE(entries == (std::vector<int32_t>{4, 5, -1, -1}) || entries == (std::vector<int32_t>{4, 5, 9, -1}));
    std::vector<int32_t> full = {4, 5, 6};
    MixInNewest(random, 9, absl::MakeSpan(full));
    EXPECT_LE(std::count(full.begin(), full.end(), 9), 1);
    EXPECT_EQ(std::set<int32_t>(full.begin(), full.end()).size(), 3u);
  }
  EXPECT_NEAR(mixed, kSteps / 2, 4 * std::sqrt(kSteps / 4));
}

}  // namespace
}  // namespace stoker::replay
