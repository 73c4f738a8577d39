#include "client/ctl_arguments.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace stoker::client {
namespace {

using Words = std::vector<std::string>;

bool BeginsWith(const Words& words, absl::Span<const std::string> beginning) {
  return beginning.size() <= words.size() && std::equal(beginning.begin(), beginning.end(), words.begin());
}

const FlagSpec* FindFlag(absl::Span<const FlagSpec> flags, absl::string_view name) {
  for (const FlagSpec& flag : flags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

// The command whose words are the longest beginning of `plain`; null where there is none.
const CommandSpec* FindCommand(const ProgramSpec& program, const Words& plain) {
  const CommandSpec* best = nullptr;
  for (const CommandSpec& command : program.commands) {
    if (BeginsWith(plain, command.words) && (best == nullptr || best->words.size() < command.words.size())) {
      best = &command;
    }
  }
  return best;
}

std::string FlagColumn(const FlagSpec& flag) {
  return absl::StrCat("--", flag.name, flag.value.empty() ? "" : " ", flag.value);
}

std::string Usage(const ProgramSpec& program, const CommandSpec& command) {
  std::string text = absl::StrCat(program.name, " ", absl::StrJoin(command.words, " "));
  for (const std::string& argument : command.arguments) absl::StrAppend(&text, " ", argument);
  return text;
}

// Two columns, the second one's lines below each other.
void AppendColumns(absl::Span<const std::pair<std::string, std::string>> rows, std::string* text) {
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  for (const auto& [left, right] : rows) {
    absl::StrAppend(text, "  ", left, std::string(width - left.size() + 2, ' '));
    for (const char c : right) {
      text->push_back(c);
      if (c == '\n') text->append(width + 4, ' ');
    }
    text->push_back('\n');
  }
}

void AppendFlags(absl::string_view title, absl::Span<const FlagSpec> flags, std::string* text) {
  if (flags.empty()) return;
  std::vector<std::pair<std::string, std::string>> rows;
  for (const FlagSpec& flag : flags) rows.emplace_back(FlagColumn(flag), flag.help);
  absl::StrAppend(text, "\n", title, ":\n");
  AppendColumns(rows, text);
}

}  // namespace

std::string Invocation::Get(const std::string& flag, absl::string_view otherwise) const {
  const auto found = flags.find(flag);
  return found == flags.end() ? std::string(otherwise) : found->second;
}

absl::StatusOr<Invocation> ParseArguments(const ProgramSpec& program, absl::Span<const std::string> arguments) {
  // Words first: which flags exist, and whether one takes the next word, depends on the command. A flag of any command
  // is enough to know that, for equal names take values alike; whether it belongs to this one is checked below.
  Words plain;
  Invocation invocation;
  bool flags_are_over = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (flags_are_over || word.size() < 2 || word[0] != '-') {
      plain.push_back(word);
      continue;
    }
    if (word == "--") {
      flags_are_over = true;
      continue;
    }
    if (word == "-h") {
      invocation.flags["help"] = "";
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name =
        absl::StartsWith(word, "--") ? word.substr(2, equals == word.npos ? equals : equals - 2) : "";
    const FlagSpec* flag = FindFlag(program.flags, name);
    for (const CommandSpec& command : program.commands) {
      if (flag == nullptr) flag = FindFlag(command.flags, name);
    }
    if (flag == nullptr) return absl::InvalidArgumentError(absl::StrCat("unknown flag '", word, "'"));
    std::string value;
    if (equals != word.npos) {
      if (flag->value.empty()) return absl::InvalidArgumentError(absl::StrCat("flag '--", name, "' takes no value"));
      value = word.substr(equals + 1);
    } else if (!flag->value.empty()) {
      if (++i == arguments.size()) {
        return absl::InvalidArgumentError(absl::StrCat("flag '--", name, "' needs a value, ", flag->value));
      }
      value = arguments[i];
    }
    if (!invocation.flags.emplace(name, value).second) {
      return absl::InvalidArgumentError(absl::StrCat("flag '--", name, "' is given twice"));
    }
  }

  if (!plain.empty() && plain.front() == "help") {
    plain.erase(plain.begin());
    invocation.flags["help"] = "";
  }
  invocation.command = FindCommand(program, plain);
  if (invocation.command == nullptr) {
    invocation.words = plain;
    const bool is_beginning = std::any_of(program.commands.begin(), program.commands.end(),
                                          [&](const CommandSpec& c) { return BeginsWith(c.words, plain); });
    if (!is_beginning) {
      return absl::InvalidArgumentError(absl::StrCat("unknown command '", absl::StrJoin(plain, " "), "'"));
    }
    if (invocation.Has("help") || plain.empty()) return invocation;
    return absl::InvalidArgumentError(absl::StrCat("command '", absl::StrJoin(plain, " "), "' is incomplete"));
  }
  const CommandSpec& command = *invocation.command;
  invocation.words = command.words;
  invocation.arguments.assign(plain.begin() + static_cast<ptrdiff_t>(command.words.size()), plain.end());
  for (const auto& [name, value] : invocation.flags) {
    if (FindFlag(program.flags, name) == nullptr && FindFlag(command.flags, name) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag '--", name, "' is not one of '", absl::StrJoin(command.words, " "), "'"));
    }
  }
  if (invocation.Has("help")) return invocation;
  if (invocation.arguments.size() < command.arguments.size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", absl::StrJoin(command.words, " "), "' needs ",
                                                   command.arguments[invocation.arguments.size()]));
  }
  if (invocation.arguments.size() > command.arguments.size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", absl::StrJoin(command.words, " "), "' does not take '",
                                                   invocation.arguments[command.arguments.size()], "'"));
  }
  return invocation;
}

