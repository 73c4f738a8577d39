// How a session's arena is shared (AttachRequest.arena_sharing): on the CPU, on a device whose memory is no file
// (bounced_daemon), and where there is no socket to hand descriptors out. What a GPU does with it is in
// tests/gpu/arena_gpu_test.cc; refusals of values are in bad_input_test.
#include <sys/stat.h>

#include <string>

#include "absl/time/clock.h"
#include "client/descriptor_exchange.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

class ArenaSharingTest : public DaemonTest {
 protected:
  explicit ArenaSharingTest(std::vector<std::string> flags = {})
      : DaemonTest(std::move(flags)), pool_(CreatePool(LinearPool("p", 2, 48, 64))) {}

  v1::AttachRequest Shared(v1::ArenaSharing sharing, const std::string& name = "rank") const {
    v1::AttachRequest request = AttachTo(pool_, name);
    request.set_arena_sharing(sharing);
    return request;
  }
  static bool on_cpu() { return TestDevice() == "cpu"; }

  const v1::PoolSpec pool_;
};

TEST_F(ArenaSharingTest, HostMemoryHasADescriptorInAnyCase) {
  if (!on_cpu()) GTEST_SKIP() << "of the CPU";
  for (const v1::ArenaSharing sharing : {v1::ARENA_SHARING_UNSPECIFIED, v1::ARENA_SHARING_DESCRIPTOR}) {
    Rank rank(client(), pool_, Shared(sharing));
    const v1::ArenaLayout layout = rank.session().info().arena();
    EXPECT_NE(layout.descriptor_socket(), "");
    EXPECT_EQ(layout.allocation_bytes(), 0u);
    EXPECT_EQ(layout.cuda_ipc_handle(), "");
    ASSERT_EQ(rank.session().arena()->status(), absl::OkStatus());
    const Sequence sequence = rank.Open(MakeTokens(1, 100), 100);
    const std::vector<BatchRow> batch = {{&sequence, 100}};
    const std::vector<std::vector<int32_t>> entries = {{5, 50, 98, 3}};
    rank.CheckRows(batch, entries, 4, rank.Step(batch, entries, 4, v1::DATA_SOURCE_SHARED));
  }
}

TEST_F(ArenaSharingTest, AnAllocationIsHandedOutForTheSessionsToken) {
  if (TestDevice() != "bounced") GTEST_SKIP() << "of an allocation that a made-up device has";
  auto session = client().Attach(Shared(v1::ARENA_SHARING_DESCRIPTOR), WithoutReattach());
  ASSERT_TRUE(session.ok()) << session.status();
  const v1::Attached info = (*session)->info();
  EXPECT_EQ(info.arena().cuda_ipc_handle(), "");
  EXPECT_GE(info.arena().allocation_bytes(), info.arena().size_bytes());
  EXPECT_EQ(info.arena().allocation_bytes() % (2 << 20), 0u);
  // Host code is not told to map it.
  EXPECT_EQ((*session)->arena()->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string((*session)->arena()->status().message()), HasSubstr("not of the host"));
  // Limits and metrics go by the bytes of the arena, however it is shared.
  EXPECT_EQ(Scrape(daemon().metrics_port())["stoker_client_mapped_bytes{session=\"rank\"}"],
            static_cast<double>(info.arena().size_bytes()));
  const std::string& path = info.arena().descriptor_socket();
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  auto descriptor = client::FetchDescriptor(path, info.token(), deadline);
  ASSERT_TRUE(descriptor.ok()) << descriptor.status();
  struct stat file = {};
  ASSERT_EQ(fstat(descriptor->get(), &file), 0);
  EXPECT_EQ(static_cast<uint64_t>(file.st_size), info.arena().allocation_bytes());
  std::string other = info.token();
  other.back() = other.back() == '0' ? '1' : '0';
  EXPECT_EQ(client::FetchDescriptor(path, other, deadline).status().code(), absl::StatusCode::kPermissionDenied);
  // Files are registered where the arena is one, and there alone.
  const absl::Status offered = client::OfferDescriptor(path, info.token(), descriptor->get(), deadline).status();
  EXPECT_THAT(std::string(offered.message()), HasSubstr("cuda_ipc handle"));
  session->reset();
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return client().GetStatus()->hot_bytes() == 0; }));
  EXPECT_EQ(client::FetchDescriptor(path, info.token(), deadline).status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(ArenaSharingTest, NeedsASocketToHandItOut) {
  TestDaemon daemon({"--socket-path=", "--tcp-address=127.0.0.1:0", "--insecure-loopback"});
  const auto client = client::Client::Connect("127.0.0.1:" + daemon.LogField("serving", "tcp_port"));
  ASSERT_TRUE(client.ok()) << client.status();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = pool_;
  ASSERT_TRUE(client->CreatePool(create).ok());
  const absl::Status refused = client->Attach(Shared(v1::ARENA_SHARING_DESCRIPTOR)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("arena_sharing: ARENA_SHARING_DESCRIPTOR given, the daemon has no Unix socket"));
  v1::AttachRequest ordered = Shared(v1::ARENA_SHARING_UNSPECIFIED);
  ordered.set_ordered_calls(true);
  const absl::Status no_words = client->Attach(ordered).status();
  EXPECT_EQ(no_words.code(), absl::StatusCode::kFailedPrecondition) << no_words;
  EXPECT_THAT(std::string(no_words.message()), HasSubstr("ordered_calls: given, the daemon has no Unix socket"));
  const auto unspecified = client->Attach(Shared(v1::ARENA_SHARING_UNSPECIFIED));
  ASSERT_TRUE(unspecified.ok()) << unspecified.status();
  const v1::OrderedCallsStatus& calls = (*unspecified)->info().ordered_calls();
  EXPECT_FALSE(calls.available());
  EXPECT_NE(calls.reason(), "");
}

}  // namespace
}  // namespace stoker::system_test
