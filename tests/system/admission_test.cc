// Admission: single flight of prefixes, quotas, exhaustion, eviction.
#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kOk = 0;
constexpr int kDeadlineExceeded = 4;
constexpr int kResourceExhausted = 8;

class AdmissionTest : public DaemonTest {
 protected:
  AdmissionTest() {
    v1::PoolSpec spec = LinearPool("p", 2, 48, 32);
    spec.set_prefix_rows(32);
    pool_ = CreatePool(spec);
  }

  v1::AdmitItem Waiting(const Rank& rank, const Tokens& tokens) const {
    v1::AdmitItem item = rank.Item(tokens, static_cast<uint32_t>(tokens.size()));
    item.set_wait_for_prefix(true);
    return item;
  }

  // Whether an operation is waiting: a wait has no other outward sign.
  bool AwaitQueued() {
    return Eventually(absl::Seconds(10),
                      [&] { return Scrape(daemon().metrics_port())["stoker_queued_operations"] > 0; });
  }

  std::future<v1::AdmittedSequence> AdmitLater(Rank& rank, const v1::AdmitItem& item,
                                               absl::Duration timeout = absl::Seconds(30)) {
    return std::async(std::launch::async, [&rank, item, timeout] { return rank.Admit(item, {.timeout = timeout}); });
  }

  v1::PoolSpec pool_;
};

TEST_F(AdmissionTest, WaitsUntilAnotherSequenceHasStoredThePrefix) {
  Rank owner(client(), pool_, AttachTo(pool_, "owner"));
  Rank waiter(client(), pool_, AttachTo(pool_, "waiter"));
  const Tokens prompt = MakeTokens(1, 64);
  const v1::AdmittedSequence first = owner.Admit(owner.Item(prompt, 64));
  const Sequence a{first.sequence_id(), first.state_row(), prompt};
  auto second = AdmitLater(waiter, Waiting(waiter, prompt));
  ASSERT_TRUE(AwaitQueued());
  EXPECT_EQ(Usage("p").sequences(), 1u);
  ASSERT_TRUE(owner.Store(a, 0, 32).ok());  // one of two blocks: it waits on, for the next one
  ASSERT_TRUE(AwaitQueued());
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  ASSERT_TRUE(owner.Store(a, 32, 32).ok());
  const v1::AdmittedSequence admitted = second.get();
  ASSERT_EQ(admitted.status().code(), kOk) << admitted.status().message();
  EXPECT_EQ(admitted.matched_rows(), 64u);
  waiter.CheckStored({admitted.sequence_id(), admitted.state_row(), prompt}, 64);
  EXPECT_EQ(Usage("p").referenced_blocks(), 4u);
}

TEST_F(AdmissionTest, DoesNotWaitForItemsOfTheSameCall) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  const Tokens prompt = MakeTokens(2, 64);
  v1::AdmitRequest request;
  for (int i = 0; i < 3; ++i) *request.add_items() = Waiting(rank, prompt);
  v1::AdmitResponse response;
  const absl::Status status = rank.session().Admit(request, &response, {.timeout = absl::Seconds(5)});
  ASSERT_TRUE(status.ok()) << status;
  for (const v1::AdmittedSequence& sequence : response.sequences()) {
    EXPECT_EQ(sequence.status().code(), kOk) << sequence.status().message();
    EXPECT_EQ(sequence.matched_rows(), 0u);
  }
}

TEST_F(AdmissionTest, EndsAWaitAtTheDeadlineAndLeaksNothing) {
  Rank owner(client(), pool_, AttachTo(pool_, "owner"));
  Rank waiter(client(), pool_, AttachTo(pool_, "waiter"));
  const Tokens prompt = MakeTokens(3, 64);
  const v1::AdmittedSequence first = owner.Admit(owner.Item(prompt, 64));
  ASSERT_EQ(first.status().code(), kOk);
  // The first item could be admitted at once, the second has to wait: the call as a whole fails and leaves neither.
  v1::AdmitRequest request;
  *request.add_items() = waiter.Item(MakeTokens(4, 64), 64);
  *request.add_items() = Waiting(waiter, prompt);
  v1::AdmitResponse response;
  const absl::Status status = waiter.session().Admit(request, &response, {.timeout = absl::Milliseconds(300)});
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(AwaitFree("p", 28));
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return Usage("p").sequences() == 1; }));
  // Its state rows are back too: all eight can be used.
  for (int i = 0; i < 7; ++i) waiter.Open(MakeTokens(100 + static_cast<uint64_t>(i), 16), 16);
  const Sequence last = waiter.Open(MakeTokens(110, 16), 16);
  EXPECT_NE(last.id, 0u);
}

TEST_F(AdmissionTest, GoesOnWhenTheOwnerDies) {
  ChildProcess owner({ClientProcessPath(), daemon().address(), "p", "owner", "keyed"}, daemon().folder().File("owner"));
  ASSERT_TRUE(owner.AwaitOutput("ready", absl::Seconds(30))) << owner.Output();
  Rank waiter(client(), pool_, AttachTo(pool_, "waiter"));
  const Tokens prompt = MakeTokens(77, 64);  // as client_process has it: 32 rows stored, 32 to come
  auto second = AdmitLater(waiter, Waiting(waiter, prompt));
  ASSERT_TRUE(AwaitQueued());
  owner.Kill();
  const v1::AdmittedSequence admitted = second.get();
  ASSERT_EQ(admitted.status().code(), kOk) << admitted.status().message();
  EXPECT_EQ(admitted.matched_rows(), 32u);
  const Sequence sequence{admitted.sequence_id(), admitted.state_row(), prompt};
  ASSERT_TRUE(waiter.Store(sequence, 32, 32).ok());
  waiter.CheckStored(sequence, 64);
}

