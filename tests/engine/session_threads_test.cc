// Sessions on threads of their own share the sequences of one pool: they store, rewrite, step, read, and end while work
// of theirs and of others is under way. What each call answers is the system tests' matter; here nothing may race, hang
// or leak, and no hot row may hold another sequence's bytes. Without gRPC, whose threads ThreadSanitizer cannot see
// into.
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/core/registry.h"
#include "server/engine/engine.h"

// A rank that rewrites rows in place while another one reads them is what engines must not do; here the bytes are the
// same. All but the row copies is checked.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "race:kernels/cpu/copy_rows.cc\n"; }

namespace stoker::core {
namespace {

constexpr int kThreads = 5;
constexpr int kSessionsOfAThread = 240;
constexpr int kContents = 6;
constexpr int64_t kLayers = 2;
constexpr int64_t kRowBytes = 16;
constexpr int64_t kBlockRows = 16;
constexpr int64_t kHotRows = 48;
constexpr int64_t kTopK = 24;
constexpr int64_t kMaxRows = 112;

int64_t PromptRows(int content) { return 40 + content % 3 * kBlockRows; }

// Row of a position, of the content that all sequences of one key have.
std::string RowBytes(int content, int64_t position, int64_t layer) {
  const std::string text = absl::StrCat("c", content, " p", position, " l", layer, " ");
  std::string row;
  while (row.size() < kRowBytes) row += text;
  return row.substr(0, kRowBytes);
}

struct OpenSequence {
  SequenceId id;
  int content = 0;
};

// Requests, and what they point to, until the call that has them is done.
struct StoreCall {
  std::string rows;
  std::vector<StoreItem> items;
};
struct StepCall {
  std::vector<int32_t> entries;
  std::vector<int32_t> hot_rows;
  std::vector<int32_t> counts;
  StepRequest request;
};

class SessionThreadsTest : public testing::Test {
 protected:
  SessionThreadsTest() : backend_(kernels::cpu::MakeCpuBackend(2)) {
    engine_ = engine::MakeEngine({backend_.get()}, 1 << 20).value();
    RegistryLimits limits;
    limits.max_pool_bytes = limits.max_hot_bytes = int64_t{1} << 28;
    limits.max_sessions = 64;
    limits.max_sequences_per_session = 64;
    limits.max_batch_items = 64;
    limits.max_queued_operations = 64;
    limits.sequence_retention = absl::Milliseconds(20);
    registry_ = std::make_unique<Registry>(engine_.get(), limits, 1, [] { return absl::Now(); });
    PoolSpec pool;
    pool.name = "p";
    pool.layers = kLayers;
    pool.row_layout = RowLayout::kLinear;
    pool.row_bytes = kRowBytes;
    pool.block_rows = kBlockRows;
    // Too few for all that the threads ask for, so that blocks change hands.
    pool.blocks = 60;
    absl::Notification made;
    registry_->CreatePool(pool, [&](absl::StatusOr<PoolDescription> description) {
      EXPECT_TRUE(description.ok()) << description.status();
      made.Notify();
    });
    made.WaitForNotification();
  }

  std::shared_ptr<Session> Attach(const std::string& name, absl::Notification* ended) {
    SessionSpec spec;
    spec.pool = "p";
    spec.name = name;
    spec.state_rows = 8;
    spec.hot_rows = kHotRows;
    spec.max_top_k = kTopK;
    spec.max_sequence_rows = kMaxRows;
    spec.index_space = IndexSpace::kPosition;
    spec.groups = {{0, 1}};
    Registry::SessionEvents events;
    events.draining = [](absl::Duration) {};
    events.pool_pressure = [](const BlockCounts&) {};
    events.superseded = [](SessionId) {};
    events.ended = [ended](const absl::Status&) { ended->Notify(); };
    std::shared_ptr<Session> session;
    absl::Notification attached;
    registry_->Attach(spec, std::move(events), [&](absl::StatusOr<std::shared_ptr<Session>> result) {
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) session = *std::move(result);
      attached.Notify();
    });
    attached.WaitForNotification();
    return session;
  }

