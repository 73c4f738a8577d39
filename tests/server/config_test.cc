// Takes the folder deploy/ as its argument.
#include "server/config.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/resolve.h"
#include "tests/server/temporary_folder.h"

namespace stoker::server {
namespace {

using google::protobuf::FieldDescriptor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using Action = CommandLine::Action;

std::string deploy_folder;  // set by main

constexpr char kPool[] = "name: \"kv\" layers: 4 row_layout: ROW_LAYOUT_LINEAR row_bytes: 656 blocks: 100";

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"stokerd"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

DaemonConfig Config(const std::vector<std::string>& arguments) {
  absl::StatusOr<CommandLine> command_line = Parse(arguments);
  EXPECT_TRUE(command_line.ok()) << command_line.status();
  return command_line.ok() ? command_line->config : DaemonConfig();
}

// The lines of the error, none if there is no error.
std::vector<std::string> Errors(const std::vector<std::string>& arguments) {
  const absl::Status status = Parse(arguments).status();
  if (status.ok()) return {};
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return absl::StrSplit(status.message(), '\n');
}

class ConfigTest : public ::testing::Test {
 protected:
  std::vector<std::string> FileErrors(const std::string& content) {
    const std::string file = folder_.Write("stokerd.conf", content);
    std::vector<std::string> errors = Errors({"--config", file});
    for (std::string& error : errors) error = absl::StrReplaceAll(error, {{file, "FILE"}});
    return errors;
  }

