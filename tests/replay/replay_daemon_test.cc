// The real stoker-replay and the daemon's life: its own and others', and what goes wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/replay/row_oracle.h"
#include "client/replay/trace.h"
#include "tests/replay/replay_run.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::replay {
namespace {

using system_test::ChildProcess;
using system_test::DaemonTest;
using system_test::Eventually;
using system_test::ReadFile;
using system_test::TemporaryFolder;
using ::testing::HasSubstr;

// Each of up to two engines has a request that comes long after the test's end: their sessions stay until it ends them.
constexpr char kLongWait[] =
    "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 20, \"hash_ids\": [5, 6]}\n"
    "{\"timestamp\": 1000000, \"input_length\": 600, \"output_length\": 20, \"hash_ids\": [5, 7]}\n"
    "{\"timestamp\": 1000000, \"input_length\": 600, \"output_length\": 20, \"hash_ids\": [5, 8]}\n";

constexpr char kNothingYet[] =
    "{\"timestamp\": 1000000, \"input_length\": 600, \"output_length\": 20, \"hash_ids\": [5, 7]}\n"
    "{\"timestamp\": 1000000, \"input_length\": 600, \"output_length\": 20, \"hash_ids\": [5, 8]}\n";

class ReplayServerTest : public DaemonTest {
 protected:
  v1::PoolSpec Spec() const {
    v1::PoolSpec spec;
    spec.set_name("replay");
    spec.set_layers(1);
    spec.set_row_layout(v1::ROW_LAYOUT_LINEAR);
    spec.set_row_bytes(16);
    spec.set_block_rows(64);
    spec.set_prefix_rows(kPrefixBlockRows);
    spec.set_blocks(100 * kPrefixBlockRows / 64);
    return spec;
  }
  std::vector<std::string> Options(std::vector<std::string> more) {
    more.insert(more.begin(), {"--server", daemon().address(), "--row-bytes=16", "--pool-blocks=100"});
    return more;
  }
  size_t PoolCount() { return static_cast<size_t>(client().ListPools()->pools_size()); }
};

TEST_F(ReplayServerTest, DeletesThePoolThatItCreated) {
  ReplayWell(Options({"--requests=10"}));
  EXPECT_EQ(PoolCount(), 0u);
  EXPECT_EQ(SessionCount(), 0);
}

TEST_F(ReplayServerTest, LeavesAPoolThatWasThere) {
  CreatePool(Spec());
  const ReplayRun first = ReplayWell(Options({"--requests=10"}));
  EXPECT_EQ(PoolCount(), 1u);
  EXPECT_EQ(Usage("replay").referenced_blocks(), 0u);
  EXPECT_GT(Usage("replay").cached_blocks(), 0u);
  // The same requests again: every prompt is there, and its bytes are right.
  const ReplayRun second = ReplayWell(Options({"--requests=10"}));
  EXPECT_LT(first.number("prefix_hit_ratio"), 1);
  EXPECT_EQ(second.number("prefix_hit_ratio"), 1);
  EXPECT_EQ(second.number("stored_rows"), second.number("output_tokens"));
}

TEST_F(ReplayServerTest, APoolOfAnotherShape) {
  v1::PoolSpec spec = Spec();
  spec.set_row_bytes(32);
  CreatePool(spec);
  const ReplayRun run = Replay(Options({"--requests=10"}));
  EXPECT_EQ(run.status, 3);
  EXPECT_THAT(run.output, HasSubstr("ALREADY_EXISTS"));
  EXPECT_EQ(PoolCount(), 1u);
}

// A check that cannot fail is none: somebody stores other bytes under a hash of the trace.
TEST_F(ReplayServerTest, WrongBytesAreFound) {
  CreatePool(Spec());
  const TemporaryFolder folder;
  Request request;
  request.input_rows = 700;
  request.output_rows = 30;
  request.hash_ids = {5, 6};
  ASSERT_TRUE(WriteTrace({request}, folder.File("trace")).ok());
  const std::vector<std::string> options = Options({"--trace", folder.File("trace"), "--top-k=64", "--hot-rows=128"});

  v1::AttachRequest attach = system_test::AttachTo(Spec(), "spoiler", 1, 64, 16, 1024);
  auto session = client().Attach(attach);
  ASSERT_TRUE(session.ok()) << session.status();
  v1::AdmitRequest admit;
  v1::AdmitItem* item = admit.add_items();
  item->set_prompt_rows(kPrefixBlockRows);
  item->set_max_rows(kPrefixBlockRows);
  AppendBlockHash(5, item->mutable_block_hashes());
  v1::AdmitResponse admitted;
  ASSERT_TRUE((*session)->Admit(admit, &admitted).ok());
  v1::StoreRequest store;
  v1::StoreItem* rows = store.add_items();
  rows->mutable_range()->set_sequence_id(admitted.sequences(0).sequence_id());
  rows->mutable_range()->set_row_count(kPrefixBlockRows);
  rows->set_source(v1::DATA_SOURCE_INLINE);
  rows->mutable_rows()->assign(kPrefixBlockRows * 16, 'x');
  v1::StoreResponse stored;
  ASSERT_TRUE((*session)->Store(store, &stored).ok());
  ASSERT_TRUE(client::FirstError(stored.statuses()).ok());
  session->reset();

  for (const auto& [transfer, plane] : {std::pair<std::string, std::string>("shared", "rpc"),
                                        {"shared", SecondBestPlane()},
                                        {"shared", "direct"},
                                        {"inline", "auto"}}) {
    std::vector<std::string> with = options;
    with.insert(with.end(), {"--transfer", transfer, "--plane", plane});
    const ReplayRun run = Replay(with);
    EXPECT_EQ(run.status, 1) << run.output;
    EXPECT_GT(run.number("wrong_rows"), 0);
    EXPECT_LT(run.number("wrong_rows"), run.number("checked_rows"));
    EXPECT_THAT(run.output, HasSubstr("first wrong row    request 0, position "));
    EXPECT_THAT(run.output, HasSubstr(" is 78787878, must be "));
    const bool by_kernel = transfer == "shared" && system_test::TestDevice() != "cpu";
    EXPECT_EQ(run.number("checked_rows_device"), by_kernel ? run.number("checked_rows") : 0);
  }
}

TEST_F(ReplayServerTest, TheDaemonDies) {
  // While the first request may be under way, and while both engines wait for their first one.
  for (const char* trace : {kLongWait, kNothingYet}) {
    for (const std::string& plane : {SecondBestPlane(), std::string("direct")}) {
      const TemporaryFolder folder;
      std::vector<std::string> arguments = Options({"--trace", folder.Write("trace", trace), "--time-scale=1",
                                                    "--engines=2", "--ranks=2", "--progress=none", "--plane", plane});
      arguments.insert(arguments.begin(), ReplayPath());
      ChildProcess replay(arguments, folder.File("output"));
      ASSERT_TRUE(Eventually(absl::Seconds(20), [&] { return SessionCount() == 4; }));
      daemon().process().Kill();
      EXPECT_EQ(replay.Wait(absl::Seconds(60)), 3) << plane;
      EXPECT_THAT(replay.Output(), HasSubstr("stoker-replay: "));
      daemon().Restart();
    }
  }
}

// A daemon that does not let engines map the pool: whoever asks for that is told, and others get what there is.
TEST(ReplayWithoutDirectPlaneTest, IsRefusedByName) {
  system_test::TestDaemon daemon({"--direct-plane=false"});
  const std::vector<std::string> options = {"--server", daemon.address(), "--requests=10", "--transfer=shared"};
  std::vector<std::string> by_name = options;
  by_name.push_back("--plane=direct");
  const ReplayRun refused = Replay(by_name);
  EXPECT_EQ(refused.status, 3);
  EXPECT_THAT(refused.output, HasSubstr("--plane is \"direct\": plane: the direct plane is not available: "
                                        "direct_plane is off in the daemon's configuration"));
  EXPECT_EQ(ReplayWell(options).text("plane"), SecondBestPlane());
  EXPECT_EQ(daemon.Stop(), 0);
}

TEST_F(ReplayServerTest, NobodyServes) {
  const TemporaryFolder folder;
  const ReplayRun run = Replay({"--server", absl::StrCat("unix:", folder.File("nothing"))});
  EXPECT_EQ(run.status, 3);
  EXPECT_THAT(run.output, HasSubstr("UNAVAILABLE"));
  EXPECT_EQ(Replay({"--server=nowhere"}).status, 3);
}

// A daemon behind TCP hands out no memory: everything is in messages, and rows are checked through Read.
TEST(ReplayTcpTest, RowsAreCheckedThroughRead) {
  system_test::TestDaemon daemon({"--tcp-address=127.0.0.1:0", "--insecure-loopback"});
  const std::string address = absl::StrCat("127.0.0.1:", daemon.LogField("serving", "tcp_port"));
  const ReplayRun run = ReplayWell({"--server", address, "--requests=10", "--layers=3", "--groups=2", "--ranks=2"});
  EXPECT_EQ(run.json.fields().at("shared_memory").bool_value(), false);
  EXPECT_GT(run.number("read_calls"), 0);
  EXPECT_EQ(run.number("stored_rows"), run.number("distinct_rows"));
  EXPECT_EQ(run.text("plane"), "rpc");
  // The others are in memory.
  const ReplayRun server = Replay({"--server", address, "--requests=10", "--plane=server"});
  EXPECT_EQ(server.status, 3);
  EXPECT_THAT(server.output, HasSubstr("--plane is \"server\": the daemon at"));
  EXPECT_THAT(server.output, HasSubstr("is not reached through a Unix socket"));
  const ReplayRun direct = Replay({"--server", address, "--requests=10", "--plane=direct"});
  EXPECT_EQ(direct.status, 3);
  EXPECT_THAT(direct.output, HasSubstr("--plane is \"direct\": plane: the direct plane needs the daemon's memory"));
  EXPECT_THAT(direct.output, HasSubstr("is not reached through a Unix socket"));
  EXPECT_EQ(daemon.Stop(), 0);
}

TEST(ReplayPrivateDaemonTest, AnInterruptLeavesNothingBehind) {
  const TemporaryFolder folder;
  ChildProcess replay({"/usr/bin/env", absl::StrCat("TMPDIR=", folder.path()), ReplayPath(), "--stokerd", StokerdPath(),
                       "--trace", folder.Write("trace", kLongWait), "--time-scale=1", "--progress=none"},
                      folder.File("output"));
  ASSERT_TRUE(replay.AwaitOutput("scrape http://", absl::Seconds(30)));
  const std::string output = replay.Output();
  const std::string marker = "stokerd (process ";
  const size_t at = output.find(marker);
  ASSERT_NE(at, std::string::npos);
  const pid_t daemon = std::atoi(output.c_str() + at + marker.size());
  ASSERT_GT(daemon, 0);
  ASSERT_EQ(kill(daemon, 0), 0);
  replay.Signal(SIGINT);
  EXPECT_EQ(replay.Wait(absl::Seconds(30)), 130);
  EXPECT_NE(kill(daemon, 0), 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_FALSE(entry.is_directory()) << entry.path();
  }
}

TEST(ReplayPrivateDaemonTest, NoSuchProgram) {
  const TemporaryFolder folder;
  const ReplayRun absent = Replay({"--stokerd", folder.File("absent")});
  EXPECT_EQ(absent.status, 3);
  EXPECT_THAT(absent.output, HasSubstr("absent: No such file or directory; name the daemon's program with --stokerd"));
  const ReplayRun broken = Replay({"--stokerd=/bin/false"});
  EXPECT_EQ(broken.status, 3);
  EXPECT_THAT(broken.output, HasSubstr("stokerd ended with exit status 1 while starting"));
}

TEST_F(ReplayServerTest, ADeviceThatTheDaemonDoesNotHave) {
  const std::string device = system_test::TestDevice() == "cpu" ? "cuda" : "cpu";
  const ReplayRun run = Replay(Options({"--requests=1", "--transfer=inline", "--device", device}));
  EXPECT_EQ(run.status, 3);
  EXPECT_THAT(run.output, HasSubstr(absl::StrCat("--device is \"", device, "\"; the daemon has ")));
}

TEST(ReplayUsageTest, ExitStatusTwo) {
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{"--nonsense"},
                                             {"--plane=server", "--transfer=inline"},
                                             {"--plane=direct", "--transfer=inline"},
                                             {"--top-k=0"},
                                             {"--trace=/nonexistent/trace"},
                                             {"--input-length=3"}}) {
    const ReplayRun run = Replay(options);
    EXPECT_EQ(run.status, 2) << options[0];
    EXPECT_THAT(run.output, HasSubstr("stoker-replay: "));
  }
  EXPECT_EQ(Replay({"--help"}).status, 0);
  EXPECT_THAT(Replay({"--version"}).output, HasSubstr("stoker-replay "));
}

}  // namespace
}  // namespace stoker::replay
