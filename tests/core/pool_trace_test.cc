// Prefix reuse of whole traces against a plain LRU list of prefix blocks.
//
// A trace is replayed one request after the other: Admit, write what did not match, Close. The share of prefix blocks
// that match (partial ones count as one) must be that of a list of the most recently used prefix blocks with as many
// places as the pool has prefix blocks. The pool may differ a little: partial prefix blocks take fewer blocks, copies
// take one more.
//
// STOKER_SHARED: a folder with traces/conversation_trace.jsonl; its figures are checked where the variable is set.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <list>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "gtest/gtest.h"
#include "server/core/pool.h"
#include "tests/core/pool_fixture.h"

namespace stoker::core {
namespace {

constexpr int64_t kBlockRows = 64;
constexpr int64_t kPrefixRows = 512;

struct Request {
  int64_t rows = 0;
  std::vector<uint64_t> prefix_blocks;  // equal numbers: equal rows, and equal ones before them
};

// Share of prefix blocks found in a list of the `capacity` most recently used ones.
double LruRatio(const std::vector<Request>& trace, size_t capacity) {
  std::list<uint64_t> recent;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> places;
  int64_t matched = 0;
  int64_t all = 0;
  for (const Request& request : trace) {
    bool prefix = true;
    for (const uint64_t block : request.prefix_blocks) {
      prefix = prefix && places.contains(block);
      matched += prefix;
      ++all;
    }
    // The tail first, so that the head is the most recent one.
    for (auto block = request.prefix_blocks.rbegin(); block != request.prefix_blocks.rend(); ++block) {
      if (const auto found = places.find(*block); found != places.end()) recent.erase(found->second);
      recent.push_front(*block);
      places[*block] = recent.begin();
    }
    for (; places.size() > capacity; recent.pop_back()) places.erase(recent.back());
  }
  return static_cast<double>(matched) / static_cast<double>(all);
}

double PoolRatio(const std::vector<Request>& trace, int64_t capacity) {
  Pool pool(SmallSpec(capacity * kPrefixRows / kBlockRows, kBlockRows, kPrefixRows), absl::ZeroDuration());
  const SequenceLimits limits{INT32_MAX, INT32_MAX};
  int64_t matched = 0;
  int64_t all = 0;
  for (const Request& request : trace) {
    AdmitParams params;
    params.prompt_rows = params.max_rows = request.rows;
    for (const uint64_t block : request.prefix_blocks) params.hashes.push_back({{block, 1}});
    const absl::StatusOr<Admission> a = pool.Admit({1}, limits, std::move(params));
    if (!a.ok()) {
      ADD_FAILURE() << a.status();
      return 0;
    }
    all += static_cast<int64_t>(request.prefix_blocks.size());
    matched += (a->matched_rows + kPrefixRows - 1) / kPrefixRows;
    pool.FinishCopies(a->id);
    if (a->matched_rows < request.rows) {
      EXPECT_TRUE(pool.BeginWrite({1}, a->id, a->matched_rows, request.rows - a->matched_rows).ok());
      pool.FinishWrite(a->id, a->matched_rows, request.rows - a->matched_rows);
    }
    EXPECT_TRUE(pool.Close({1}, a->id, false, absl::UnixEpoch()).ok());
  }
  EXPECT_EQ(pool.CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(pool.counters().evicted_while_referenced, 0u);
  return static_cast<double>(matched) / static_cast<double>(all);
}

// Conversations that go on: each turn's prompt is the one before and something new.
std::vector<Request> Conversations(uint64_t seed, int64_t requests) {
  std::mt19937_64 random(seed);
  std::vector<Request> open(60);
  std::vector<Request> trace;
  uint64_t unique = 0;
  for (int64_t i = 0; i < requests; ++i) {
    Request& conversation = open[random() % 5 == 0 ? random() % open.size() : random() % 12];
    if (random() % 12 == 0 || conversation.rows > 40000) conversation = Request();
    if (conversation.prefix_blocks.empty()) conversation.prefix_blocks.push_back(random() % 3);  // a system prompt
    // A partial block at the end is another one when it has grown.
    if (conversation.rows % kPrefixRows != 0) conversation.prefix_blocks.pop_back();
    conversation.rows = std::max(conversation.rows, kPrefixRows) + 1 + static_cast<int64_t>(random() % 4000);
    while (static_cast<int64_t>(conversation.prefix_blocks.size()) * kPrefixRows < conversation.rows) {
      conversation.prefix_blocks.push_back(1000 + ++unique);
    }
    trace.push_back(conversation);
    if (random() % 8 == 0) trace.push_back(conversation);
  }
  return trace;
}

TEST(PoolTraceTest, GeneratedConversations) {
  for (const uint64_t seed : {1, 2, 3}) {
    const std::vector<Request> trace = Conversations(seed, 3000);
    for (const int64_t capacity : {100, 300, 1000, 3000, 100000}) {
      EXPECT_NEAR(PoolRatio(trace, capacity), LruRatio(trace, static_cast<size_t>(capacity)), 0.01)
          << "seed " << seed << ", capacity " << capacity;
    }
  }
}

// Fields of the trace's lines; the file is generated, so a search for the names suffices.
Request ParseLine(const std::string& line) {
  Request request;
  const size_t rows = line.find("\"input_length\": ");
  const size_t ids = line.find("\"hash_ids\": [");
  if (rows == std::string::npos || ids == std::string::npos) return request;
  request.rows = std::atoll(line.c_str() + rows + 16);
  const char* at = line.c_str() + ids + 13;
  while (*at != '\0' && *at != ']') {
    char* end;
    request.prefix_blocks.push_back(std::strtoull(at, &end, 10));
    for (at = end; *at == ',' || *at == ' '; ++at) {
    }
  }
  return request;
}

TEST(PoolTraceTest, ConversationTrace) {
  const char* shared = std::getenv("STOKER_SHARED");
  if (shared == nullptr) {
    std::printf("STOKER_SHARED is not set: only the generated traces are checked\n");
    return;
  }
  std::ifstream file(std::string(shared) + "/traces/conversation_trace.jsonl");
  ASSERT_TRUE(file.is_open());
  std::vector<Request> trace;
  for (std::string line; std::getline(file, line);) {
    trace.push_back(ParseLine(line));
    const Request& request = trace.back();
    ASSERT_EQ(static_cast<int64_t>(request.prefix_blocks.size()), (request.rows + kPrefixRows - 1) / kPrefixRows);
  }
  ASSERT_EQ(trace.size(), 12031u);
  const struct {
    int64_t capacity;
    double ratio;
  } expected[] = {{1000, .045},  {5000, .112},   {10000, .212}, {30000, .326},
                  {50000, .355}, {100000, .364}, {400000, .366}};
  for (const auto& [capacity, ratio] : expected) {
    const double pool = PoolRatio(trace, capacity);
    const double lru = LruRatio(trace, static_cast<size_t>(capacity));
    std::printf("%lld prefix blocks: %.3f matched, plain LRU %.3f\n", static_cast<long long>(capacity), pool, lru);
    EXPECT_NEAR(pool, ratio, 0.01) << capacity;
    EXPECT_NEAR(lru, ratio, 0.002) << capacity;
  }
}

}  // namespace
}  // namespace stoker::core