  TemporaryFolder folder_;
};

TEST_F(ConfigTest, DefaultsAreTheDocumentedOnes) {
  const DaemonConfig config = Config({});
  EXPECT_EQ(config.socket_path(), "/run/stoker/stokerd.sock");
  EXPECT_EQ(config.tcp_address(), "");
  EXPECT_FALSE(config.insecure_loopback());
  EXPECT_EQ(config.metrics_address(), "127.0.0.1:9464");
  EXPECT_EQ(config.device(), "auto");
  EXPECT_EQ(config.cpu_threads(), 0);
  EXPECT_EQ(config.max_pool_bytes(), 0);
  EXPECT_EQ(config.max_hot_bytes(), int64_t{4} << 30);
  EXPECT_EQ(config.max_sessions(), 64);
  EXPECT_EQ(config.max_sequences_per_session(), 4096);
  EXPECT_EQ(config.max_reserved_blocks_per_session(), 0);
  EXPECT_EQ(config.max_message_bytes(), 64 << 20);
  EXPECT_EQ(config.max_batch_items(), 4096);
  EXPECT_EQ(config.max_queued_operations(), 256);
  EXPECT_EQ(config.max_tensors_per_session(), 256);
  EXPECT_EQ(config.max_tensor_bytes_per_session(), int64_t{1} << 40);
  EXPECT_EQ(config.sequence_retention_ms(), 30000);
  EXPECT_EQ(config.drain_grace_ms(), 10000);
  EXPECT_EQ(config.pool_pressure_percent(), 10);
  EXPECT_EQ(config.log_level(), "info");
  EXPECT_EQ(config.log_format(), "text");
  EXPECT_EQ(config.pool_size(), 0);
}

TEST_F(ConfigTest, EveryKnobSaysWhatItIsAndHasADefaultInsideItsLimits) {
  for (int i = 0; i < DaemonConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = DaemonConfig::descriptor()->field(i);
    const config::v1::Knob& knob = field->options().GetExtension(config::v1::knob);
    EXPECT_NE(knob.group(), "") << field->name();
    EXPECT_NE(knob.help(), "") << field->name();
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_INT64) continue;
    EXPECT_TRUE(knob.has_min() && knob.has_max()) << field->name();
    EXPECT_LE(knob.min(), field->default_value_int64()) << field->name();
    EXPECT_GE(knob.max(), field->default_value_int64()) << field->name();
  }
}

TEST_F(ConfigTest, FlagsTakeAllForms) {
  EXPECT_EQ(Config({"--max-sessions=7"}).max_sessions(), 7);
  EXPECT_EQ(Config({"--max-sessions", "7"}).max_sessions(), 7);
  EXPECT_EQ(Config({"--max_sessions=7"}).max_sessions(), 7);
  EXPECT_EQ(Config({"--max-sessions=7", "--max-sessions=8"}).max_sessions(), 8);
  EXPECT_EQ(Config({"--socket-path=/tmp/a=b"}).socket_path(), "/tmp/a=b");
  EXPECT_EQ(Config({"--metrics-address="}).metrics_address(), "");
  EXPECT_EQ(Config({"--metrics-address", ""}).metrics_address(), "");
  for (const char* set : {"--insecure-loopback", "--insecure-loopback=true", "--insecure_loopback=1"}) {
    EXPECT_TRUE(Config({set}).insecure_loopback()) << set;
    for (const char* unset : {"--insecure-loopback=false", "--noinsecure-loopback", "--no-insecure-loopback"}) {
      const DaemonConfig config = Config({set, unset});
      EXPECT_FALSE(config.insecure_loopback()) << unset;
      EXPECT_TRUE(config.has_insecure_loopback()) << unset;
    }
  }
}

TEST_F(ConfigTest, ActionsAreRecognised) {
  EXPECT_EQ(Parse({})->action, Action::kRun);
  EXPECT_EQ(Parse({"--print-config"})->action, Action::kPrintConfig);
  EXPECT_EQ(Parse({"--check-config"})->action, Action::kCheckConfig);
  EXPECT_EQ(Parse({"--version"})->action, Action::kVersion);
  EXPECT_EQ(Parse({"--help"})->action, Action::kHelp);
  EXPECT_EQ(Parse({"-h"})->action, Action::kHelp);
  // Help is given whatever else is wrong.
  EXPECT_EQ(Parse({"--max-sessions=no", "--help"})->action, Action::kHelp);
  EXPECT_EQ(ActionOutput(*Parse({})), "");
  EXPECT_EQ(ActionOutput(*Parse({"--check-config"})), "OK\n");
  EXPECT_EQ(ActionOutput(*Parse({"--version"})), absl::StrCat("stokerd ", Version(), "\n"));
  EXPECT_THAT(Errors({"--print-config", "--check-config"}), ElementsAre(HasSubstr("exclude each other")));
}

TEST_F(ConfigTest, BadFlagsAreNamed) {
  EXPECT_THAT(Errors({"--max-sesions=3"}), ElementsAre("unknown flag --max-sesions; did you mean --max-sessions?"));
  EXPECT_THAT(Errors({"--chek-config"}), ElementsAre("unknown flag --chek-config; did you mean --check-config?"));
  EXPECT_THAT(Errors({"--zzzzzzzzzz"}), ElementsAre("unknown flag --zzzzzzzzzz"));
  EXPECT_THAT(Errors({"--nomax-sessions"}), ElementsAre(HasSubstr("unknown flag --nomax-sessions")));
  EXPECT_THAT(Errors({"status"}), ElementsAre("unexpected argument \"status\""));
  EXPECT_THAT(Errors({"--"}), ElementsAre("unexpected argument \"--\""));
  EXPECT_THAT(Errors({"--max-sessions"}), ElementsAre("--max-sessions: needs a value"));
  EXPECT_THAT(Errors({"--max-sessions", "--insecure-loopback"}), ElementsAre("--max-sessions: needs a value"));
  EXPECT_THAT(Errors({"--max-sessions=4GiB"}),
              ElementsAre("--max-sessions: \"4GiB\" is not an integer from 1 to 4096"));
  EXPECT_THAT(Errors({"--max-hot-bytes=99999999999999999999"}),
              ElementsAre(HasSubstr("is not an integer from 2097152")));
  EXPECT_THAT(Errors({"--insecure-loopback=maybe"}), ElementsAre(HasSubstr("\"maybe\" is not true or false")));
  EXPECT_THAT(Errors({"--help=now"}), ElementsAre("--help: takes no value, got \"now\""));
  EXPECT_THAT(Errors({"--noinsecure-loopback=true"}), ElementsAre(HasSubstr("takes no value")));
  EXPECT_THAT(Errors({"--config"}), ElementsAre("--config: needs a value"));
  const std::string file = folder_.Write("a", "");
  EXPECT_THAT(Errors({"--config", file, "--config", file}), ElementsAre("--config: may be given once only"));
}

TEST_F(ConfigTest, EveryIntegerIsKeptInsideItsLimits) {
  for (int i = 0; i < DaemonConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = DaemonConfig::descriptor()->field(i);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_INT64) continue;
    const config::v1::Knob& knob = field->options().GetExtension(config::v1::knob);
    const std::string flag = absl::StrCat("--", absl::StrReplaceAll(field->name(), {{"_", "-"}}));
    for (int64_t allowed : {knob.min(), knob.max()}) {
      EXPECT_THAT(Errors({absl::StrCat(flag, "=", allowed)}), SizeIs(0)) << field->name();
    }
    for (int64_t refused : {knob.min() - 1, knob.max() + 1}) {
      EXPECT_THAT(Errors({absl::StrCat(flag, "=", refused)}),
                  ElementsAre(absl::StrCat(flag, ": ", field->name(), " ", refused, " is out of range: ", knob.min(),
                                           " to ", knob.max(), " are allowed")));
    }
  }
}

