// The words of rows: the arithmetic of row_oracle.h, alone, so that kernels compile the same lines as the host.
//
// A row of `layer` and token t has the key Mix64((layer << 54 | t) * golden gamma). Part p of it is the stream key ^
// salt of p, of which the 64-bit word i lies, little-endian, at byte 8 i; a part of 8 n + 4 bytes ends with the lower
// half of word n.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>

// Before a function: the host and, where nvcc compiles it, kernels can call it.
#ifdef __CUDACC__
#define STOKER_HOST_DEVICE __host__ __device__
#else
#define STOKER_HOST_DEVICE
#endif

namespace stoker::replay {

// Tokens of one content hash: the unit in which traces name prefixes.
inline constexpr uint32_t kPrefixBlockRows = 512;

inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

// A bijection of 64-bit words in which every input bit reaches every output bit (the finalizer of SplitMix64).
STOKER_HOST_DEVICE constexpr uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// TokenIdentity::value of a token of the block that `hash_id` names, and of one that only its request has.
STOKER_HOST_DEVICE constexpr uint64_t SharedToken(uint64_t hash_id, uint32_t offset) {
  return hash_id * kPrefixBlockRows + offset;
}
STOKER_HOST_DEVICE constexpr uint64_t PrivateToken(uint32_t request, uint32_t position) {
  return (uint64_t{1} << 53) | uint64_t{request} << 24 | position;
}

// Says which tokens a request consists of. A view: the ids belong to others.
struct RequestTokens {
  // Whether a hash id names the block of this input position.
  STOKER_HOST_DEVICE constexpr bool HasHash(uint32_t position) const {
    return position < input_rows && position / kPrefixBlockRows < hash_count;
  }
  STOKER_HOST_DEVICE constexpr uint64_t operator[](uint32_t position) const {
    return HasHash(position) ? SharedToken(hash_ids[position / kPrefixBlockRows], position % kPrefixBlockRows)
                             : PrivateToken(request, position);
  }

  const uint64_t* hash_ids = nullptr;
  uint32_t hash_count = 0;
  uint32_t input_rows = 0;
  uint32_t request = 0;
};

STOKER_HOST_DEVICE constexpr uint64_t RowKey(uint32_t layer, uint64_t token) {
  return Mix64((uint64_t{layer} << 54 | token) * kGoldenGamma);
}

STOKER_HOST_DEVICE constexpr uint64_t RowStream(uint64_t key, int part) {
  return part == 0 ? key : key ^ 0xd1b54a32d192ed03;
}

// Word i of a stream. One multiplication is enough behind a mixed key, and makes long rows fast: 8 bytes take two
// cycles without vector instructions, less where the compiler has a 64-bit vector multiplication.
STOKER_HOST_DEVICE constexpr uint64_t RowWord(uint64_t stream, uint64_t i) {
  uint64_t x = stream + i * kGoldenGamma;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

// The 4 bytes at byte 4 i of a stream: rows need no more alignment than that.
STOKER_HOST_DEVICE constexpr uint32_t RowHalfWord(uint64_t stream, uint32_t i) {
  return static_cast<uint32_t>(RowWord(stream, i / 2) >> (i % 2 * 32));
}

// A sequence's part of the hot cache, and what a step may answer with: an entry that is no position below the length,
// and every one of a padding row, gets -1, a newest row of the step its place behind the region's newest row, any other
// one a row of the sequence's own hot buffer.
struct HotRegion {
  // Of a batch row with so many rows of its sequence before it in the step (speculative decoding). Length 0 is padding.
  STOKER_HOST_DEVICE constexpr bool CanAnswer(int32_t position, uint32_t length, uint32_t newest_index,
                                              int32_t hot_row) const {
    if (position < 0 || position >= static_cast<int64_t>(length)) return hot_row == -1;
    const int64_t slot = hot_row - begin;
    const int64_t newest = position - (static_cast<int64_t>(length) - 1 - newest_index);
    if (newest >= 0) return slot == newest_row + newest;
    return slot >= 0 && slot < hot_rows;
  }

  int64_t begin = 0;  // first hot row
  uint32_t hot_rows = 0;
  uint32_t newest_row = 0;
};

}  // namespace stoker::replay
