// Many sessions at one time, mixed calls, every row checked; afterwards the daemon holds what it held before.
//
// STOKER_LOAD_SECONDS: how long the load lasts (60).
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

constexpr int kClients = 64;
constexpr uint32_t kBlocks = 8192;
// What the allocator may keep of the load's peak: it was 5 MiB after 340 sessions. A minute has more than a thousand,
// so a leak of 16 KiB a session shows. Arenas and pool are shared memory and are compared without a tolerance of that
// size.
constexpr int64_t kToleranceBytes = int64_t{16} << 20;
// A sanitizer keeps freed memory back and has shadows of its own.
constexpr int64_t kSanitizedToleranceBytes = int64_t{512} << 20;

absl::Duration LoadTime() {
  const char* text = std::getenv("STOKER_LOAD_SECONDS");
  int seconds = 60;
  if (text != nullptr && !absl::SimpleAtoi(text, &seconds)) std::abort();
  return absl::Seconds(seconds);
}

// Anonymous and shared memory of a process. The pool's pages are shared memory that stays touched.
struct Resident {
  int64_t anonymous = 0;
  int64_t shared = 0;
};
Resident ResidentOf(pid_t pid) {
  Resident resident;
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string key; status >> key;) {
    int64_t kib = 0;
    if (key == "RssAnon:" && status >> kib) resident.anonymous = kib * 1024;
    if (key == "RssShmem:" && status >> kib) resident.shared = kib * 1024;
  }
  return resident;
}

// Whether a sanitizer's library is in the process.
bool Sanitized(pid_t pid) {
  const std::string maps = ReadFile(absl::StrCat("/proc/", pid, "/maps"));
  return maps.find("libasan") != std::string::npos || maps.find("libtsan") != std::string::npos;
}

class LoadTest : public DaemonTest {
 protected:
  LoadTest() : DaemonTest({"--max-sessions=80"}) {
    v1::PoolSpec spec = LinearPool("p", 3, 80, kBlocks);
    spec.set_prefix_rows(32);
    pool_ = CreatePool(spec);
  }

  // One engine: sessions, sequences with shared prompts, steps, forks, rewrites, until the time is over.
  void Engine(int number, absl::Time end);
  void Decode(Rank& rank, std::mt19937_64& random, int number, uint64_t round);

  v1::PoolSpec pool_;
  std::atomic<int64_t> steps_{0};
  std::atomic<int64_t> sessions_{0};
};

void LoadTest::Decode(Rank& rank, std::mt19937_64& random, int number, uint64_t round) {
  // A prompt that others use too, then tokens of its own.
  const uint64_t family = random() % 24;
  const size_t common = 32 + 32 * (random() % 4);
  Tokens tokens = MakeTokens(1000 + family, common);
  const Tokens own = MakeTokens(100000 + static_cast<uint64_t>(number) * 10000 + round, 60);
  tokens.insert(tokens.end(), own.begin(), own.begin() + 20);
  v1::AdmitItem item = rank.Item(tokens, static_cast<uint32_t>(tokens.size()) + 40);
  item.set_wait_for_prefix(random() % 2 == 0);
  const v1::AdmittedSequence admitted = rank.Admit(item);
  ASSERT_EQ(admitted.status().code(), 0) << admitted.status().message();
  Sequence sequence{admitted.sequence_id(), admitted.state_row(), tokens};
  const uint32_t prompt = static_cast<uint32_t>(tokens.size());
  const auto source = random() % 2 == 0 ? v1::DATA_SOURCE_INLINE : v1::DATA_SOURCE_SHARED;
  if (admitted.stored_rows() < prompt) {
    const absl::Status status = rank.Store(sequence, admitted.stored_rows(), prompt - admitted.stored_rows(), source);
    ASSERT_TRUE(status.ok()) << status;
  }
  sequence.tokens.insert(sequence.tokens.end(), own.begin() + 20, own.end());
  for (uint32_t row = prompt; row < prompt + 40; ++row, ++steps_) {
    std::vector<int32_t> entries;
    for (int k = 0; k < 16; ++k) entries.push_back(static_cast<int32_t>(random() % (row + 1)));
    const std::vector<BatchRow> batch = {{&sequence, row + 1, true, source == v1::DATA_SOURCE_INLINE}};
    if (source == v1::DATA_SOURCE_SHARED) rank.WriteNewest(sequence, row);
    rank.CheckRows(batch, {entries}, 16, rank.Step(batch, {entries}, 16, source));
    if (HasFatalFailure()) return;
  }
  if (random() % 3 == 0) {
    v1::ForkRequest fork;
    v1::ForkItem* forked = fork.add_items();
    forked->set_sequence_id(sequence.id);
    forked->set_rows(prompt + 30);
    forked->set_max_rows(prompt + 40);
    v1::ForkResponse response;
    ASSERT_TRUE(rank.session().Fork(fork, &response).ok());
    ASSERT_EQ(response.sequences(0).status().code(), 0) << response.sequences(0).status().message();
    Sequence copy{response.sequences(0).sequence_id(), response.sequences(0).state_row(), sequence.tokens};
    // Rewrites rows that are shared with the source, and with whoever has the prompt.
    const Tokens other = MakeTokens(random(), 10);
    std::copy(other.begin(), other.end(), copy.tokens.begin() + 25);
    ASSERT_TRUE(rank.Store(copy, 25, 10).ok());
    rank.CheckStored(copy, prompt + 30);
    ASSERT_TRUE(rank.Close(copy).ok());
  }
  rank.CheckStored(sequence, prompt + 40);
  const absl::Status closed = rank.Close(sequence);
  ASSERT_TRUE(closed.ok()) << closed;
}

