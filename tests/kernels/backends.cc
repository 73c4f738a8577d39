#include "tests/kernels/backends.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <utility>

namespace stoker::kernels {

int32_t Cases(const BackendCase& backend, int32_t quick, int32_t full) {
  const int32_t cases = backend.in_full ? full : quick;
  const char* const limit = std::getenv("STOKER_TEST_CASES");
  return limit == nullptr ? cases : std::clamp(std::atoi(limit), 1, cases);
}

absl::Status Finish(Stream& stream) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<absl::Status> result;
  stream.Notify([&](absl::Status status) {
    const std::lock_guard lock(mutex);
    result = std::move(status);
    changed.notify_one();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return result.has_value(); });
  return *std::move(result);
}

Bench::Bench(const BackendCase& backend) : backend_(backend.make(1)), stream_(backend_->CreateStream().value()) {}

Bench::~Bench() {
  // The work ends before its memory.
  stream_.reset();
}

void Bench::Reserve(size_t device_bytes, size_t pool_bytes) {
  if (device_bytes > 0 && (device_ == nullptr || device_->bytes() < device_bytes)) {
    device_ = backend_->AllocateShared(device_bytes).value();
  }
  if (pool_bytes > 0 && (pool_ == nullptr || pool_->bytes() < pool_bytes)) {
    pool_ = backend_->AllocatePool(pool_bytes).value();
  }
}

absl::Status Bench::Run(Image& device, Image& pool, const Operation& operation) {
  Reserve(device.bytes(), pool.bytes());
  std::byte* const device_base = device_ == nullptr ? nullptr : device_->data();
  std::byte* const pool_base = pool_ == nullptr ? nullptr : pool_->data();
  // Pool memory is host memory.
  if (pool.bytes() > 0) std::memcpy(pool_base, pool.data(), pool.bytes());
  absl::Status status = stream_->Copy(device_base, device.data(), device.bytes());
  if (status.ok()) status = operation(*stream_, device_base, pool_base);
  if (status.ok()) status = stream_->Copy(device.data(), device_base, device.bytes());
  const absl::Status done = Finish(*stream_);
  if (pool.bytes() > 0) std::memcpy(pool.data(), pool_base, pool.bytes());
  return status.ok() ? done : status;
}

absl::Status Bench::Run(Image& device, const Operation& operation) {
  Image no_pool;
  return Run(device, no_pool, operation);
}

}  // namespace stoker::kernels
