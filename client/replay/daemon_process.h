// A private stokerd: started in a folder of its own, stopped and cleaned up at the end.
//
// Thread safety: belongs to one thread. Start forks, so the caller must not have other threads that hold locks.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stoker::replay {

class DaemonProcess {
 public:
  // Starts `program`, or, when that is empty, the stokerd beside this program, with `flags` beside its own, and waits
  // until its socket accepts.
  // NOT_FOUND: no such program; UNAVAILABLE: it ended or did not serve in time; the message has the end of its log.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const std::string& program,
                                                              const std::vector<std::string>& flags);
  // Stops the daemon, if Stop has not, and removes the folder.
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Sends SIGTERM and waits. INTERNAL: it did not end within its grace time and was killed, or ended with an exit
  // status other than 0; the message has the end of its log.
  absl::Status Stop();

  std::string address() const { return "unix:" + socket_path(); }
  // Where Prometheus scrapes it.
  const std::string& metrics_url() const { return metrics_url_; }
  pid_t pid() const { return pid_; }

 private:
  DaemonProcess() = default;
  std::string socket_path() const { return folder_ + "/stokerd.sock"; }
  std::string log_path() const { return folder_ + "/stokerd.log"; }
  absl::Status Launch(const std::string& program, const std::vector<std::string>& flags);
  absl::Status AwaitServing();
  // Takes the port that the daemon found free from its log.
  absl::Status FindMetrics();
  // Whether the process has ended; then pid_ is -1 and wait_status_ is set.
  bool Reap();
  std::string Log() const;
  std::string LogEnd() const;

  std::string folder_;
  std::string metrics_url_;
  pid_t pid_ = -1;
  int wait_status_ = 0;
};

}  // namespace stoker::replay
