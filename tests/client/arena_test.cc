#include "client/arena.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_arena.h"
#include "tests/client/temporary_directory.h"

namespace stoker::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr v1::RowLayout kLayouts[] = {v1::ROW_LAYOUT_LINEAR, v1::ROW_LAYOUT_SPLIT_KV, v1::ROW_LAYOUT_DSV4_PAGED};
constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

struct Case {
  explicit Case(v1::RowLayout row_layout) : request(FakeAttachRequest("p")) {
    *attached.mutable_pool() = FakePoolSpec("p", row_layout);
    *attached.mutable_arena() = FakeArenaLayout(request, attached.pool());
    attached.set_token("secret");
    memory = MakeMemory(attached.arena().size_bytes());
  }

  v1::ArenaTensor* tensor(const std::string& name) {
    for (v1::ArenaTensor& tensor : *attached.mutable_arena()->mutable_tensors()) {
      if (tensor.name() == name) return &tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return nullptr;
  }

  absl::StatusOr<std::shared_ptr<const Arena>> Open() {
    return Arena::FromDescriptor(request, attached, Duplicate(memory));
  }

  v1::AttachRequest request;
  v1::Attached attached;
  FileDescriptor memory;
};

// The byte of an element by the formula of ArenaTensor's comment, in a second mapping.
class Oracle {
 public:
  explicit Oracle(const Case& c) : layout_(c.attached.arena()) {
    data_ = static_cast<std::byte*>(
        mmap(nullptr, layout_.size_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, c.memory.get(), 0));
  }
  ~Oracle() { munmap(data_, layout_.size_bytes()); }

  std::byte& At(const std::string& name, std::vector<uint64_t> index) {
    for (const v1::ArenaTensor& tensor : layout_.tensors()) {
      if (tensor.name() != name) continue;
      uint64_t offset = tensor.offset_bytes();
      for (size_t i = 0; i < index.size(); ++i) offset += index[i] * tensor.stride_bytes(static_cast<int>(i));
      return data_[offset];
    }
    ADD_FAILURE() << "no tensor " << name;
    return data_[0];
  }

