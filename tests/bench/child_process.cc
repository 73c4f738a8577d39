#include "tests/bench/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::bench {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
constexpr absl::Duration kStopTimeout = absl::Seconds(15);
constexpr absl::Duration kPoll = absl::Milliseconds(5);

bool Accepts(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool accepts = fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  if (fd >= 0) close(fd);
  return accepts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScratchFolder>> ScratchFolder::Make() {
  // Not below TMPDIR: a socket's path has at most 107 bytes.
  std::string path = "/tmp/stoker-bench-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
  return std::unique_ptr<ScratchFolder>(new ScratchFolder(std::move(path)));
}

ScratchFolder::~ScratchFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(std::vector<std::string> arguments,
                                                                  const std::string& socket_path,
                                                                  const std::string& log_path) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  if (access(argv[0], X_OK) != 0) return absl::ErrnoToStatus(errno, arguments[0]);
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0) return absl::ErrnoToStatus(errno, log_path);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || dup2(log, 1) < 0 || dup2(log, 2) < 0) _exit(127);
    execv(argv[0], argv.data());
    _exit(127);
  }
  const absl::Status forked = pid < 0 ? absl::ErrnoToStatus(errno, "fork") : absl::OkStatus();
  close(log);
  if (!forked.ok()) return forked;
  std::unique_ptr<ChildProcess> child(new ChildProcess(pid));
  for (const absl::Time deadline = absl::Now() + kStartTimeout; !Accepts(socket_path); absl::SleepFor(kPoll)) {
    if (child->Ended() || absl::Now() > deadline) {
      return absl::UnavailableError(absl::StrCat(arguments[0], " does not serve at ", socket_path));
    }
  }
  return child;
}

bool ChildProcess::Ended() {
  if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
  return pid_ < 0;
}

ChildProcess::~ChildProcess() {
  if (!Ended()) kill(pid_, SIGTERM);
  for (const absl::Time deadline = absl::Now() + kStopTimeout; !Ended(); absl::SleepFor(kPoll)) {
    if (absl::Now() < deadline) continue;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    return;
  }
}

std::string OwnProgram() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

std::string BesideOwnProgram(const std::string& name) {
  return (std::filesystem::path(OwnProgram()).parent_path() / name).string();
}

}  // namespace stoker::bench
