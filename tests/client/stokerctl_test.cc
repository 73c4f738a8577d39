// stokerctl and the examples as processes against the fake daemon. Their paths come from the build.
#include <algorithm>
#include <string>
#include <vector>

#include "client/session.h"
#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "tests/client/fake_arena.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/gate.h"
#include "tests/client/program.h"
#include "tests/client/temporary_directory.h"

namespace stoker::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class StokerctlTest : public testing::Test {
 protected:
  StokerctlTest() { daemon_.AddPool(FakePoolSpec("kv", v1::ROW_LAYOUT_SPLIT_KV)); }

  // STOKER_SERVER is `server`, the fake daemon by default.
  ProgramResult Run(const std::vector<std::string>& arguments) { return Run(arguments, daemon_.address()); }
  ProgramResult Run(const std::vector<std::string>& arguments, const std::string& server) {
    return RunProgram(STOKERCTL, arguments, {"STOKER_SERVER=" + server}, directory_.path());
  }

  // The reply that --json printed.
  template <typename Message>
  Message RunJson(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    Message message;
    const auto status = google::protobuf::util::JsonStringToMessage(result.out, &message);
    EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << result.out;
    return message;
  }

  TemporaryDirectory directory_;
  FakeDaemon daemon_{directory_.path()};
};

TEST_F(StokerctlTest, HelpAndVersion) {
  const ProgramResult help = Run({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Usage: stokerctl"), HasSubstr("Exit codes"), HasSubstr("STOKER_SERVER"),
                              HasSubstr("unix:/run/stoker/stokerd.sock")));
  EXPECT_THAT(help.err, IsEmpty());
  for (const std::vector<std::string>& command : {std::vector<std::string>{"status"},
                                                  {"pools"},
                                                  {"pools", "list"},
                                                  {"pools", "show"},
                                                  {"pools", "create"},
                                                  {"pools", "delete"},
                                                  {"sessions"},
                                                  {"sequences"},
                                                  {"drain"},
                                                  {"undrain"},
                                                  {"evict"}}) {
    std::string words = "stokerctl";
    for (const std::string& word : command) words += " " + word;
    EXPECT_THAT(help.out, HasSubstr(command.back()));
    std::vector<std::string> with_flag = command;
    with_flag.push_back("--help");
    const ProgramResult own = Run(with_flag);
    EXPECT_EQ(own.exit_code, 0);
    EXPECT_THAT(own.out, AllOf(HasSubstr("Usage: " + words), HasSubstr("--timeout")));
  }
  EXPECT_THAT(Run({"pools", "create", "--help"}).out, HasSubstr("--row-layout"));
  const ProgramResult version = Run({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, testing::ContainsRegex("^stokerctl [0-9]+\\.[0-9]+\\.[0-9]+\n$"));
}

TEST_F(StokerctlTest, WrongUsageIsExitCode2AndReachesNobody) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{},
        {"nonsense"},
        {"pools", "frobnicate"},
        {"status", "--colour"},
        {"status", "extra"},
        {"evict"},
        {"evict", "seven"},
        {"evict", "0"},
        {"sequences"},
        {"sequences", "--pool", "kv", "--limit", "-1"},
        {"status", "--timeout", "0"},
        {"status", "--timeout"},
        {"status", "--server", "nowhere"},
        {"status", "--tls-cert", "/absent.pem"},
        {"pools", "create", "p"},
        {"pools", "create", "p", "--layers", "1", "--blocks", "1"},
        {"pools", "create", "p", "--layers", "1", "--blocks", "1", "--row-bytes", "4", "--row-layout", "round"},
        {"pools", "create", "p", "--layers", "1", "--blocks", "1", "--row-bytes", "4", "--row-layout", "split-kv"},
        {"pools", "create", "p", "--layers", "4294967296", "--blocks", "1", "--row-bytes", "4"}}) {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.out, IsEmpty());
    EXPECT_THAT(result.err, HasSubstr("stokerctl"));
  }
  EXPECT_THAT(Run({"nonsense"}).err, HasSubstr("unknown command 'nonsense'"));
  EXPECT_THAT(Run({"status", "--colour"}).err, HasSubstr("unknown flag '--colour'"));
  for (const char* const method : {"GetStatus", "CreatePool", "EvictSession", "ListSequences"}) {
    EXPECT_THAT(daemon_.calls(method), IsEmpty());
  }
}

