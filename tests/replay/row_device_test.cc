// What every RowDevice must do, on an arena as the daemon would make it, without a daemon: the test plays its part.
//
// Every word of what is written is compared with the oracle, and every single wrong word must be found: a row is made
// wrong in one word at a time, at the edges of rows and of pages, and each time the comparison must name it.
#include "client/replay/row_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/client/fake_arena.h"
#include "tests/replay/row_device_case.h"

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

// Of the fake arena: groups {0, 1} and {2}.
constexpr uint32_t kLayers = 3, kTopK = 7, kHotRows = 100, kStateRows = 2, kBatchRows = 5;
constexpr uint32_t kNewestRow = 128, kRegionRows = 192;

struct Layout {
  v1::RowLayout layout;
  RowShape shape;
  bool by_pool_row = false;
};

class RowDeviceTest : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    v1::AttachRequest request = client::FakeAttachRequest("p");
    request.set_staging_bytes(uint64_t{4} << 20);
    v1::Attached attached;
    *attached.mutable_pool() = client::FakePoolSpec("p", GetParam().layout);
    attached.mutable_pool()->set_row_bytes(GetParam().layout == v1::ROW_LAYOUT_DSV4_PAGED ? 584
                                                                                          : shape().part_bytes[0]);
    attached.mutable_pool()->set_v_row_bytes(GetParam().layout == v1::ROW_LAYOUT_SPLIT_KV ? shape().part_bytes[1] : 0);
    attached.set_device("cpu");
    *attached.mutable_arena() = client::FakeArenaLayout(request, attached.pool());
    auto arena = client::Arena::FromDescriptor(request, attached, client::MakeMemory(attached.arena().size_bytes()));
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *arena;
    ASSERT_EQ(arena_->newest_row(), kNewestRow);
    ASSERT_EQ(arena_->region_rows(), kRegionRows);
    std::memset(arena_->bytes().data(), 0xa5, arena_->bytes().size());

    RowDeviceSpec spec;
    spec.shape = shape();
    spec.group_begin = {0, 2, 3};
    spec.top_k = kTopK;
    spec.hot_rows = kHotRows;
    spec.state_rows = kStateRows;
    spec.batch_rows = kBatchRows;
    spec.max_sequence_rows = 1024;
    spec.by_pool_row = GetParam().by_pool_row;
    auto device = MakeRowDevice(spec, arena_);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);

    for (uint32_t i = 0; i < kStateRows; ++i) {
      requests_[i].number = 40 + i;
      requests_[i].input_rows = 700;
      requests_[i].output_rows = 200;
      // The first one has its partial block's hash, the second one none of it.
      requests_[i].hash_ids = {5, 6};
      if (i == 1) requests_[i].hash_ids.pop_back();
      // State rows in the other order than the batch.
      sequences_[i] = {&requests_[i], 100 + i, kStateRows - 1 - i, 0, true};
      ASSERT_TRUE(device_->Open(sequences_[i]).ok());
    }
  }
  void TearDown() override {
    device_.reset();
    if (arena_ != nullptr) LeaveArena(*arena_);
  }

  const RowShape& shape() const { return GetParam().shape; }
  uint64_t Key(const OpenSequence& sequence, uint32_t layer, uint32_t position) const {
    return RowOracle::Key(layer, sequence.request->Token(position));
  }
  absl::Span<std::byte> HotPart(uint32_t layer, int part, int32_t hot_row) const {
    return *arena_->HotRow(layer, static_cast<client::RowPart>(part), static_cast<uint32_t>(hot_row));
  }
  // As the daemon's gather.
  void Gather(const OpenSequence& sequence, uint32_t layer, int32_t position, int32_t hot_row) const {
    for (int part = 0; part < shape().parts(); ++part) {
      oracle_.FillPart(Key(sequence, layer, static_cast<uint32_t>(position)), part,
                       HotPart(layer, part, hot_row).data());
    }
  }
  int32_t* Answer(uint32_t group, size_t row, size_t entry) const {
    return const_cast<int32_t*>(&(*arena_->HotRows(group))[row][entry]);
  }
  // Publishes a step of the batch and answers it rightly. The lengths of the sequences are about 700 and 800.
  void StepRightly() {
    for (size_t row = 0; row < batch_.size(); ++row) {
      if (batch_[row].sequence == nullptr) {
        for (uint32_t group = 0; group < 2; ++group) {
          for (size_t entry = 0; entry < kTopK; ++entry) {
            device_->Entries(group, row)[entry] = static_cast<int32_t>(entry);
            *Answer(group, row, entry) = -1;
          }
        }
        continue;
      }
      const OpenSequence& sequence = *batch_[row].sequence;
      const uint32_t length = batch_[row].length, newest_index = batch_[row].newest_index;
      device_->WriteNewest(batch_[row]);
      // Blocks with and without hashes, the page's edges, nothing, and the newest row.
      int32_t positions[kTopK] = {0, 511, 512, static_cast<int32_t>(length) - 1, -1, 663, 698};
      int32_t slots[kTopK] = {63, 0, 64, static_cast<int32_t>(kNewestRow + newest_index), -1, 99, 1};
      if (newest_index > 0) {  // in place of nothing, that of the row before
        positions[4] = positions[3] - 1;
        slots[4] = slots[3] - 1;
      }
      for (uint32_t group = 0; group < 2; ++group) {
        std::copy(std::begin(positions), std::end(positions), device_->Entries(group, row).begin());
        for (size_t entry = 0; entry < kTopK; ++entry) {
          const int32_t slot = slots[entry];
          const int32_t hot_row = slot < 0 ? -1 : slot + static_cast<int32_t>(arena_->RegionBegin(sequence.state_row));
          *Answer(group, row, entry) = hot_row;
          if (slot < 0 || slot >= static_cast<int32_t>(kNewestRow)) continue;
          for (uint32_t layer = group == 0 ? 0 : 2; layer < (group == 0 ? 2u : 3u); ++layer) {
            Gather(sequence, layer, positions[entry], hot_row);
          }
        }
      }
    }
    for (size_t row = 0; GetParam().by_pool_row && row < batch_.size(); ++row) {
      for (uint32_t group = 0; group < 2; ++group) {
        for (size_t entry = 0; entry < kTopK; ++entry) device_->Names(group, row)[entry] = PoolRow(group, row, entry);
      }
    }
    ASSERT_TRUE(device_->Publish(batch_.size()).ok());
  }
  // No two entries have the same.
  static int32_t PoolRow(uint32_t group, size_t row, size_t entry) {
    return static_cast<int32_t>(100000 * group + 1000 * row + entry);
  }
  RowCheck Check() {
    auto check = device_->Check(batch_);
    EXPECT_TRUE(check.ok()) << check.status();
    return check.ok() ? *check : RowCheck();
  }

  const RowOracle oracle_{GetParam().shape};
  std::shared_ptr<const client::Arena> arena_;
  std::unique_ptr<RowDevice> device_;
  Request requests_[kStateRows];
  OpenSequence sequences_[kStateRows];
  std::vector<BatchRow> batch_ = {{&sequences_[0], 700}, {&sequences_[1], 800}};
};