TEST_F(AdmissionTest, EndsAWaitWithItsSession) {
  Rank owner(client(), pool_, AttachTo(pool_, "owner"));
  const Tokens prompt = MakeTokens(5, 64);
  ASSERT_EQ(owner.Admit(owner.Item(prompt, 64)).status().code(), kOk);
  {
    Rank waiter(client(), pool_, AttachTo(pool_, "waiter"), WithoutReattach());
    auto second = AdmitLater(waiter, Waiting(waiter, prompt));
    ASSERT_TRUE(AwaitQueued());
    v1::EvictSessionRequest evict;
    evict.set_session_id(waiter.session().info().session_id());
    ASSERT_TRUE(client().EvictSession(evict).ok());
    EXPECT_NE(second.get().status().code(), kOk);
  }
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 1; }));
  EXPECT_EQ(Usage("p").sequences(), 1u);
}

TEST_F(AdmissionTest, RefusesWhatDoesNotFitAndAdmitsNothingOfIt) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  Rank holder(client(), pool_, AttachTo(pool_, "holder"));
  const Sequence a = holder.Open(MakeTokens(6, 64), 320);  // 20 of 32 blocks
  const v1::PoolUsage before = Usage("p");
  const v1::AdmittedSequence refused = rank.Admit(rank.Item(MakeTokens(7, 64), 208));
  EXPECT_EQ(refused.status().code(), kResourceExhausted);
  EXPECT_EQ(refused.sequence_id(), 0u);
  EXPECT_THAT(refused.status().message(),
              AllOf(HasSubstr("13 blocks needed"), HasSubstr("12 free"), HasSubstr("0 evictable")));
  EXPECT_EQ(Usage("p").SerializeAsString(), before.SerializeAsString());
  // Items have a status each.
  v1::AdmitRequest request;
  *request.add_items() = rank.Item(MakeTokens(8, 16), 176);
  *request.add_items() = rank.Item(MakeTokens(9, 16), 176);
  *request.add_items() = rank.Item(MakeTokens(10, 16), 16);
  v1::AdmitResponse response;
  ASSERT_TRUE(rank.session().Admit(request, &response).ok());
  EXPECT_EQ(response.sequences(0).status().code(), kOk);
  EXPECT_EQ(response.sequences(1).status().code(), kResourceExhausted);
  EXPECT_EQ(response.sequences(2).status().code(), kOk);
  EXPECT_EQ(Usage("p").free_blocks(), 0u);
  v1::ExtendRequest extend;
  extend.add_items()->set_sequence_id(a.id);
  extend.mutable_items(0)->set_max_rows(321);
  v1::ExtendResponse extended;
  ASSERT_TRUE(holder.session().Extend(extend, &extended).ok());
  EXPECT_EQ(extended.statuses(0).code(), kResourceExhausted);
  holder.CheckStored(a, 64);
}

TEST_F(AdmissionTest, HoldsSessionsToTheirQuotas) {
  v1::AttachRequest request = AttachTo(pool_, "rank", 2);
  request.set_max_reserved_blocks(6);
  Rank rank(client(), pool_, request);
  const Sequence a = rank.Open(MakeTokens(11, 16), 64);
  const v1::AdmittedSequence blocks = rank.Admit(rank.Item(MakeTokens(12, 16), 48));
  EXPECT_EQ(blocks.status().code(), kResourceExhausted);
  EXPECT_THAT(blocks.status().message(), AllOf(HasSubstr("max_reserved_blocks"), HasSubstr("3 blocks needed"),
                                               HasSubstr("4 held"), HasSubstr("limit 6")));
  const Sequence b = rank.Open(MakeTokens(13, 16), 32);
  ASSERT_TRUE(rank.Close(a).ok());
  const Sequence c = rank.Open(MakeTokens(14, 16), 16);
  EXPECT_NE(c.id, 0u);
  const v1::AdmittedSequence rows = rank.Admit(rank.Item(MakeTokens(15, 16), 16));
  EXPECT_EQ(rows.status().code(), kResourceExhausted);
  EXPECT_THAT(rows.status().message(), AllOf(HasSubstr("state_rows"), HasSubstr("all 2")));
}

TEST_F(AdmissionTest, EvictsCachedBlocksAndNeverReferencedOnes) {
  Rank rank(client(), pool_, AttachTo(pool_, "rank"));
  const Tokens kept_tokens = MakeTokens(16, 64);
  const Sequence kept = rank.Open(kept_tokens, 64);  // 4 blocks
  for (uint64_t i = 0; i < 6; ++i) {
    const Sequence gone = rank.Open(MakeTokens(20 + i, 64), 64);
    ASSERT_TRUE(rank.Close(gone).ok());
  }
  EXPECT_EQ(Usage("p").cached_blocks(), 24u);
  EXPECT_EQ(Usage("p").free_blocks(), 4u);
  // The most recently used ones are evicted last.
  const Sequence large = rank.Open(MakeTokens(40, 16), 256);
  EXPECT_NE(large.id, 0u);
  EXPECT_EQ(Usage("p").cached_blocks(), 12u);
  rank.CheckStored(kept, 64);
  EXPECT_EQ(rank.Admit(rank.Item(MakeTokens(25, 64), 64)).matched_rows(), 64u);
  v1::AdmittedSequence oldest = rank.Admit(rank.Item(MakeTokens(20, 64), 64));
  EXPECT_EQ(oldest.matched_rows(), 0u);
  const auto series = Scrape(daemon().metrics_port());
  EXPECT_EQ(series.at("stoker_evicted_while_referenced_total{pool=\"p\"}"), 0);
}

}  // namespace
}  // namespace stoker::system_test
