#include "client/client.h"

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_arena.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/gate.h"
#include "tests/client/temporary_directory.h"

namespace stoker::client {
namespace {

using ::testing::HasSubstr;

ClientOptions WithoutWaiting() {
  ClientOptions options;
  options.connect_timeout = absl::ZeroDuration();
  return options;
}

TEST(ConnectTest, AddressesThatCannotBeAreRefusedAtOnce) {
  for (const char* const address : {"", "unix:", "host", ":7070", "host:", "host:0", "host:65536", "host:7070x",
                                    "a b:7070", "::1:7070", "http://host:7070", "/run/stokerd.sock"}) {
    const absl::Status status = Client::Connect(address, WithoutWaiting()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()), HasSubstr(address));
  }
  EXPECT_FALSE(Client::Connect("unix:/" + std::string(107, 'x'), WithoutWaiting()).ok());
  for (const char* const address : {"host:7070", "[::1]:7070", "127.0.0.1:1", "unix:/a", "unix:relative"}) {
    EXPECT_TRUE(Client::Connect(address, WithoutWaiting()).ok()) << address;
  }
}

TEST(ConnectTest, OptionsAreChecked) {
  const auto connect = [](auto change) {
    ClientOptions options = WithoutWaiting();
    change(options);
    return Client::Connect("unix:/nobody", options).status();
  };
  EXPECT_TRUE(connect([](ClientOptions&) {}).ok());
  const std::pair<const char*, absl::Status> refused[] = {
      {"call_timeout", connect([](ClientOptions& o) { o.call_timeout = absl::ZeroDuration(); })},
      {"connect_timeout", connect([](ClientOptions& o) { o.connect_timeout = -absl::Seconds(1); })},
      {"max_message_bytes", connect([](ClientOptions& o) { o.max_message_bytes = 0; })},
      {"max_message_bytes", connect([](ClientOptions& o) { o.max_message_bytes = int64_t{1} << 31; })},
      {"keepalive_interval", connect([](ClientOptions& o) { o.keepalive_interval = absl::Milliseconds(999); })},
      {"key_file", connect([](ClientOptions& o) {
         o.tls = TlsOptions{"", "cert", "", ""};
       })},
  };
  for (const auto& [field, status] : refused) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  }
}

TEST(ConnectTest, TlsFilesMustBeReadable) {
  const TemporaryDirectory directory;
  ClientOptions options = WithoutWaiting();
  options.tls = TlsOptions{directory.path() + "/absent.pem", "", "", ""};
  absl::Status status = Client::Connect("host:7070", options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("absent.pem"));
  const std::string empty = directory.path() + "/empty.pem";
  std::ofstream(empty).close();
  options.tls->ca_file = empty;
  EXPECT_FALSE(Client::Connect("host:7070", options).ok());
}

TEST(ConnectTest, NobodyAnswers) {
  const TemporaryDirectory directory;
  ClientOptions options;
  options.connect_timeout = absl::Milliseconds(100);
  const absl::Status status = Client::Connect("unix:" + directory.path() + "/none", options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("100ms"));
}

