#include "client/ctl_arguments.h"
#include "client/ctl_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stoker::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ProgramSpec Program() {
  ProgramSpec program;
  program.name = "prog";
  program.summary = "Does things.";
  program.footer = "The end.";
  program.flags = {{"server", "ADDRESS", "where"}, {"json", "", "as JSON"}, {"help", "", "help"}};
  program.commands = {{{"pools"}, {}, "Lists.", "", {}},
                      {{"pools", "show"}, {"NAME"}, "Shows.", "At length.", {{"deep", "N", "how deep"}}},
                      {{"box", "open"}, {}, "Opens.", "", {}}};
  return program;
}

absl::StatusOr<Invocation> Parse(std::vector<std::string> words) {
  static const ProgramSpec& program = *new ProgramSpec(Program());
  return ParseArguments(program, words);
}

TEST(ParseArgumentsTest, WordsAndFlagsInAnyOrder) {
  auto invocation = Parse({"--server", "a", "pools", "--json", "show", "x", "--deep=3"});
  ASSERT_TRUE(invocation.ok()) << invocation.status();
  EXPECT_THAT(invocation->words, ElementsAre("pools", "show"));
  EXPECT_THAT(invocation->arguments, ElementsAre("x"));
  EXPECT_EQ(invocation->Get("server"), "a");
  EXPECT_EQ(invocation->Get("deep"), "3");
  EXPECT_TRUE(invocation->Has("json"));
  EXPECT_FALSE(invocation->Has("help"));
  EXPECT_EQ(invocation->Get("absent", "otherwise"), "otherwise");
  EXPECT_THAT(Parse({"pools"})->words, ElementsAre("pools"));
  EXPECT_THAT(Parse({"pools", "show", "--", "--json"})->arguments, ElementsAre("--json"));
  EXPECT_EQ(Parse({})->command, nullptr);
  EXPECT_TRUE(Parse({"pools", "show", "--help"})->Has("help"));
  EXPECT_THAT(Parse({"help", "box"})->words, ElementsAre("box"));
}

TEST(ParseArgumentsTest, MistakesAreNamed) {
  const std::pair<std::vector<std::string>, const char*> mistakes[] = {
      {{"nonsense"}, "unknown command 'nonsense'"},
      {{"box"}, "'box' is incomplete"},
      {{"box", "shut"}, "unknown command 'box shut'"},
      {{"pools", "show"}, "needs NAME"},
      {{"pools", "show", "a", "b"}, "does not take 'b'"},
      {{"pools", "--colour"}, "unknown flag '--colour'"},
      {{"pools", "-x"}, "unknown flag '-x'"},
      {{"pools", "--deep", "3"}, "'--deep' is not one of 'pools'"},
      {{"pools", "--json=yes"}, "takes no value"},
      {{"pools", "--server"}, "needs a value, ADDRESS"},
      {{"pools", "--json", "--json"}, "given twice"},
  };
  for (const auto& [words, message] : mistakes) {
    EXPECT_THAT(std::string(Parse(words).status().message()), HasSubstr(message));
  }
}

TEST(HelpTextTest, ShowsWhatWasAskedFor) {
  const ProgramSpec program = Program();
  const std::string all = HelpText(program, {});
  for (const char* const part :
       {"Usage: prog COMMAND", "Does things.", "pools show NAME", "box open", "--server ADDRESS", "The end."}) {
    EXPECT_THAT(all, HasSubstr(part));
  }
  const std::string one = HelpText(program, std::vector<std::string>{"pools", "show"});
  for (const char* const part : {"Usage: prog pools show NAME [flags]", "Shows.", "At length.", "--deep N", "--json"}) {
    EXPECT_THAT(one, HasSubstr(part));
  }
  EXPECT_THAT(one, Not(HasSubstr("box")));
  const std::string both = HelpText(program, std::vector<std::string>{"pools"});
  EXPECT_THAT(both, HasSubstr("Lists."));
  EXPECT_THAT(both, HasSubstr("pools show NAME"));
  EXPECT_THAT(both, Not(HasSubstr("box")));
}

TEST(FlagValueTest, NumbersAndTimesHaveLimits) {
  EXPECT_EQ(*ParseNumber("--n", "7", 7, 9), 7u);
  EXPECT_EQ(*ParseNumber("--n", "9", 7, 9), 9u);
  EXPECT_EQ(*ParseNumber("--n", "0x8", 7, 9), 8u);
  for (const char* const text : {"", "6", "10", "-7", "7x", "0x", "99999999999999999999"}) {
    EXPECT_THAT(std::string(ParseNumber("--n", text, 7, 9).status().message()), HasSubstr("--n")) << text;
  }
  EXPECT_EQ(*ParseTimeout("--t", "500ms"), absl::Milliseconds(500));
  EXPECT_EQ(*ParseTimeout("--t", "1.5"), absl::Milliseconds(1500));
  EXPECT_EQ(*ParseTimeout("--t", "24h"), absl::Hours(24));
  for (const char* const text : {"", "0", "-1s", "nan", "inf", "25h", "soon"}) {
    EXPECT_FALSE(ParseTimeout("--t", text).ok()) << text;
  }
}

TEST(TextTest, SizesSpansAndShares) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.0 KiB");
  EXPECT_EQ(BytesText((uint64_t{1} << 20) - 1), "1.0 MiB");
  EXPECT_EQ(BytesText(uint64_t{75} << 29), "37.5 GiB");
  EXPECT_EQ(BytesText(~uint64_t{0}), "16.0 EiB");
  EXPECT_EQ(SpanText(absl::Milliseconds(999)), "999ms");
  EXPECT_EQ(SpanText(absl::Seconds(59)), "59s");
  EXPECT_EQ(SpanText(absl::Seconds(200)), "3m 20s");
  EXPECT_EQ(SpanText(absl::Hours(5)), "5h 0m");
  EXPECT_EQ(SpanText(absl::Hours(292)), "12d 4h");
  EXPECT_EQ(ShareText(9, 20), "45.0%");
  EXPECT_EQ(ShareText(0, 0), "-");
  EXPECT_EQ(PlainText(""), "-");
  EXPECT_EQ(PlainText("a\x1b[31m\n\xc3\xa9"), "a\\x1b[31m\\n\xc3\xa9");
}

TEST(TextTest, TablesAreAligned) {
  Table table({{"NAME"}, {"N", Table::Align::kRight}, {"LAST"}});
  table.Add({"\xc3\xa9", "100", "x"});
  table.Add({"longer", "7", ""});
  EXPECT_EQ(table.ToString(),
            "NAME      N  LAST\n"
            "\xc3\xa9       100  x\n"
            "longer    7  \n");
}

}  // namespace
}  // namespace stoker::client
