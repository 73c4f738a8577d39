#include "client/replay/report.h"

#include <gmock/gmock.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/replay/latency_histogram.h"
#include "client/replay/progress.h"
#include "client/replay/random.h"

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

TEST(LatencyHistogramTest, PercentilesAreAtMostThreePercentHigh) {
  Random random(1);
  std::vector<uint64_t> values;
  LatencyHistogram histogram;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t value = random.Next() >> (20 + random.Below(44));
    values.push_back(value);
    histogram.Add(value);
  }
  std::sort(values.begin(), values.end());
  EXPECT_EQ(histogram.count(), values.size());
  for (const double fraction : {0.0, 0.01, 0.5, 0.9, 0.99, 1.0}) {
    const size_t rank = std::min(values.size() - 1, static_cast<size_t>(fraction * static_cast<double>(values.size())));
    const uint64_t got = histogram.PercentileNs(fraction);
    EXPECT_GE(got, values[rank]) << fraction;
    EXPECT_LE(static_cast<double>(got), static_cast<double>(values[rank]) * 1.032 + 1) << fraction;
  }
}

TEST(LatencyHistogramTest, EdgesAndMerge) {
  LatencyHistogram a, b;
  EXPECT_EQ(a.PercentileNs(0.5), 0u);
  for (const uint64_t value : {uint64_t{0}, uint64_t{31}, uint64_t{32}, uint64_t{33}}) a.Add(value);
  EXPECT_EQ(a.PercentileNs(0.0), 0u);
  EXPECT_EQ(a.PercentileNs(0.3), 31u);
  EXPECT_EQ(a.PercentileNs(0.5), 32u);
  EXPECT_EQ(a.PercentileNs(1.0), 33u);
  b.Add(~uint64_t{0});
  b.Merge(a);
  EXPECT_EQ(b.count(), 5u);
  EXPECT_GE(b.PercentileNs(1.0), (uint64_t{1} << 45) - 1);
}

TEST(FormatTest, Numbers) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(144793823), "144,793,823");
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(999), "999 B");
  EXPECT_EQ(FormatBytes(1500), "1.50 kB");
  EXPECT_EQ(FormatBytes(2.5e9), "2.50 GB");
  EXPECT_EQ(FormatBytes(1e22), "10000.00 EB");
  EXPECT_EQ(FormatNs(1400), "1 us");
  EXPECT_EQ(FormatNs(812000), "812 us");
  EXPECT_EQ(FormatNs(3460000), "3.46 ms");
  EXPECT_EQ(FormatNs(1200000000), "1.20 s");
}

std::unique_ptr<ReplayResult> Example() {
  auto result = std::make_unique<ReplayResult>();
  RankReport rank;
  rank.requests.Add(3);
  rank.input_rows.Add(1000);
  rank.output_rows.Add(50);
  rank.matched_rows.Add(512);
  rank.prefix_blocks.Add(4);
  rank.matched_blocks.Add(1);
  rank.stored_rows.Add(538);
  rank.unique_rows.Add(538);
  rank.stored_bytes.Add(488 * 16);
  rank.steps.Add(20);
  rank.step_ns.Add(20 * 12'345);
  rank.SetPlane("server");
  rank.hot.Add(900);
  rank.miss.Add(100);
  rank.newest.Add(10);
  rank.checked_rows.Add(1010);
  rank.checked_on_device.Add(1010);
  rank.checked_on_host.Add(64);
  rank.SetDevice("GPU-1");
  rank.calls[static_cast<int>(Call::kStep)].Add(150000);
  AddReport(rank, &result->totals);
  AddReport(rank, &result->totals);
  result->seconds = 2;
  result->row_bytes = 16;
  result->distinct_rows = 1076;
  result->workload_model = "drift";
  return result;
}

TEST(ReportTest, AddsUp) {
  const auto result = Example();
  EXPECT_EQ(result->totals.requests.get(), 6u);
  EXPECT_EQ(result->totals.calls[static_cast<int>(Call::kStep)].count(), 2u);
  EXPECT_DOUBLE_EQ(result->prefix_hit_ratio(), 0.25);
  EXPECT_DOUBLE_EQ(result->prefix_token_hit_ratio(), 0.512);
  EXPECT_DOUBLE_EQ(result->hot_hit_ratio(), 0.9);
  EXPECT_EQ(result->committed_bytes(), 1600u);
  EXPECT_EQ(ReplayResult().hot_hit_ratio(), 0);
}

TEST(ReportTest, Table) {
  auto result = Example();
  const std::string table = FormatTable(*result);
  EXPECT_THAT(table, HasSubstr("requests           6\n"));
  EXPECT_THAT(table, HasSubstr("tokens             2,100 (2,000 prompt, 100 output)\n"));
  EXPECT_THAT(table, HasSubstr("prefix hit ratio   0.2500 of blocks, 0.5120 of tokens\n"));
  EXPECT_THAT(table, HasSubstr("hot hit ratio      0.9000"));
  EXPECT_THAT(table, HasSubstr("steps              40 (20 a second, 12.3 us each on the plane server, rows and"));
  EXPECT_THAT(table, HasSubstr("device             GPU-1\n"));
  EXPECT_THAT(table, HasSubstr("rows checked       2,020 (2,020 on the device, 128 of them on the host)\n"));
  EXPECT_THAT(table, HasSubstr("wrong rows         0\n"));
  EXPECT_THAT(table, HasSubstr("Step                          2       152 us"));
  EXPECT_THAT(table, ::testing::Not(HasSubstr("Read")));
  EXPECT_THAT(table, ::testing::Not(HasSubstr("first wrong row")));
  result->totals.SetWrongRow("request 3");
  result->totals.SetWrongRow("request 4");
  EXPECT_THAT(FormatTable(*result), HasSubstr("first wrong row    request 3\n"));
}

TEST(ReportTest, JsonIsOneObjectOnOneLine) {
  const std::string json = FormatJson(*Example());
  EXPECT_EQ(json.find('\n'), std::string::npos);
  google::protobuf::Struct object;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(json, &object).ok()) << json;
  const auto number = [&](const char* name) {
    EXPECT_TRUE(object.fields().contains(name)) << name;
    return object.fields().at(name).number_value();
  };
  EXPECT_EQ(number("requests"), 6);
  EXPECT_EQ(number("prefix_hit_ratio"), 0.25);
  EXPECT_EQ(number("hot_hit_ratio"), 0.9);
  EXPECT_EQ(number("checked_rows"), 2020);
  EXPECT_EQ(number("checked_rows_device"), 2020);
  EXPECT_EQ(number("checked_rows_host"), 128);
  EXPECT_EQ(object.fields().at("device").string_value(), "GPU-1");
  EXPECT_EQ(object.fields().at("plane").string_value(), "server");
  EXPECT_EQ(number("step_mean_us"), 12.345);
  EXPECT_EQ(number("wrong_rows"), 0);
  EXPECT_EQ(number("stored_rows"), 1076);
  EXPECT_EQ(number("unique_rows"), 1076);
  EXPECT_EQ(number("distinct_rows"), 1076);
  EXPECT_EQ(number("seconds"), 2);
}

