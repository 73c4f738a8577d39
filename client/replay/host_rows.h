// RowDevice of an arena that is mapped as host memory: everything happens at once, where it lies.
//
// Thread safety: belongs to one thread.
#pragma once

#include <memory>
#include <vector>

#include "client/replay/row_device.h"

namespace stoker::replay {

class HostRows final : public RowDevice {
 public:
  // INTERNAL: the arena is not as the spec says.
  static absl::StatusOr<std::unique_ptr<RowDevice>> Make(const RowDeviceSpec& spec,
                                                         std::shared_ptr<const client::Arena> arena);

  uint32_t staging_pieces() const override { return 1; }  // what one fills stays in the last-level cache
  absl::Status Open(const OpenSequence&) override { return absl::OkStatus(); }
  absl::Status FillStaging(const OpenSequence& sequence, uint32_t first, uint32_t count,
                           uint64_t offset_bytes) override;
  absl::Status AwaitStaging() override { return absl::OkStatus(); }
  void WriteNewest(const BatchRow& row) override;
  absl::Span<int32_t> Entries(uint32_t group, size_t row) override {
    if (!spec_.by_pool_row) return Names(group, row);
    return absl::MakeSpan(positions_).subspan((group * size_t{spec_.batch_rows} + row) * spec_.top_k, spec_.top_k);
  }
  absl::Span<int32_t> Names(uint32_t group, size_t row) override { return indices_[group][row].first(spec_.top_k); }
  absl::Status Publish(size_t) override { return absl::OkStatus(); }
  absl::StatusOr<RowCheck> Check(absl::Span<const BatchRow> batch) override;
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const override {
    return hot_rows_[group][row].first(spec_.top_k);
  }

 private:
  HostRows(const RowDeviceSpec& spec, std::shared_ptr<const client::Arena> arena)
      : spec_(spec), oracle_(spec.shape), arena_(std::move(arena)) {}
  bool RowIsRight(uint32_t layer, uint64_t key, uint32_t hot_row) const;
  void CheckRow(const BatchRow& row, size_t batch_row, uint32_t group, RowCheck* check);

  const RowDeviceSpec spec_;
  const RowOracle oracle_;
  const std::shared_ptr<const client::Arena> arena_;
  std::vector<int32_t> positions_;                           // by_pool_row: [group][batch row][top_k]
  std::vector<client::MatrixView<int32_t>> indices_;         // of each group
  std::vector<client::MatrixView<const int32_t>> hot_rows_;  // likewise
  std::vector<client::HotPartView> hot_parts_;               // [layer][part]
  absl::Span<std::byte> staging_;
};

// The hot cache's views, [layer][part]. INTERNAL: a part's rows have other sizes than the spec says.
absl::StatusOr<std::vector<client::HotPartView>> HotParts(const RowDeviceSpec& spec, const client::Arena& arena);

}  // namespace stoker::replay
