// A session's tensors: mapped and unmapped on the registry's thread, which may take a system call's time, and given up
// only behind all work that may use them.
#include <fcntl.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/core/session.h"

namespace stoker::core {

absl::StatusOr<uint64_t> Session::OfferDescriptor(FileDescriptor descriptor) {
  // Asks the kernel alone, and lets nothing in but its memory: to close a file that the client itself serves may take
  // for ever, and would be done with the mutex.
  if (fcntl(descriptor.get(), F_GET_SEALS) < 0) {
    return absl::InvalidArgumentError("offered_descriptor: is no memory of memfd_create");
  }
  absl::MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  if (!arena_.has_descriptor || arena_.allocation_bytes > 0) {
    return absl::FailedPreconditionError(absl::StrCat("offered_descriptor: the session is on ", spec_.device,
                                                      "; memory there is registered by its cuda_ipc handle"));
  }
  return offers_.Add(std::move(descriptor), absl::Now());
}

void Session::ExpireOffers(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  offers_.Expire(now);
}

void Session::RegisterTensor(TensorRequest request, Done<TensorId> done) {
  absl::Status status = request.malformed;
  if (status.ok()) status = request.spec.Normalize(pool_->pool.spec());
  if (status.ok() && !request.ipc_handle.empty() && request.device != spec_.device) {
    status = absl::InvalidArgumentError(
        absl::StrCat("cuda_ipc.device: \"", request.device, "\" given, the session is on ", spec_.device));
  }
  FileDescriptor descriptor;
  {
    absl::MutexLock lock(&mutex_);
    if (request.ipc_handle.empty()) {
      // In any case: a descriptor is used up by the call that names it.
      absl::StatusOr<FileDescriptor> taken = offers_.Take(request.descriptor, absl::Now());
      if (status.ok()) status = taken.status();
      if (taken.ok()) descriptor = *std::move(taken);
    }
    if (status.ok()) status = BeginOperation();
    if (status.ok()) {
      status = tensors_.Reserve(request.spec.size_bytes);
      // Not by EndOperation, which takes the mutex: a session that had ended would not have begun the operation.
      if (!status.ok()) queued_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  if (!status.ok()) {
    std::move(done)(status);
    return;
  }
  environment_.post([self = shared_from_this(), request = std::move(request), descriptor = std::move(descriptor),
                     done = std::move(done)]() mutable {
    self->MapTensor(std::move(request), std::move(descriptor), std::move(done));
  });
}

void Session::MapTensor(TensorRequest request, FileDescriptor descriptor, Done<TensorId> done) {
  const uint64_t bytes = request.spec.size_bytes;
  absl::StatusOr<std::unique_ptr<ClientMemory>> memory = environment_.map_memory(
      spec_.device, {std::move(request.ipc_handle), descriptor.get(), request.spec.offset_bytes, bytes});
  descriptor.Reset();
  absl::Status status = memory.status();
  auto tensor = std::make_unique<Tensor>();
  tensor->spec = std::move(request.spec);
  if (status.ok()) tensor->memory = *std::move(memory);
  TensorId id;
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = ended_;
    if (status.ok()) {
      id = tensors_.Add(std::move(tensor));
      tensor_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    }
  }
  if (status.ok()) {
    std::move(done)(id);
  } else {
    tensor.reset();  // without the mutex, and before its place is free
    ReleaseTensorPlace(bytes);
    std::move(done)(status);
  }
  EndOperation();
}

void Session::ReleaseTensorPlace(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  tensors_.Release(bytes);
}

void Session::UnregisterTensor(TensorId id, absl::AnyInvocable<void(absl::Status) &&> done) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = BeginOperation();
    if (status.ok()) {
      absl::StatusOr<std::unique_ptr<Tensor>> removed = tensors_.Remove(id);
      status = removed.status();
      if (status.ok()) {
        // The fence tells of this session's earlier work, whose errors its own calls have.
        storage_->Notify(
            [self = shared_from_this(), tensor = *std::move(removed), done = std::move(done)](absl::Status) mutable {
              // A copy of `self`, for `post` is the session's own.
              self->environment_.post([self, tensor = std::move(tensor), done = std::move(done)]() mutable {
                self->UnmapTensor(std::move(tensor), std::move(done));
              });
            });
        return;
      }
      queued_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  std::move(done)(status);
}

void Session::UnmapTensor(std::unique_ptr<Tensor> tensor, absl::AnyInvocable<void(absl::Status) &&> done) {
  const uint64_t bytes = tensor->spec.size_bytes;
  tensor.reset();
  ReleaseTensorPlace(bytes);
  tensor_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  std::move(done)(absl::OkStatus());
  EndOperation();
}

absl::StatusOr<std::vector<const Tensor*>> Session::FindTensors(const TensorRows& rows, int64_t row_count) const {
  const PoolSpec& pool = pool_->pool.spec();
  const int64_t limit = pool.layers * PartCount(pool);
  const int64_t given = static_cast<int64_t>(rows.ids.size());
  if (given < 1 || given > limit) {
    return absl::InvalidArgumentError(absl::StrCat("tensor_ids: ", given, " given, limits 1 and ", limit,
                                                   ", the pool's layers times the parts of its row layout"));
  }
  if (!rows.rows.empty() && static_cast<int64_t>(rows.rows.size()) != row_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor.rows: ", rows.rows.size(), " given, row_count is ", row_count));
  }
  std::vector<const Tensor*> tensors;
  tensors.reserve(rows.ids.size());
  for (const uint64_t id : rows.ids) {
    const absl::StatusOr<const Tensor*> tensor = tensors_.Find(TensorId{id});
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*tensor);
  }
  if (absl::Status status = CheckCoverage(pool, tensors); !status.ok()) return status;
  int64_t row_limit = INT64_MAX;
  for (const Tensor* tensor : tensors) row_limit = std::min(row_limit, tensor->spec.rows);
  for (const uint32_t row : rows.rows) {
    if (row >= row_limit) {
      return absl::InvalidArgumentError(absl::StrCat("tensor.rows: ", row, " given, limit ", row_limit - 1));
    }
  }
  if (rows.rows.empty() && rows.first > row_limit - row_count) {
    return absl::InvalidArgumentError(absl::StrCat("tensor.first_row: ", row_count, " rows from ", rows.first,
                                                   " given, the tensors have ", row_limit));
  }
  return tensors;
}

TensorWork Session::MakeTensorWork(std::vector<int32_t> pool_rows, std::vector<const Tensor*> tensors,
                                   const TensorRows& rows) {
  TensorWork work;
  work.tensor_rows.assign(rows.rows.begin(), rows.rows.end());
  for (size_t i = 0; rows.rows.empty() && i < pool_rows.size(); ++i) {
    work.tensor_rows.push_back(static_cast<int32_t>(rows.first + static_cast<int64_t>(i)));
  }
  work.pool_rows = std::move(pool_rows);
  work.tensors = std::move(tensors);
  return work;
}

}  // namespace stoker::core
