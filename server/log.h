// The log: one line an event on standard error, with a level, a message and fields.
//
//   text: 2026-01-02T03:04:05.678Z INFO session attached session=rank0 pool="a b"
//   json: {"time":"2026-01-02T03:04:05.678Z","level":"info","message":"session attached","session":"rank0","pool":"a
//   b"}
//
// Thread safety: any thread, at any time; lines do not mix, as each is one write(2).
//
// The sink (level, format, descriptor) is the process's only global state here: libraries log too, through functions
// without a context argument. It is set once at start; before, events of level info and above go to standard error as
// text.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "absl/strings/string_view.h"

namespace stoker::server {

enum class LogLevel : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat : uint8_t { kText, kJson };

// Names as in the configuration; nothing for other names.
std::optional<LogLevel> ParseLogLevel(std::string_view name);
std::optional<LogFormat> ParseLogFormat(std::string_view name);

// A field's value: a string, a number or a truth value. Strings are referred to, and must live until the call returns.
class LogValue {
 public:
  LogValue(std::string_view value) : value_(value) {}
  LogValue(const std::string& value) : value_(std::string_view(value)) {}
  LogValue(absl::string_view value) : value_(std::string_view(value.data(), value.size())) {}
  LogValue(const char* value) : value_(std::string_view(value)) {}
  LogValue(bool value) : value_(value) {}
  LogValue(std::floating_point auto value) : value_(static_cast<double>(value)) {}
  LogValue(std::signed_integral auto value) : value_(static_cast<int64_t>(value)) {}
  LogValue(std::unsigned_integral auto value) : value_(static_cast<uint64_t>(value)) {}

  const std::variant<std::string_view, bool, double, int64_t, uint64_t>& get() const { return value_; }

 private:
  std::variant<std::string_view, bool, double, int64_t, uint64_t> value_;
};

struct LogField {
  std::string_view key;  // [a-z0-9_]+
  LogValue value;
};

// Writes events. A string beyond 4,096 bytes is cut, with "..." in place of the rest.
class Log {
 public:
  Log() = delete;

  using Fields = std::initializer_list<LogField>;

  // Sets the sink, and routes what gRPC and Protobuf log into it (gRPC's own GRPC_VERBOSITY still filters).
  // `descriptor` stays the caller's and must stay open.
  static void Start(LogLevel level, LogFormat format, int descriptor = 2);
  static void SetLevel(LogLevel level);
  static bool Enabled(LogLevel level);

  static void Debug(std::string_view message, Fields fields = {}) { Write(LogLevel::kDebug, message, fields); }
  static void Info(std::string_view message, Fields fields = {}) { Write(LogLevel::kInfo, message, fields); }
  static void Warning(std::string_view message, Fields fields = {}) { Write(LogLevel::kWarning, message, fields); }
  static void Error(std::string_view message, Fields fields = {}) { Write(LogLevel::kError, message, fields); }
  static void Write(LogLevel level, std::string_view message, Fields fields);

  // Lines that could not be written whole: the descriptor was full, broken or closed.
  static uint64_t lost_lines();
};

}  // namespace stoker::server
