#include "client/replay/workload_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;
using ::testing::TempDir;

Workload Small() {
  Workload w;
  w.steps = 3;
  w.rows = 2;
  w.top_k = 4;
  w.context = 6;
  w.hot_rows = 5;
  w.row_bytes = 16;
  for (uint32_t i = 0; i < w.steps * w.rows; ++i) {
    for (uint32_t j = 0; j < w.top_k; ++j) w.positions.push_back(static_cast<int32_t>((i + j) % (w.context - 1)));
  }
  return w;
}

std::string Slurp(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string Spit(const std::string& bytes) {
  const std::string path = TempDir() + "/workload";
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path;
}

TEST(WorkloadFileTest, RoundTrip) {
  const Workload w = Small();
  const std::string path = TempDir() + "/round_trip";
  ASSERT_TRUE(WriteWorkload(w, path).ok());
  const std::string bytes = Slurp(path);
  ASSERT_EQ(bytes.size(), 4u + 8 * 4 + 24 * 4);
  EXPECT_EQ(bytes.substr(0, 8), std::string("STKW\x01\0\0\0", 8));
  const auto read = ReadWorkload(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->positions, w.positions);
  EXPECT_EQ(read->steps, w.steps);
  EXPECT_EQ(read->rows, w.rows);
  EXPECT_EQ(read->top_k, w.top_k);
  EXPECT_EQ(read->context, w.context);
  EXPECT_EQ(read->hot_rows, w.hot_rows);
  EXPECT_EQ(read->row_bytes, w.row_bytes);
  EXPECT_EQ(read->Entries(2, 1)[0], w.positions[20]);
}

TEST(WorkloadFileTest, DumpRoundTrip) {
  SlotDump dump{.steps = 2, .rows = 1, .top_k = 3, .hot_rows = 4, .slots = {0, 1, 2, 3, -1, 2}, .misses = {3, 1}};
  const std::string path = TempDir() + "/dump";
  ASSERT_TRUE(WriteSlotDump(dump, path).ok());
  const std::string bytes = Slurp(path);
  ASSERT_EQ(bytes.size(), 4u + 5 * 4 + 6 * 2 + 2 * 4);
  EXPECT_EQ(bytes.substr(0, 8), std::string("STKG\x01\0\0\0", 8));
  const auto read = ReadSlotDump(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->slots, dump.slots);
  EXPECT_EQ(read->misses, dump.misses);
  EXPECT_EQ(read->top_k, 3u);
  EXPECT_EQ(read->hot_rows, 4u);
}

TEST(WorkloadFileTest, RefusesFilesThatAreNone) {
  const std::string path = TempDir() + "/good";
  ASSERT_TRUE(WriteWorkload(Small(), path).ok());
  const std::string good = Slurp(path);

  EXPECT_EQ(ReadWorkload(TempDir() + "/absent").status().code(), absl::StatusCode::kNotFound);
  for (const size_t size : {size_t{0}, size_t{3}, size_t{4}, size_t{35}, size_t{36}, good.size() - 1}) {
    EXPECT_THAT(std::string(ReadWorkload(Spit(good.substr(0, size))).status().message()), HasSubstr("truncated"))
        << size;
  }
  EXPECT_THAT(std::string(ReadWorkload(Spit(good + "x")).status().message()), HasSubstr("1 bytes after the end"));
  EXPECT_THAT(std::string(ReadWorkload(Spit("STKG" + good.substr(4))).status().message()), HasSubstr("not a STKW"));
  std::string version = good;
  version[4] = 2;
  EXPECT_THAT(std::string(ReadWorkload(Spit(version)).status().message()), HasSubstr("not a STKW file of version 1"));
  std::string reserved = good;
  reserved[32] = 1;
  EXPECT_THAT(std::string(ReadWorkload(Spit(reserved)).status().message()), HasSubstr("reserved is 1"));
  // A header that asks for far more than the file holds must not allocate it.
  std::string huge = good;
  huge.replace(8, 4, std::string("\x40\x42\x0f\0", 4));
  EXPECT_THAT(std::string(ReadWorkload(Spit(huge)).status().message()), HasSubstr("truncated"));
}

TEST(WorkloadFileTest, RefusesValuesOutOfRange) {
  const struct {
    void (*spoil)(Workload&);
    const char* message;
  } cases[] = {
      {[](Workload& w) { w.steps = 0; }, "steps is 0"},
      {[](Workload& w) { w.rows = 5000; }, "rows is 5000; it must be 1 to 4096"},
      {[](Workload& w) { w.top_k = 8193; }, "top_k is 8193; it must be 1 to 8192"},
      {[](Workload& w) { w.context = 4; }, "context is 4; it must be 5 to 16777216"},
      {[](Workload& w) { w.hot_rows = 3; }, "hot_rows is 3; it must be 4 to 32768"},
      {[](Workload& w) { w.row_bytes = 18; }, "row_bytes is 18; it must be a multiple of 4"},
      {[](Workload& w) { w.steps = 1000000, w.rows = 4096; },
       "steps x rows x top_k is 16384000000; it must be at most 268435456"},
      {[](Workload& w) { w.positions.pop_back(); }, "positions has 23 entries; the header says 24"},
      {[](Workload& w) { w.positions[9] = 5; }, "positions[1][0][1] is 5; it must be 0 to 4"},
      {[](Workload& w) { w.positions[9] = -1; }, "positions[1][0][1] is -1; it must be 0 to 4"},
      {[](Workload& w) { w.positions[23] = w.positions[20]; }, "positions[2][1][3] is 0; it stands twice in its row"},
  };
  for (const auto& c : cases) {
    Workload w = Small();
    c.spoil(w);
    const absl::Status status = ValidateWorkload(w);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    EXPECT_EQ(WriteWorkload(w, TempDir() + "/bad"), status);
  }
}

}  // namespace
}  // namespace stoker::replay
