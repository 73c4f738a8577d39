// Takes the folder deploy/ as its argument.
#include "server/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string deploy_folder;  // set by main

std::string ReadDeployFile(const std::string& name) {
  std::ifstream file(deploy_folder + "/" + name);
  EXPECT_TRUE(file.good()) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

// ---- the exposition format, read strictly ----

struct Family {
  std::string help;
  std::string type;
};

struct Exposition {
  std::map<std::string, Family> families;
  std::map<std::string, double> samples;                // "name{label="value",...}" as written
  std::map<std::string, std::set<std::string>> labels;  // label names by family, without le

  double at(const std::string& sample) const {
    const auto it = samples.find(sample);
    if (it != samples.end()) return it->second;
    ADD_FAILURE() << "no sample " << sample;
    return std::nan("");
  }
  bool has(const std::string& sample) const { return samples.contains(sample); }
};

// Fails the test on whatever promtool would refuse.
Exposition ParseExposition(const std::string& text) {
  static const std::regex kHelp("# HELP ([a-z_]+) (.+)");
  static const std::regex kType("# TYPE ([a-z_]+) (counter|gauge|histogram|summary)");
  static const std::regex kSample(R"re(([a-z_]+)(\{[^}]*\})? (\S+))re");
  static const std::regex kLabel(R"re(([a-z_]+)="((?:[^"\\]|\\.)*)")re");
  Exposition exposition;
  std::string family;
  EXPECT_TRUE(absl::EndsWith(text, "\n"));
  for (absl::string_view view : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::string line(view);
    std::smatch match;
    if (std::regex_match(line, match, kHelp)) {
      family = match[1];
      EXPECT_FALSE(exposition.families.contains(family)) << "twice: " << line;
      exposition.families[family].help = match[2];
    } else if (std::regex_match(line, match, kType)) {
      EXPECT_EQ(match[1].str(), family) << "TYPE does not follow HELP";
      exposition.families[family].type = match[2];
    } else if (std::regex_match(line, match, kSample)) {
      const std::string name = match[1];
      const std::string& type = exposition.families[family].type;
      const std::string suffix = absl::StartsWith(name, family) ? name.substr(family.size()) : "another family";
      EXPECT_TRUE(type == "histogram" ? suffix == "_bucket" || suffix == "_sum" || suffix == "_count"
                  : type == "summary" ? suffix.empty() || suffix == "_sum" || suffix == "_count"
                                      : suffix.empty())
          << line;
      EXPECT_FALSE(exposition.samples.contains(name + match[2].str())) << "twice: " << line;
      double value = 0;
      EXPECT_TRUE(absl::SimpleAtod(match[3].str(), &value)) << line;
      exposition.samples[name + match[2].str()] = value;
      const std::string labels = match[2];
      for (std::sregex_iterator it(labels.begin(), labels.end(), kLabel), end; it != end; ++it) {
        if ((*it)[1] != "le") exposition.labels[family].insert((*it)[1]);
      }
    } else {
      ADD_FAILURE() << "not understood: " << line;
    }
  }
  return exposition;
}

// Sends one request and returns the whole answer, empty if nobody listens.
std::string Fetch(int port, const std::string& path) {
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: localhost\r\n\r\n");
    (void)!send(connection, request.data(), request.size(), MSG_NOSIGNAL);
    char buffer[4096];
    for (ssize_t size; (size = recv(connection, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, size);
  }
  close(connection);
  return answer;
}

// The text of a successful scrape.
std::string Scrape(int port) {
  const std::string answer = Fetch(port, "/metrics");
  EXPECT_THAT(answer, ::testing::StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("text/plain"));
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

// Two pools and two sessions, in which no two numbers are equal.
MetricsSnapshot FullSnapshot() {
  MetricsSnapshot snapshot;
  snapshot.version = "1.2.3";
  snapshot.devices = {"cpu", "GPU-1"};
  snapshot.uptime_seconds = 12.5;
  snapshot.draining = true;
  snapshot.max_sessions = 64;
  snapshot.mps_enabled = true;
  snapshot.armed_sessions = 1;
  snapshot.ordered_sessions = 3;
  snapshot.max_armed_sessions = 8;
  snapshot.hot_bytes = 1001;
  snapshot.max_hot_bytes = 1002;
  snapshot.max_pool_bytes = 1003;
  uint64_t number = 100;
  for (const char* name : {"a", "b"}) {
    PoolMetrics& pool = snapshot.pools.emplace_back();
    pool.pool = name;
    for (uint64_t PoolMetrics::*field : {&PoolMetrics::capacity_bytes,
                                         &PoolMetrics::populated_bytes,
                                         &PoolMetrics::used_bytes,
                                         &PoolMetrics::free_blocks,
                                         &PoolMetrics::referenced_blocks,
                                         &PoolMetrics::cached_blocks,
                                         &PoolMetrics::sequences,
                                         &PoolMetrics::lookups_hot,
                                         &PoolMetrics::lookups_newest,
                                         &PoolMetrics::lookups_resident,
                                         &PoolMetrics::lookups_miss,
                                         &PoolMetrics::lookups_duplicate,
                                         &PoolMetrics::lookups_invalid,
                                         &PoolMetrics::evicted_rows,
                                         &PoolMetrics::lru_repairs,
                                         &PoolMetrics::gathered_bytes,
                                         &PoolMetrics::committed_bytes,
                                         &PoolMetrics::stored_bytes,
                                         &PoolMetrics::loaded_bytes,
                                         &PoolMetrics::prefix_hit_tokens,
                                         &PoolMetrics::prefix_miss_tokens,
                                         &PoolMetrics::evicted_blocks,
                                         &PoolMetrics::evicted_while_referenced_blocks,
                                         &PoolMetrics::copied_blocks,
                                         &PoolMetrics::rejected_admissions}) {
      pool.*field = number++;
    }
  }
  snapshot.sessions = {{.session = "rank0", .mapped_bytes = 2001, .queued_operations = 3},
                       {.session = "rank1", .mapped_bytes = 2002, .queued_operations = 4}};
  return snapshot;
}

TEST(MetricsTest, ScrapeShowsTheSnapshot) {
  Metrics metrics([] { return FullSnapshot(); });
  ASSERT_TRUE(metrics.Serve("127.0.0.1:0").ok());
  const Exposition exposition = ParseExposition(Scrape(metrics.port()));
  const char* const pool_samples[] = {"stoker_pool_capacity_bytes{pool=\"a\"}",
                                      "stoker_pool_populated_bytes{pool=\"a\"}",
                                      "stoker_pool_used_bytes{pool=\"a\"}",
                                      "stoker_blocks{pool=\"a\",state=\"free\"}",
                                      "stoker_blocks{pool=\"a\",state=\"referenced\"}",
                                      "stoker_blocks{pool=\"a\",state=\"cached\"}",
                                      "stoker_sequences{pool=\"a\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"hot\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"newest\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"resident\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"miss\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"duplicate\"}",
                                      "stoker_lookups_total{pool=\"a\",outcome=\"invalid\"}",
                                      "stoker_evictions_total{pool=\"a\"}",
                                      "stoker_lru_repairs_total{pool=\"a\"}",
                                      "stoker_gathered_bytes_total{pool=\"a\"}",
                                      "stoker_committed_bytes_total{pool=\"a\"}",
                                      "stoker_stored_bytes_total{pool=\"a\"}",
                                      "stoker_loaded_bytes_total{pool=\"a\"}",
                                      "stoker_prefix_tokens_total{pool=\"a\",outcome=\"hit\"}",
                                      "stoker_prefix_tokens_total{pool=\"a\",outcome=\"miss\"}",
                                      "stoker_evicted_blocks_total{pool=\"a\"}",
                                      "stoker_evicted_while_referenced_total{pool=\"a\"}",
                                      "stoker_copied_blocks_total{pool=\"a\"}",
                                      "stoker_admissions_rejected_total{pool=\"a\"}"};
  double number = 100;
  for (const char* sample : pool_samples) EXPECT_EQ(exposition.at(sample), number++) << sample;
  EXPECT_EQ(exposition.at("stoker_pool_capacity_bytes{pool=\"b\"}"), number);
  EXPECT_EQ(exposition.at("stoker_sessions"), 2);
  EXPECT_EQ(exposition.at("stoker_max_sessions"), 64);
  EXPECT_EQ(exposition.at("stoker_mps_enabled"), 1);
  EXPECT_EQ(exposition.at("stoker_armed_sessions"), 1);
  EXPECT_EQ(exposition.at("stoker_ordered_sessions"), 3);
  EXPECT_EQ(exposition.at("stoker_max_armed_sessions"), 8);
  EXPECT_EQ(exposition.at("stoker_hot_bytes"), 1001);
  EXPECT_EQ(exposition.at("stoker_max_hot_bytes"), 1002);
  EXPECT_EQ(exposition.at("stoker_max_pool_bytes"), 1003);
  EXPECT_EQ(exposition.at("stoker_client_mapped_bytes{session=\"rank0\"}"), 2001);
  EXPECT_EQ(exposition.at("stoker_client_mapped_bytes{session=\"rank1\"}"), 2002);
  EXPECT_EQ(exposition.at("stoker_queued_operations"), 7);
  EXPECT_EQ(exposition.at("stoker_draining"), 1);
  EXPECT_EQ(exposition.at("stoker_uptime_seconds"), 12.5);
  EXPECT_EQ(exposition.at("stoker_build_info{version=\"1.2.3\",device=\"cpu,GPU-1\"}"), 1);
  EXPECT_EQ(exposition.at("stoker_device_info{device=\"cpu\",backend=\"cpu\"}"), 1);
  EXPECT_EQ(exposition.at("stoker_device_info{device=\"GPU-1\",backend=\"cuda\"}"), 1);
  const double now = static_cast<double>(time(nullptr));
  EXPECT_GT(exposition.at("process_start_time_seconds"), now - 600);
  EXPECT_LE(exposition.at("process_start_time_seconds"), now + 2);
  EXPECT_GT(exposition.at("process_resident_memory_bytes"), 1e6);
  EXPECT_LT(exposition.at("process_resident_memory_bytes"), 1e11);
}

TEST(MetricsTest, NamesFollowTheConventions) {
  Metrics metrics([] { return FullSnapshot(); });
  for (const auto& [name, family] : ParseExposition(metrics.Render()).families) {
    EXPECT_TRUE(absl::StartsWith(name, "stoker_") || absl::StartsWith(name, "process_")) << name;
    EXPECT_EQ(absl::EndsWith(name, "_total"), family.type == "counter") << name;
    EXPECT_TRUE(absl::EndsWith(family.help, ".")) << name;
    for (const char* unit : {"_ms", "_us", "_milliseconds", "_kb", "_mib", "_percent", "_count"}) {
      EXPECT_FALSE(absl::EndsWith(name, unit)) << name;
    }
  }
}

TEST(MetricsTest, DocumentedAndExportedMetricsAreTheSame) {
  const std::string document = ReadDeployFile("metrics.md");
  EXPECT_THAT(document, HasSubstr(Metrics::DocumentationTable())) << "deploy/metrics.md must hold this table:\n\n"
                                                                  << Metrics::DocumentationTable();

  Metrics metrics([] { return FullSnapshot(); });
  metrics.ObserveStep(StepPlane::kServer, 1);
  metrics.ObserveStep(StepPlane::kDirect, 1);
  const Exposition exposition = ParseExposition(metrics.Render());
  static const std::regex kRow(R"re(\| `([a-z_]+)` \| (counter|gauge|histogram) \| (.*) \| (.*) \|)re");
  std::set<std::string> documented;
  for (absl::string_view view : absl::StrSplit(document, '\n')) {
    const std::string line(view);
    std::smatch row;
    if (!std::regex_match(line, row, kRow)) continue;
    const std::string name = row[1];
    const std::string labels = row[3];
    documented.insert(name);
    ASSERT_TRUE(exposition.families.contains(name)) << name;
    EXPECT_EQ(exposition.families.at(name).type, row[2].str()) << name;
    EXPECT_EQ(exposition.families.at(name).help, row[4].str()) << name;
    // Each family has samples, with the labels that are documented and no others.
    std::set<std::string> names;
    static const std::regex kLabel("`([a-z_]+)`");
    for (std::sregex_iterator it(labels.begin(), labels.end(), kLabel), end; it != end; ++it) names.insert((*it)[1]);
    EXPECT_EQ(exposition.labels.contains(name) ? exposition.labels.at(name) : std::set<std::string>(), names) << name;
  }
  for (const auto& [name, family] : exposition.families) EXPECT_TRUE(documented.contains(name)) << name;
  // The values of closed sets are documented too.
  static const std::regex kClosed(R"re((outcome|state|plane)="([a-z]+)")re");
  for (const auto& [sample, value] : exposition.samples) {
    std::smatch match;
    if (std::regex_search(sample, match, kClosed)) {
      const std::string pattern = absl::StrCat("`", match[1].str(), "` = [a-z, ]*\\b", match[2].str(), "\\b");
      EXPECT_TRUE(std::regex_search(document, std::regex(pattern))) << sample;
    }
  }
}

TEST(MetricsTest, AlertRulesUseMetricsThatExist) {
  Metrics metrics([] { return FullSnapshot(); });
  const Exposition exposition = ParseExposition(metrics.Render());
  const std::string rules = ReadDeployFile("prometheus/stoker.rules.yml");
  static const std::regex kName("\\b(stoker|process)_[a-z_]+");
  int used = 0;
  for (std::sregex_iterator it(rules.begin(), rules.end(), kName), end; it != end; ++it) {
    std::string name = it->str();
    ++used;
    if (!exposition.families.contains(name)) name = std::regex_replace(name, std::regex("_(bucket|sum|count)$"), "");
    EXPECT_TRUE(exposition.families.contains(name)) << it->str();
  }
  EXPECT_GE(used, 10);
}

TEST(MetricsTest, RpcHistogramHasClosedLabels) {
  Metrics metrics([] { return MetricsSnapshot(); });
  metrics.ObserveRpc("Residency/Step", 0, 0.0003);
  metrics.ObserveRpc("/stoker.v1.Residency/Step", 0, 0.0003);
  metrics.ObserveRpc("Residency/Step", static_cast<int>(absl::StatusCode::kResourceExhausted), 0.00005);
  metrics.ObserveRpc("Residency/Step", -1, 1);
  metrics.ObserveRpc("Residency/Step", 17, 1);
  metrics.ObserveRpc("/grpc.health.v1.Health/Check", 0, 1);
  metrics.ObserveRpc("/stoker.v1.Residency/Nonsense", 12, 100);
  metrics.ObserveRpc("", 16, 1);
  const std::string text = metrics.Render();
  const Exposition exposition = ParseExposition(text);
  const std::string count = "stoker_rpc_duration_seconds_count";
  EXPECT_EQ(exposition.at(count + "{method=\"Residency/Step\",code=\"OK\"}"), 2);
  EXPECT_EQ(exposition.at(count + "{method=\"Residency/Step\",code=\"RESOURCE_EXHAUSTED\"}"), 1);
  EXPECT_EQ(exposition.at(count + "{method=\"Residency/Step\",code=\"UNKNOWN\"}"), 2);
  EXPECT_EQ(exposition.at(count + "{method=\"other\",code=\"OK\"}"), 1);
  EXPECT_EQ(exposition.at(count + "{method=\"other\",code=\"UNIMPLEMENTED\"}"), 1);
  EXPECT_EQ(exposition.at(count + "{method=\"other\",code=\"UNAUTHENTICATED\"}"), 1);
  // A method of each service is there from the start, with code OK only.
  for (const char* method :
       {"Pools/CreatePool", "Sessions/Attach", "Sequences/Admit", "Residency/RunSteps", "Admin/Drain"}) {
    EXPECT_EQ(exposition.at(absl::StrCat(count, "{method=\"", method, "\",code=\"OK\"}")), 0);
    EXPECT_FALSE(exposition.has(absl::StrCat(count, "{method=\"", method, "\",code=\"INTERNAL\"}")));
  }
  EXPECT_THAT(text, AllOf(Not(HasSubstr("Nonsense")), Not(HasSubstr("Health"))));

  const auto bucket = [&](const std::string& method, const std::string& code, const std::string& le) {
    return exposition.at(absl::StrCat("stoker_rpc_duration_seconds_bucket{method=\"", method, "\",code=\"", code,
                                      "\",le=\"", le, "\"}"));
  };
  EXPECT_EQ(bucket("Residency/Step", "OK", "0.0002"), 0);
  EXPECT_EQ(bucket("Residency/Step", "OK", "0.0005"), 2);
  EXPECT_EQ(bucket("Residency/Step", "OK", "+Inf"), 2);
  EXPECT_EQ(bucket("Residency/Step", "RESOURCE_EXHAUSTED", "5e-05"), 1) << "a bound belongs to its bucket";
  EXPECT_EQ(bucket("other", "UNIMPLEMENTED", "10"), 0);
  EXPECT_EQ(bucket("other", "UNIMPLEMENTED", "+Inf"), 1);
  EXPECT_DOUBLE_EQ(exposition.at("stoker_rpc_duration_seconds_sum{method=\"Residency/Step\",code=\"OK\"}"), 0.0006);
}

TEST(MetricsTest, StepAndGatherHistograms) {
  Metrics metrics([] { return MetricsSnapshot(); });
  EXPECT_FALSE(ParseExposition(metrics.Render()).has("stoker_step_duration_seconds_count{plane=\"direct\"}"));
  metrics.ObserveStep(StepPlane::kRpc, 0.001);
  metrics.ObserveStep(StepPlane::kDirect, 0.002);
  metrics.ObserveGatherRate(5e9);
  metrics.ObserveGatherRate(std::nan(""));
  metrics.ObserveGatherRate(-1);
  const Exposition exposition = ParseExposition(metrics.Render());
  EXPECT_EQ(exposition.at("stoker_step_duration_seconds_count{plane=\"rpc\"}"), 1);
  EXPECT_EQ(exposition.at("stoker_step_duration_seconds_count{plane=\"direct\"}"), 1);
  EXPECT_FALSE(exposition.has("stoker_step_duration_seconds_count{plane=\"server\"}"));
  EXPECT_EQ(exposition.at("stoker_gather_bytes_per_second_count"), 2) << "a NaN counts nowhere";
  EXPECT_EQ(exposition.at("stoker_gather_bytes_per_second_sum"), 5e9);
  EXPECT_EQ(exposition.at("stoker_gather_bytes_per_second_bucket{le=\"3000000000\"}"), 1);
  EXPECT_EQ(exposition.at("stoker_gather_bytes_per_second_bucket{le=\"10000000000\"}"), 2);
}

TEST(MetricsTest, EndsOfPlanesByReason) {
  Metrics metrics([] { return MetricsSnapshot(); });
  for (int i = 0; i < 7; ++i) metrics.ObservePlaneEnd(PlaneEndReason::kTimedOut);
  metrics.ObservePlaneEnd(PlaneEndReason::kDeviceFailed);
  const Exposition exposition = ParseExposition(metrics.Render());
  // Those that have not happened are there, so that a rate over the first one is right.
  EXPECT_EQ(exposition.at("stoker_plane_ends_total{reason=\"disarmed\"}"), 0);
  EXPECT_EQ(exposition.at("stoker_plane_ends_total{reason=\"timed_out\"}"), 7);
  EXPECT_EQ(exposition.at("stoker_plane_ends_total{reason=\"bad_step\"}"), 0);
  EXPECT_EQ(exposition.at("stoker_plane_ends_total{reason=\"device_failed\"}"), 1);
}

TEST(MetricsTest, EmptyDaemonAndOddLabelsAreWellFormed) {
  MetricsSnapshot snapshot;
  Metrics metrics([&snapshot] { return snapshot; });
  EXPECT_EQ(ParseExposition(metrics.Render()).at("stoker_sessions"), 0);
  snapshot.sessions = {{.session = "twice", .mapped_bytes = 1, .queued_operations = 0},
                       {.session = "twice", .mapped_bytes = 2, .queued_operations = 0},
                       {.session = "a\"b\\c\nd", .mapped_bytes = 4, .queued_operations = 0}};
  snapshot.pools.resize(2);
  const Exposition exposition = ParseExposition(metrics.Render());
  EXPECT_EQ(exposition.at("stoker_client_mapped_bytes{session=\"twice\"}"), 3);
  EXPECT_EQ(exposition.at("stoker_client_mapped_bytes{session=\"a\\\"b\\\\c\\nd\"}"), 4);
  EXPECT_EQ(exposition.at("stoker_sessions"), 3);
  snapshot.sessions.clear();
  EXPECT_THAT(metrics.Render(), Not(HasSubstr("twice"))) << "a session's series ends with it";
}

TEST(MetricsTest, AddressInUseIsNamed) {
  Metrics first([] { return MetricsSnapshot(); });
  ASSERT_TRUE(first.Serve("127.0.0.1:0").ok());
  ASSERT_GT(first.port(), 0);
  const std::string address = absl::StrCat("127.0.0.1:", first.port());
  Metrics second([] { return MetricsSnapshot(); });
  const absl::Status status = second.Serve(address);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(address), HasSubstr("in use")));
  EXPECT_EQ(second.port(), 0);
  first.Stop();
  EXPECT_TRUE(second.Serve(address).ok());
  EXPECT_EQ(second.port(), first.port());
}

TEST(MetricsTest, OtherAddressesAreRefused) {
  Metrics metrics([] { return MetricsSnapshot(); });
  for (const char* bad :
       {"", "9464", ":9464", "127.0.0.1:9464s", "127.0.0.1:1,127.0.0.1:2", "127.0.0.1:", "127.0.0.1:65536"}) {
    EXPECT_EQ(metrics.Serve(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  // An address of nobody (RFC 5737), and a name of nobody (RFC 6761).
  EXPECT_EQ(metrics.Serve("192.0.2.1:9464").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(metrics.Serve("host.invalid:9464").code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(metrics.Serve("localhost:0").ok());
}

TEST(MetricsTest, StopsAndOtherPathsAreNotFound) {
  Metrics metrics([] { return MetricsSnapshot(); });
  ASSERT_TRUE(metrics.Serve("127.0.0.1:0").ok());
  EXPECT_THAT(Fetch(metrics.port(), "/"), HasSubstr(" 404 Not Found\r\n"));
  const int port = metrics.port();
  const absl::Time start = absl::Now();
  metrics.Stop();
  EXPECT_LT(absl::Now() - start, absl::Seconds(1)) << "civetweb alone takes up to 2 s";
  EXPECT_EQ(Fetch(port, "/metrics"), "");
  metrics.ObserveRpc("Residency/Step", 0, 1);
  metrics.Stop();
}

TEST(MetricsTest, ObservationsDuringScrapesAreAllCounted) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  Metrics metrics([] { return FullSnapshot(); });
  ASSERT_TRUE(metrics.Serve("127.0.0.1:0").ok());
  std::atomic<bool> done = false;
  std::thread scraper([&] {
    double last = 0;
    do {
      const Exposition exposition = ParseExposition(Scrape(metrics.port()));
      const double count = exposition.at("stoker_rpc_duration_seconds_count{method=\"Residency/Step\",code=\"OK\"}");
      EXPECT_GE(count, last);
      EXPECT_EQ(count,
                exposition.at("stoker_rpc_duration_seconds_bucket{method=\"Residency/Step\",code=\"OK\",le=\"+Inf\"}"));
      last = count;
    } while (!done);
  });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        metrics.ObserveRpc("Residency/Step", 0, 0.001);
        metrics.ObserveRpc("Residency/Store", i % 17, 0.001);
        metrics.ObserveStep(static_cast<StepPlane>(i % 3), 0.001);
        metrics.ObserveGatherRate(1e9);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  scraper.join();
  const Exposition exposition = ParseExposition(metrics.Render());
  EXPECT_EQ(exposition.at("stoker_rpc_duration_seconds_count{method=\"Residency/Step\",code=\"OK\"}"),
            kThreads * kRounds);
  EXPECT_EQ(exposition.at("stoker_gather_bytes_per_second_count"), kThreads * kRounds);
  double stores = 0;
  for (const auto& [sample, value] : exposition.samples) {
    if (absl::StartsWith(sample, "stoker_rpc_duration_seconds_count{method=\"Residency/Store\"")) stores += value;
  }
  EXPECT_EQ(stores, kThreads * kRounds);
}

TEST(MetricsTest, SlowSnapshotDoesNotHoldUpObservations) {
  std::mutex mutex;
  std::condition_variable changed;
  bool entered = false, released = false;
  Metrics metrics([&] {
    std::unique_lock lock(mutex);
    entered = true;
    changed.notify_all();
    changed.wait(lock, [&] { return released; });
    return MetricsSnapshot();
  });
  std::thread scraper([&] { metrics.Render(); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return entered; });
  }
  metrics.ObserveRpc("Residency/Step", 0, 1);
  metrics.ObserveStep(StepPlane::kRpc, 1);
  metrics.ObserveGatherRate(1);
  {
    std::lock_guard lock(mutex);
    released = true;
    changed.notify_all();
  }
  scraper.join();
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
