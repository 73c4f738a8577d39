// A backend that does not reach pageable memory, without a GPU: the CPU backend behind checks.
//
// Every pointer of an operation must lie in memory that the backend has given out; anything else ends the process with
// a message, as a kernel that reads pageable memory ends a CUDA context. Copies may come from and go to anywhere, and
// are staged as the CUDA backend stages them: the source is read within the call, and the target written when the next
// Notify completes. With STOKER_TEST_SLOW_END in the environment it takes an hour to end. On request it loses its
// device: from then on all work fails, and allocations do. Memory with Sharing::kDescriptor looks like a CUDA
// allocation, a whole number of 2 MiB behind a descriptor, though it is a file. A wait for an order word is ended by
// the word alone, as a GPU's.
//
// Thread safety: as kernels::Backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace stoker::engine_test {

// A gather or a transfer that was enqueued.
struct BouncedCopy {
  bool gathers = false;
  kernels::CopyLimits limits;
};

class BouncedBackend : public kernels::Backend {
 public:
  // Those of all streams since the last call.
  virtual std::vector<BouncedCopy> TakeCopies() = 0;
  // As if the device had an error that nothing recovers from.
  virtual void Lose() = 0;
};

// One backend for each name. Pools and host memory of each are reached by all.
std::vector<std::unique_ptr<BouncedBackend>> MakeBouncedBackends(const std::vector<std::string>& devices, int threads);

}  // namespace stoker::engine_test
