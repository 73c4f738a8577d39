#include "tests/system/daemon_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stoker::system_test {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr char kBounced[] = "bounced";

}  // namespace

std::string StokerdPath() {
  const bool bounced = TestDevice() == kBounced;
  const char* other = std::getenv(bounced ? "STOKER_TEST_BOUNCED_DAEMON" : "STOKER_TEST_DAEMON");
  return other != nullptr ? other : bounced ? BOUNCED_DAEMON_PATH : STOKERD_PATH;
}
std::string ClientProcessPath() {
  const char* other = std::getenv("STOKER_TEST_CLIENT");
  return other != nullptr ? other : CLIENT_PROCESS_PATH;
}
std::string TestDevice() {
  const char* device = std::getenv("STOKER_TEST_DEVICE");
  return device != nullptr ? device : "cpu";
}

TestDaemon::TestDaemon(std::vector<std::string> flags) : flags_(std::move(flags)) { Start(); }

void TestDaemon::Start() {
  std::vector<std::string> arguments = {
      StokerdPath(),           "--socket-path=" + socket(),
      "--log-format=json",     "--metrics-address=127.0.0.1:0",
      "--cpu-threads=2",       "--device=" + (TestDevice() == kBounced ? "cpu" : TestDevice()),
      "--drain-grace-ms=3000", "--max-hot-bytes=" + std::to_string(int64_t{2} << 30)};
  arguments.insert(arguments.end(), flags_.begin(), flags_.end());
  process_ = std::make_unique<ChildProcess>(arguments, folder_.File(absl::StrCat("log", starts_++)));
  if (!process_->AwaitOutput("\"message\":\"serving\"", kStartTimeout)) {
    std::fprintf(stderr, "stokerd does not serve:\n%s\n", process_->Output().c_str());
    std::abort();
  }
}

void TestDaemon::Restart() { Start(); }

std::string TestDaemon::LogField(const std::string& message, const std::string& field) const {
  for (const absl::string_view line : absl::StrSplit(process_->Output(), '\n')) {
    const std::string text(line);
    if (JsonField(text, "message") == message) return JsonField(text, field);
  }
  return "";
}

int TestDaemon::metrics_port() const {
  int port = 0;
  (void)absl::SimpleAtoi(LogField("metrics", "port"), &port);
  return port;
}

client::Client TestDaemon::Connect(client::ClientOptions options) const {
  auto client = client::Client::Connect(address(), options);
  if (!client.ok()) {
    std::fprintf(stderr, "connect: %s\n", client.status().ToString().c_str());
    std::abort();
  }
  return *client;
}

int TestDaemon::Stop(absl::Duration timeout) {
  process_->Signal(SIGTERM);
  return process_->Wait(timeout).value_or(-1);
}

void DaemonTest::TearDown() {
  EXPECT_EQ(daemon_.Stop(), 0) << daemon_.process().Output();
  const std::string log = daemon_.process().Output();
  EXPECT_EQ(log.find("Sanitizer"), std::string::npos) << log;
  EXPECT_EQ(log.find("runtime error"), std::string::npos) << log;
}

v1::PoolSpec DaemonTest::CreatePool(const v1::PoolSpec& spec) {
  v1::CreatePoolRequest request;
  *request.mutable_spec() = spec;
  const auto response = client().CreatePool(request);
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() ? response->pool().spec() : spec;
}

v1::PoolUsage DaemonTest::Usage(const std::string& pool) const {
  v1::GetPoolRequest request;
  request.set_name(pool);
  const auto response = client().GetPool(request);
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() ? response->pool().usage() : v1::PoolUsage();
}

int DaemonTest::SessionCount() const {
  const auto response = client().ListSessions();
  EXPECT_TRUE(response.ok()) << response.status();
  return response.ok() ? response->sessions_size() : -1;
}

std::vector<v1::SequenceInfo> DaemonTest::Sequences(const std::string& pool) const {
  v1::ListSequencesRequest request;
  request.set_pool(pool);
  const auto response = client().ListSequences(request);
  EXPECT_TRUE(response.ok()) << response.status();
  if (!response.ok()) return {};
  return {response->sequences().begin(), response->sequences().end()};
}

::testing::AssertionResult DaemonTest::AwaitFree(const std::string& pool, uint32_t free_blocks,
                                                 absl::Duration timeout) const {
  if (Eventually(timeout, [&] { return Usage(pool).free_blocks() == free_blocks; })) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "pool " << pool << " has " << Usage(pool).ShortDebugString()
                                       << ", expected free_blocks " << free_blocks;
}

std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const timeval limit = {10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  std::string reply;
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
      send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    char buffer[65536];
    for (ssize_t n; (n = recv(fd, buffer, sizeof buffer, 0)) > 0;) reply.append(buffer, static_cast<size_t>(n));
  }
  close(fd);
  const size_t body = reply.find("\r\n\r\n");
  return body == std::string::npos || reply.find(" 200 ") > 16 ? "" : reply.substr(body + 4);
}

std::map<std::string, double> Scrape(int port) {
  std::map<std::string, double> series;
  for (const absl::string_view line : absl::StrSplit(HttpGet(port, "/metrics"), '\n')) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text[0] == '#') continue;
    const size_t space = text.rfind(' ');
    double value;
    if (space == absl::string_view::npos || !absl::SimpleAtod(text.substr(space + 1), &value)) continue;
    series[std::string(text.substr(0, space))] = value;
  }
  return series;
}

std::string JsonField(const std::string& line, const std::string& field) {
  const std::string key = "\"" + field + "\":";
  const size_t at = line.find(key);
  if (at == std::string::npos) return "";
  size_t begin = at + key.size();
  const bool quoted = begin < line.size() && line[begin] == '"';
  if (quoted) ++begin;
  return line.substr(begin, line.find_first_of(quoted ? "\"" : ",}", begin) - begin);
}

}  // namespace stoker::system_test
