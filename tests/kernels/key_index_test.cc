// KeyIndex against a map, one index for arrays of every size: what an earlier one left in it must not be found.
#include "kernels/cpu/key_index.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace stoker::kernels::cpu {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

// Key i of a family. A family's keys are in a row, or share all of their low 16 bits, or a bit of both.
int32_t Key(int family, uint32_t i) {
  switch (family) {
    case 0:
      return static_cast<int32_t>(i);
    case 1:
      return static_cast<int32_t>(i % 32768 << 16 | 0xffff);
    case 2:
      return static_cast<int32_t>((i % 16 << 16) + i / 16);
    default:
      return kMax - static_cast<int32_t>(i);
  }
}

TEST(KeyIndexTest, FindsTheLowestPlaceOfEveryKey) {
  std::mt19937_64 rng(41);
  const auto index = std::make_unique<KeyIndex>();
  for (int round = 0; round < 400; ++round) {
    constexpr int32_t kCounts[] = {0, 1, 2, 63, 64, 65, 4096, KeyIndex::kMaxKeys};
    const int32_t count = kCounts[rng() % (round % 20 == 0 ? 8 : 6)];
    const int family = static_cast<int>(rng() % 4);
    const uint32_t range = static_cast<uint32_t>(std::max(count, 1)) * (rng() % 2 == 0 ? 4 : 1);
    std::vector<int32_t> keys(count);
    std::map<int32_t, int32_t> places;
    for (int32_t i = 0; i < count; ++i) {
      keys[i] = rng() % 8 == 0 ? -1 - static_cast<int32_t>(rng() % 3) : Key(family, rng() % range);
      if (keys[i] >= 0) places.emplace(keys[i], i);
    }
    index->Build(count, count, [&](int32_t i) { return keys[i]; });
    const auto check = [&](int32_t key) {
      const auto place = places.find(key);
      ASSERT_EQ(index->Find(key), place == places.end() ? -1 : place->second) << "key " << key << " round " << round;
    };
    for (uint32_t i = 0; i < range; ++i) ASSERT_NO_FATAL_FAILURE(check(Key(family, i)));
    for (const int32_t key : {0, 1, 0xffff, 0x10000, kMax}) ASSERT_NO_FATAL_FAILURE(check(key));

    // Victims in turn, each with a key that is nowhere. Its old key is not looked for any more.
    std::map<int32_t, int32_t> replaced;
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_EQ(index->KeyAt(i), keys[i]);
      const int32_t key = Key(family, range + rng() % range);
      if (places.count(key) != 0 || replaced.count(key) != 0) continue;
      ASSERT_EQ(index->Find(key), -1) << "round " << round;
      index->Replace(i, key);
      replaced[key] = i;
    }
    for (const auto& [key, place] : replaced) ASSERT_EQ(index->Find(key), place) << "round " << round;
  }
}

}  // namespace
}  // namespace stoker::kernels::cpu
