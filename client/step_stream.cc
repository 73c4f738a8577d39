#include "client/step_stream.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "client/bounded_wait.h"
#include "client/connection.h"
#include "client/status.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"

namespace stoker::client {

// Invariants: a write or a read is started only under mutex_ and before released_; gRPC reports the end (OnDone) only
// after the hold was removed, so that none of them comes too late.
class StepStream::Reactor : public grpc::ClientBidiReactor<v1::RunStepsRequest, v1::RunStepsResponse> {
 public:
  static std::shared_ptr<Reactor> Start(std::shared_ptr<Connection> connection, const std::string& token) {
    auto reactor = std::make_shared<Reactor>();
    reactor->self_ = reactor;
    reactor->connection_ = std::move(connection);
    reactor->context_.AddMetadata(kTokenKey, token);
    reactor->connection_->residency().async()->RunSteps(&reactor->context_, reactor.get());
    reactor->AddHold();
    reactor->StartCall();
    return reactor;
  }

  absl::Status Write(const v1::RunStepsRequest& request, absl::Time deadline) {
    Lock lock(mutex_);
    if (released_ || writes_over_) return Ended();
    writing_ = true;
    StartWrite(&request);
    const bool in_time = WaitUntil(changed_, lock, deadline, [this] { return !writing_; });
    if (!in_time) {
      Cancel();
      changed_.wait(lock, [this] { return !writing_; });  // `request` is gRPC's until then
    }
    if (in_time && write_ok_) return absl::OkStatus();
    writes_over_ = true;
    return in_time ? Ended() : absl::DeadlineExceededError("the daemon took no further step in time");
  }

  absl::Status Read(v1::RunStepsResponse* response, absl::Time deadline) {
    Lock lock(mutex_);
    if (!released_ && read_ == ReadState::kNone) {
      read_ = ReadState::kRunning;
      StartRead(&incoming_);
    }
    if (!WaitUntil(changed_, lock, deadline, [this] { return read_ != ReadState::kRunning; })) return NoReply();
    if (read_ == ReadState::kReady) {
      response->Swap(&incoming_);
      read_ = ReadState::kNone;
      return absl::OkStatus();
    }
    Release();
    if (!WaitUntil(changed_, lock, deadline, [this] { return end_.has_value(); })) return NoReply();
    return end_->ok() ? absl::OutOfRangeError("the stream of steps is complete") : *end_;
  }

  absl::Status Finish(absl::Time deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!released_ && !writes_over_) StartWritesDone();
      writes_over_ = true;
    }
    absl::Status status;
    for (v1::RunStepsResponse dropped; status.ok();) status = Read(&dropped, deadline);
    return absl::IsOutOfRange(status) ? absl::OkStatus() : status;
  }

  void Abandon() {
    Lock lock(mutex_);
    Cancel();
    Release();
    changed_.wait(lock, [this] { return end_.has_value(); });
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    write_ok_ = ok;
    changed_.notify_all();
  }

  void OnReadDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    read_ = ok ? ReadState::kReady : ReadState::kOver;
    changed_.notify_all();
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Reactor> self = std::move(self_);  // outlives the lock
    const std::lock_guard lock(mutex_);
    end_ = FromCall(status, cancelled_);
    changed_.notify_all();
  }

 private:
  enum class ReadState { kNone, kRunning, kReady, kOver };

  static absl::Status Ended() {
    return absl::UnavailableError("the stream of steps takes no more; Read or Finish gives the reason");
  }
  static absl::Status NoReply() { return absl::DeadlineExceededError("no reply to a step in time"); }

  void Cancel() {
    cancelled_ = true;
    context_.TryCancel();
  }

  // No read or write will be started any more.
  void Release() {
    if (!std::exchange(released_, true)) RemoveHold();
  }

  std::shared_ptr<Connection> connection_;
  grpc::ClientContext context_;
  v1::RunStepsResponse incoming_;  // gRPC's while read_ is kRunning
  std::shared_ptr<Reactor> self_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool released_ = false;
  bool writes_over_ = false;
  bool writing_ = false;
  bool write_ok_ = false;
  bool cancelled_ = false;
  ReadState read_ = ReadState::kNone;
  std::optional<absl::Status> end_;
};

std::unique_ptr<StepStream> StepStream::Open(std::shared_ptr<Connection> connection, const std::string& token,
                                             absl::Duration default_timeout) {
  return std::unique_ptr<StepStream>(new StepStream(Reactor::Start(std::move(connection), token), default_timeout));
}

StepStream::StepStream(std::shared_ptr<Reactor> reactor, absl::Duration default_timeout)
    : reactor_(std::move(reactor)), default_timeout_(default_timeout) {}

StepStream::~StepStream() { reactor_->Abandon(); }

absl::Time StepStream::Deadline(absl::Duration timeout) const {
  return absl::Now() + (timeout > absl::ZeroDuration() ? timeout : default_timeout_);
}

absl::Status StepStream::Write(const v1::RunStepsRequest& request, absl::Duration timeout) {
  return reactor_->Write(request, Deadline(timeout));
}

absl::Status StepStream::Read(v1::RunStepsResponse* response, absl::Duration timeout) {
  return reactor_->Read(response, Deadline(timeout));
}

absl::Status StepStream::Run(const v1::RunStepsRequest& request, v1::RunStepsResponse* response,
                             absl::Duration timeout) {
  const absl::Time deadline = Deadline(timeout);
  absl::Status written = reactor_->Write(request, deadline);
  if (!written.ok() && !absl::IsUnavailable(written)) return written;
  return reactor_->Read(response, deadline);  // where the write met the end of the stream, this has the reason
}

absl::Status StepStream::Finish(absl::Duration timeout) { return reactor_->Finish(Deadline(timeout)); }

}  // namespace stoker::client
