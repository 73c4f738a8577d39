#include "client/pool_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/descriptor_exchange.h"
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
constexpr uint64_t kWords = 16;

uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A pool as the daemon lays it out, in `parts` files: 4 layers of 512 rows, words, result.
struct Case {
  explicit Case(v1::RowLayout row_layout, int parts = 1) {
    *attached.mutable_pool() = FakePoolSpec("p", row_layout);
    attached.set_device("cpu");
    attached.set_token("secret");
    const auto layout = kernels::RowLayout::Make(*RowFormatOf(attached.pool()), 512);
    EXPECT_TRUE(layout.ok()) << layout.status();
    layer_bytes = static_cast<uint64_t>(layout->layer_bytes);
    v1::DirectAccess& direct = *attached.mutable_direct();
    direct.set_memory(v1::DirectAccess::MEMORY_FILE);
    direct.set_layer_stride_bytes(RoundUp(layer_bytes, 256));
    direct.set_sequence_words_offset_bytes(4 * direct.layer_stride_bytes());
    direct.set_sequence_words(kWords);
    direct.set_result_offset_bytes(direct.sequence_words_offset_bytes() + kWords * 16);
    // So that nothing lies behind the result but the rest of its page.
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    bytes = RoundUp(direct.result_offset_bytes() + sizeof(kernels::PlaneResult), page);
    for (int i = 0; i < parts; ++i) {
      const uint64_t left =
          bytes - std::accumulate(direct.part_bytes().begin(), direct.part_bytes().end(), uint64_t{0});
      const uint64_t part = i + 1 == parts ? left : RoundUp(bytes / static_cast<uint64_t>(parts) / 2, page);
      direct.add_part_bytes(part);
      files.push_back(MakeMemory(part));
    }
  }

  v1::DirectAccess& direct() { return *attached.mutable_direct(); }

  absl::StatusOr<std::shared_ptr<const PoolMapping>> Open() {
    std::vector<FileDescriptor> descriptors;
    for (const FileDescriptor& file : files) descriptors.push_back(Duplicate(file));
    return PoolMapping::FromDescriptors(attached, std::move(descriptors));
  }

  uint64_t layer_bytes = 0;
  uint64_t bytes = 0;
  v1::Attached attached;
  std::vector<FileDescriptor> files;
};

// Of shared memory, which is what a mapping could leave open: sockets of the test's server come and go meanwhile.
size_t OpenDescriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(entry.path(), gone).string().starts_with("/memfd:");
  }
  return count;
}

// Every byte of the mapping is the files' byte at its place: parts lie side by side, in order.
TEST(PoolMappingTest, PartsLieSideBySide) {
  for (const v1::RowLayout row_layout : kLayouts) {
    for (const int parts : {1, 2, 3, 7}) {
      Case c(row_layout, parts);
      const size_t before = OpenDescriptors();
      const auto mapping = c.Open();
      ASSERT_TRUE(mapping.ok()) << mapping.status();
      EXPECT_EQ(OpenDescriptors(), before);  // the mapping needs none
      EXPECT_EQ((*mapping)->bytes(), c.bytes);
      const kernels::RowStore& rows = (*mapping)->rows();
      EXPECT_EQ(rows.layers, 4);
      EXPECT_EQ(rows.layout.rows, 512);
      EXPECT_EQ(static_cast<uint64_t>(rows.layer_stride), c.direct().layer_stride_bytes());
      std::byte* const base = rows.base;
      EXPECT_EQ(reinterpret_cast<std::byte*>((*mapping)->words().data()),
                base + c.direct().sequence_words_offset_bytes());
      EXPECT_EQ((*mapping)->words().size(), kWords);
      EXPECT_EQ(reinterpret_cast<std::byte*>((*mapping)->result()), base + c.direct().result_offset_bytes());
      uint64_t at = 0;
      for (int i = 0; i < parts; ++i) {
        const uint64_t end = at + c.direct().part_bytes(i) - 1;
        base[at] = std::byte{0x5a};
        base[end] = std::byte{0xa5};
        unsigned char byte = 0;
        ASSERT_EQ(pread(c.files[static_cast<size_t>(i)].get(), &byte, 1, 0), 1);
        EXPECT_EQ(byte, 0x5a);
        ASSERT_EQ(pread(c.files[static_cast<size_t>(i)].get(), &byte, 1, static_cast<off_t>(end - at)), 1);
        EXPECT_EQ(byte, 0xa5);
        at = end + 1;
      }
      // The last row of the last layer, and the last bytes of the result, can be touched.
      *rows.At(3, rows.layout.part_count - 1, 511) = std::byte{1};
      (*mapping)->result()->counters[kernels::kPlaneCounters - 1] = 1;
      (*mapping)->words()[kWords - 1].writer = 1;
    }
  }
}

