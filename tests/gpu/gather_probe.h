// A plain gather of listed rows on a chosen number of blocks, to find out what the link gives.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/transfer.h"

namespace stoker::kernels::cuda {

// Copies pair i of the first layer from args.src_rows[i] to args.dst_rows[i]. All rows must exist.
cudaError_t LaunchProbe(const TransferArgs& args, int blocks, cudaStream_t stream);

}  // namespace stoker::kernels::cuda
