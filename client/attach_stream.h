// AttachStream: the stream that is a session's lease, as a queue of what came. Internal to the library.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/connection.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "stoker/v1/sessions.grpc.pb.h"

namespace stoker::client {

// One Attach call. Reads by itself and queues what comes.
//
// Thread safety: any thread. Owns itself until gRPC is done with it.
class AttachStream : public grpc::ClientReadReactor<v1::AttachResponse> {
 public:
  enum class Outcome { kMessage, kEnded, kTimeout };

  static std::shared_ptr<AttachStream> Start(std::shared_ptr<Connection> connection, const v1::AttachRequest& request,
                                             bool wait_for_ready);

  // The next message, or the status with which the stream ended.
  Outcome Next(absl::Time deadline, v1::AttachResponse* message, absl::Status* status);

  void Cancel();
  // Cancels, and waits until gRPC has let go.
  void CancelAndWait();

  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  std::shared_ptr<Connection> connection_;
  grpc::ClientContext context_;
  v1::AttachResponse incoming_;  // gRPC's between StartRead and OnReadDone
  std::shared_ptr<AttachStream> self_;
  std::atomic<bool> cancelled_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<v1::AttachResponse> events_;
  bool reads_over_ = false;
  std::optional<absl::Status> end_;
};

}  // namespace stoker::client
