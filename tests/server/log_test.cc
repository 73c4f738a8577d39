#include "server/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/server/temporary_folder.h"

namespace stoker::server {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr char kTime[] = "2[0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\\.[0-9][0-9][0-9]Z";

// A flat JSON object, read strictly: strings without their quotes and escapes, other values as they are written. Empty
// if the text is anything else. Protobuf's own reader is no help: its Struct holds a map, whose layout in Debian's
// library is not that of a program built for ThreadSanitizer.
class FlatJson {
 public:
  explicit FlatJson(absl::string_view text) : rest_(text) {
    if (!ReadObject() || !rest_.empty()) values_.clear();
  }

  const std::map<std::string, std::string>& values() const { return values_; }
  std::string at(const std::string& key) const {
    const auto it = values_.find(key);
    return it == values_.end() ? absl::StrCat("no ", key) : it->second;
  }

 private:
  bool Skip(absl::string_view text) { return absl::ConsumePrefix(&rest_, text); }

  bool ReadObject() {
    if (!Skip("{")) return false;
    do {
      std::string key, value;
      if (!ReadString(&key) || !Skip(":") || !(ReadString(&value) || ReadWord(&value))) return false;
      if (!values_.emplace(key, value).second) return false;
    } while (Skip(","));
    return Skip("}\n");
  }

  bool ReadString(std::string* out) {
    if (!Skip("\"")) return false;
    while (!Skip("\"")) {
      if (rest_.empty() || static_cast<unsigned char>(rest_[0]) < 0x20) return false;
      if (Skip("\\u")) {
        int code = 0;
        if (rest_.size() < 4 || !absl::SimpleHexAtoi(rest_.substr(0, 4), &code) || code >= 0x80) return false;
        out->push_back(static_cast<char>(code));
        rest_.remove_prefix(4);
      } else if (Skip("\\n") || Skip("\\t") || Skip("\\r")) {
        const char letter = *(rest_.data() - 1);
        out->push_back(letter == 'n' ? '\n' : letter == 't' ? '\t' : '\r');
      } else {
        if (Skip("\\") && !absl::StartsWith(rest_, "\"") && !absl::StartsWith(rest_, "\\")) return false;
        out->push_back(rest_[0]);
        rest_.remove_prefix(1);
      }
    }
    return true;
  }

  bool ReadWord(std::string* out) {
    *out = std::string(rest_.substr(0, rest_.find_first_of(",}")));
    rest_.remove_prefix(out->size());
    double number = 0;
    return *out == "true" || *out == "false" || *out == "null" ||
           (out->find_first_not_of("0123456789.e+-") == std::string::npos && absl::SimpleAtod(*out, &number));
  }

  absl::string_view rest_;
  std::map<std::string, std::string> values_;
};

// Reads the log from a socket that keeps the bounds of each write(2).
class LogTest : public ::testing::Test {
 protected:
  LogTest() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, sockets_), 0);
    Start(LogFormat::kText);
  }
  ~LogTest() override {
    Log::Start(LogLevel::kInfo, LogFormat::kText);
    close(sockets_[0]);
    close(sockets_[1]);
  }

  void Start(LogFormat format, LogLevel level = LogLevel::kInfo) { Log::Start(level, format, sockets_[1]); }

  // What one write(2) wrote; empty if nothing was written.
  std::string Read() {
    std::string line(1 << 16, '\0');
    const ssize_t size = recv(sockets_[0], line.data(), line.size(), 0);
    line.resize(size < 0 ? 0 : size);
    return line;
  }

  // The line without its time, level and end.
  std::string ReadRest() {
    const std::vector<std::string> parts = absl::StrSplit(Read(), absl::MaxSplits(' ', 2));
    if (parts.size() < 3) return "";
    EXPECT_THAT(parts[2], EndsWith("\n"));
    return parts[2].substr(0, parts[2].size() - 1);
  }

  FlatJson ReadJson() {
    const std::string line = Read();
    FlatJson object(line);
    EXPECT_FALSE(object.values().empty()) << line;
    return object;
  }

  int sockets_[2];
};

