// One block each, or one thread, but for the entries: a block for each batch row.
//
// A kernel reads what kernels before it in the stream have written, and one thread's release at system scope announces
// all of that to the daemon. After a wait that failed none of them writes anything.
#include "client/device_plane_kernels.h"
#include "client/doorbell.cuh"

namespace stoker::client {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    PublishBatchKernel(const __grid_constant__ DoorbellView view, const __grid_constant__ PublishBatchArgs args) {
  if (!IsRunning(view)) return;
  const int32_t rows = *args.rows;
  // A count that cannot be is the daemon's to refuse; nothing outside of the arrays is touched for it.
  const int32_t count = rows < 0 ? 0 : rows > args.max_rows ? args.max_rows : rows;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    const uint64_t sequence_id = args.sequence_ids[i];
    args.sequence_ids_out[i] = sequence_id;
    args.state_rows_out[i] = sequence_id == 0 ? -1 : args.state_rows[i];
    args.lengths_out[i] = args.lengths[i];
  }
  if (threadIdx.x != 0) return;
  *args.rows_out = rows;
  view.state->rows = count;
  ++view.state->step;
}

__global__ void __launch_bounds__(kThreads)
    PublishEntriesKernel(const __grid_constant__ DoorbellView view, uint32_t doorbell,
                         const __grid_constant__ PublishEntriesArgs args) {
  if (!IsRunning(view)) return;
  if (static_cast<int32_t>(blockIdx.x) < view.state->rows) {
    const int32_t* const from = args.entries + blockIdx.x * args.stride;
    int32_t* const to = args.out + blockIdx.x * args.out_stride;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < args.top_k; i += kThreads) to[i] = from[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) RingDoorbellLast(view, doorbell, gridDim.x);
}

__global__ void __launch_bounds__(kThreads)
    PublishCommitsKernel(const __grid_constant__ DoorbellView view, const int32_t* commits, int32_t* out) {
  if (!IsRunning(view)) return;
  const int32_t rows = view.state->rows;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < rows; i += kThreads) {
    out[i] = commits == nullptr ? 0 : commits[i];
  }
}

__global__ void RingKernel(const __grid_constant__ DoorbellView view, uint32_t doorbell) {
  RingDoorbell(view, doorbell);
}

__global__ void AwaitKernel(const __grid_constant__ DoorbellView view, uint32_t doorbell, bool finishes) {
  if (AwaitDoorbell(view, doorbell) && finishes) {
    doorbell_detail::StoreRelease(&view.report->finished, view.state->step);
  }
}

}  // namespace

cudaError_t PreparePlaneKernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(PublishBatchKernel), reinterpret_cast<const void*>(PublishEntriesKernel),
        reinterpret_cast<const void*>(PublishCommitsKernel), reinterpret_cast<const void*>(RingKernel),
        reinterpret_cast<const void*>(AwaitKernel)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchPublishBatch(const DoorbellView& view, const PublishBatchArgs& args, cudaStream_t stream) {
  PublishBatchKernel<<<1, kThreads, 0, stream>>>(view, args);
  return cudaGetLastError();
}

cudaError_t LaunchPublishEntries(const DoorbellView& view, uint32_t doorbell, const PublishEntriesArgs& args,
                                 cudaStream_t stream) {
  PublishEntriesKernel<<<static_cast<unsigned>(args.max_rows), kThreads, 0, stream>>>(view, doorbell, args);
  return cudaGetLastError();
}

cudaError_t LaunchPublishCommits(const DoorbellView& view, const int32_t* commits, int32_t* out, cudaStream_t stream) {
  PublishCommitsKernel<<<1, kThreads, 0, stream>>>(view, commits, out);
  return cudaGetLastError();
}

cudaError_t LaunchRing(const DoorbellView& view, uint32_t doorbell, cudaStream_t stream) {
  RingKernel<<<1, 1, 0, stream>>>(view, doorbell);
  return cudaGetLastError();
}

cudaError_t LaunchAwait(const DoorbellView& view, uint32_t doorbell, bool finishes, cudaStream_t stream) {
  AwaitKernel<<<1, 1, 0, stream>>>(view, doorbell, finishes);
  return cudaGetLastError();
}

}  // namespace stoker::client
