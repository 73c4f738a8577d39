// A daemon whose pools take their time: it lives before it serves. In this process, on a backend that makes pool memory
// when the test says so.
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/daemon.h"
#include "server/rpc/services.h"
#include "stoker/v1/pools.grpc.pb.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "stoker/v1/sequences.grpc.pb.h"
#include "tests/system/daemon_fixture.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";
constexpr int kQuarters = 4;

// How far the pool memory of a GatedBackend may get.
class Gate {
 public:
  // Lets `quarters` more quarters of a pool pass.
  void Open(int quarters) {
    absl::MutexLock lock(&mutex_);
    open_ += quarters;
  }
  void FailNext(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    failure_ = std::move(status);
  }
  // Waits a little for one quarter. Whether it may pass.
  bool TryPass() {
    absl::MutexLock lock(&mutex_);
    const auto open = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return open_ > 0 || !failure_.ok(); };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&open), absl::Milliseconds(5)) || open_ == 0) return false;
    --open_;
    return true;
  }
  absl::Status failure() {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  absl::Mutex mutex_;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// The CPU backend, with pools that are populated by quarters, as the gate lets them.
class GatedBackend final : public kernels::Backend {
 public:
  explicit GatedBackend(Gate* gate) : gate_(*gate) {}

  std::string_view device() const override { return cpu_->device(); }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocatePool(size_t bytes,
                                                                const kernels::PoolOptions& options) override {
    for (size_t done = 0; done <= kQuarters; ++done) {
      do {
        if (absl::Status failure = gate_.failure(); !failure.ok()) return failure;
        if (!options.progress({kernels::PoolPhase::kFault, bytes * done / kQuarters, bytes, "a gate", ""})) {
          return absl::CancelledError("told to stop");
        }
      } while (done < kQuarters && !gate_.TryPass());
    }
    return cpu_->AllocatePool(bytes, {});
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocateShared(size_t bytes, kernels::Sharing sharing) override {
    return cpu_->AllocateShared(bytes, sharing);
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocatePrivate(size_t bytes) override {
    return cpu_->AllocatePrivate(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> AllocateHost(size_t bytes) override {
    return cpu_->AllocateHost(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Stream>> CreateStream() override { return cpu_->CreateStream(); }
  absl::Status CheckWaitingStreams(int64_t streams) const override {
    if (streams <= kMaxWaitingStreams) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(streams, " given, limit ", kMaxWaitingStreams));
  }

  static constexpr int64_t kMaxWaitingStreams = 12;

 private:
  const std::unique_ptr<kernels::Backend> cpu_ = kernels::cpu::MakeCpuBackend(2);
  Gate& gate_;
};

class ReadinessTest : public ::testing::Test {
 protected:
  // Pools of 2 layers x 64 blocks x 16 rows x 64 bytes each.
  static constexpr int64_t kPoolBytes = 131072 + 4096 * 16 + 64 * 256;  // rows, and what planes share

  void Start(const std::vector<std::string>& pools, int64_t max_pool_bytes = 1 << 30, int64_t max_armed_sessions = 8) {
    server::DaemonConfig config;
    config.set_max_armed_sessions(max_armed_sessions);
    config.set_socket_path(folder_.File("s"));
    config.set_metrics_address("127.0.0.1:0");
    config.set_max_pool_bytes(max_pool_bytes);
    config.set_cpu_threads(2);
    config.set_drain_grace_ms(1000);
    for (const std::string& name : pools) *config.add_pool() = LinearPool(name, 2, 64, 64);
    auto daemon = server::Daemon::Start(
        config, [this] { failed_.Notify(); },
        [this]() -> absl::StatusOr<std::vector<std::unique_ptr<kernels::Backend>>> {
          std::vector<std::unique_ptr<kernels::Backend>> backends;
          backends.push_back(std::make_unique<GatedBackend>(&gate_));
          return backends;
        });
    start_ = daemon.status();
    if (!daemon.ok()) return;
    daemon_ = *std::move(daemon);
    channel_ = grpc::CreateChannel("unix:" + folder_.File("s"), grpc::InsecureChannelCredentials());
    client_.emplace(client::Client::Connect("unix:" + folder_.File("s")).value());
  }

  // Before the gate and the notification that it uses.
  void TearDown() override { daemon_.reset(); }

  std::string Health(const std::string& service) {
    std::string reply;
    const std::string request =
        service.empty() ? "" : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    const absl::Status status = RawBytesCall(channel_, "/grpc.health.v1.Health/Check", request, &reply);
    return status.ok() ? reply : status.ToString();
  }
  bool AwaitServing() {
    return Eventually(absl::Seconds(20), [&] { return Health("") == kServing; });
  }
  std::map<std::string, double> Metrics() { return Scrape(daemon_->metrics_port()); }
  bool AwaitPopulated(const std::string& pool, int64_t bytes) {
    const std::string series = absl::StrCat("stoker_pool_populated_bytes{pool=\"", pool, "\"}");
    return Eventually(absl::Seconds(20), [&] {
      const auto metrics = Metrics();
      const auto it = metrics.find(series);
      return it != metrics.end() && it->second == static_cast<double>(bytes);
    });
  }
  absl::StatusOr<v1::CreatePoolResponse> CreatePool(const std::string& name) {
    v1::CreatePoolRequest request;
    *request.mutable_spec() = LinearPool(name, 2, 64, 64);
    return client_->CreatePool(request);
  }

  Gate gate_;
  TemporaryFolder folder_;
  absl::Notification failed_;
  absl::Status start_;
  std::unique_ptr<server::Daemon> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::optional<client::Client> client_;
};

// Armed sessions beyond that would stop all others without a word.
TEST_F(ReadinessTest, RefusesToArmMoreThanTheDeviceCarries) {
  Start({}, 1 << 30, GatedBackend::kMaxWaitingStreams + 1);
  EXPECT_EQ(start_.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(start_.message()), HasSubstr("max_armed_sessions: 13 given, limit 12"));
  Start({}, 1 << 30, GatedBackend::kMaxWaitingStreams);
  EXPECT_TRUE(start_.ok()) << start_;
}

TEST_F(ReadinessTest, LivesBeforeItServes) {
  Start({"a", "b"});
  ASSERT_TRUE(start_.ok()) << start_;
  gate_.Open(kQuarters + 1);  // all of a, a quarter of b
  ASSERT_TRUE(AwaitPopulated("b", kPoolBytes / 4));

  EXPECT_EQ(Health(""), kNotServing);
  for (const char* service : rpc::kServiceNames) EXPECT_EQ(Health(service), kNotServing) << service;
  EXPECT_EQ(client_->GetStatus()->state(), v1::DAEMON_STATE_STARTING);
  const auto metrics = Metrics();
  EXPECT_EQ(metrics.at("stoker_pool_capacity_bytes{pool=\"a\"}"), kPoolBytes);
  EXPECT_EQ(metrics.at("stoker_pool_populated_bytes{pool=\"a\"}"), kPoolBytes);
  EXPECT_EQ(metrics.at("stoker_pool_capacity_bytes{pool=\"b\"}"), kPoolBytes);

  // Every call that needs pools says how far they are.
  const auto sequences = v1::Sequences::NewStub(channel_);
  const auto residency = v1::Residency::NewStub(channel_);
  v1::AdmitResponse admitted;
  v1::StepResponse stepped;
  v1::GetPoolRequest get;
  get.set_name("a");  // is there, but its daemon is not ready
  v1::DeletePoolRequest remove;
  remove.set_name("a");
  v1::ListSequencesRequest list;
  list.set_pool("a");
  client::SessionOptions once = WithoutReattach();
  for (const auto& [what, status] : std::vector<std::pair<const char*, absl::Status>>{
           {"ListPools", client_->ListPools().status()},
           {"GetPool", client_->GetPool(get).status()},
           {"DeletePool", client_->DeletePool(remove).status()},
           {"CreatePool", CreatePool("c").status()},
           {"Attach", client_->Attach(AttachTo(LinearPool("a", 2, 64, 64), "x"), once).status()},
           {"ListSequences", client_->ListSequences(list).status()},
           {"Admit", RawCall(*sequences, &v1::Sequences::Stub::Admit, "1-2-3", v1::AdmitRequest(), &admitted)},
           {"Step", RawCall(*residency, &v1::Residency::Stub::Step, "", v1::StepRequest(), &stepped)}}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << what << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("pools are being populated: 266240 of 425984 bytes")) << what;
  }

  gate_.Open(2);
  ASSERT_TRUE(AwaitPopulated("b", kPoolBytes / 4 * 3));
  EXPECT_EQ(Health(""), kNotServing);
  gate_.Open(1);
  ASSERT_TRUE(AwaitServing());
  for (const char* service : rpc::kServiceNames) EXPECT_EQ(Health(service), kServing) << service;
  EXPECT_EQ(client_->GetStatus()->state(), v1::DAEMON_STATE_SERVING);
  EXPECT_EQ(client_->ListPools()->pools_size(), 2);
  EXPECT_EQ(Metrics().at("stoker_pool_populated_bytes{pool=\"b\"}"), kPoolBytes);
  EXPECT_TRUE(client_->Attach(AttachTo(LinearPool("a", 2, 64, 64), "x"), once).ok());
  EXPECT_FALSE(failed_.HasBeenNotified());
}

TEST_F(ReadinessTest, StopsWhileItPopulates) {
  Start({"a"});
  ASSERT_TRUE(start_.ok()) << start_;
  gate_.Open(1);
  ASSERT_TRUE(AwaitPopulated("a", kPoolBytes / 4));
  const absl::Time begin = absl::Now();
  daemon_->Stop();
  daemon_.reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  EXPECT_FALSE(failed_.HasBeenNotified()) << "a stop is no failure";
}

TEST_F(ReadinessTest, EndsWithoutAStop) {
  Start({"a"});
  ASSERT_TRUE(start_.ok()) << start_;
  gate_.Open(1);
  daemon_.reset();
  EXPECT_FALSE(failed_.HasBeenNotified());
}

TEST_F(ReadinessTest, TellsThatAPoolCannotBeMade) {
  Start({"a", "b"});
  ASSERT_TRUE(start_.ok()) << start_;
  EXPECT_TRUE(daemon_->failure().ok());
  gate_.Open(kQuarters);
  ASSERT_TRUE(AwaitPopulated("a", kPoolBytes));
  gate_.FailNext(absl::ResourceExhaustedError("no more"));
  ASSERT_TRUE(failed_.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(daemon_->failure(), absl::ResourceExhaustedError("pool b: no more"));
  EXPECT_EQ(Health(""), kNotServing);
  daemon_->Stop();
}

TEST_F(ReadinessTest, RefusesToStartWithMoreThanItMayHold) {
  Start({"a", "b"}, 2 * kPoolBytes - 1);
  EXPECT_EQ(start_.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(start_.message()),
              HasSubstr("pool b: blocks: needs 212992 bytes, 212992 are in use, limit max_pool_bytes 425983"));
}

TEST_F(ReadinessTest, AnswersOthersWhileAPoolIsMadeByCall) {
  Start({"a"});
  ASSERT_TRUE(start_.ok()) << start_;
  gate_.Open(kQuarters);
  ASSERT_TRUE(AwaitServing());
  auto created = std::async(std::launch::async, [&] { return CreatePool("b"); });
  gate_.Open(1);
  ASSERT_TRUE(AwaitPopulated("b", kPoolBytes / 4));
  // Nothing else waits for it: sessions come and go, and what has ended is freed.
  EXPECT_EQ(Health(""), kServing);
  EXPECT_EQ(client_->ListPools()->pools_size(), 1);
  for (int i = 0; i < 3; ++i) {
    const auto session = client_->Attach(AttachTo(LinearPool("a", 2, 64, 64), "x"), WithoutReattach());
    EXPECT_TRUE(session.ok()) << session.status();
  }
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return client_->GetStatus()->hot_bytes() == 0; }));
  EXPECT_EQ(created.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  gate_.Open(kQuarters - 1);
  const auto pool = created.get();
  EXPECT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(client_->ListPools()->pools_size(), 2);
}

TEST_F(ReadinessTest, AStopEndsTheCallThatMakesAPool) {
  Start({});
  ASSERT_TRUE(start_.ok()) << start_;
  ASSERT_TRUE(AwaitServing());
  auto created = std::async(std::launch::async, [&] { return CreatePool("b"); });
  gate_.Open(1);
  ASSERT_TRUE(AwaitPopulated("b", kPoolBytes / 4));
  daemon_->Stop();
  const absl::Status status = created.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon stops"));
}

TEST_F(ReadinessTest, AFailedPoolTakesNothing) {
  Start({}, kPoolBytes);
  ASSERT_TRUE(start_.ok()) << start_;
  ASSERT_TRUE(AwaitServing());
  gate_.FailNext(absl::ResourceExhaustedError("no more"));
  EXPECT_EQ(CreatePool("b").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(client_->GetStatus()->pool_bytes(), 0);
  EXPECT_EQ(Metrics().count("stoker_pool_capacity_bytes{pool=\"b\"}"), 0);
  gate_.FailNext(absl::OkStatus());
  gate_.Open(kQuarters);
  EXPECT_TRUE(CreatePool("b").ok());
  v1::DeletePoolRequest remove;
  remove.set_name("b");
  EXPECT_TRUE(client_->DeletePool(remove).ok());
  EXPECT_EQ(client_->GetStatus()->pool_bytes(), 0);
}

}  // namespace
}  // namespace stoker::system_test
