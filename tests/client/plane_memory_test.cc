// The plane's memory from replies that cannot be. That it is the daemon's own, of replies that are right, is seen by
// tests/system/direct_plane_test.cc, whose steps and the daemon work on the same words.
#include "client/plane_memory.h"

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/session_memory.h"
#include "tests/client/fake_arena.h"

namespace stoker::client {
namespace {

using ::testing::HasSubstr;

constexpr v1::RowLayout kLayouts[] = {v1::ROW_LAYOUT_LINEAR, v1::ROW_LAYOUT_SPLIT_KV, v1::ROW_LAYOUT_DSV4_PAGED};

// What the daemon answers to FakeAttachRequest on the direct plane.
struct Case {
  explicit Case(v1::RowLayout row_layout, v1::IndexSpace index_space = v1::INDEX_SPACE_POSITION)
      : request(FakeAttachRequest("p")) {
    request.set_plane(v1::PLANE_DIRECT);
    request.set_index_space(index_space);
    v1::PoolSpec& spec = *attached.mutable_pool();
    spec = FakePoolSpec("p", row_layout);
    attached.set_device("cpu");
    attached.set_session_id(7);

    core::PoolSpec pool_spec;
    pool_spec.layers = spec.layers();
    pool_spec.row_layout = static_cast<core::RowLayout>(row_layout);
    pool_spec.row_bytes = spec.row_bytes();
    pool_spec.v_row_bytes = spec.v_row_bytes();
    pool_spec.block_rows = spec.block_rows();
    pool_spec.blocks = spec.blocks();
    core::SessionSpec session;
    session.direct = true;
    session.state_rows = request.state_rows();
    session.hot_rows = request.hot_rows();
    session.max_top_k = request.max_top_k();
    session.max_batch_rows = request.max_batch_rows();
    session.max_sequence_rows = request.max_sequence_rows();
    session.index_space = static_cast<core::IndexSpace>(index_space);
    session.staging_bytes = static_cast<int64_t>(request.staging_bytes());
    for (const v1::IndexGroup& group : request.groups()) {
      session.groups.emplace_back(group.layers().begin(), group.layers().end());
    }
    const auto memory = engine::SessionMemory::Make(pool_spec, session);
    EXPECT_TRUE(memory.ok()) << memory.status();
    v1::ArenaLayout& arena_layout = *attached.mutable_arena();
    arena_layout.set_size_bytes(memory->arena.size_bytes);
    arena_layout.set_region_rows(static_cast<uint32_t>(memory->arena.region_rows));
    arena_layout.set_newest_row(static_cast<uint32_t>(memory->arena.newest_row));
    for (const core::ArenaTensor& from : memory->arena.tensors) {
      v1::ArenaTensor& tensor = *arena_layout.add_tensors();
      tensor.set_name(from.name);
      tensor.set_offset_bytes(from.offset_bytes);
      tensor.mutable_shape()->Add(from.shape.begin(), from.shape.end());
      tensor.mutable_stride_bytes()->Add(from.stride_bytes.begin(), from.stride_bytes.end());
      tensor.set_element(from.element);
    }

    const auto layout = kernels::RowLayout::Make(*RowFormatOf(spec), 512);
    v1::DirectAccess& direct = *attached.mutable_direct();
    direct.set_memory(v1::DirectAccess::MEMORY_FILE);
    direct.set_layer_stride_bytes((static_cast<uint64_t>(layout->layer_bytes) + 255) / 256 * 256);
    direct.set_sequence_words_offset_bytes(4 * direct.layer_stride_bytes());
    direct.set_sequence_words(16);
    direct.set_result_offset_bytes(direct.sequence_words_offset_bytes() + 256);
    direct.add_part_bytes((direct.result_offset_bytes() + 256 + 4095) / 4096 * 4096);
  }

