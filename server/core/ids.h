// Strong types for the numbers that core hands out. None of them converts to another.
//
// Ids that a client holds carry a generation, so that an id is never given out twice in one boot of the daemon: a stale
// id is recognised, never confused with the present owner of the same place.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace stoker::core {

// A block of a pool and how often its place was allocated before.
struct BlockRef {
  int32_t index = -1;
  uint32_t generation = 0;

  friend bool operator==(const BlockRef&, const BlockRef&) = default;
};

// A sequence of a pool: generation (never 0) in the upper half, place in the lower. 0 is no sequence.
struct SequenceId {
  uint64_t value = 0;

  static SequenceId Make(uint32_t generation, uint32_t index) { return {uint64_t{generation} << 32 | index}; }
  uint32_t index() const { return static_cast<uint32_t>(value); }
  uint32_t generation() const { return static_cast<uint32_t>(value >> 32); }
  explicit operator bool() const { return value != 0; }
  friend bool operator==(const SequenceId&, const SequenceId&) = default;
  friend auto operator<=>(const SequenceId&, const SequenceId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, SequenceId id) {
    return H::combine(std::move(h), id.value);
  }
};

// A session. Ids rise and are never reused. 0 is no session.
struct SessionId {
  uint64_t value = 0;

  explicit operator bool() const { return value != 0; }
  friend bool operator==(const SessionId&, const SessionId&) = default;
  friend auto operator<=>(const SessionId&, const SessionId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, SessionId id) {
    return H::combine(std::move(h), id.value);
  }
};

// A registered tensor: the session's id in the upper half, which of its tensors in the lower. Never reused. 0 is none.
struct TensorId {
  uint64_t value = 0;

  static TensorId Make(SessionId session, uint32_t number) { return {session.value << 32 | number}; }
  uint32_t session() const { return static_cast<uint32_t>(value >> 32); }
  uint32_t number() const { return static_cast<uint32_t>(value); }
  friend bool operator==(const TensorId&, const TensorId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, TensorId id) {
    return H::combine(std::move(h), id.value);
  }
};

// Content hash of a prefix, made by the engine: it stands for the prefix block's rows and everything before them.
struct PrefixHash {
  static constexpr int kBytes = 16;

  static PrefixHash FromBytes(const char* bytes) {
    PrefixHash hash;
    std::memcpy(hash.words.data(), bytes, kBytes);
    return hash;
  }
  // By words: the defaulted one calls memcmp, which an admission of 2,048 hashes notices.
  friend bool operator==(const PrefixHash& a, const PrefixHash& b) {
    return ((a.words[0] ^ b.words[0]) | (a.words[1] ^ b.words[1])) == 0;
  }
  template <typename H>
  friend H AbslHashValue(H h, const PrefixHash& hash) {
    return H::combine(std::move(h), hash.words[0], hash.words[1]);
  }

  std::array<uint64_t, 2> words{};
};

}  // namespace stoker::core
