#include "server/listen_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/server/temporary_folder.h"

namespace stoker::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

mode_t CurrentUmask() {
  const mode_t mask = umask(0);
  umask(mask);
  return mask;
}

// Stands for gRPC: binds and listens. -1: cannot.
int Listen(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.c_str(), path.size());
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 && listen(listener, 8) == 0) {
    return listener;
  }
  close(listener);
  return -1;
}

class ListenSocketTest : public ::testing::Test {
 protected:
  mode_t ModeOf(const std::string& name) {
    struct stat info = {};
    EXPECT_EQ(lstat(folder_.path(name).c_str(), &info), 0) << name;
    return info.st_mode & 07777;
  }
  bool Exists(const std::string& name) { return access(folder_.path(name).c_str(), F_OK) == 0; }

  void ExpectRefused(const std::string& path, absl::StatusCode code, const std::string& message) {
    const mode_t mask = CurrentUmask();
    absl::StatusOr<std::unique_ptr<ListenSocket>> refused = ListenSocket::Prepare(path);
    EXPECT_EQ(refused.status().code(), code) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), AllOf(HasSubstr(message), HasSubstr(path)));
    EXPECT_EQ(CurrentUmask(), mask);
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.path("s.sock");
};

TEST_F(ListenSocketTest, ServesWithMode0660AndCleansUp) {
  for (mode_t mask : {022, 0, 077}) {
    const mode_t before = umask(mask);
    auto listen_socket = ListenSocket::Prepare(path_);
    ASSERT_TRUE(listen_socket.ok()) << listen_socket.status();
    EXPECT_EQ((*listen_socket)->address(), "unix:" + path_);
    EXPECT_EQ((*listen_socket)->descriptor_path(), path_ + ".fd");
    const int listener = Listen(path_);
    ASSERT_GE(listener, 0);
    EXPECT_EQ(ModeOf("s.sock") & ~0660, 0u) << "open to others before Finish";
    EXPECT_TRUE((*listen_socket)->Finish().ok());
    EXPECT_EQ(CurrentUmask(), mask);
    umask(before);
    EXPECT_EQ(ModeOf("s.sock"), 0660u);
    EXPECT_EQ(ModeOf("s.sock.lock"), 0600u);
    EXPECT_EQ(folder_.Read("s.sock.lock"), absl::StrCat(getpid(), "\n"));
    close(listener);
    listen_socket->reset();
    EXPECT_FALSE(Exists("s.sock"));
  }
}

TEST_F(ListenSocketTest, SecondDaemonIsRefusedAndToldTheFirst) {
  auto first = ListenSocket::Prepare(path_);
  ASSERT_TRUE(first.ok());
  // Also before the first one has bound.
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists,
                absl::StrCat("in use by another daemon, process ", getpid(), " "));
  const int listener = Listen(path_);
  ASSERT_TRUE((*first)->Finish().ok());
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists,
                absl::StrCat("in use by another daemon, process ", getpid(), " "));
  EXPECT_TRUE(Exists("s.sock"));
  close(listener);
  first->reset();
  EXPECT_TRUE(ListenSocket::Prepare(path_).ok());
}

TEST_F(ListenSocketTest, KilledDaemonLeavesNothingThatHinders) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto listen_socket = ListenSocket::Prepare(path_);
    const bool good = listen_socket.ok() && Listen(path_) >= 0 && (*listen_socket)->Finish().ok();
    if (write(ready[1], good ? "y" : "n", 1) != 1) _exit(1);
    while (true) pause();
  }
  char answer = 0;
  ASSERT_EQ(read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists, absl::StrCat("process ", child, " "));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_TRUE(Exists("s.sock"));

  auto next = ListenSocket::Prepare(path_);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_FALSE(Exists("s.sock"));
  const int listener = Listen(path_);
  EXPECT_GE(listener, 0);
  EXPECT_TRUE((*next)->Finish().ok());
  close(listener);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(ListenSocketTest, SocketOfAnotherProgramIsLeftAlone) {
  const int listener = Listen(path_);
  ASSERT_GE(listener, 0);
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists, "another process listens on it");
  EXPECT_TRUE(Exists("s.sock"));
  close(listener);
  EXPECT_TRUE(ListenSocket::Prepare(path_).ok());
}

