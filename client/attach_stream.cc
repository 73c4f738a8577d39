#include "client/attach_stream.h"

#include <utility>

#include "client/bounded_wait.h"
#include "client/status.h"

namespace stoker::client {
namespace {

// Events wait here while a callback runs. One more replaces the youngest.
constexpr size_t kMaxQueuedEvents = 64;
// How long after the last read of a stream its status may come.
constexpr absl::Duration kStatusGrace = absl::Seconds(1);

}  // namespace

std::shared_ptr<AttachStream> AttachStream::Start(std::shared_ptr<Connection> connection,
                                                  const v1::AttachRequest& request, bool wait_for_ready) {
  auto stream = std::make_shared<AttachStream>();
  stream->self_ = stream;
  stream->context_.set_wait_for_ready(wait_for_ready);
  stream->connection_ = std::move(connection);
  stream->connection_->sessions().async()->Attach(&stream->context_, &request, stream.get());
  stream->StartRead(&stream->incoming_);
  stream->StartCall();
  return stream;
}

AttachStream::Outcome AttachStream::Next(absl::Time deadline, v1::AttachResponse* message, absl::Status* status) {
  Lock lock(mutex_);
  if (!WaitUntil(changed_, lock, deadline, [this] { return !events_.empty() || reads_over_ || end_.has_value(); })) {
    return Outcome::kTimeout;
  }
  if (events_.empty()) {
    // The status follows the last read at once, unless that was a message that could not be parsed: then the stream
    // stays open without anybody reading it.
    if (!WaitUntil(changed_, lock, absl::Now() + kStatusGrace, [this] { return end_.has_value(); })) {
      lock.unlock();
      CancelAndWait();
      *status = absl::InternalError("Attach brought a message that cannot be parsed");
      return Outcome::kEnded;
    }
    *status = *end_;
    return Outcome::kEnded;
  }
  *message = std::move(events_.front());
  events_.pop_front();
  return Outcome::kMessage;
}

void AttachStream::Cancel() {
  cancelled_ = true;
  context_.TryCancel();
}

void AttachStream::CancelAndWait() {
  Cancel();
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return end_.has_value(); });
}

void AttachStream::OnReadDone(bool ok) {
  if (!ok) {
    const std::lock_guard lock(mutex_);
    reads_over_ = true;
    changed_.notify_all();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (events_.size() == kMaxQueuedEvents) events_.pop_back();
    events_.push_back(std::move(incoming_));
    changed_.notify_all();
  }
  incoming_.Clear();
  StartRead(&incoming_);
}

void AttachStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<AttachStream> self = std::move(self_);  // outlives the lock
  const std::lock_guard lock(mutex_);
  end_ = FromCall(status, cancelled_);
  changed_.notify_all();
}

}  // namespace stoker::client
