#include "client/replay/rank_link.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace stoker::replay {
namespace {

absl::Status SendAll(int socket, const void* data, size_t bytes, const char* peer) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return absl::CancelledError(absl::StrCat(peer, " has gone: ", std::strerror(errno)));
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return absl::OkStatus();
}

absl::Status ReceiveAll(int socket, void* data, size_t bytes, const char* peer) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = recv(socket, at, bytes, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) {
      return absl::CancelledError(
          absl::StrCat(peer, " has gone: ", received == 0 ? "end of stream" : std::strerror(errno)));
    }
    at += received;
    bytes -= static_cast<size_t>(received);
  }
  return absl::OkStatus();
}

constexpr char kFollower[] = "another rank of the engine";
constexpr char kLeader[] = "rank 0 of the engine";

}  // namespace

absl::Status FollowerLinks::Send(RankMessage message) {
  for (const client::FileDescriptor& socket : sockets_) {
    if (absl::Status status = SendAll(socket.get(), &message, sizeof(message), kFollower); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status FollowerLinks::AwaitAcknowledgements() {
  for (const client::FileDescriptor& socket : sockets_) {
    char acknowledgement;
    if (absl::Status status = ReceiveAll(socket.get(), &acknowledgement, 1, kFollower); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<RankMessage> LeaderLink::Receive() {
  RankMessage message;
  if (absl::Status status = ReceiveAll(socket_.get(), &message, sizeof(message), kLeader); !status.ok()) return status;
  return message;
}

absl::Status LeaderLink::Acknowledge() { return SendAll(socket_.get(), "", 1, kLeader); }

absl::StatusOr<RankLinkPair> MakeRankLink() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::InternalError(absl::StrCat("socketpair: ", std::strerror(errno)));
  }
  return RankLinkPair{client::FileDescriptor(ends[0]), client::FileDescriptor(ends[1])};
}

}  // namespace stoker::replay
