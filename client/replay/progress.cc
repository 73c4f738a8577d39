#include "client/replay/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/replay/report.h"

namespace stoker::replay {
namespace {

constexpr absl::Duration kBarInterval = absl::Milliseconds(250);
constexpr absl::Duration kLineInterval = absl::Seconds(10);
// Rates are over at least this time, so that they can be read.
constexpr absl::Duration kRateInterval = absl::Seconds(1);
constexpr int kBarWidth = 24;

double PerSecond(uint64_t now, uint64_t before, absl::Duration interval) {
  const double seconds = absl::ToDoubleSeconds(interval);
  return seconds > 0 ? static_cast<double>(now - before) / seconds : 0;
}

}  // namespace

Progress::Style Progress::ChooseStyle(const std::string& option) {
  if (option == "bar") return Style::kBar;
  if (option == "lines") return Style::kLines;
  if (option == "none") return Style::kNone;
  return isatty(STDERR_FILENO) != 0 ? Style::kBar : Style::kLines;
}

std::string Progress::Format(const ProgressFigures& figures, const ProgressFigures& before, absl::Duration interval,
                             absl::Duration elapsed, bool bar) {
  const double done = figures.all == 0 ? 1 : static_cast<double>(figures.done) / static_cast<double>(figures.all);
  std::string text;
  if (bar) {
    const int filled = static_cast<int>(done * kBarWidth);
    text = absl::StrCat("[", std::string(static_cast<size_t>(filled), '#'),
                        std::string(static_cast<size_t>(kBarWidth - filled), '.'), "] ");
  }
  absl::StrAppendFormat(
      &text, "%3.0f %%  %s/%s %s  %.1f s  %s prompt, %s decoded tokens/s  %s/s", done * 100, FormatCount(figures.done),
      FormatCount(figures.all), figures.unit, absl::ToDoubleSeconds(elapsed),
      FormatCount(static_cast<uint64_t>(PerSecond(figures.input_rows, before.input_rows, interval))),
      FormatCount(static_cast<uint64_t>(PerSecond(figures.output_rows, before.output_rows, interval))),
      FormatBytes(PerSecond(figures.moved_bytes, before.moved_bytes, interval)));
  return text;
}

void Progress::Write(const std::string& text, bool last) {
  if (style_ == Style::kBar) {
    std::fprintf(stderr, "\r%s\033[K%s", text.c_str(), last ? "\n" : "");
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void Progress::Show(const ProgressFigures& figures, absl::Time now) {
  if (style_ == Style::kNone || now - shown_ < (style_ == Style::kBar ? kBarInterval : kLineInterval)) return;
  shown_ = now;
  Write(Format(figures, before_, now - last_, now - start_, style_ == Style::kBar), false);
  if (now - last_ >= kRateInterval) {
    last_ = now;
    before_ = figures;
  }
}

void Progress::Finish(const ProgressFigures& figures, absl::Time now) {
  if (style_ == Style::kNone) return;
  Write(Format(figures, ProgressFigures(), now - start_, now - start_, style_ == Style::kBar), true);
}

}  // namespace stoker::replay
