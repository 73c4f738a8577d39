#include "client/replay/row_words.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "client/replay/row_oracle.h"
#include "client/replay/trace.h"

namespace stoker::replay {
namespace {

// The definition as row_words.h words it, once more, with nothing of its code.
namespace definition {

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

uint64_t Token(const Request& request, uint32_t position) {
  const size_t block = position / 512;
  if (position < request.input_rows && block < request.hash_ids.size()) {
    return request.hash_ids[block] * 512 + position % 512;
  }
  return (uint64_t{1} << 53) + (uint64_t{request.number} << 24) + position;
}

// The bytes of one part, one at a time.
std::vector<uint8_t> Part(uint32_t layer, uint64_t token, int part, uint32_t bytes) {
  constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
  const uint64_t stream = Mix(((uint64_t{layer} << 54) + token) * kGamma) ^ (part == 0 ? 0 : 0xd1b54a32d192ed03u);
  std::vector<uint8_t> out;
  for (uint32_t at = 0; at < bytes; ++at) {
    uint64_t word = stream + uint64_t{at / 8} * kGamma;
    word ^= word >> 32;
    word *= 0xd6e8feb86659fd93u;
    word ^= word >> 32;
    out.push_back(static_cast<uint8_t>(word >> (at % 8 * 8)));
  }
  return out;
}

}  // namespace definition

Request Example() {
  Request request;
  request.number = 12030;
  request.input_rows = 1300;
  request.output_rows = 20;
  request.hash_ids = {7, kMaxHashId, 182789};
  return request;
}

// What a kernel does: 4 bytes at a time, by key, stream and half word.
TEST(RowWordsTest, HalfWordsAreTheDefinition) {
  const Request request = Example();
  const RequestTokens tokens = request.tokens();
  for (const RowShape& shape : {RowShape{{4, 0}}, RowShape{{12, 0}}, RowShape{{656, 0}}, RowShape{{128, 68}},
                                RowShape{{576, 8}}, RowShape{{1028, 4}}}) {
    const RowOracle oracle(shape);
    for (const uint32_t layer : {0u, 1u, 60u, kMaxLayers - 1}) {
      for (const uint32_t position : {0u, 1u, 511u, 512u, 1023u, 1024u, 1299u, 1300u, 1319u}) {
        const uint64_t token = definition::Token(request, position);
        ASSERT_EQ(tokens[position], token);
        ASSERT_EQ(request.Token(position).value, token);
        std::vector<std::byte> row(shape.bytes());
        oracle.Fill(RowOracle::Key(layer, request.Token(position)), row.data());
        size_t at = 0;
        for (int part = 0; part < shape.parts(); ++part) {
          const std::vector<uint8_t> expected = definition::Part(layer, token, part, shape.part_bytes[part]);
          std::vector<uint32_t> words(expected.size() / 4);
          for (uint32_t i = 0; i < words.size(); ++i) {
            words[i] = RowHalfWord(RowStream(RowKey(layer, token), part), i);
          }
          ASSERT_EQ(std::memcmp(words.data(), expected.data(), expected.size()), 0) << layer << " " << position;
          ASSERT_EQ(std::memcmp(row.data() + at, expected.data(), expected.size()), 0) << layer << " " << position;
          at += expected.size();
        }
      }
    }
  }
}

TEST(RowWordsTest, WhatAStepMayAnswer) {
  const HotRegion region{1000, 64, 128};
  constexpr uint32_t kLength = 500;
  const struct {
    int32_t position, hot_row;
    bool possible;
  } cases[] = {
      {-1, -1, true},        {-1, 1000, false},        {-1, 0, false},          {-2, -1, true},     {0, 1000, true},
      {0, 999, false},       {0, 1063, true},          {0, 1064, false},        {0, 1128, false},   {0, -1, false},
      {499, 1128, true},     {499, 1000, false},       {499, -1, false},        {499, 1129, false}, {498, 1128, false},
      {498, 1063, true},     {0, INT32_MIN, false},    {499, INT32_MIN, false}, {500, -1, true},    {500, 1000, false},
      {INT32_MAX, -1, true}, {INT32_MAX, 1128, false},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(region.CanAnswer(c.position, kLength, 0, c.hot_row), c.possible) << c.position << " " << c.hot_row;
  }
  // The third of three rows of the sequence: the newest ones of the other two are there as well.
  const struct {
    int32_t position, hot_row;
    bool possible;
  } third[] = {
      {499, 1130, true},  {499, 1128, false}, {498, 1129, true}, {498, 1063, false}, {497, 1128, true}, {500, -1, true},
      {500, 1131, false}, {497, 1000, false}, {496, 1063, true}, {496, 1127, false}, {-1, -1, true},
  };
  for (const auto& c : third) {
    EXPECT_EQ(region.CanAnswer(c.position, kLength, 2, c.hot_row), c.possible) << c.position << " " << c.hot_row;
  }
  for (const int32_t position : {-1, 0, 499}) {
    EXPECT_TRUE(region.CanAnswer(position, 0, 0, -1)) << position;
    EXPECT_FALSE(region.CanAnswer(position, 0, 0, 1000)) << position;
  }
}

}  // namespace
}  // namespace stoker::replay
