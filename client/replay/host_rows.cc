#include "client/replay/host_rows.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::replay {

absl::StatusOr<std::vector<client::HotPartView>> HotParts(const RowDeviceSpec& spec, const client::Arena& arena) {
  std::vector<client::HotPartView> parts;
  for (uint32_t layer = 0; layer < spec.layers(); ++layer) {
    for (int part = 0; part < spec.shape.parts(); ++part) {
      auto view = arena.HotPart(layer, static_cast<client::RowPart>(part));
      if (!view.ok()) return view.status();
      if (view->row_bytes() != spec.shape.part_bytes[part]) {
        return absl::InternalError(absl::StrCat("layer ", layer, " part ", part, " has ", view->row_bytes(),
                                                " bytes a row; ", spec.shape.part_bytes[part], " were asked for"));
      }
      parts.push_back(*view);
    }
  }
  return parts;
}

absl::StatusOr<std::unique_ptr<RowDevice>> HostRows::Make(const RowDeviceSpec& spec,
                                                          std::shared_ptr<const client::Arena> arena) {
  auto rows = std::unique_ptr<HostRows>(new HostRows(spec, std::move(arena)));
  auto parts = HotParts(spec, *rows->arena_);
  if (!parts.ok()) return parts.status();
  rows->hot_parts_ = *std::move(parts);
  for (uint32_t group = 0; group < spec.groups(); ++group) {
    auto indices = rows->arena_->Indices(group);
    if (!indices.ok()) return indices.status();
    auto hot_rows = rows->arena_->HotRows(group);
    if (!hot_rows.ok()) return hot_rows.status();
    rows->indices_.push_back(*indices);
    rows->hot_rows_.push_back(*hot_rows);
  }
  if (spec.by_pool_row) rows->positions_.resize(size_t{spec.groups()} * spec.batch_rows * spec.top_k);
  auto staging = rows->arena_->Staging();
  if (!staging.ok()) return staging.status();
  rows->staging_ = *staging;
  return rows;
}

absl::Status HostRows::FillStaging(const OpenSequence& sequence, uint32_t first, uint32_t count,
                                   uint64_t offset_bytes) {
  std::byte* out = staging_.data() + offset_bytes;
  for (uint32_t layer = 0; layer < spec_.layers(); ++layer) {
    out = FillRequestRows(oracle_, *sequence.request, layer, first, count, out);
  }
  return absl::OkStatus();
}

void HostRows::WriteNewest(const BatchRow& row) {
  const TokenIdentity token = row.sequence->request->Token(row.length - 1);
  const size_t hot_row = arena_->RegionBegin(row.sequence->state_row) + arena_->newest_row() + row.newest_index;
  const int parts = spec_.shape.parts();
  for (uint32_t layer = 0; layer < spec_.layers(); ++layer) {
    const uint64_t key = RowOracle::Key(layer, token);
    for (int part = 0; part < parts; ++part) {
      oracle_.FillPart(key, part, hot_parts_[layer * static_cast<size_t>(parts) + part][hot_row].data());
    }
  }
}

bool HostRows::RowIsRight(uint32_t layer, uint64_t key, uint32_t hot_row) const {
  const int parts = spec_.shape.parts();
  const client::HotPartView* views = &hot_parts_[layer * static_cast<size_t>(parts)];
  return oracle_.CheckPart(key, 0, views[0][hot_row].data()) &&
         (parts == 1 || oracle_.CheckPart(key, 1, views[1][hot_row].data()));
}

void HostRows::CheckRow(const BatchRow& row, size_t batch_row, uint32_t group, RowCheck* check) {
  HotRegion region;
  if (row.sequence != nullptr) {
    region = {static_cast<int64_t>(arena_->RegionBegin(row.sequence->state_row)), spec_.hot_rows,
              static_cast<uint32_t>(arena_->newest_row())};
  }
  const uint32_t first_layer = spec_.group_begin[group], end_layer = spec_.group_begin[group + 1];
  const absl::Span<const int32_t> positions = Entries(group, batch_row);
  const absl::Span<const int32_t> hot_rows = HotRows(group, batch_row);
  const auto wrong = [&](size_t entry, uint32_t layer, bool possible) {
    ++check->wrong;
    if (!check->first_wrong.empty()) return;
    std::vector<std::byte> bytes;
    for (int part = 0; possible && part < spec_.shape.parts(); ++part) {
      const auto found =
          hot_parts_[layer * static_cast<size_t>(spec_.shape.parts()) + part][static_cast<size_t>(hot_rows[entry])];
      bytes.insert(bytes.end(), found.begin(), found.end());
    }
    check->first_wrong =
        DescribeWrongRow(oracle_, row, batch_row, entry, layer, positions[entry], hot_rows[entry], bytes);
  };
  for (size_t i = 0; i < positions.size(); ++i) {
    const int32_t position = positions[i], hot_row = hot_rows[i];
    // An answer that cannot be right is as bad as wrong bytes: a row for no entry, none for an entry, or one of others.
    if (!region.CanAnswer(position, row.length, row.newest_index, hot_row)) {
      wrong(i, first_layer, false);
      continue;
    }
    if (hot_row < 0) continue;
    check->on_host += end_layer - first_layer;
    const TokenIdentity token = row.sequence->request->Token(static_cast<uint32_t>(position));
    for (uint32_t layer = first_layer; layer < end_layer; ++layer) {
      if (!RowIsRight(layer, RowOracle::Key(layer, token), static_cast<uint32_t>(hot_row))) [[unlikely]] {
        wrong(i, layer, true);
      }
    }
  }
}

absl::StatusOr<RowCheck> HostRows::Check(absl::Span<const BatchRow> batch) {
  RowCheck check;
  for (uint32_t group = 0; group < spec_.groups(); ++group) {
    for (size_t row = 0; row < batch.size(); ++row) CheckRow(batch[row], row, group, &check);
  }
  return check;
}

}  // namespace stoker::replay
