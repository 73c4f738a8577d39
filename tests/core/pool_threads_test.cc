// Several sessions use one pool from threads of their own. What each call answers is pool_model_test's matter; here
// nothing may race, hang or leak.
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "tests/core/pool_fixture.h"

namespace stoker::core {
namespace {

constexpr int kThreads = 6;
constexpr int kRounds = 3000;

class PoolThreadsTest : public PoolFixture {
 protected:
  void Work(SessionId session) {
    std::mt19937_64 random(session.value);
    std::vector<SequenceId> open;
    std::vector<StepGrant> grants;
    for (int round = 0; round < kRounds; ++round) {
      switch (random() % 6) {
        case 0:
        case 1: {
          AdmitParams params;
          params.prompt_rows = 16 * static_cast<int64_t>(1 + random() % 6) + static_cast<int64_t>(random() % 16);
          params.max_rows = params.prompt_rows + 20;
          params.hashes = Hashes(random() % 4, params.prompt_rows / 16);
          const std::string key = "key" + std::to_string(random() % 8);
          if (random() % 4 == 0) params.key = key;
          if (random() % 4 == 0) {
            params.on_prefix_ready = [this] { ++woken_; };
          }
          const absl::StatusOr<Admission> a = pool_->Admit(session, limits_, std::move(params));
          if (!a.ok()) break;
          if (a->waiting) {
            ++waiting_;
            break;
          }
          pool_->FinishCopies(a->id);
          open.push_back(a->id);
          break;
        }
        case 2: {
          if (open.empty()) break;
          const SequenceId id = open[random() % open.size()];
          const absl::StatusOr<SequenceSnapshot> snapshot = pool_->Snapshot(id);
          if (!snapshot.ok()) break;
          const int64_t first = random() % 4 == 0 ? 0 : snapshot->written_rows;
          const absl::StatusOr<WritePlan> plan = pool_->BeginWrite(session, id, first, 1 + random() % 40);
          if (!plan.ok()) break;
          pool_->FinishWrite(id, first, static_cast<int64_t>(plan->pool_rows.size()));
          pool_->Reclaim(id, plan->replaced);
          break;
        }
        case 3: {
          std::vector<StepAccess> accesses;
          for (const SequenceId id : open) accesses.push_back({id, static_cast<int64_t>(random() % 100), 1, true});
          pool_->BeginStep(session, accesses, &grants);
          for (size_t i = 0; i < accesses.size(); ++i) {
            if (!grants[i].status.ok()) continue;
            pool_->FinishWrite(accesses[i].id, accesses[i].length - 1, 1);
            if (grants[i].plan != nullptr) pool_->Reclaim(accesses[i].id, grants[i].plan->replaced);
          }
          break;
        }
        case 4: {
          if (open.empty()) break;
          const absl::StatusOr<Admission> fork =
              pool_->Fork(session, limits_, open.back(), 1 + static_cast<int64_t>(random() % 40), 60, "");
          if (fork.ok()) open.push_back(fork->id);
          bool more;
          pool_->List(SequenceId(), 5, &more);
          pool_->Sweep(absl::UnixEpoch() + absl::Seconds(random() % 200));
          break;
        }
        default: {
          if (open.empty()) break;
          std::swap(open[random() % open.size()], open.back());
          EXPECT_TRUE(pool_->Close(session, open.back(), random() % 2 == 0, now_).ok());
          open.pop_back();
          const PoolCounters& counters = pool_->counters();
          EXPECT_EQ(counters.evicted_while_referenced, 0u);
          EXPECT_TRUE(round % 64 != 0 || pool_->CheckInvariants().ok());
          break;
        }
      }
    }
    for (const SequenceId id : open) EXPECT_TRUE(pool_->Close(session, id, false, now_).ok());
  }

  std::atomic<int64_t> waiting_{0};
  std::atomic<int64_t> woken_{0};
};

TEST_F(PoolThreadsTest, SessionsShareAPool) {
  Start(120);
  std::vector<std::thread> threads;
  for (int i = 1; i <= kThreads; ++i) threads.emplace_back([this, i] { Work({static_cast<uint64_t>(i)}); });
  for (std::thread& thread : threads) thread.join();
  pool_->Sweep(absl::InfiniteFuture());
  EXPECT_EQ(pool_->counters().sequences, 0);
  EXPECT_EQ(pool_->Counts().referenced, 0);
  EXPECT_EQ(waiting_, woken_);
  Close(Admit(120 * 16, 120 * 16).id);
  ExpectCounts(120, 0, 0);
}

}  // namespace
}  // namespace stoker::core