  static void Admit(Session& session, int content, std::vector<OpenSequence>* open) {
    std::string hashes;
    for (int64_t i = 0; (i + 1) * kBlockRows <= PromptRows(content); ++i) {
      std::string hash = absl::StrCat("hash ", content, " ", i, " ");
      hash.resize(PrefixHash::kBytes, '.');
      hashes += hash;
    }
    AdmitItem item;
    item.key = absl::StrCat("key", content);
    item.prompt_rows = PromptRows(content);
    item.max_rows = kMaxRows;
    item.block_hashes = hashes;
    absl::Notification done;
    session.Admit({item}, [&](absl::StatusOr<std::vector<AdmittedSequence>> admitted) {
      if (admitted.ok() && (*admitted)[0].status.ok()) open->push_back({(*admitted)[0].id, content});
      done.Notify();
    });
    done.WaitForNotification();
  }

  // Stores rows [first, first + count) of the sequence; the content of a position never changes.
  static void Store(Session& session, const OpenSequence& sequence, int64_t first, int64_t count,
                    absl::AnyInvocable<void() &&> done) {
    auto call = std::make_shared<StoreCall>();
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t row = first; row < first + count; ++row) call->rows += RowBytes(sequence.content, row, layer);
    }
    StoreItem item;
    item.range = {sequence.id, first, count};
    item.rows = call->rows;
    session.Store({item}, {},
                  [call, done = std::move(done)](const absl::StatusOr<BatchResult>&) mutable { std::move(done)(); });
  }

  // A step of one sequence over positions that are stored. `done` gets the call, or null where it was refused.
  static void Step(Session& session, const OpenSequence& sequence, int64_t readable, std::mt19937_64& random,
                   absl::AnyInvocable<void(std::shared_ptr<StepCall>) &&> done) {
    auto call = std::make_shared<StepCall>();
    for (int64_t k = 0; k < kTopK; ++k) call->entries.push_back(static_cast<int32_t>(random() % (readable - 1)));
    call->hot_rows.resize(kTopK);
    call->counts.resize(kOutcomeCount);
    StepRowRequest row;
    row.id = sequence.id;
    row.length = readable;
    call->request.rows = {row};
    StepGroupRequest group;
    group.indices = call->entries;
    group.hot_rows = call->hot_rows.data();
    group.counts = call->counts.data();
    call->request.groups = {group};
    call->request.top_k = kTopK;
    session.Step(&call->request, [call, done = std::move(done)](const absl::StatusOr<StepResult>& result) mutable {
      const bool stepped = result.ok() && result->statuses[0].ok();
      std::move(done)(stepped ? std::move(call) : nullptr);
    });
  }

  void CheckHotRows(Session& session, const OpenSequence& sequence, const StepCall& call) {
    std::vector<uint32_t> rows;
    std::vector<int32_t> positions;
    for (int64_t k = 0; k < kTopK; ++k) {
      if (call.hot_rows[k] < 0) continue;
      rows.push_back(static_cast<uint32_t>(call.hot_rows[k]));
      positions.push_back(call.entries[k]);
    }
    if (rows.empty()) return;
    ReadRequest request;
    request.values = rows;
    request.id = sequence.id;
    request.hot_rows = true;
    std::string bytes(kLayers * rows.size() * kRowBytes, '\0');
    absl::Notification done;
    bool read = false;
    session.Read(request, bytes.data(), [&](const absl::StatusOr<uint64_t>& result) {
      read = result.ok();
      done.Notify();
    });
    done.WaitForNotification();
    if (!read) return;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (size_t i = 0; i < rows.size(); ++i) {
        const size_t at = (static_cast<size_t>(layer) * rows.size() + i) * kRowBytes;
        ASSERT_EQ(bytes.substr(at, kRowBytes), RowBytes(sequence.content, positions[i], layer));
        checked_.fetch_add(1, std::memory_order_relaxed);
      }
    }
  }

  // Rows of the sequence that the session may name.
  static int64_t Readable(const Session& session, const OpenSequence& sequence) {
    const auto tables = session.BlockTables({sequence.id});
    return tables.ok() && (*tables)[0].ok() ? (*tables)[0]->readable_rows : 0;
  }

  void Work(int thread) {
    std::mt19937_64 random(static_cast<uint64_t>(thread) + 1);
    for (int life = 0; life < kSessionsOfAThread; ++life) {
      absl::Notification ended;
      const std::shared_ptr<Session> session = Attach(absl::StrCat("s", thread), &ended);
      ASSERT_NE(session, nullptr);
      std::vector<OpenSequence> open;
      std::atomic<int> running{0};
      const int operations = static_cast<int>(5 + random() % 25);
      for (int i = 0; i < operations; ++i) {
        if (open.empty() || (open.size() < 4 && random() % 4 == 0)) {
          Admit(*session, static_cast<int>(random() % kContents), &open);
          continue;
        }
        const OpenSequence& sequence = open[random() % open.size()];
        const int64_t readable = Readable(*session, sequence);
        switch (random() % 4) {
          case 0: {
            // What is missing, or something again: as the writer; other sessions are refused.
            const int64_t first =
                readable < kMaxRows && random() % 2 == 0 ? readable : static_cast<int64_t>(random() % 32);
            running.fetch_add(1);
            Store(*session, sequence, first,
                  1 + static_cast<int64_t>(random() % std::min<int64_t>(24, kMaxRows - first)),
                  [&running] { running.fetch_sub(1); });
            break;
          }
          case 1:
          case 2: {
            if (readable < 2) break;
            absl::Notification done;
            std::shared_ptr<StepCall> stepped;
            Step(*session, sequence, readable, random, [&](std::shared_ptr<StepCall> call) {
              stepped = std::move(call);
              done.Notify();
            });
            done.WaitForNotification();
            if (stepped != nullptr) CheckHotRows(*session, sequence, *stepped);
            break;
          }
          default: {
            if (random() % 3 != 0) break;
            absl::Notification done;
            session->Release({sequence.id}, [&](const absl::StatusOr<BatchResult>&) { done.Notify(); });
            done.WaitForNotification();
            open.erase(open.begin() + (&sequence - open.data()));
          }
        }
      }
      // Steps that are under way when the session ends.
      for (const OpenSequence& sequence : open) {
        const int64_t readable = Readable(*session, sequence);
        if (readable < 2) continue;
        running.fetch_add(1);
        Step(*session, sequence, readable, random,
             [&running](const std::shared_ptr<StepCall>&) { running.fetch_sub(1); });
      }
      EXPECT_TRUE(registry_->EndSession(session->id(), absl::OkStatus(), /*retain=*/random() % 2 == 0).ok());
      ended.WaitForNotification();
      while (running.load() != 0) std::this_thread::yield();
    }
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Registry> registry_;
  std::atomic<int64_t> checked_{0};
};

TEST_F(SessionThreadsTest, NoHotRowHoldsAnothersBytes) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back([this, thread] { Work(thread); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%lld rows checked\n", static_cast<long long>(checked_.load()));
  EXPECT_GT(checked_.load(), 20000);
  const std::vector<std::shared_ptr<PoolEntry>> pools = registry_->Pools();
  ASSERT_EQ(pools.size(), 1u);
  EXPECT_TRUE(pools[0]->pool.CheckInvariants().ok()) << pools[0]->pool.CheckInvariants();
  // The account follows the end of the last session.
  for (int i = 0; i < 1000 && registry_->Usage().hot_bytes != 0; ++i) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(registry_->Usage().sessions, 0);
  EXPECT_EQ(registry_->Usage().hot_bytes, 0);
}

}  // namespace
}  // namespace stoker::core
