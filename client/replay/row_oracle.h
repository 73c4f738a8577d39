// What the bytes of every row must be.
//
// The bytes of a row follow from its layer and the identity of its token, and from nothing else. So the engine that
// stores a row, the one that reads it and the one that never wrote it agree, and nothing has to be remembered.
//
// Invariants:
//  1. Two different (layer, token) pairs have different keys: the pair is packed into 64 bits without loss, and the mix
//  is
//     a bijection.
//  2. Rows of 8 bytes and more of different (layer, token) pairs differ in their first 8 bytes, for the same reason;
//     4-byte rows are equal with a probability of 2^-32.
//  3. Every part of a row is a stream of its own, so that a layout with two parts can be filled part by part.
//
// The arithmetic is in row_words.h, which kernels share.
//
// Thread safety: immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "client/replay/row_words.h"

namespace stoker::replay {

inline constexpr uint64_t kMaxHashId = (uint64_t{1} << 44) - 1;
inline constexpr uint32_t kMaxRequestNumber = (uint32_t{1} << 28) - 1;
inline constexpr uint32_t kMaxPosition = (uint32_t{1} << 24) - 1;
inline constexpr uint32_t kMaxLayers = 1024;

// Says which token it is, over all requests. Consecutive tokens of one block, or of one request's private part, have
// consecutive values.
struct TokenIdentity {
  // A token of the block that `hash_id` names: equal in all requests that have the block.
  static constexpr TokenIdentity Shared(uint64_t hash_id, uint32_t offset) { return {SharedToken(hash_id, offset)}; }
  // A token that only this request has.
  static constexpr TokenIdentity Private(uint32_t request, uint32_t position) {
    return {PrivateToken(request, position)};
  }

  uint64_t value = 0;  // below 2^54
};
static_assert(kMaxHashId * kPrefixBlockRows + (kPrefixBlockRows - 1) < uint64_t{1} << 53);
static_assert(uint64_t{kMaxLayers - 1} << 54 >> 54 == kMaxLayers - 1);

// The one or two parts of which a row consists, in the order in which messages carry them.
struct RowShape {
  uint32_t bytes() const { return part_bytes[0] + part_bytes[1]; }
  int parts() const { return part_bytes[1] == 0 ? 1 : 2; }

  uint32_t part_bytes[2] = {0, 0};  // multiples of 4
};

class RowOracle {
 public:
  explicit RowOracle(RowShape shape) : shape_(shape) {}

  const RowShape& shape() const { return shape_; }

  // The key of a row: everything else follows from it.
  static uint64_t Key(uint32_t layer, TokenIdentity token) { return RowKey(layer, token.value); }

  // Writes one part of a row.
  void FillPart(uint64_t key, int part, std::byte* out) const {
    FillStream(RowStream(key, part), shape_.part_bytes[part], out);
  }
  // Whether `bytes` are that part of the row.
  bool CheckPart(uint64_t key, int part, const std::byte* bytes) const {
    return CheckStream(RowStream(key, part), shape_.part_bytes[part], bytes);
  }

  // Writes and compares whole rows as messages carry them: the parts one after the other.
  void Fill(uint64_t key, std::byte* out) const {
    FillPart(key, 0, out);
    if (shape_.part_bytes[1] != 0) FillPart(key, 1, out + shape_.part_bytes[0]);
  }
  bool Check(uint64_t key, const std::byte* bytes) const {
    return CheckPart(key, 0, bytes) && (shape_.part_bytes[1] == 0 || CheckPart(key, 1, bytes + shape_.part_bytes[0]));
  }

  // Writes `count` rows of consecutive identities, one after the other. Returns where the next one would begin.
  std::byte* FillRun(uint32_t layer, TokenIdentity first, uint32_t count, std::byte* out) const {
    const uint32_t row_bytes = shape_.bytes();
    for (uint32_t i = 0; i < count; ++i, out += row_bytes) Fill(Key(layer, {first.value + i}), out);
    return out;
  }

 private:
  static void FillStream(uint64_t stream, uint32_t bytes, std::byte* out) {
    const uint32_t words = bytes / 8;
    for (uint32_t i = 0; i < words; ++i) {
      const uint64_t word = RowWord(stream, i);
      std::memcpy(out + i * size_t{8}, &word, 8);
    }
    if (bytes % 8 != 0) {
      const uint64_t word = RowWord(stream, words);
      std::memcpy(out + words * size_t{8}, &word, 4);
    }
  }

  static bool CheckStream(uint64_t stream, uint32_t bytes, const std::byte* in) {
    const uint32_t words = bytes / 8;
    uint64_t difference = 0;
    for (uint32_t i = 0; i < words; ++i) {
      uint64_t word;
      std::memcpy(&word, in + i * size_t{8}, 8);
      difference |= word ^ RowWord(stream, i);
    }
    if (bytes % 8 != 0) {
      uint32_t half;
      std::memcpy(&half, in + words * size_t{8}, 4);
      difference |= half ^ static_cast<uint32_t>(RowWord(stream, words));
    }
    return difference == 0;
  }

  RowShape shape_;
};

}  // namespace stoker::replay
