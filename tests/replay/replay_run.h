// One run of the stoker-replay program, for tests.
//
// Thread safety: one thread.
#pragma once

#include <google/protobuf/struct.pb.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/system/child_process.h"

namespace stoker::replay {

// Paths of the programs, from CMake; the environment variables STOKER_TEST_REPLAY and STOKER_TEST_DAEMON name others.
std::string ReplayPath();
std::string StokerdPath();
// The trace that comes with the sources.
std::string BundledTracePath();

// The plane that --plane=auto takes on the device of TestDevice() where the direct plane cannot be had: on a GPU
// doorbells need MPS.
std::string SecondBestPlane();

struct ReplayRun {
  // A number, or a text, of the JSON object on the last line; fails the test when it is not there.
  double number(const std::string& name) const;
  std::string text(const std::string& name) const;

  int status = -1;     // exit status; -1: it did not end in time
  std::string output;  // standard output and error
  google::protobuf::Struct json;
};

// Runs stoker-replay with --json and --progress=none to its end, on the device of TestDevice().
ReplayRun Replay(std::vector<std::string> options, absl::Duration timeout = absl::Seconds(120));

// A run that must be right: exit status 0, rows checked and none of them wrong, and every row stored that had to be,
// once. `max_waits` < 0: any number of admissions may have waited for room.
ReplayRun ReplayWell(std::vector<std::string> options, absl::Duration timeout = absl::Seconds(120));

}  // namespace stoker::replay
