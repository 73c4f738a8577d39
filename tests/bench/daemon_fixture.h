// A stokerd of the benchmark's own, and sessions on it with known rows.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/session.h"
#include "tests/bench/benches.h"
#include "tests/bench/child_process.h"
#include "tests/bench/local_session.h"

namespace stoker::bench {

class Daemon {
 public:
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const BenchContext& context);
  const client::Client& client() const { return *client_; }
  // Mean time in the server, in us, of the calls of `method` ("Sequences/Admit") since the last call of this with the
  // same method; from stoker_rpc_duration_seconds.
  absl::StatusOr<double> MeanRpcUs(const std::string& method);

 private:
  struct Total {
    std::string method;
    double seconds = 0;
    double calls = 0;
  };

  absl::StatusOr<std::string> Scrape() const;

  std::unique_ptr<ChildProcess> process_;
  std::unique_ptr<client::Client> client_;
  int metrics_port_ = 0;
  std::vector<Total> totals_;
};

// One session and its pool: a sequence in each state row, all rows stored, each layer an index group.
class RemoteSession {
 public:
  // `extra_rows` may be committed behind the stored ones. The pool, and nothing else, has the name `name`.
  static absl::StatusOr<std::unique_ptr<RemoteSession>> Open(Daemon& daemon, const std::string& name,
                                                             const SessionShape& shape, int32_t extra_rows);
  // Deletes the pool.
  ~RemoteSession();

  client::Session& session() { return *session_; }
  const client::Arena& arena() const { return *arena_; }
  uint64_t sequence(int32_t i) const { return sequences_[static_cast<size_t>(i)].id; }
  uint32_t state_row(int32_t i) const { return sequences_[static_cast<size_t>(i)].state_row; }

 private:
  struct Sequence {
    uint64_t id = 0;
    uint32_t state_row = 0;
  };

  explicit RemoteSession(Daemon& daemon) : daemon_(daemon) {}
  absl::Status Initialize(const std::string& name, const SessionShape& shape, int32_t extra_rows);
  absl::Status StoreAll(const SessionShape& shape);

  Daemon& daemon_;
  std::string pool_;
  std::unique_ptr<client::Session> session_;
  std::shared_ptr<const client::Arena> arena_;
  std::vector<Sequence> sequences_;
};

}  // namespace stoker::bench
