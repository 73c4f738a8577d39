#include "client/ctl_text.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stoker::client {
namespace {

// Code points, which is what a column of a terminal shows for the names that are allowed.
size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string BytesText(uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  for (; value >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string SpanText(absl::Duration span) {
  const int64_t ms = absl::ToInt64Milliseconds(span);
  const int64_t seconds = ms / 1000;
  if (ms < 1000) return absl::StrCat(ms, "ms");
  if (seconds < 60) return absl::StrCat(seconds, "s");
  if (seconds < 3600) return absl::StrCat(seconds / 60, "m ", seconds % 60, "s");
  if (seconds < 86400) return absl::StrCat(seconds / 3600, "h ", seconds / 60 % 60, "m");
  return absl::StrCat(seconds / 86400, "d ", seconds / 3600 % 24, "h");
}

std::string ShareText(uint64_t part, uint64_t whole) {
  if (whole == 0) return "-";
  return absl::StrFormat("%.1f%%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string PlainText(absl::string_view text) {
  if (text.empty()) return "-";
  return absl::Utf8SafeCHexEscape(text);
}

void Table::Add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(Width(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  std::string text;
  const auto append = [&](size_t i, const std::string& cell) {
    const std::string padding(widths[i] - Width(cell), ' ');
    const bool last = i + 1 == columns_.size();
    if (columns_[i].align == Align::kRight) {
      absl::StrAppend(&text, padding, cell);
    } else {
      absl::StrAppend(&text, cell, last ? "" : padding);
    }
    text += last ? "\n" : "  ";
  };
  for (size_t i = 0; i < columns_.size(); ++i) append(i, columns_[i].title);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) append(i, row[i]);
  }
  return text;
}

}  // namespace stoker::client
