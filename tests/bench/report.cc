#include "tests/bench/report.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stoker::bench {
namespace {

std::string Quoted(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", static_cast<unsigned>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace

Line& Line::Add(absl::string_view key, absl::string_view json) {
  absl::StrAppend(&members_, members_.empty() ? "" : ", ", Quoted(key), ": ", json);
  return *this;
}

Line& Line::Text(absl::string_view key, absl::string_view value) { return Add(key, Quoted(value)); }
Line& Line::Int(absl::string_view key, int64_t value) { return Add(key, absl::StrCat(value)); }
Line& Line::Real(absl::string_view key, double value) { return Add(key, absl::StrFormat("%.3f", value)); }
Line& Line::Bool(absl::string_view key, bool value) { return Add(key, value ? "true" : "false"); }

Line& Line::Times(const Samples& samples) {
  return Int("calls", static_cast<int64_t>(samples.count()))
      .Real("p50_us", samples.p50())
      .Real("p99_us", samples.p99());
}

void Report::Write(const Line& line) {
  lines_.push_back(line.json());
  out_ << lines_.back() << std::endl;
}

void Report::WriteAtMost(Line line, absl::string_view key, double value, double limit) {
  Judge(std::move(line), key, value, limit, value <= limit);
}

void Report::WriteAtLeast(Line line, absl::string_view key, double value, double limit) {
  Judge(std::move(line), key, value, limit, value >= limit);
}

void Report::Judge(Line line, absl::string_view key, double value, double limit, bool met) {
  line.Real(key, value).Real("target", limit);
  if (!quick_) {
    line.Bool("met", met);
    if (!met) missed_.push_back(line.json());
  }
  Write(line);
}

absl::Status Report::CheckLines() const {
  for (const std::string& line : lines_) {
    google::protobuf::Struct object;
    const auto status = google::protobuf::util::JsonStringToMessage(line, &object);
    if (!status.ok() || !object.fields().contains("name")) {
      return absl::InternalError(absl::StrCat("not a JSON object with a name: ", line));
    }
  }
  return lines_.empty() ? absl::InternalError("no results") : absl::OkStatus();
}

}  // namespace stoker::bench