TEST(PoolMappingTest, MalformedAccessIsRefused) {
  struct Malformed {
    std::function<void(Case&)> spoil;
    std::vector<std::string> message;
  };
  const std::vector<Malformed> all = {
      {[](Case& c) {
         c.direct().clear_part_bytes();
         c.files.clear();
       },
       {"part_bytes 0", "1 to 253"}},
      {[](Case& c) {
         for (int i = 0; i < 253; ++i) c.direct().add_part_bytes(4096);
       },
       {"part_bytes 254", "1 to 253"}},
      {[](Case& c) { c.direct().add_part_bytes(4096); }, {"part_bytes 2", "1 descriptors"}},
      {[](Case& c) { c.files.push_back(Duplicate(c.files[0])); }, {"part_bytes 1", "2 descriptors"}},
      {[](Case& c) { c.direct().set_part_bytes(0, 0); }, {"part_bytes[0] 0"}},
      {[](Case& c) { c.direct().set_part_bytes(0, kMax); }, {"part_bytes[0]", "above"}},
      {[](Case& c) { c.direct().set_part_bytes(0, kMax / 2 + 1); }, {"part_bytes[0]", "above"}},
      {[](Case& c) {
         for (int i = 0; i < 3; ++i) c.direct().add_part_bytes(kMax / 2);
       },
       {"part_bytes[1]", "above"}},
      // More than the file has: by a byte, by a page.
      {[](Case& c) { c.direct().set_part_bytes(0, c.bytes + 1); }, {"part_bytes[0]", "behind the descriptor"}},
      {[](Case& c) { c.direct().set_part_bytes(0, c.bytes + 4096); }, {"part_bytes[0]", "behind the descriptor"}},
      {[](Case& c) { c.direct().set_part_bytes(0, kMax / 2); }, {"part_bytes[0]", "behind the descriptor"}},
      {[](Case& c) { c.direct().set_part_bytes(0, c.bytes - 1); }, {"part_bytes[0]", "whole number of pages"}},
      {[](Case& c) { EXPECT_EQ(ftruncate(c.files[0].get(), static_cast<off_t>(c.bytes - 1)), 0); },
       {"part_bytes[0]", "behind the descriptor"}},
      // Less than what lies there.
      {[](Case& c) { c.direct().set_part_bytes(0, c.bytes - 4096); }, {"reach beyond"}},
      {[](Case& c) { c.direct().set_part_bytes(0, 4096); }, {"layer_stride_bytes", "reach beyond the 4096 bytes"}},

      {[](Case& c) { c.direct().set_layer_stride_bytes(0); }, {"layer_stride_bytes 0", "below"}},
      {[](Case& c) { c.direct().set_layer_stride_bytes(c.layer_bytes - 1); }, {"layer_stride_bytes", "below"}},
      {[](Case& c) { c.direct().set_layer_stride_bytes(c.layer_bytes + 1); }, {"layer_stride_bytes", "multiple of 4"}},
      {[](Case& c) { c.direct().set_layer_stride_bytes(c.direct().layer_stride_bytes() + 4); }, {"lies inside"}},
      {[](Case& c) { c.direct().set_layer_stride_bytes((kMax / 3 + 1) & ~uint64_t{3}); },
       {"layer_stride_bytes", "reach beyond"}},
      {[](Case& c) { c.direct().set_layer_stride_bytes(kMax & ~uint64_t{3}); }, {"layer_stride_bytes", "reach beyond"}},

      {[](Case& c) { c.direct().set_sequence_words(0); }, {"sequence_words 0", "not 1 to 2147483647"}},
      {[](Case& c) { c.direct().set_sequence_words(kWords + 1); }, {"lies inside"}},
      {[](Case& c) { c.direct().set_sequence_words(uint64_t{1} << 31); }, {"sequence_words 2147483648"}},
      {[](Case& c) { c.direct().set_sequence_words((uint64_t{1} << 60) + 1); }, {"sequence_words"}},
      {[](Case& c) { c.direct().set_sequence_words((uint64_t{1} << 31) - 1); },
       {"sequence_words_offset_bytes", "reach beyond"}},
      {[](Case& c) { c.direct().set_sequence_words_offset_bytes(c.direct().sequence_words_offset_bytes() + 1); },
       {"sequence_words_offset_bytes", "multiple of 16"}},
      {[](Case& c) { c.direct().set_sequence_words_offset_bytes(c.direct().sequence_words_offset_bytes() - 1); },
       {"sequence_words_offset_bytes", "multiple of 16"}},
      {[](Case& c) {
         c.direct().set_sequence_words_offset_bytes(3 * c.direct().layer_stride_bytes() + c.layer_bytes / 16 * 16 - 16);
       },
       {"sequence_words_offset_bytes", "lies inside layer_stride_bytes"}},
      {[](Case& c) { c.direct().set_sequence_words_offset_bytes(0); }, {"lies inside"}},
      {[](Case& c) { c.direct().set_sequence_words_offset_bytes(c.bytes - kWords * 16 + 16); },
       {"sequence_words_offset_bytes", "reach beyond"}},
      {[](Case& c) { c.direct().set_sequence_words_offset_bytes(kMax - 15); },
       {"sequence_words_offset_bytes", "reach beyond"}},

      {[](Case& c) { c.direct().set_result_offset_bytes(c.direct().result_offset_bytes() - 1); },
       {"result_offset_bytes", "multiple of 8"}},
      {[](Case& c) { c.direct().set_result_offset_bytes(c.direct().result_offset_bytes() + 1); },
       {"result_offset_bytes", "multiple of 8"}},
      {[](Case& c) { c.direct().set_result_offset_bytes(c.direct().result_offset_bytes() - 8); },
       {"result_offset_bytes", "lies inside sequence_words_offset_bytes"}},
      {[](Case& c) { c.direct().set_result_offset_bytes(0); }, {"lies inside"}},
      {[](Case& c) { c.direct().set_result_offset_bytes(c.bytes - sizeof(kernels::PlaneResult) + 8); },
       {"result_offset_bytes", "reach beyond"}},
      {[](Case& c) { c.direct().set_result_offset_bytes(kMax - 7); }, {"result_offset_bytes", "reach beyond"}},

      {[](Case& c) { c.direct().set_memory(v1::DirectAccess::MEMORY_UNSPECIFIED); }, {"memory 0", "unknown"}},
      {[](Case& c) { c.direct().set_memory(static_cast<v1::DirectAccess::Memory>(7)); }, {"memory 7", "unknown"}},
      {[](Case& c) { c.direct().set_memory(v1::DirectAccess::MEMORY_CUDA); }, {"memory 2", "device cpu"}},

      {[](Case& c) { c.attached.mutable_pool()->set_layers(0); }, {"pool.layers 0", "1 to 1024"}},
      {[](Case& c) { c.attached.mutable_pool()->set_layers(1025); }, {"pool.layers 1025"}},
      {[](Case& c) { c.attached.mutable_pool()->set_layers(5); }, {"reach beyond"}},
      {[](Case& c) { c.attached.mutable_pool()->set_blocks(0); }, {"pool.blocks 0"}},
      {[](Case& c) { c.attached.mutable_pool()->set_blocks(9); }, {"layer_stride_bytes", "below"}},
      {[](Case& c) { c.attached.mutable_pool()->set_blocks(1u << 25); }, {"pool.blocks", "2147483647"}},
      {[](Case& c) { c.attached.mutable_pool()->set_blocks(0xffffffffu); }, {"pool.blocks", "2147483647"}},
      {[](Case& c) { c.attached.mutable_pool()->set_block_rows(0); }, {"block_rows 0"}},
      {[](Case& c) { c.attached.mutable_pool()->set_row_bytes(0); }, {"row_bytes"}},
      {[](Case& c) { c.attached.mutable_pool()->set_row_bytes(0x80000000u); }, {"row_bytes 2147483648"}},
      {[](Case& c) { c.attached.mutable_pool()->set_v_row_bytes(0xffffffffu); }, {"row_bytes"}},
      {[](Case& c) { c.attached.mutable_pool()->set_row_layout(v1::ROW_LAYOUT_UNSPECIFIED); }, {"row_layout 0"}},
      {[](Case& c) { c.attached.mutable_pool()->set_row_layout(static_cast<v1::RowLayout>(9)); }, {"row_layout 9"}},
  };
  for (size_t i = 0; i < all.size(); ++i) {
    Case c(v1::ROW_LAYOUT_LINEAR);
    ASSERT_TRUE(c.Open().ok());
    all[i].spoil(c);
    const size_t before = OpenDescriptors();
    const absl::Status status = c.Open().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << i << ": " << status;
    for (const std::string& part : all[i].message) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << i;
    }
    EXPECT_EQ(OpenDescriptors(), before) << i;
  }
}

