#include "client/descriptor_exchange.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stoker::client {
namespace {

// A daemon sends a number, or a reason of at most 1024 bytes.
constexpr size_t kMaxReplyBytes = 1100;

absl::Status SocketError(int error, absl::string_view path, absl::string_view what) {
  const std::string message = absl::StrCat("descriptor socket '", path, "': ", what);
  switch (error) {
    case EAGAIN:
    case EINPROGRESS:
    case ETIMEDOUT:
      return absl::DeadlineExceededError(absl::StrCat(message, ": timed out"));
    case ENOENT:
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
      return absl::UnavailableError(absl::StrCat(message, ": ", std::strerror(error)));
    default:
      return absl::ErrnoToStatus(error, message);
  }
}

// Bounds the socket's next operation. False when the deadline has passed.
bool SetTimeout(int socket, int option, absl::Time deadline) {
  // Zero would mean no bound, so less than a microsecond counts as over.
  const absl::Duration left = std::min(deadline - absl::Now(), absl::Hours(1));
  if (left < absl::Microseconds(1)) {
    errno = EAGAIN;
    return false;
  }
  const timeval timeout = absl::ToTimeval(left);
  return setsockopt(socket, SOL_SOCKET, option, &timeout, sizeof(timeout)) == 0;
}

// Receives one byte and the descriptors that come with it, of which there must be `count`, at most kMaxDescriptors.
absl::StatusOr<std::vector<FileDescriptor>> ReceiveDescriptors(int socket, absl::string_view path, size_t count,
                                                               absl::Time deadline) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = 0;
  do {
    if (!SetTimeout(socket, SO_RCVTIMEO, deadline)) return SocketError(errno, path, "receive");
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return SocketError(errno, path, "receive");
  std::vector<FileDescriptor> descriptors;
  descriptors.reserve(kMaxDescriptors);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int value = -1;
      std::memcpy(&value, reinterpret_cast<const char*>(header) + at, sizeof(value));
      descriptors.emplace_back(value);
    }
  }
  // There is room for as many as a message can have: what was cut off, this process may not have open.
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("descriptor socket '", path, "': of ", count, " descriptors ",
                                                     descriptors.size(), " came, more than these",
                                                     " this process may not have open (RLIMIT_NOFILE)"));
  }
  if (descriptors.empty()) {
    // A daemon that refuses sends the reason as text and closes.
    char reason[256];
    ssize_t reason_bytes = 0;
    if (received > 0 && SetTimeout(socket, SO_RCVTIMEO, deadline)) {
      reason_bytes = recv(socket, reason, sizeof(reason), MSG_WAITALL);
    }
    return absl::PermissionDeniedError(absl::StrCat(
        "descriptor socket '", path, "': the daemon sent no descriptor", reason_bytes > 0 ? ": " : "",
        absl::CHexEscape(absl::string_view(reason, static_cast<size_t>(std::max<ssize_t>(reason_bytes, 0))))));
  }
  if (descriptors.size() != count) {
    return absl::InternalError(
        absl::StrCat("descriptor socket '", path, "': ", descriptors.size(), " descriptors came, not ", count));
  }
  return descriptors;
}

absl::StatusOr<FileDescriptor> Connect(const std::string& path, absl::Time deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InternalError(absl::StrCat("descriptor_socket has ", path.size(),
                                            " bytes; a Unix socket's path has at most ", sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return SocketError(errno, path, "socket");
  int result = 0;
  do {
    // Bounds connect, too, which waits while the listener's queue is full.
    if (!SetTimeout(socket.get(), SO_SNDTIMEO, deadline)) return SocketError(errno, path, "connect");
    result = connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return SocketError(errno, path, "connect");
  return socket;
}

// Sends the line; `descriptor`, where there is one, comes with its first byte.
absl::Status SendLine(int socket, absl::string_view path, absl::string_view line, int descriptor, absl::Time deadline) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  for (size_t sent = 0; sent < line.size();) {
    if (!SetTimeout(socket, SO_SNDTIMEO, deadline)) return SocketError(errno, path, "send");
    iovec data{const_cast<char*>(line.data()) + sent, line.size() - sent};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (sent == 0 && descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    const ssize_t count = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (count < 0 && errno != EINTR) return SocketError(errno, path, "send");
    if (count > 0) sent += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FileDescriptor>> Fetch(const std::string& path, absl::string_view line, size_t count,
                                                  absl::Time deadline) {
  const absl::StatusOr<FileDescriptor> socket = Connect(path, deadline);
  if (!socket.ok()) return socket.status();
  if (absl::Status sent = SendLine(socket->get(), path, line, -1, deadline); !sent.ok()) return sent;
  return ReceiveDescriptors(socket->get(), path, count, deadline);
}

}  // namespace

absl::StatusOr<FileDescriptor> FetchDescriptor(const std::string& path, absl::string_view token, absl::Time deadline) {
  absl::StatusOr<std::vector<FileDescriptor>> one = Fetch(path, absl::StrCat(token, "\n"), 1, deadline);
  if (!one.ok()) return one.status();
  return std::move(one->front());
}

absl::StatusOr<std::vector<FileDescriptor>> FetchPoolDescriptors(const std::string& path, absl::string_view token,
                                                                 size_t count, absl::Time deadline) {
  return Fetch(path, absl::StrCat("pool ", token, "\n"), count, deadline);
}

absl::StatusOr<uint64_t> OfferDescriptor(const std::string& path, absl::string_view token, int descriptor,
                                         absl::Time deadline) {
  const absl::StatusOr<FileDescriptor> socket = Connect(path, deadline);
  if (!socket.ok()) return socket.status();
  absl::Status sent = SendLine(socket->get(), path, absl::StrCat("register ", token, "\n"), descriptor, deadline);
  if (!sent.ok()) return sent;
  std::string reply;
  char buffer[kMaxReplyBytes];
  while (reply.size() < kMaxReplyBytes) {
    if (!SetTimeout(socket->get(), SO_RCVTIMEO, deadline)) return SocketError(errno, path, "receive");
    const ssize_t count = recv(socket->get(), buffer, kMaxReplyBytes - reply.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SocketError(errno, path, "receive");
    if (count == 0) break;
    reply.append(buffer, static_cast<size_t>(count));
  }
  uint64_t number = 0;
  if (reply.size() > 1 && reply[0] == 0 && absl::SimpleAtoi(reply.substr(1), &number)) return number;
  return absl::PermissionDeniedError(absl::StrCat("descriptor socket '", path, "': the daemon took no descriptor: ",
                                                  absl::CHexEscape(reply.substr(std::min<size_t>(1, reply.size())))));
}

}  // namespace stoker::client
