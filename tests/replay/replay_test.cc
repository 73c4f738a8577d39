// The real stoker-replay against the real stokerd: requests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "client/replay/trace.h"
#include "tests/replay/replay_run.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

// Requests that two cores replay in a second or two.
const std::vector<std::string> kSmall = {"--requests=30", "--input-length=1200", "--output-length=24", "--top-k=32",
                                         "--hot-rows=64"};

std::vector<std::string> Small(std::vector<std::string> more) {
  more.insert(more.begin(), kSmall.begin(), kSmall.end());
  return more;
}

TEST(ReplayTest, GeneratedRequests) {
  const ReplayRun run = ReplayWell(Small({}));
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  EXPECT_GT(run.number("prefix_hit_ratio"), 0.1);
  EXPECT_GT(run.number("hot_hit_ratio"), 0.5);
  EXPECT_LT(run.number("hot_hit_ratio"), 1);
  EXPECT_GT(run.number("lookups_newest"), 0);
  EXPECT_EQ(run.number("lookups_invalid"), 0);
  EXPECT_EQ(run.number("lookups_duplicate"), 0);
  EXPECT_EQ(run.number("checked_rows"),
            run.number("lookups_hot") + run.number("lookups_miss") + run.number("lookups_newest"));
  EXPECT_EQ(run.json.fields().at("shared_memory").bool_value(), true);
  // By the host, or by a kernel and a sample of them by the host.
  const bool on_gpu = system_test::TestDevice() != "cpu";
  EXPECT_EQ(run.json.fields().at("device").string_value() == "cpu", !on_gpu);
  EXPECT_EQ(run.number("checked_rows_device"), on_gpu ? run.number("checked_rows") : 0);
  EXPECT_EQ(run.number("checked_rows_host") == run.number("checked_rows"), !on_gpu);
  EXPECT_GT(run.number("checked_rows_host"), 0);
  EXPECT_THAT(run.output, HasSubstr("scrape http://127.0.0.1:"));
  EXPECT_THAT(run.output, HasSubstr("wrong rows         0\n"));
}

TEST(ReplayTest, BytesInMessagesAndEveryPlaneGiveTheSameLookups) {
  // One engine and room for all sequences: what is decoded in which step does not depend on time.
  const std::vector<std::string> model = {"--concurrency=4", "--layers=3", "--groups=2"};
  const auto run = [&](std::vector<std::string> more) {
    more.insert(more.end(), model.begin(), model.end());
    return ReplayWell(Small(more));
  };
  const ReplayRun called = run({"--transfer=shared", "--plane=rpc"});
  const ReplayRun doorbells = run({"--transfer=shared", "--plane", SecondBestPlane()});
  const ReplayRun direct = run({"--transfer=auto", "--plane=direct"});
  const ReplayRun best = run({});
  const ReplayRun inlined = run({"--transfer=inline"});
  EXPECT_EQ(called.text("plane"), "rpc");
  EXPECT_EQ(doorbells.text("plane"), SecondBestPlane());
  EXPECT_EQ(direct.text("plane"), "direct");
  EXPECT_EQ(best.text("plane"), "direct");
  EXPECT_EQ(inlined.text("plane"), "rpc");
  EXPECT_GT(called.number("step_mean_us"), 0);
  EXPECT_GT(doorbells.number("step_mean_us"), 0);
  EXPECT_GT(direct.number("step_mean_us"), 0);
  EXPECT_EQ(direct.json.fields().at("shared_memory").bool_value(), true);
  EXPECT_EQ(inlined.json.fields().at("shared_memory").bool_value(), false);
  EXPECT_GT(inlined.number("read_calls"), 0);
  for (const char* name :
       {"requests", "checked_rows", "stored_rows", "stored_bytes", "lookups_hot", "lookups_miss", "lookups_newest",
        "lookups_invalid", "lookups_duplicate", "gathered_bytes", "prefix_hit_ratio", "steps", "step_calls"}) {
    EXPECT_EQ(inlined.number(name), called.number(name)) << name;
    EXPECT_EQ(doorbells.number(name), called.number(name)) << name;
    EXPECT_EQ(direct.number(name), called.number(name)) << name;
    EXPECT_EQ(best.number(name), called.number(name)) << name;
  }
}

