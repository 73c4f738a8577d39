#include "server/engine/armed_plane.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace stoker::engine {

core::PlaneSample SampleOf(const kernels::PlaneResult& result) {
  core::PlaneSample sample;
  sample.steps = result.state.finished;
  for (int i = 0; i < core::kOutcomeCount; ++i) sample.lookups[i] = result.counters[i];
  sample.totals.evictions = result.counters[kernels::kEvictions];
  sample.totals.lru_repairs = result.counters[kernels::kLruRepairs];
  sample.totals.gathered_bytes = result.counters[kernels::kPlaneGatheredBytes];
  sample.committed_rows = result.counters[kernels::kPlaneCommittedRows];
  sample.step_ns = result.counters[kernels::kPlaneEndNs] - result.counters[kernels::kPlaneBeginNs];
  return sample;
}

namespace {

constexpr size_t kResultsOffset = 128;
constexpr size_t kResultBytes = 256;
static_assert(sizeof(kernels::PlaneResult) <= kResultBytes);

core::PlaneEnd EndOf(const kernels::PlaneState& state) {
  switch (static_cast<kernels::PlaneOutcome>(state.outcome)) {
    case kernels::PlaneOutcome::kRunning:
      return core::PlaneEnd::kRunning;
    case kernels::PlaneOutcome::kAborted:
      return core::PlaneEnd::kDisarmed;
    case kernels::PlaneOutcome::kTimedOut:
      return core::PlaneEnd::kTimedOut;
    case kernels::PlaneOutcome::kBadStep:
      return core::PlaneEnd::kBadStep;
  }
  return core::PlaneEnd::kBadStep;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ArmedPlane>> ArmedPlane::Start(kernels::Backend& backend, kernels::Stream& stream,
                                                              std::shared_ptr<kernels::Event> after, const Body& body,
                                                              core::PlaneSetup setup) {
  std::shared_ptr<ArmedPlane> plane(new ArmedPlane(stream, std::move(setup)));
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> host = backend.AllocateHost(kResultsOffset + kAhead * kResultBytes);
  if (!host.ok()) return host.status();
  plane->host_ = *std::move(host);
  for (int i = 0; i < kAhead; ++i) {
    absl::StatusOr<std::unique_ptr<kernels::Program>> program =
        stream.MakeProgram([body, abort = plane->abort(), result = plane->result(i)](kernels::Stream& s) {
          return body(s, abort, result);
        });
    if (!program.ok()) return program.status();
    plane->programs_.push_back(*std::move(program));
  }
  absl::MutexLock lock(&plane->mutex_);
  stream.Wait(std::move(after));
  for (int i = 0; i < kAhead; ++i) {
    if (absl::Status status = plane->Enqueue(i); !status.ok()) {
      if (plane->enqueued_ == 0) return status;
      // What is enqueued ends, and tells so.
      plane->error_ = status;
      plane->ending_ = true;
      std::atomic_ref<uint32_t>(*plane->abort()).store(1, std::memory_order_release);
      break;
    }
  }
  return plane;
}

kernels::PlaneResult* ArmedPlane::result(int program) const {
  return reinterpret_cast<kernels::PlaneResult*>(host_->data() + kResultsOffset +
                                                 static_cast<size_t>(program) * kResultBytes);
}

absl::Status ArmedPlane::Enqueue(int program) {
  if (absl::Status status = programs_[program]->Enqueue(); !status.ok()) return status;
  ++enqueued_;
  stream_.Notify(
      [self = shared_from_this(), program](absl::Status status) { self->Finished(program, std::move(status)); });
  return absl::OkStatus();
}

void ArmedPlane::Disarm() {
  absl::MutexLock lock(&mutex_);
  ending_ = true;
  std::atomic_ref<uint32_t>(*abort()).store(1, std::memory_order_release);
}

void ArmedPlane::Finished(int program, absl::Status status) {
  kernels::PlaneResult left;
  std::memcpy(&left, result(program), sizeof(left));
  const core::PlaneEnd end = status.ok() ? EndOf(left.state) : core::PlaneEnd::kDisarmed;
  bool last = false, stepped = false;
  core::PlaneEnding ending;
  {
    absl::MutexLock lock(&mutex_);
    --enqueued_;
    stepped = end == core::PlaneEnd::kRunning && left.state.finished > steps_;
    if (stepped) steps_ = left.state.finished;
    if (end_ == core::PlaneEnd::kRunning) end_ = end;
    step_ = std::max(step_, left.state.step);
    error_.Update(status);
    if (end_ == core::PlaneEnd::kRunning && !ending_ && error_.ok()) error_.Update(Enqueue(program));
    if (!error_.ok()) std::atomic_ref<uint32_t>(*abort()).store(1, std::memory_order_release);
    last = enqueued_ == 0;
    if (last) programs_.clear();  // before `ended`, which may start another plane
    if (end_ != core::PlaneEnd::kRunning) ending.why = end_;
    ending.step = step_;
    ending.device = error_;
  }
  if (stepped) setup_.stepped(SampleOf(left));
  if (!last) return;
  // They may own what owns the plane.
  auto ended = std::move(setup_.ended);
  setup_.stepped = nullptr;
  std::move(ended)(std::move(ending));
}

}  // namespace stoker::engine
