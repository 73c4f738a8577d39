// The two ends of what a cache can meet.
//
// FreshModel: no token is selected again before all others were. Nothing is ever hot where hot_rows is less than
// tokens - top_k. ResidentModel: each step selects a random half of 2 x top_k tokens. Everything is hot where hot_rows
// has room for these, and the order of the slots changes as much as it can.
//
// Cost: O(top_k) a step; FreshModel has four bytes of memory for each token.
#pragma once

#include <cstdint>
#include <vector>

#include "client/replay/random.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {

class FreshModel : public WorkloadModel {
 public:
  explicit FreshModel(uint64_t seed) : random_(seed) {}

  void Select(uint32_t tokens, absl::Span<int32_t> entries) override;

 private:
  Random random_;
  std::vector<int32_t> tokens_;  // all of them, in the order in which they are selected
  size_t next_ = 0;
};

class ResidentModel : public WorkloadModel {
 public:
  ResidentModel(uint32_t top_k, uint64_t seed) : top_k_(top_k), random_(seed) {}

  void Select(uint32_t tokens, absl::Span<int32_t> entries) override;

 private:
  const uint32_t top_k_;
  Random random_;
  std::vector<int32_t> set_;  // spread over the tokens of the first step that has enough
};

}  // namespace stoker::replay
