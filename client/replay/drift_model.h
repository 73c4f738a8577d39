// A cheap workload: a set of positions that drifts. Each step the last token enters and about one entry in sixteen is
// replaced: by one that was dropped lately, by a recent token, by a neighbour of a selected one, or by any token. So
// there are hits, returns and a long tail, as in real top-k traces, but no published figure is claimed for it.
//
// Cost: O(top_k) a step, one bit of memory for each token.
#pragma once

#include <cstdint>
#include <vector>

#include "client/replay/random.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {

class DriftModel : public WorkloadModel {
 public:
  DriftModel(uint32_t top_k, uint32_t max_tokens, uint64_t seed);

  void Select(uint32_t tokens, absl::Span<int32_t> entries) override;

 private:
  bool Selected(uint32_t position) const { return (bits_[position / 64] >> (position % 64) & 1) != 0; }
  void Flip(uint32_t position) { bits_[position / 64] ^= uint64_t{1} << (position % 64); }
  // The first position from `wanted` on, cyclically, that is not selected. There must be one in [0, tokens).
  uint32_t FreeFrom(uint32_t wanted, uint32_t tokens) const;
  // A position that would plausibly come next.
  uint32_t Candidate(uint32_t tokens);
  void Replace(uint32_t place, uint32_t wanted, uint32_t tokens);

  const uint32_t top_k_;
  Random random_;
  std::vector<int32_t> selected_;  // distinct, at most top_k, in no order
  std::vector<uint64_t> bits_;     // bit p: position p is in selected_
  std::vector<uint32_t> dropped_;  // the positions that were replaced last, a ring
  uint64_t drops_ = 0;
};

}  // namespace stoker::replay
