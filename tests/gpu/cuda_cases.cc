// The suites' backend on a machine with a GPU. Without one the tests fail: they are labelled gpu and not run there.
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/backends.h"

namespace stoker::kernels {

const std::vector<BackendCase>& BackendCases() {
  static const auto* const cases =
      new std::vector<BackendCase>{{"cuda",
                                    [](int) {
                                      auto backend = cuda::MakeCudaBackend(0);
                                      if (!backend.ok()) {
                                        std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
                                        std::abort();
                                      }
                                      return *std::move(backend);
                                    },
                                    /*in_full=*/true}};
  return *cases;
}

}  // namespace stoker::kernels