TEST_F(LogTest, TextLineHasTimeLevelMessageAndFields) {
  Log::Info("session attached", {{"session", "rank0"}, {"pool", "a b"}, {"count", 3}});
  EXPECT_THAT(Read(), MatchesRegex(absl::StrCat(kTime, " INFO session attached session=rank0 pool=\"a b\" count=3\n")));
  EXPECT_EQ(Read(), "");
}

TEST_F(LogTest, JsonLineIsAnObject) {
  Start(LogFormat::kJson);
  Log::Warning("a \"b\"\n\x01", {{"text", "x\\y"}, {"yes", true}, {"number", -5}, {"real", 0.25}});
  const FlatJson object = ReadJson();
  EXPECT_THAT(object.at("time"), MatchesRegex(kTime));
  EXPECT_EQ(object.at("level"), "warning");
  EXPECT_EQ(object.at("message"), "a \"b\"\n\x01");
  EXPECT_EQ(object.at("text"), "x\\y");
  EXPECT_EQ(object.at("yes"), "true");
  EXPECT_EQ(object.at("number"), "-5");
  EXPECT_EQ(object.at("real"), "0.25");
}

TEST_F(LogTest, TextEscapesWhatCouldFakeALineOrAField) {
  Log::Info("two\nlines\t\r\x1b[31m",
            {{"a", ""}, {"b", "x=y"}, {"c", "q\"q"}, {"d", "b\\b"}, {"e", "n\nn"}, {"f", "ünï"}});
  EXPECT_EQ(ReadRest(), "two\\nlines\\t\\r\\x1b[31m a=\"\" b=\"x=y\" c=\"q\\\"q\" d=\"b\\\\b\" e=\"n\\nn\" f=ünï");
}

TEST_F(LogTest, ValuesOfAllTypes) {
  const std::string text = "text";
  Log::Info("m", {{"string", text},
                  {"view", std::string_view(text)},
                  {"absl_view", absl::string_view(text)},
                  {"temporary", absl::StrCat("te", "mp")},
                  {"false", false},
                  {"min", std::numeric_limits<int64_t>::min()},
                  {"max", std::numeric_limits<uint64_t>::max()},
                  {"byte", uint8_t{7}},
                  {"real", 1e-7},
                  {"infinity", std::numeric_limits<double>::infinity()}});
  EXPECT_EQ(ReadRest(),
            "m string=text view=text absl_view=text temporary=temp false=false min=-9223372036854775808 "
            "max=18446744073709551615 byte=7 real=1e-07 infinity=inf");
  Start(LogFormat::kJson);
  Log::Info("m", {{"infinity", std::numeric_limits<double>::infinity()}});
  EXPECT_EQ(ReadJson().at("infinity"), "null");
}

