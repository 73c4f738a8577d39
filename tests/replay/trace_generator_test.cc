#include "client/replay/trace_generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

namespace stoker::replay {
namespace {

constexpr TraceShape kShape{.requests = 400, .input_rows = 3000, .output_rows = 60, .interval_ms = 300, .seed = 7};

TEST(TraceGeneratorTest, SameSeedSameRequests) {
  EXPECT_EQ(GenerateTrace(kShape), GenerateTrace(kShape));
  TraceShape other = kShape;
  other.seed = 8;
  EXPECT_NE(GenerateTrace(kShape), GenerateTrace(other));
}

TEST(TraceGeneratorTest, LinesAreValidAndReadBack) {
  for (const Request& request : GenerateTrace(kShape)) {
    auto parsed = ParseRequest(FormatRequest(request), "generated");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    parsed->number = request.number;
    EXPECT_EQ(*parsed, request);
  }
}

TEST(TraceGeneratorTest, AnIdStandsForItsBlockAndAllBeforeIt) {
  struct Meaning {
    size_t index;
    uint64_t before;
    uint32_t rows;
    bool operator==(const Meaning&) const = default;
  };
  std::map<uint64_t, Meaning> meanings;
  for (const Request& request : GenerateTrace(kShape)) {
    for (size_t i = 0; i < request.hash_ids.size(); ++i) {
      const Meaning meaning{i, i == 0 ? kMaxHashId : request.hash_ids[i - 1],
                            std::min(request.input_rows, static_cast<uint32_t>(i + 1) * kPrefixBlockRows)};
      const auto [it, added] = meanings.emplace(request.hash_ids[i], meaning);
      EXPECT_TRUE(it->second == meaning) << "id " << request.hash_ids[i];
    }
  }
}

TEST(TraceGeneratorTest, HasTheShapeThatWasAskedFor) {
  const std::vector<Request> requests = GenerateTrace(kShape);
  ASSERT_EQ(requests.size(), kShape.requests);
  std::set<uint64_t> seen;
  uint64_t blocks = 0, shared = 0, input_rows = 0, output_rows = 0, last_ms = 0;
  for (const Request& request : requests) {
    input_rows += request.input_rows;
    output_rows += request.output_rows;
    EXPECT_GE(request.timestamp_ms, last_ms);
    last_ms = request.timestamp_ms;
    for (const uint64_t id : request.hash_ids) {
      ++blocks;
      shared += seen.insert(id).second ? 0 : 1;
    }
  }
  EXPECT_NEAR(static_cast<double>(input_rows) / kShape.requests, kShape.input_rows, 0.35 * kShape.input_rows);
  EXPECT_NEAR(static_cast<double>(output_rows) / kShape.requests, kShape.output_rows, 0.1 * kShape.output_rows);
  EXPECT_NEAR(static_cast<double>(last_ms) / kShape.requests, kShape.interval_ms, 0.1 * kShape.interval_ms);
  const double ratio = static_cast<double>(shared) / static_cast<double>(blocks);
  EXPECT_GT(ratio, 0.25);
  EXPECT_LT(ratio, 0.7);
}

TEST(TraceGeneratorTest, SmallestShape) {
  const auto requests = GenerateTrace({.requests = 50, .input_rows = 4, .output_rows = 4, .interval_ms = 0, .seed = 1});
  ASSERT_EQ(requests.size(), 50u);
  for (const Request& request : requests) {
    EXPECT_GE(request.input_rows, 1u);
    EXPECT_GE(request.output_rows, 1u);
    EXPECT_EQ(request.hash_ids.size(), request.prefix_blocks());
  }
}

// client/replay/README.md has the command that wrote the file.
TEST(TraceGeneratorTest, TheBundledTraceIsWhatTheGeneratorMakes) {
  const auto bundled = ReadTrace(BUNDLED_TRACE_PATH, 0);
  ASSERT_TRUE(bundled.ok()) << bundled.status();
  EXPECT_EQ(*bundled,
            GenerateTrace({.requests = 300, .input_rows = 3000, .output_rows = 120, .interval_ms = 200, .seed = 1}));
}

}  // namespace
}  // namespace stoker::replay
