// The real stoker-replay against the real stokerd: workload files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/replay/workload_file.h"
#include "tests/replay/lru_simulator.h"
#include "tests/replay/replay_run.h"

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

class ReplayWorkloadTest : public ::testing::Test {
 protected:
  std::string Dump(const std::string& workload, const std::string& transfer, const std::string& plane = "auto") {
    const std::string path = folder_.File("dump_" + transfer + plane);
    ReplayWell({"--workload", workload, "--dump-slots", path, "--transfer", transfer, "--plane", plane});
    return path;
  }

  const system_test::TemporaryFolder folder_;
};

TEST_F(ReplayWorkloadTest, SlotsAreThoseOfAnLru) {
  const std::string path = folder_.File("w");
  ASSERT_EQ(Replay({"--write-workload", path, "--steps=30", "--rows=3", "--context=1200", "--top-k=48", "--hot-rows=96",
                    "--row-bytes=20"})
                .status,
            0);
  const auto workload = ReadWorkload(path);
  ASSERT_TRUE(workload.ok()) << workload.status();
  EXPECT_EQ(workload->steps, 30u);
  EXPECT_EQ(workload->rows, 3u);
  EXPECT_EQ(workload->row_bytes, 20u);

  const std::string shared = Dump(path, "shared");
  EXPECT_EQ(system_test::ReadFile(shared), system_test::ReadFile(Dump(path, "inline")));
  for (const std::string& plane : {std::string("rpc"), SecondBestPlane(), std::string("direct")}) {
    EXPECT_EQ(system_test::ReadFile(shared), system_test::ReadFile(Dump(path, "shared", plane))) << plane;
  }
  const auto dump = ReadSlotDump(shared);
  ASSERT_TRUE(dump.ok()) << dump.status();
  ASSERT_EQ(dump->steps, 30u);
  ASSERT_EQ(dump->rows, 3u);
  ASSERT_EQ(dump->top_k, 48u);
  ASSERT_EQ(dump->hot_rows, 96u);
  for (uint32_t row = 0; row < dump->rows; ++row) {
    LruSimulator lru(dump->hot_rows, workload->context);
    std::map<int16_t, int32_t> held;  // position in each slot
    for (uint32_t step = 0; step < dump->steps; ++step) {
      const auto entries = workload->Entries(step, row);
      const size_t line = size_t{step} * dump->rows + row;
      EXPECT_EQ(dump->misses[line], static_cast<int32_t>(lru.Step(entries)));
      int32_t moved = 0;
      for (size_t i = 0; i < entries.size(); ++i) {
        const int16_t slot = dump->slots[line * dump->top_k + i];
        ASSERT_GE(slot, 0);
        ASSERT_LT(slot, static_cast<int>(dump->hot_rows));
        const auto [it, added] = held.try_emplace(slot, entries[i]);
        if (added || it->second != entries[i]) ++moved;
        it->second = entries[i];
      }
      EXPECT_EQ(moved, dump->misses[line]) << "step " << step << " row " << row;
    }
  }
}

// The seeds' slots are data of others: STOKER_SHARED names the folder that has them. The test above needs none.
TEST_F(ReplayWorkloadTest, GoldenSlots) {
  const char* shared = std::getenv("STOKER_SHARED");
  if (shared == nullptr) return;
  for (const char* name : {"64_128", "512_1024"}) {
    const std::string golden = system_test::ReadFile(absl::StrCat(shared, "/golden/g_", name));
    ASSERT_FALSE(golden.empty());
    for (const char* transfer : {"shared", "inline"}) {
      const std::string dump = Dump(absl::StrCat(shared, "/golden/w_", name), transfer);
      EXPECT_TRUE(system_test::ReadFile(dump) == golden) << name << " " << transfer;
    }
  }
}

TEST_F(ReplayWorkloadTest, BadFiles) {
  const ReplayRun absent = Replay({"--workload", folder_.File("absent")});
  EXPECT_EQ(absent.status, 2);
  EXPECT_THAT(absent.output, HasSubstr("absent: cannot be opened"));
  const ReplayRun garbage = Replay({"--workload", folder_.Write("garbage", "STKWgarbage")});
  EXPECT_EQ(garbage.status, 2);
  EXPECT_THAT(garbage.output, HasSubstr("garbage"));
  const ReplayRun too_big = Replay(
      {"--write-workload", folder_.File("w"), "--steps=1000000", "--rows=4096", "--top-k=8192", "--hot-rows=8192"});
  EXPECT_EQ(too_big.status, 2);
  EXPECT_THAT(too_big.output, HasSubstr("steps x rows x top_k"));
}

}  // namespace
}  // namespace stoker::replay
