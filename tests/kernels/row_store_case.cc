#include "tests/kernels/row_store_case.h"

namespace stoker::kernels {

const std::vector<FormatCase>& FormatCases() {
  static const auto* const cases = [] {
    auto* all = new std::vector<FormatCase>;
    for (const int32_t bytes : {4, 16, 20, 656, 1040, 1152}) {
      all->push_back({"linear_" + std::to_string(bytes), {.kind = RowLayoutKind::kLinear, .row_bytes = bytes}});
      all->push_back({"stride_" + std::to_string(bytes),
                      {.kind = RowLayoutKind::kLinear, .row_bytes = bytes, .row_stride = bytes + 12}});
      all->push_back({"split_" + std::to_string(bytes),
                      {.kind = RowLayoutKind::kSplitKv, .row_bytes = bytes, .v_row_bytes = bytes}});
    }
    all->push_back({"split_1040_656", {.kind = RowLayoutKind::kSplitKv, .row_bytes = 1040, .v_row_bytes = 656}});
    all->push_back({"split_16_20", {.kind = RowLayoutKind::kSplitKv, .row_bytes = 16, .v_row_bytes = 20}});
    all->push_back({"linear_65536", {.kind = RowLayoutKind::kLinear, .row_bytes = kMaxRowPartBytes}});
    all->push_back({"dsv4", {.kind = RowLayoutKind::kDsv4Paged, .row_bytes = 584}});
    return all;
  }();
  return *cases;
}

StoreCase::StoreCase(Image& image, const std::string& name, const RowLayout& row_layout, int32_t layer_count,
                     int64_t layer_gap, std::mt19937_64& rng)
    : layout(row_layout), layers(layer_count), layer_stride(row_layout.layer_bytes + layer_gap) {
  std::vector<uint8_t> random(layer_stride * layers);
  for (uint8_t& byte : random) byte = static_cast<uint8_t>(rng());
  bytes = image.Add(name, random);
}

RowStore StoreCase::In(std::byte* base) const {
  return {.base = reinterpret_cast<std::byte*>(bytes.In(base)),
          .layer_stride = layer_stride,
          .layers = layers,
          .layout = layout};
}

}  // namespace stoker::kernels
