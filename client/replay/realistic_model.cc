#include "client/replay/realistic_model.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace stoker::replay {
namespace {

constexpr float kFastDecay = 0.87f, kFastDeviation = 0.6f;
constexpr float kSlowDecay = 0.98f, kSlowDeviation = 0.5f;
constexpr float kWhiteDeviation = 0.19f;

// Deviation of what a step adds, so that the stationary deviation is `deviation`.
float Innovation(float decay, float deviation) { return deviation * std::sqrt(1 - decay * decay); }

const Normal& SharedNormal() {
  static const Normal normal;
  return normal;
}

}  // namespace

RealisticModel::RealisticModel(uint32_t max_tokens, uint64_t seed, const ScoreNoise& noise)
    : random_(seed), noise_(noise), normal_(SharedNormal()) {
  parts_.reserve(max_tokens);
  scores_.reserve(max_tokens);
  order_.reserve(max_tokens);
}

void RealisticModel::Select(uint32_t tokens, absl::Span<int32_t> entries) {
  const float fast_deviation = noise_.drift * kFastDeviation;
  const float slow_deviation = noise_.drift * kSlowDeviation;
  const float white_deviation = noise_.white * kWhiteDeviation;
  const float fast_step = Innovation(kFastDecay, fast_deviation);
  const float slow_step = Innovation(kSlowDecay, slow_deviation);
  for (TokenScore& part : parts_) {
    part.fast = kFastDecay * part.fast + fast_step * normal_(random_);
    part.slow = kSlowDecay * part.slow + slow_step * normal_(random_);
  }
  while (parts_.size() < tokens) {
    const float fixed = normal_(random_);
    const float fast = fast_deviation * normal_(random_);
    parts_.push_back({fixed, fast, slow_deviation * normal_(random_)});
  }
  scores_.resize(tokens);
  for (uint32_t i = 0; i < tokens; ++i) {
    scores_[i] = parts_[i].fixed + parts_[i].fast + parts_[i].slow + white_deviation * normal_(random_);
  }

  const uint32_t selected = std::min(tokens, static_cast<uint32_t>(entries.size()));
  uint32_t count = 0;
  if (selected == tokens) {
    for (; count < selected; ++count) entries[count] = static_cast<int32_t>(count);
  } else {
    order_ = scores_;
    std::nth_element(order_.begin(), order_.begin() + (selected - 1), order_.end(), std::greater<float>());
    const float lowest = order_[selected - 1];
    // Scores above the lowest selected one first; of those equal to it, as many as there is room for.
    for (uint32_t i = 0; i < tokens; ++i) {
      if (scores_[i] > lowest) entries[count++] = static_cast<int32_t>(i);
    }
    for (uint32_t i = 0; i < tokens && count < selected; ++i) {
      if (scores_[i] == lowest) entries[count++] = static_cast<int32_t>(i);
    }
  }
  Shuffle(random_, entries.first(selected));
  std::fill(entries.begin() + selected, entries.end(), -1);
}

}  // namespace stoker::replay