TEST_P(RowDeviceTest, FillsTheStagingArea) {
  const absl::Span<std::byte> staging = *arena_->Staging();
  const RowOracle oracle(shape());
  for (const OpenSequence& sequence : sequences_) {
    for (const auto& [first, count] : {std::pair<uint32_t, uint32_t>{0, 1}, {510, 4}, {690, 200}, {899, 1}, {0, 900}}) {
      const uint64_t offset = 48, bytes = uint64_t{shape().bytes()} * kLayers * count;
      ASSERT_LE(offset + bytes + 64, staging.size());
      std::memset(staging.data(), 0x5a, staging.size());
      ASSERT_TRUE(device_->FillStaging(sequence, first, count, offset).ok());
      ASSERT_TRUE(device_->AwaitStaging().ok());
      std::vector<std::byte> expected(bytes);
      std::byte* out = expected.data();
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t row = 0; row < count; ++row, out += shape().bytes()) {
          oracle.Fill(Key(sequence, layer, first + row), out);
        }
      }
      EXPECT_EQ(std::memcmp(staging.data() + offset, expected.data(), bytes), 0) << first << " " << count;
      for (uint64_t i = 0; i < 64; ++i) {
        ASSERT_EQ(staging[offset + bytes + i], std::byte{0x5a}) << "behind the rows, byte " << i;
        if (i < offset) {
          ASSERT_EQ(staging[i], std::byte{0x5a}) << "before the rows, byte " << i;
        }
      }
    }
  }
}