TEST_F(StokerctlTest, CallsThatFailHaveTheirExitCodes) {
  const ProgramResult refused = Run({"pools", "show", "none"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_EQ(refused.err, "stokerctl: pool 'none' does not exist (NOT_FOUND)\n");
  EXPECT_THAT(refused.out, IsEmpty());
  EXPECT_EQ(Run({"evict", "99"}).exit_code, 1);
  EXPECT_EQ(Run({"sequences", "--pool", "none"}).exit_code, 1);

  const ProgramResult unreachable = Run({"status"}, "unix:" + directory_.path() + "/none");
  EXPECT_EQ(unreachable.exit_code, 3);
  EXPECT_THAT(unreachable.err, HasSubstr("UNAVAILABLE"));
  EXPECT_EQ(Run({"--server", "unix:" + directory_.path() + "/none", "status"}).exit_code, 3);

  const Gate gate;
  daemon_.SetHook(gate.Hook("GetStatus"));
  const ProgramResult late = Run({"status", "--timeout", "100ms"});
  gate.Open();
  EXPECT_EQ(late.exit_code, 4);
  EXPECT_THAT(late.err, HasSubstr("DEADLINE_EXCEEDED"));
}

TEST_F(StokerctlTest, StatusForPeopleAndMachines) {
  const ProgramResult result = Run({"status"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("state        serving\n"), HasSubstr("2h 3m"), HasSubstr("1.5 GiB of 8.0 GiB"),
                    HasSubstr("0 of 16"), HasSubstr("split-kv"), HasSubstr("24+12")));
  const auto status = RunJson<v1::GetStatusResponse>({"status"});
  EXPECT_EQ(status.boot_epoch(), daemon_.boot_epoch());
  EXPECT_EQ(status.pools(0).spec().name(), "kv");
  EXPECT_THAT(Run({"status", "--json"}).out, HasSubstr("\"max_hot_bytes\": \"8589934592\""));
}

TEST_F(StokerctlTest, Pools) {
  const ProgramResult created = Run({"pools", "create", "mla", "--layers=61", "--row-bytes=0x290", "--blocks=10"});
  EXPECT_EQ(created.exit_code, 0) << created.err;
  EXPECT_THAT(created.out, HasSubstr("mla"));
  EXPECT_EQ(Run({"pools", "create", "mla", "--layers=60", "--row-bytes=656", "--blocks=10"}).exit_code, 1);
  EXPECT_EQ(Run({"pools", "create", "ds", "--layers=2", "--row-layout=dsv4", "--blocks=3"}).exit_code, 0);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"pools"}, {"pools", "list"}}) {
    EXPECT_THAT(Run(command).out, AllOf(HasSubstr("POOL"), HasSubstr("kv "), HasSubstr("mla"), HasSubstr("dsv4")));
    const auto list = RunJson<v1::ListPoolsResponse>(command);
    ASSERT_EQ(list.pools_size(), 3);
    EXPECT_EQ(list.pools(0).spec().row_bytes(), 584u);
  }
  const v1::PoolSpec spec = RunJson<v1::GetPoolResponse>({"pools", "show", "mla"}).pool().spec();
  EXPECT_EQ(spec.layers(), 61u);
  EXPECT_EQ(spec.row_bytes(), 656u);
  EXPECT_EQ(spec.blocks(), 10u);
  EXPECT_EQ(spec.row_layout(), v1::ROW_LAYOUT_LINEAR);
  EXPECT_THAT(Run({"pools", "show", "mla"}).out, HasSubstr("24.4 MiB"));
  EXPECT_EQ(Run({"pools", "delete", "mla"}).exit_code, 0);
  EXPECT_EQ(Run({"pools", "delete", "mla"}).exit_code, 1);
}

TEST_F(StokerctlTest, SessionsAreListedAndEvicted) {
  EXPECT_EQ(Run({"sessions"}).out, "no sessions\n");
  v1::AttachRequest request = FakeAttachRequest("kv");
  request.set_name("rank0");
  auto session = Client::Connect(daemon_.address())->Attach(request);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT(Run({"sessions"}).out, AllOf(HasSubstr("rank0"), HasSubstr("75.0%"), HasSubstr("25.0%")));
  const auto list = RunJson<v1::ListSessionsResponse>({"sessions"});
  ASSERT_EQ(list.sessions_size(), 1);
  const ProgramResult evicted = Run({"evict", std::to_string(list.sessions(0).session_id())});
  EXPECT_EQ(evicted.exit_code, 0) << evicted.err;
  EXPECT_EQ(evicted.out, "evicted\n");
}

