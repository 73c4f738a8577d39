// Results as JSON, one object a line, and the targets that they are held to.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tests/bench/samples.h"

namespace stoker::bench {

// One object. Values are added in order.
class Line {
 public:
  explicit Line(absl::string_view name) { Text("name", name); }
  Line& Text(absl::string_view key, absl::string_view value);
  Line& Int(absl::string_view key, int64_t value);
  // Three decimals.
  Line& Real(absl::string_view key, double value);
  Line& Bool(absl::string_view key, bool value);
  // calls, p50_us and p99_us.
  Line& Times(const Samples& samples);
  std::string json() const { return "{" + members_ + "}"; }

 private:
  Line& Add(absl::string_view key, absl::string_view json);
  std::string members_;
};

class Report {
 public:
  // `quick` says that figures mean nothing: targets are then not judged.
  Report(std::ostream* out, bool quick) : out_(*out), quick_(quick) {}

  void Write(const Line& line);
  // Adds "target" and "met" to the line and writes it.
  void WriteAtMost(Line line, absl::string_view key, double value, double limit);
  void WriteAtLeast(Line line, absl::string_view key, double value, double limit);

  const std::vector<std::string>& missed() const { return missed_; }
  // Whether every line written is a JSON object with a name.
  absl::Status CheckLines() const;

 private:
  void Judge(Line line, absl::string_view key, double value, double limit, bool met);

  std::ostream& out_;
  const bool quick_;
  std::vector<std::string> lines_;
  std::vector<std::string> missed_;
};

}  // namespace stoker::bench
