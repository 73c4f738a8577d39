#include "tests/kernels/resolve_gather_case.h"

#include <algorithm>
#include <utility>

#include "kernels/plane.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {

ResolveGatherCase::ResolveGatherCase(const ResolveShape& shape, const RowFormat& format, std::vector<int32_t> layers,
                                     int64_t pool_rows, std::mt19937_64& rng)
    : resolve_(shape),
      layers_(std::move(layers)),
      from_(pool_, "pool", RowLayout::Make(format, pool_rows).value(),
            *std::max_element(layers_.begin(), layers_.end()) + 1, 0, rng),
      to_(resolve_.image(), "hot", RowLayout::Make(format, int64_t{shape.state_rows} * shape.region_rows()).value(),
          from_.layers, 0, rng),
      gathered_bytes_(resolve_.image().Add("gathered_bytes", std::vector<uint64_t>{77})),
      plane_(resolve_.image().Add("plane", std::vector<uint64_t>(sizeof(PlaneState) / sizeof(uint64_t)))),
      done_(resolve_.image().Add("done", std::vector<uint64_t>{0})) {}

GatherCompactArgs ResolveGatherCase::GatherArgs(std::byte* device, std::byte* pool) const {
  const ResolveArgs resolve = resolve_.Args(device);
  return {.pool = from_.In(pool),
          .hot = to_.In(device),
          .pool_rows = from_.layout.rows,
          .hot_rows = to_.layout.rows,
          .layers = layers_.data(),
          .layer_count = static_cast<int32_t>(layers_.size()),
          .miss_pool_rows = resolve.miss_pool_rows,
          .miss_hot_rows = resolve.miss_hot_rows,
          .miss_counts = resolve.miss_counts,
          .rows = resolve.rows,
          .top_k = resolve.top_k,
          .gathered_bytes = gathered_bytes_.In(device),
          .limits = limits_};
}

testing::AssertionResult ResolveGatherCase::Step(Bench& bench) {
  Image& image = resolve_.image();
  resolve_.PoisonOutputs();
  Image want = image;
  const ResolveArgs want_resolve = resolve_.Args(want.data());
  const GatherCompactArgs want_gather = GatherArgs(want.data(), pool_.data());
  if (const absl::Status status = Validate(want_resolve, want_gather); !status.ok()) {
    return testing::AssertionFailure() << status;
  }
  reference::Resolve(want_resolve);
  reference::Gather(want_gather);
  const bool rings = ++steps_ % 2 == 0;
  const auto state = [&](std::byte* device) { return reinterpret_cast<PlaneState*>(plane_.In(device)); };
  state(image.data())->step = state(want.data())->step = steps_;
  if (rings) *done_.In(want.data()) = steps_;
  const absl::Status status = bench.Run(image, pool_, [&](Stream& stream, std::byte* device, std::byte* pool) {
    const ResolveArgs resolve = resolve_.Args(device);
    const GatherCompactArgs gather = GatherArgs(device, pool);
    if (!rings) return stream.ResolveGather(resolve, gather);
    return stream.ResolveGather(resolve, gather, {.state = state(device), .done = done_.In(device)});
  });
  if (!status.ok()) return testing::AssertionFailure() << status;
  return image.Equals(want);
}

}  // namespace stoker::kernels