  v1::ArenaTensor* tensor(const std::string& name) {
    for (v1::ArenaTensor& tensor : *attached.mutable_arena()->mutable_tensors()) {
      if (tensor.name() == name) return &tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return nullptr;
  }

  // The views live as long as the case.
  absl::StatusOr<kernels::PlaneMemory> Make(uint32_t top_k = 7) {
    auto opened = Arena::FromDescriptor(request, attached, MakeMemory(attached.arena().size_bytes()));
    if (!opened.ok()) return opened.status();
    arena = *opened;
    std::vector<FileDescriptor> files;
    files.push_back(MakeMemory(attached.direct().part_bytes(0)));
    auto mapped = PoolMapping::FromDescriptors(attached, std::move(files));
    if (!mapped.ok()) return mapped.status();
    pool = *mapped;
    return MakePlaneMemory(request, attached, *arena, *pool, top_k);
  }

  v1::AttachRequest request;
  v1::Attached attached;
  std::shared_ptr<const Arena> arena;
  std::shared_ptr<const PoolMapping> pool;
};

TEST(PlaneMemoryTest, LiesInArenaAndPool) {
  for (const v1::RowLayout row_layout : kLayouts) {
    for (const v1::IndexSpace index_space : {v1::INDEX_SPACE_POSITION, v1::INDEX_SPACE_POOL_ROW}) {
      Case c(row_layout, index_space);
      const auto memory = c.Make(5);
      ASSERT_TRUE(memory.ok()) << memory.status();
      const kernels::BatchArgs& batch = memory->batch;
      EXPECT_TRUE(kernels::Validate(batch).ok());
      EXPECT_TRUE(batch.raises_step);
      EXPECT_EQ(batch.session, 7u);
      EXPECT_EQ(batch.top_k, 5);
      EXPECT_EQ(batch.max_rows, 5);
      EXPECT_EQ(batch.hot_rows, 100);
      EXPECT_EQ(batch.state_rows, 2);
      EXPECT_EQ(batch.max_sequence_rows, 1024);
      EXPECT_EQ(batch.block_table_columns, 16);
      EXPECT_EQ(batch.pool_rows, 512);
      EXPECT_EQ(batch.word_count, 16);
      EXPECT_EQ(memory->mailbox_stride, 7);
      EXPECT_EQ(memory->layers, (std::vector<int32_t>{0, 1, 2, 3}));
      ASSERT_EQ(memory->groups.size(), 2u);
      EXPECT_EQ(memory->groups[0].layers, (std::vector<int32_t>{0, 1}));
      EXPECT_EQ(memory->groups[1].layers, std::vector<int32_t>{2});
      EXPECT_EQ(memory->allowed_blocks != nullptr, index_space == v1::INDEX_SPACE_POOL_ROW);
      EXPECT_EQ(batch.one_row, index_space == v1::INDEX_SPACE_POOL_ROW);
      // Rows of the hot caches are where the arena's views have them.
      for (int32_t layer = 0; layer < 3; ++layer) {
        for (int32_t p = 0; p < memory->hot.layout.part_count; ++p) {
          for (const int32_t row : {0, 1, 63, 64, 383}) {
            EXPECT_EQ(memory->hot.At(layer, p, row),
                      c.arena->HotRow(static_cast<uint32_t>(layer), static_cast<RowPart>(p), static_cast<uint32_t>(row))
                          ->data());
          }
        }
      }
      const auto* const begin = c.arena->bytes().data();
      const auto* const end = begin + c.arena->bytes().size();
      EXPECT_LE(memory->hot.At(3, memory->hot.layout.part_count - 1, 383), end);
      for (const void* const at :
           {static_cast<const void*>(batch.state), static_cast<const void*>(batch.entries),
            static_cast<const void*>(batch.plan.commit_pool_rows), static_cast<const void*>(batch.plan.claims),
            static_cast<const void*>(memory->counters), static_cast<const void*>(memory->groups[1].residency.lru)}) {
        EXPECT_TRUE(at >= begin && at < end);
      }
    }
  }
}

// As the daemon says, and no more than the kernels can be told.
TEST(PlaneMemoryTest, TakesTheDaemonsCopyLimits) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  auto memory = c.Make();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->limits.max_blocks, 0);
  EXPECT_EQ(memory->limits.max_bytes, 0);
  c.attached.mutable_direct()->set_max_copy_blocks(5);
  c.attached.mutable_direct()->set_max_copy_bytes(uint64_t{6} << 30);
  memory = c.Make();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->limits.max_blocks, 5);
  EXPECT_EQ(memory->limits.max_bytes, int64_t{6} << 30);
  c.attached.mutable_direct()->set_max_copy_blocks(std::numeric_limits<uint32_t>::max());
  c.attached.mutable_direct()->set_max_copy_bytes(std::numeric_limits<uint64_t>::max());
  memory = c.Make();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->limits.max_blocks, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(memory->limits.max_bytes, std::numeric_limits<int64_t>::max());
}

