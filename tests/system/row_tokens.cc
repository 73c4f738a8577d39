#include "tests/system/row_tokens.h"

#include <algorithm>
#include <cstring>

namespace stoker::system_test {
namespace {

// splitmix64's finalizer.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void AppendRow(uint32_t bytes, uint32_t layer, uint64_t token, std::string* rows) {
  uint64_t state = Mix(token * 4099 + layer);
  for (uint32_t done = 0; done < bytes; done += 8) {
    state = Mix(state);
    rows->append(reinterpret_cast<const char*>(&state), std::min<uint32_t>(8, bytes - done));
  }
}

}  // namespace

Tokens MakeTokens(uint64_t seed, size_t count) {
  Tokens tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = Mix(seed * 1000003 + i);
  return tokens;
}

uint32_t RowBytes(const v1::PoolSpec& pool) { return pool.row_bytes() + pool.v_row_bytes(); }

std::string RowOf(const v1::PoolSpec& pool, uint32_t layer, uint64_t token) {
  std::string row;
  AppendRow(RowBytes(pool), layer, token, &row);
  return row;
}

std::string RowsOf(const v1::PoolSpec& pool, absl::Span<const uint64_t> tokens) {
  std::string rows;
  rows.reserve(tokens.size() * pool.layers() * RowBytes(pool));
  for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
    for (uint64_t token : tokens) AppendRow(RowBytes(pool), layer, token, &rows);
  }
  return rows;
}

std::string NewestRowOf(const v1::PoolSpec& pool, uint64_t token) { return RowsOf(pool, {token}); }

std::string HashesOf(const v1::PoolSpec& pool, absl::Span<const uint64_t> prompt, bool partial) {
  const size_t block_rows = pool.block_rows() == 0 ? 64 : pool.block_rows();
  const size_t prefix_rows = pool.prefix_rows() == 0 ? block_rows : pool.prefix_rows();
  std::string hashes;
  uint64_t chain = 1;
  for (size_t begin = 0; begin < prompt.size(); begin += prefix_rows) {
    const size_t end = std::min(begin + prefix_rows, prompt.size());
    if (end - begin < prefix_rows && !partial) break;
    for (size_t i = begin; i < end; ++i) chain = Mix(chain ^ prompt[i]);
    const uint64_t words[2] = {chain, Mix(chain + end)};
    hashes.append(reinterpret_cast<const char*>(words), sizeof words);
  }
  return hashes;
}

}  // namespace stoker::system_test
