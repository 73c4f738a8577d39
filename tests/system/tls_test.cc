// TCP: plain text on loopback alone, TLS, mTLS. Certificates are made here by the openssl tool.
#include <gtest/gtest.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

// A certificate authority with certificates for a server and a client.
class Authority {
 public:
  Authority(const TemporaryFolder& folder, const std::string& name) : folder_(folder), name_(name) {
    Openssl({"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", "/CN=" + name, "-keyout", File("ca.key"), "-out", File("ca.pem")});
    folder.Write(name + ".names", "subjectAltName=DNS:localhost,IP:127.0.0.1\n");
    for (const char* const who : {"server", "client"}) {
      Openssl({"req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
               absl::StrCat("/CN=", who), "-keyout", File(absl::StrCat(who, ".key")), "-out",
               File(absl::StrCat(who, ".csr"))});
      Openssl({"x509", "-req", "-days", "2", "-in", File(absl::StrCat(who, ".csr")), "-CA", File("ca.pem"), "-CAkey",
               File("ca.key"), "-CAcreateserial", "-extfile", folder.File(name + ".names"), "-out",
               File(absl::StrCat(who, ".pem"))});
    }
  }
  std::string File(const std::string& file) const { return folder_.File(name_ + "." + file); }
  client::TlsOptions Trust(bool certificate) const {
    client::TlsOptions tls;
    tls.ca_file = File("ca.pem");
    if (certificate) {
      tls.certificate_file = File("client.pem");
      tls.key_file = File("client.key");
    }
    return tls;
  }

 private:
  void Openssl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"/usr/bin/env", "openssl"});
    const Finished run = RunToEnd(arguments, folder_);
    ASSERT_EQ(run.status, 0) << run.output;
  }

  const TemporaryFolder& folder_;
  const std::string name_;
};

absl::Status Try(const TestDaemon& daemon, std::optional<client::TlsOptions> tls) {
  client::ClientOptions options;
  options.connect_timeout = absl::Seconds(3);
  options.call_timeout = absl::Seconds(5);
  options.tls = std::move(tls);
  const auto client = client::Client::Connect("localhost:" + daemon.LogField("serving", "tcp_port"), options);
  return client.ok() ? client->GetStatus().status() : client.status();
}

TEST(TlsTest, ServesThoseWhoTrustItsAuthority) {
  const TemporaryFolder folder;
  const Authority ours(folder, "ours"), other(folder, "other");
  TestDaemon daemon({"--tcp-address=127.0.0.1:0", "--tls-cert-file=" + ours.File("server.pem"),
                     "--tls-key-file=" + ours.File("server.key")});
  EXPECT_TRUE(Try(daemon, ours.Trust(false)).ok()) << Try(daemon, ours.Trust(false));
  EXPECT_EQ(Try(daemon, other.Trust(false)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Try(daemon, std::nullopt).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
}

TEST(TlsTest, AsksClientsForACertificate) {
  const TemporaryFolder folder;
  const Authority ours(folder, "ours"), other(folder, "other");
  TestDaemon daemon({"--tcp-address=127.0.0.1:0", "--tls-cert-file=" + ours.File("server.pem"),
                     "--tls-key-file=" + ours.File("server.key"), "--tls-client-ca-file=" + ours.File("ca.pem")});
  EXPECT_TRUE(Try(daemon, ours.Trust(true)).ok()) << Try(daemon, ours.Trust(true));
  EXPECT_EQ(Try(daemon, ours.Trust(false)).code(), absl::StatusCode::kUnavailable);
  client::TlsOptions stranger = other.Trust(true);
  stranger.ca_file = ours.File("ca.pem");
  EXPECT_EQ(Try(daemon, stranger).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
}

// A whole session over TCP: no arena can be mapped, everything goes in messages.
TEST(TlsTest, DecodesOverTcp) {
  const TemporaryFolder folder;
  const Authority ours(folder, "ours");
  TestDaemon daemon({"--tcp-address=127.0.0.1:0", "--tls-cert-file=" + ours.File("server.pem"),
                     "--tls-key-file=" + ours.File("server.key"), "--tls-client-ca-file=" + ours.File("ca.pem")});
  client::ClientOptions options;
  options.tls = ours.Trust(true);
  const auto client = client::Client::Connect("localhost:" + daemon.LogField("serving", "tcp_port"), options);
  ASSERT_TRUE(client.ok()) << client.status();
  v1::CreatePoolRequest create;
  *create.mutable_spec() = LinearPool("p", 2, 48, 32);
  ASSERT_TRUE(client->CreatePool(create).ok());
  Rank rank(*client, create.spec(), AttachTo(create.spec(), "remote"));
  EXPECT_FALSE(rank.session().arena()->status().ok());
  const Sequence sequence = rank.Open(MakeTokens(1, 100), 100);
  rank.CheckStored(sequence, 100);
  const std::vector<BatchRow> batch = {{&sequence, 100, false, true}};
  const StepOutcome outcome = rank.Step(batch, {{3, 99, 50, 7}}, 4);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.Sum(&v1::LookupCounts::miss), 3u);
  v1::ReadRequest read;
  read.set_sequence_id(sequence.id);
  for (int32_t hot_row : outcome.hot_rows[0]) read.mutable_hot_rows()->add_values(static_cast<uint32_t>(hot_row));
  v1::ReadResponse rows;
  ASSERT_TRUE(rank.session().Read(read, &rows).ok());
  const Tokens expected = {sequence.tokens[3], sequence.tokens[99], sequence.tokens[50], sequence.tokens[7]};
  EXPECT_EQ(rows.rows(), RowsOf(create.spec(), expected));
}

TEST(TlsTest, ServesPlainTextOnLoopbackWhenToldTo) {
  TestDaemon daemon({"--tcp-address=127.0.0.1:0", "--insecure-loopback"});
  EXPECT_TRUE(Try(daemon, std::nullopt).ok()) << Try(daemon, std::nullopt);
  EXPECT_EQ(daemon.Stop(), 0) << daemon.process().Output();
}

TEST(TlsTest, RefusesToStartWithBadCertificates) {
  const TemporaryFolder folder;
  const std::string garbage = folder.Write("garbage", "no certificate");
  for (const std::string& file : {garbage, folder.File("missing")}) {
    const Finished run =
        RunToEnd({StokerdPath(), "--socket-path=" + folder.File("s"), "--metrics-address=", "--tcp-address=127.0.0.1:0",
                  "--tls-cert-file=" + file, "--tls-key-file=" + file},
                 folder);
    EXPECT_TRUE(run.status == 1 || run.status == 2) << run.output;
    EXPECT_THAT(run.output, ::testing::AnyOf(::testing::HasSubstr("tls_cert_file"),
                                             ::testing::HasSubstr("certificate or key is not valid")));
  }
}

}  // namespace
}  // namespace stoker::system_test
