// The backends that the conformance suites run on, and what a test needs to run an operation on one of them.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/image.h"

namespace stoker::kernels {

struct BackendCase {
  std::string name;
  // Makes a backend whose streams run on `threads` threads, where that means something to it.
  std::function<std::unique_ptr<Backend>(int threads)> make;
  // Whether random and repeated cases run in full: where the program is not part of every build's tests.
  bool in_full = false;

  friend void PrintTo(const BackendCase& backend, std::ostream* out) { *out << backend.name; }
};

// The backends that a test program runs on: cpu_cases.cc, or tests/gpu/cuda_cases.cc, is linked to the suites.
const std::vector<BackendCase>& BackendCases();

// Instantiates a suite for every backend.
#define STOKER_FOR_EVERY_BACKEND(suite)                                        \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, testing::ValuesIn(BackendCases()), \
                           [](const testing::TestParamInfo<BackendCase>& backend) { return backend.param.name; })

// How many cases, or steps, a test runs: `full` where the backend runs in full, else `quick`; at most
// STOKER_TEST_CASES, where the environment has it: under a tool that makes everything a hundred times slower.
int32_t Cases(const BackendCase& backend, int32_t quick, int32_t full);

// Blocks until the stream's work is done. Returns what Notify tells.
absl::Status Finish(Stream& stream);

// Runs operations on images: up, run, down.
class Bench {
 public:
  explicit Bench(const BackendCase& backend);
  ~Bench();

  Backend& backend() { return *backend_; }
  Stream& stream() { return *stream_; }

  // Runs `operation` with the addresses of `device` on the device and of `pool` in pool memory, both of which are
  // brought up before it and back after it. Returns its status, or that of the work.
  using Operation = std::function<absl::Status(Stream& stream, std::byte* device, std::byte* pool)>;
  absl::Status Run(Image& device, Image& pool, const Operation& operation);
  absl::Status Run(Image& device, const Operation& operation);

 private:
  void Reserve(size_t device_bytes, size_t pool_bytes);

  const std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> pool_;
};

// A suite that runs on every backend.
class BackendTest : public testing::TestWithParam<BackendCase> {
 protected:
  Bench& bench() { return bench_; }
  int32_t Cases(int32_t quick, int32_t full) const { return kernels::Cases(GetParam(), quick, full); }

 private:
  Bench bench_{GetParam()};
};

}  // namespace stoker::kernels