TEST_F(StokerctlTest, SequencesComeInPages) {
  const ProgramResult some = Run({"sequences", "--pool", "kv", "--limit", "3"});
  EXPECT_EQ(some.exit_code, 0) << some.err;
  EXPECT_EQ(std::count(some.out.begin(), some.out.end(), '\n'), 5) << some.out;
  EXPECT_THAT(some.out, AllOf(HasSubstr("there are more"), HasSubstr("key\\x1b[31m"), Not(HasSubstr("\x1b"))));
  EXPECT_EQ(RunJson<v1::ListSequencesResponse>({"sequences", "--pool=kv"}).sequences_size(), 1000);
  const auto all = RunJson<v1::ListSequencesResponse>({"sequences", "--pool=kv", "--limit=0"});
  ASSERT_EQ(all.sequences_size(), 2500);
  EXPECT_FALSE(all.more());
  for (int i = 0; i < 2500; ++i) ASSERT_EQ(all.sequences(i).sequence_id(), static_cast<uint64_t>(i + 1));
  EXPECT_EQ(RunJson<v1::ListSequencesResponse>({"sequences", "--pool=kv", "--limit=1500"}).sequences_size(), 1500);
}

TEST_F(StokerctlTest, DrainAndUndrain) {
  EXPECT_EQ(Run({"drain"}).exit_code, 0);
  EXPECT_EQ(RunJson<v1::GetStatusResponse>({"status"}).state(), v1::DAEMON_STATE_DRAINING);
  EXPECT_EQ(Run({"undrain"}).exit_code, 0);
  EXPECT_EQ(RunJson<v1::GetStatusResponse>({"status"}).state(), v1::DAEMON_STATE_SERVING);
  for (const char* const command : {"drain", "undrain"}) RunJson<google::protobuf::Struct>({command});
}

TEST_F(StokerctlTest, ExamplesRun) {
  for (const char* const program : {EXAMPLE_DECODE, EXAMPLE_SHARED_ARENA, EXAMPLE_SERVER_PLANE}) {
    const ProgramResult result = RunProgram(program, {daemon_.address()}, {}, directory_.path());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 8) << result.out;
    EXPECT_THAT(result.err, IsEmpty());
  }
}

TEST_F(StokerctlTest, TheServerPlanesExampleStepsByDoorbellsWhereItCan) {
  const auto run = [&] { return RunProgram(EXAMPLE_SERVER_PLANE, {daemon_.address()}, {}, directory_.path()); };
  EXPECT_EQ(run().exit_code, 0);
  EXPECT_THAT(daemon_.calls("Arm"), testing::SizeIs(1));
  EXPECT_THAT(daemon_.calls("Disarm"), testing::SizeIs(1));
  EXPECT_THAT(daemon_.calls("Step"), IsEmpty());
  // All are armed that may be.
  daemon_.SetHook([](const std::string& method) {
    return method == "Arm" ? absl::ResourceExhaustedError("max_armed_sessions 1") : absl::OkStatus();
  });
  EXPECT_THAT(run().err, HasSubstr("steps are calls, for there is no server plane: max_armed_sessions 1\n"));
  EXPECT_THAT(daemon_.calls("Step"), testing::SizeIs(8));
  daemon_.SetHook(nullptr);
  // The plane is not offered.
  daemon_.SetAttachedEditor([](v1::AttachResponse* first) {
    for (v1::PlaneStatus& status : *first->mutable_attached()->mutable_planes()) {
      status.set_available(status.plane() == v1::PLANE_RPC);
      status.set_reason("no MPS");
    }
  });
  const ProgramResult result = run();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("steps are calls, for there is no server plane: plane server: no MPS\n"));
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 8) << result.out;
  EXPECT_THAT(daemon_.calls("Step"), testing::SizeIs(16));
  EXPECT_THAT(daemon_.calls("Arm"), testing::SizeIs(2));
}

}  // namespace
}  // namespace stoker::client
