#include "server/listen_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stoker::server {
namespace {

constexpr mode_t kSocketMode = 0660;
// ".fd" is appended, and the name ends with a zero byte.
constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1 - 3;

std::string Quoted(const std::string& path) { return absl::StrCat("socket_path \"", path, "\""); }

absl::Status CheckFolder(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash == 0 ? 1 : slash);
  struct stat info;
  if (stat(folder.c_str(), &info) != 0) {
    const int error = errno;
    const std::string message = absl::StrCat(Quoted(path), ": directory \"", folder, "\": ", strerror(error));
    return error == EACCES ? absl::PermissionDeniedError(message) : absl::NotFoundError(message);
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(Quoted(path), ": \"", folder, "\" is not a directory"));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(Quoted(path), ": directory \"", folder, "\" is not writable: ", strerror(errno)));
  }
  return absl::OkStatus();
}

// The process that wrote its id into the lock file, as text.
std::string HolderOf(int lock) {
  char text[32] = {};
  const ssize_t size = pread(lock, text, sizeof(text) - 1, 0);
  int pid = 0;
  return size > 0 && absl::SimpleAtoi(text, &pid) ? absl::StrCat("process ", pid) : "another process";
}

absl::StatusOr<int> TakeLock(const std::string& path) {
  const std::string lock_path = path + ".lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) {
    const std::string message = absl::StrCat(Quoted(path), ": cannot open \"", lock_path, "\": ", strerror(errno));
    return errno == EACCES ? absl::PermissionDeniedError(message) : absl::FailedPreconditionError(message);
  }
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    const std::string holder = HolderOf(lock);
    close(lock);
    if (error != EWOULDBLOCK) {
      return absl::FailedPreconditionError(
          absl::StrCat(Quoted(path), ": cannot lock \"", lock_path, "\": ", strerror(error)));
    }
    return absl::AlreadyExistsError(
        absl::StrCat(Quoted(path), " is in use by another daemon, ", holder, " (it holds \"", lock_path, "\")"));
  }
  // For people and for the message above; the lock is what counts.
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(lock, 0) != 0 || pwrite(lock, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    const int error = errno;
    close(lock);
    return absl::FailedPreconditionError(
        absl::StrCat(Quoted(path), ": cannot write \"", lock_path, "\": ", strerror(error)));
  }
  return lock;
}

// Removes what an ended daemon left. A socket tells by refusing a connection that nobody listens.
absl::Status RemoveStale(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(Quoted(path), ": ", strerror(errno)));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(absl::StrCat(Quoted(path), " exists and is not a socket; it is left as it is"));
  }
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) return absl::ResourceExhaustedError(absl::StrCat("cannot make a socket: ", strerror(errno)));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.c_str(), path.size());
  const int result = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = result == 0 ? 0 : errno;
  close(probe);
  if (error == 0 || error == EAGAIN || error == EPROTOTYPE) {
    return absl::AlreadyExistsError(absl::StrCat(Quoted(path), " is in use: another process listens on it"));
  }
  if (error != ECONNREFUSED && error != ENOENT) {
    return absl::FailedPreconditionError(
        absl::StrCat(Quoted(path), " exists, and whether it is in use cannot be told: ", strerror(error)));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::FailedPreconditionError(
        absl::StrCat(Quoted(path), ": cannot remove the stale socket: ", strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ListenSocket>> ListenSocket::Prepare(std::string path) {
  if (path.empty() || path.size() > kMaxPathBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(path), " has ", path.size(), " bytes: 1 to ", kMaxPathBytes, " are allowed"));
  }
  if (absl::Status status = CheckFolder(path); !status.ok()) return status;
  absl::StatusOr<int> lock = TakeLock(path);
  if (!lock.ok()) return lock.status();
  std::unique_ptr<ListenSocket> listen_socket(new ListenSocket(std::move(path), *lock));
  if (absl::Status status = RemoveStale(listen_socket->path_); !status.ok()) return status;
  listen_socket->umask_ = umask(0777 & ~kSocketMode);
  listen_socket->umask_changed_ = true;
  return listen_socket;
}

ListenSocket::~ListenSocket() {
  RestoreUmask();
  struct stat info;
  if (bound_ && lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    unlink(path_.c_str());
  }
  close(lock_);
}

absl::Status ListenSocket::Finish() {
  RestoreUmask();
  struct stat info;
  if (lstat(path_.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) {
    return absl::InternalError(absl::StrCat(Quoted(path_), " was not bound"));
  }
  if (chmod(path_.c_str(), kSocketMode) != 0) {
    return absl::InternalError(absl::StrCat(Quoted(path_), ": cannot set its mode: ", strerror(errno)));
  }
  bound_ = true;
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return absl::OkStatus();
}

void ListenSocket::RestoreUmask() {
  if (umask_changed_) umask(umask_);
  umask_changed_ = false;
}

}  // namespace stoker::server