TEST_F(ConfigTest, FileIsReadAndFlagsOverrideIt) {
  const std::string file =
      folder_.Write("stokerd.conf", absl::StrCat("# comment\nmax_sessions: 5\nmax_queued_operations: 6\n",
                                                 "insecure_loopback: true\npool { ", kPool, " }\n"));
  const DaemonConfig config = Config({"--max-sessions=9", "--config", file, "--noinsecure-loopback"});
  EXPECT_EQ(config.max_sessions(), 9);
  EXPECT_EQ(config.max_queued_operations(), 6);
  EXPECT_FALSE(config.insecure_loopback());
  ASSERT_EQ(config.pool_size(), 1);
  EXPECT_EQ(config.pool(0).row_bytes(), 656u);
}

TEST_F(ConfigTest, PoolFlagsAddAndReplace) {
  const std::string file = folder_.Write("stokerd.conf", absl::StrCat("pool { ", kPool, " }\n"));
  const DaemonConfig config = Config({"--config", file, absl::StrCat("--pool=", kPool, " prefix_rows: 512"), "--pool",
                                      absl::StrReplaceAll(kPool, {{"kv", "other"}})});
  ASSERT_EQ(config.pool_size(), 2);
  EXPECT_EQ(config.pool(0).name(), "kv");
  EXPECT_EQ(config.pool(0).prefix_rows(), 512u);
  EXPECT_EQ(config.pool(1).name(), "other");
}

TEST_F(ConfigTest, BadPoolsAreNamedWithTheirPlace) {
  EXPECT_THAT(Errors({"--pool=name: 3"}), ElementsAre(HasSubstr("--pool:1:7: Expected string, got: 3")));
  EXPECT_THAT(Errors({absl::StrCat("--pool=", kPool, " bloks: 3")}),
              ElementsAre("--pool:1:79: unknown key \"bloks\" in PoolSpec; did you mean blocks?"));
  EXPECT_THAT(Errors({absl::StrCat("--pool=", kPool), absl::StrCat("--pool=", kPool)}),
              ElementsAre("--pool: pool \"kv\": the name is given twice"));
  EXPECT_THAT(FileErrors(absl::StrCat("pool { ", kPool, " }\npool { ", kPool, " }\n")),
              ElementsAre("FILE:2:1: pool \"kv\": the name is given twice"));
  EXPECT_THAT(
      FileErrors(absl::StrCat("\n  pool { ", absl::StrReplaceAll(kPool, {{"656", "6"}}), " }\n")),
      ElementsAre(::testing::AllOf(HasSubstr("FILE:2:3: pool \"kv\": "), HasSubstr("row_bytes"), HasSubstr("6"))));
  EXPECT_THAT(FileErrors(absl::StrCat("pool { ", absl::StrReplaceAll(kPool, {{"LINEAR", "ROUND"}}), " }\n")),
              ElementsAre(HasSubstr("FILE:1:")));
}

