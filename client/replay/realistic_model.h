// The realistic workload: a model of an indexer's top-k whose LRU miss rates are those published for GLM-5.1.
//
//   score(token) = static N(0, 1)
//                + AR(1) with 0.87 a step and stationary deviation 0.6
//                + AR(1) with 0.98 a step and stationary deviation 0.5
//                + white noise of deviation 0.19
//
// Each step selects the top_k highest of the tokens before the newest. At top_k / tokens = 1/32, over 140 steps behind
// 20 that fill it, an LRU of 1x / 2x / 4x top_k rows misses 29.0 / 13.4 / 6.8 % of them (published: 30.0 / 13.4 / 6.7,
// arXiv 2608.07009). Single sequences of 16,384 tokens lie within 0.5 / 0.4 / 0.2 points of that, shorter ones farther
// away.
//
// ScoreNoise scales what changes, for other miss rates: see the table in tests/bench/README.md.
//
// Cost: three normal numbers a token and step, and a partial sort.
#pragma once

#include <cstdint>
#include <vector>

#include "client/replay/normal.h"
#include "client/replay/random.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {

class RealisticModel : public WorkloadModel {
 public:
  RealisticModel(uint32_t max_tokens, uint64_t seed, const ScoreNoise& noise = {});

  void Select(uint32_t tokens, absl::Span<int32_t> entries) override;

 private:
  struct TokenScore {
    float fixed;
    float fast;
    float slow;
  };

  Random random_;
  const ScoreNoise noise_;
  const Normal& normal_;
  std::vector<TokenScore> parts_;
  std::vector<float> scores_;
  std::vector<float> order_;
};

}  // namespace stoker::replay
