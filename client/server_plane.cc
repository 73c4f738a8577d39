#include "client/server_plane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace stoker::client {
namespace {

// A small step of the CPU backend takes 10 to 20 us, and waking up from the shortest sleep 60. Spinning gives way to
// other threads, for the daemon's may want this core. stoker-replay (8 rows, top_k 32, one group) on two cores that had
// much else to do, a step's median and, of five runs, the median of its means: 21 and 71 us; without giving way 200 and
// 340; spinning for 200 us 24 and 460; as calls 90 and 130.
constexpr absl::Duration kSpin = absl::Microseconds(20);
// Sleeps double up to the longest one, which bounds how late an answer is seen, and the end of the session.
constexpr absl::Duration kFirstSleep = absl::Microseconds(10);
constexpr absl::Duration kLongestSleep = absl::Microseconds(500);
// Bound of the Disarm that the destructor sends.
constexpr absl::Duration kDisarmTimeout = absl::Seconds(5);

using Clock = std::chrono::steady_clock;

// The words are the other process's as well, so that no plain access will do. atomic_ref wants no const.
template <typename T>
T LoadAcquire(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free && std::atomic_ref<int32_t>::is_always_lock_free,
              "shared between processes");

}  // namespace

ServerPlane::ServerPlane(Session& session, std::shared_ptr<const Arena> arena, uint64_t generation, uint32_t top_k)
    : session_(session), arena_(std::move(arena)), generation_(generation), top_k_(top_k), batch_("Ring") {}

absl::StatusOr<std::unique_ptr<ServerPlane>> ServerPlane::Arm(Session& session, uint32_t top_k,
                                                              const CallOptions& options) {
  absl::StatusOr<uint64_t> generation = session.AwaitAttached(options.timeout);
  if (!generation.ok()) return generation.status();
  // The call names the generation, so that it fails where this arena is another one's.
  CallOptions call = options;
  if (call.generation == 0) call.generation = *generation;
  auto plane = std::unique_ptr<ServerPlane>(new ServerPlane(session, session.arena(), call.generation, top_k));
  plane->disarmed_ = true;  // until it is armed, the destructor has nothing to end
  if (absl::Status status = plane->Open(); !status.ok()) return status;
  v1::ArmRequest request;
  request.set_top_k(top_k);
  v1::ArmResponse armed;
  if (absl::Status status = session.Arm(request, &armed, call); !status.ok()) return status;
  plane->disarmed_ = false;
  plane->arm_call_ = session.arm_calls();
  if (absl::Status status = plane->Start(armed); !status.ok()) return status;
  return plane;
}

absl::Status ServerPlane::Open() {
  if (!arena_->status().ok()) return arena_->status();
  if (arena_->on_device()) {
    return absl::FailedPreconditionError(
        "the arena is on a GPU: there the engine's kernels ring the doorbells, and host code cannot");
  }
  return batch_.Open(*arena_, top_k_);
}

absl::Status ServerPlane::Start(const v1::ArmResponse& armed) {
  const uint64_t step = armed.first_step();
  doorbell_timeout_ = absl::Milliseconds(armed.doorbell_timeout_ms());
  if (step == 0) return absl::InternalError("Arm: first_step is 0, which no step before it can have answered");
  batch_.set_step(step);
  const PlaneMail& mail = batch_.mail();
  for (size_t doorbell = 0; doorbell <= batch_.groups(); ++doorbell) {
    const uint64_t request = LoadAcquire(mail.request[doorbell]), done = LoadAcquire(mail.done[doorbell]);
    if (request == step - 1 && done == step - 1) continue;
    return absl::InternalError(absl::StrCat("Arm: request[", doorbell, "] is ", request, " and done[", doorbell, "] ",
                                            done, "; both must be ", step - 1, ", one less than first_step"));
  }
  return absl::OkStatus();
}

ServerPlane::~ServerPlane() {
  if (disarmed_ || !status_.ok() || !CheckSession().ok()) return;
  CallOptions options;
  options.timeout = kDisarmTimeout;
  // The end of the session, and the next Arm, end the plane as well: there is nothing to do about an error.
  static_cast<void>(Disarm(options));
}

absl::Status ServerPlane::End(absl::Status why) {
  status_ = std::move(why);
  return status_;
}

