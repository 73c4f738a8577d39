#include "client/replay/report.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace stoker::replay {
namespace {

constexpr Counter RankReport::*kCounters[] = {
    &RankReport::requests,
    &RankReport::input_rows,
    &RankReport::output_rows,
    &RankReport::matched_rows,
    &RankReport::prefix_blocks,
    &RankReport::matched_blocks,
    &RankReport::stored_rows,
    &RankReport::unique_rows,
    &RankReport::stored_bytes,
    &RankReport::waits,
    &RankReport::steps,
    &RankReport::step_ns,
    &RankReport::gathered_bytes,
    &RankReport::hot,
    &RankReport::newest,
    &RankReport::resident,
    &RankReport::miss,
    &RankReport::duplicate,
    &RankReport::invalid,
    &RankReport::checked_rows,
    &RankReport::wrong_rows,
    &RankReport::checked_on_device,
    &RankReport::checked_on_host,
};

constexpr absl::string_view kAndOthers = " and others";

// What ranks have been told of one thing: the first of several, with a mark.
std::string Join(const std::string& before, const std::string& next) {
  if (before.empty()) return next;
  if (next.empty() || next == before || absl::EndsWith(before, kAndOthers)) return before;
  return absl::StrCat(before, kAndOthers);
}

}  // namespace

void AddReport(const RankReport& report, RankReport* totals) {
  for (const auto counter : kCounters) (totals->*counter).Add((report.*counter).get());
  for (int call = 0; call < kCalls; ++call) totals->calls[call].Merge(report.calls[call]);
  totals->created_pool |= report.created_pool;
  totals->shared_arena |= report.shared_arena;
  totals->SetWrongRow(report.wrong_row);
  totals->SetDevice(Join(totals->device, report.device));
  totals->SetPlane(Join(totals->plane, report.plane));
}

uint64_t DistinctRows(const std::vector<Request>& requests, bool with_outputs) {
  absl::flat_hash_set<uint64_t> seen;
  uint64_t rows = 0;
  for (const Request& request : requests) {
    for (size_t i = 0; i < request.hash_ids.size(); ++i) {
      if (!seen.insert(request.hash_ids[i]).second) continue;
      rows += std::min<uint64_t>(kPrefixBlockRows, request.input_rows - i * kPrefixBlockRows);
    }
    const uint64_t hashed = std::min<uint64_t>(request.input_rows, request.hash_ids.size() * kPrefixBlockRows);
    rows += request.input_rows - hashed + (with_outputs ? request.output_rows : 0);
  }
  return rows;
}

