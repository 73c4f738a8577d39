#include "tests/kernels/image.h"

#include <algorithm>

namespace stoker::kernels {
namespace {

int64_t ReadElement(const std::byte* address, size_t bytes) {
  int64_t value = 0;
  std::memcpy(&value, address, std::min(bytes, sizeof(value)));
  if (bytes == 2) return static_cast<int16_t>(value);
  if (bytes == 4) return static_cast<int32_t>(value);
  return value;
}

}  // namespace

testing::AssertionResult Image::Equals(const Image& want) const {
  if (bytes_.size() != want.bytes_.size()) return testing::AssertionFailure() << "images of different sizes";
  const auto differ = std::mismatch(bytes_.begin(), bytes_.end(), want.bytes_.begin());
  if (differ.first == bytes_.end()) return testing::AssertionSuccess();
  const size_t offset = differ.first - bytes_.begin();
  for (const Name& name : names_) {
    if (offset < name.offset || offset >= name.offset + name.count * name.element_bytes) continue;
    const size_t index = (offset - name.offset) / name.element_bytes;
    const size_t at = name.offset + index * name.element_bytes;
    return testing::AssertionFailure() << name.name << "[" << index << "] is "
                                       << ReadElement(&bytes_[at], name.element_bytes) << ", the oracle says "
                                       << ReadElement(&want.bytes_[at], name.element_bytes);
  }
  return testing::AssertionFailure() << "byte " << offset << ", which belongs to no region, was written";
}

}  // namespace stoker::kernels
