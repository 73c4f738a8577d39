#include "client/pool_mapping.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/descriptor_exchange.h"
#include "client/pool_memory.h"

namespace stoker::client {
namespace {

constexpr char kCpu[] = "cpu";  // the device that is no GPU
constexpr uint64_t kMaxRows = std::numeric_limits<int32_t>::max();
constexpr uint64_t kMaxBytes = std::numeric_limits<ptrdiff_t>::max();
// Of a layer's beginning: as the kernels want it (kernels/transfer.h).
constexpr uint64_t kLayerAlignment = 4;

// One of the things in the pool's memory.
struct Range {
  const char* field;
  uint64_t begin = 0;
  uint64_t end = 0;
};

template <typename... Parts>
absl::Status Malformed(absl::string_view field, uint64_t value, const Parts&... what) {
  return absl::InternalError(absl::StrCat("direct.", field, " ", value, " ", what...));
}

// All bytes behind the descriptors.
absl::StatusOr<uint64_t> PoolBytes(const v1::DirectAccess& direct) {
  const auto parts = static_cast<uint64_t>(direct.part_bytes_size());
  if (parts < 1 || parts > kMaxDescriptors) {
    return Malformed("part_bytes", parts, "of them: 1 to ", kMaxDescriptors, " are possible");
  }
  uint64_t bytes = 0;
  for (int i = 0; i < direct.part_bytes_size(); ++i) {
    const uint64_t part = direct.part_bytes(i);
    if (part == 0 || __builtin_add_overflow(bytes, part, &bytes) || bytes > kMaxBytes) {
      return Malformed(absl::StrCat("part_bytes[", i, "]"), part, "is 0, or the sum up to it above ", kMaxBytes);
    }
  }
  return bytes;
}

// [offset, offset + count x element_bytes), which must lie in `bytes`.
absl::StatusOr<Range> RangeOf(const char* field, uint64_t offset, uint64_t count, uint64_t element_bytes,
                              uint64_t alignment, uint64_t bytes) {
  uint64_t size = 0, end = 0;
  if (__builtin_mul_overflow(count, element_bytes, &size) || __builtin_add_overflow(offset, size, &end) ||
      end > bytes) {
    return Malformed(field, offset, "and ", count, " x ", element_bytes, " bytes reach beyond the ", bytes,
                     " bytes of part_bytes");
  }
  if (offset % alignment != 0) return Malformed(field, offset, "is no multiple of ", alignment);
  return Range{field, offset, end};
}

absl::Status CheckApart(Range (&ranges)[3]) {
  std::sort(std::begin(ranges), std::end(ranges), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < std::size(ranges); ++i) {
    if (ranges[i].begin >= ranges[i - 1].end) continue;
    return Malformed(ranges[i].field, ranges[i].begin, "lies inside ", ranges[i - 1].field, ", which ends at ",
                     ranges[i - 1].end);
  }
  return absl::OkStatus();
}

absl::StatusOr<kernels::RowStore> LayOut(const v1::PoolSpec& pool, uint64_t layer_stride, uint64_t bytes) {
  absl::StatusOr<kernels::RowFormat> format = RowFormatOf(pool);
  if (!format.ok()) return format.status();
  const uint64_t rows = uint64_t{pool.blocks()} * pool.block_rows();
  if (rows < 1 || rows > kMaxRows) {
    return absl::InternalError(
        absl::StrCat("pool.blocks ", pool.blocks(), " x block_rows ", pool.block_rows(), " is not 1 to ", kMaxRows));
  }
  if (pool.layers() < 1 || pool.layers() > kernels::kMaxLayers) {
    return absl::InternalError(absl::StrCat("pool.layers ", pool.layers(), " is not 1 to ", kernels::kMaxLayers));
  }
  absl::StatusOr<kernels::RowLayout> layout = kernels::RowLayout::Make(*format, static_cast<int64_t>(rows));
  if (!layout.ok()) return absl::InternalError(absl::StrCat("pool: ", layout.status().message()));
  const auto layer_bytes = static_cast<uint64_t>(layout->layer_bytes);
  if (layer_stride < layer_bytes || layer_stride % kLayerAlignment != 0) {
    return Malformed("layer_stride_bytes", layer_stride, "is below the ", layer_bytes,
                     " bytes of a layer, or no multiple of ", kLayerAlignment);
  }
  uint64_t last = 0, end = 0;
  if (__builtin_mul_overflow(layer_stride, uint64_t{pool.layers()} - 1, &last) ||
      __builtin_add_overflow(last, layer_bytes, &end) || end > bytes) {
    return Malformed("layer_stride_bytes", layer_stride, "x ", pool.layers(), " layers, of ", layer_bytes,
                     " bytes each, reach beyond the ", bytes, " bytes of part_bytes");
  }
  kernels::RowStore store;
  store.layout = *layout;
  store.layers = static_cast<int32_t>(pool.layers());
  store.layer_stride = static_cast<int64_t>(layer_stride);
  return store;
}

}  // namespace

absl::StatusOr<kernels::RowFormat> RowFormatOf(const v1::PoolSpec& pool) {
  kernels::RowFormat format;
  switch (pool.row_layout()) {
    case v1::ROW_LAYOUT_LINEAR:
      format.kind = kernels::RowLayoutKind::kLinear;
      break;
    case v1::ROW_LAYOUT_SPLIT_KV:
      format.kind = kernels::RowLayoutKind::kSplitKv;
      break;
    case v1::ROW_LAYOUT_DSV4_PAGED:
      format.kind = kernels::RowLayoutKind::kDsv4Paged;
      break;
    default:
      return absl::InternalError(absl::StrCat("row_layout ", static_cast<int>(pool.row_layout()), " of pool '",
                                              pool.name(), "' is unknown to this version of the client"));
  }
  // RowLayout::Make knows the limits; no number may change its sign on the way there.
  if (std::max(pool.row_bytes(), pool.v_row_bytes()) > uint32_t{kernels::kMaxRowPartBytes}) {
    return absl::InternalError(absl::StrCat("pool.row_bytes ", pool.row_bytes(), " or v_row_bytes ", pool.v_row_bytes(),
                                            " is above ", kernels::kMaxRowPartBytes));
  }
  format.row_bytes = static_cast<int32_t>(pool.row_bytes());
  format.v_row_bytes = static_cast<int32_t>(pool.v_row_bytes());
  return format;
}

absl::StatusOr<std::shared_ptr<const PoolMapping>> PoolMapping::Map(const v1::Attached& attached, absl::Time deadline) {
  if (!attached.has_direct()) {
    return absl::FailedPreconditionError(
        "the daemon gives no access to the pool: the session is not on the direct plane");
  }
  const v1::DirectAccess& direct = attached.direct();
  if (const auto bytes = PoolBytes(direct); !bytes.ok()) return bytes.status();
  absl::StatusOr<std::vector<FileDescriptor>> descriptors = FetchPoolDescriptors(
      direct.descriptor_socket(), attached.token(), static_cast<size_t>(direct.part_bytes_size()), deadline);
  if (!descriptors.ok()) return descriptors.status();
  return FromDescriptors(attached, *std::move(descriptors));
}

absl::StatusOr<std::shared_ptr<const PoolMapping>> PoolMapping::FromDescriptors(
    const v1::Attached& attached, std::vector<FileDescriptor> descriptors) {
  const v1::DirectAccess& direct = attached.direct();
  absl::StatusOr<uint64_t> bytes = PoolBytes(direct);
  if (!bytes.ok()) return bytes.status();
  if (descriptors.size() != static_cast<size_t>(direct.part_bytes_size())) {
    return Malformed("part_bytes", static_cast<uint64_t>(direct.part_bytes_size()), "of them, with ",
                     descriptors.size(), " descriptors");
  }
  absl::StatusOr<kernels::RowStore> rows = LayOut(attached.pool(), direct.layer_stride_bytes(), *bytes);
  if (!rows.ok()) return rows.status();
  if (direct.sequence_words() < 1 || direct.sequence_words() > kMaxRows) {
    return Malformed("sequence_words", direct.sequence_words(), "is not 1 to ", kMaxRows);
  }
  const auto words =
      RangeOf("sequence_words_offset_bytes", direct.sequence_words_offset_bytes(), direct.sequence_words(),
              sizeof(kernels::SequenceWord), alignof(kernels::SequenceWord), *bytes);
  if (!words.ok()) return words.status();
  const auto result = RangeOf("result_offset_bytes", direct.result_offset_bytes(), 1, sizeof(kernels::PlaneResult),
                              alignof(kernels::PlaneResult), *bytes);
  if (!result.ok()) return result.status();
  const auto rows_end = static_cast<uint64_t>(rows->layer_stride * (rows->layers - 1) + rows->layout.layer_bytes);
  Range ranges[] = {{"layer_stride_bytes", 0, rows_end}, *words, *result};
  if (absl::Status status = CheckApart(ranges); !status.ok()) return status;

  kernels::ExportedMemory exported;
  switch (direct.memory()) {
    case v1::DirectAccess::MEMORY_FILE:
      exported.kind = kernels::ExportedMemory::Kind::kFile;
      break;
    case v1::DirectAccess::MEMORY_CUDA:
      exported.kind = kernels::ExportedMemory::Kind::kCudaAllocation;
      break;
    default:
      return Malformed("memory", static_cast<uint64_t>(direct.memory()), "is unknown to this version of the client");
  }
  for (size_t i = 0; i < descriptors.size(); ++i) {
    exported.parts.push_back({descriptors[i].get(), direct.part_bytes(static_cast<int>(i))});
  }
  const bool on_host = attached.device() == kCpu;
  if (on_host && exported.kind != kernels::ExportedMemory::Kind::kFile) {
    return Malformed("memory", static_cast<uint64_t>(direct.memory()), "cannot be with device cpu");
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
      on_host ? MapPoolFiles(exported) : MapPoolForDevice(exported, attached.device());
  if (!memory.ok()) return memory.status();

  std::shared_ptr<PoolMapping> mapping(new PoolMapping);
  std::byte* const data = (*memory)->data();
  mapping->memory_ = *std::move(memory);
  mapping->rows_ = *rows;
  mapping->rows_.base = data;
  mapping->words_ = {reinterpret_cast<kernels::SequenceWord*>(data + direct.sequence_words_offset_bytes()),
                     static_cast<size_t>(direct.sequence_words())};
  mapping->result_ = reinterpret_cast<kernels::PlaneResult*>(data + direct.result_offset_bytes());
  return mapping;
}

}  // namespace stoker::client
