// An engine with one sequence that hands its work over in order, and never waits for its stream before a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/session.h"
#include "kernels/cuda/handles.h"
#include "stoker/v1/pools.pb.h"
#include "tests/gpu/order_kernels.h"

namespace stoker::gpu_test {

class OrderEngine {
 public:
  static constexpr uint32_t kLayers = 4;
  static constexpr uint32_t kRowBytes = 656;
  static constexpr uint32_t kTopK = 64;
  static constexpr uint32_t kHotRows = 128;
  static constexpr uint32_t kPrompt = 1000;
  static constexpr uint32_t kMaxRows = 2000;

  static v1::PoolSpec Pool(const std::string& name);
  // Admits the sequence as `key`. Its rows are not stored.
  static absl::StatusOr<std::unique_ptr<OrderEngine>> Attach(const client::Client& client, const std::string& pool,
                                                             const std::string& name, const std::string& key,
                                                             client::SessionOptions options = {});

  // The prompt by way of the staging area: the store waits for the kernel that writes it.
  absl::Status StorePrompt(uint64_t work_ns);
  // `work_ns` of the engine's work, a step whose rows and entries that work writes last, and a kernel that
  // compares what it gives. `wait`: with CallOrder.wait, as it must be.
  absl::Status Step(uint32_t length, uint64_t work_ns, bool wait = true);
  // Lets the stream wait for ever, without a kernel: for engines that are to be killed.
  absl::Status Hang();
  // The engine's work alone, and what it writes.
  absl::Status Produce(uint32_t length, uint64_t work_ns);
  v1::StepRequest StepRequest(uint32_t length, bool wait) const;

  // The number of the last Produce or StorePrompt, and of the last one that has ended.
  uint32_t begun() const { return number_; }
  uint32_t ended() const { return *static_cast<volatile const uint32_t*>(told_.get()); }
  // Waits for the stream. DEADLINE_EXCEEDED: it does not end.
  absl::Status AwaitStream(absl::Duration limit) const;
  // After AwaitStream.
  RowCounts counts() const;

  client::Session& session() const { return *session_; }
  cudaStream_t stream() const { return stream_.get(); }
  uint64_t sequence_id() const { return sequence_id_; }
  uint32_t stored_rows() const { return stored_rows_; }
  // Rows of the staging area, from `first_row` of it on, of one range of `count` rows.
  LayerRows Staging(uint32_t first_row, uint32_t count) const;
  const LayerRows& hot() const { return hot_; }
  int32_t* entries() const { return entries_; }
  const int32_t* hot_rows() const { return hot_rows_; }
  RowCounts* counts_on_device() const { return static_cast<RowCounts*>(counts_.get()); }

 private:
  OrderEngine() = default;

  kernels::cuda::StreamHandle stream_;
  kernels::cuda::DeviceMemory counts_;
  kernels::cuda::PinnedMemory told_;
  kernels::cuda::DeviceMemory never_;  // a word that nobody sets
  uint32_t number_ = 0;
  std::unique_ptr<client::Session> session_;
  std::shared_ptr<const client::Arena> arena_;
  uint64_t sequence_id_ = 0;
  uint32_t state_row_ = 0;
  uint32_t stored_rows_ = 0;
  LayerRows hot_;
  int32_t* entries_ = nullptr;
  const int32_t* hot_rows_ = nullptr;
};

}  // namespace stoker::gpu_test
