// The result of a replay, added up over its ranks, as a table for people and as a JSON object.
//
// Thread safety: values and free functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/replay/rank_report.h"
#include "client/replay/trace.h"

namespace stoker::replay {

struct ReplayResult {
  // Matched prefix blocks of all prefix blocks, partial ones at the end counted as one; and the same in tokens.
  double prefix_hit_ratio() const { return Ratio(totals.matched_blocks.get(), totals.prefix_blocks.get()); }
  double prefix_token_hit_ratio() const { return Ratio(totals.matched_rows.get(), totals.input_rows.get()); }
  // Hits of the lookups that had to be in a hot buffer.
  double hot_hit_ratio() const { return Ratio(totals.hot.get(), totals.hot.get() + totals.miss.get()); }
  double step_mean_us() const { return Ratio(totals.step_ns.get(), totals.steps.get()) / 1e3; }
  uint64_t committed_bytes() const { return totals.output_rows.get() * row_bytes; }

  static double Ratio(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
  }

  RankReport totals;
  double seconds = 0;
  uint64_t row_bytes = 0;  // of all layers
  // The fewest rows that a pool with room for everything can get along with.
  uint64_t distinct_rows = 0;
  std::string index_space;
  std::string workload_model;
};

// Adds one rank's figures to the totals.
void AddReport(const RankReport& report, RankReport* totals);

// Rows that must be stored when nothing is evicted: each prefix block once, everything else for each request.
uint64_t DistinctRows(const std::vector<Request>& requests, bool with_outputs);

// Lines that end with '\n'.
std::string FormatTable(const ReplayResult& result);
// One line without '\n'.
std::string FormatJson(const ReplayResult& result);

// 1234567 -> "1,234,567".
std::string FormatCount(uint64_t count);
// "1.25 GB", powers of 1000.
std::string FormatBytes(double bytes);
// "812 us", "3.46 ms", "1.20 s".
std::string FormatNs(uint64_t ns);

}  // namespace stoker::replay
