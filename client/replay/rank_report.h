// What one engine rank tells the parent: counters while it runs, and how it ended. Lies in memory that both share.
//
// Thread safety: the rank writes; the parent reads the atomics at any time and the rest when the rank has exited.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/replay/latency_histogram.h"

namespace stoker::replay {

enum class Call : uint8_t { kAdmit, kStore, kStep, kRead, kRelease };
inline constexpr int kCalls = 5;
const char* CallName(Call call);

// Written by one thread, so that a load and a store do instead of a locked addition.
class Counter {
 public:
  void Add(uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

struct RankReport {
  // Keeps the first failure.
  void SetError(const absl::Status& status);
  void SetDevice(const std::string& name);
  void SetPlane(const std::string& name);
  // Keeps the first wrong row.
  void SetWrongRow(const char* text);

  // Requests, by the rank that stores.
  Counter requests;
  Counter input_rows;
  Counter output_rows;
  Counter matched_rows;
  Counter prefix_blocks;
  Counter matched_blocks;
  Counter stored_rows;  // from replies: rows that Store wrote and steps committed
  Counter unique_rows;  // what had to be stored: unmatched prompt rows and outputs
  Counter stored_bytes;
  Counter waits;  // admissions that had to wait for room

  // Steps, by every rank.
  Counter steps;
  Counter step_ns;  // in calls, or from the begin of a plane's step to its end but for the check between
  Counter gathered_bytes;
  Counter hot, newest, resident, miss, duplicate, invalid;
  Counter checked_rows;       // each once, wherever it was compared
  Counter checked_on_device;  // by a kernel
  Counter checked_on_host;    // by the host's oracle: a sample of what a kernel compared, or all
  Counter wrong_rows;

  LatencyHistogram calls[kCalls];
  bool created_pool = false;
  bool shared_arena = false;
  char device[64] = {};  // of the session: "cpu" or a UUID
  char plane[32] = {};   // of its steps: "rpc", "server" or "direct"
  bool failed = false;
  bool peer_gone = false;  // failed because another rank had ended
  char error[1024] = {};
  char wrong_row[320] = {};
};

}  // namespace stoker::replay
