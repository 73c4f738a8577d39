// What a result was measured on.
#pragma once

#include <string>

#include "tests/bench/report.h"

namespace stoker::bench {

// The first line of a result file: program, commit, date, machine, versions, load.
Line RunLine(const std::string& command, const std::string& commit);
// The load average over a minute.
double Load();

}  // namespace stoker::bench
