#include "client/replay/row_oracle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "client/replay/trace.h"

namespace stoker::replay {
namespace {

// Every shape of a row that the layouts have, and edge sizes: one word, half a word more, sizes not a multiple of 8.
const RowShape kShapes[] = {{{4, 0}},   {{8, 0}},    {{12, 0}},    {{16, 0}},       {{20, 0}},
                            {{656, 0}}, {{1152, 0}}, {{576, 8}},   {{512, 128}},    {{1028, 12}},
                            {{4, 4}},   {{8, 4}},    {{65536, 0}}, {{65536, 65536}}};

std::vector<std::byte> RowBytes(const RowOracle& oracle, uint32_t layer, TokenIdentity token) {
  // Poisoned, so that a byte that is not written shows up as a difference.
  std::vector<std::byte> bytes(oracle.shape().bytes() + 8, std::byte{0xa5});
  oracle.Fill(RowOracle::Key(layer, token), bytes.data());
  for (size_t i = oracle.shape().bytes(); i < bytes.size(); ++i) {
    EXPECT_EQ(bytes[i], std::byte{0xa5}) << "written beyond the row, byte " << i;
  }
  bytes.resize(oracle.shape().bytes());
  return bytes;
}

TEST(RowOracleTest, BytesFollowFromLayerAndToken) {
  for (const RowShape& shape : kShapes) {
    const RowOracle a(shape), b(shape);
    EXPECT_EQ(RowBytes(a, 3, TokenIdentity::Shared(17, 5)), RowBytes(b, 3, TokenIdentity::Shared(17, 5)));
    EXPECT_NE(RowBytes(a, 3, TokenIdentity::Shared(17, 5)), RowBytes(a, 2, TokenIdentity::Shared(17, 5)));
    EXPECT_NE(RowBytes(a, 3, TokenIdentity::Shared(17, 5)), RowBytes(a, 3, TokenIdentity::Shared(17, 6)));
    EXPECT_NE(RowBytes(a, 3, TokenIdentity::Shared(17, 5)), RowBytes(a, 3, TokenIdentity::Private(17, 5)));
  }
}

TEST(RowOracleTest, EveryByteIsChecked) {
  for (const RowShape& shape : kShapes) {
    if (shape.bytes() > 2048) continue;
    const RowOracle oracle(shape);
    const uint64_t key = RowOracle::Key(1, TokenIdentity::Private(8, 9));
    std::vector<std::byte> bytes = RowBytes(oracle, 1, TokenIdentity::Private(8, 9));
    EXPECT_TRUE(oracle.Check(key, bytes.data()));
    for (std::byte& byte : bytes) {
      for (int bit = 0; bit < 8; ++bit) {
        byte ^= std::byte{1} << bit;
        EXPECT_FALSE(oracle.Check(key, bytes.data())) << "byte " << &byte - bytes.data() << " bit " << bit;
        byte ^= std::byte{1} << bit;
      }
    }
    EXPECT_TRUE(oracle.Check(key, bytes.data()));
  }
}

TEST(RowOracleTest, PartsAreTheRow) {
  for (const RowShape& shape : kShapes) {
    const RowOracle oracle(shape);
    const uint64_t key = RowOracle::Key(0, TokenIdentity::Shared(0, 0));
    const std::vector<std::byte> row = RowBytes(oracle, 0, TokenIdentity::Shared(0, 0));
    EXPECT_TRUE(oracle.CheckPart(key, 0, row.data()));
    if (shape.parts() == 2) {
      EXPECT_TRUE(oracle.CheckPart(key, 1, row.data() + shape.part_bytes[0]));
    }
  }
}

TEST(RowOracleTest, FirstWordsAreDistinct) {
  const RowOracle oracle(RowShape{{8, 0}});
  std::set<uint64_t> words;
  size_t rows = 0;
  const auto add = [&](uint32_t layer, TokenIdentity token) {
    uint64_t word;
    oracle.Fill(RowOracle::Key(layer, token), reinterpret_cast<std::byte*>(&word));
    words.insert(word);
    ++rows;
  };
  for (const uint32_t layer : {0u, 1u, kMaxLayers - 1}) {
    for (const uint64_t hash_id : {uint64_t{0}, uint64_t{1}, uint64_t{182789}, kMaxHashId}) {
      for (uint32_t offset = 0; offset < kPrefixBlockRows; ++offset) add(layer, TokenIdentity::Shared(hash_id, offset));
    }
    for (const uint32_t request : {0u, 1u, 12030u, kMaxRequestNumber}) {
      for (uint32_t i = 0; i < 512; ++i) {
        add(layer, TokenIdentity::Private(request, i));
        add(layer, TokenIdentity::Private(request, kMaxPosition - i));
      }
    }
  }
  EXPECT_EQ(words.size(), rows);
}

TEST(RowOracleTest, FourByteRowsHardlyEverCollide) {
  const RowOracle oracle(RowShape{{4, 0}});
  std::set<uint32_t> words;
  constexpr uint32_t kRows = 100000;
  for (uint32_t i = 0; i < kRows; ++i) {
    // Room for a word of 8 bytes, which GCC 12 takes a row for under AddressSanitizer (-Warray-bounds).
    uint32_t row[2];
    oracle.Fill(RowOracle::Key(0, TokenIdentity::Private(0, i)), reinterpret_cast<std::byte*>(row));
    words.insert(row[0]);
  }
  // 1.2 collisions are expected.
  EXPECT_GE(words.size(), kRows - 12);
}

TEST(RowOracleTest, RunsOfARequestAreItsRows) {
  Request request;
  request.number = 4;
  request.input_rows = 1300;
  request.output_rows = 700;
  for (const size_t hashes : {0u, 2u, 3u}) {
    request.hash_ids.assign({7, 1, 12});
    request.hash_ids.resize(hashes);
    const RowOracle oracle(RowShape{{12, 4}});
    for (const uint32_t first : {0u, 1u, 511u, 512u, 1023u, 1024u, 1299u, 1300u, 1999u}) {
      const uint32_t count = request.total_rows() - first;
      std::vector<std::byte> rows(count * oracle.shape().bytes());
      EXPECT_EQ(FillRequestRows(oracle, request, 2, first, count, rows.data()), rows.data() + rows.size());
      for (uint32_t i = 0; i < count; ++i) {
        ASSERT_TRUE(oracle.Check(RowOracle::Key(2, request.Token(first + i)), rows.data() + i * oracle.shape().bytes()))
            << "hashes " << hashes << " first " << first << " row " << i;
      }
    }
  }
}

TEST(RowOracleTest, PrefixSharedTokensAreEqualOthersDiffer) {
  Request a, b;
  a.number = 0;
  b.number = 1;
  a.input_rows = b.input_rows = 1500;
  a.output_rows = b.output_rows = 10;
  a.hash_ids = {5, 6, 7};
  b.hash_ids = {5, 6, 8};
  for (uint32_t p = 0; p < a.total_rows(); ++p) {
    EXPECT_EQ(a.Token(p).value == b.Token(p).value, p < 1024) << p;
  }
  // Without a hash the block at the end belongs to its request alone.
  a.hash_ids = b.hash_ids = {5, 6};
  for (uint32_t p = 0; p < a.total_rows(); ++p) {
    EXPECT_EQ(a.Token(p).value == b.Token(p).value, p < 1024) << p;
  }
}

TEST(BlockHashTest, SixteenBytesForEachId) {
  std::set<std::string> hashes;
  std::string all;
  for (uint64_t id = 0; id < 5000; ++id) {
    std::string one;
    AppendBlockHash(id, &one);
    ASSERT_EQ(one.size(), 16u);
    EXPECT_TRUE(hashes.insert(one).second) << id;
    AppendBlockHash(id, &all);
    EXPECT_TRUE(all.ends_with(one));
  }
  EXPECT_EQ(all.size(), 5000u * 16);
}

}  // namespace
}  // namespace stoker::replay
