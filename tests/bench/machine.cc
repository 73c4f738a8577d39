#include "tests/bench/machine.h"

#include <grpcpp/grpcpp.h>
#include <sys/utsname.h>

#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::bench {
namespace {

std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

double Load() {
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return load;
}

Line RunLine(const std::string& command, const std::string& commit) {
  utsname system = {};
  uname(&system);
  return Line("run")
      .Text("command", command)
      .Text("commit", commit)
      .Text("date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()))
      .Text("cpu", CpuModel())
      .Int("cpus", std::thread::hardware_concurrency())
      .Text("kernel", absl::StrCat(system.sysname, " ", system.release))
      .Text("compiler", __VERSION__)
      .Text("grpc", grpc::Version())
      .Text("build", STOKER_BUILD_TYPE)
      .Real("load", Load());
}

}  // namespace stoker::bench
