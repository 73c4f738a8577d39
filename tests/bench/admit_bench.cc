// Admit with 2,048 block hashes: 128K tokens in blocks of 64. In the pool's bookkeeping alone, and against a daemon:
// seen by the client, and by the daemon itself.
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/core/pool.h"
#include "tests/bench/benches.h"
#include "tests/bench/daemon_fixture.h"

namespace stoker::bench {
namespace {

constexpr int64_t kHashes = 2048;
constexpr int64_t kBlockRows = 64;
constexpr int64_t kRows = kHashes * kBlockRows;
constexpr int64_t kRowBytes = 16;
constexpr size_t kHashBytes = 16;
// Two sequences: the one that is opened and as much again, so that new prefixes evict old ones where those were stored.
constexpr int64_t kBlocks = 2 * kHashes;

enum class Prefix {
  kNew,      // no hash is known, blocks are free
  kEvict,    // no hash is known, blocks are those of older prefixes
  kMatched,  // every hash is known and stored
};

const char* NameOf(Prefix prefix) {
  switch (prefix) {
    case Prefix::kNew:
      return "new";
    case Prefix::kEvict:
      return "new, evicting";
    case Prefix::kMatched:
      return "matched";
  }
  return "";
}

class HashSource {
 public:
  std::string Next() {
    std::string bytes(kHashes * kHashBytes, '\0');
    for (size_t i = 0; i < bytes.size(); i += 8) {
      const uint64_t word = random_();
      bytes.replace(i, 8, reinterpret_cast<const char*>(&word), 8);
    }
    return bytes;
  }

 private:
  std::mt19937_64 random_{11};
};

// The bookkeeping alone.
absl::StatusOr<Samples> RunPool(Prefix prefix, int calls) {
  core::PoolSpec spec;
  spec.name = "admit";
  spec.layers = 1;
  spec.row_layout = core::RowLayout::kLinear;
  spec.row_bytes = kRowBytes;
  spec.block_rows = kBlockRows;
  spec.blocks = kBlocks;
  if (absl::Status status = spec.Normalize(); !status.ok()) return status;
  core::Pool pool(spec, absl::ZeroDuration());
  const core::SessionId session{1};
  HashSource source;
  std::string hashes = source.Next();
  Samples samples;
  // The first two calls fill the pool.
  for (int call = -2; call < calls; ++call) {
    if (prefix != Prefix::kMatched) hashes = source.Next();
    core::AdmitParams params;
    params.prompt_rows = params.max_rows = kRows;
    for (size_t i = 0; i < hashes.size(); i += kHashBytes) {
      params.hashes.push_back(core::PrefixHash::FromBytes(hashes.data() + i));
    }
    const Stopwatch watch;
    const absl::StatusOr<core::Admission> admission = pool.Admit(session, {kRows, kBlocks}, std::move(params));
    const double us = watch.us();
    if (!admission.ok()) return admission.status();
    const bool matched = prefix == Prefix::kMatched && call > -2;
    if (admission->matched_rows != (matched ? kRows : 0)) {
      return absl::InternalError(absl::StrCat("admit: ", admission->matched_rows, " rows matched"));
    }
    if (call >= 0) samples.Add(us);
    if (prefix != Prefix::kNew && !matched) {
      if (const auto plan = pool.BeginWrite(session, admission->id, 0, kRows); !plan.ok()) return plan.status();
      pool.FinishWrite(admission->id, 0, kRows);
    }
    if (absl::Status status = pool.Close(session, admission->id, false, absl::InfinitePast()); !status.ok()) {
      return status;
    }
  }
  return samples;
}

class DaemonAdmit {
 public:
  explicit DaemonAdmit(Daemon& daemon) : daemon_(daemon) {}

