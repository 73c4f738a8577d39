// Resolve and gather on the CPU, called directly.
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/bench/benches.h"
#include "tests/bench/entry_stream.h"
#include "tests/bench/local_session.h"

namespace stoker::bench {
namespace {

constexpr int kMissPercents[] = {0, 2, 7, 14, 30, 100};

absl::Status BenchResolveCase(const BenchContext& context, int32_t top_k, int miss_percent) {
  SessionShape shape;
  shape.state_rows = 8;
  shape.top_k = top_k;
  shape.hot_rows = 2 * top_k;
  shape.sequence_rows = 4 * top_k;
  shape.row_bytes = 4;
  LocalSession session(shape, /*fill=*/false);
  const int32_t misses = top_k * miss_percent / 100;
  std::vector<EntryStream> streams;
  for (int32_t row = 0; row < shape.state_rows; ++row) {
    streams.emplace_back(shape.sequence_rows, top_k, misses, static_cast<uint64_t>(row) + 1);
  }
  Samples samples;
  constexpr int kWarmUp = 4;
  for (int step = 0; step < kWarmUp + (context.quick ? 4 : 2000); ++step) {
    for (int32_t row = 0; row < shape.state_rows; ++row) {
      const std::vector<int32_t>& entries = streams[static_cast<size_t>(row)].Next();
      std::copy(entries.begin(), entries.end(), session.entries(0).begin() + int64_t{row} * top_k);
    }
    const Stopwatch watch;
    session.Resolve(0);
    const double us = watch.us();
    if (step < kWarmUp) continue;
    samples.Add(us / shape.state_rows);
    for (const int32_t count : session.miss_counts(0)) {
      if (count != misses) return absl::InternalError(absl::StrCat("resolve: ", count, " misses, not ", misses));
    }
  }
  context.report->Write(Line("resolve")
                            .Int("rows", shape.state_rows)
                            .Int("top_k", top_k)
                            .Int("hot_rows", shape.hot_rows)
                            .Int("miss_percent", miss_percent)
                            .Text("unit", "us per row")
                            .Times(samples)
                            .Real("ns_per_entry", samples.p50() * 1000 / top_k));
  return absl::OkStatus();
}

// Gathers of random rows, and memcpy of the same ones: plans from a source that is larger than the last-level cache, in
// turn, so that no contender finds its rows in a cache because another one has just read them.
class GatherBench {
 public:
  GatherBench(int32_t row_bytes, bool quick) : row_bytes_(row_bytes) {
    const int64_t pool_bytes = quick ? 8 << 20 : 512 << 20;
    pool_bytes_.resize(static_cast<size_t>(pool_bytes));
    pool_rows_ = pool_bytes / row_bytes;
    plan_rows_ = std::min<int64_t>(kMaxPlanRows, pool_rows_ / 4);
    hot_bytes_.resize(static_cast<size_t>(plan_rows_ * row_bytes));
    for (size_t i = 0; i < pool_bytes_.size(); i += 4) {
      const uint32_t word = static_cast<uint32_t>(i * 2654435761u);
      std::memcpy(pool_bytes_.data() + i, &word, std::min<size_t>(4, pool_bytes_.size() - i));
    }
    std::mt19937_64 random(7);
    plans_.resize(quick ? 2 : kPlans);
    for (Plan& plan : plans_) {
      for (int64_t i = 0; i < plan_rows_; ++i) {
        plan.pool_rows.push_back(
            static_cast<int32_t>(std::uniform_int_distribution<int64_t>(0, pool_rows_ - 1)(random)));
        plan.hot_rows.push_back(static_cast<int32_t>(i));
      }
      std::shuffle(plan.hot_rows.begin(), plan.hot_rows.end(), random);
    }
  }

  int64_t plan_bytes() const { return plan_rows_ * row_bytes_; }
  int64_t plan_rows() const { return plan_rows_; }

  double Gather() {
    const Plan& plan = plans_[turn_[0]++ % plans_.size()];
    const int32_t layer = 0;
    const auto count = static_cast<int32_t>(plan_rows_);
    kernels::GatherCompactArgs args;
    args.pool = Store(pool_bytes_, pool_rows_);
    args.hot = Store(hot_bytes_, plan_rows_);
    args.pool_rows = pool_rows_;
    args.hot_rows = plan_rows_;
    args.layers = &layer;
    args.layer_count = 1;
    args.miss_pool_rows = plan.pool_rows.data();
    args.miss_hot_rows = plan.hot_rows.data();
    args.miss_counts = &count;
    args.rows = 1;
    args.top_k = count;
    const Stopwatch watch;
    kernels::cpu::Gather(args);
    return watch.us();
  }