// Each number off by one, to either side, is refused or leaves everything inside.
TEST(PoolMappingTest, EveryFieldOffByOne) {
  using Set = void (v1::DirectAccess::*)(uint64_t);
  using Get = uint64_t (v1::DirectAccess::*)() const;
  const std::pair<Get, Set> fields[] = {
      {&v1::DirectAccess::layer_stride_bytes, &v1::DirectAccess::set_layer_stride_bytes},
      {&v1::DirectAccess::sequence_words_offset_bytes, &v1::DirectAccess::set_sequence_words_offset_bytes},
      {&v1::DirectAccess::sequence_words, &v1::DirectAccess::set_sequence_words},
      {&v1::DirectAccess::result_offset_bytes, &v1::DirectAccess::set_result_offset_bytes}};
  for (const v1::RowLayout row_layout : kLayouts) {
    for (const auto& [get, set] : fields) {
      for (const uint64_t by : {uint64_t{1}, kMax, uint64_t{4}, kMax - 3, uint64_t{8}, kMax - 7, uint64_t{16},
                                kMax - 15, uint64_t{256}, kMax - 255, uint64_t{1} << 63}) {
        Case c(row_layout, 2);
        (c.direct().*set)((c.direct().*get)() + by);
        const auto mapping = c.Open();
        if (!mapping.ok()) {
          EXPECT_EQ(mapping.status().code(), absl::StatusCode::kInternal) << mapping.status();
          continue;
        }
        const auto begin = reinterpret_cast<uintptr_t>((*mapping)->rows().base);
        const uintptr_t end = begin + c.bytes;
        EXPECT_LE(reinterpret_cast<uintptr_t>((*mapping)->words().data() + (*mapping)->words().size()), end);
        EXPECT_LE(reinterpret_cast<uintptr_t>((*mapping)->result() + 1), end);
        const kernels::RowStore& rows = (*mapping)->rows();
        EXPECT_LE(reinterpret_cast<uintptr_t>(rows.At(3, rows.layout.part_count - 1, 511)) +
                      static_cast<uintptr_t>(rows.layout.part[rows.layout.part_count - 1].bytes),
                  reinterpret_cast<uintptr_t>((*mapping)->words().data()));
      }
    }
  }
}