  absl::Status Open() {
    v1::CreatePoolRequest pool;
    pool.mutable_spec()->set_name("admit");
    pool.mutable_spec()->set_layers(1);
    pool.mutable_spec()->set_row_layout(v1::ROW_LAYOUT_LINEAR);
    pool.mutable_spec()->set_row_bytes(kRowBytes);
    pool.mutable_spec()->set_blocks(kBlocks);
    if (const auto created = daemon_.client().CreatePool(pool); !created.ok()) return created.status();
    v1::AttachRequest attach;
    attach.set_pool("admit");
    attach.set_state_rows(2);
    attach.set_hot_rows(64);
    attach.set_max_top_k(64);
    attach.set_max_sequence_rows(kRows);
    attach.set_index_space(v1::INDEX_SPACE_POSITION);
    attach.add_groups()->add_layers(0);
    attach.set_staging_bytes(kRows * kRowBytes);
    absl::StatusOr<std::unique_ptr<client::Session>> session = daemon_.client().Attach(attach);
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    return absl::OkStatus();
  }

  absl::StatusOr<Samples> Run(Prefix prefix, int calls, double* server_us) {
    std::string hashes = source_.Next();
    Samples samples;
    for (int call = -2; call < calls; ++call) {
      if (prefix != Prefix::kMatched) hashes = source_.Next();
      if (call == 0) daemon_.MeanRpcUs("Sequences/Admit").IgnoreError();  // the calls until now do not count
      v1::AdmitRequest request;
      request.add_items()->set_prompt_rows(kRows);
      request.mutable_items(0)->set_max_rows(kRows);
      request.mutable_items(0)->set_block_hashes(hashes);
      v1::AdmitResponse response;
      const Stopwatch watch;
      if (absl::Status status = session_->Admit(request, &response); !status.ok()) return status;
      const double us = watch.us();
      const v1::AdmittedSequence& admitted = response.sequences(0);
      if (admitted.status().code() != 0) return absl::InternalError(admitted.status().message());
      const bool matched = prefix == Prefix::kMatched && call > -2;
      if (admitted.matched_rows() != (matched ? kRows : 0)) {
        return absl::InternalError(absl::StrCat("admit: ", admitted.matched_rows(), " rows matched"));
      }
      if (call >= 0) samples.Add(us);
      if (prefix != Prefix::kNew && !matched) {
        if (absl::Status status = Store(admitted.sequence_id()); !status.ok()) return status;
      }
      v1::ReleaseRequest release;
      release.add_sequence_ids(admitted.sequence_id());
      v1::ReleaseResponse released;
      if (absl::Status status = session_->Release(release, &released); !status.ok()) return status;
    }
    const absl::StatusOr<double> mean = daemon_.MeanRpcUs("Sequences/Admit");
    if (!mean.ok()) return mean.status();
    *server_us = *mean;
    return samples;
  }

 private:
  absl::Status Store(uint64_t sequence) {
    v1::StoreRequest request;
    v1::StoreItem* item = request.add_items();
    item->mutable_range()->set_sequence_id(sequence);
    item->mutable_range()->set_row_count(kRows);
    item->set_source(v1::DATA_SOURCE_SHARED);
    v1::StoreResponse response;
    if (absl::Status status = session_->Store(request, &response); !status.ok()) return status;
    return response.statuses(0).code() == 0 ? absl::OkStatus() : absl::InternalError(response.statuses(0).message());
  }

  Daemon& daemon_;
  HashSource source_;
  std::unique_ptr<client::Session> session_;
};

}  // namespace

absl::Status BenchAdmit(const BenchContext& context) {
  constexpr double kTargetUs = 1000;
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(context);
  if (!daemon.ok()) return daemon.status();
  DaemonAdmit admit(**daemon);
  if (absl::Status status = admit.Open(); !status.ok()) return status;
  const int calls = context.quick ? 2 : 200;
  for (const Prefix prefix : {Prefix::kNew, Prefix::kMatched, Prefix::kEvict}) {
    const absl::StatusOr<Samples> pool = RunPool(prefix, calls);
    if (!pool.ok()) return pool.status();
    double server_us = 0;
    const absl::StatusOr<Samples> client = admit.Run(prefix, calls, &server_us);
    if (!client.ok()) return client.status();
    context.report->WriteAtMost(Line("admit")
                                    .Int("hashes", kHashes)
                                    .Text("prefix", NameOf(prefix))
                                    .Times(*client)
                                    .Real("pool_p50_us", pool->p50())
                                    .Real("pool_p99_us", pool->p99()),
                                "server_mean_us", server_us, kTargetUs);
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
