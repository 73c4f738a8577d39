#include "client/replay/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/replay/cuda/gpu_rows.h"

namespace stoker::replay {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<Options> Parse(const std::vector<const char*>& arguments) { return ParseOptions(arguments); }

TEST(OptionsTest, Defaults) {
  const auto options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->action, Options::Action::kReplay);
  EXPECT_EQ(options->row_bytes, 656u);
  EXPECT_EQ(options->hot_rows, 2 * options->top_k);
  EXPECT_EQ(options->context, 32 * options->top_k);
  EXPECT_EQ(options->model(), ModelKind::kDrift);
  EXPECT_EQ(options->plane, "auto");
  EXPECT_EQ(options->row_shape().bytes(), 656u);
}

TEST(OptionsTest, Forms) {
  const auto options = Parse({"--top-k=32", "--hot-rows", "100", "--json", "--seed", "18446744073709551615",
                              "--time-scale=0.5", "--trace", "a=b"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->top_k, 32u);
  EXPECT_EQ(options->hot_rows, 100u);
  EXPECT_TRUE(options->json);
  EXPECT_EQ(options->seed, ~uint64_t{0});
  EXPECT_EQ(options->time_scale, 0.5);
  EXPECT_EQ(options->trace, "a=b");
  EXPECT_FALSE(Parse({"--json", "--no-json"})->json);
  EXPECT_FALSE(Parse({"--json=false"})->json);
  EXPECT_EQ(Parse({"--help", "--nonsense"})->action, Options::Action::kHelp);
  EXPECT_EQ(Parse({"--version"})->action, Options::Action::kVersion);
}

TEST(OptionsTest, DefaultsThatFollow) {
  EXPECT_EQ(Parse({"--prefix-only"})->row_bytes, 4u);
  EXPECT_EQ(Parse({"--write-workload=w"})->model(), ModelKind::kRealistic);
  EXPECT_EQ(Parse({"--query-rows=3", "--top-k=100"})->hot_rows, 600u);
  EXPECT_EQ(Parse({"--query-rows=4", "--top-k=8192"})->hot_rows, 32768u);
  EXPECT_EQ(Parse({"--query-rows=3", "--padding-rows=5", "--concurrency=4"})->batch_rows(), 17u);
  const auto split = Parse({"--row-layout=split_kv", "--row-bytes=64"});
  EXPECT_EQ(split->row_shape().part_bytes[1], 64u);
  const auto paged = Parse({"--row-layout=dsv4_paged"});
  EXPECT_EQ(paged->row_bytes, 584u);
  EXPECT_EQ(paged->row_shape().part_bytes[0], 576u);
  EXPECT_EQ(paged->row_shape().part_bytes[1], 8u);
}

TEST(OptionsTest, GroupsShareTheLayersOut) {
  const auto options = Parse({"--layers=7", "--groups=3"});
  EXPECT_EQ(options->GroupBegin(0), 0u);
  EXPECT_EQ(options->GroupBegin(1), 2u);
  EXPECT_EQ(options->GroupBegin(2), 4u);
  EXPECT_EQ(options->GroupBegin(3), 7u);
}

TEST(OptionsTest, ErrorsNameOptionValueAndLimit) {
  const struct {
    std::vector<const char*> arguments;
    const char* message;
  } cases[] = {
      {{"trace"}, "\"trace\" is not an option"},
      {{"--nonsense"}, "--nonsense is not an option"},
      {{"--no-trace"}, "--no-trace is not an option"},
      {{"--trace"}, "--trace needs a value"},
      {{"--top-k=0"}, "--top-k is \"0\"; it must be an integer from 1 to 8192"},
      {{"--top-k=8193"}, "--top-k is \"8193\"; it must be an integer from 1 to 8192"},
      {{"--top-k=-1"}, "--top-k is \"-1\""},
      {{"--top-k=4x"}, "--top-k is \"4x\""},
      {{"--top-k="}, "--top-k is \"\""},
      {{"--top-k=4294967297"}, "--top-k is \"4294967297\""},
      {{"--seed=-1"}, "--seed is \"-1\"; it must be an integer from 0 to 18446744073709551615"},
      {{"--time-scale=-1"}, "--time-scale is \"-1\"; it must be a number from 0"},
      {{"--time-scale=nan"}, "--time-scale is \"nan\""},
      {{"--json=yes"}, "--json is \"yes\"; it must be true or false"},
      {{"--row-layout=paged"}, "--row-layout is \"paged\"; it must be linear, split_kv, dsv4_paged"},
      {{"--workload-model=x"}, "--workload-model is \"x\"; it must be realistic, drift"},
      {{"--hot-rows=63"}, "--hot-rows is \"63\"; it must be at least --top-k, 64"},
      {{"--top-k=8192", "--hot-rows=32769"}, "--hot-rows is \"32769\"; it must be an integer from 0 to 32768"},
      {{"--query-rows=0"}, "--query-rows is \"0\"; it must be an integer from 1 to 16"},
      {{"--query-rows=2", "--index-space=pool_row"}, "--query-rows is \"2\"; it must be 1 with --index-space pool_row"},
      {{"--query-rows=17"}, "--query-rows is \"17\"; it must be an integer from 1 to 16"},
      {{"--query-rows=3", "--hot-rows=191"},
       "--hot-rows is \"191\"; it must be at least --query-rows times --top-k, 192"},
      {{"--query-rows=5", "--top-k=8192"},
       "--hot-rows is \"32768\"; it must be at least --query-rows times --top-k, 40960"},
      {{"--padding-rows=4065"},
       "--concurrency is 32, --query-rows is 1, --padding-rows is 4065; a batch would have 4097 rows, and must have at "
       "most "
       "4096"},
      {{"--concurrency=2049", "--query-rows=2"},
       "--concurrency is 2049, --query-rows is 2, --padding-rows is 0; a batch would have 4098 rows, and must have at "
       "most "
       "4096"},
      {{"--prefix-only", "--query-rows=2"}, "--query-rows is 2, --padding-rows is 0; they are for requests"},
      {{"--write-workload=w", "--padding-rows=1"}, "--query-rows is 1, --padding-rows is 1; they are for requests"},
      {{"--groups=2"}, "--groups is \"2\"; it must be at most --layers, 1"},
      {{"--row-bytes=18"}, "--row-bytes is \"18\"; it must be a multiple of 4"},
      {{"--row-layout=dsv4_paged", "--row-bytes=656"}, "--row-bytes is \"656\"; it must be 584"},
      {{"--row-layout=dsv4_paged", "--block-rows=128"}, "--block-rows is \"128\"; it must be 64"},
      {{"--v-row-bytes=64"}, "--v-row-bytes is \"64\"; it must be 0 unless"},
      {{"--row-layout=split_kv", "--v-row-bytes=6"}, "--v-row-bytes is \"6\"; it must be a multiple of 4"},
      {{"--block-rows=48"}, "--block-rows is \"48\"; it must be a power of two"},
      {{"--context=64"}, "--context is \"64\"; it must be above --top-k, 64"},
      {{"--prefix-only", "--workload=w"}, "--prefix-only and --workload exclude each other"},
      {{"--prefix-only", "--engines=2"}, "--prefix-only runs in one process: --engines is 2"},
      {{"--workload=w", "--ranks=2"}, "--workload runs in one process"},
      {{"--index-space=rows"}, "--index-space is \"rows\"; it must be position, pool_row"},
      {{"--prefix-only", "--index-space=pool_row"}, "--prefix-only and --index-space pool_row exclude each other"},
      {{"--plane=doorbells"}, "--plane is \"doorbells\"; it must be auto, rpc, server, direct"},
      {{"--plane=server", "--transfer=inline"},
       "--plane is \"server\"; it must be auto or rpc with --transfer inline: the server plane is in shared memory"},
      {{"--plane=direct", "--transfer=inline"},
       "--plane is \"direct\"; it must be auto or rpc with --transfer inline: the direct plane is in shared memory"},
      {{"--plane=server", "--prefix-only"}, "--plane is \"server\"; it must be auto or rpc with --prefix-only"},
      {{"--plane=direct", "--prefix-only"}, "--plane is \"direct\"; it must be auto or rpc with --prefix-only"},
      {{"--arena=memfd"}, "--arena is \"memfd\"; it must be auto, ipc, descriptor"},
      {{"--device=gpu"}, "--device is \"gpu\"; it must be auto, cpu, cuda, cuda:N"},
      {{"--device=cuda,cpu"}, "--device is \"cuda,cpu\"; it must be auto"},
      {{"--device="}, "--device is \"\""},
      {{"--dump-slots=d"}, "--dump-slots needs --workload"},
      {{"--write-trace=t", "--trace=u"}, "--write-trace and --trace exclude each other"},
  };
  for (const auto& c : cases) {
    const auto options = Parse(c.arguments);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(options.status().message()), HasSubstr(c.message));
  }
}

