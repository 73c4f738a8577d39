// The suites' backends in the builds that need no GPU.
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {

const std::vector<BackendCase>& BackendCases() {
  static const auto* const cases = new std::vector<BackendCase>{
      {"cpu", [](int threads) { return cpu::MakeCpuBackend(threads); }, /*in_full=*/false}};
  return *cases;
}

}  // namespace stoker::kernels
