// The benchmarks. Each writes its lines; an error means that it could not run or that bytes were wrong.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "tests/bench/child_process.h"
#include "tests/bench/report.h"

namespace stoker::bench {

struct BenchContext {
  Report* report = nullptr;
  const ScratchFolder* folder = nullptr;
  std::string stokerd;  // program
  bool quick = false;

  int Rounds(int full) const { return quick ? 1 : full; }
};

// gRPC alone: three server APIs, four sizes, unary and stream.
absl::Status BenchEcho(const BenchContext& context);
// Resolve and gather, called directly.
absl::Status BenchResolve(const BenchContext& context);
absl::Status BenchGather(const BenchContext& context);
// Step against a daemon, beside the echo of its message sizes and its kernels.
absl::Status BenchStep(const BenchContext& context);
// Admit against a daemon and in the pool's bookkeeping alone.
absl::Status BenchAdmit(const BenchContext& context);
// Store and Load against a daemon.
absl::Status BenchBulk(const BenchContext& context);

}  // namespace stoker::bench
