// Whether a device can still be used. Whoever gets an error of a CUDA call shows it here.
//
// Thread safety: any thread. No function calls CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/error.h"

namespace stoker::kernels::cuda {

class DeviceHealth {
 public:
  explicit DeviceHealth(std::string uuid) : uuid_(std::move(uuid)) {}

  // `error` as a status, after a look at whether it means that the device is lost.
  absl::Status Check(cudaError_t error, absl::string_view what) {
    if (error == cudaSuccess) return absl::OkStatus();
    absl::Status status = ToStatus(error, what);
    if (IsLoss(error)) Lose(status);
    return status;
  }

  // See Backend::OnLost.
  void OnLost(absl::AnyInvocable<void(absl::Status) &&> lost) {
    absl::Status status;
    {
      const std::lock_guard lock(mutex_);
      if (status_.ok()) {
        lost_ = std::move(lost);
        return;
      }
      status = status_;
    }
    std::move(lost)(std::move(status));
  }

 private:
  void Lose(const absl::Status& status) {
    absl::AnyInvocable<void(absl::Status) &&> lost;
    absl::Status reason;
    {
      const std::lock_guard lock(mutex_);
      if (!status_.ok()) return;
      status_ = reason = absl::UnavailableError(absl::StrCat("device ", uuid_, " is lost: ", status.message()));
      lost = std::move(lost_);
    }
    if (lost) std::move(lost)(std::move(reason));
  }

  const std::string uuid_;
  std::mutex mutex_;
  absl::Status status_;                             // guarded by mutex_
  absl::AnyInvocable<void(absl::Status) &&> lost_;  // guarded by mutex_
};

}  // namespace stoker::kernels::cuda
