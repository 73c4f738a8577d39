// A real stokerd in a folder of its own, and the ways to look at it from outside.
//
// Thread safety: one thread for each object; client() may be used by any thread.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/session.h"
#include "tests/system/child_process.h"
#include "tests/system/rank.h"

namespace stoker::system_test {

// Paths of the programs, from CMake. The environment variables STOKER_TEST_DAEMON, STOKER_TEST_BOUNCED_DAEMON and
// STOKER_TEST_CLIENT name others, such as those built with a sanitizer or for a release.
std::string StokerdPath();
std::string ClientProcessPath();
// The environment variable STOKER_TEST_DEVICE, else cpu: what the daemons get as --device, or "bounced" for
// bounced_daemon.
std::string TestDevice();

// One daemon. Flags are added to those that every test needs: socket, metrics on a free port, a short grace time.
class TestDaemon {
 public:
  explicit TestDaemon(std::vector<std::string> flags = {});

  const TemporaryFolder& folder() const { return folder_; }
  std::string socket() const { return folder_.File("s"); }
  std::string address() const { return "unix:" + socket(); }
  ChildProcess& process() { return *process_; }
  // Starts it again, on the same socket, after it has ended.
  void Restart();
  // Value of a field of a log line with this message, for example Field("metrics", "port"); empty when there is none.
  std::string LogField(const std::string& message, const std::string& field) const;
  int metrics_port() const;

  client::Client Connect(client::ClientOptions options = {}) const;
  // SIGTERM; exit status, or -1 when it does not end in time.
  int Stop(absl::Duration timeout = absl::Seconds(30));

 private:
  void Start();

  TemporaryFolder folder_;
  std::vector<std::string> flags_;
  int starts_ = 0;
  std::unique_ptr<ChildProcess> process_;
};

class DaemonTest : public ::testing::Test {
 protected:
  explicit DaemonTest(std::vector<std::string> flags = {}) : daemon_(std::move(flags)), client_(daemon_.Connect()) {}
  // The daemon must end well, whatever the test did to it.
  void TearDown() override;

  TestDaemon& daemon() { return daemon_; }
  const client::Client& client() const { return client_; }
  v1::PoolSpec CreatePool(const v1::PoolSpec& spec);
  v1::PoolUsage Usage(const std::string& pool) const;
  int SessionCount() const;
  std::vector<v1::SequenceInfo> Sequences(const std::string& pool) const;
  // Waits until the pool has so many free blocks.
  ::testing::AssertionResult AwaitFree(const std::string& pool, uint32_t free_blocks,
                                       absl::Duration timeout = absl::Seconds(10)) const;

 private:
  TestDaemon daemon_;
  client::Client client_;
};

// One scrape. Series as in the text format, "name{label=\"value\"}".
std::map<std::string, double> Scrape(int port);
// Body of an HTTP GET, empty on any error.
std::string HttpGet(int port, const std::string& path);

// The field of one JSON log line, without its quotes.
std::string JsonField(const std::string& line, const std::string& field);

}  // namespace stoker::system_test
