// stoker-bench: what gRPC, the kernels and the daemon cost on this machine. README.md says what is measured.
#include <malloc.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "tests/bench/benches.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/machine.h"

ABSL_FLAG(bool, quick, false, "Small shapes and few rounds: checks that everything runs and that bytes are right.");
ABSL_FLAG(bool, check, false, "Exit with 1 when a target is missed.");
ABSL_FLAG(std::string, only, "",
          "Comma-separated names of the benchmarks to run: echo, resolve, gather, step, admit, "
          "bulk. Empty: all.");
ABSL_FLAG(std::string, stokerd, "", "The daemon's program. Empty: stokerd beside this program.");
ABSL_FLAG(std::string, out, "", "File for the results. Empty: standard output.");
ABSL_FLAG(std::string, commit, "unknown", "Recorded in the results: the commit that was built.");
ABSL_FLAG(std::string, echo_server, "",
          "Serve as an echo server with this API (sync, callback or cq), for another "
          "stoker-bench.");
ABSL_FLAG(bool, echo_standard, false, "With echo_server: serve gRPC's health and reflection, too.");
ABSL_FLAG(std::string, socket, "", "The echo server's socket.");

namespace stoker::bench {
namespace {

struct Bench {
  const char* name;
  absl::Status (*run)(const BenchContext&);
};

constexpr Bench kBenches[] = {{"echo", BenchEcho}, {"resolve", BenchResolve}, {"gather", BenchGather},
                              {"step", BenchStep}, {"admit", BenchAdmit},     {"bulk", BenchBulk}};

absl::StatusOr<std::vector<Bench>> Chosen() {
  std::vector<Bench> chosen;
  const std::string only = absl::GetFlag(FLAGS_only);
  if (only.empty()) return std::vector<Bench>(std::begin(kBenches), std::end(kBenches));
  for (const absl::string_view name : absl::StrSplit(only, ',')) {
    const size_t before = chosen.size();
    for (const Bench& bench : kBenches) {
      if (name == bench.name) chosen.push_back(bench);
    }
    if (chosen.size() == before) return absl::InvalidArgumentError(absl::StrCat("only: no benchmark is named ", name));
  }
  return chosen;
}

absl::Status Run(const std::string& command) {
  const absl::StatusOr<std::vector<Bench>> benches = Chosen();
  if (!benches.ok()) return benches.status();
  const absl::StatusOr<std::unique_ptr<ScratchFolder>> folder = ScratchFolder::Make();
  if (!folder.ok()) return folder.status();
  std::ofstream file;
  if (const std::string path = absl::GetFlag(FLAGS_out); !path.empty()) {
    file.open(path);
    if (!file) return absl::NotFoundError(absl::StrCat("out: cannot write ", path));
  }
  BenchContext context;
  context.quick = absl::GetFlag(FLAGS_quick);
  Report report(file.is_open() ? &file : &std::cout, context.quick);
  context.report = &report;
  context.folder = folder->get();
  context.stokerd = absl::GetFlag(FLAGS_stokerd).empty() ? BesideOwnProgram("stokerd") : absl::GetFlag(FLAGS_stokerd);
  report.Write(RunLine(command, absl::GetFlag(FLAGS_commit)));
  for (const Bench& bench : *benches) {
    if (absl::Status status = bench.run(context); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(bench.name, ": ", status.message()));
    }
  }
  report.Write(Line("end").Int("missed", static_cast<int64_t>(report.missed().size())).Real("load", Load()));
  if (absl::Status status = report.CheckLines(); !status.ok()) return status;
  for (const std::string& missed : report.missed()) std::fprintf(stderr, "missed: %s\n", missed.c_str());
  if (absl::GetFlag(FLAGS_check) && !report.missed().empty()) {
    return absl::OutOfRangeError(absl::StrCat(report.missed().size(), " targets are missed"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace stoker::bench

int main(int argc, char** argv) {
  // Without paths of this machine, which say nothing about the result.
  std::string command = "stoker-bench";
  for (int i = 1; i < argc; ++i) {
    if (!absl::StartsWith(argv[i], "--out") && !absl::StartsWith(argv[i], "--stokerd")) {
      absl::StrAppend(&command, " ", argv[i]);
    }
  }
  absl::SetProgramUsageMessage("Measures gRPC, the kernels and the daemon; one JSON object a line.");
  absl::ParseCommandLine(argc, argv);
  // As stokerd does, so that the echo is not slower for want of it.
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  mallopt(M_TRIM_THRESHOLD, 8 << 20);
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  const std::string api = absl::GetFlag(FLAGS_echo_server);
  const absl::Status status =
      api.empty() ? stoker::bench::Run(command)
                  : stoker::bench::ServeEcho(api, absl::GetFlag(FLAGS_echo_standard), absl::GetFlag(FLAGS_socket));
  if (status.ok()) return 0;
  std::fprintf(stderr, "stoker-bench: %s\n", status.ToString().c_str());
  return 1;
}