TEST_F(ListenSocketTest, OtherFilesAreLeftAlone) {
  folder_.Write("s.sock", "precious");
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists, "is not a socket");
  EXPECT_EQ(folder_.Read("s.sock"), "precious");
  ASSERT_EQ(unlink(path_.c_str()), 0);
  ASSERT_EQ(symlink(folder_.Write("target", "precious").c_str(), path_.c_str()), 0);
  ExpectRefused(path_, absl::StatusCode::kAlreadyExists, "is not a socket");
  EXPECT_EQ(folder_.Read("target"), "precious");
}

TEST_F(ListenSocketTest, LockFileIsNotALink) {
  folder_.Write("target", "precious");
  ASSERT_EQ(symlink(folder_.path("target").c_str(), (path_ + ".lock").c_str()), 0);
  ExpectRefused(path_, absl::StatusCode::kFailedPrecondition, "cannot open");
  EXPECT_EQ(folder_.Read("target"), "precious");
}

TEST_F(ListenSocketTest, DirectoryMustExist) {
  ExpectRefused(folder_.path("none/s.sock"), absl::StatusCode::kNotFound, "No such file or directory");
  folder_.Write("file", "");
  ExpectRefused(folder_.path("file/s.sock"), absl::StatusCode::kFailedPrecondition, "is not a directory");
}

TEST_F(ListenSocketTest, DirectoryMustBeWritable) {
  ASSERT_EQ(mkdir(folder_.path("d").c_str(), 0555), 0);
  const std::string path = folder_.path("d/s.sock");
  // Root may write everywhere, so another user tries.
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
    const absl::Status status = ListenSocket::Prepare(path).status();
    _exit(absl::IsPermissionDenied(status) ? 0 : 1);
  }
  // The folder of this test must let the other user in.
  ASSERT_EQ(chmod(folder_.path("").c_str(), 0755), 0);
  int result = 0;
  ASSERT_EQ(waitpid(child, &result, 0), child);
  EXPECT_EQ(WEXITSTATUS(result), 0);
}

TEST_F(ListenSocketTest, PathHasALimit) {
  ExpectRefused("", absl::StatusCode::kInvalidArgument, "0 bytes");
  ExpectRefused(folder_.path(std::string(100, 'a')), absl::StatusCode::kInvalidArgument, "1 to 104 are allowed");
  const std::string longest = folder_.path(std::string(104 - folder_.path("").size(), 'a'));
  EXPECT_TRUE(ListenSocket::Prepare(longest).ok());
}

TEST_F(ListenSocketTest, FinishTellsThatNothingWasBound) {
  auto listen_socket = ListenSocket::Prepare(path_);
  ASSERT_TRUE(listen_socket.ok());
  EXPECT_EQ((*listen_socket)->Finish().code(), absl::StatusCode::kInternal);
}

TEST_F(ListenSocketTest, SocketThatTookThePlaceIsNotRemoved) {
  auto listen_socket = ListenSocket::Prepare(path_);
  const int first = Listen(path_);
  ASSERT_TRUE((*listen_socket)->Finish().ok());
  // The first one stays, under another name: otherwise its successor might get its inode number.
  ASSERT_EQ(rename(path_.c_str(), folder_.path("old").c_str()), 0);
  const int second = Listen(path_);
  ASSERT_GE(second, 0);
  listen_socket->reset();
  EXPECT_TRUE(Exists("s.sock"));
  close(first);
  close(second);
}

}  // namespace
}  // namespace stoker::server
