#include "tests/system/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/replay/child_environment.h"

namespace stoker::system_test {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(3);

[[noreturn]] void Fail(const char* what) {
  std::perror(what);
  std::abort();
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  const char* parent = std::getenv("TMPDIR");
  std::string path = absl::StrCat(parent != nullptr && std::string(parent).size() < 40 ? parent : "/tmp", "/stkXXXXXX");
  if (mkdtemp(path.data()) == nullptr) Fail("mkdtemp");
  path_ = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

std::string TemporaryFolder::Write(const std::string& name, const std::string& text) const {
  std::ofstream(File(name)) << text;
  return File(name);
}

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, const std::string& output_file)
    : output_file_(output_file) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const std::vector<char*> environment = replay::ChildEnvironment();
  const int output = open(output_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
  if (output < 0) Fail(output_file.c_str());
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) Fail("fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || dup2(output, 1) < 0 || dup2(output, 2) < 0) _exit(127);
    execve(argv[0], argv.data(), environment.data());
    _exit(127);
  }
  close(output);
}

ChildProcess::~ChildProcess() { Kill(); }

bool ChildProcess::running() { return !Wait(absl::ZeroDuration()).has_value(); }

void ChildProcess::Signal(int number) const {
  if (!status_.has_value()) kill(pid_, number);
}

std::optional<int> ChildProcess::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!status_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
    } else if (absl::Now() >= deadline) {
      break;
    } else {
      absl::SleepFor(kPoll);
    }
  }
  return status_;
}

void ChildProcess::Kill() {
  Signal(SIGKILL);
  Wait(absl::InfiniteDuration());
}

std::string ChildProcess::Output() const { return ReadFile(output_file_); }

bool ChildProcess::AwaitOutput(const std::string& text, absl::Duration timeout) {
  const auto found = [&] { return Output().find(text) != std::string::npos; };
  Eventually(timeout, [&] { return found() || !running(); });
  return found();
}

Finished RunToEnd(const std::vector<std::string>& arguments, const TemporaryFolder& folder, absl::Duration timeout) {
  static int runs = 0;
  ChildProcess process(arguments, folder.File(absl::StrCat("run", runs++, ".log")));
  const std::optional<int> status = process.Wait(timeout);
  return {status.value_or(-1), process.Output()};
}

bool Eventually(absl::Duration timeout, const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(kPoll);
  }
  return true;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace stoker::system_test