// Some of the tokens of a step are not accepted, and rows of nobody lie between those of sequences.
TEST(ReplayTest, SpeculativeRowsAndPaddingOnEveryPlane) {
  const std::vector<std::string> model = {"--concurrency=4", "--layers=3",     "--groups=2",
                                          "--query-rows=3",  "--hot-rows=128", "--padding-rows=5"};
  const auto run = [&](std::vector<std::string> more) {
    more.insert(more.end(), model.begin(), model.end());
    return ReplayWell(Small(more));
  };
  const ReplayRun called = run({"--transfer=shared", "--plane=rpc"});
  EXPECT_EQ(called.number("requests"), 30);
  EXPECT_EQ(called.number("stored_rows"), called.number("distinct_rows"));
  EXPECT_EQ(called.number("lookups_invalid"), 0);
  EXPECT_GT(called.number("lookups_duplicate"), 0);
  // Of three tokens two are accepted on average.
  const ReplayRun one_by_one = ReplayWell(Small({"--concurrency=4", "--layers=3", "--groups=2", "--hot-rows=128"}));
  EXPECT_LT(called.number("steps"), 0.75 * one_by_one.number("steps"));
  EXPECT_GT(called.number("steps"), 0.4 * one_by_one.number("steps"));
  EXPECT_GT(called.number("checked_rows"), 1.3 * one_by_one.number("checked_rows"));
  for (const ReplayRun& other :
       {run({"--transfer=inline"}), run({"--plane", SecondBestPlane()}), run({"--plane=direct"})}) {
    for (const char* name : {"requests", "checked_rows", "stored_rows", "lookups_miss", "lookups_newest",
                             "gathered_bytes", "steps", "output_tokens"}) {
      EXPECT_EQ(other.number(name), called.number(name)) << name << " on " << other.text("plane");
    }
    // A plane tells misses only.
    EXPECT_EQ(other.number("lookups_hot") + other.number("lookups_duplicate"),
              called.number("lookups_hot") + called.number("lookups_duplicate"));
  }
}

TEST(ReplayTest, SpeculativeRowsOfSeveralRanksAndEngines) {
  const ReplayRun run = ReplayWell(Small({"--engines=2", "--ranks=2", "--concurrency=4", "--layers=3", "--groups=3",
                                          "--query-rows=2", "--padding-rows=1", "--hot-rows=64"}));
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
}

TEST(ReplayTest, PaddingRowsByPoolRow) {
  for (const char* transfer : {"--transfer=shared", "--transfer=inline"}) {
    const ReplayRun run =
        ReplayWell(Small({"--concurrency=4", "--padding-rows=3", "--index-space=pool_row", transfer}));
    EXPECT_EQ(run.number("requests"), 30);
    EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  }
}

// On a GPU the doorbells are the kernels' to ring.
TEST(ReplayTest, TheServerPlaneByName) {
  const ReplayRun run =
      Replay(Small({"--plane=server", "--engines=2", "--ranks=2", "--concurrency=4", "--layers=5", "--groups=3"}));
  if (SecondBestPlane() != "server") {
    EXPECT_EQ(run.status, 3);
    EXPECT_THAT(run.output, HasSubstr("--plane is \"server\": "));
    return;
  }
  EXPECT_EQ(run.status, 0) << run.output;
  EXPECT_EQ(run.text("plane"), "server");
  EXPECT_THAT(run.output, HasSubstr("us each on the plane server, rows and entries in shared memory"));
  EXPECT_EQ(run.number("wrong_rows"), 0);
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
}

// Four processes that run the steps of their sessions themselves, over one pool.
// Host memory is behind a descriptor, asked for or not, and has no handle. tests/gpu/run_plane_tests.sh has those of
// GPUs.
TEST(ReplayTest, HowTheArenaIsShared) {
  for (const char* plane : {"--plane=rpc", "--plane=direct"}) {
    EXPECT_EQ(ReplayWell(Small({"--arena=descriptor", plane})).number("wrong_rows"), 0) << plane;
  }
  const ReplayRun refused = Replay(Small({"--arena=ipc"}));
  EXPECT_EQ(refused.status, 3);
  EXPECT_THAT(refused.output, HasSubstr("arena_sharing: ARENA_SHARING_IPC_HANDLE given"));
}

TEST(ReplayTest, TheDirectPlaneByName) {
  const ReplayRun run =
      ReplayWell(Small({"--plane=direct", "--engines=2", "--ranks=2", "--concurrency=4", "--layers=5", "--groups=3"}));
  EXPECT_EQ(run.text("plane"), "direct");
  EXPECT_THAT(run.output, HasSubstr("us each on the plane direct, rows and entries in shared memory"));
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_GT(run.number("checked_rows"), 0);
  EXPECT_GT(run.number("prefix_hit_ratio"), 0.1);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  // Rows that were committed have gone from the hot buffers, and come back from the pool.
  const ReplayRun crowded = ReplayWell(Small({"--plane=direct", "--output-length=200", "--hot-rows=32",
                                              "--workload-model=fresh", "--pool-blocks=16", "--concurrency=16"}));
  EXPECT_EQ(crowded.text("plane"), "direct");
  EXPECT_GT(crowded.number("waits"), 0);
}

