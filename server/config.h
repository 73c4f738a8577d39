// The command line and the configuration file of stokerd. Every knob is declared once, in config.proto; this reads,
// checks, explains and prints them by reflection.
//
// Thread safety: functions without state; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/config.pb.h"

namespace stoker::server {

using DaemonConfig = config::v1::DaemonConfig;

struct CommandLine {
  enum class Action { kRun, kPrintConfig, kCheckConfig, kVersion, kHelp };

  Action action = Action::kRun;
  // The file's values, overridden by the flags. Fields that neither names are not set and read as their default.
  DaemonConfig config;
};

// Reads the flags and the file that --config names, and checks every value and what must hold between them.
//
// INVALID_ARGUMENT: the message has all errors, one a line; those of the file begin with "FILE:LINE:COLUMN: ". With
// --help or
// --version nothing else is checked. The caller prints the message and exits with 2.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

// What a successful action but kRun prints on standard output; the caller then exits with 0.
std::string ActionOutput(const CommandLine& command_line);

// The configuration in effect, with the help, default and limits of each key as comments. ParseCommandLine reads it
// back to an equal configuration.
std::string PrintConfig(const DaemonConfig& config);

// All flags with their defaults and limits, by group.
std::string HelpText();

// "0.1.0", the version of this build.
const char* Version();

// Checks every value and what must hold between them. Errors as of ParseCommandLine, without places.
absl::Status ValidateConfig(const DaemonConfig& config);

// Replaces what means "as the machine allows" by this machine's figures: cpu_threads 0, max_pool_bytes 0 (four fifths
// of the available memory, or of what the control group leaves if that is less).
void ResolveAutomaticValues(DaemonConfig* config);

}  // namespace stoker::server
