// A server in a process of its own: started, awaited, stopped.
//
// Thread safety: one thread. Start forks, but the child only makes system calls before it executes the program.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stoker::bench {

// A folder that is removed with all that is in it.
class ScratchFolder {
 public:
  static absl::StatusOr<std::unique_ptr<ScratchFolder>> Make();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  explicit ScratchFolder(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

class ChildProcess {
 public:
  // Runs `arguments`, the program first, and waits until `socket_path` accepts connections. Its output goes to
  // `log_path`. UNAVAILABLE: it ended before, or did not accept in time.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(std::vector<std::string> arguments,
                                                             const std::string& socket_path,
                                                             const std::string& log_path);
  // Ends the process, by force where it does not end within seconds.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  bool Ended();

  pid_t pid_;
};

// This program's own file.
std::string OwnProgram();
// A file beside it.
std::string BesideOwnProgram(const std::string& name);

}  // namespace stoker::bench
