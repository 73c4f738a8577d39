#include "server/log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::server {
namespace {

constexpr size_t kMaxStringBytes = 4096;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Sink {
  std::atomic<LogLevel> level{LogLevel::kInfo};
  std::atomic<LogFormat> format{LogFormat::kText};
  std::atomic<int> descriptor{2};
  std::atomic<uint64_t> lost_lines{0};
};
constinit Sink sink;

constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error"};
constexpr const char* kTextLevels[] = {"DEBUG", "INFO", "WARNING", "ERROR"};

// Bytes of the UTF-8 character at the start of `text`, or 0 if none is there: overlong forms, surrogates and values
// beyond U+10FFFF are none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](size_t i, unsigned low = 0x80, unsigned high = 0xBF) {
    return i < text.size() && byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    return continues(1, first == 0xE0 ? 0xA0 : 0x80, first == 0xED ? 0x9F : 0xBF) && continues(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    return continues(1, first == 0xF0 ? 0x90 : 0x80, first == 0xF4 ? 0x8F : 0xBF) && continues(2) && continues(3) ? 4
                                                                                                                  : 0;
  }
  return 0;
}

// Appends a string so that it stays on its line and is valid UTF-8. `quoted`: it stands between quotes.
void AppendEscaped(std::string_view text, LogFormat format, bool quoted, std::string* out) {
  const bool cut = text.size() > kMaxStringBytes;
  if (cut) text = text.substr(0, kMaxStringBytes - 3);
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const char c = text.front();
    if (bytes == 0) {
      // A character that the cut went through is left out.
      if (!cut || text.size() > 3) out->append(kReplacement);
    } else if (bytes > 1) {
      out->append(text.substr(0, bytes));
    } else if (c == '\n') {
      out->append("\\n");
    } else if (c == '\t') {
      out->append("\\t");
    } else if (c == '\r') {
      out->append("\\r");
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      absl::StrAppendFormat(out, format == LogFormat::kJson ? "\\u%04x" : "\\x%02x", c);
    } else {
      if (quoted && (c == '"' || c == '\\')) out->push_back('\\');
      out->push_back(c);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  if (cut) out->append("...");
}

void AppendString(std::string_view text, LogFormat format, std::string* out) {
  bool quoted = format == LogFormat::kJson || text.empty();
  for (char c : text) quoted = quoted || static_cast<unsigned char>(c) <= ' ' || strchr("\"\\=\x7F", c) != nullptr;
  if (quoted) out->push_back('"');
  AppendEscaped(text, format, quoted, out);
  if (quoted) out->push_back('"');
}

void AppendValue(const LogValue& value, LogFormat format, std::string* out) {
  struct Visitor {
    LogFormat format;
    std::string* out;
    void operator()(std::string_view text) const { AppendString(text, format, out); }
    void operator()(bool truth) const { out->append(truth ? "true" : "false"); }
    void operator()(int64_t number) const { absl::StrAppend(out, number); }
    void operator()(uint64_t number) const { absl::StrAppend(out, number); }
    void operator()(double number) const {
      // JSON knows no infinity and no NaN.
      if (format == LogFormat::kJson && !std::isfinite(number)) return out->append("null"), void();
      absl::StrAppendFormat(out, "%.9g", number);
    }
  };
  std::visit(Visitor{format, out}, value.get());
}

std::string FormatLine(LogLevel level, LogFormat format, std::string_view message, Log::Fields fields) {
  const std::string time = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  std::string line;
  line.reserve(256);
  if (format == LogFormat::kText) {
    absl::StrAppend(&line, time, " ", kTextLevels[static_cast<int>(level)], " ");
    AppendEscaped(message, format, false, &line);
    for (const LogField& field : fields) {
      line.push_back(' ');
      line.append(field.key);
      line.push_back('=');
      AppendValue(field.value, format, &line);
    }
  } else {
    absl::StrAppend(&line, "{\"time\":\"", time, "\",\"level\":\"", kLevelNames[static_cast<int>(level)],
                    "\",\"message\":");
    AppendString(message, format, &line);
    for (const LogField& field : fields) {
      line.push_back(',');
      AppendString(field.key, format, &line);
      line.push_back(':');
      AppendValue(field.value, format, &line);
    }
    line.push_back('}');
  }
  line.push_back('\n');
  return line;
}

// "file.cc:12" without the folders of the machine on which a library was built.
std::string SourcePlace(const char* file, int line) {
  const char* slash = strrchr(file, '/');
  return absl::StrCat(slash == nullptr ? file : slash + 1, ":", line);
}

void WriteFromGrpc(gpr_log_func_args* args) {
  const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kError
                         : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                   : LogLevel::kDebug;
  Log::Write(level, args->message, {{"library", "grpc"}, {"source", SourcePlace(args->file, args->line)}});
}

void WriteFromProtobuf(google::protobuf::LogLevel severity, const char* file, int line, const std::string& message) {
  const LogLevel level = severity >= google::protobuf::LOGLEVEL_ERROR     ? LogLevel::kError
                         : severity == google::protobuf::LOGLEVEL_WARNING ? LogLevel::kWarning
                                                                          : LogLevel::kInfo;
  Log::Write(level, message, {{"library", "protobuf"}, {"source", SourcePlace(file, line)}});
}

}  // namespace

std::optional<LogLevel> ParseLogLevel(std::string_view name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

std::optional<LogFormat> ParseLogFormat(std::string_view name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return std::nullopt;
}

void Log::Start(LogLevel level, LogFormat format, int descriptor) {
  sink.format = format;
  sink.descriptor = descriptor;
  sink.level = level;
  gpr_set_log_function(&WriteFromGrpc);
  google::protobuf::SetLogHandler(&WriteFromProtobuf);
}

void Log::SetLevel(LogLevel level) { sink.level.store(level, std::memory_order_relaxed); }

bool Log::Enabled(LogLevel level) { return level >= sink.level.load(std::memory_order_relaxed); }

void Log::Write(LogLevel level, std::string_view message, Fields fields) {
  if (!Enabled(level)) return;
  const int saved_errno = errno;  // so that a caller may log before it reads errno
  const std::string line = FormatLine(level, sink.format.load(), message, fields);
  ssize_t written;
  do {
    written = write(sink.descriptor.load(), line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  // What is left of a half-written line is not tried again: it could only end up behind another thread's line.
  if (written != static_cast<ssize_t>(line.size())) sink.lost_lines.fetch_add(1, std::memory_order_relaxed);
  errno = saved_errno;
}

uint64_t Log::lost_lines() { return sink.lost_lines.load(); }

}  // namespace stoker::server
