#include "client/replay/drift_model.h"

#include <algorithm>
#include <bit>

namespace stoker::replay {
namespace {

constexpr uint32_t kTurnover = 16;       // one entry in so many is replaced, on average
constexpr uint32_t kRecentTokens = 128;  // "recent"
constexpr uint32_t kNeighbourhood = 16;
constexpr uint32_t kRemembered = 4;  // dropped positions that may return, in multiples of top_k

// Shares of the ways to find a replacement, out of 16. The rest is any token.
constexpr uint32_t kReturning = 7;
constexpr uint32_t kRecent = 4;
constexpr uint32_t kNeighbour = 3;

}  // namespace

DriftModel::DriftModel(uint32_t top_k, uint32_t max_tokens, uint64_t seed)
    : top_k_(top_k), random_(seed), bits_(max_tokens / 64 + 1, 0), dropped_(size_t{kRemembered} * top_k, 0) {
  selected_.reserve(top_k);
}

uint32_t DriftModel::FreeFrom(uint32_t wanted, uint32_t tokens) const {
  uint32_t word = wanted / 64;
  uint64_t free = ~bits_[word] & (~uint64_t{0} << (wanted % 64));
  for (;;) {
    if (free != 0) {
      const uint32_t position = word * 64 + static_cast<uint32_t>(std::countr_zero(free));
      if (position < tokens) return position;
    }
    word = (word + 1) * 64 < tokens ? word + 1 : 0;
    free = ~bits_[word];
  }
}

uint32_t DriftModel::Candidate(uint32_t tokens) {
  const uint64_t word = random_.Next();
  const uint32_t way = word % 16;
  const uint32_t choice = static_cast<uint32_t>(word >> 32);
  if (way < kReturning && drops_ != 0) {
    return dropped_[choice % std::min<uint64_t>(drops_, dropped_.size())];
  }
  if (way < kReturning + kRecent) return tokens - 1 - choice % std::min(tokens, kRecentTokens);
  if (way < kReturning + kRecent + kNeighbour) {
    const uint32_t near = static_cast<uint32_t>(selected_[choice % selected_.size()]);
    return std::min(near + 1 + static_cast<uint32_t>(word >> 8) % kNeighbourhood, tokens - 1);
  }
  return random_.Below(tokens);
}

void DriftModel::Replace(uint32_t place, uint32_t wanted, uint32_t tokens) {
  const uint32_t old = static_cast<uint32_t>(selected_[place]);
  const uint32_t position = FreeFrom(wanted, tokens);
  Flip(old);
  Flip(position);
  selected_[place] = static_cast<int32_t>(position);
  dropped_[drops_++ % dropped_.size()] = old;
}

void DriftModel::Select(uint32_t tokens, absl::Span<int32_t> entries) {
  const uint32_t count = std::min(tokens, top_k_);
  const bool all = count == tokens;
  if (all || selected_.size() < count) {
    // A short sequence, or the first step of a long one: a quarter of the entries are recent, the others anywhere.
    while (selected_.size() < count) {
      const uint32_t size = static_cast<uint32_t>(selected_.size());
      const uint32_t wanted = all ? 0 : size <= count / 4 ? tokens - 1 - size : random_.Below(tokens);
      const uint32_t position = FreeFrom(wanted, tokens);
      Flip(position);
      selected_.push_back(static_cast<int32_t>(position));
    }
    Shuffle(random_, absl::MakeSpan(selected_));
  } else {
    const uint32_t turnover = count / kTurnover + (random_.Below(kTurnover) < count % kTurnover ? 1 : 0);
    for (uint32_t i = 0; i < turnover; ++i) Replace(random_.Below(count), Candidate(tokens), tokens);
    // The last token enters last, so that it stays: what was committed one step ago is read back at once.
    if (!Selected(tokens - 1)) Replace(random_.Below(count), tokens - 1, tokens);
  }
  std::copy(selected_.begin(), selected_.end(), entries.begin());
  std::fill(entries.begin() + count, entries.end(), -1);
}

}  // namespace stoker::replay
