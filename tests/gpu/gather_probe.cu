#include "kernels/cuda/row_copy.cuh"
#include "tests/gpu/gather_probe.h"

namespace stoker::kernels::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) ProbeKernel(const __grid_constant__ RowCopy copy, const int32_t* src_rows,
                                                        const int32_t* dst_rows, int32_t count, int piece_bytes) {
  // Each block has a contiguous part of the list, so that rows that follow one another are read at one time.
  const int32_t share = (count + static_cast<int32_t>(gridDim.x) - 1) / static_cast<int32_t>(gridDim.x);
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * share;
  const int32_t rows = max(min(share, count - begin), 0);
  CopyRows(
      piece_bytes, copy, rows, Share{threadIdx.x, kThreads}, [=](uint32_t i) { return __ldcg(src_rows + begin + i); },
      [=](uint32_t i) { return __ldcg(dst_rows + begin + i); });
}

}  // namespace

cudaError_t LaunchProbe(const TransferArgs& args, int blocks, cudaStream_t stream) {
  RowCopy copy = MakeRowCopy(args.src, args.dst);
  copy.layers.count = 1;
  copy.layers.src[0] = static_cast<int16_t>(args.src_layers[0]);
  copy.layers.dst[0] = static_cast<int16_t>(args.dst_layers[0]);
  ProbeKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      copy, args.src_rows, args.dst_rows, static_cast<int32_t>(args.count), PieceBytes(copy));
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
