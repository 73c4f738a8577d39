#include "client/replay/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "client/replay/child_environment.h"

namespace stoker::replay {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(30);
// The daemon gives running work 10 s by default.
constexpr absl::Duration kStopTimeout = absl::Seconds(20);
constexpr absl::Duration kPoll = absl::Milliseconds(10);
constexpr size_t kLogEndBytes = 2000;

std::string DefaultProgram() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return (self.parent_path() / "stokerd").string();
}

absl::StatusOr<std::string> MakeFolder() {
  const char* parent = std::getenv("TMPDIR");
  // A socket's path has at most 107 bytes, so a long TMPDIR does not do.
  if (parent == nullptr || *parent == '\0' || std::strlen(parent) > 60) parent = "/tmp";
  std::string folder = absl::StrCat(parent, "/stoker-replay-XXXXXX");
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot make a folder in ", parent, ": ", std::strerror(errno)));
  }
  return folder;
}

bool Accepts(const std::string& path) {
  const client::FileDescriptor socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  return socket_fd.valid() && connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
}

std::string DescribeEnd(int wait_status) {
  if (WIFEXITED(wait_status)) return absl::StrCat("ended with exit status ", WEXITSTATUS(wait_status));
  return absl::StrCat("was ended by signal ", WTERMSIG(wait_status));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const std::string& program,
                                                                    const std::vector<std::string>& flags) {
  const std::string path = program.empty() ? DefaultProgram() : program;
  if (access(path.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno),
                                            "; name the daemon's program with --stokerd, or "
                                            "a running daemon with --server"));
  }
  auto daemon = std::unique_ptr<DaemonProcess>(new DaemonProcess);
  auto folder = MakeFolder();
  if (!folder.ok()) return folder.status();
  daemon->folder_ = *folder;
  if (absl::Status status = daemon->Launch(path, flags); !status.ok()) return status;
  if (absl::Status status = daemon->AwaitServing(); !status.ok()) return status;
  if (absl::Status status = daemon->FindMetrics(); !status.ok()) return status;
  return daemon;
}

absl::Status DaemonProcess::Launch(const std::string& program, const std::vector<std::string>& flags) {
  // All is prepared before the fork: the child only makes system calls.
  std::vector<std::string> arguments = {program, absl::StrCat("--socket-path=", socket_path()),
                                        "--metrics-address=127.0.0.1:0", "--log-format=text"};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::vector<char*> environment = ChildEnvironment();
  const client::FileDescriptor log(open(log_path().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const client::FileDescriptor null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!log.valid() || !null.valid()) {
    return absl::UnavailableError(absl::StrCat(log_path(), ": ", std::strerror(errno)));
  }
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) return absl::UnavailableError(absl::StrCat("fork: ", std::strerror(errno)));
  if (pid_ == 0) {
    // The daemon must not outlive a parent that is killed, nor end with the terminal's interrupt before its engines.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    if (getppid() != parent || dup2(null.get(), 0) < 0 || dup2(log.get(), 1) < 0 || dup2(log.get(), 2) < 0) _exit(127);
    execve(argv[0], argv.data(), environment.data());
    _exit(127);
  }
  return absl::OkStatus();
}

bool DaemonProcess::Reap() {
  if (pid_ > 0 && waitpid(pid_, &wait_status_, WNOHANG) == pid_) pid_ = -1;
  return pid_ < 0;
}

absl::Status DaemonProcess::AwaitServing() {
  const absl::Time deadline = absl::Now() + kStartTimeout;
  while (!Accepts(socket_path())) {
    if (Reap()) {
      return absl::UnavailableError(
          absl::StrCat("stokerd ", DescribeEnd(wait_status_), " while starting:\n", LogEnd()));
    }
    if (absl::Now() > deadline) {
      return absl::UnavailableError(
          absl::StrCat("stokerd did not serve within ", absl::FormatDuration(kStartTimeout), ":\n", LogEnd()));
    }
    absl::SleepFor(kPoll);
  }
  return absl::OkStatus();
}

absl::Status DaemonProcess::Stop() {
  if (!Reap()) kill(pid_, SIGTERM);
  const absl::Time deadline = absl::Now() + kStopTimeout;
  while (!Reap()) {
    if (absl::Now() > deadline) {
      kill(pid_, SIGKILL);
      waitpid(pid_, &wait_status_, 0);
      pid_ = -1;
      return absl::InternalError(absl::StrCat("stokerd did not end within ", absl::FormatDuration(kStopTimeout),
                                              " of SIGTERM and was killed:\n", LogEnd()));
    }
    absl::SleepFor(kPoll);
  }
  if (!WIFEXITED(wait_status_) || WEXITSTATUS(wait_status_) != 0) {
    return absl::InternalError(absl::StrCat("stokerd ", DescribeEnd(wait_status_), ":\n", LogEnd()));
  }
  return absl::OkStatus();
}

absl::Status DaemonProcess::FindMetrics() {
  // "... INFO metrics address=127.0.0.1:0 port=41013", written before the daemon serves.
  const std::string log = Log();
  const std::string port_key = " port=";
  const size_t line = log.find(" metrics ");
  const size_t port = line == std::string::npos ? line : log.find(port_key, line);
  if (port == std::string::npos) return absl::InternalError(absl::StrCat("the log names no metrics port:\n", LogEnd()));
  const size_t begin = port + port_key.size();
  metrics_url_ = absl::StrCat(
      "http://127.0.0.1:", log.substr(begin, log.find_first_not_of("0123456789", begin) - begin), "/metrics");
  return absl::OkStatus();
}

std::string DaemonProcess::Log() const {
  std::ostringstream text;
  text << std::ifstream(log_path()).rdbuf();
  return text.str();
}

std::string DaemonProcess::LogEnd() const {
  const std::string log = Log();
  return log.size() > kLogEndBytes ? log.substr(log.size() - kLogEndBytes) : log;
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) Stop().IgnoreError();  // the caller that wants to know has called it
  std::error_code error;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, error);
}

}  // namespace stoker::replay