TEST_F(ConfigTest, BadFilesAreNamedWithAllPlaces) {
  EXPECT_THAT(FileErrors("max_sesions: 4\n\n\tmax_hot_byte: { a: 1 }\nmax_sessions: 0\nlog_level: \"inf\"\n"),
              ElementsAre("FILE:1:1: unknown key \"max_sesions\"; did you mean max_sessions?",
                          "FILE:3:2: unknown key \"max_hot_byte\"; did you mean max_hot_bytes?",
                          "FILE:4:1: max_sessions 0 is out of range: 1 to 4096 are allowed",
                          "FILE:5:1: log_level \"inf\" is not one of debug, info, warning, error; did you mean info?"));
  // A tab is one column here, as in editors' and compilers' messages.
  EXPECT_THAT(FileErrors("\t \tmax_sessions: 0\n"), ElementsAre(HasSubstr("FILE:1:4: max_sessions 0")));
  EXPECT_THAT(FileErrors("cpu_threads: 99999999999\n"),
              ElementsAre("FILE:1:1: cpu_threads 99999999999 is out of range: 0 to 1024 are allowed"));
  EXPECT_THAT(
      FileErrors("max_sessions: 4\ncpu_threads: 99999999999999999999\n"),
      ElementsAre("FILE:2:14: Integer out of range (99999999999999999999) (in \"cpu_threads: 99999999999999999999\")"));
  EXPECT_THAT(FileErrors("max_sessions: \"4\"\n"), ElementsAre(HasSubstr("FILE:1:15: Expected integer")));
  EXPECT_THAT(FileErrors("max_sessions: 4\nmax_sessions: 5\n"), ElementsAre(HasSubstr("specified multiple times")));
  EXPECT_THAT(FileErrors("max_sessions 4\n"), ElementsAre(HasSubstr("FILE:1:14: Expected \":\"")));
  EXPECT_THAT(FileErrors("pool {\n"), ElementsAre(HasSubstr("FILE:2:1: ")));
  EXPECT_THAT(FileErrors(std::string(2 << 20, '#')), ElementsAre("FILE: cannot read: more than 1048576 bytes"));
  EXPECT_THAT(Errors({"--config", folder_.path("none")}),
              ElementsAre(absl::StrCat(folder_.path("none"), ": cannot read: No such file or directory")));
  EXPECT_THAT(Errors({"--config", folder_.path("")}), ElementsAre(HasSubstr("cannot read: Is a directory")));
}

TEST_F(ConfigTest, StringsAreChecked) {
  EXPECT_THAT(Errors({absl::StrCat("--socket-path=/", std::string(103, 'a'))}), SizeIs(0));
  EXPECT_THAT(Errors({absl::StrCat("--socket-path=/", std::string(104, 'a'))}),
              ElementsAre(HasSubstr("has 105 bytes: at most 104 are allowed")));
  EXPECT_THAT(Errors({"--socket-path=/tmp/a\nb"}), ElementsAre("--socket-path: socket_path has a control character"));
  EXPECT_THAT(Errors({"--log-format=xml"}), ElementsAre("--log-format: log_format \"xml\" is not one of text, json"));
}

// Which devices there are is seen at the start: tests/server/device_choice_test.cc.
TEST_F(ConfigTest, ADeviceNeedsAKnownForm) {
  for (const char* device : {"--device=auto", "--device=cpu", "--device=cuda", "--device=cuda:0,cuda:1"}) {
    EXPECT_THAT(Errors({device}), SizeIs(0)) << device;
  }
  EXPECT_THAT(Errors({"--device=tpu"}), ElementsAre(HasSubstr("--device: device \"tpu\" is not auto, cpu, cuda")));
}

TEST_F(ConfigTest, OneListenerIsNeeded) {
  EXPECT_THAT(Errors({"--socket-path="}), ElementsAre(HasSubstr("socket_path and tcp_address are both empty")));
  EXPECT_THAT(Errors({"--socket-path=", "--tcp-address=127.0.0.1:0", "--insecure-loopback"}), SizeIs(0));
}

TEST_F(ConfigTest, AddressesAreChecked) {
  for (const char* good : {"127.0.0.1:0", "localhost:65535", "[::1]:80", "127.255.0.9:1"}) {
    EXPECT_THAT(Errors({absl::StrCat("--metrics-address=", good)}), SizeIs(0)) << good;
    EXPECT_THAT(Errors({absl::StrCat("--tcp-address=", good), "--insecure-loopback"}), SizeIs(0)) << good;
  }
  for (const char* bad :
       {"9464", "localhost", ":80", "::1:80", "[::1]", "[a]:1", "a:65536", "a:-1", "a: 1", "a:", "a:b"}) {
    EXPECT_THAT(Errors({absl::StrCat("--metrics-address=", bad)}), ElementsAre(HasSubstr("is not HOST:PORT"))) << bad;
    EXPECT_THAT(Errors({absl::StrCat("--tcp-address=", bad)}), ElementsAre(HasSubstr("is not HOST:PORT"))) << bad;
  }
}