using Case = std::tuple<std::string, std::vector<std::string>, std::string>;
class EachLayoutTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Layouts, EachLayoutTest,
    ::testing::Combine(::testing::Values("--row-layout=linear --row-bytes=656", "--row-layout=linear --row-bytes=20",
                                         "--row-layout=split_kv --row-bytes=128 --v-row-bytes=64",
                                         "--row-layout=dsv4_paged"),
                       ::testing::Values(std::vector<std::string>{"--transfer=shared", "--plane", SecondBestPlane()},
                                         std::vector<std::string>{"--plane=direct"},
                                         std::vector<std::string>{"--transfer=shared", "--plane=rpc"},
                                         std::vector<std::string>{"--transfer=inline"}),
                       ::testing::Values("position", "pool_row")));

TEST_P(EachLayoutTest, TwoEnginesStoreRowsOnce) {
  const auto& [layout, way, index_space] = GetParam();
  std::vector<std::string> options =
      Small({"--layers=4", "--groups=2", "--engines=2", "--concurrency=6", "--index-space", index_space});
  options.insert(options.end(), way.begin(), way.end());
  const size_t space = layout.find(' ');
  options.push_back(layout.substr(0, space));
  for (size_t begin = space; begin != std::string::npos;) {
    const size_t end = layout.find(' ', begin + 1);
    options.push_back(layout.substr(begin + 1, end == std::string::npos ? end : end - begin - 1));
    begin = end;
  }
  const ReplayRun run = ReplayWell(options);
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_EQ(run.json.fields().at("index_space").string_value(), index_space);
  EXPECT_EQ(run.number("lookups_invalid"), 0);
  EXPECT_GT(run.number("lookups_newest"), 0);
  EXPECT_GT(run.number("prefix_hit_ratio"), 0.1);
  // Each prefix block by one of the two engines, and by nobody a second time.
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  // Two groups of two layers each.
  EXPECT_EQ(run.number("checked_rows"),
            2 * (run.number("lookups_hot") + run.number("lookups_miss") + run.number("lookups_newest")));
}

TEST(ReplayTest, RanksShareSequencesAndCheckTheirOwnHotBuffers) {
  const ReplayRun one = ReplayWell(Small({"--concurrency=4"}));
  const ReplayRun three = ReplayWell(Small({"--concurrency=4", "--ranks=3"}));
  EXPECT_EQ(three.number("requests"), one.number("requests"));
  EXPECT_EQ(three.number("stored_rows"), one.number("stored_rows"));
  EXPECT_EQ(three.number("stored_rows"), three.number("distinct_rows"));
  EXPECT_EQ(three.number("checked_rows"), 3 * one.number("checked_rows"));
  EXPECT_EQ(three.number("lookups_miss"), 3 * one.number("lookups_miss"));
}

TEST(ReplayTest, PoolRowsOfAllRanks) {
  const ReplayRun run = ReplayWell(Small({"--engines=2", "--ranks=2", "--concurrency=4", "--layers=2",
                                          "--index-space=pool_row", "--block-rows=16", "--output-length=100"}));
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  EXPECT_EQ(run.number("lookups_invalid"), 0);
  const ReplayRun by_position = ReplayWell(
      Small({"--engines=2", "--ranks=2", "--concurrency=4", "--layers=2", "--block-rows=16", "--output-length=100"}));
  EXPECT_EQ(run.number("checked_rows"), by_position.number("checked_rows"));
  const ReplayRun crowded = ReplayWell(Small({"--pool-blocks=16", "--concurrency=16", "--index-space=pool_row"}));
  EXPECT_GT(crowded.number("waits"), 0);
}

TEST(ReplayTest, RanksOfSeveralEngines) {
  const ReplayRun run = ReplayWell(Small({"--engines=2", "--ranks=2", "--concurrency=4", "--layers=2"}));
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
}

TEST(ReplayTest, RealisticModel) {
  const ReplayRun run = ReplayWell(Small({"--workload-model=realistic"}));
  EXPECT_EQ(run.json.fields().at("workload_model").string_value(), "realistic");
  EXPECT_LT(run.number("hot_hit_ratio"), 0.9);
}

TEST(ReplayTest, WaitsForRoomInASmallPool) {
  // About three of these sequences fit at a time.
  const ReplayRun run = ReplayWell(Small({"--pool-blocks=16", "--concurrency=16"}));
  EXPECT_EQ(run.number("requests"), 30);
  EXPECT_GT(run.number("waits"), 0);
  const ReplayRun engines = ReplayWell(Small({"--pool-blocks=16", "--concurrency=16", "--engines=2"}));
  EXPECT_EQ(engines.number("requests"), 30);
}