void LoadTest::Engine(int number, absl::Time end) {
  std::mt19937_64 random(static_cast<uint64_t>(number) + 1);
  for (uint64_t round = 0; absl::Now() < end && !HasFatalFailure();) {
    v1::AttachRequest request = AttachTo(pool_, absl::StrCat("engine", number), 4, 64, 16, 512);
    request.set_staging_bytes(256 << 10);
    Rank rank(client(), pool_, request);
    ++sessions_;
    // Some sessions are short, so that attaching and detaching goes on all the time.
    const uint64_t last = round + 1 + random() % 12;
    for (; round < last && absl::Now() < end && !HasFatalFailure(); ++round) Decode(rank, random, number, round);
  }
}

TEST_F(LoadTest, KeepsManyClientsRightAndLeavesNothingBehind) {
  // First everybody attaches once: threads, channels and allocator arenas that stay are part of the start value.
  const auto run = [&](absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    std::vector<std::thread> engines;
    for (int i = 0; i < kClients; ++i) engines.emplace_back([this, i, end] { Engine(i, end); });
    for (std::thread& engine : engines) engine.join();
    ASSERT_TRUE(Eventually(absl::Seconds(20), [&] {
      return SessionCount() == 0 && Usage("p").sessions() == 0 && client().GetStatus()->hot_bytes() == 0;
    }));
  };
  run(absl::Seconds(2));
  const Resident before = ResidentOf(daemon().process().pid());
  ASSERT_GT(before.anonymous, 0);
  run(LoadTime());
  const Resident after = ResidentOf(daemon().process().pid());
  const v1::PoolUsage usage = Usage("p");
  EXPECT_EQ(usage.referenced_blocks(), 0u);
  EXPECT_EQ(usage.sequences(), 0u);
  EXPECT_EQ(usage.free_blocks() + usage.cached_blocks(), kBlocks);
  EXPECT_LT(after.anonymous - before.anonymous,
            Sanitized(daemon().process().pid()) ? kSanitizedToleranceBytes : kToleranceBytes);
  // Shared memory: the pool, and nothing of the arenas.
  EXPECT_LE(after.shared, static_cast<int64_t>(usage.capacity_bytes()) + (int64_t{4} << 20));
  const auto series = Scrape(daemon().metrics_port());
  EXPECT_EQ(series.at("stoker_evicted_while_referenced_total{pool=\"p\"}"), 0);
  EXPECT_EQ(series.at("stoker_lru_repairs_total{pool=\"p\"}"), 0);
  EXPECT_EQ(series.at("stoker_queued_operations"), 0);
  EXPECT_GT(steps_, kClients);
  std::printf("%lld steps, %lld sessions, resident before %lld after %lld bytes\n", static_cast<long long>(steps_),
              static_cast<long long>(sessions_), static_cast<long long>(before.anonymous),
              static_cast<long long>(after.anonymous));
}

}  // namespace
}  // namespace stoker::system_test
