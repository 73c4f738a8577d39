#include "client/direct_plane.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bounded_wait.h"
#include "client/plane_memory.h"
#include "client/pool_mapping.h"
#include "client/pool_memory.h"
#include "kernels/cpu/cpu_backend.h"

namespace stoker::client {
namespace {

constexpr int kMaxThreads = 256;

// What a Notify tells. Outlives the plane where a wait for it was given up.
class Completion {
 public:
  void Tell(absl::Status status) {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
    told_ = true;
    changed_.notify_all();
  }
  // False: not within `timeout`.
  bool Await(absl::Duration timeout, absl::Status* status) {
    Lock lock(mutex_);
    if (!WaitUntil(changed_, lock, absl::Now() + timeout, [this] { return told_; })) return false;
    *status = status_;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool told_ = false;    // guarded by mutex_
  absl::Status status_;  // guarded by mutex_
};

// Gives the session's plane back when it goes.
class Taken {
 public:
  explicit Taken(std::atomic<bool>* taken) : taken_(taken) {}
  ~Taken() {
    if (taken_ != nullptr) taken_->store(false);
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  void HandOn() { taken_ = nullptr; }

 private:
  std::atomic<bool>* taken_;
};

}  // namespace

DirectPlane::DirectPlane(Session& session, Session::DirectLease lease, kernels::PlaneMemory memory)
    : session_(session),
      arena_(std::move(lease.arena)),
      pool_(std::move(lease.pool)),
      taken_(std::move(lease.taken)),
      generation_(lease.generation),
      step_(std::move(memory)),
      result_(pool_->result()),
      batch_("Group") {}

absl::StatusOr<std::unique_ptr<DirectPlane>> DirectPlane::Open(Session& session, uint32_t top_k,
                                                               const DirectPlaneOptions& options) {
  if (absl::StatusOr<uint64_t> attached = session.AwaitAttached(options.timeout); !attached.ok()) {
    return attached.status();
  }
  Session::DirectLease lease = session.direct_lease();
  if (lease.pool == nullptr) {
    return absl::FailedPreconditionError(
        "the session is not on the direct plane: AttachRequest.plane is not PLANE_DIRECT");
  }
  const bool on_device = lease.arena->on_device();
  if (on_device && options.stream == nullptr) {
    return absl::InvalidArgumentError("stream is null; the session is on a GPU, where steps need the engine's stream");
  }
  if (!on_device && (options.threads < 1 || options.threads > kMaxThreads)) {
    return absl::InvalidArgumentError(absl::StrCat("threads ", options.threads, " is not 1 to ", kMaxThreads));
  }
  absl::StatusOr<kernels::PlaneMemory> memory =
      MakePlaneMemory(lease.request, lease.attached, *lease.arena, *lease.pool, top_k);
  if (!memory.ok()) return memory.status();
  if (lease.taken->exchange(true)) {
    return absl::FailedPreconditionError("the session has a DirectPlane already: destroy that one first");
  }
  Taken taken(lease.taken.get());
  const std::string device = lease.attached.device();
  std::unique_ptr<DirectPlane> plane(new DirectPlane(session, std::move(lease), *std::move(memory)));
  taken.HandOn();  // the plane's destructor gives it back from here on
  if (on_device) {
    absl::StatusOr<DeviceStream> stream = WrapDeviceStream(options.stream, device);
    if (!stream.ok()) return stream.status();
    plane->stream_ = std::move(stream->stream);
    plane->wait_for_stream_ = std::move(stream->wait);
    return plane;
  }
  if (absl::Status status = plane->OpenOnHost(options.threads); !status.ok()) return status;
  return plane;
}

absl::Status DirectPlane::OpenOnHost(int threads) {
  if (absl::Status status = batch_.Open(*arena_, top_k()); !status.ok()) return status;
  // A plane that the session had before has raised it.
  uint64_t& step = step_.memory().batch.state->step;
  batch_.set_step(std::atomic_ref<uint64_t>(step).load(std::memory_order_acquire) + 1);
  backend_ = kernels::cpu::MakeCpuBackend(threads);
  absl::StatusOr<std::unique_ptr<kernels::Stream>> stream = backend_->CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  return absl::OkStatus();
}

DirectPlane::~DirectPlane() {
  CloseStep();
  if (wait_for_stream_ != nullptr) {
    // Nobody is left to tell: the engine finds the error at its next call of the runtime.
    static_cast<void>(wait_for_stream_());
  }
  stream_.reset();
  taken_->store(false);
}

absl::Status DirectPlane::CheckSession() const {
  if (absl::Status status = session_.status(); !status.ok()) return status;
  if (const uint64_t generation = session_.generation(); generation != generation_) {
    return absl::UnavailableError(absl::StrCat("generation ", generation_, " of the session is over, it is ",
                                               generation, " now: open another DirectPlane"));
  }
  return absl::OkStatus();
}

absl::Status DirectPlane::End(absl::Status why) {
  status_ = std::move(why);
  CloseStep();
  return status_;
}

void DirectPlane::CloseStep() {
  if (!step_is_open_ || arena_->on_device()) return;
  step_is_open_ = false;
  // Behind the step's other work, which may still read the mailbox, but never its commits.
  batch_.WriteCommits({});
  // Without a report: the place for it may be another session's by now.
  static_cast<void>(step_.Commit(*stream_));
}

absl::Status DirectPlane::status() {
  if (status_.ok()) {
    if (absl::Status status = CheckSession(); !status.ok()) return End(status);
  }
  return status_;
}

absl::Status DirectPlane::Enqueued(absl::Status enqueued) {
  if (enqueued.ok()) return enqueued;
  return End(absl::Status(enqueued.code(), absl::StrCat("a step cannot be enqueued: ", enqueued.message())));
}

absl::Status DirectPlane::Expect(Call call, size_t doorbell) {
  if (!status_.ok()) return status_;
  if (arena_->on_device()) {
    return absl::FailedPreconditionError("the session is on a GPU: its steps are EnqueueBegin and what follows");
  }
  return batch_.Expect(call, doorbell);
}

absl::Status DirectPlane::Begin(absl::Span<const PlaneRow> rows) {
  if (absl::Status status = Expect(Call::kBegin, 0); !status.ok()) return status;
  if (absl::Status status = batch_.CheckRows(rows); !status.ok()) return status;
  if (absl::Status alive = status(); !alive.ok()) return alive;
  batch_.WriteRows(rows);
  if (absl::Status status = Enqueued(step_.Begin(*stream_)); !status.ok()) return status;
  step_is_open_ = true;
  batch_.Took(Call::kBegin);
  return absl::OkStatus();
}

absl::Status DirectPlane::Group(uint32_t group) {
  if (absl::Status status = Expect(Call::kLaunch, group); !status.ok()) return status;
  if (absl::Status alive = status(); !alive.ok()) return alive;
  if (absl::Status status = Enqueued(step_.Group(*stream_, static_cast<int32_t>(group))); !status.ok()) return status;
  batch_.Took(Call::kLaunch);
  return absl::OkStatus();
}

absl::Status DirectPlane::Await(uint32_t group, absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwait, group); !status.ok()) return status;
  if (absl::Status status = AwaitWork(timeout); !status.ok()) return status;
  if (group == 0) batch_.ReadStatuses();
  batch_.Took(Call::kAwait);
  return absl::OkStatus();
}

absl::Status DirectPlane::Commit(absl::Span<const int32_t> commits) {
  if (absl::Status status = Expect(Call::kCommit, batch_.groups()); !status.ok()) return status;
  if (absl::Status status = batch_.CheckCommits(commits); !status.ok()) return status;
  if (absl::Status alive = status(); !alive.ok()) return alive;
  batch_.WriteCommits(commits);
  if (absl::Status status = Enqueued(CommitAndReport()); !status.ok()) return status;
  batch_.Took(Call::kCommit);
  return absl::OkStatus();
}

absl::Status DirectPlane::AwaitCommit(absl::Duration timeout) {
  if (absl::Status status = Expect(Call::kAwaitCommit, batch_.groups()); !status.ok()) return status;
  if (absl::Status status = AwaitWork(timeout); !status.ok()) return status;
  batch_.ReadStatuses();
  batch_.Took(Call::kAwaitCommit);
  return absl::OkStatus();
}

absl::Status DirectPlane::CommitAndReport() {
  if (absl::Status status = step_.Commit(*stream_); !status.ok()) return status;
  step_is_open_ = false;
  return step_.Report(*stream_, result_);
}

absl::Status DirectPlane::AwaitWork(absl::Duration timeout) {
  const auto completion = std::make_shared<Completion>();
  stream_->Notify([completion](absl::Status status) { completion->Tell(std::move(status)); });
  absl::Status status;
  if (!completion->Await(timeout, &status)) {
    return End(absl::DeadlineExceededError(
        absl::StrCat("step ", step(), " was not done within ", absl::FormatDuration(timeout))));
  }
  return status.ok() ? status : End(status);
}

absl::Status DirectPlane::CheckOnDevice() {
  if (!arena_->on_device()) {
    return absl::FailedPreconditionError("the session is on the CPU: its steps are Begin and what follows");
  }
  return status();
}

absl::Status DirectPlane::EnqueueBegin() {
  if (absl::Status status = CheckOnDevice(); !status.ok()) return status;
  return Enqueued(step_.Begin(*stream_));
}

absl::Status DirectPlane::EnqueueGroup(uint32_t group) {
  if (absl::Status status = CheckOnDevice(); !status.ok()) return status;
  if (group >= step_.memory().groups.size()) {
    return absl::OutOfRangeError(
        absl::StrCat("group ", group, " is not below the ", step_.memory().groups.size(), " of the session"));
  }
  return Enqueued(step_.Group(*stream_, static_cast<int32_t>(group)));
}

absl::Status DirectPlane::EnqueueCommit() {
  if (absl::Status status = CheckOnDevice(); !status.ok()) return status;
  return Enqueued(CommitAndReport());
}

}  // namespace stoker::client