class ClientTest : public testing::Test {
 protected:
  ClientTest() { daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_LINEAR)); }

  Client Connect(const ClientOptions& options = {}) {
    absl::StatusOr<Client> client = Client::Connect(daemon_.address(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  TemporaryDirectory directory_;
  FakeDaemon daemon_{directory_.path()};
};

TEST_F(ClientTest, OneChannelForEachProcessAndAddress) {
  const Client first = Connect();
  ClientOptions options;
  options.call_timeout = absl::Seconds(3);
  const Client second = Connect(options);
  EXPECT_TRUE(first.SharesChannelWith(second));
  options.max_message_bytes = 1 << 20;
  EXPECT_FALSE(first.SharesChannelWith(Connect(options)));
  const TemporaryDirectory elsewhere;
  const FakeDaemon other(elsewhere.path());
  EXPECT_FALSE(first.SharesChannelWith(*Client::Connect(other.address())));
}

TEST_F(ClientTest, PoolsAndAdminAreReached) {
  const Client client = Connect();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = FakePoolSpec("more", v1::ROW_LAYOUT_SPLIT_KV);
  auto created = client.CreatePool(create);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->pool().spec().v_row_bytes(), 12u);
  EXPECT_EQ(created->boot_epoch(), daemon_.boot_epoch());
  EXPECT_EQ(client.ListPools()->pools_size(), 2);
  v1::GetPoolRequest get;
  get.set_name("more");
  EXPECT_EQ(client.GetPool(get)->pool().spec().name(), "more");
  v1::DeletePoolRequest remove;
  remove.set_name("more");
  EXPECT_TRUE(client.DeletePool(remove).ok());
  EXPECT_EQ(client.GetPool(get).status(), absl::NotFoundError("pool 'more' does not exist"));
  EXPECT_EQ(client.GetStatus()->version(), "0.0.0-fake");
  EXPECT_EQ(client.ListSessions()->sessions_size(), 0);
  v1::ListSequencesRequest sequences;
  sequences.set_pool("kv");
  sequences.set_page_size(3);
  EXPECT_EQ(client.ListSequences(sequences)->sequences_size(), 3);
  v1::EvictSessionRequest evict;
  evict.set_session_id(9);
  EXPECT_TRUE(absl::IsNotFound(client.EvictSession(evict).status()));
  EXPECT_TRUE(client.Drain().ok());
  EXPECT_EQ(client.GetStatus()->state(), v1::DAEMON_STATE_DRAINING);
  EXPECT_TRUE(client.Undrain().ok());
  EXPECT_EQ(client.GetStatus()->state(), v1::DAEMON_STATE_SERVING);
  // None of them needs a token, and none is sent.
  EXPECT_EQ(daemon_.calls("GetStatus")[0].token, "");
}

TEST_F(ClientTest, EveryCallHasADeadline) {
  ClientOptions options;
  options.call_timeout = absl::Seconds(20);
  const Client client = Connect(options);
  ASSERT_TRUE(client.GetStatus().ok());
  CallOptions call;
  call.timeout = absl::Seconds(5);
  ASSERT_TRUE(client.GetStatus(call).ok());
  const std::vector<SeenCall> seen = daemon_.calls("GetStatus");
  ASSERT_EQ(seen.size(), 2u);
  constexpr absl::Duration kRounding = absl::Seconds(1);  // gRPC sends deadlines rounded up
  EXPECT_GT(seen[0].time_left, absl::Seconds(10));
  EXPECT_LE(seen[0].time_left, absl::Seconds(20) + kRounding);
  EXPECT_GT(seen[1].time_left, absl::ZeroDuration());
  EXPECT_LE(seen[1].time_left, absl::Seconds(5) + kRounding);
}

TEST_F(ClientTest, ADaemonThatDoesNotAnswerCostsTheDeadline) {
  const Gate gate;
  daemon_.SetHook(gate.Hook("GetStatus"));
  CallOptions options;
  options.timeout = absl::Milliseconds(100);
  EXPECT_EQ(Connect().GetStatus(options).status().code(), absl::StatusCode::kDeadlineExceeded);
  gate.Open();
}

TEST_F(ClientTest, StatusesComeThroughWithCodeAndMessage) {
  const Client client = Connect();
  for (int code = 1; code <= 16; ++code) {
    if (code == static_cast<int>(absl::StatusCode::kCancelled)) continue;  // SessionTest has it
    const absl::Status status(static_cast<absl::StatusCode>(code), "field x is 3, at most 2");
    daemon_.SetHook([status](const std::string&) { return status; });
    EXPECT_EQ(client.ListPools().status(), status);
  }
}

TEST_F(ClientTest, MessagesLargerThanTheLimitAreRefused) {
  ClientOptions options;
  options.max_message_bytes = 512;
  v1::ListSequencesRequest sequences;
  sequences.set_pool("kv");
  sequences.set_page_size(1000);
  EXPECT_EQ(Connect(options).ListSequences(sequences).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Connect().ListSequences(sequences).ok());
}

}  // namespace
}  // namespace stoker::client
