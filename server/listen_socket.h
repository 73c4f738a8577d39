// Prepares the path of the daemon's Unix socket, which gRPC itself binds.
//
// Thread safety: one thread, that which starts and stops the daemon.
//
// Invariants:
//  1. From Prepare to the destructor this process holds the flock of PATH.lock, so no other daemon that uses this class
//     serves on PATH or PATH.fd. The kernel drops the lock with the process, however it ends. The lock file itself
//     stays: to delete it would let a third process lock a file that a second one has just unlinked.
//  2. Only a socket that nobody listens on is ever removed.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stoker::server {

// Holds the path for the daemon's life: Prepare, then let gRPC bind address(), then Finish; destroy after gRPC has
// stopped.
class ListenSocket {
 public:
  // Locks the path and removes a stale socket. Until Finish the process's umask is 0117, so that the socket never is
  // more open than 0660: start no thread that creates files in between.
  //
  // INVALID_ARGUMENT: the path is empty or too long. NOT_FOUND, FAILED_PRECONDITION: its directory does not exist, is
  // not one. PERMISSION_DENIED: the directory is not writable. ALREADY_EXISTS: another daemon holds it (the message
  // names path and pid), another process listens there, or it is no socket.
  static absl::StatusOr<std::unique_ptr<ListenSocket>> Prepare(std::string path);

  // Removes the socket if it still is the one that Finish saw, and unlocks.
  ~ListenSocket();
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  // Gives the socket mode 0660 and restores the umask. INTERNAL: there is no socket at the path.
  absl::Status Finish();

  const std::string& path() const { return path_; }
  // As gRPC's AddListeningPort wants it.
  std::string address() const { return "unix:" + path_; }
  // Where session arenas are handed out.
  std::string descriptor_path() const { return path_ + ".fd"; }

 private:
  ListenSocket(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  void RestoreUmask();

  const std::string path_;
  const int lock_;
  bool umask_changed_ = false;
  mode_t umask_ = 0;
  bool bound_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace stoker::server
