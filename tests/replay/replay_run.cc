#include "tests/replay/replay_run.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/system/daemon_fixture.h"

namespace stoker::replay {

using system_test::RunToEnd;
using system_test::TemporaryFolder;

std::string ReplayPath() {
  const char* other = std::getenv("STOKER_TEST_REPLAY");
  return other == nullptr ? STOKER_REPLAY_PATH : other;
}
std::string StokerdPath() {
  const char* other = std::getenv("STOKER_TEST_DAEMON");
  return other == nullptr ? STOKERD_PATH : other;
}
std::string BundledTracePath() { return BUNDLED_TRACE_PATH; }

std::string SecondBestPlane() { return system_test::TestDevice() == "cpu" ? "server" : "rpc"; }

double ReplayRun::number(const std::string& name) const {
  const auto it = json.fields().find(name);
  if (it == json.fields().end()) {
    ADD_FAILURE() << "no " << name << " in the JSON object of\n" << output;
    return -1;
  }
  return it->second.number_value();
}

std::string ReplayRun::text(const std::string& name) const {
  const auto it = json.fields().find(name);
  if (it == json.fields().end()) {
    ADD_FAILURE() << "no " << name << " in the JSON object of\n" << output;
    return "";
  }
  return it->second.string_value();
}

ReplayRun Replay(std::vector<std::string> options, absl::Duration timeout) {
  const TemporaryFolder folder;
  options.insert(options.begin(), {ReplayPath(), "--json", "--progress=none", "--stokerd", StokerdPath(), "--device",
                                   system_test::TestDevice()});
  const system_test::Finished finished = RunToEnd(options, folder, timeout);
  ReplayRun run;
  run.status = finished.status;
  run.output = finished.output;
  std::string text = run.output;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const std::string last = text.substr(text.rfind('\n') + 1);
  if (!last.empty() && last.front() == '{' && !google::protobuf::util::JsonStringToMessage(last, &run.json).ok()) {
    ADD_FAILURE() << "the last line is no JSON object: " << last;
  }
  return run;
}

ReplayRun ReplayWell(std::vector<std::string> options, absl::Duration timeout) {
  ReplayRun run = Replay(std::move(options), timeout);
  EXPECT_EQ(run.status, 0) << run.output;
  EXPECT_GT(run.number("requests"), 0);
  EXPECT_EQ(run.number("wrong_rows"), 0) << run.output;
  EXPECT_EQ(run.number("stored_rows"), run.number("unique_rows")) << run.output;
  return run;
}

}  // namespace stoker::replay