TEST_F(ConfigTest, TcpNeedsTlsOrTheLoopback) {
  EXPECT_THAT(Errors({"--tcp-address=127.0.0.1:50051"}),
              ElementsAre(HasSubstr("needs tls_cert_file and tls_key_file")));
  EXPECT_THAT(Errors({"--tcp-address=0.0.0.0:50051"}), ElementsAre(HasSubstr("needs tls_cert_file and tls_key_file")));
  for (const char* remote :
       {"0.0.0.0:50051", "[::]:50051", "127.0.0.1.example.com:1", "127.example:1", "10.127.0.1:1", "host:1"}) {
    EXPECT_THAT(Errors({absl::StrCat("--tcp-address=", remote), "--insecure-loopback"}),
                ElementsAre(HasSubstr("is not a loopback address")))
        << remote;
  }
  const std::string pem = folder_.Write("a.pem", "");
  EXPECT_THAT(Errors({"--tcp-address=0.0.0.0:50051", "--tls-cert-file", pem, "--tls-key-file", pem}), SizeIs(0));
  EXPECT_THAT(
      Errors({"--tcp-address=127.0.0.1:1", "--tls-cert-file", pem, "--tls-key-file", pem, "--insecure-loopback"}),
      ElementsAre(HasSubstr("choose one")));
}

TEST_F(ConfigTest, TlsFilesBelongTogetherAndAreReadable) {
  const std::string pem = folder_.Write("a.pem", "");
  EXPECT_THAT(Errors({"--tls-cert-file", pem}), ElementsAre(HasSubstr("tls_cert_file is set without tls_key_file")));
  EXPECT_THAT(Errors({"--tls-key-file", pem}), ElementsAre(HasSubstr("tls_key_file is set without tls_cert_file")));
  EXPECT_THAT(Errors({"--tls-client-ca-file", pem}),
              ElementsAre(HasSubstr("tls_client_ca_file is set without tls_cert_file and tls_key_file")));
  EXPECT_THAT(Errors({"--tls-cert-file", pem, "--tls-key-file", folder_.path("none")}),
              ElementsAre(HasSubstr("none\" cannot be read: No such file or directory")));
}

TEST_F(ConfigTest, PrintedConfigurationReadsBack) {
  const std::string defaults = ActionOutput(*Parse({"--print-config"}));
  EXPECT_EQ(ActionOutput(*Parse({"--config", folder_.Write("defaults", defaults), "--print-config"})), defaults);

  // Every key with a value that is not its default.
  std::vector<std::string> arguments = {"--print-config", absl::StrCat("--pool=", kPool),
                                        absl::StrCat("--pool=", absl::StrReplaceAll(kPool, {{"kv", "kv2"}}))};
  const std::string pem = folder_.Write("a \"quoted\" name.pem", "");
  for (int i = 0; i < DaemonConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = DaemonConfig::descriptor()->field(i);
    std::string value;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE || field->name() == "insecure_loopback") continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      value = "true";
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
      value = absl::StrCat(field->options().GetExtension(config::v1::knob).max());
    } else if (absl::EndsWith(field->name(), "_file")) {
      value = pem;
    } else if (field->name() == "device") {
      value = "cpu";
    } else if (field->name() == "log_level") {
      value = "debug";
    } else if (field->name() == "log_format") {
      value = "json";
    } else {
      value = "localhost:1";
    }
    arguments.push_back(absl::StrCat("--", field->name(), "=", value));
  }
  const CommandLine before = *Parse(arguments);
  const std::string printed = ActionOutput(before);
  const CommandLine after = *Parse({"--config", folder_.Write("all", printed), "--print-config"});
  EXPECT_EQ(ActionOutput(after), printed);
  EXPECT_NE(printed, defaults);
  DaemonConfig expected = before.config;
  expected.set_insecure_loopback(false);  // its default, which the printed file states
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(after.config, expected)) << printed;
}

TEST_F(ConfigTest, ExampleFileHasEveryKeyWithItsDefault) {
  const std::string example = deploy_folder + "/stokerd.example.conf";
  DaemonConfig config = Config({"--config", example});
  EXPECT_EQ(config.pool_size(), 1);
  config.clear_pool();
  EXPECT_EQ(PrintConfig(config), PrintConfig(DaemonConfig()));
  for (int i = 0; i < DaemonConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = DaemonConfig::descriptor()->field(i);
    if (field->is_repeated()) continue;
    EXPECT_TRUE(config.GetReflection()->HasField(config, field)) << field->name();
  }
}