// A descriptor server that sends several is the daemon's own: tests/server/descriptor_socket_test.cc.
TEST(PoolMappingTest, FetchesOneDescriptorAndTellsRefusals) {
  const TemporaryDirectory directory;
  Case c(v1::ROW_LAYOUT_LINEAR);
  c.direct().set_descriptor_socket(directory.path() + "/s");
  std::string asked;
  const DescriptorServer server(directory.path() + "/s", [&](const std::string& line) {
    asked = line;
    return line == "pool secret" ? Duplicate(c.files[0]) : FileDescriptor();
  });
  const auto mapping = PoolMapping::Map(c.attached, absl::Now() + absl::Seconds(10));
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_EQ((*mapping)->bytes(), c.bytes);

  c.attached.set_token("other");
  const absl::Status refused = PoolMapping::Map(c.attached, absl::Now() + absl::Seconds(10)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no such token"));
  EXPECT_EQ(asked, "pool other");

  // Another number of descriptors than the reply of Attach says.
  c.attached.set_token("secret");
  c.direct().add_part_bytes(4096);
  const size_t before = OpenDescriptors();
  EXPECT_GT(before, 0u);
  const absl::Status fewer = PoolMapping::Map(c.attached, absl::Now() + absl::Seconds(10)).status();
  EXPECT_EQ(fewer.code(), absl::StatusCode::kInternal) << fewer;
  EXPECT_THAT(std::string(fewer.message()), HasSubstr("1 descriptors came, not 2"));
  // The server's own goes when it has sent it, on its thread.
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (OpenDescriptors() != before && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(OpenDescriptors(), before);

  // Nothing is asked for where the reply cannot be.
  asked.clear();
  c.direct().set_part_bytes(0, 0);
  EXPECT_EQ(PoolMapping::Map(c.attached, absl::Now() + absl::Seconds(10)).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(asked, "");
  c.attached.clear_direct();
  EXPECT_EQ(PoolMapping::Map(c.attached, absl::Now() + absl::Seconds(10)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(PoolMappingTest, AGpuNeedsABuildWithCuda) {
  Case c(v1::ROW_LAYOUT_LINEAR);
  c.attached.set_device("GPU-00000000-0000-0000-0000-000000000000");
  const absl::Status status = c.Open().status();
  // With CUDA: there is no such GPU.
  EXPECT_TRUE(absl::IsUnimplemented(status) || absl::IsNotFound(status)) << status;
}

}  // namespace
}  // namespace stoker::client
