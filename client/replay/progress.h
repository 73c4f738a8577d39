// Shows how far a replay is: a bar that is redrawn on a terminal, or a line now and then.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace stoker::replay {

struct ProgressFigures {
  uint64_t done = 0;  // of `all`
  uint64_t all = 0;
  const char* unit = "requests";
  uint64_t input_rows = 0;  // of requests that were admitted
  uint64_t output_rows = 0;
  uint64_t moved_bytes = 0;
};

class Progress {
 public:
  enum class Style : uint8_t { kBar, kLines, kNone };
  // "auto" is kBar when standard error is a terminal, otherwise kLines.
  static Style ChooseStyle(const std::string& option);

  Progress(Style style, absl::Time start) : style_(style), start_(start), last_(start), shown_(start) {}

  // Writes to standard error, where it is time to.
  void Show(const ProgressFigures& figures, absl::Time now);
  // Writes the last figures, with the rates of the whole time, and ends the line.
  void Finish(const ProgressFigures& figures, absl::Time now);

  // What is shown. `before` are the figures of `interval` ago, for the rates.
  static std::string Format(const ProgressFigures& figures, const ProgressFigures& before, absl::Duration interval,
                            absl::Duration elapsed, bool bar);

 private:
  void Write(const std::string& text, bool last);

  const Style style_;
  const absl::Time start_;
  absl::Time last_;   // when rates were taken last
  absl::Time shown_;  // when something was written last
  ProgressFigures before_;
};

}  // namespace stoker::replay