TEST(PlaneMemoryTest, TopKHasALimit) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  for (const uint32_t top_k : {0u, 8u, std::numeric_limits<uint32_t>::max()}) {
    EXPECT_EQ(c.Make(top_k).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Whatever is wrong with any of the tensors that the kernels follow is said, with the tensor's name.
TEST(PlaneMemoryTest, EveryTensorIsChecked) {
  for (const v1::RowLayout row_layout : kLayouts) {
    const Case good(row_layout, v1::INDEX_SPACE_POOL_ROW);
    for (const v1::ArenaTensor& tensor : good.attached.arena().tensors()) {
      const std::string& name = tensor.name();
      if (name == "staging" || name == "request" || name == "done") continue;
      if (name == "engine_word" || name == "daemon_word") continue;  // of calls
      const std::vector<std::pair<std::string, std::function<void(Case&)>>> spoilt = {
          {"missing", [&](Case& c) { c.tensor(name)->set_name("unknown"); }},
          {"element", [&](Case& c) { c.tensor(name)->set_element(tensor.element() == "i32" ? "u8" : "i32"); }},
          {"one less", [&](Case& c) { c.tensor(name)->set_shape(0, tensor.shape(0) - 1); }},
          {"rank", [&](Case& c) {
             c.tensor(name)->clear_shape();
             c.tensor(name)->clear_stride_bytes();
             c.tensor(name)->add_shape(1);
             c.tensor(name)->add_stride_bytes(8);
           }}};
      for (const auto& [what, spoil] : spoilt) {
        if (what == "rank" && tensor.shape_size() == 1 && tensor.shape(0) == 1) continue;  // that is how it is
        Case c(row_layout, v1::INDEX_SPACE_POOL_ROW);
        ASSERT_TRUE(c.Make().ok());
        spoil(c);
        const absl::Status status = c.Make().status();
        EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << name << ", " << what << ": " << status;
        if (what != "element") {
          EXPECT_THAT(std::string(status.message()), HasSubstr("'" + name + "'")) << what;
        }
      }
    }
  }
}

// A hot cache that lies elsewhere than the kernels' layout has it, though inside the arena.
TEST(PlaneMemoryTest, HotCachesMustLieAsTheLayoutHasThem) {
  for (const v1::RowLayout row_layout : kLayouts) {
    const Case good(row_layout);
    for (const v1::ArenaTensor& tensor : good.attached.arena().tensors()) {
      if (tensor.name().rfind("hot.", 0) != 0) continue;
      for (const int64_t by : {-64, -1, 1, 64}) {
        Case c(row_layout);
        const int64_t offset = static_cast<int64_t>(tensor.offset_bytes()) + by;
        if (offset < 0) continue;
        // Out of the way of what else would be said first.
        c.tensor(tensor.name())->set_offset_bytes(static_cast<uint64_t>(offset));
        EXPECT_EQ(c.Make().status().code(), absl::StatusCode::kInternal) << tensor.name() << " by " << by;
      }
    }
  }
}

TEST(PlaneMemoryTest, DenseTensorsMustBeDense) {
  for (const char* const name : {"indices.0", "hot_rows.1", "state.slot_key.0", "state.lru.1", "state.miss_pool_rows.0",
                                 "state.block_table", "state.entries", "state.batch_plan"}) {
    Case c(v1::ROW_LAYOUT_LINEAR);
    v1::ArenaTensor* const tensor = c.tensor(name);
    // Behind everything else, with a gap between its rows.
    tensor->set_offset_bytes(c.attached.arena().size_bytes());
    tensor->set_stride_bytes(0, tensor->stride_bytes(0) + 8);
    c.attached.mutable_arena()->set_size_bytes(c.attached.arena().size_bytes() + (1 << 20));
    const absl::Status status = c.Make().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << name;
    EXPECT_THAT(std::string(status.message()), ::testing::AllOf(HasSubstr(name), HasSubstr("stride_bytes[0]")));
  }
}

TEST(PlaneMemoryTest, GroupsMustBeOfThePool) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  c.request.mutable_groups(1)->set_layers(0, 3);
  EXPECT_TRUE(c.Make().ok()) << c.Make().status();
  c.attached.mutable_pool()->set_layers(3);
  const absl::Status status = c.Make().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
}

}  // namespace
}  // namespace stoker::client
