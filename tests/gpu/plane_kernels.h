// The engine of stoker-plane-bench, as far as it is kernels: what the engine's own work would be between those of the
// plane, cut down to launches.
//
// Thread safety: the launchers may be called by any thread; they only enqueue work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "client/doorbell.h"

namespace stoker::bench {

// Words of a mock engine, in device memory.
struct EngineClock {
  uint64_t step = 0;    // steps begun, this one included
  uint64_t misses = 0;  // of all steps that have ended
};

// The step's batch: row i has the length first_length + step.
struct EngineBatch {
  EngineClock* clock = nullptr;
  int32_t* lengths = nullptr;  // [rows]
  int32_t rows = 0;
  int32_t first_length = 0;
};
// Raises the clock, and makes the lengths.
cudaError_t LaunchBeginStep(const EngineBatch& batch, cudaStream_t stream);

// The entries of all steps: step n has those number (n - 1) % steps.
struct EngineEntries {
  const int32_t* entries = nullptr;  // [steps][rows][top_k]
  const EngineClock* clock = nullptr;
  uint64_t steps = 1;
  int32_t rows = 0;
  int32_t top_k = 0;
  int32_t* mailbox = nullptr;
  uint64_t mailbox_stride = 0;  // elements
};
// Stands for the indexer: writes the entries into the mailbox. With a view its last block rings the doorbell.
cudaError_t LaunchIndexer(const EngineEntries& entries, const client::DoorbellView* view, uint32_t doorbell,
                          cudaStream_t stream);

// Stands for a layer's attention: reads a hot row number, and writes a word. With a view it waits for the doorbell
// first, in each of its blocks.
struct EngineLayer {
  const int32_t* hot_rows = nullptr;
  int32_t* sink = nullptr;
};
cudaError_t LaunchLayer(const EngineLayer& layer, const client::DoorbellView* view, uint32_t doorbell,
                        cudaStream_t stream);

// The misses of all groups' mailboxes are added up, and the time is written to times[(step - 1) % count].
struct EngineEnd {
  EngineClock* clock = nullptr;
  const int32_t* const* misses = nullptr;  // [groups], device memory: [rows] each
  int32_t groups = 0;
  int32_t rows = 0;
  uint64_t* times = nullptr;
  uint64_t count = 1;
};
cudaError_t LaunchEndStep(const EngineEnd& end, cudaStream_t stream);

// Loads all of them: see PreparePlaneKernels.
cudaError_t PrepareEngineKernels();

}  // namespace stoker::bench
