// What rows hold in these tests: a row's bytes follow from its layer and its token alone, so any row that is handed out
// can be checked without keeping a copy.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "stoker/v1/pools.pb.h"

namespace stoker::system_test {

using Tokens = std::vector<uint64_t>;

// `count` tokens; equal seeds give equal tokens, different seeds none in common.
Tokens MakeTokens(uint64_t seed, size_t count);

uint32_t RowBytes(const v1::PoolSpec& pool);  // of one layer, all parts

// Row of one layer.
std::string RowOf(const v1::PoolSpec& pool, uint32_t layer, uint64_t token);
// [layer][row][bytes] of all layers, as Store and Load have them.
std::string RowsOf(const v1::PoolSpec& pool, absl::Span<const uint64_t> tokens);
// [layer][bytes], as StepRow.newest_row has it.
std::string NewestRowOf(const v1::PoolSpec& pool, uint64_t token);

// AdmitItem.block_hashes of a prompt; with `partial` also one for the incomplete prefix block at the end.
std::string HashesOf(const v1::PoolSpec& pool, absl::Span<const uint64_t> prompt, bool partial = true);

}  // namespace stoker::system_test
