#include "server/core/tensor_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/check.h"

namespace stoker::core {

absl::Status TensorRegistry::Reserve(uint64_t bytes) {
  if (places_ >= limits_.max_tensors) {
    return absl::ResourceExhaustedError(
        absl::StrCat("session: has ", places_, " tensors registered, limit max_tensors ", limits_.max_tensors));
  }
  if (bytes > limits_.max_bytes - bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("size_bytes: ", bytes, " given, ", bytes_,
                                                     " are registered, limit max_tensor_bytes ", limits_.max_bytes));
  }
  // A place is taken for each number, so that numbers cannot run out while ids are being made.
  if (last_number_ + static_cast<uint64_t>(places_) >= UINT32_MAX) {
    return absl::ResourceExhaustedError("session: has registered 2^32 tensors; attach again");
  }
  ++places_;
  bytes_ += bytes;
  return absl::OkStatus();
}

void TensorRegistry::Release(uint64_t bytes) {
  STOKER_CHECK(places_ > 0 && bytes_ >= bytes);
  --places_;
  bytes_ -= bytes;
}

TensorId TensorRegistry::Add(std::unique_ptr<Tensor> tensor) {
  const TensorId id = TensorId::Make(session_, ++last_number_);
  tensors_[id] = std::move(tensor);
  STOKER_CHECK(count() <= places_);
  return id;
}

absl::Status TensorRegistry::WhyMissing(TensorId id) const {
  if (id == TensorId::Make(session_, id.number()) && id.number() >= 1 && id.number() <= last_number_) {
    return absl::FailedPreconditionError(absl::StrCat("tensor_id: ", id.value, " was unregistered"));
  }
  return absl::NotFoundError(
      absl::StrCat("tensor_id: ", id.value, " is no registered tensor of session ", session_.value));
}

absl::StatusOr<const Tensor*> TensorRegistry::Find(TensorId id) const {
  const auto it = tensors_.find(id);
  if (it == tensors_.end()) return WhyMissing(id);
  return it->second.get();
}

absl::StatusOr<std::unique_ptr<Tensor>> TensorRegistry::Remove(TensorId id) {
  const auto it = tensors_.find(id);
  if (it == tensors_.end()) return WhyMissing(id);
  std::unique_ptr<Tensor> tensor = std::move(it->second);
  tensors_.erase(it);
  return tensor;
}

}  // namespace stoker::core
