#include "server/core/pool_spec.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::core {
namespace {

PoolSpec Good() {
  PoolSpec spec;
  spec.name = "pool";
  spec.layers = 61;
  spec.row_layout = RowLayout::kLinear;
  spec.row_bytes = 656;
  spec.blocks = 1000;
  return spec;
}

PoolSpec GoodSplit() {
  PoolSpec spec = Good();
  spec.row_layout = RowLayout::kSplitKv;
  spec.row_bytes = spec.v_row_bytes = 256;
  return spec;
}

PoolSpec GoodDsv4() {
  PoolSpec spec = Good();
  spec.row_layout = RowLayout::kDsv4Paged;
  spec.row_bytes = 584;
  return spec;
}

// The message must have all of `parts`, and the spec must be as it was.
void ExpectWrong(PoolSpec spec, const std::vector<std::string>& parts) {
  const PoolSpec before = spec;
  const absl::Status status = spec.Normalize();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), testing::HasSubstr(part));
  EXPECT_EQ(spec, before);
}

template <typename T>
PoolSpec With(PoolSpec spec, T PoolSpec::*field, T value) {
  spec.*field = value;
  return spec;
}

void ExpectRange(const PoolSpec& base, int64_t PoolSpec::*field, const std::string& name, int64_t least, int64_t most,
                 int64_t step = 1) {
  SCOPED_TRACE(name);
  for (const int64_t value : {least, most}) {
    PoolSpec spec = With(base, field, value);
    EXPECT_EQ(spec.Normalize(), absl::OkStatus()) << value;
  }
  for (const int64_t value : {least - step, most + step, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    // 0 stands for the default in some fields.
    if (value == 0 && (field == &PoolSpec::block_rows || field == &PoolSpec::prefix_rows)) continue;
    ExpectWrong(With(base, field, value), {name + " is " + std::to_string(value)});
  }
}

TEST(PoolSpecTest, FillsInDefaults) {
  PoolSpec spec = Good();
  ASSERT_EQ(spec.Normalize(), absl::OkStatus());
  EXPECT_EQ(spec.block_rows, 64);
  EXPECT_EQ(spec.prefix_rows, 64);
  EXPECT_EQ(spec.rows(), 64000);
  EXPECT_EQ(spec.bytes_per_row(), 656);
  const PoolSpec once = spec;
  ASSERT_EQ(spec.Normalize(), absl::OkStatus());
  EXPECT_EQ(spec, once);
  PoolSpec wide = Good();
  wide.block_rows = 256;
  ASSERT_EQ(wide.Normalize(), absl::OkStatus());
  EXPECT_EQ(wide.prefix_rows, 256);
}

TEST(PoolSpecTest, Names) {
  for (const char* name : {"a", "glm-5_2", "z0123456789"}) {
    PoolSpec spec = With(Good(), &PoolSpec::name, std::string(name));
    EXPECT_EQ(spec.Normalize(), absl::OkStatus()) << name;
  }
  PoolSpec longest = With(Good(), &PoolSpec::name, std::string(63, 'a'));
  EXPECT_EQ(longest.Normalize(), absl::OkStatus());
  for (const std::string& name : {std::string(), std::string("0a"), std::string("-a"), std::string("_a"),
                                  std::string("A"), std::string("aB"), std::string("a b"), std::string("a/b"),
                                  std::string("a\0b", 3), std::string("\xc3\xa4"), std::string(64, 'a')}) {
    ExpectWrong(With(Good(), &PoolSpec::name, name), {"name is \"", "1 to 63 characters"});
  }
}

TEST(PoolSpecTest, Ranges) {
  ExpectRange(Good(), &PoolSpec::layers, "layers", 1, 1024);
  ExpectRange(Good(), &PoolSpec::row_bytes, "row_bytes", 4, 65536, 4);
  ExpectRange(GoodSplit(), &PoolSpec::v_row_bytes, "v_row_bytes", 4, 65536, 4);
  ExpectRange(Good(), &PoolSpec::block_rows, "block_rows", 16, 1024, 16);
  ExpectRange(Good(), &PoolSpec::prefix_rows, "prefix_rows", 64, 65536, 64);
  ExpectRange(Good(), &PoolSpec::blocks, "blocks", 1, (int64_t{1} << 31) / 64 - 1);
  for (const int64_t bytes : {5, 6, 7, 655}) {
    ExpectWrong(With(Good(), &PoolSpec::row_bytes, bytes), {"multiple of 4"});
    ExpectWrong(With(GoodSplit(), &PoolSpec::v_row_bytes, bytes), {"v_row_bytes", "multiple of 4"});
  }
  for (const int64_t rows : {17, 24, 48, 65, 1000}) {
    ExpectWrong(With(Good(), &PoolSpec::block_rows, rows), {"block_rows is ", "a power of two, 16 to 1024"});
  }
  for (const int64_t rows : {1, 63, 65, 96}) {
    ExpectWrong(With(Good(), &PoolSpec::prefix_rows, rows), {"multiple of block_rows (64)", "at most 65536"});
  }
}

TEST(PoolSpecTest, EveryPoolRowFitsInt32) {
  for (int64_t rows = 16; rows <= 1024; rows *= 2) {
    PoolSpec spec = With(Good(), &PoolSpec::block_rows, rows);
    spec.blocks = (int64_t{1} << 31) / rows - 1;
    ASSERT_EQ(spec.Normalize(), absl::OkStatus());
    EXPECT_LE(spec.rows(), INT32_MAX);
    spec.blocks += 1;
    ExpectWrong(spec, {"blocks is ", "with block_rows " + std::to_string(rows)});
  }
}

TEST(PoolSpecTest, Layouts) {
  ExpectWrong(With(Good(), &PoolSpec::row_layout, RowLayout::kUnspecified), {"row_layout is 0", "LINEAR"});
  ExpectWrong(With(Good(), &PoolSpec::row_layout, static_cast<RowLayout>(77)), {"row_layout is 77"});
  ExpectWrong(With(Good(), &PoolSpec::v_row_bytes, int64_t{4}), {"v_row_bytes is 4", "0 with row_layout LINEAR"});
  ExpectWrong(With(GoodSplit(), &PoolSpec::v_row_bytes, int64_t{0}), {"v_row_bytes is 0", "4 to 65536"});
  PoolSpec split = GoodSplit();
  EXPECT_EQ(split.Normalize(), absl::OkStatus());
  EXPECT_EQ(split.bytes_per_row(), 512);
  PoolSpec dsv4 = GoodDsv4();
  EXPECT_EQ(dsv4.Normalize(), absl::OkStatus());
  ExpectWrong(With(GoodDsv4(), &PoolSpec::row_bytes, int64_t{576}), {"row_bytes is 576", "584 with row_layout DSV4"});
  ExpectWrong(With(GoodDsv4(), &PoolSpec::v_row_bytes, int64_t{8}), {"v_row_bytes is 8", "DSV4_PAGED"});
  ExpectWrong(With(GoodDsv4(), &PoolSpec::block_rows, int64_t{128}), {"block_rows is 128", "64 with row_layout DSV4"});
}

}  // namespace
}  // namespace stoker::core