std::string FormatCount(uint64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string FormatBytes(double bytes) {
  if (bytes < 1000) return absl::StrFormat("%.0f B", bytes);
  const char* const units[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (bytes /= 1000; bytes >= 1000 && unit + 1 < std::size(units); ++unit) bytes /= 1000;
  return absl::StrFormat("%.2f %s", bytes, units[unit]);
}

std::string FormatNs(uint64_t ns) {
  const double value = static_cast<double>(ns);
  if (ns < 1'000'000) return absl::StrFormat("%.0f us", value / 1e3);
  if (ns < 1'000'000'000) return absl::StrFormat("%.2f ms", value / 1e6);
  return absl::StrFormat("%.2f s", value / 1e9);
}

std::string FormatTable(const ReplayResult& result) {
  const RankReport& totals = result.totals;
  std::string table;
  const auto line = [&](absl::string_view name, absl::string_view value) {
    absl::StrAppend(&table, absl::StrFormat("  %-18s %s\n", name, value));
  };
  const auto per_second = [&](uint64_t count) {
    return result.seconds > 0 ? static_cast<double>(count) / result.seconds : 0;
  };
  const uint64_t tokens = totals.input_rows.get() + totals.output_rows.get();
  line("requests", FormatCount(totals.requests.get()));
  line("tokens", absl::StrFormat("%s (%s prompt, %s output)", FormatCount(tokens), FormatCount(totals.input_rows.get()),
                                 FormatCount(totals.output_rows.get())));
  line("prefix hit ratio",
       absl::StrFormat("%.4f of blocks, %.4f of tokens", result.prefix_hit_ratio(), result.prefix_token_hit_ratio()));
  line("hot hit ratio",
       absl::StrFormat("%.4f (%s hot, %s missed, %s newest)", result.hot_hit_ratio(), FormatCount(totals.hot.get()),
                       FormatCount(totals.miss.get()), FormatCount(totals.newest.get())));
  line("bytes moved", absl::StrFormat("%s stored, %s committed, %s gathered",
                                      FormatBytes(static_cast<double>(totals.stored_bytes.get())),
                                      FormatBytes(static_cast<double>(result.committed_bytes())),
                                      FormatBytes(static_cast<double>(totals.gathered_bytes.get()))));
  line("rows stored", absl::StrFormat("%s (%s were not there before)", FormatCount(totals.stored_rows.get()),
                                      FormatCount(totals.unique_rows.get())));
  // Without steps there is no plane.
  const std::string on_plane =
      totals.plane[0] == '\0' ? ""
                              : absl::StrFormat("%.1f us each on the plane %s, ", result.step_mean_us(), totals.plane);
  line("steps", absl::StrFormat("%s (%.0f a second, %srows and entries %s)", FormatCount(totals.steps.get()),
                                per_second(totals.steps.get()), on_plane,
                                totals.shared_arena ? "in shared memory" : "in messages"));
  line("time", absl::StrFormat("%.1f s, %.0f tokens a second, %.0f decoded", result.seconds, per_second(tokens),
                               per_second(totals.output_rows.get())));
  line("device", totals.device);
  line("rows checked",
       FormatCount(totals.checked_rows.get()) + (totals.checked_on_device.get() == 0
                                                     ? ""
                                                     : absl::StrFormat(" (%s on the device, %s of them on the host)",
                                                                       FormatCount(totals.checked_on_device.get()),
                                                                       FormatCount(totals.checked_on_host.get()))));
  line("wrong rows", FormatCount(totals.wrong_rows.get()));
  if (totals.wrong_row[0] != '\0') line("first wrong row", totals.wrong_row);

  absl::StrAppend(&table, absl::StrFormat("\n  %-18s %12s %12s %12s\n", "call", "count", "p50", "p99"));
  for (int call = 0; call < kCalls; ++call) {
    const LatencyHistogram& histogram = totals.calls[call];
    if (histogram.count() == 0) continue;
    absl::StrAppend(&table, absl::StrFormat("  %-18s %12s %12s %12s\n", CallName(static_cast<Call>(call)),
                                            FormatCount(histogram.count()), FormatNs(histogram.PercentileNs(0.5)),
                                            FormatNs(histogram.PercentileNs(0.99))));
  }
  return table;
}

std::string FormatJson(const ReplayResult& result) {
  const RankReport& totals = result.totals;
  std::string json = "{";
  const auto field = [&](absl::string_view name, absl::string_view value) {
    absl::StrAppend(&json, json.size() > 1 ? ", " : "", "\"", name, "\": ", value);
  };
  const auto count = [&](absl::string_view name, uint64_t value) { field(name, absl::StrCat(value)); };
  const auto real = [&](absl::string_view name, double value) { field(name, absl::StrFormat("%.6f", value)); };
  count("requests", totals.requests.get());
  count("input_tokens", totals.input_rows.get());
  count("output_tokens", totals.output_rows.get());
  real("prefix_hit_ratio", result.prefix_hit_ratio());
  real("prefix_token_hit_ratio", result.prefix_token_hit_ratio());
  real("hot_hit_ratio", result.hot_hit_ratio());
  field("device", absl::StrCat("\"", totals.device, "\""));
  count("checked_rows", totals.checked_rows.get());
  count("checked_rows_device", totals.checked_on_device.get());
  count("checked_rows_host", totals.checked_on_host.get());
  count("wrong_rows", totals.wrong_rows.get());
  count("stored_rows", totals.stored_rows.get());
  count("unique_rows", totals.unique_rows.get());
  count("distinct_rows", result.distinct_rows);
  count("steps", totals.steps.get());
  field("plane", absl::StrCat("\"", totals.plane, "\""));
  real("step_mean_us", result.step_mean_us());
  count("lookups_hot", totals.hot.get());
  count("lookups_newest", totals.newest.get());
  count("lookups_miss", totals.miss.get());
  count("lookups_duplicate", totals.duplicate.get());
  count("lookups_invalid", totals.invalid.get());
  count("stored_bytes", totals.stored_bytes.get());
  count("committed_bytes", result.committed_bytes());
  count("gathered_bytes", totals.gathered_bytes.get());
  count("waits", totals.waits.get());
  field("shared_memory", totals.shared_arena ? "true" : "false");
  field("index_space", absl::StrCat("\"", result.index_space, "\""));
  field("workload_model", absl::StrCat("\"", result.workload_model, "\""));
  for (int call = 0; call < kCalls; ++call) {
    const LatencyHistogram& histogram = totals.calls[call];
    const std::string name = absl::AsciiStrToLower(CallName(static_cast<Call>(call)));
    count(absl::StrCat(name, "_calls"), histogram.count());
    real(absl::StrCat(name, "_p50_us"), static_cast<double>(histogram.PercentileNs(0.5)) / 1e3);
    real(absl::StrCat(name, "_p99_us"), static_cast<double>(histogram.PercentileNs(0.99)) / 1e3);
  }
  real("seconds", result.seconds);
  return json + "}";
}

}  // namespace stoker::replay