TEST_F(ConfigTest, HelpListsEveryKnobWithDefaultAndLimits) {
  const std::string help = HelpText();
  for (int i = 0; i < DaemonConfig::descriptor()->field_count(); ++i) {
    const FieldDescriptor* field = DaemonConfig::descriptor()->field(i);
    EXPECT_THAT(help, HasSubstr(absl::StrCat("\n  --", absl::StrReplaceAll(field->name(), {{"_", "-"}}))))
        << field->name();
  }
  for (const char* flag : {"--config=FILE", "--print-config", "--check-config", "--version", "--help"}) {
    EXPECT_THAT(help, HasSubstr(absl::StrCat("\n  ", flag)));
  }
  EXPECT_THAT(help, HasSubstr("Default: 67108864 (64 MiB). 65536 (64 KiB) to 2147483647."));
  EXPECT_THAT(help, HasSubstr("Default: \"info\". One of debug, info, warning, error."));
  for (absl::string_view line : absl::StrSplit(help, '\n')) EXPECT_LE(line.size(), 100u) << line;
}

TEST_F(ConfigTest, ValidateConfigFindsAllErrors) {
  DaemonConfig config;
  EXPECT_TRUE(ValidateConfig(config).ok());
  config.set_socket_path("");
  config.set_max_sessions(-1);
  EXPECT_THAT(std::string(ValidateConfig(config).message()),
              ::testing::AllOf(HasSubstr("max_sessions -1 is out of range"), HasSubstr("are both empty")));
}

// A limit that is above what a launch can have would do nothing.
TEST_F(ConfigTest, CopyBlocksAreAtMostThoseOfALaunch) {
  const auto max_of = [](const char* key) {
    return DaemonConfig::descriptor()->FindFieldByName(key)->options().GetExtension(config::v1::knob).max();
  };
  EXPECT_EQ(max_of("max_bulk_copy_blocks"), kernels::cuda::kTargetBlocks);
  EXPECT_EQ(max_of("max_step_copy_blocks"), kernels::kMaxBatchRows);
}

// Pieces of copies are bounded from below, too, unless there is no limit.
TEST_F(ConfigTest, SmallPiecesOfCopiesAreRefused) {
  DaemonConfig config;
  for (const int64_t bytes : {0, 1 << 20}) {
    config.set_max_bulk_copy_bytes(bytes);
    config.set_max_step_copy_bytes(bytes);
    EXPECT_TRUE(ValidateConfig(config).ok()) << bytes;
  }
  for (const int64_t bytes : {1, (1 << 20) - 1}) {
    config.set_max_bulk_copy_bytes(bytes);
    config.set_max_step_copy_bytes(bytes);
    EXPECT_EQ(ValidateConfig(config).message(),
              absl::StrCat("max_bulk_copy_bytes ", bytes, " is out of range: 0, or 1048576 at least, are allowed\n",
                           "max_step_copy_bytes ", bytes, " is out of range: 0, or 1048576 at least, are allowed"));
  }
}

TEST_F(ConfigTest, AutomaticValuesAreThoseOfTheMachine) {
  DaemonConfig config;
  ResolveAutomaticValues(&config);
  EXPECT_EQ(config.cpu_threads(), static_cast<int64_t>(std::thread::hardware_concurrency()));
  EXPECT_GT(config.max_pool_bytes(), 0);
  EXPECT_TRUE(ValidateConfig(config).ok());
  DaemonConfig fixed;
  fixed.set_cpu_threads(3);
  fixed.set_max_pool_bytes(1 << 20);
  ResolveAutomaticValues(&fixed);
  EXPECT_EQ(fixed.cpu_threads(), 3);
  EXPECT_EQ(fixed.max_pool_bytes(), 1 << 20);
}

}  // namespace
}  // namespace stoker::server

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    fprintf(stderr, "usage: %s DEPLOY_FOLDER\n", argv[0]);
    return 2;
  }
  stoker::server::deploy_folder = argv[1];
  return RUN_ALL_TESTS();
}
