#include "server/descriptor_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/log.h"

namespace stoker::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxReasonBytes = 1024;

using core::FileDescriptor;

// Before the token of a client that hands a descriptor over, and of one that asks for the pool.
constexpr std::string_view kRegister = "register ";
constexpr std::string_view kPool = "pool ";
static_assert(kPool.size() < kRegister.size());

bool HasVerb(std::string_view line, std::string_view verb) { return line.substr(0, verb.size()) == verb; }

struct Client {
  FileDescriptor socket;
  Clock::time_point accepted;
  std::string line;
  FileDescriptor offered;
};

// A token with what comes before it.
size_t MaxLineBytes(std::string_view line) {
  const size_t verb = HasVerb(line, kRegister) ? kRegister.size() : HasVerb(line, kPool) ? kPool.size() : 0;
  return DescriptorSocket::kMaxTokenBytes + verb;
}

// Receives at most `size` bytes into `buffer`, as recv, and the descriptors that come with them. False: there were more
// than one, counting `offered`; all are closed.
bool ReceiveWithDescriptor(int socket, char* buffer, size_t size, ssize_t* received, FileDescriptor* offered) {
  iovec data = {buffer, size};
  // Room for two, so that a second one is seen; the kernel closes others, and says so.
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  *received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (*received < 0) return true;
  int count = (message.msg_flags & MSG_CTRUNC) != 0 ? 2 : 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int number = -1;
      memcpy(&number, reinterpret_cast<const char*>(header) + at, sizeof(int));
      FileDescriptor descriptor(number);
      count += offered->valid() ? 2 : 1;
      *offered = std::move(descriptor);
    }
  }
  if (count <= 1) return true;
  offered->Reset();
  return false;
}

// Sends one byte 0 and the descriptors, 1 to kMaxDescriptors. The send buffer of a connection on which nothing was sent
// has room. False: errno says why, and nothing was sent.
bool SendDescriptors(int socket, const std::vector<FileDescriptor>& descriptors) {
  char byte = 0;
  iovec data = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(DescriptorSocket::kMaxDescriptors * sizeof(int))] = {};
  const size_t bytes = descriptors.size() * sizeof(int);
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(bytes);
  unsigned char* at = CMSG_DATA(header);
  for (const FileDescriptor& descriptor : descriptors) {
    const int number = descriptor.get();
    memcpy(at, &number, sizeof(int));
    at += sizeof(int);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}

void SendReason(int socket, absl::string_view reason) {
  std::string message(1, '\1');
  message.append(reason.data(), std::min(reason.size(), kMaxReasonBytes));
  // A client that does not take the reason gets none.
  (void)!send(socket, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

absl::StatusOr<PeerCredentials> CredentialsOf(int socket) {
  ucred user = {};
  socklen_t size = sizeof(user);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) {
    return absl::InternalError(absl::StrCat("SO_PEERCRED: ", strerror(errno)));
  }
  PeerCredentials peer{user.uid, user.gid, {}};
  // The kernel tells the size that it needs, at most 65,536 groups.
  size = 0;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, nullptr, &size) != 0 && errno == ERANGE) {
    peer.groups.resize(size / sizeof(gid_t));
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, peer.groups.data(), &size) != 0) peer.groups.clear();
  }
  return peer;
}

}  // namespace

bool PeerAllowed(const PeerCredentials& peer, uid_t daemon_uid, gid_t socket_gid) {
  return peer.uid == 0 || peer.uid == daemon_uid || peer.gid == socket_gid ||
         std::find(peer.groups.begin(), peer.groups.end(), socket_gid) != peer.groups.end();
}

class DescriptorSocket::Server {
 public:
  Server(std::string path, Lookup lookup, Options options)
      : path_(std::move(path)), lookup_(std::move(lookup)), options_(std::move(options)) {}

  ~Server() {
    if (thread_.joinable()) {
      const uint64_t one = 1;
      (void)!write(stop_.get(), &one, sizeof(one));  // the counter is 0, so that it cannot be full
      thread_.join();
    }
    struct stat info;
    if (bound_ && lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
      unlink(path_.c_str());
    }
  }

  const std::string& path() const { return path_; }

