// Holds a session's tensors by id, and keeps account of what the session may map.
//
// Thread safety: one thread at a time (the session's mutex).
//
// Invariants:
//  1. At most max_tensors places and max_bytes bytes are taken: by tensors, by those that are being mapped, and by
//  those
//     that are being unmapped.
//  2. Numbers of ids rise: an id that was removed is never given again.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/ids.h"
#include "server/core/tensor.h"

namespace stoker::core {

struct TensorLimits {
  int64_t max_tensors = 0;
  uint64_t max_bytes = 0;
};

class TensorRegistry {
 public:
  TensorRegistry(SessionId session, TensorLimits limits) : session_(session), limits_(limits) {}

  // Takes a place for a tensor of so many bytes; every success is followed by one Release. RESOURCE_EXHAUSTED names the
  // limit.
  absl::Status Reserve(uint64_t bytes);
  void Release(uint64_t bytes);

  // Adds a tensor that has a place.
  TensorId Add(std::unique_ptr<Tensor> tensor);
  // Valid until the tensor is removed. NOT_FOUND: not of this session. FAILED_PRECONDITION: removed.
  absl::StatusOr<const Tensor*> Find(TensorId id) const;
  // The tensor keeps its place until Release. Statuses of Find.
  absl::StatusOr<std::unique_ptr<Tensor>> Remove(TensorId id);

  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  uint64_t bytes() const { return bytes_; }

 private:
  absl::Status WhyMissing(TensorId id) const;

  SessionId session_;
  TensorLimits limits_;
  absl::flat_hash_map<TensorId, std::unique_ptr<Tensor>> tensors_;
  uint32_t last_number_ = 0;
  int64_t places_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace stoker::core