absl::Status ServerPlane::CheckSession() const {
  if (absl::Status status = session_.status(); !status.ok()) return status;
  if (const uint64_t generation = session_.generation(); generation != generation_) {
    return absl::UnavailableError(
        absl::StrCat("generation ", generation_, " of the session is over, it is ", generation, " now: arm anew"));
  }
  if (session_.arm_calls() != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  return absl::OkStatus();
}

absl::Status ServerPlane::Expect(Call call, size_t doorbell) const {
  if (!status_.ok()) return status_;
  if (disarmed_) return absl::FailedPreconditionError("the server plane was disarmed");
  return batch_.Expect(call, doorbell);
}

absl::Status ServerPlane::Begin(absl::Span<const PlaneRow> rows) {
  if (absl::Status status = Expect(Call::kBegin, 0); !status.ok()) return status;
  if (absl::Status status = batch_.CheckRows(rows); !status.ok()) return status;
  if (absl::Status status = CheckSession(); !status.ok()) return End(status);
  batch_.WriteRows(rows);
  batch_.Took(Call::kBegin);
  return absl::OkStatus();
}

absl::Status ServerPlane::Ring(uint32_t group) {
  if (absl::Status status = Expect(Call::kLaunch, group); !status.ok()) return status;
  RingDoorbell(group);
  batch_.Took(Call::kLaunch);
  return absl::OkStatus();
}

absl::Status ServerPlane::Await(uint32_t group, absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwait, group); !status.ok()) return status;
  if (absl::Status status = AwaitDoorbell(group, timeout); !status.ok()) return status;
  if (group == 0) batch_.ReadStatuses();
  batch_.Took(Call::kAwait);
  return absl::OkStatus();
}

absl::Status ServerPlane::Commit(absl::Span<const int32_t> commits) {
  if (absl::Status status = Expect(Call::kCommit, batch_.groups()); !status.ok()) return status;
  if (absl::Status status = batch_.CheckCommits(commits); !status.ok()) return status;
  batch_.WriteCommits(commits);
  RingDoorbell(batch_.groups());
  batch_.Took(Call::kCommit);
  return absl::OkStatus();
}

absl::Status ServerPlane::AwaitCommit(absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwaitCommit, batch_.groups()); !status.ok()) return status;
  if (absl::Status status = AwaitDoorbell(batch_.groups(), timeout); !status.ok()) return status;
  batch_.ReadStatuses();
  batch_.Took(Call::kAwaitCommit);
  return absl::OkStatus();
}

void ServerPlane::RingDoorbell(size_t doorbell) {
  std::atomic_ref<uint64_t>(batch_.mail().request[doorbell]).store(step(), std::memory_order_release);
}

absl::Status ServerPlane::AwaitDoorbell(size_t doorbell, absl::Duration timeout) {
  const Clock::time_point begin = Clock::now();
  absl::Duration sleep = kFirstSleep;
  for (;;) {
    // In this order: what was not answered when the plane had ended never will be.
    const int32_t ended = LoadAcquire(*batch_.mail().ended);
    const uint64_t done = LoadAcquire(batch_.mail().done[doorbell]);
    if (done == step()) return absl::OkStatus();
    if (done != step() - 1) {
      return End(absl::InternalError(absl::StrCat("done[", doorbell, "] is ", done, " in step ", step(),
                                                  ": the daemon does not keep to the protocol")));
    }
    if (ended != 0) return End(FromPlaneEnd(ended, DoneOf(doorbell, step()), doorbell_timeout_));
    const absl::Duration waited = absl::FromChrono(Clock::now() - begin);
    if (waited < kSpin && waited < timeout) {
      std::this_thread::yield();
      continue;
    }
    if (absl::Status status = CheckSession(); !status.ok()) return End(status);
    if (waited >= timeout) {
      return End(absl::DeadlineExceededError(
          absl::StrCat(DoneOf(doorbell, step()), " did not come within ", absl::FormatDuration(timeout))));
    }
    absl::SleepFor(std::min(sleep, timeout - waited));
    sleep = std::min(2 * sleep, kLongestSleep);
  }
}

absl::StatusOr<uint64_t> ServerPlane::Disarm(const CallOptions& options) {
  if (disarmed_) return absl::FailedPreconditionError("the server plane was disarmed");
  CallOptions call = options;
  call.generation = generation_;
  if (session_.arm_calls() != arm_call_) {
    return absl::FailedPreconditionError("the session was armed again since: that ended this server plane");
  }
  v1::DisarmResponse response;
  if (absl::Status status = session_.Disarm({}, &response, call); !status.ok()) return status;
  disarmed_ = true;
  return response.steps();
}

}  // namespace stoker::client
