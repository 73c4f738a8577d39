// A whole run of stoker-replay: requests, daemon, engine processes, result.
#pragma once

#include "client/replay/options.h"

namespace stoker::replay {

// Exit statuses; 0 is success, and 130 an interrupt.
inline constexpr int kExitWrongRows = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitFailed = 3;
inline constexpr int kExitInterrupted = 130;

// Does what the options say; prints the result on standard output, progress and errors on standard error. Returns the
// exit status. Forks, so the process must have no other threads.
int Run(const Options& options);

}  // namespace stoker::replay
