// The kernels' launchers: what the CUDA backend enqueues. Arguments have passed Validate.
//
// Every launcher only enqueues, on the given stream, and can be captured into a graph. It returns the first CUDA error
// of the call.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch_shape.h"
#include "kernels/gather.h"
#include "kernels/invalidate.h"
#include "kernels/order_word.h"
#include "kernels/plane.h"
#include "kernels/resolve.h"
#include "kernels/transfer.h"

namespace stoker::kernels::cuda {

// Allows the kernels the shared memory and cluster sizes that they may ask for, and loads them: a kernel that is loaded
// lazily, while another stream waits, would deadlock. Once for each device, which must be current.
cudaError_t PrepareKernels(const DeviceLimits& limits);

cudaError_t LaunchResolve(const ResolveArgs& args, const DeviceLimits& limits, cudaStream_t stream);
// Resolve and, in the same kernel where its limits allow, the gather of its misses for the listed layers; then, where
// there is one, a doorbell.
cudaError_t LaunchResolveGather(const ResolveArgs& args, const GatherCompactArgs& gather, const RingDoorbellArgs* ring,
                                const DeviceLimits& limits, cudaStream_t stream);
cudaError_t LaunchGather(const GatherCompactArgs& args, cudaStream_t stream);
cudaError_t LaunchGather(const GatherDenseArgs& args, cudaStream_t stream);
cudaError_t LaunchTransfer(const TransferArgs& args, cudaStream_t stream);
cudaError_t LaunchInvalidate(const InvalidateArgs& args, cudaStream_t stream);
cudaError_t LaunchReset(const ResetArgs& args, cudaStream_t stream);
cudaError_t LaunchPlace(const PlaceArgs& args, cudaStream_t stream);
// What it reads it reads when all work before it has ended, and nothing behind it does anything before it has.
cudaError_t LaunchAwaitDoorbell(const AwaitDoorbellArgs& args, const DeviceLimits& limits, cudaStream_t stream);
// In plain stream order: they begin when all work before them has ended, and let nothing begin before they have.
cudaError_t LaunchRingDoorbell(const RingDoorbellArgs& args, cudaStream_t stream);
cudaError_t LaunchAwaitQuiet(const AwaitQuietArgs& args, cudaStream_t stream);
cudaError_t LaunchBeginBatch(const BatchArgs& args, cudaStream_t stream);
cudaError_t LaunchPlanCommits(const BatchArgs& args, cudaStream_t stream);
cudaError_t LaunchEndBatch(const BatchArgs& args, cudaStream_t stream);
// What is behind the wait of an AwaitOrder: the look at *abort.
cudaError_t LaunchLookAtAbort(const AwaitOrderArgs& args, cudaStream_t stream);
cudaError_t LaunchSignalOrder(const SignalOrderArgs& args, cudaStream_t stream);
cudaError_t LaunchWrite(uint64_t* target, uint64_t value, cudaStream_t stream);
cudaError_t LaunchWrite(int32_t* target, int32_t value, cudaStream_t stream);
cudaError_t LaunchTimestamp(uint64_t* ns, cudaStream_t stream);

}  // namespace stoker::kernels::cuda
