#include "client/doorbell.cuh"
#include "tests/gpu/plane_kernels.h"

namespace stoker::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kLayerBlocks = 8;
constexpr int kLayerThreads = 128;

__global__ void __launch_bounds__(kThreads) BeginStepKernel(const __grid_constant__ EngineBatch batch) {
  const uint64_t step = batch.clock->step + 1;
  __syncthreads();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < batch.rows; i += kThreads) {
    batch.lengths[i] = batch.first_length + static_cast<int32_t>(step);
  }
  if (threadIdx.x == 0) batch.clock->step = step;
}

template <bool kRings>
__global__ void __launch_bounds__(kThreads)
    IndexerKernel(const __grid_constant__ EngineEntries entries, const __grid_constant__ client::DoorbellView view,
                  uint32_t doorbell) {
  const uint64_t step = (entries.clock->step - 1) % entries.steps;
  const auto row_entries = static_cast<uint64_t>(entries.top_k);
  const int32_t* const from = entries.entries + (step * static_cast<uint64_t>(entries.rows) + blockIdx.x) * row_entries;
  int32_t* const to = entries.mailbox + blockIdx.x * entries.mailbox_stride;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < entries.top_k; i += kThreads) to[i] = from[i];
  if constexpr (kRings) {
    __syncthreads();
    if (threadIdx.x == 0) client::RingDoorbellLast(view, doorbell, gridDim.x);
  }
}

template <bool kWaits>
__global__ void __launch_bounds__(kLayerThreads)
    LayerKernel(const __grid_constant__ EngineLayer layer, const __grid_constant__ client::DoorbellView view,
                uint32_t doorbell) {
  if constexpr (kWaits) {
    __shared__ bool there;
    if (threadIdx.x == 0) there = client::AwaitDoorbell(view, doorbell);
    __syncthreads();
    if (!there) return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *layer.sink = *layer.hot_rows;
}

__global__ void __launch_bounds__(kThreads) EndStepKernel(const __grid_constant__ EngineEnd end) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  unsigned long long misses = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < end.groups * end.rows; i += kThreads) {
    misses += static_cast<unsigned long long>(end.misses[i / end.rows][i % end.rows]);
  }
  atomicAdd(&sum, misses);
  __syncthreads();
  if (threadIdx.x != 0) return;
  end.clock->misses += sum;
  end.times[(end.clock->step - 1) % end.count] = client::doorbell_detail::NowNs();
}

}  // namespace

cudaError_t LaunchBeginStep(const EngineBatch& batch, cudaStream_t stream) {
  BeginStepKernel<<<1, kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

cudaError_t LaunchIndexer(const EngineEntries& entries, const client::DoorbellView* view, uint32_t doorbell,
                          cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(entries.rows);
  if (view != nullptr) {
    IndexerKernel<true><<<blocks, kThreads, 0, stream>>>(entries, *view, doorbell);
  } else {
    IndexerKernel<false><<<blocks, kThreads, 0, stream>>>(entries, client::DoorbellView(), doorbell);
  }
  return cudaGetLastError();
}

cudaError_t LaunchLayer(const EngineLayer& layer, const client::DoorbellView* view, uint32_t doorbell,
                        cudaStream_t stream) {
  if (view != nullptr) {
    LayerKernel<true><<<kLayerBlocks, kLayerThreads, 0, stream>>>(layer, *view, doorbell);
  } else {
    LayerKernel<false><<<kLayerBlocks, kLayerThreads, 0, stream>>>(layer, client::DoorbellView(), doorbell);
  }
  return cudaGetLastError();
}

cudaError_t LaunchEndStep(const EngineEnd& end, cudaStream_t stream) {
  EndStepKernel<<<1, kThreads, 0, stream>>>(end);
  return cudaGetLastError();
}

cudaError_t PrepareEngineKernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(BeginStepKernel), reinterpret_cast<const void*>(IndexerKernel<true>),
        reinterpret_cast<const void*>(IndexerKernel<false>), reinterpret_cast<const void*>(LayerKernel<true>),
        reinterpret_cast<const void*>(LayerKernel<false>), reinterpret_cast<const void*>(EndStepKernel)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace stoker::bench