TEST_F(LogTest, InvalidUtf8IsReplaced) {
  Start(LogFormat::kJson);
  // A lone continuation byte, an overlong form, a surrogate, a value beyond U+10FFFF, a cut character; then good ones.
  for (const char* bad : {"\x80", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    Log::Info(absl::StrCat("<", bad, ">"));
    const std::string message = ReadJson().at("message");
    EXPECT_THAT(message, MatchesRegex("<(\xEF\xBF\xBD)+>"));
  }
  for (const char* good : {"\xC2\xA2", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF"}) {
    Log::Info(good);
    EXPECT_EQ(ReadJson().at("message"), good);
  }
}

TEST_F(LogTest, LongStringsAreCut) {
  Start(LogFormat::kJson);
  for (int size : {4095, 4096, 4097, 100000}) {
    Log::Info(std::string(size, 'a'), {{"value", std::string(size, '"')}});
    const FlatJson object = ReadJson();
    const std::string message = object.at("message");
    EXPECT_EQ(message, size <= 4096 ? std::string(size, 'a') : std::string(4093, 'a') + "...");
    EXPECT_EQ(object.at("value").size(), size <= 4096 ? size : 4096u);
  }
  // Not in the middle of a character.
  std::string euros;
  for (int i = 0; i < 2000; ++i) euros += "\xE2\x82\xAC";
  Log::Info("a" + euros);
  EXPECT_EQ(ReadJson().at("message"), absl::StrCat("a", euros.substr(0, 3 * 1364), "..."));
}

TEST_F(LogTest, LevelsFilterAtRunTime) {
  const auto log_all = [] {
    Log::Debug("d");
    Log::Info("i");
    Log::Warning("w");
    Log::Error("e");
  };
  const char* expected[] = {"DEBUG d", "INFO i", "WARNING w", "ERROR e"};
  for (LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    Log::SetLevel(level);
    log_all();
    for (int i = static_cast<int>(level); i < 4; ++i) {
      EXPECT_TRUE(Log::Enabled(static_cast<LogLevel>(i)));
      EXPECT_THAT(Read(), HasSubstr(absl::StrCat(" ", expected[i], "\n")));
    }
    EXPECT_EQ(Read(), "");
  }
  EXPECT_FALSE(Log::Enabled(LogLevel::kWarning));
}

TEST_F(LogTest, NamesAreThoseOfTheConfiguration) {
  EXPECT_EQ(ParseLogLevel("debug"), LogLevel::kDebug);
  EXPECT_EQ(ParseLogLevel("info"), LogLevel::kInfo);
  EXPECT_EQ(ParseLogLevel("warning"), LogLevel::kWarning);
  EXPECT_EQ(ParseLogLevel("error"), LogLevel::kError);
  EXPECT_EQ(ParseLogLevel("INFO"), std::nullopt);
  EXPECT_EQ(ParseLogFormat("text"), LogFormat::kText);
  EXPECT_EQ(ParseLogFormat("json"), LogFormat::kJson);
  EXPECT_EQ(ParseLogFormat(""), std::nullopt);
}

TEST_F(LogTest, LibrariesLogHereToo) {
  grpc_init();  // which also reads GRPC_VERBOSITY
  gpr_log("/build/src/core/lib/x.cc", 12, GPR_LOG_SEVERITY_ERROR, "cannot %s", "bind");
  EXPECT_THAT(Read(), HasSubstr(" ERROR cannot bind library=grpc source=x.cc:12\n"));
  grpc_shutdown();
  GOOGLE_LOG(WARNING) << "odd message";
  EXPECT_THAT(Read(),
              MatchesRegex(absl::StrCat(kTime, " WARNING odd message library=protobuf source=log_test.cc:[0-9]+\n")));
}

TEST_F(LogTest, LostLinesAreCountedAndErrnoIsKept) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_NONBLOCK), 0);
  Log::Start(LogLevel::kInfo, LogFormat::kText, ends[1]);
  const uint64_t lost = Log::lost_lines();
  Log::Info("fits");
  EXPECT_EQ(Log::lost_lines(), lost);
  const std::string filler(4096, 'x');
  while (write(ends[1], filler.data(), filler.size()) > 0) {
  }
  errno = ENOTDIR;
  Log::Info("does not fit");
  EXPECT_EQ(errno, ENOTDIR);
  EXPECT_EQ(Log::lost_lines(), lost + 1);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(LogTest, LinesOfManyThreadsDoNotMix) {
  constexpr int kThreads = 8;
  constexpr int kLines = 500;
  TemporaryFolder folder;
  const int file = open(folder.path("log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ASSERT_GE(file, 0);
  Log::Start(LogLevel::kInfo, LogFormat::kJson, file);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread] {
      for (int i = 0; i < kLines; ++i) {
        Log::Info("event", {{"id", thread * kLines + i}, {"filler", std::string(i, 'a' + thread)}});
        Log::Debug("not shown");
        if (i == kLines / 2) Log::SetLevel(LogLevel::kInfo);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  close(file);
  std::set<int> ids;
  for (absl::string_view line : absl::StrSplit(folder.Read("log"), '\n', absl::SkipEmpty())) {
    const FlatJson object(absl::StrCat(line, "\n"));
    int id = -1;
    ASSERT_TRUE(absl::SimpleAtoi(object.at("id"), &id)) << line;
    EXPECT_EQ(object.at("filler"), std::string(id % kLines, 'a' + id / kLines));
    EXPECT_TRUE(ids.insert(id).second);
  }
  EXPECT_EQ(ids.size(), kThreads * kLines);
}

}  // namespace
}  // namespace stoker::server