TEST_P(RowDeviceTest, RowsOfAStepAreRight) {
  for (int step = 0; step < 3; ++step) {
    StepRightly();
    for (size_t row = 0; row < batch_.size(); ++row) {
      // Newest rows and entries have arrived.
      const OpenSequence& sequence = *batch_[row].sequence;
      const int32_t newest = static_cast<int32_t>(arena_->RegionBegin(sequence.state_row) + kNewestRow);
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (int part = 0; part < shape().parts(); ++part) {
          EXPECT_TRUE(oracle_.CheckPart(Key(sequence, layer, batch_[row].length - 1), part,
                                        HotPart(layer, part, newest).data()));
        }
      }
      for (uint32_t group = 0; group < 2; ++group) {
        const auto mailbox = (*arena_->Indices(group))[row];
        for (size_t entry = 0; entry < kTopK; ++entry) {
          EXPECT_EQ(mailbox[entry],
                    GetParam().by_pool_row ? PoolRow(group, row, entry) : device_->Entries(group, row)[entry]);
        }
      }
    }
    const RowCheck check = Check();
    EXPECT_EQ(check.wrong, 0u) << check.first_wrong;
    // Six of seven entries, two rows, three layers.
    EXPECT_EQ(RowsAreCheckedOnDevice() ? check.on_device : check.on_host, 6u * 2 * 3);
    EXPECT_EQ(check.on_device > 0, RowsAreCheckedOnDevice());
    EXPECT_GT(check.on_host, 0u);
    for (uint32_t group = 0; group < 2; ++group) {
      for (size_t row = 0; row < batch_.size(); ++row) {
        for (size_t entry = 0; entry < kTopK; ++entry) {
          EXPECT_EQ(device_->HotRows(group, row)[entry], *Answer(group, row, entry));
        }
      }
    }
  }
}

TEST_P(RowDeviceTest, EveryWrongWordIsFound) {
  StepRightly();
  ASSERT_EQ(Check().wrong, 0u);
  for (const size_t row : {0u, 1u}) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const uint32_t group = layer / 2;
      for (const size_t entry : {0u, 1u, 2u, 3u, 5u, 6u}) {
        const int32_t hot_row = *Answer(group, row, entry);
        uint32_t begin = 0;  // of the part in the row
        for (int part = 0; part < shape().parts(); begin += shape().part_bytes[part], ++part) {
          const absl::Span<std::byte> bytes = HotPart(layer, part, hot_row);
          for (const size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
            bytes[at] ^= std::byte{0x10};
            const RowCheck check = Check();
            EXPECT_EQ(check.wrong, 1u);
            EXPECT_THAT(check.first_wrong,
                        HasSubstr(absl::StrCat("request ", 40 + row, ", position ", device_->Entries(group, row)[entry],
                                               ", layer ", layer, ": hot row ", hot_row, " of state row ", 1 - row,
                                               ", the answer to entry ", entry, " of batch row ", row, ": byte ",
                                               (begin + at) / 4 * 4, " is ")));
            uint32_t found;
            std::memcpy(&found, bytes.data() + at / 4 * 4, 4);
            EXPECT_THAT(check.first_wrong,
                        HasSubstr(absl::StrFormat(" is %08x, must be %08x", found, found ^ 0x10u << at % 4 * 8)));
            bytes[at] ^= std::byte{0x10};
          }
        }
      }
    }
  }
  EXPECT_EQ(Check().wrong, 0u);
}

TEST_P(RowDeviceTest, AnswersThatCannotBeRight) {
  StepRightly();
  const int32_t own = static_cast<int32_t>(arena_->RegionBegin(sequences_[0].state_row));
  const int32_t other = static_cast<int32_t>(arena_->RegionBegin(sequences_[1].state_row));
  const struct {
    size_t entry;
    int32_t hot_row;
  } cases[] = {{0, -1},        {0, other},      {0, own + static_cast<int32_t>(kHotRows)},
               {0, own + 128}, {3, own},        {3, -1},
               {4, own},       {4, 0},          {0, INT32_MAX},
               {0, INT32_MIN}, {3, other + 128}};
  for (const auto& c : cases) {
    int32_t* const answer = Answer(1, 0, c.entry);
    const int32_t right = *answer;
    *answer = c.hot_row;
    const RowCheck check = Check();
    EXPECT_EQ(check.wrong, 1u) << c.entry << " " << c.hot_row;
    EXPECT_THAT(check.first_wrong,
                HasSubstr(absl::StrCat("layer 2: hot row ", c.hot_row, " of state row 1, the answer to entry ", c.entry,
                                       " of batch row 0, cannot be right")));
    *answer = right;
  }
  EXPECT_EQ(Check().wrong, 0u);
}

