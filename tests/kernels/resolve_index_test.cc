// Resolve with keys that meet in an index of the slots: in the low 16 bits, which are the places of short sequences, in
// the CUDA backend's two hashes (kernels/cuda/slot_index.cuh), and in both at once, so that most keys are in the list
// behind its second level.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/resolve.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/resolve_random.h"

namespace stoker::kernels {
namespace {

class ResolveIndexTest : public BackendTest {};
STOKER_FOR_EVERY_BACKEND(ResolveIndexTest);

constexpr uint32_t kFirstHash = 2654435769u;
constexpr uint32_t kSecondHash = 2246822519u;
constexpr int32_t kBlockRows = 65536;
constexpr int32_t kPoolBlocks = 32767;
// Keys below this have a pool row, in both index spaces.
constexpr uint32_t kKeyLimit = uint32_t{kPoolBlocks} * kBlockRows;

uint32_t FirstPlace(uint32_t key) { return (key * kFirstHash) >> 16; }
uint32_t SecondPlace(uint32_t key) { return (key * kSecondHash) >> 19; }

// All keys, half of 65,536, that the first hash sends to `place`.
std::vector<int32_t> KeysOfPlace(uint32_t place) {
  uint32_t inverse = 1;
  for (int i = 0; i < 5; ++i) inverse *= 2 - kFirstHash * inverse;
  std::vector<int32_t> keys;
  for (uint32_t low = 0; low < 65536; ++low) {
    const uint32_t key = (place << 16 | low) * inverse;
    EXPECT_EQ(FirstPlace(key), place);
    if (key < kKeyLimit) keys.push_back(static_cast<int32_t>(key));
  }
  return keys;
}

enum class Meeting {
  kFirst,   // all in one place of the first level; spread over the second
  kBoth,    // in one place of the first level, and by fours or more in one of the second
  kSecond,  // in few places of the second level only
};

// At least `count` different keys, the first of which meet.
std::vector<int32_t> Keys(Meeting meeting, size_t count, std::mt19937_64& rng) {
  std::vector<int32_t> keys;
  if (meeting == Meeting::kSecond) {
    while (keys.size() < count) {
      const auto key = static_cast<uint32_t>(rng()) % kKeyLimit;
      if (SecondPlace(key) < 4) keys.push_back(static_cast<int32_t>(key));
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::shuffle(keys.begin(), keys.end(), rng);
    return keys;
  }
  keys = KeysOfPlace(777);
  std::shuffle(keys.begin(), keys.end(), rng);
  if (meeting == Meeting::kBoth) {
    std::vector<int32_t> in_place(8192);
    for (const int32_t key : keys) ++in_place[SecondPlace(static_cast<uint32_t>(key))];
    std::stable_sort(keys.begin(), keys.end(), [&](int32_t a, int32_t b) {
      const uint32_t place_a = SecondPlace(static_cast<uint32_t>(a));
      const uint32_t place_b = SecondPlace(static_cast<uint32_t>(b));
      return in_place[place_a] != in_place[place_b] ? in_place[place_a] > in_place[place_b] : place_a < place_b;
    });
  }
  keys.resize(std::max(count, size_t{1}));
  return keys;
}

ResolveShape Shape(IndexSpace index_space, int32_t top_k, int32_t hot_rows, bool plain) {
  ResolveShape shape;
  shape.index_space = index_space;
  shape.top_k = top_k;
  shape.hot_rows = hot_rows;
  shape.positions = INT32_MAX;
  shape.block_rows = kBlockRows;
  shape.blocks = kPoolBlocks;
  shape.table_columns = index_space == IndexSpace::kPosition ? 32768 : 1;
  return plain ? Plain(shape) : shape;
}

// Which of `keys` the entries of a step are: `repeats` of them twice.
std::vector<int32_t> DrawEntries(const std::vector<int32_t>& keys, int32_t count, int32_t repeats,
                                 std::mt19937_64& rng) {
  std::vector<int32_t> entries = keys;
  std::shuffle(entries.begin(), entries.end(), rng);
  entries.resize(count);
  for (int32_t i = 0; i < repeats; ++i) entries[Draw(rng, 0, count - 1)] = entries[Draw(rng, 0, count - 1)];
  return entries;
}

TEST_P(ResolveIndexTest, KeysThatMeet) {
  struct Size {
    int32_t top_k;
    int32_t hot_rows;
  };
  for (const Size size : {Size{100, 300}, {512, 1024}, {2048, 4096}, {2048, 8192}}) {
    // Under a tool the scans of the list take seconds.
    if (size.top_k > 512 && Cases(1000, 1000) < 10) continue;
    for (const Meeting meeting : {Meeting::kFirst, Meeting::kBoth, Meeting::kSecond}) {
      for (const int32_t kind : {0, 1, 2}) {
        const IndexSpace index_space = kind == 2 ? IndexSpace::kPoolRow : IndexSpace::kPosition;
        SCOPED_TRACE(testing::Message() << size.top_k << " of " << size.hot_rows << ", meeting "
                                        << static_cast<int>(meeting) << ", kind " << kind);
        std::mt19937_64 rng(51);
        ResolveCase c(Shape(index_space, size.top_k, size.hot_rows, kind == 0));
        // Half again as many as there are slots, so that a step has hits and misses that meet.
        const std::vector<int32_t> keys = Keys(meeting, size.hot_rows * 3 / 2, rng);
        for (int32_t s = 0; s < size.hot_rows; ++s) c.Hold(0, s, s % 17 == 5 ? -1 : keys[s]);
        for (int32_t step = 0; step < Cases(2, 5); ++step) {
          std::vector<int32_t> entries = DrawEntries(keys, size.top_k, step % 2 == 0 ? 0 : 7, rng);
          entries.back() = INT32_MAX - 1;  // the newest position
          c.SetEntries(0, entries);
          ASSERT_TRUE(c.Step(bench())) << "step " << step;
        }
      }
    }
  }
}

// Of the slots with one key the lowest counts, on whichever level of an index they are.
TEST_P(ResolveIndexTest, KeysThatMeetAndAreInSeveralSlots) {
  for (const Meeting meeting : {Meeting::kFirst, Meeting::kBoth, Meeting::kSecond}) {
    for (const int32_t kind : {0, 1, 2}) {
      const IndexSpace index_space = kind == 2 ? IndexSpace::kPoolRow : IndexSpace::kPosition;
      SCOPED_TRACE(testing::Message() << "meeting " << static_cast<int>(meeting) << ", kind " << kind);
      std::mt19937_64 rng(52);
      ResolveCase c(Shape(index_space, 512, 1024, kind == 0));
      const std::vector<int32_t> keys = Keys(meeting, 700, rng);
      for (int32_t step = 0; step < Cases(3, 10); ++step) {
        for (int32_t s = 0; s < 1024; ++s) c.Hold(0, s, keys[Draw(rng, 0, 600)]);
        c.SetEntries(0, DrawEntries(keys, 512, 20, rng));
        ASSERT_TRUE(c.Step(bench(), /*consistent=*/false)) << "step " << step;
      }
    }
  }
}

// A key is its own place while a sequence is short. What is in the slots need not be.
TEST_P(ResolveIndexTest, ShortSequencesAndLongKeys) {
  for (const int32_t length : {30000, 32768, 32769, 65535, 65536, 65537}) {
    for (const bool plain : {true, false}) {
      for (const int32_t hot_rows : {1024, 8192}) {
        SCOPED_TRACE(testing::Message() << "length " << length << " plain " << plain << " hot_rows " << hot_rows);
        std::mt19937_64 rng(53);
        ResolveCase c(Shape(IndexSpace::kPosition, 512, hot_rows, plain));
        c.SetLength(0, length);
        for (int32_t step = 0; step < Cases(2, 4); ++step) {
          std::vector<int32_t> entries(512);
          for (int32_t& entry : entries) entry = Draw(rng, 0, 2000) * 13 % length;
          // Three keys with the low bits of each entry, one of which is the entry, or none.
          for (int32_t s = 0; s < hot_rows; ++s) {
            c.Hold(0, s, entries[s % 512] + (s / 512 % 3 == step % 3 ? 0 : 1 + s / 512) * (s % 2 == 0 ? 65536 : 32768));
          }
          c.slot_key(0)[7] = INT32_MAX;
          c.slot_key(0)[8] = 0x7fff0000 + 5;
          c.SetEntries(0, entries);
          ASSERT_TRUE(c.Step(bench(), /*consistent=*/false)) << "step " << step;
        }
      }
    }
  }
}

// Nothing follows from what lay at a place that no slot has written.
TEST_P(ResolveIndexTest, EmptyAfterFull) {
  std::mt19937_64 rng(54);
  ResolveCase c(Shape(IndexSpace::kPoolRow, 512, 1024, true));
  const std::vector<int32_t> keys = Keys(Meeting::kBoth, 1500, rng);
  for (int32_t step = 0; step < Cases(10, 50); ++step) {
    const double share = step % 5 / 4.0;
    for (int32_t s = 0; s < 1024; ++s) c.Hold(0, s, Chance(rng, share) ? keys[s] : -1);
    c.SetEntries(0, DrawEntries(keys, 512, 0, rng));
    ASSERT_TRUE(c.Step(bench())) << "step " << step;
  }
}

}  // namespace
}  // namespace stoker::kernels