TEST(OptionsTest, ADeviceNeedsABuildThatHasIt) {
  EXPECT_EQ(Parse({})->device, "auto");
  EXPECT_EQ(Parse({"--device=cpu"})->device, "cpu");
  for (const std::vector<const char*>& arguments : std::vector<std::vector<const char*>>{
           {"--device=cuda"}, {"--device", "cuda:1"}, {"--device=cuda", "--server=s", "--transfer=shared"}}) {
    const auto options = Parse(arguments);
    EXPECT_EQ(options.ok(), HasGpuRows());
    if (HasGpuRows()) continue;
    EXPECT_THAT(std::string(options.status().message()),
                AllOf(HasSubstr("--device is \"cuda"), HasSubstr("this build of stoker-replay has no CUDA")));
  }
  // A running daemon's GPU, with everything in messages.
  EXPECT_EQ(Parse({"--device=cuda:0", "--server=host:1", "--transfer=inline"})->device, "cuda:0");
}

TEST(OptionsTest, HelpHasEveryOptionAndNoLongLine) {
  const std::string help = OptionsHelp();
  for (const char* name : {"server",   "trace",       "requests",    "concurrency",    "engines",     "ranks",
                           "layers",   "groups",      "row-layout",  "row-bytes",      "v-row-bytes", "top-k",
                           "hot-rows", "pool-blocks", "time-scale",  "seed",           "json",        "write-workload",
                           "workload", "dump-slots",  "prefix-only", "workload-model", "transfer",    "write-trace",
                           "stokerd",  "device",      "index-space", "plane",          "arena"}) {
    EXPECT_THAT(help, HasSubstr(std::string("  --") + name)) << name;
  }
  for (size_t begin = 0; begin < help.size();) {
    const size_t end = help.find('\n', begin);
    ASSERT_NE(end, std::string::npos);
    EXPECT_LE(end - begin, 110u) << help.substr(begin, end - begin);
    begin = end + 1;
  }
  EXPECT_THAT(help, HasSubstr("Exit status"));
}

}  // namespace
}  // namespace stoker::replay