TEST_P(RowDeviceTest, SpeculativeRowsAndPadding) {
  batch_ = {{}, {&sequences_[0], 700, 0}, {&sequences_[0], 701, 1}, {}, {&sequences_[1], 800, 0}};
  static_assert(kBatchRows == 5);
  StepRightly();
  const RowCheck right = Check();
  EXPECT_EQ(right.wrong, 0u) << right.first_wrong;
  EXPECT_EQ(RowsAreCheckedOnDevice() ? right.on_device : right.on_host, (6u + 7u + 6u) * kLayers);
  const int32_t newest = static_cast<int32_t>(arena_->RegionBegin(sequences_[0].state_row) + kNewestRow);
  const struct {
    size_t row, entry;
    int32_t hot_row;
    const char* message;
  } cases[] = {{0, 0, 0, "layer 2: hot row 0, the answer to entry 0 of batch row 0, which is padding, must be -1"},
               {3, 6, newest, "entry 6 of batch row 3, which is padding, must be -1"},
               {1, 3, newest + 1, "entry 3 of batch row 1, cannot be right"},
               {2, 3, newest, "entry 3 of batch row 2, cannot be right"},
               {2, 4, newest + 1, "entry 4 of batch row 2, cannot be right"},
               {2, 4, -1, "entry 4 of batch row 2, cannot be right"}};
  for (const auto& c : cases) {
    int32_t* const answer = Answer(1, c.row, c.entry);
    const int32_t before = *answer;
    *answer = c.hot_row;
    const RowCheck check = Check();
    EXPECT_EQ(check.wrong, 1u) << c.message;
    EXPECT_THAT(check.first_wrong, HasSubstr(c.message));
    *answer = before;
  }
  // The bytes of the second newest row, which one entry names.
  HotPart(1, 0, newest + 1)[0] ^= std::byte{1};
  const RowCheck check = Check();
  EXPECT_EQ(check.wrong, 1u);
  EXPECT_THAT(check.first_wrong, HasSubstr("request 40, position 700, layer 1"));
}

TEST_P(RowDeviceTest, AllRowsAreWrong) {
  StepRightly();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t hot_row = 0; hot_row < static_cast<int32_t>(kStateRows * kRegionRows); ++hot_row) {
      for (int part = 0; part < shape().parts(); ++part) {
        for (std::byte& byte : HotPart(layer, part, hot_row)) byte = ~byte;
      }
    }
  }
  const RowCheck check = Check();
  EXPECT_EQ(check.wrong, 6u * 2 * 3);
  EXPECT_THAT(check.first_wrong, HasSubstr("request 40, position 0, layer 0"));
}

TEST_P(RowDeviceTest, AnotherSequenceInTheStateRow) {
  Request request = requests_[0];
  request.number = 77;
  request.hash_ids = {9, 10};
  sequences_[0].request = &request;
  ASSERT_TRUE(device_->Open(sequences_[0]).ok());
  StepRightly();
  const RowCheck check = Check();
  EXPECT_EQ(check.wrong, 0u) << check.first_wrong;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, RowDeviceTest,
    ::testing::Values(Layout{v1::ROW_LAYOUT_LINEAR, {{656, 0}}}, Layout{v1::ROW_LAYOUT_LINEAR, {{20, 0}}},
                      Layout{v1::ROW_LAYOUT_LINEAR, {{4, 0}}}, Layout{v1::ROW_LAYOUT_SPLIT_KV, {{128, 68}}},
                      Layout{v1::ROW_LAYOUT_SPLIT_KV, {{24, 12}}}, Layout{v1::ROW_LAYOUT_LINEAR, {{656, 0}}, true},
                      Layout{v1::ROW_LAYOUT_DSV4_PAGED, {{576, 8}}},
                      Layout{v1::ROW_LAYOUT_DSV4_PAGED, {{576, 8}}, true}));

}  // namespace
}  // namespace stoker::replay