  absl::Status Start() {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path_.empty() || path_.size() >= sizeof(address.sun_path)) {
      return absl::InvalidArgumentError(absl::StrCat("descriptor socket \"", path_, "\" has ", path_.size(),
                                                     " bytes: 1 to ", sizeof(address.sun_path) - 1, " are allowed"));
    }
    memcpy(address.sun_path, path_.c_str(), path_.size());
    struct stat info;
    if (lstat(path_.c_str(), &info) == 0) {
      if (!S_ISSOCK(info.st_mode)) {
        return absl::AlreadyExistsError(
            absl::StrCat("descriptor socket \"", path_, "\" exists and is not a socket; it is left as it is"));
      }
      unlink(path_.c_str());
    }
    stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    listener_ = FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!stop_.valid() || !listener_.valid()) return Unavailable("cannot make a socket");
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return Unavailable("cannot bind");
    }
    // Nobody can connect before listen, so that the mode is in time, whatever the umask.
    if (chmod(path_.c_str(), 0660) != 0) return Unavailable("cannot set its mode");
    if (lstat(path_.c_str(), &info) != 0) return Unavailable("cannot be read");
    bound_ = true;
    device_ = info.st_dev;
    inode_ = info.st_ino;
    group_ = info.st_gid;
    if (listen(listener_.get(), SOMAXCONN) != 0) return Unavailable("cannot listen");
    thread_ = std::thread([this] { Serve(); });
    return absl::OkStatus();
  }

 private:
  absl::Status Unavailable(absl::string_view what) const {
    return absl::UnavailableError(absl::StrCat("descriptor socket \"", path_, "\": ", what, ": ", strerror(errno)));
  }

  bool Crowded() const { return clients_.size() >= static_cast<size_t>(options_.max_clients); }

  Clock::time_point DeadlineOf(const Client& client) const {
    const absl::Duration limit =
        Crowded() ? std::min(kCrowdedTimeout, options_.client_timeout) : options_.client_timeout;
    return client.accepted + absl::ToChronoNanoseconds(limit);
  }

  // Until the first client's time is up; -1 without clients.
  int PollTimeoutMs() const {
    if (clients_.empty()) return -1;
    // Clients stand in the order of their arrival, and have equal limits.
    const auto left = DeadlineOf(clients_.front()) - Clock::now();
    return static_cast<int>(std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()));
  }

  void Serve() {
    std::vector<pollfd> polled;
    while (true) {
      polled.assign({{stop_.get(), POLLIN, 0}, {Crowded() ? -1 : listener_.get(), POLLIN, 0}});
      for (const Client& client : clients_) polled.push_back({client.socket.get(), POLLIN, 0});
      if (poll(polled.data(), polled.size(), PollTimeoutMs()) < 0 && errno != EINTR) {
        Log::Error("descriptor socket ends", {{"path", path_}, {"error", strerror(errno)}});
        return;
      }
      if (polled[0].revents != 0) return;
      for (size_t i = 0; i < clients_.size(); ++i) {
        if (polled[i + 2].revents != 0) Receive(&clients_[i]);
      }
      const bool accepts = polled[1].revents != 0;
      Erase();
      DropLate();
      Erase();
      if (accepts) Accept();
    }
  }

  void Accept() {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The connection stays in the queue and would wake this thread at once; wait for better times instead.
        Log::Warning("descriptor socket cannot accept", {{"path", path_}, {"error", strerror(errno)}});
        pollfd stop = {stop_.get(), POLLIN, 0};
        poll(&stop, 1, 100);
      }
      return;
    }
    absl::StatusOr<PeerCredentials> peer = CredentialsOf(socket.get());
    if (!peer.ok() || !PeerAllowed(*peer, geteuid(), group_)) {
      const std::string reason =
          peer.ok() ? absl::StrCat("user ", peer->uid,
                                   " may not use this socket: neither the daemon's user nor in its group ", group_)
                    : std::string(peer.status().message());
      Log::Warning("descriptor refused", {{"reason", reason}});
      SendReason(socket.get(), reason);
      return;
    }
    clients_.push_back({std::move(socket), Clock::now(), "", {}});
  }

  // Reads what is there, and answers when the line is complete. Afterwards the socket is closed, or waits for more.
  void Receive(Client* client) {
    char buffer[kRegister.size() + kMaxTokenBytes + 1];  // with the newline
    ssize_t size = 0;
    const bool one = ReceiveWithDescriptor(client->socket.get(), buffer, sizeof(buffer) - client->line.size(), &size,
                                           &client->offered);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size > 0) client->line.append(buffer, size);
    const std::string_view line = std::string_view(client->line).substr(0, client->line.find('\n'));
    const bool complete = line.size() < client->line.size();
    if (!one) {
      SendReason(client->socket.get(), "more than one descriptor came");
    } else if (line.size() > MaxLineBytes(line)) {
      SendReason(client->socket.get(), absl::StrCat("the token has more than ", kMaxTokenBytes, " bytes"));
    } else if (complete && HasVerb(line, kRegister)) {
      Take(client->socket.get(), line.substr(kRegister.size()), std::move(client->offered));
    } else if (complete && HasVerb(line, kPool)) {
      Give(client->socket.get(), PoolOf(line.substr(kPool.size())));
    } else if (complete) {
      Give(client->socket.get(), ArenaOf(line));
    } else if (size <= 0) {
      SendReason(client->socket.get(), "the connection ended before the token's newline");
    } else {
      return;
    }
    client->offered.Reset();
    client->socket.Reset();
  }

  void Take(int socket, std::string_view token, FileDescriptor descriptor) {
    absl::StatusOr<uint64_t> number = absl::UnimplementedError("descriptors are not taken here");
    if (!descriptor.valid()) {
      number = absl::InvalidArgumentError("no descriptor came with the line");
    } else if (options_.offer != nullptr) {
      number = options_.offer(token, std::move(descriptor));
    }
    if (!number.ok()) {
      Log::Warning("descriptor not taken", {{"reason", number.status().message()}});
      return SendReason(socket, number.status().message());
    }
    const std::string reply = absl::StrCat(absl::string_view("\0", 1), *number);
    // A client that does not take the number lets the descriptor expire.
    (void)!send(socket, reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  absl::StatusOr<std::vector<FileDescriptor>> ArenaOf(std::string_view token) const {
    const absl::StatusOr<int> found = lookup_(token);
    if (!found.ok()) return found.status();
    std::vector<FileDescriptor> arena;
    arena.emplace_back(*found);
    return arena;
  }

  absl::StatusOr<std::vector<FileDescriptor>> PoolOf(std::string_view token) const {
    if (options_.pool == nullptr) return absl::UnimplementedError("no pool's memory is handed out here");
    absl::StatusOr<std::vector<FileDescriptor>> found = options_.pool(token);
    if (found.ok() && (found->empty() || found->size() > kMaxDescriptors)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the pool's memory is behind ", found->size(), " descriptors: 1 to ", kMaxDescriptors,
                       " can be handed out, which is the kernel's limit for one message"));
    }
    return found;
  }

  static void Give(int socket, const absl::StatusOr<std::vector<FileDescriptor>>& found) {
    if (!found.ok()) {
      Log::Warning("descriptor refused", {{"reason", found.status().message()}});
      return SendReason(socket, found.status().message());
    }
    if (SendDescriptors(socket, *found)) return;
    const std::string reason = strerror(errno);
    Log::Warning("descriptor not sent", {{"error", reason}});
    SendReason(socket, absl::StrCat(found->size(), " descriptors cannot be sent: ", reason));
  }

  void Erase() {
    std::erase_if(clients_, [](const Client& client) { return !client.socket.valid(); });
  }

  void DropLate() {
    const Clock::time_point now = Clock::now();
    for (Client& client : clients_) {
      if (now < DeadlineOf(client)) continue;
      SendReason(client.socket.get(), "the token did not arrive in time");
      client.socket.Reset();
    }
  }

  const std::string path_;
  const Lookup lookup_;
  const Options options_;
  FileDescriptor stop_;
  FileDescriptor listener_;
  bool bound_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  gid_t group_ = 0;
  std::vector<Client> clients_;  // of thread_ only
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<DescriptorSocket>> DescriptorSocket::Start(std::string path, Lookup lookup,
                                                                          Options options) {
  auto server = std::make_unique<Server>(std::move(path), std::move(lookup), std::move(options));
  if (absl::Status status = server->Start(); !status.ok()) return status;
  return std::unique_ptr<DescriptorSocket>(new DescriptorSocket(std::move(server)));
}

DescriptorSocket::DescriptorSocket(std::unique_ptr<Server> server) : server_(std::move(server)) {}

DescriptorSocket::~DescriptorSocket() = default;

const std::string& DescriptorSocket::path() const { return server_->path(); }

}  // namespace stoker::server