  double CopyRows() {
    const Plan& plan = plans_[turn_[1]++ % plans_.size()];
    const Stopwatch watch;
    for (int64_t i = 0; i < plan_rows_; ++i) {
      std::memcpy(hot_bytes_.data() + int64_t{plan.hot_rows[i]} * row_bytes_,
                  pool_bytes_.data() + int64_t{plan.pool_rows[i]} * row_bytes_, static_cast<size_t>(row_bytes_));
    }
    return watch.us();
  }

  // As many bytes from one place.
  double CopyOnce() {
    const int64_t places = static_cast<int64_t>(pool_bytes_.size()) / plan_bytes();
    const int64_t place = turn_[2]++ * 7 % places;
    const Stopwatch watch;
    std::memcpy(hot_bytes_.data(), pool_bytes_.data() + place * plan_bytes(), static_cast<size_t>(plan_bytes()));
    return watch.us();
  }

  // Whether the last Gather brought every row.
  bool Check() const {
    const Plan& plan = plans_[(turn_[0] - 1) % plans_.size()];
    for (int64_t i = 0; i < plan_rows_; ++i) {
      if (std::memcmp(hot_bytes_.data() + int64_t{plan.hot_rows[i]} * row_bytes_,
                      pool_bytes_.data() + int64_t{plan.pool_rows[i]} * row_bytes_,
                      static_cast<size_t>(row_bytes_)) != 0) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kMaxPlanRows = 2048;
  static constexpr size_t kPlans = 128;
  struct Plan {
    std::vector<int32_t> pool_rows, hot_rows;
  };

  kernels::RowStore Store(std::vector<std::byte>& bytes, int64_t rows) const {
    kernels::RowStore store;
    store.base = bytes.data();
    store.layers = 1;
    store.layout = *kernels::RowLayout::Make({.kind = kernels::RowLayoutKind::kLinear, .row_bytes = row_bytes_}, rows);
    store.layer_stride = store.layout.layer_bytes;
    return store;
  }

  const int32_t row_bytes_;
  int64_t pool_rows_ = 0;
  int64_t plan_rows_ = 0;
  std::vector<std::byte> pool_bytes_, hot_bytes_;
  std::vector<Plan> plans_;
  size_t turn_[3] = {0, 43, 86};
};

}  // namespace

absl::Status BenchResolve(const BenchContext& context) {
  for (const int32_t top_k : {64, 512, 2048}) {
    for (const int miss_percent : kMissPercents) {
      if (absl::Status status = BenchResolveCase(context, top_k, miss_percent); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status BenchGather(const BenchContext& context) {
  // At least half of what memcpy reaches on the same rows.
  constexpr double kTarget = 0.5;
  for (const int32_t row_bytes : {16, 576, 656, 1152}) {
    GatherBench bench(row_bytes, context.quick);
    bench.Gather();
    if (!bench.Check()) return absl::InternalError(absl::StrCat("gather: wrong rows of ", row_bytes, " bytes"));
    std::vector<Contender> contenders;
    contenders.push_back({[&] { return bench.Gather(); }, {}});
    contenders.push_back({[&] { return bench.CopyRows(); }, {}});
    contenders.push_back({[&] { return bench.CopyOnce(); }, {}});
    TakeTurns(context.Rounds(1000), 1, contenders);
    const auto rate = [&](const Samples& samples) {
      return static_cast<double>(bench.plan_bytes()) / samples.p50() / 1000;
    };
    context.report->WriteAtLeast(Line("gather")
                                     .Int("row_bytes", row_bytes)
                                     .Int("rows", bench.plan_rows())
                                     .Times(contenders[0].samples)
                                     .Real("gather_gbps", rate(contenders[0].samples))
                                     .Real("memcpy_rows_gbps", rate(contenders[1].samples))
                                     .Real("memcpy_once_gbps", rate(contenders[2].samples)),
                                 "ratio", contenders[1].samples.p50() / contenders[0].samples.p50(), kTarget);
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
