#include "tests/gpu/gpu_engine.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "client/replay/cuda/gpu_rows.h"
#include "client/status.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {

using replay::OpenSequence;
using replay::Request;

namespace {

v1::AttachRequest AttachOf(const v1::PoolSpec& pool, const std::string& name, v1::Plane plane,
                           v1::ArenaSharing sharing) {
  v1::AttachRequest request = AttachTo(pool, name, kStateRows, kHotRows, kTopK, kMaxRows);
  request.set_plane(plane);
  request.set_arena_sharing(sharing);
  request.clear_groups();
  for (uint32_t group = 0; group < kGroups; ++group) {
    v1::IndexGroup* layers = request.add_groups();
    layers->add_layers(2 * group);
    layers->add_layers(2 * group + 1);
  }
  request.set_staging_bytes(uint64_t{8} << 20);
  return request;
}

client::SessionOptions OnDevice() {
  client::SessionOptions options = WithoutReattach();
  options.arena_mapping = client::ArenaMapping::kDevice;
  return options;
}

}  // namespace

Request Prompt(uint32_t number) {
  Request request;
  request.number = number;
  request.input_rows = kPrompt;
  request.output_rows = kMaxRows - kPrompt;
  return request;
}

GpuEngine::GpuEngine(const client::Client& client, const v1::PoolSpec& pool, const std::string& name, v1::Plane plane,
                     v1::ArenaSharing sharing)
    : rank_(client, pool, AttachOf(pool, name, plane, sharing), OnDevice()) {
  replay::RowDeviceSpec spec;
  spec.shape.part_bytes[0] = kRowBytes;
  spec.group_begin = {0, 2, kLayers};
  spec.top_k = kTopK;
  spec.hot_rows = kHotRows;
  spec.state_rows = kStateRows;
  spec.batch_rows = kStateRows;
  spec.max_sequence_rows = kMaxRows;
  spec.seed = 1;
  auto rows = replay::MakeGpuRows(spec, session().arena());
  EXPECT_TRUE(rows.ok()) << rows.status();
  if (rows.ok()) rows_ = *std::move(rows);
}

OpenSequence GpuEngine::Open(const Request& request) {
  v1::AdmitRequest admit;
  v1::AdmitItem* item = admit.add_items();
  item->set_prompt_rows(request.input_rows);
  item->set_max_rows(kMaxRows);
  v1::AdmitResponse admitted;
  absl::Status status = session().Admit(admit, &admitted);
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return {};
  EXPECT_EQ(admitted.sequences(0).status().code(), 0) << admitted.sequences(0).status().message();
  const OpenSequence sequence{&request, admitted.sequences(0).sequence_id(), admitted.sequences(0).state_row(), 0,
                              true};
  status = rows_->Open(sequence);
  status.Update(rows_->FillStaging(sequence, 0, request.input_rows, 0));
  status.Update(rows_->AwaitStaging());
  EXPECT_TRUE(status.ok()) << status;
  v1::StoreRequest store;
  v1::StoreItem* stored = store.add_items();
  stored->mutable_range()->set_sequence_id(sequence.id);
  stored->mutable_range()->set_row_count(request.input_rows);
  stored->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse response;
  status = session().Store(store, &response);
  status.Update(client::FirstError(response.statuses()));
  EXPECT_TRUE(status.ok()) << status;
  return sequence;
}

void GpuEngine::Close(const OpenSequence& sequence) {
  v1::ReleaseRequest request;
  request.add_sequence_ids(sequence.id);
  v1::ReleaseResponse response;
  absl::Status status = session().Release(request, &response);
  status.Update(client::FirstError(response.statuses()));
  EXPECT_TRUE(status.ok()) << status;
}

void GpuEngine::Publish(absl::Span<const replay::BatchRow> batch,
                        const std::function<int32_t(const replay::BatchRow&)>& entry) {
  for (size_t row = 0; row < batch.size(); ++row) {
    rows_->WriteNewest(batch[row]);
    for (uint32_t group = 0; group < kGroups; ++group) {
      for (int32_t& value : rows_->Entries(group, row)) value = entry(batch[row]);
    }
  }
  const absl::Status status = rows_->Publish(batch.size());
  ASSERT_TRUE(status.ok()) << status;
}

void GpuEngine::Publish(absl::Span<const replay::BatchRow> batch, std::mt19937_64& random) {
  Publish(batch, [&](const replay::BatchRow& row) {
    const uint64_t reach = random() % 2 == 0 ? 64 : row.length;
    return random() % 97 == 0 ? -1 : static_cast<int32_t>(row.length - 1 - random() % reach);
  });
}

void GpuEngine::CheckAny(absl::Span<const replay::BatchRow> batch) {
  const auto check = rows_->Check(batch);
  ASSERT_TRUE(check.ok()) << check.status();
  ASSERT_EQ(check->wrong, 0u) << check->first_wrong;
  checked_ += check->on_device;
}

void GpuEngine::Check(absl::Span<const replay::BatchRow> batch) {
  const uint64_t before = checked_;
  CheckAny(batch);
  if (::testing::Test::HasFatalFailure()) return;
  // Of each group's two layers.
  ASSERT_GT(checked_ - before, batch.size() * kTopK * kLayers / 2);
}

void GpuEngine::Step(replay::StepPlane& plane, absl::Span<const replay::BatchRow> batch, std::mt19937_64& random) {
  Publish(batch, random);
  if (::testing::Test::HasFatalFailure()) return;
  std::vector<client::PlaneRow> rows;
  for (const replay::BatchRow& row : batch) rows.push_back({row.sequence->id, row.sequence->state_row, row.length});
  absl::Status status = plane.RunGroups(rows);
  ASSERT_TRUE(status.ok()) << status;
  Check(batch);
  if (::testing::Test::HasFatalFailure()) return;
  status = plane.Commit(std::vector<int32_t>(batch.size(), 1));
  ASSERT_TRUE(status.ok()) << status;
}

void GpuEngine::StepByCall(absl::Span<const replay::BatchRow> batch, std::mt19937_64& random) {
  Publish(batch, random);
  if (::testing::Test::HasFatalFailure()) return;
  v1::StepRequest request;
  request.set_top_k(kTopK);
  request.set_source(v1::DATA_SOURCE_SHARED);
  for (uint32_t group = 0; group < kGroups; ++group) request.add_groups()->set_group(group);
  for (const replay::BatchRow& row : batch) {
    v1::StepRow* proto = request.add_rows();
    proto->set_sequence_id(row.sequence->id);
    proto->set_length(row.length);
    proto->set_commit(true);
  }
  v1::StepResponse response;
  absl::Status status = session().Step(request, &response);
  status.Update(client::FirstError(response.statuses()));
  ASSERT_TRUE(status.ok()) << status;
  Check(batch);
}

}  // namespace stoker::system_test
