// Small pools and prompts for the tests of core.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/core/pool.h"

namespace stoker::core {

inline PoolSpec SmallSpec(int64_t blocks, int64_t block_rows = 16, int64_t prefix_rows = 16) {
  PoolSpec spec;
  spec.name = "small";
  spec.layers = 1;
  spec.row_layout = RowLayout::kLinear;
  spec.row_bytes = 656;
  spec.block_rows = block_rows;
  spec.prefix_rows = prefix_rows;
  spec.blocks = blocks;
  EXPECT_EQ(spec.Normalize(), absl::OkStatus());
  return spec;
}

// Hashes of the first `count` prefix blocks of a document; documents share none.
inline std::vector<PrefixHash> Hashes(uint64_t document, int64_t count) {
  std::vector<PrefixHash> hashes(count);
  for (int64_t i = 0; i < count; ++i) hashes[i].words = {document, static_cast<uint64_t>(i)};
  return hashes;
}

// A pool and the calls that most tests make, checked for their invariants after each test.
class PoolFixture : public testing::Test {
 protected:
  static constexpr SessionId kFirst{1};
  static constexpr SessionId kSecond{2};

  void Start(int64_t blocks, int64_t block_rows = 16, int64_t prefix_rows = 16) {
    pool_.emplace(SmallSpec(blocks, block_rows, prefix_rows), absl::Seconds(60));
  }

  void TearDown() override {
    if (!pool_.has_value()) return;
    EXPECT_EQ(pool_->CheckInvariants(), absl::OkStatus());
    EXPECT_EQ(pool_->counters().evicted_while_referenced, 0u);
  }

  absl::StatusOr<Admission> TryAdmit(int64_t prompt_rows, int64_t max_rows, std::vector<PrefixHash> hashes = {},
                                     SessionId session = kFirst, std::string key = "") {
    AdmitParams params;
    params.key = key;
    params.prompt_rows = prompt_rows;
    params.max_rows = max_rows;
    params.hashes = std::move(hashes);
    return pool_->Admit(session, limits_, std::move(params));
  }
  Admission Admit(int64_t prompt_rows, int64_t max_rows, std::vector<PrefixHash> hashes = {},
                  SessionId session = kFirst, std::string key = "") {
    absl::StatusOr<Admission> admission = TryAdmit(prompt_rows, max_rows, std::move(hashes), session, key);
    EXPECT_TRUE(admission.ok()) << admission.status();
    return admission.ok() ? *std::move(admission) : Admission();
  }
  WritePlan Begin(SequenceId id, int64_t first, int64_t count, SessionId session = kFirst) {
    absl::StatusOr<WritePlan> plan = pool_->BeginWrite(session, id, first, count);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *std::move(plan) : WritePlan();
  }
  WritePlan Store(SequenceId id, int64_t first, int64_t count, SessionId session = kFirst) {
    WritePlan plan = Begin(id, first, count, session);
    pool_->FinishWrite(id, first, count);
    return plan;
  }
  void Close(SequenceId id, SessionId session = kFirst, bool retain = false) {
    EXPECT_EQ(pool_->Close(session, id, retain, now_), absl::OkStatus());
  }
  // Leaves the prompt's prefix blocks cached.
  void Cache(int64_t prompt_rows, std::vector<PrefixHash> hashes) {
    const Admission admission = Admit(prompt_rows, prompt_rows, std::move(hashes));
    if (admission.matched_rows < prompt_rows) {
      Store(admission.id, admission.matched_rows, prompt_rows - admission.matched_rows);
    }
    Close(admission.id);
  }
  // Rows that a prompt would find.
  int64_t Matched(int64_t prompt_rows, std::vector<PrefixHash> hashes) {
    const Admission admission = Admit(prompt_rows, prompt_rows, std::move(hashes));
    Close(admission.id);
    return admission.matched_rows;
  }
  StepGrant Step(SequenceId id, int64_t length, bool commit, int64_t newest_count = 1, SessionId session = kFirst) {
    std::vector<StepGrant> grants;
    const StepAccess access{id, length, newest_count, commit};
    pool_->BeginStep(session, {&access, 1}, &grants);
    return std::move(grants[0]);
  }
  void ExpectCounts(int64_t free, int64_t referenced, int64_t cached) {
    const BlockCounts counts = pool_->Counts();
    EXPECT_EQ(counts.free, free);
    EXPECT_EQ(counts.referenced, referenced);
    EXPECT_EQ(counts.cached, cached);
  }

  std::optional<Pool> pool_;
  SequenceLimits limits_{100000, 100000};
  absl::Time now_ = absl::UnixEpoch();
};

inline void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(message));
}

}  // namespace stoker::core
