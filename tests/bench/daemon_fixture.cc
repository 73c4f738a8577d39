#include "tests/bench/daemon_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::bench {
namespace {

constexpr int64_t kStagingBytes = int64_t{32} << 20;
constexpr absl::Duration kDeleteTimeout = absl::Seconds(5);
constexpr absl::Duration kDeletePoll = absl::Milliseconds(5);

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A port that was free a moment ago.
absl::StatusOr<int> FreePort() {
  const Descriptor probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(probe.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return absl::ErrnoToStatus(errno, "no free port");
  }
  return ntohs(address.sin_port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const BenchContext& context) {
  auto daemon = std::make_unique<Daemon>();
  const absl::StatusOr<int> port = FreePort();
  if (!port.ok()) return port.status();
  daemon->metrics_port_ = *port;
  const std::string socket = context.folder->Path("stokerd.sock");
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(
      {context.stokerd, absl::StrCat("--socket-path=", socket), absl::StrCat("--metrics-address=127.0.0.1:", *port)},
      socket, context.folder->Path("stokerd.log"));
  if (!process.ok()) return process.status();
  daemon->process_ = *std::move(process);
  absl::StatusOr<client::Client> client = client::Client::Connect(absl::StrCat("unix:", socket));
  if (!client.ok()) return client.status();
  daemon->client_ = std::make_unique<client::Client>(*std::move(client));
  return daemon;
}

absl::StatusOr<std::string> Daemon::Scrape() const {
  const Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = Loopback(metrics_port_);
  constexpr absl::string_view kRequest = "GET /metrics HTTP/1.0\r\n\r\n";
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      send(fd.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(kRequest.size())) {
    return absl::ErrnoToStatus(errno, "metrics");
  }
  std::string text;
  char part[4096];
  for (ssize_t n; (n = recv(fd.get(), part, sizeof(part), 0)) > 0;) text.append(part, static_cast<size_t>(n));
  return text;
}

absl::StatusOr<double> Daemon::MeanRpcUs(const std::string& method) {
  const absl::StatusOr<std::string> text = Scrape();
  if (!text.ok()) return text.status();
  Total now{method, 0, 0};
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    if (!absl::StrContains(line, absl::StrCat("method=\"", method, "\""))) continue;
    double value = 0;
    if (!absl::SimpleAtod(absl::StripAsciiWhitespace(line.substr(line.rfind(' ') + 1)), &value)) continue;
    if (absl::StartsWith(line, "stoker_rpc_duration_seconds_sum")) now.seconds += value;
    if (absl::StartsWith(line, "stoker_rpc_duration_seconds_count")) now.calls += value;
  }
  auto before = std::find_if(totals_.begin(), totals_.end(), [&](const Total& t) { return t.method == method; });
  if (before == totals_.end()) before = totals_.insert(totals_.end(), Total{method, 0, 0});
  const Total last = std::exchange(*before, now);
  if (now.calls == last.calls) return absl::NotFoundError(absl::StrCat("the daemon counted no call of ", method));
  return (now.seconds - last.seconds) / (now.calls - last.calls) * 1e6;
}

absl::StatusOr<std::unique_ptr<RemoteSession>> RemoteSession::Open(Daemon& daemon, const std::string& name,
                                                                   const SessionShape& shape, int32_t extra_rows) {
  std::unique_ptr<RemoteSession> session(new RemoteSession(daemon));
  if (absl::Status status = session->Initialize(name, shape, extra_rows); !status.ok()) return status;
  return session;
}

RemoteSession::~RemoteSession() {
  session_.reset();
  if (pool_.empty()) return;
  v1::DeletePoolRequest request;
  request.set_name(pool_);
  // The daemon takes a moment to give up a session that has gone.
  absl::Status status;
  for (const absl::Time deadline = absl::Now() + kDeleteTimeout; absl::Now() < deadline; absl::SleepFor(kDeletePoll)) {
    status = daemon_.client().DeletePool(request).status();
    if (!absl::IsFailedPrecondition(status)) break;
  }
  if (!status.ok()) std::fprintf(stderr, "pool %s: %s\n", pool_.c_str(), status.ToString().c_str());
}

absl::Status RemoteSession::Initialize(const std::string& name, const SessionShape& shape, int32_t extra_rows) {
  const int32_t max_rows = shape.sequence_rows + extra_rows;
  v1::CreatePoolRequest pool;
  pool.mutable_spec()->set_name(name);
  pool.mutable_spec()->set_layers(static_cast<uint32_t>(shape.layers));
  pool.mutable_spec()->set_row_layout(v1::ROW_LAYOUT_LINEAR);
  pool.mutable_spec()->set_row_bytes(static_cast<uint32_t>(shape.row_bytes));
  pool.mutable_spec()->set_block_rows(static_cast<uint32_t>(shape.block_rows));
  const int32_t blocks = shape.state_rows * ((max_rows + shape.block_rows - 1) / shape.block_rows);
  pool.mutable_spec()->set_blocks(static_cast<uint32_t>(blocks));
  if (const auto created = daemon_.client().CreatePool(pool); !created.ok()) return created.status();
  pool_ = name;

  v1::AttachRequest attach;
  attach.set_pool(name);
  attach.set_state_rows(static_cast<uint32_t>(shape.state_rows));
  attach.set_hot_rows(static_cast<uint32_t>(shape.hot_rows));
  attach.set_max_top_k(static_cast<uint32_t>(shape.top_k));
  attach.set_max_sequence_rows(static_cast<uint32_t>(max_rows));
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  attach.set_staging_bytes(static_cast<uint64_t>(kStagingBytes));
  for (int32_t layer = 0; layer < shape.layers; ++layer) attach.add_groups()->add_layers(static_cast<uint32_t>(layer));
  client::SessionOptions options;
  options.arena_mapping = client::ArenaMapping::kRequired;
  absl::StatusOr<std::unique_ptr<client::Session>> session = daemon_.client().Attach(attach, options);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  arena_ = session_->arena();

  v1::AdmitRequest admit;
  for (int32_t i = 0; i < shape.state_rows; ++i) {
    v1::AdmitItem* item = admit.add_items();
    item->set_prompt_rows(static_cast<uint32_t>(shape.sequence_rows));
    item->set_max_rows(static_cast<uint32_t>(max_rows));
  }
  v1::AdmitResponse admitted;
  if (absl::Status status = session_->Admit(admit, &admitted); !status.ok()) return status;
  for (const v1::AdmittedSequence& sequence : admitted.sequences()) {
    if (sequence.status().code() != 0) return absl::InternalError(sequence.status().message());
    sequences_.push_back({sequence.sequence_id(), sequence.state_row()});
  }
  return StoreAll(shape);
}

absl::Status RemoteSession::StoreAll(const SessionShape& shape) {
  const absl::StatusOr<absl::Span<std::byte>> staging = arena_->Staging();
  if (!staging.ok()) return staging.status();
  const int64_t most = kStagingBytes / (int64_t{shape.row_bytes} * shape.layers);
  for (int32_t sequence = 0; sequence < shape.state_rows; ++sequence) {
    for (int32_t first = 0; first < shape.sequence_rows;) {
      const auto count = static_cast<int32_t>(std::min<int64_t>(most, shape.sequence_rows - first));
      for (int32_t layer = 0; layer < shape.layers; ++layer) {
        for (int32_t row = 0; row < count; ++row) {
          FillRow(RowSeed(layer, sequence, first + row),
                  staging->data() + (int64_t{layer} * count + row) * shape.row_bytes, shape.row_bytes);
        }
      }
      v1::StoreRequest request;
      v1::StoreItem* item = request.add_items();
      item->mutable_range()->set_sequence_id(sequences_[static_cast<size_t>(sequence)].id);
      item->mutable_range()->set_first_row(static_cast<uint32_t>(first));
      item->mutable_range()->set_row_count(static_cast<uint32_t>(count));
      item->set_source(v1::DATA_SOURCE_SHARED);
      v1::StoreResponse response;
      if (absl::Status status = session_->Store(request, &response); !status.ok()) return status;
      if (response.statuses(0).code() != 0) return absl::InternalError(response.statuses(0).message());
      first += count;
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
