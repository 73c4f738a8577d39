// Text for people: aligned tables, sizes, spans of time.
//
// Thread safety: values without shared state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace stoker::client {

// 0 B, 1023 B, 1.0 KiB, 37.5 GiB
std::string BytesText(uint64_t bytes);
// 850ms, 59s, 3m 20s, 5h 0m, 12d 4h
std::string SpanText(absl::Duration span);
// "45.0%", or "-" of nothing.
std::string ShareText(uint64_t part, uint64_t whole);
// Text that came over the wire: control characters become escapes, so that a name cannot drive the terminal.
std::string PlainText(absl::string_view text);

// Rows of cells below a header; columns are as wide as their widest cell, numbers to the right.
class Table {
 public:
  enum class Align : uint8_t { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as there are columns.
  void Add(std::vector<std::string> cells);
  std::string ToString() const;

 private:
  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace stoker::client
