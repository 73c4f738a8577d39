#include "tests/system/rank.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"

namespace stoker::system_test {

using client::RowPart;

v1::PoolSpec LinearPool(const std::string& name, uint32_t layers, uint32_t row_bytes, uint32_t blocks) {
  v1::PoolSpec pool;
  pool.set_name(name);
  pool.set_layers(layers);
  pool.set_row_layout(v1::ROW_LAYOUT_LINEAR);
  pool.set_row_bytes(row_bytes);
  pool.set_block_rows(16);
  pool.set_blocks(blocks);
  return pool;
}

v1::PoolSpec SplitPool(const std::string& name, uint32_t layers, uint32_t k_bytes, uint32_t v_bytes, uint32_t blocks) {
  v1::PoolSpec pool = LinearPool(name, layers, k_bytes, blocks);
  pool.set_row_layout(v1::ROW_LAYOUT_SPLIT_KV);
  pool.set_v_row_bytes(v_bytes);
  return pool;
}

v1::PoolSpec PagedPool(const std::string& name, uint32_t layers, uint32_t blocks) {
  v1::PoolSpec pool = LinearPool(name, layers, 584, blocks);
  pool.set_row_layout(v1::ROW_LAYOUT_DSV4_PAGED);
  pool.set_block_rows(64);
  return pool;
}

v1::AttachRequest AttachTo(const v1::PoolSpec& pool, const std::string& name, uint32_t state_rows, uint32_t hot_rows,
                           uint32_t max_top_k, uint32_t max_sequence_rows) {
  v1::AttachRequest request;
  request.set_pool(pool.name());
  request.set_name(name);
  request.set_state_rows(state_rows);
  request.set_hot_rows(hot_rows);
  request.set_max_top_k(max_top_k);
  request.set_max_sequence_rows(max_sequence_rows);
  request.set_index_space(v1::INDEX_SPACE_POSITION);
  request.set_staging_bytes(1 << 20);
  v1::IndexGroup* group = request.add_groups();
  for (uint32_t layer = 0; layer < pool.layers(); ++layer) group->add_layers(layer);
  return request;
}

client::SessionOptions WithoutReattach() {
  client::SessionOptions options;
  options.reattach_timeout = absl::ZeroDuration();
  return options;
}

uint64_t StepOutcome::Sum(uint32_t (v1::LookupCounts::*count)() const) const {
  uint64_t sum = 0;
  for (const v1::StepGroupResult& group : response.groups()) {
    for (const v1::LookupCounts& counts : group.counts()) sum += (counts.*count)();
  }
  return sum;
}

Rank::Rank(const client::Client& client, const v1::PoolSpec& pool, const v1::AttachRequest& request,
           client::SessionOptions options)
    : pool_(pool), request_(request) {
  // The rank takes the engine's part, on whatever device.
  if (options.arena_mapping == client::ArenaMapping::kWherePossible && absl::StartsWith(client.address(), "unix:")) {
    options.arena_mapping = client::ArenaMapping::kDevice;
  }
  auto session = client.Attach(request, std::move(options));
  if (!session.ok()) {
    std::fprintf(stderr, "Attach: %s\n", session.status().ToString().c_str());
    std::abort();
  }
  session_ = *std::move(session);
}

v1::AdmitItem Rank::Item(const Tokens& tokens, uint32_t max_rows, const std::string& key, bool hashes) const {
  v1::AdmitItem item;
  item.set_sequence_key(key);
  item.set_prompt_rows(static_cast<uint32_t>(tokens.size()));
  item.set_max_rows(max_rows);
  if (hashes) item.set_block_hashes(HashesOf(pool_, tokens));
  return item;
}

v1::AdmittedSequence Rank::Admit(const v1::AdmitItem& item, const client::CallOptions& options) {
  v1::AdmitRequest request;
  *request.add_items() = item;
  v1::AdmitResponse response;
  const absl::Status status = session_->Admit(request, &response, options);
  v1::AdmittedSequence sequence;
  if (!status.ok()) {
    sequence.mutable_status()->set_code(static_cast<int>(status.code()));
    sequence.mutable_status()->set_message(std::string(status.message()));
    return sequence;
  }
  EXPECT_EQ(response.sequences_size(), 1);
  return response.sequences(0);
}

Sequence Rank::Open(const Tokens& tokens, uint32_t max_rows, const std::string& key) {
  const v1::AdmittedSequence admitted = Admit(Item(tokens, max_rows, key));
  EXPECT_EQ(admitted.status().code(), 0) << admitted.status().message();
  Sequence sequence{admitted.sequence_id(), admitted.state_row(), tokens};
  const uint32_t stored = admitted.stored_rows();
  if (admitted.writer() && stored < tokens.size()) {
    const absl::Status status = Store(sequence, stored, static_cast<uint32_t>(tokens.size()) - stored);
    EXPECT_TRUE(status.ok()) << status;
  }
  return sequence;
}

absl::Status Rank::Store(const Sequence& sequence, uint32_t first, uint32_t count, v1::DataSource source) {
  const std::string rows = RowsOf(pool_, absl::MakeConstSpan(sequence.tokens).subspan(first, count));
  v1::StoreRequest request;
  v1::StoreItem* item = request.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_first_row(first);
  item->mutable_range()->set_row_count(count);
  item->set_source(source);
  if (source == v1::DATA_SOURCE_SHARED) {
    const auto staging = session_->arena()->Staging();
    if (!staging.ok()) return staging.status();
    const absl::Status copied =
        session_->arena()->CopyIn(reinterpret_cast<const std::byte*>(rows.data()), staging->subspan(32, rows.size()));
    if (!copied.ok()) return copied;
    item->set_staging_offset_bytes(32);
  } else {
    item->set_rows(rows);
  }
  v1::StoreResponse response;
  if (absl::Status status = session_->Store(request, &response); !status.ok()) return status;
  if (absl::Status status = client::FirstError(response.statuses()); !status.ok()) return status;
  EXPECT_EQ(response.stored_bytes(), rows.size());
  return absl::OkStatus();
}

std::vector<int32_t> Rank::PoolRows(const Sequence& sequence, absl::Span<const int32_t> positions) {
  v1::GetBlockTablesRequest request;
  request.add_sequence_ids(sequence.id);
  v1::GetBlockTablesResponse response;
  if (!session_->GetBlockTables(request, &response).ok() || response.tables(0).status().code() != 0) return {};
  const auto block_rows = static_cast<int32_t>(pool_.block_rows());
  std::vector<int32_t> rows;
  for (const int32_t position : positions) {
    rows.push_back(static_cast<int32_t>(response.tables(0).blocks(position / block_rows)) * block_rows +
                   position % block_rows);
  }
  return rows;
}

absl::Status Rank::Close(const Sequence& sequence) {
  v1::ReleaseRequest request;
  request.add_sequence_ids(sequence.id);
  v1::ReleaseResponse response;
  if (absl::Status status = session_->Release(request, &response); !status.ok()) return status;
  return client::FirstError(response.statuses());
}

void Rank::WriteNewest(const Sequence& sequence, uint32_t position, uint32_t index) {
  const auto arena = session_->arena();
  const uint32_t hot_row = static_cast<uint32_t>(arena->RegionBegin(sequence.state_row) + arena->newest_row()) + index;
  for (uint32_t layer = 0; layer < pool_.layers(); ++layer) {
    const std::string row = RowOf(pool_, layer, sequence.tokens[position]);
    size_t done = 0;
    for (const RowPart part : {RowPart::kRow, RowPart::kV}) {
      if (done == row.size()) break;
      const auto bytes = arena->HotRow(layer, part, hot_row);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      const absl::Status copied = arena->CopyIn(reinterpret_cast<const std::byte*>(row.data() + done), *bytes);
      ASSERT_TRUE(copied.ok()) << copied;
      done += bytes->size();
    }
  }
}

v1::StepRequest Rank::StepRequestOf(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries,
                                    uint32_t top_k, v1::DataSource source) const {
  v1::StepRequest request;
  request.set_top_k(top_k);
  request.set_source(source);
  for (const BatchRow& row : batch) {
    v1::StepRow* r = request.add_rows();
    r->set_length(row.length);
    if (row.sequence == nullptr) continue;
    r->set_sequence_id(row.sequence->id);
    r->set_commit(row.commit);
    if (row.inline_newest) r->set_newest_row(NewestRowOf(pool_, row.sequence->tokens[row.length - 1]));
    r->mutable_resident_pages()->Add(row.resident_pages.begin(), row.resident_pages.end());
  }
  for (size_t g = 0; g < entries.size(); ++g) {
    v1::StepGroup* group = request.add_groups();
    group->set_group(static_cast<uint32_t>(g));
    if (source == v1::DATA_SOURCE_INLINE) group->mutable_indices()->Add(entries[g].begin(), entries[g].end());
  }
  return request;
}

StepOutcome Rank::Step(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries,
                       uint32_t top_k, v1::DataSource source) {
  StepOutcome outcome;
  const auto arena = session_->arena();
  if (source == v1::DATA_SOURCE_SHARED) {
    for (size_t g = 0; g < entries.size(); ++g) {
      const auto indices = arena->Indices(static_cast<uint32_t>(g));
      if (outcome.status = indices.status(); !outcome.status.ok()) return outcome;
      for (size_t row = 0; row < batch.size(); ++row) {
        outcome.status = arena->CopyIn(entries[g].data() + row * top_k, (*indices)[row].subspan(0, top_k));
        if (!outcome.status.ok()) return outcome;
      }
    }
  }
  outcome.status = session_->Step(StepRequestOf(batch, entries, top_k, source), &outcome.response);
  if (!outcome.status.ok()) return outcome;
  for (size_t g = 0; g < entries.size(); ++g) {
    std::vector<int32_t> hot_rows;
    if (source == v1::DATA_SOURCE_INLINE) {
      const auto& values = outcome.response.groups(static_cast<int>(g)).hot_rows();
      hot_rows.assign(values.begin(), values.end());
    } else {
      const auto mailbox = arena->HotRows(static_cast<uint32_t>(g));
      for (size_t row = 0; row < batch.size(); ++row) {
        hot_rows.resize((row + 1) * top_k);
        outcome.status = arena->CopyOut((*mailbox)[row].subspan(0, top_k), hot_rows.data() + row * top_k);
        if (!outcome.status.ok()) return outcome;
      }
    }
    outcome.hot_rows.push_back(std::move(hot_rows));
  }
  return outcome;
}

void Rank::CheckRows(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries, uint32_t top_k,
                     const StepOutcome& outcome) {
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_EQ(outcome.hot_rows.size(), entries.size());
  const uint32_t block_rows = session_->info().pool().block_rows();
  for (size_t g = 0; g < entries.size(); ++g) {
    ASSERT_EQ(outcome.hot_rows[g].size(), batch.size() * top_k);
    for (size_t row = 0; row < batch.size(); ++row) {
      const Sequence* sequence = batch[row].sequence;
      const bool failed = outcome.response.statuses(static_cast<int>(row)).code() != 0;
      int64_t counted = 0;
      for (size_t e = row * top_k; e < (row + 1) * top_k; ++e) {
        const int32_t position = entries[g][e];
        const int32_t hot_row = outcome.hot_rows[g][e];
        counted += position >= 0;
        if (sequence == nullptr || failed || position < 0 || position >= static_cast<int32_t>(batch[row].length)) {
          ASSERT_EQ(hot_row, -1) << "row " << row << " entry " << e << " position " << position;
          continue;
        }
        ASSERT_GE(hot_row, 0) << "row " << row << " position " << position;
        const size_t page = static_cast<size_t>(position) / block_rows;
        if (page < batch[row].resident_pages.size() && batch[row].resident_pages[page] >= 0) continue;
        for (uint32_t layer : request_.groups(static_cast<int>(g)).layers()) {
          ASSERT_EQ(ArenaRow(layer, static_cast<uint32_t>(hot_row)),
                    RowOf(pool_, layer, sequence->tokens[static_cast<size_t>(position)]))
              << "layer " << layer << " row " << row << " position " << position << " hot row " << hot_row;
        }
      }
      const v1::LookupCounts& counts = outcome.response.groups(static_cast<int>(g)).counts(static_cast<int>(row));
      const int64_t sum = int64_t{counts.hot()} + counts.newest() + counts.resident() + counts.miss() +
                          counts.duplicate() + counts.invalid();
      ASSERT_EQ(sum, sequence == nullptr || failed ? 0 : counted) << counts.ShortDebugString();
    }
  }
}

std::string Rank::ArenaRow(uint32_t layer, uint32_t hot_row) const {
  const auto arena = session_->arena();
  std::string row;
  for (const RowPart part : {RowPart::kRow, RowPart::kV}) {
    if (row.size() == RowBytes(pool_)) break;
    const auto bytes = arena->HotRow(layer, part, hot_row);
    if (!bytes.ok()) return bytes.status().ToString();
    std::string part_bytes(bytes->size(), '\0');
    const absl::Status copied = arena->CopyOut(*bytes, reinterpret_cast<std::byte*>(part_bytes.data()));
    if (!copied.ok()) return copied.ToString();
    row += part_bytes;
  }
  return row;
}

absl::Status Rank::ReadStored(const Sequence& sequence, std::vector<uint32_t> positions, std::string* rows) {
  v1::ReadRequest request;
  request.set_sequence_id(sequence.id);
  request.mutable_positions()->mutable_values()->Add(positions.begin(), positions.end());
  v1::ReadResponse response;
  const absl::Status status = session_->Read(request, &response);
  *rows = std::move(*response.mutable_rows());
  return status;
}

void Rank::CheckStored(const Sequence& sequence, uint32_t count) {
  std::vector<uint32_t> positions(count);
  std::iota(positions.begin(), positions.end(), 0u);
  std::string rows;
  const absl::Status status = ReadStored(sequence, positions, &rows);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(rows == RowsOf(pool_, absl::MakeConstSpan(sequence.tokens).subspan(0, count)))
      << "stored rows of sequence " << sequence.id << " are not its tokens'";
}

}  // namespace stoker::system_test