TEST(ReplayTest, ARequestThatNeverFits) {
  const ReplayRun run = Replay(Small({"--pool-blocks=2"}));
  EXPECT_EQ(run.status, 3);
  EXPECT_THAT(run.output, HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_THAT(run.output, HasSubstr("Admit of request"));
}

TEST(ReplayTest, SequencesShorterThanTopK) {
  const ReplayRun run = ReplayWell({"--requests=20", "--input-length=16", "--output-length=12", "--top-k=64"});
  EXPECT_EQ(run.number("lookups_invalid"), 0);
  // Far fewer entries than 64 a step: the rest was -1.
  EXPECT_LT(run.number("checked_rows"), 64 * run.number("output_tokens") / 2);
}

TEST(ReplayTest, BundledTrace) {
  const ReplayRun run = ReplayWell({"--trace", BundledTracePath(), "--row-bytes=64"});
  const auto requests = ReadTrace(BundledTracePath(), 0);
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_EQ(run.number("requests"), static_cast<double>(requests->size()));
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  EXPECT_GT(run.number("prefix_hit_ratio"), 0.2);
}

TEST(ReplayTest, TimeScaleWaitsForArrivals) {
  const system_test::TemporaryFolder folder;
  const std::string trace =
      folder.Write("trace",
                   "{\"timestamp\": 0, \"input_length\": 8, \"output_length\": 2, \"hash_ids\": []}\n"
                   "{\"timestamp\": 4000, \"input_length\": 8, \"output_length\": 0, \"hash_ids\": []}\n");
  const ReplayRun scaled = ReplayWell({"--trace", trace, "--time-scale=0.25", "--top-k=4"});
  EXPECT_EQ(scaled.number("requests"), 2);
  EXPECT_GE(scaled.number("seconds"), 1);
}

// What an LRU of unlimited size must match, block for block.
TEST(PrefixOnlyTest, EveryBlockSeenBeforeIsMatched) {
  const system_test::TemporaryFolder folder;
  const std::string trace = folder.File("trace");
  ASSERT_EQ(Replay({"--write-trace", trace, "--requests=200"}).status, 0);
  const auto requests = ReadTrace(trace, 0);
  ASSERT_TRUE(requests.ok()) << requests.status();
  std::unordered_set<uint64_t> seen;
  uint64_t blocks = 0, matched = 0;
  for (const Request& request : *requests) {
    for (const uint64_t id : request.hash_ids) {
      ++blocks;
      matched += seen.insert(id).second ? 0 : 1;
    }
  }
  const ReplayRun run = ReplayWell({"--trace", trace, "--prefix-only"});
  EXPECT_EQ(run.number("requests"), 200);
  EXPECT_NEAR(run.number("prefix_hit_ratio"), static_cast<double>(matched) / static_cast<double>(blocks), 1e-6);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  EXPECT_EQ(run.number("step_calls"), 0);
  EXPECT_EQ(run.text("plane"), "");
  // Few blocks: less is matched.
  const ReplayRun few = ReplayWell({"--trace", trace, "--prefix-only", "--pool-blocks=24"});
  EXPECT_LT(few.number("prefix_hit_ratio"), run.number("prefix_hit_ratio") - 0.02);
}

// The published trace is data of others: STOKER_SHARED names the folder that has it. Without it the project's own
// requests take its place.
TEST(PrefixOnlyTest, ConversationTrace) {
  const char* shared = std::getenv("STOKER_SHARED");
  if (shared == nullptr) {
    const ReplayRun run = ReplayWell({"--prefix-only", "--requests=1000"});
    EXPECT_EQ(run.number("requests"), 1000);
    return;
  }
  const std::string trace = absl::StrCat(shared, "/traces/conversation_trace.jsonl");
  const struct {
    const char* pool_blocks;
    double ratio;
  } published[] = {{"1000", 0.045},  {"5000", 0.110},   {"10000", 0.211}, {"30000", 0.326},
                   {"50000", 0.355}, {"100000", 0.364}, {"0", 0.366}};
  for (const auto& p : published) {
    const ReplayRun run =
        ReplayWell({"--prefix-only", "--trace", trace, "--pool-blocks", p.pool_blocks}, absl::Seconds(300));
    EXPECT_EQ(run.number("requests"), 12031);
    EXPECT_NEAR(run.number("prefix_hit_ratio"), p.ratio, 0.01) << p.pool_blocks;
  }
}

}  // namespace
}  // namespace stoker::replay
