// The suites' backend on a machine with a GPU. Without one the tests fail: they are labelled gpu and not run there.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {
namespace {

std::unique_ptr<Backend> Make(bool clusters) {
  auto backend = cuda::MakeCudaBackend(0, clusters);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    std::abort();
  }
  return *std::move(backend);
}

}  // namespace

const std::vector<BackendCase>& BackendCases() {
  static const auto* const cases = new std::vector<BackendCase>{
      {"cuda", [](int) { return Make(/*clusters=*/true); }, /*in_full=*/true},
      // The kernels of older GPUs. They are also what racecheck can look at where batch rows take turns.
      {"cuda_without_clusters", [](int) { return Make(/*clusters=*/false); }},
  };
  return *cases;
}

}  // namespace stoker::kernels
