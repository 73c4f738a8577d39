// Store and Load of whole runs of rows: in the message, and through the staging area.
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/bench/benches.h"
#include "tests/bench/daemon_fixture.h"

namespace stoker::bench {
namespace {

struct Times {
  Samples store_inline, store_staged, load_staged, read_inline;
};

class BulkBench {
 public:
  explicit BulkBench(const SessionShape& shape) : shape_(shape), bytes_(int64_t{shape.row_bytes} * shape.layers) {}

  absl::Status Open(Daemon& daemon) {
    // The session's own sequence is only there because every session has one; those below come and go.
    SessionShape roomy = shape_;
    roomy.state_rows = 2;
    absl::StatusOr<std::unique_ptr<RemoteSession>> remote = RemoteSession::Open(daemon, "bulk", roomy, 0);
    if (!remote.ok()) return remote.status();
    remote_ = *std::move(remote);
    v1::ReleaseRequest release;
    release.add_sequence_ids(remote_->sequence(1));
    v1::ReleaseResponse released;
    return remote_->session().Release(release, &released);
  }

  // One sequence: stored, loaded, read, released.
  absl::Status Run(int32_t rows, bool staged, Times* times) {
    client::Session& session = remote_->session();
    const size_t bytes = static_cast<size_t>(bytes_ * rows);
    v1::AdmitRequest admit;
    admit.add_items()->set_prompt_rows(static_cast<uint32_t>(rows));
    admit.mutable_items(0)->set_max_rows(static_cast<uint32_t>(rows));
    v1::AdmitResponse admitted;
    if (absl::Status status = session.Admit(admit, &admitted); !status.ok()) return status;
    const uint64_t id = admitted.sequences(0).sequence_id();
    const auto set_range = [&](v1::RowRange* range) {
      range->set_sequence_id(id);
      range->set_row_count(static_cast<uint32_t>(rows));
    };
    std::byte* const staging = remote_->arena().Staging()->data();
    v1::StoreRequest store;
    set_range(store.add_items()->mutable_range());
    store.mutable_items(0)->set_source(staged ? v1::DATA_SOURCE_SHARED : v1::DATA_SOURCE_INLINE);
    if (!staged) store.mutable_items(0)->mutable_rows()->resize(bytes);
    std::byte* const target =
        staged ? staging : reinterpret_cast<std::byte*>(store.mutable_items(0)->mutable_rows()->data());
    for (int32_t row = 0; row < rows * shape_.layers; ++row) {
      FillRow(RowSeed(0, ++round_ % 1000, row), target + int64_t{row} * shape_.row_bytes, shape_.row_bytes);
    }
    const std::string expected(reinterpret_cast<const char*>(target), bytes);
    v1::StoreResponse stored;
    {
      const Stopwatch watch;
      if (absl::Status status = session.Store(store, &stored); !status.ok()) return status;
      (staged ? times->store_staged : times->store_inline).Add(watch.us());
    }
    if (stored.stored_bytes() != bytes) return absl::InternalError("store: not all bytes were stored");
    if (staged) {
      std::fill_n(staging, bytes, std::byte{0});
      v1::LoadRequest load;
      set_range(load.add_items()->mutable_range());
      load.mutable_items(0)->set_target(v1::LOAD_TARGET_STAGING);
      v1::LoadResponse loaded;
      const Stopwatch watch;
      if (absl::Status status = session.Load(load, &loaded); !status.ok()) return status;
      times->load_staged.Add(watch.us());
      if (expected.compare(0, bytes, reinterpret_cast<const char*>(staging), bytes) != 0) {
        return absl::InternalError("load: wrong bytes");
      }
    } else {
      v1::ReadRequest read;
      read.set_sequence_id(id);
      for (int32_t row = 0; row < rows; ++row) read.mutable_positions()->add_values(static_cast<uint32_t>(row));
      v1::ReadResponse got;
      const Stopwatch watch;
      if (absl::Status status = session.Read(read, &got); !status.ok()) return status;
      times->read_inline.Add(watch.us());
      if (got.rows() != expected) return absl::InternalError("read: wrong bytes");
    }
    v1::ReleaseRequest release;
    release.add_sequence_ids(id);
    v1::ReleaseResponse released;
    return session.Release(release, &released);
  }

 private:
  const SessionShape shape_;
  const int64_t bytes_;
  int32_t round_ = 0;
  std::unique_ptr<RemoteSession> remote_;
};

}  // namespace

absl::Status BenchBulk(const BenchContext& context) {
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(context);
  if (!daemon.ok()) return daemon.status();
  SessionShape shape;
  shape.layers = 4;
  shape.sequence_rows = context.quick ? 64 : 8192;
  shape.top_k = 64;
  shape.hot_rows = 128;
  BulkBench bench(shape);
  if (absl::Status status = bench.Open(**daemon); !status.ok()) return status;
  for (const int32_t rows : {64, 1024, 8192}) {
    if (rows > shape.sequence_rows) break;
    Times times;
    const int rounds = context.Rounds(rows > 1024 ? 20 : 100);
    for (int i = 0; i < rounds; ++i) {
      for (const bool staged : {false, true}) {
        if (absl::Status status = bench.Run(rows, staged, &times); !status.ok()) return status;
      }
    }
    const double bytes = static_cast<double>(rows) * shape.row_bytes * shape.layers;
    const auto write = [&](const char* name, const char* source, const Samples& samples) {
      context.report->Write(Line(name)
                                .Text("source", source)
                                .Int("rows", rows)
                                .Int("layers", shape.layers)
                                .Int("row_bytes", shape.row_bytes)
                                .Times(samples)
                                .Real("gbps", bytes / samples.p50() / 1000));
    };
    write("store", "inline", times.store_inline);
    write("store", "staged", times.store_staged);
    write("load", "staged", times.load_staged);
    write("read", "inline", times.read_inline);
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
