// Command lines of the form: program [flags] command [subcommand] [arguments] [flags], and the help texts about them.
//
// Thread safety: values without shared state.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace stoker::client {

struct FlagSpec {
  std::string name;   // without the dashes
  std::string value;  // what the value is called in the help; empty: the flag takes none
  std::string help;
};

struct CommandSpec {
  std::vector<std::string> words;      // "pools", "create"
  std::vector<std::string> arguments;  // names of the required arguments, in order
  std::string summary;                 // one line
  std::string details;                 // more, for the command's own help; may be empty
  std::vector<FlagSpec> flags;
};

struct ProgramSpec {
  std::string name;
  std::string summary;
  std::string footer;           // end of the program's help
  std::vector<FlagSpec> flags;  // accepted before and after every command
  std::vector<CommandSpec> commands;
};

struct Invocation {
  const CommandSpec* command = nullptr;      // null: only flags were given
  std::vector<std::string> words;            // of the command, also when they are only the beginning of several
  std::vector<std::string> arguments;        // as many as the command names
  std::map<std::string, std::string> flags;  // those given

  bool Has(const std::string& flag) const { return flags.count(flag) != 0; }
  std::string Get(const std::string& flag, absl::string_view otherwise = "") const;
};

// INVALID_ARGUMENT says what is wrong with which word. With --help among the flags, missing words are no error.
absl::StatusOr<Invocation> ParseArguments(const ProgramSpec& program, absl::Span<const std::string> arguments);

// Help for the program (no words), for one command, or for all commands that begin with `words`.
std::string HelpText(const ProgramSpec& program, absl::Span<const std::string> words);

// Values of flags. INVALID_ARGUMENT names flag, value and limit.
absl::StatusOr<uint64_t> ParseNumber(absl::string_view flag, absl::string_view text, uint64_t min, uint64_t max);
// "500ms", "2m", or a number of seconds; above zero.
absl::StatusOr<absl::Duration> ParseTimeout(absl::string_view flag, absl::string_view text);

}  // namespace stoker::client
