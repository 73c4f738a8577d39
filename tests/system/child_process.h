// Programs that a test starts, and the folder in which they work.
//
// Thread safety: one thread for each object.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace stoker::system_test {

// Makes an empty folder with a short path (socket paths are), and removes it with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  // Writes a file and returns its path.
  std::string Write(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
};

// Runs one program with its output in a file. It is killed with the object, and with the test's process.
class ChildProcess {
 public:
  ChildProcess(const std::vector<std::string>& arguments, const std::string& output_file);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  void Signal(int number) const;
  // Exit status, or 256 + the signal that ended it; nothing when it still runs after `timeout`.
  std::optional<int> Wait(absl::Duration timeout);
  // Signals SIGKILL and waits.
  void Kill();
  // What it has written to standard output and error.
  std::string Output() const;
  // Whether `text` appears in its output within `timeout`. Ends early when the program does.
  bool AwaitOutput(const std::string& text, absl::Duration timeout);

 private:
  const std::string output_file_;
  pid_t pid_ = -1;
  std::optional<int> status_;
};

// Runs a program to its end; exit status and output.
struct Finished {
  int status = -1;
  std::string output;
};
Finished RunToEnd(const std::vector<std::string>& arguments, const TemporaryFolder& folder,
                  absl::Duration timeout = absl::Seconds(60));

// Whether `condition` becomes true within `timeout`; asked every few milliseconds.
bool Eventually(absl::Duration timeout, const std::function<bool()>& condition);

std::string ReadFile(const std::string& path);

}  // namespace stoker::system_test
