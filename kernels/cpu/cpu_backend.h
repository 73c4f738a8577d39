// The CPU backend: device memory is memory of this machine, streams are serial queues on a few threads.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace stoker::kernels::cpu {

// Runs streams on `threads` threads, 1 to 256; other values are taken as the nearer of the two. Streams must be
// destroyed before the backend. Waits for doorbells hold none of the threads: one more, which the first wait starts,
// looks at all of them (doorbell.h). An idle thread spins for some microseconds before it sleeps (strand.cc).
std::unique_ptr<Backend> MakeCpuBackend(int threads);

// The operations themselves, on the calling thread. Arguments must have passed Validate.
void Resolve(const ResolveArgs& args);
void Gather(const GatherCompactArgs& args);
void Gather(const GatherDenseArgs& args);
void Transfer(const TransferArgs& args);
void Invalidate(const InvalidateArgs& args);
void Reset(const ResetArgs& args);
void Place(const PlaceArgs& args);
void BeginBatch(const BatchArgs& args);
void PlanCommits(const BatchArgs& args);
void EndBatch(const BatchArgs& args);

}  // namespace stoker::kernels::cpu
