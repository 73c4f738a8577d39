// A server plane that runs: its step, recorded once, is kept enqueued kAhead times, and is enqueued again each time one
// has been finished, until a doorbell's wait ends it.
//
// Thread safety: any thread. `stepped` and `ended` of the setup come from a thread of the backend, without locks.
//
// Invariants:
//  1. Between Start and `ended` kAhead programs or fewer are enqueued, and none afterwards.
//  2. A program's result is in a place of its own in host memory, which is read before the program is enqueued again.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/plane_step.h"
#include "server/core/engine.h"

namespace stoker::engine {

core::PlaneSample SampleOf(const kernels::PlaneResult& result);

class ArmedPlane : public std::enable_shared_from_this<ArmedPlane> {
 public:
  static constexpr int kAhead = 2;

  // Enqueues one step, which ends when `abort` is not 0 and leaves its result in host memory.
  using Body =
      std::function<absl::Status(kernels::Stream& stream, const uint32_t* abort, kernels::PlaneResult* result)>;

  // Runs on `stream`, which must outlive the plane's work and have nothing else to do until then. Its first step begins
  // after `after`.
  static absl::StatusOr<std::shared_ptr<ArmedPlane>> Start(kernels::Backend& backend, kernels::Stream& stream,
                                                           std::shared_ptr<kernels::Event> after, const Body& body,
                                                           core::PlaneSetup setup);

  // Ends the waits for doorbells, and so the plane.
  void Disarm();
  // Nothing of it runs any more.
  bool over() const {
    absl::MutexLock lock(&mutex_);
    return enqueued_ == 0;
  }

 private:
  ArmedPlane(kernels::Stream& stream, core::PlaneSetup setup) : stream_(stream), setup_(std::move(setup)) {}

  kernels::PlaneResult* result(int program) const;
  uint32_t* abort() const { return reinterpret_cast<uint32_t*>(host_->data()); }
  absl::Status Enqueue(int program) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finished(int program, absl::Status status);

  kernels::Stream& stream_;
  core::PlaneSetup setup_;
  std::unique_ptr<kernels::Buffer> host_;  // the abort word, then the results
  std::vector<std::unique_ptr<kernels::Program>> programs_;
  mutable absl::Mutex mutex_;
  int enqueued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;  // the last one that began
  core::PlaneEnd end_ ABSL_GUARDED_BY(mutex_) = core::PlaneEnd::kRunning;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stoker::engine