std::string HelpText(const ProgramSpec& program, absl::Span<const std::string> words) {
  const Words wanted(words.begin(), words.end());
  std::string text;
  const CommandSpec* exact = nullptr;
  std::vector<std::pair<std::string, std::string>> longer;
  for (const CommandSpec& command : program.commands) {
    if (command.words == wanted) {
      exact = &command;
    } else if (BeginsWith(command.words, wanted)) {
      std::string left = absl::StrJoin(command.words, " ");
      for (const std::string& argument : command.arguments) absl::StrAppend(&left, " ", argument);
      longer.emplace_back(std::move(left), command.summary);
    }
  }
  if (exact != nullptr) {
    absl::StrAppend(&text, "Usage: ", Usage(program, *exact), " [flags]\n\n", exact->summary, "\n");
    if (!exact->details.empty()) absl::StrAppend(&text, "\n", exact->details, "\n");
  } else {
    absl::StrAppend(&text, "Usage: ", program.name, wanted.empty() ? "" : " ", absl::StrJoin(wanted, " "),
                    " COMMAND [flags]\n");
    if (wanted.empty()) absl::StrAppend(&text, "\n", program.summary, "\n");
  }
  if (!longer.empty()) {
    absl::StrAppend(&text, "\nCommands ('", program.name, " COMMAND --help' says more about one):\n");
    AppendColumns(longer, &text);
  }
  if (exact != nullptr) AppendFlags("Flags", exact->flags, &text);
  AppendFlags("Flags of every command", program.flags, &text);
  if (wanted.empty() && !program.footer.empty()) absl::StrAppend(&text, "\n", program.footer, "\n");
  return text;
}

absl::StatusOr<uint64_t> ParseNumber(absl::string_view flag, absl::string_view text, uint64_t min, uint64_t max) {
  uint64_t value = 0;
  const bool is_number =
      absl::StartsWith(text, "0x") ? absl::SimpleHexAtoi(text, &value) : absl::SimpleAtoi(text, &value);
  if (!is_number || value < min || value > max) {
    return absl::InvalidArgumentError(absl::StrCat(flag, " '", text, "' is not a number from ", min, " to ", max));
  }
  return value;
}

absl::StatusOr<absl::Duration> ParseTimeout(absl::string_view flag, absl::string_view text) {
  absl::Duration value;
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds)) {
    value = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &value)) {
    value = absl::ZeroDuration();
  }
  if (value <= absl::ZeroDuration() || value > absl::Hours(24)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " '", text, "' is not a time above 0 and up to 24h, such as 500ms, 5s or 2m"));
  }
  return value;
}

}  // namespace stoker::client
