// A daemon whose launches are bounded in every way: rows that calls move and hand out are the same, and an engine on
// the direct plane is told.
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/system/daemon_fixture.h"
#include "tests/system/host_tensor.h"

namespace stoker::system_test {
namespace {

constexpr uint32_t kRows = 900;
constexpr uint32_t kTopK = 16;

class CopyLimitsTest : public DaemonTest {
 protected:
  CopyLimitsTest()
      : DaemonTest({"--max-bulk-copy-blocks=3", "--max-bulk-copy-bytes=1048576", "--max-step-copy-blocks=1",
                    "--max-step-copy-bytes=1048576"}) {}
};

// 2.2 MB: three pieces of some layers or of some rows, whose ends are not the rows' or the layers'.
TEST_F(CopyLimitsTest, BulkCopiesArriveWhole) {
  for (const auto& [layers, row_bytes] : std::vector<std::pair<uint32_t, uint32_t>>{{5, 500}, {2, 1236}}) {
    const v1::PoolSpec pool = CreatePool(LinearPool("p" + std::to_string(layers), layers, row_bytes, 128));
    Rank rank(client(), pool, AttachTo(pool, pool.name()));
    // Stored from the message, read back.
    const Sequence sequence = rank.Open(MakeTokens(1, kRows), kRows + 8);
    rank.CheckStored(sequence, kRows);
    // Into a tensor, and from there to another sequence.
    HostTensor tensor(pool, DenseTensor(pool, kRows));
    absl::Status status = tensor.Register(rank.session());
    ASSERT_TRUE(status.ok()) << status;
    v1::LoadRequest load;
    v1::LoadItem* item = load.add_items();
    item->mutable_range()->set_sequence_id(sequence.id);
    item->mutable_range()->set_row_count(kRows);
    item->set_target(v1::LOAD_TARGET_TENSOR);
    item->mutable_tensor()->add_tensor_ids(tensor.id());
    v1::LoadResponse loaded;
    status = rank.session().Load(load, &loaded);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(client::FirstError(loaded.statuses()).ok());
    Sequence other{0, 0, sequence.tokens};
    other.id = rank.Admit(rank.Item(other.tokens, kRows, "", /*hashes=*/false)).sequence_id();
    v1::StoreRequest store;
    v1::StoreItem* stored_item = store.add_items();
    stored_item->mutable_range()->set_sequence_id(other.id);
    stored_item->mutable_range()->set_row_count(kRows);
    stored_item->set_source(v1::DATA_SOURCE_TENSOR);
    *stored_item->mutable_tensor() = item->tensor();
    v1::StoreResponse stored;
    status = rank.session().Store(store, &stored);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(client::FirstError(stored.statuses()).ok());
    rank.CheckStored(other, kRows);
  }
}

// Half a MiB a layer, if all missed: a gather of the five layers is three launches.
TEST_F(CopyLimitsTest, StepsHandOutTheirRows) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 5, 8192, 96));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  std::mt19937 random(3);
  std::vector<Sequence> sequences;
  for (int i = 0; i < 4; ++i) sequences.push_back(rank.Open(MakeTokens(10 + i, 300), 340));
  for (uint32_t step = 0; step < 20; ++step) {
    std::vector<BatchRow> batch;
    std::vector<std::vector<int32_t>> entries(1);
    for (Sequence& sequence : sequences) {
      sequence.tokens.push_back(1000 * sequence.id + step);
      const auto length = static_cast<uint32_t>(sequence.tokens.size());
      rank.WriteNewest(sequence, length - 1);
      batch.push_back({.sequence = &sequence, .length = length, .commit = true});
      for (uint32_t k = 0; k < kTopK; ++k) entries[0].push_back(static_cast<int32_t>(random() % length));
    }
    const StepOutcome outcome = rank.Step(batch, entries, kTopK);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    rank.CheckRows(batch, entries, kTopK, outcome);
  }
  for (const Sequence& sequence : sequences) rank.CheckStored(sequence, 320);
}

TEST_F(CopyLimitsTest, AnEngineOnTheDirectPlaneIsTold) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 2, 48, 64));
  v1::AttachRequest attach = AttachTo(pool, "rank");
  attach.set_plane(v1::PLANE_DIRECT);
  auto session = client().Attach(attach, WithoutReattach());
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->info().direct().max_copy_blocks(), 1u);
  EXPECT_EQ((*session)->info().direct().max_copy_bytes(), 1048576u);
}

}  // namespace
}  // namespace stoker::system_test
