// The kernels of DevicePlane. Internal to the library.
//
// Thread safety: the launchers may be called by any thread; they only enqueue work, and may be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "client/doorbell.h"

namespace stoker::client {

// Loads all of them on the current device: the first launch of one that is loaded lazily would wait for streams that
// wait.
cudaError_t PreparePlaneKernels();

// Where a batch comes from, memory that the GPU reaches, and the mailbox where it goes.
struct PublishBatchArgs {
  const int32_t* rows = nullptr;  // [1]
  const uint64_t* sequence_ids = nullptr;
  const int32_t* state_rows = nullptr;
  const int32_t* lengths = nullptr;
  int32_t* rows_out = nullptr;
  uint64_t* sequence_ids_out = nullptr;
  int32_t* state_rows_out = nullptr;
  int32_t* lengths_out = nullptr;
  int32_t max_rows = 0;
};
// Raises the step and writes its batch.
cudaError_t LaunchPublishBatch(const DoorbellView& view, const PublishBatchArgs& args, cudaStream_t stream);

struct PublishEntriesArgs {
  const int32_t* entries = nullptr;  // [rows][stride]
  uint64_t stride = 0;
  int32_t* out = nullptr;  // of the mailbox
  uint64_t out_stride = 0;
  int32_t max_rows = 0;
  int32_t top_k = 0;
};
// Writes the entries of the batch's rows, and rings the doorbell when all are there.
cudaError_t LaunchPublishEntries(const DoorbellView& view, uint32_t doorbell, const PublishEntriesArgs& args,
                                 cudaStream_t stream);

// Copies the flags of the batch's rows; none where `commits` is null: then all are 0.
cudaError_t LaunchPublishCommits(const DoorbellView& view, const int32_t* commits, int32_t* out, cudaStream_t stream);
cudaError_t LaunchRing(const DoorbellView& view, uint32_t doorbell, cudaStream_t stream);
// `finishes`: of the commits; the report then has the step as finished.
cudaError_t LaunchAwait(const DoorbellView& view, uint32_t doorbell, bool finishes, cudaStream_t stream);

}  // namespace stoker::client
