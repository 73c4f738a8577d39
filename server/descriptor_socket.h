// Passes descriptors over a Unix socket, to and from whoever has a session's token.
//
// A client connects and sends one line. "TOKEN\n" asks for the session's arena; "pool TOKEN\n" for the memory of its
// pool, which is in one descriptor or in several; "register TOKEN\n", with a descriptor as SCM_RIGHTS, hands that
// descriptor over. It receives one byte: 0 with the descriptors as SCM_RIGHTS, all in one message, or 0 followed by the
// decimal number by which RegisterTensor names what was handed over, or 1 followed by the reason as text. Then the
// server closes the connection.
//
// Thread safety: any thread; one thread of its own does the work.
//
// Invariants:
//  1. At most max_clients connections are open; a client that has not sent its line within client_timeout, or within
//     kCrowdedTimeout when all places are taken, is told so and closed. No client is waited for with others waiting.
//  2. A token is at most kMaxTokenBytes long. A connection holds at most one descriptor of its client: one more and it
//     is refused.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/core/file_descriptor.h"

namespace stoker::server {

// Who is at the other end of a connection.
struct PeerCredentials {
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // supplementary
};

// Whether the peer is root, the daemon's own user, or of the socket's group.
bool PeerAllowed(const PeerCredentials& peer, uid_t daemon_uid, gid_t socket_gid);

// Serves until it is destroyed.
class DescriptorSocket {
 public:
  static constexpr int kMaxTokenBytes = 256;
  // The kernel's limit for one message (SCM_MAX_FD). A pool with more descriptors is refused.
  static constexpr size_t kMaxDescriptors = 253;
  static constexpr absl::Duration kCrowdedTimeout = absl::Milliseconds(100);

  // Gives the arena of a token as a NEW descriptor, which the socket closes when it has been sent: only the owner can
  // duplicate it without a race against its own close. Runs on the socket's thread; must not block. The message of an
  // error goes to the client.
  using Lookup = std::function<absl::StatusOr<int>(std::string_view token)>;

  // Takes a descriptor for the session of a token and gives its number. As Lookup otherwise.
  using Offer = std::function<absl::StatusOr<uint64_t>(std::string_view token, core::FileDescriptor descriptor)>;

  // Gives the descriptors of the pool of a token's session, in order. As Lookup otherwise.
  using PoolLookup = std::function<absl::StatusOr<std::vector<core::FileDescriptor>>(std::string_view token)>;

  struct Options {
    absl::Duration client_timeout = absl::Seconds(2);
    int max_clients = 64;
    Offer offer = nullptr;      // none: nothing can be handed over
    PoolLookup pool = nullptr;  // none: no pool can be had
  };

  // Listens on `path` with mode 0660, in place of a socket that may be there: the caller holds the lock of
  // ListenSocket. ALREADY_EXISTS: something that is no socket is there. INVALID_ARGUMENT: path too long. UNAVAILABLE:
  // cannot listen.
  static absl::StatusOr<std::unique_ptr<DescriptorSocket>> Start(std::string path, Lookup lookup, Options options);
  static absl::StatusOr<std::unique_ptr<DescriptorSocket>> Start(std::string path, Lookup lookup) {
    return Start(std::move(path), std::move(lookup), Options());
  }

  // Closes all connections, ends the thread and removes the socket. No lookup runs afterwards.
  ~DescriptorSocket();
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;

  const std::string& path() const;

 private:
  class Server;

  explicit DescriptorSocket(std::unique_ptr<Server> server);

  std::unique_ptr<Server> server_;
};

}  // namespace stoker::server