 private:
  const v1::ArenaLayout& layout_;
  std::byte* data_ = nullptr;
};

TEST(ArenaTest, HotRowsLieWhereTheLayoutSaysInEveryRowLayout) {
  for (const v1::RowLayout row_layout : kLayouts) {
    SCOPED_TRACE(v1::RowLayout_Name(row_layout));
    Case c(row_layout);
    auto arena = c.Open();
    ASSERT_TRUE(arena.ok()) << arena.status();
    Oracle oracle(c);
    const uint32_t rows = 2 * c.attached.arena().region_rows();
    EXPECT_EQ((*arena)->region_rows(), 192u);
    EXPECT_EQ((*arena)->newest_row(), 128u);
    EXPECT_EQ((*arena)->RegionBegin(1), 192u);
    unsigned char mark = 0;
    for (const uint32_t layer : {0u, 1u, 2u}) {
      const std::string name = absl::StrCat("hot.", layer);
      for (const uint32_t row : {0u, 1u, 63u, 64u, 65u, 128u, 191u, 192u, rows - 1}) {
        for (const int part : {0, 1}) {
          auto view = (*arena)->HotRow(layer, static_cast<RowPart>(part), row);
          if (row_layout == v1::ROW_LAYOUT_LINEAR && part == 1) {
            EXPECT_EQ(view.status().code(), absl::StatusCode::kOutOfRange);
            continue;
          }
          ASSERT_TRUE(view.ok()) << view.status();
          std::byte* expected = nullptr;
          size_t bytes = 0;
          switch (row_layout) {
            case v1::ROW_LAYOUT_LINEAR:
              expected = &oracle.At(name, {row, 0});
              bytes = 24;
              break;
            case v1::ROW_LAYOUT_SPLIT_KV:
              expected = &oracle.At(name + (part == 0 ? ".k" : ".v"), {row, 0});
              bytes = part == 0 ? 24 : 12;
              break;
            default:
              expected = &oracle.At(name + (part == 0 ? ".values" : ".scales"), {row / 64, row % 64, 0});
              bytes = part == 0 ? 576 : 8;
          }
          ASSERT_EQ(view->size(), bytes);
          ++mark;
          view->front() = std::byte{mark};
          view->back() = std::byte{mark};
          EXPECT_EQ(expected[0], std::byte{mark}) << layer << " " << part << " " << row;
          EXPECT_EQ(expected[bytes - 1], std::byte{mark}) << layer << " " << part << " " << row;
        }
      }
      EXPECT_EQ((*arena)->HotRow(layer, RowPart::kRow, rows).status().code(), absl::StatusCode::kOutOfRange);
    }
    EXPECT_EQ((*arena)->HotRow(3, RowPart::kRow, 0).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST(ArenaTest, MailboxViewsAreTheSharedMemory) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  // Rows may be further apart than they are long.
  v1::ArenaTensor* const spread = c.tensor("hot_rows.1");
  const uint64_t stride = 64;
  spread->set_offset_bytes(c.attached.arena().size_bytes());
  spread->set_stride_bytes(0, stride);
  c.attached.mutable_arena()->set_size_bytes(c.attached.arena().size_bytes() + 5 * stride);
  c.memory = MakeMemory(c.attached.arena().size_bytes());

  auto opened = c.Open();
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Arena& arena = **opened;
  Oracle oracle(c);
  for (const uint32_t group : {0u, 1u}) {
    auto indices = arena.Indices(group);
    auto hot_rows = arena.HotRows(group);
    auto misses = arena.Misses(group);
    ASSERT_TRUE(indices.ok() && hot_rows.ok() && misses.ok());
    ASSERT_EQ(indices->rows(), 5u);
    ASSERT_EQ(indices->columns(), 7u);
    ASSERT_EQ(misses->size(), 5u);
    for (uint64_t row = 0; row < 5; ++row) {
      for (uint64_t column = 0; column < 7; ++column) {
        (*indices)[row][column] = static_cast<int32_t>(group * 100 + row * 10 + column);
        EXPECT_EQ(reinterpret_cast<int32_t&>(oracle.At(absl::StrCat("indices.", group), {row, column})),
                  static_cast<int32_t>(group * 100 + row * 10 + column));
        reinterpret_cast<int32_t&>(oracle.At(absl::StrCat("hot_rows.", group), {row, column})) = -7;
        EXPECT_EQ((*hot_rows)[row][column], -7);
      }
      reinterpret_cast<int32_t&>(oracle.At(absl::StrCat("misses.", group), {row})) = 9;
      EXPECT_EQ((*misses)[row], 9);
    }
  }
  EXPECT_THAT(arena.Indices(2).status().message(), HasSubstr("group 2 is not below the 2"));
  auto staging = arena.Staging();
  ASSERT_TRUE(staging.ok());
  ASSERT_EQ(staging->size(), 256u);
  staging->back() = std::byte{5};
  EXPECT_EQ(oracle.At("staging", {255}), std::byte{5});
}

TEST(ArenaTest, MailOfThePlaneIsTheSharedMemory) {
  for (const uint64_t stride : {8, 16, 64}) {
    Case c(v1::ROW_LAYOUT_LINEAR);
    c.tensor("request")->set_stride_bytes(0, stride);
    c.tensor("done")->set_stride_bytes(0, stride);
    auto opened = c.Open();
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ((*opened)->groups(), 2u);
    const absl::StatusOr<PlaneMail> mail = (*opened)->Mail();
    ASSERT_TRUE(mail.ok()) << mail.status();
    Oracle oracle(c);
    ASSERT_EQ(mail->request.size(), 3u);
    ASSERT_EQ(mail->done.size(), 3u);
    EXPECT_EQ(mail->request.stride_bytes(), stride);
    for (uint64_t i = 0; i < 3; ++i) {
      mail->request[i] = 100 + i;
      EXPECT_EQ(reinterpret_cast<uint64_t&>(oracle.At("request", {i})), 100 + i);
      reinterpret_cast<uint64_t&>(oracle.At("done", {i})) = 200 + i;
      EXPECT_EQ(mail->done[i], 200 + i);
    }
    reinterpret_cast<int32_t&>(oracle.At("ended", {0})) = 3;
    EXPECT_EQ(*mail->ended, 3);
    *mail->batch_rows = 4;
    EXPECT_EQ(reinterpret_cast<int32_t&>(oracle.At("batch_rows", {0})), 4);
    ASSERT_EQ(mail->sequence_ids.size(), 5u);
    for (uint64_t row = 0; row < 5; ++row) {
      mail->sequence_ids[row] = ~row;
      EXPECT_EQ(reinterpret_cast<uint64_t&>(oracle.At("sequence_ids", {row})), ~row);
      reinterpret_cast<int32_t&>(oracle.At("statuses", {row})) = static_cast<int32_t>(row);
    }
    EXPECT_THAT(mail->statuses, testing::ElementsAre(0, 1, 2, 3, 4));
    int32_t mark = 10;
    for (const auto& [name, view] : {std::pair("state_rows", mail->state_rows), std::pair("lengths", mail->lengths),
                                     std::pair("commits", mail->commits)}) {
      ASSERT_EQ(view.size(), 5u);
      for (uint64_t row = 0; row < 5; ++row) {
        view[row] = ++mark;
        EXPECT_EQ(reinterpret_cast<int32_t&>(oracle.At(name, {row})), mark) << name;
      }
    }
  }
}

// An older daemon knows none of the plane's tensors. One that knows some of them is broken.
TEST(ArenaTest, AnOlderDaemonsArenaHasNoMail) {
  const std::vector<std::string> names = {"request",    "done",    "ended",   "batch_rows", "sequence_ids",
                                          "state_rows", "lengths", "commits", "statuses"};
  Case older(v1::ROW_LAYOUT_LINEAR);
  for (const std::string& name : names) older.tensor(name)->set_name("else." + name);
  auto arena = older.Open();
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_TRUE((*arena)->Indices(0).ok());
  EXPECT_EQ((*arena)->Mail().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string((*arena)->Mail().status().message()), HasSubstr("version without a server plane"));
  for (const std::string& name : names) {
    Case broken(v1::ROW_LAYOUT_LINEAR);
    broken.tensor(name)->set_name("else");
    EXPECT_EQ(broken.Open().status(), absl::InternalError("arena tensor '" + name + "' is missing"));
  }
}

TEST(ArenaTest, BatchRowsDefaultToStateRowsAndStagingMayBeAbsent) {
  Case c(v1::ROW_LAYOUT_SPLIT_KV);
  c.request.set_max_batch_rows(0);
  c.request.set_staging_bytes(0);
  *c.attached.mutable_arena() = FakeArenaLayout(c.request, c.attached.pool());
  c.attached.mutable_arena()->mutable_tensors()->RemoveLast();
  auto arena = c.Open();
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ((*arena)->Indices(0)->rows(), 2u);
  EXPECT_TRUE((*arena)->Staging()->empty());
}

TEST(ArenaTest, MalformedLayoutsAreRefusedByName) {
  struct Malformation {
    const char* what;
    std::function<void(Case&)> apply;
    std::vector<const char*> message;
  };
  const std::vector<Malformation> malformations = {
      {"offset beyond the size",
       [](Case& c) { c.tensor("indices.0")->set_offset_bytes(c.attached.arena().size_bytes()); },
       {"indices.0", "beyond size_bytes"}},
      {"last byte beyond the size",
       [](Case& c) { c.tensor("staging")->set_offset_bytes(c.attached.arena().size_bytes() - 255); },
       {"staging", "beyond size_bytes"}},
      {"offset that overflows", [](Case& c) { c.tensor("hot.0")->set_offset_bytes(kMax - 1); }, {"hot.0", "beyond"}},
      {"extent that overflows",
       [](Case& c) { c.tensor("hot.1")->set_stride_bytes(0, kMax / 2); },
       {"hot.1", "overflows"}},
      {"extent that wraps round to a small number",
       [](Case& c) {
         c.tensor("hot.1")->set_shape(0, 5);
         c.tensor("hot.1")->set_stride_bytes(0, uint64_t{1} << 62);
       },
       {"hot.1", "overflows"}},
      {"wrong number of rows",
       [](Case& c) { c.tensor("indices.1")->set_shape(0, 4); },
       {"indices.1", "shape is [4, 7], not [5, 7]"}},
      {"wrong number of columns", [](Case& c) { c.tensor("hot_rows.0")->set_shape(1, 6); }, {"hot_rows.0", "[5, 6]"}},
      {"wrong row bytes", [](Case& c) { c.tensor("hot.2")->set_shape(1, 20); }, {"hot.2", "shape"}},
      {"wrong rank", [](Case& c) { c.tensor("misses.0")->add_shape(1); }, {"misses.0", "dimensions"}},
      {"no shape",
       [](Case& c) {
         c.tensor("misses.0")->clear_shape();
         c.tensor("misses.0")->clear_stride_bytes();
       },
       {"misses.0", "dimensions"}},
      {"strides that make rows overlap",
       [](Case& c) { c.tensor("hot.0")->set_stride_bytes(0, 12); },
       {"hot.0", "stride_bytes[0] 12"}},
      {"stride zero", [](Case& c) { c.tensor("hot.0")->set_stride_bytes(0, 0); }, {"hot.0", "stride_bytes[0] 0"}},
      {"elements apart",
       [](Case& c) { c.tensor("misses.0")->set_stride_bytes(0, 8); },
       {"misses.0", "stride_bytes[0]"}},
      {"misaligned offset", [](Case& c) { c.tensor("misses.0")->set_offset_bytes(2); }, {"misses.0", "multiple of 4"}},
      {"misaligned stride",
       [](Case& c) { c.tensor("indices.0")->set_stride_bytes(0, 30); },
       {"indices.0", "multiple of 4"}},
      {"wrong element", [](Case& c) { c.tensor("indices.0")->set_element("u8"); }, {"indices.0", "element is 'u8'"}},
      {"unknown element", [](Case& c) { c.tensor("staging")->set_element("f32"); }, {"staging", "'f32'"}},
      {"two dense tensors in one place",
       [](Case& c) { c.tensor("hot.1")->set_offset_bytes(c.tensor("hot.0")->offset_bytes() + 64); },
       {"hot.1", "lies inside 'hot.0'"}},
      {"a doorbell too few", [](Case& c) { c.tensor("request")->set_shape(0, 2); }, {"request", "[2], not [3]"}},
      {"doorbells that overlap", [](Case& c) { c.tensor("done")->set_stride_bytes(0, 4); }, {"done", "stride_bytes"}},
      {"misaligned doorbells",
       [](Case& c) { c.tensor("request")->set_offset_bytes(c.tensor("request")->offset_bytes() + 4); },
       {"request", "multiple of 8"}},
      {"last doorbell beyond the size",
       [](Case& c) { c.tensor("done")->set_offset_bytes(c.attached.arena().size_bytes() - 2 * 64); },
       {"done", "beyond size_bytes"}},
      {"doorbells of another width", [](Case& c) { c.tensor("done")->set_element("i32"); }, {"done", "'i32'"}},
      {"lengths apart", [](Case& c) { c.tensor("lengths")->set_stride_bytes(0, 8); }, {"lengths", "stride_bytes[0]"}},
      {"statuses for too few rows", [](Case& c) { c.tensor("statuses")->set_shape(0, 4); }, {"statuses", "[5]"}},
      {"missing tensor", [](Case& c) { c.tensor("hot.2")->set_name("hot.3"); }, {"hot.2", "missing"}},
      {"tensor twice", [](Case& c) { c.tensor("hot.2")->set_name("hot.1"); }, {"hot.1", "twice"}},
      {"size beyond the descriptor",
       [](Case& c) { c.attached.mutable_arena()->set_size_bytes(c.attached.arena().size_bytes() + 1); },
       {"size_bytes", "behind the descriptor"}},
      {"size zero", [](Case& c) { c.attached.mutable_arena()->set_size_bytes(0); }, {"size_bytes 0"}},
      {"size that is no size", [](Case& c) { c.attached.mutable_arena()->set_size_bytes(kMax); }, {"size_bytes"}},
      {"newest row outside the region",
       [](Case& c) { c.attached.mutable_arena()->set_newest_row(192); },
       {"newest_row 192"}},
      {"region less than the hot rows",
       [](Case& c) { c.attached.mutable_arena()->set_region_rows(99); },
       {"region_rows 99"}},
      {"unknown row layout",
       [](Case& c) { c.attached.mutable_pool()->set_row_layout(v1::ROW_LAYOUT_UNSPECIFIED); },
       {"row_layout 0"}},
  };
  for (const Malformation& malformation : malformations) {
    SCOPED_TRACE(malformation.what);
    Case c(v1::ROW_LAYOUT_LINEAR);
    ASSERT_TRUE(c.Open().ok());
    malformation.apply(c);
    const absl::Status status = c.Open().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    for (const char* const part : malformation.message) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(ArenaTest, MalformedPagesAreRefused) {
  for (const char* const name : {"hot.0.values", "hot.2.scales"}) {
    Case c(v1::ROW_LAYOUT_DSV4_PAGED);
    ASSERT_TRUE(c.Open().ok());
    c.tensor(name)->set_shape(1, 32);
    EXPECT_THAT(std::string(c.Open().status().message()), AllOf(HasSubstr(name), HasSubstr("64")));
  }
}

TEST(ArenaTest, UnmappedArenaSaysWhy) {
  const absl::Status why = absl::UnavailableError("why");
  const std::shared_ptr<const Arena> arena = Arena::Unmapped(why);
  EXPECT_EQ(arena->status(), why);
  EXPECT_EQ(arena->Indices(0).status(), why);
  EXPECT_EQ(arena->HotRows(0).status(), why);
  EXPECT_EQ(arena->Misses(0).status(), why);
  EXPECT_EQ(arena->Mail().status(), why);
  EXPECT_EQ(arena->Staging().status(), why);
  EXPECT_EQ(arena->HotRow(0, RowPart::kRow, 0).status(), why);
  EXPECT_TRUE(arena->bytes().empty());
}

TEST(ArenaTest, CopiesGoToAndFromViewsThatLieInIt) {
  Case c(v1::ROW_LAYOUT_SPLIT_KV);
  const auto arena = c.Open().value();
  EXPECT_FALSE(arena->on_device());
  Oracle oracle(c);
  const MatrixView<int32_t> indices = arena->Indices(1).value();
  const std::vector<int32_t> row = {5, 6, 7};
  ASSERT_TRUE(arena->CopyIn(row.data(), indices[1].subspan(0, 3)).ok());
  EXPECT_EQ(reinterpret_cast<int32_t&>(oracle.At("indices.1", {1, 2})), 7);
  std::vector<int32_t> back(3);
  ASSERT_TRUE(arena->CopyOut(indices[1].subspan(0, 3), back.data()).ok());
  EXPECT_EQ(back, row);
  ASSERT_TRUE(arena->CopyOut(absl::Span<const int32_t>(), back.data()).code() == absl::StatusCode::kOutOfRange);
  // Whole, beyond the end, before the begin, elsewhere.
  const absl::Span<std::byte> bytes = arena->bytes();
  std::vector<std::byte> host(bytes.size() + 1);
  EXPECT_TRUE(arena->CopyOut(bytes, host.data()).ok());
  for (const absl::Span<std::byte> outside :
       {absl::Span<std::byte>(bytes.data() + 1, bytes.size()), absl::Span<std::byte>(bytes.data() - 1, 2),
        absl::Span<std::byte>(bytes.data(), bytes.size() + 1), absl::Span<std::byte>(host)}) {
    EXPECT_EQ(arena->CopyIn(host.data(), outside).code(), absl::StatusCode::kOutOfRange);
    EXPECT_EQ(arena->CopyOut(outside, host.data()).code(), absl::StatusCode::kOutOfRange);
  }
  EXPECT_EQ(Arena::Unmapped(absl::AbortedError("why"))->CopyIn(host.data(), bytes).code(), absl::StatusCode::kAborted);
}

// What needs no GPU of an arena on one. The rest is in the system tests.
TEST(ArenaTest, AnArenaOnAGpuIsNotMappedAsHostMemory) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  c.attached.set_device("GPU-00000000-1111-2222-3333-444444444444");
  EXPECT_EQ(Arena::MapDevice(c.request, c.attached, Soon()).status().code(), absl::StatusCode::kFailedPrecondition);
  c.attached.mutable_arena()->set_cuda_ipc_handle(std::string(64, 'h'));
  const absl::Status host = Arena::Map(c.request, c.attached, absl::Now() + absl::Seconds(1)).status();
  EXPECT_EQ(host.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(host.message()), AllOf(HasSubstr("GPU-00000000"), HasSubstr("ArenaMapping::kDevice")));
  // A client without CUDA, or one that does not see that GPU.
  const absl::Status device = Arena::MapDevice(c.request, c.attached, Soon()).status();
  EXPECT_THAT(device.code(), testing::AnyOf(absl::StatusCode::kUnimplemented, absl::StatusCode::kNotFound)) << device;
  EXPECT_THAT(std::string(device.message()), HasSubstr("GPU-00000000"));
  for (const size_t bytes : {1, 63, 65}) {
    c.attached.mutable_arena()->set_cuda_ipc_handle(std::string(bytes, 'h'));
    const absl::Status status = Arena::MapDevice(c.request, c.attached, Soon()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(bytes, " bytes, not 64")));
  }
}

class ArenaSocketTest : public testing::Test {
 protected:
  ArenaSocketTest() { c_.attached.mutable_arena()->set_descriptor_socket(path_); }

  absl::StatusOr<std::shared_ptr<const Arena>> Map(absl::Duration bound = absl::Seconds(10)) {
    return Arena::Map(c_.request, c_.attached, absl::Now() + bound);
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_.path() + "/arena.sock";
  Case c_{v1::ROW_LAYOUT_LINEAR};
};

TEST_F(ArenaSocketTest, TheTokenBuysTheDescriptor) {
  std::string seen;
  const DescriptorServer server(path_, [&](const std::string& token) {
    seen = token;
    return Duplicate(c_.memory);
  });
  auto arena = Map();
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(seen, "secret");
  (*(*arena)->Indices(0))[0][0] = 77;
  Oracle oracle(c_);
  EXPECT_EQ(reinterpret_cast<int32_t&>(oracle.At("indices.0", {0, 0})), 77);
}

// What needs no GPU of an arena on one that is behind a descriptor.
TEST_F(ArenaSocketTest, AnAllocationIsFetchedAndNotMappedAsAFile) {
  c_.attached.set_device("GPU-00000000-1111-2222-3333-444444444444");
  v1::ArenaLayout& layout = *c_.attached.mutable_arena();
  int fetched = 0;
  const DescriptorServer server(path_, [&](const std::string& token) {
    EXPECT_EQ(token, "secret");
    ++fetched;
    return Duplicate(c_.memory);
  });
  // An allocation that is smaller than the arena.
  layout.set_allocation_bytes(layout.size_bytes() - 1);
  const absl::Status small = Arena::MapDevice(c_.request, c_.attached, Soon()).status();
  EXPECT_EQ(small.code(), absl::StatusCode::kInternal) << small;
  EXPECT_THAT(std::string(small.message()), AllOf(HasSubstr("size_bytes"), HasSubstr("allocation_bytes")));
  EXPECT_EQ(fetched, 0);
  layout.set_allocation_bytes(layout.size_bytes());
  const absl::Status host = Map().status();
  EXPECT_EQ(host.code(), absl::StatusCode::kFailedPrecondition) << host;
  EXPECT_THAT(std::string(host.message()), HasSubstr("ArenaMapping::kDevice"));
  EXPECT_EQ(fetched, 0);
  // A client without CUDA, or one that does not see that GPU.
  const absl::Status device = Arena::MapAnywhere(c_.request, c_.attached, Soon()).status();
  EXPECT_THAT(device.code(), testing::AnyOf(absl::StatusCode::kUnimplemented, absl::StatusCode::kNotFound)) << device;
  EXPECT_THAT(std::string(device.message()), HasSubstr("GPU-00000000"));
  EXPECT_EQ(fetched, 1);
  layout.clear_descriptor_socket();
  const absl::Status nowhere = Arena::MapDevice(c_.request, c_.attached, Soon()).status();
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kFailedPrecondition) << nowhere;
  EXPECT_THAT(std::string(nowhere.message()), HasSubstr("descriptor_socket is empty"));
}

TEST_F(ArenaSocketTest, DescriptorsAreNotLeaked) {
  constexpr ptrdiff_t kMaps = 50;
  const auto open_descriptors = [] {
    const std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  };
  const auto before = open_descriptors();
  {
    const DescriptorServer server(path_, [&](const std::string&) { return Duplicate(c_.memory); });
    for (ptrdiff_t i = 0; i < kMaps; ++i) ASSERT_TRUE(Map().ok());
    c_.tensor("hot.0")->set_offset_bytes(kMax);
    for (ptrdiff_t i = 0; i < kMaps; ++i) ASSERT_FALSE(Map().ok());
  }
  // gRPC's threads of other tests may close or open a few meanwhile.
  EXPECT_LT(open_descriptors(), before + kMaps / 2);
}

TEST_F(ArenaSocketTest, ARefusalCarriesItsReason) {
  const DescriptorServer server(path_, [](const std::string&) { return FileDescriptor(); });
  const absl::Status status = Map().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such token"));
}

TEST_F(ArenaSocketTest, NobodyThere) {
  EXPECT_EQ(Map().status().code(), absl::StatusCode::kUnavailable);
  c_.attached.mutable_arena()->clear_descriptor_socket();
  EXPECT_EQ(Map().status().code(), absl::StatusCode::kFailedPrecondition);
  c_.attached.mutable_arena()->set_descriptor_socket(std::string(200, 'x'));
  EXPECT_EQ(Map().status().code(), absl::StatusCode::kInternal);
}

TEST_F(ArenaSocketTest, ASilentDaemonIsWaitedForUntilTheDeadline) {
  // Listens, but never accepts.
  const FileDescriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 0), 0);
  // The first waits in receive, and the one that finds the queue full in connect.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Map(absl::Milliseconds(50)).status().code(), absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_EQ(Map(-absl::Seconds(1)).status().code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace stoker::client
