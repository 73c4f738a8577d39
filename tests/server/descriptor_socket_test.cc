#include "server/descriptor_socket.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/temporary_folder.h"

namespace stoker::server {
namespace {

using ::testing::HasSubstr;

constexpr size_t kArenaBytes = 1 << 16;

struct Reply {
  int byte = -1;  // -1: none came
  std::string reason;
  int descriptor = -1;                          // the first
  std::vector<core::FileDescriptor> more = {};  // those behind it
};

class Connection {
 public:
  explicit Connection(const std::string& path) : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    // A defect ends the test instead of holding it up.
    const timeval limit = {20, 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path.c_str(), path.size());
    connected_ = connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Connection() { close(socket_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool connected() const { return connected_; }
  void Send(const std::string& text) { (void)!send(socket_, text.data(), text.size(), MSG_NOSIGNAL); }
  void EndSending() { shutdown(socket_, SHUT_WR); }
  // Sends the text with descriptors.
  void SendWith(std::string text, const std::vector<int>& descriptors) {
    iovec buffer = {text.data(), text.size()};
    std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
    msghdr message = {};
    message.msg_iov = &buffer;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    EXPECT_EQ(sendmsg(socket_, &message, MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }

  // Reads until the server closes.
  Reply Receive() {
    Reply reply;
    while (true) {
      char data[4096];
      iovec buffer = {data, sizeof(data)};
      alignas(cmsghdr) char control[CMSG_SPACE(DescriptorSocket::kMaxDescriptors * sizeof(int))];
      msghdr message = {};
      message.msg_iov = &buffer;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      const ssize_t size = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
      if (size <= 0) return reply;
      for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_type != SCM_RIGHTS) continue;
        memcpy(&reply.descriptor, CMSG_DATA(header), sizeof(int));
        for (size_t at = CMSG_LEN(sizeof(int)); at < header->cmsg_len; at += sizeof(int)) {
          int number = -1;
          memcpy(&number, reinterpret_cast<const char*>(header) + at, sizeof(int));
          reply.more.emplace_back(number);
        }
      }
      std::string text(data, size);
      if (reply.byte < 0) {
        reply.byte = text[0];
        text.erase(0, 1);
      }
      reply.reason += text;
    }
  }

 private:
  const int socket_;
  bool connected_ = false;
};

// Arenas by token, as the daemon keeps them.
class Arenas {
 public:
  ~Arenas() {
    for (const auto& [token, descriptor] : descriptors_) close(descriptor);
  }

  // Returns the arena as this process maps it.
  char* Add(const std::string& token) {
    const int descriptor = memfd_create("arena", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(descriptor, kArenaBytes), 0);
    std::lock_guard lock(mutex_);
    descriptors_[token] = descriptor;
    return static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
  }

  absl::StatusOr<int> Find(std::string_view token) {
    std::lock_guard lock(mutex_);
    ++lookups_;
    const auto it = descriptors_.find(std::string(token));
    if (it == descriptors_.end()) return absl::NotFoundError("no session has this token");
    return dup(it->second);
  }

  int lookups() {
    std::lock_guard lock(mutex_);
    return lookups_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> descriptors_;
  int lookups_ = 0;
};

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

class DescriptorSocketTest : public ::testing::Test {
 protected:
  void Start(DescriptorSocket::Options options = {}) {
    options.offer = [this](std::string_view token, core::FileDescriptor descriptor) -> absl::StatusOr<uint64_t> {
      std::lock_guard lock(offers_mutex_);
      if (token != "taker" && token != std::string(DescriptorSocket::kMaxTokenBytes, 't')) {
        return absl::NotFoundError("no session has this token");
      }
      offers_.push_back(std::move(descriptor));
      return 41 + offers_.size();
    };
    options.pool = [this](std::string_view token) { return PoolOf(token); };
    auto started = DescriptorSocket::Start(
        path_, [this](std::string_view token) { return arenas_.Find(token); }, options);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }

  // A pool of as many files as the token says, the number of each in its first byte.
  static absl::StatusOr<std::vector<core::FileDescriptor>> PoolOf(std::string_view token) {
    std::vector<core::FileDescriptor> files;
    int count = 0;
    if (token != std::string(DescriptorSocket::kMaxTokenBytes, 'p') &&
        !absl::SimpleAtoi(absl::string_view(token.data(), token.size()), &count)) {
      return absl::NotFoundError("no session has this token");
    }
    for (int i = 0; i < count; ++i) {
      files.emplace_back(memfd_create("pool", MFD_CLOEXEC));
      const char byte = static_cast<char>(i);
      EXPECT_EQ(write(files.back().get(), &byte, 1), 1);
    }
    return files;
  }

  Reply Ask(const std::string& text) {
    Connection connection(path_);
    EXPECT_TRUE(connection.connected());
    connection.Send(text);
    return connection.Receive();
  }

  Reply Offer(const std::string& text, const std::vector<int>& descriptors) {
    Connection connection(path_);
    EXPECT_TRUE(connection.connected());
    connection.SendWith(text, descriptors);
    return connection.Receive();
  }

  std::mutex offers_mutex_;
  std::vector<core::FileDescriptor> offers_;  // what was handed over
  TemporaryFolder folder_;
  const std::string path_ = folder_.path("s.fd");
  Arenas arenas_;
  std::unique_ptr<DescriptorSocket> server_;
};

TEST_F(DescriptorSocketTest, GoodTokenGetsTheArenaItself) {
  char* arena = arenas_.Add("token-1");
  arenas_.Add("token-2");
  Start();
  EXPECT_EQ(server_->path(), path_);
  const Reply reply = Ask("token-1\n");
  ASSERT_EQ(reply.byte, 0);
  ASSERT_GE(reply.descriptor, 0);
  char* mapped =
      static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, reply.descriptor, 0));
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_NE(mapped, arena);
  strcpy(arena, "from the daemon");
  EXPECT_STREQ(mapped, "from the daemon");
  strcpy(mapped + kArenaBytes - 32, "from the engine");
  EXPECT_STREQ(arena + kArenaBytes - 32, "from the engine");
  close(reply.descriptor);
  munmap(mapped, kArenaBytes);
  munmap(arena, kArenaBytes);
}

TEST_F(DescriptorSocketTest, TokenMayComeInPieces) {
  arenas_.Add("token");
  Start();
  Connection connection(path_);
  connection.Send("to");
  // Another whole exchange in between: the server has seen the first piece by then.
  EXPECT_EQ(Ask("none\n").byte, 1);
  connection.Send("ken\n");
  const Reply reply = connection.Receive();
  EXPECT_EQ(reply.byte, 0);
  close(reply.descriptor);
}

TEST_F(DescriptorSocketTest, BadTokensAreToldWhy) {
  Start();
  for (const std::string& token : {std::string("wrong\n"), std::string("\n"), std::string("a\0b\n", 4)}) {
    const Reply reply = Ask(token);
    EXPECT_EQ(reply.byte, 1);
    EXPECT_EQ(reply.descriptor, -1);
  }
  EXPECT_EQ(Ask("wrong\n").reason, "no session has this token");
}

TEST_F(DescriptorSocketTest, TokenHasALimit) {
  const std::string longest(DescriptorSocket::kMaxTokenBytes, 'a');
  arenas_.Add(longest);
  Start();
  Reply reply = Ask(longest + "\n");
  EXPECT_EQ(reply.byte, 0);
  close(reply.descriptor);
  for (const std::string& text : {longest + "a\n", longest + "a", std::string(100000, 'b')}) {
    const int lookups = arenas_.lookups();
    reply = Ask(text);
    EXPECT_EQ(reply.byte, 1);
    EXPECT_EQ(reply.reason, "the token has more than 256 bytes");
    EXPECT_EQ(arenas_.lookups(), lookups);
  }
}

TEST_F(DescriptorSocketTest, EndBeforeTheNewlineIsAnError) {
  arenas_.Add("token");
  Start();
  Connection connection(path_);
  connection.Send("token");
  connection.EndSending();
  EXPECT_THAT(connection.Receive().reason, HasSubstr("ended before"));
  EXPECT_EQ(arenas_.lookups(), 0);
}

TEST_F(DescriptorSocketTest, SilentClientIsClosedAfterItsTime) {
  Start({.client_timeout = absl::Milliseconds(50)});
  const absl::Time start = absl::Now();
  Connection silent(path_);
  const Reply reply = silent.Receive();
  EXPECT_EQ(reply.byte, 1);
  EXPECT_THAT(reply.reason, HasSubstr("in time"));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(50));
}

TEST_F(DescriptorSocketTest, SlowClientGetsNoMoreTimePerByte) {
  Start({.client_timeout = absl::Milliseconds(50)});
  Connection slow(path_);
  std::atomic<bool> ended = false;
  std::thread sender([&] {
    for (int i = 0; i < DescriptorSocket::kMaxTokenBytes && !ended; ++i) {
      slow.Send("a");
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  EXPECT_EQ(slow.Receive().byte, 1);
  ended = true;
  sender.join();
}

TEST_F(DescriptorSocketTest, SilentClientsDoNotHoldUpOthers) {
  arenas_.Add("token");
  Start({.client_timeout = absl::Hours(1)});
  std::vector<std::unique_ptr<Connection>> silent;
  for (int i = 0; i < 63; ++i) {
    silent.push_back(std::make_unique<Connection>(path_));
    if (i % 2 == 0) silent.back()->Send("tok");
  }
  const Reply reply = Ask("token\n");
  EXPECT_EQ(reply.byte, 0);
  close(reply.descriptor);
}

TEST_F(DescriptorSocketTest, SilentClientsGiveWayWhenAllPlacesAreTaken) {
  arenas_.Add("token");
  Start({.client_timeout = absl::Hours(1), .max_clients = 2});
  Connection first(path_);
  Connection second(path_);
  const Reply reply = Ask("token\n");
  EXPECT_EQ(reply.byte, 0);
  close(reply.descriptor);
  EXPECT_EQ(first.Receive().byte, 1);
}

TEST_F(DescriptorSocketTest, ClientsThatLeaveAreForgotten) {
  arenas_.Add("token");
  Start({.client_timeout = absl::Hours(1), .max_clients = 2});
  for (int i = 0; i < 100; ++i) {
    Connection leaves(path_);
    leaves.Send(i % 2 == 0 ? "tok" : "token\n");
  }
  const Reply reply = Ask("token\n");
  EXPECT_EQ(reply.byte, 0);
  close(reply.descriptor);
}

TEST_F(DescriptorSocketTest, ManyAtOnceAndNoDescriptorIsLost) {
  constexpr int kThreads = 16;
  constexpr int kRounds = 50;
  for (int i = 0; i < kThreads; ++i) {
    char* arena = arenas_.Add(absl::StrCat("token-", i));
    arena[0] = static_cast<char>('a' + i);
    munmap(arena, kArenaBytes);
  }
  Start();
  const int before = OpenDescriptors();
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        const Reply reply = Ask(absl::StrCat("token-", i, "\n"));
        char byte = 0;
        if (reply.byte == 0 && pread(reply.descriptor, &byte, 1, 0) == 1 && byte == 'a' + i) ++good;
        close(reply.descriptor);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kThreads * kRounds);
  // One more exchange, after which the server has closed what it held for those before.
  EXPECT_EQ(Ask("none\n").byte, 1);
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(DescriptorSocketTest, StopsWithClientsConnected) {
  const int before = OpenDescriptors();
  Start({.client_timeout = absl::Hours(1)});
  {
    Connection silent(path_);
    EXPECT_EQ(Ask("none\n").byte, 1);
    server_.reset();
    EXPECT_EQ(silent.Receive().byte, -1);
  }
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
  EXPECT_FALSE(Connection(path_).connected());
}

// A descriptor of the engine's, as it comes out at the other end.
TEST_F(DescriptorSocketTest, TakesADescriptorForASession) {
  Start();
  const int memory = memfd_create("offered", MFD_CLOEXEC);
  ASSERT_EQ(write(memory, "the engine's", 12), 12);
  const Reply reply = Offer("register taker\n", {memory});
  EXPECT_EQ(reply.byte, 0);
  EXPECT_EQ(reply.reason, "42");
  EXPECT_EQ(reply.descriptor, -1);
  ASSERT_EQ(offers_.size(), 1u);
  char bytes[12];
  ASSERT_EQ(pread(offers_[0].get(), bytes, 12, 0), 12);
  EXPECT_EQ(memcmp(bytes, "the engine's", 12), 0);
  EXPECT_EQ(Offer(absl::StrCat("register ", std::string(DescriptorSocket::kMaxTokenBytes, 't'), "\n"), {memory}).reason,
            "43");
  // In pieces, the descriptor with any of them.
  for (const int with : {0, 1, 2}) {
    Connection connection(path_);
    const std::string pieces[] = {"regis", "ter ta", "ker\n"};
    for (int piece = 0; piece < 3; ++piece) {
      if (piece == with) {
        connection.SendWith(pieces[piece], {memory});
      } else {
        connection.Send(pieces[piece]);
      }
      EXPECT_TRUE(piece == 2 || Ask("none\n").byte == 1);  // the piece has been seen by then
    }
    EXPECT_EQ(connection.Receive().reason, absl::StrCat(44 + with));
  }
  close(memory);
}

TEST_F(DescriptorSocketTest, PoolComesInOneMessageInOrder) {
  Start();
  EXPECT_EQ(Ask("none\n").byte, 1);
  const int before = OpenDescriptors();
  for (const int count : {1, 2, 64, 253}) {
    const Reply reply = Ask(absl::StrCat("pool ", count, "\n"));
    ASSERT_EQ(reply.byte, 0) << reply.reason;
    EXPECT_EQ(reply.reason, "");
    ASSERT_EQ(reply.more.size(), static_cast<size_t>(count) - 1);
    const core::FileDescriptor first(reply.descriptor);
    for (int i = 0; i < count; ++i) {
      unsigned char byte = 0;
      ASSERT_EQ(pread(i == 0 ? first.get() : reply.more[i - 1].get(), &byte, 1, 0), 1);
      EXPECT_EQ(byte, i);
    }
  }
  for (const int count : {0, 254, 300}) {
    const Reply reply = Ask(absl::StrCat("pool ", count, "\n"));
    EXPECT_EQ(reply.byte, 1);
    EXPECT_EQ(reply.descriptor, -1);
    EXPECT_THAT(reply.reason, HasSubstr(absl::StrCat(count, " descriptors: 1 to 253")));
  }
  EXPECT_EQ(Ask("pool wrong\n").reason, "no session has this token");
  EXPECT_EQ(Ask("pool \n").reason, "no session has this token");
  EXPECT_EQ(Ask("pool\n").reason, "no session has this token");
  // As long as the token of an arena may be.
  EXPECT_THAT(Ask(absl::StrCat("pool ", std::string(256, 'p'), "\n")).reason, HasSubstr("0 descriptors"));
  EXPECT_EQ(Ask(absl::StrCat("pool ", std::string(257, 'p'), "\n")).reason, "the token has more than 256 bytes");
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(DescriptorSocketTest, KeepsNoDescriptorThatItDoesNotTake) {
  arenas_.Add("token");
  Start({.client_timeout = absl::Milliseconds(50)});
  const int memory = memfd_create("offered", MFD_CLOEXEC);
  EXPECT_EQ(Ask("none\n").byte, 1);
  const int before = OpenDescriptors();
  EXPECT_EQ(Offer("register wrong\n", {memory}).reason, "no session has this token");
  EXPECT_EQ(Offer("register \n", {memory}).reason, "no session has this token");
  EXPECT_THAT(Offer("register taker\n", {memory, memory}).reason, HasSubstr("more than one descriptor"));
  EXPECT_THAT(Offer("register taker\n", std::vector<int>(100, memory)).reason, HasSubstr("more than one descriptor"));
  EXPECT_THAT(Ask("register taker\n").reason, HasSubstr("no descriptor came"));
  EXPECT_THAT(Offer(absl::StrCat("register ", std::string(257, 't'), "\n"), {memory}).reason, HasSubstr("256 bytes"));
  EXPECT_THAT(Offer(std::string(300, 't'), {memory}).reason, HasSubstr("256 bytes"));
  {
    Connection twice(path_);
    twice.SendWith("register", {memory});
    EXPECT_EQ(Ask("none\n").byte, 1);
    twice.SendWith(" taker\n", {memory});
    EXPECT_THAT(twice.Receive().reason, HasSubstr("more than one descriptor"));
  }
  {
    Connection silent(path_);
    silent.SendWith("register taker", {memory});
    EXPECT_THAT(silent.Receive().reason, HasSubstr("in time"));
  }
  {
    Connection leaves(path_);
    leaves.SendWith("register taker", {memory});
  }
  // One with a token alone is closed unseen.
  const Reply arena = Offer("token\n", {memory});
  EXPECT_EQ(arena.byte, 0);
  close(arena.descriptor);
  EXPECT_EQ(Ask("none\n").byte, 1);
  EXPECT_TRUE(offers_.empty());
  EXPECT_EQ(OpenDescriptors(), before);
  close(memory);
}

TEST_F(DescriptorSocketTest, SocketHasMode0660WhateverTheUmask) {
  for (mode_t mask : {0, 022, 077}) {
    const mode_t before = umask(mask);
    Start();
    umask(before);
    struct stat info = {};
    ASSERT_EQ(stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0660u);
    server_.reset();
  }
}

TEST_F(DescriptorSocketTest, StaleSocketIsReplacedAndOtherFilesAreNot) {
  const auto lookup = [](std::string_view) -> absl::StatusOr<int> { return absl::NotFoundError("none"); };
  folder_.Write("s.fd", "precious");
  auto refused = DescriptorSocket::Start(path_, lookup);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(folder_.Read("s.fd"), "precious");
  ASSERT_EQ(unlink(path_.c_str()), 0);

  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path_.c_str(), path_.size());
  const int stale = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(stale, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(stale);
  Start();
  EXPECT_EQ(Ask("none\n").byte, 1);

  EXPECT_EQ(DescriptorSocket::Start(folder_.path(std::string(100, 'a')), lookup).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DescriptorSocket::Start(folder_.path("none/s.fd"), lookup).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DescriptorSocketTest, PeersOfTheDaemonsUserOrGroupAreAllowed) {
  EXPECT_TRUE(PeerAllowed({.uid = 0, .gid = 5, .groups = {}}, 1000, 100));
  EXPECT_TRUE(PeerAllowed({.uid = 1000, .gid = 5, .groups = {}}, 1000, 100));
  EXPECT_TRUE(PeerAllowed({.uid = 7, .gid = 100, .groups = {}}, 1000, 100));
  EXPECT_TRUE(PeerAllowed({.uid = 7, .gid = 5, .groups = {9, 100}}, 1000, 100));
  EXPECT_FALSE(PeerAllowed({.uid = 7, .gid = 5, .groups = {}}, 1000, 100));
  EXPECT_FALSE(PeerAllowed({.uid = 7, .gid = 1000, .groups = {0, 5}}, 1000, 100));
  EXPECT_FALSE(PeerAllowed({.uid = 100, .gid = 5, .groups = {}}, 1000, 100));
}

TEST_F(DescriptorSocketTest, CredentialsOfThePeerAreChecked) {
  arenas_.Add("token");
  Start();
  // As root, other users are tried, with the file's mode out of the way; otherwise this process's own user only.
  const bool root = geteuid() == 0;
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  ASSERT_EQ(chmod(folder_.path("").c_str(), 0755), 0);
  struct Case {
    uid_t uid;
    gid_t gid;
    std::vector<gid_t> groups;
    bool allowed;
  };
  std::vector<Case> cases = {{getuid(), getgid(), {}, true}};
  if (root) {
    cases.push_back({65534, 65534, {}, false});
    cases.push_back({65534, getegid(), {}, true});
    cases.push_back({65534, 65534, {65533, getegid()}, true});
    cases.push_back({65534, 65534, {65533}, false});
  }
  for (const Case& peer : cases) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (root &&
          (setgroups(peer.groups.size(), peer.groups.data()) != 0 || setgid(peer.gid) != 0 || setuid(peer.uid) != 0)) {
        _exit(2);
      }
      Connection connection(path_);
      connection.Send("token\n");
      _exit(connection.Receive().byte == 0 ? 0 : 1);
    }
    int result = 0;
    ASSERT_EQ(waitpid(child, &result, 0), child);
    EXPECT_EQ(WEXITSTATUS(result), peer.allowed ? 0 : 1) << peer.uid << " " << peer.gid << " " << peer.groups.size();
  }
}

}  // namespace
}  // namespace stoker::server
