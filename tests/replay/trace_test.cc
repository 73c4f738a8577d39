#include "client/replay/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;
using ::testing::TempDir;

constexpr char kGood[] = R"({"timestamp": 7, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 2366]})";

TEST(TraceTest, ReadsALine) {
  const auto request = ParseRequest(kGood, "t:1");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->timestamp_ms, 7u);
  EXPECT_EQ(request->input_rows, 1030u);
  EXPECT_EQ(request->output_rows, 52u);
  EXPECT_EQ(request->hash_ids, (std::vector<uint64_t>{46, 47, 2366}));
  EXPECT_EQ(request->prefix_blocks(), 3u);
  EXPECT_EQ(request->total_rows(), 1082u);
}

TEST(TraceTest, HashesOfWholeBlocksOnly) {
  EXPECT_TRUE(ParseRequest(R"({"timestamp":0,"input_length":1030,"output_length":0,"hash_ids":[1,2]})", "t:1").ok());
  EXPECT_TRUE(ParseRequest(R"({"timestamp":0,"input_length":1024,"output_length":0,"hash_ids":[1,2]})", "t:1").ok());
  EXPECT_TRUE(ParseRequest(R"({"timestamp":0,"input_length":3,"output_length":1,"hash_ids":[]})", "t:1").ok());
}

TEST(TraceTest, ErrorsNamePlaceFieldAndValue) {
  const struct {
    const char* line;
    const char* message;
  } cases[] = {
      {"nonsense", "t:9: not a JSON object"},
      {"[1, 2]", "t:9: not a JSON object"},
      {R"({"timestamp": 0, "input_length": 1)", "t:9: not a JSON object"},
      {R"({"input_length": 1, "output_length": 1, "hash_ids": []})", "t:9: timestamp is missing"},
      {R"({"timestamp": 0, "output_length": 1, "hash_ids": []})", "t:9: input_length is missing"},
      {R"({"timestamp": 0, "input_length": 1, "hash_ids": []})", "t:9: output_length is missing"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1})", "t:9: hash_ids is missing"},
      {R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []})",
       "t:9: timestamp is -1; it must be an integer from 0 to"},
      {R"({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []})",
       "t:9: input_length is 0; it must be an integer from 1 to 16777216"},
      {R"({"timestamp": 0, "input_length": 2.5, "output_length": 1, "hash_ids": []})",
       "t:9: input_length is 2.5; it must be an integer"},
      {R"({"timestamp": 0, "input_length": "12", "output_length": 1, "hash_ids": []})",
       "t:9: input_length is \"12\"; it must be an integer"},
      {R"({"timestamp": 0, "input_length": 16777000, "output_length": 217, "hash_ids": []})",
       "t:9: output_length is 217; it must be an integer from 0 to 216"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": 4})",
       "t:9: hash_ids is 4; it must be a list"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": []})",
       "t:9: hash_ids has 0 ids; input_length 513 has 1 whole blocks of 512 tokens and 2 in all"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1,2,3]})", "t:9: hash_ids has 3 ids"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1,-2]})",
       "t:9: hash_ids[1] is -2; it must be an integer from 0 to 17592186044415"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1,null]})",
       "t:9: hash_ids[1] is null"},
      {R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1,1e300]})", "t:9: hash_ids[1] is"},
  };
  for (const auto& c : cases) {
    const auto request = ParseRequest(c.line, "t:9");
    EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument) << c.line;
    EXPECT_THAT(std::string(request.status().message()), HasSubstr(c.message));
  }
}

class TraceFileTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const std::string path = TempDir() + "/trace.jsonl";
    std::ofstream(path, std::ios::trunc) << text;
    return path;
  }
};

TEST_F(TraceFileTest, NumbersRequestsAndSkipsEmptyLines) {
  const std::string path = Write(std::string(kGood) + "\n\n" + kGood + "\r\n" + kGood);
  const auto requests = ReadTrace(path, 0);
  ASSERT_TRUE(requests.ok()) << requests.status();
  ASSERT_EQ(requests->size(), 3u);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ((*requests)[i].number, i);
  EXPECT_EQ(ReadTrace(path, 2)->size(), 2u);
  EXPECT_EQ(ReadTrace(path, 100)->size(), 3u);
}

TEST_F(TraceFileTest, Errors) {
  EXPECT_EQ(ReadTrace(TempDir() + "/absent", 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadTrace(Write("\n\n"), 0).status().message()), HasSubstr("holds no requests"));
  EXPECT_THAT(std::string(ReadTrace(Write(std::string(kGood) + "\n\n{}\n"), 0).status().message()),
              HasSubstr("trace.jsonl:3: timestamp is missing"));
  const char kEarlier[] = R"({"timestamp": 6, "input_length": 3, "output_length": 1, "hash_ids": []})";
  EXPECT_THAT(std::string(ReadTrace(Write(std::string(kGood) + "\n" + kEarlier + "\n"), 0).status().message()),
              HasSubstr("trace.jsonl:2: timestamp is 6; it must not be below the line before's 7"));
  // Lines behind the last request asked for are not looked at.
  EXPECT_TRUE(ReadTrace(Write(std::string(kGood) + "\nnonsense\n"), 1).ok());
}

TEST_F(TraceFileTest, RoundTrip) {
  Request a = *ParseRequest(kGood, "t:1");
  Request b = a;
  b.number = 1;
  b.timestamp_ms = kMaxTimestampMs;
  b.hash_ids[2] = kMaxHashId;
  const std::string path = TempDir() + "/written.jsonl";
  ASSERT_TRUE(WriteTrace({a, b}, path).ok());
  const auto read = ReadTrace(path, 0);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, (std::vector<Request>{a, b}));
  EXPECT_EQ(WriteTrace({a}, TempDir() + "/absent/written.jsonl").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace stoker::replay
