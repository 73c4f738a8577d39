// Row stores of every layout for the tests of gather and transfer.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/row_layout.h"
#include "tests/kernels/image.h"

namespace stoker::kernels {

struct FormatCase {
  std::string name;
  RowFormat format;
};

// Rows of 4, 16, 20, 656, 1040 and 1152 bytes in the layouts that have a row size, the fixed one, two widths, a stride.
const std::vector<FormatCase>& FormatCases();

// A store inside an image, with random bytes in it and in the gaps of its layout.
struct StoreCase {
  StoreCase(Image& image, const std::string& name, const RowLayout& row_layout, int32_t layer_count, int64_t layer_gap,
            std::mt19937_64& rng);

  RowStore In(std::byte* base) const;

  RowLayout layout;
  int32_t layers;
  int64_t layer_stride;
  Region<uint8_t> bytes;
};

}  // namespace stoker::kernels