TEST(ReportTest, RanksOnSeveralDevices) {
  auto result = std::make_unique<ReplayResult>();
  for (const char* device : {"", "GPU-1", "GPU-1", "GPU-2", "GPU-3", "GPU-1"}) {
    RankReport rank;
    rank.SetDevice(device);
    AddReport(rank, &result->totals);
  }
  EXPECT_STREQ(result->totals.device, "GPU-1 and others");
}

TEST(ReportTest, RanksOnSeveralPlanes) {
  auto result = std::make_unique<ReplayResult>();
  for (const char* plane : {"", "rpc", "rpc", "direct", "rpc"}) {
    RankReport rank;
    rank.SetPlane(plane);
    AddReport(rank, &result->totals);
  }
  EXPECT_STREQ(result->totals.plane, "rpc and others");
  EXPECT_EQ(result->step_mean_us(), 0);
}

TEST(ReportTest, DistinctRows) {
  Request a;
  a.input_rows = 1100;
  a.output_rows = 7;
  a.hash_ids = {1, 2, 3};
  Request b = a;
  b.hash_ids = {1, 2};  // its partial block has no hash: its own
  EXPECT_EQ(DistinctRows({a}, true), 1107u);
  EXPECT_EQ(DistinctRows({a, a}, true), 1114u);
  EXPECT_EQ(DistinctRows({a, b}, true), 1107u + 76 + 7);
  EXPECT_EQ(DistinctRows({a, b}, false), 1100u + 76);
}

TEST(ProgressTest, Format) {
  ProgressFigures before, now;
  before.input_rows = 1000;
  now.done = 30;
  now.all = 120;
  now.input_rows = 5000;
  now.output_rows = 2000;
  now.moved_bytes = 3000000;
  EXPECT_EQ(
      Progress::Format(now, before, absl::Seconds(2), absl::Seconds(10), true),
      "[######..................]  25 %  30/120 requests  10.0 s  2,000 prompt, 1,000 decoded tokens/s  1.50 MB/s");
  EXPECT_EQ(Progress::Format(now, before, absl::ZeroDuration(), absl::Seconds(10), false),
            " 25 %  30/120 requests  10.0 s  0 prompt, 0 decoded tokens/s  0 B/s");
  now.done = 120;
  EXPECT_THAT(Progress::Format(now, before, absl::Seconds(2), absl::Seconds(10), true),
              ::testing::StartsWith("[########################] 100 %"));
  EXPECT_EQ(Progress::ChooseStyle("none"), Progress::Style::kNone);
  EXPECT_EQ(Progress::ChooseStyle("bar"), Progress::Style::kBar);
  EXPECT_EQ(Progress::ChooseStyle("lines"), Progress::Style::kLines);
}

}  // namespace
}  // namespace stoker::replay
