#include "client/replay/extreme_models.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace stoker::replay {

void FreshModel::Select(uint32_t tokens, absl::Span<int32_t> entries) {
  // New tokens come anywhere among those that are still to be selected in this round.
  while (tokens_.size() < tokens) {
    const size_t place = next_ + random_.Below(static_cast<uint32_t>(tokens_.size() - next_ + 1));
    tokens_.push_back(static_cast<int32_t>(tokens_.size()));
    std::swap(tokens_[place], tokens_.back());
  }
  const size_t selected = std::min<size_t>(tokens, entries.size());
  for (size_t i = 0; i < selected; ++i) {
    entries[i] = tokens_[next_];
    next_ = (next_ + 1) % tokens_.size();
  }
  Shuffle(random_, entries.first(selected));
  std::fill(entries.begin() + selected, entries.end(), -1);
}

void ResidentModel::Select(uint32_t tokens, absl::Span<int32_t> entries) {
  const uint32_t size = 2 * top_k_;
  if (tokens < size) {
    const size_t selected = std::min<size_t>(tokens, entries.size());
    std::iota(entries.begin(), entries.begin() + selected, 0);
    Shuffle(random_, entries.first(selected));
    std::fill(entries.begin() + selected, entries.end(), -1);
    return;
  }
  if (set_.empty()) {
    // Of every `size`-th part of the tokens a random one.
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t begin = static_cast<uint32_t>(uint64_t{i} * tokens / size);
      const uint32_t end = static_cast<uint32_t>(uint64_t{i + 1} * tokens / size);
      set_.push_back(static_cast<int32_t>(begin + random_.Below(end - begin)));
    }
  }
  for (uint32_t i = 0; i < top_k_; ++i) {
    std::swap(set_[i], set_[i + random_.Below(size - i)]);
    entries[i] = set_[i];
  }
}

}  // namespace stoker::replay
