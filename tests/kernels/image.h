// Memory with named regions, laid out alike on the host and on a device: an operation runs on one copy of it and the
// oracle on another, and all bytes are compared, those between the regions too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace stoker::kernels {

template <typename T>
struct Region {
  // The region in the copy of the image that begins at `base`. Null for a region that was never added.
  T* In(std::byte* base) const { return count == 0 ? nullptr : reinterpret_cast<T*>(base + offset); }

  size_t offset = 0;
  size_t count = 0;
};

class Image {
 public:
  // What no operation writes by accident.
  static constexpr std::byte kPoison{0xb5};
  static constexpr size_t kAlignment = 64;

  // Adds `count` poisoned elements. Regions have poison between them.
  template <typename T>
  Region<T> Add(std::string name, size_t count) {
    const size_t offset = bytes_.size();
    const size_t end = offset + count * sizeof(T) + kAlignment;
    bytes_.resize((end + kAlignment - 1) / kAlignment * kAlignment, kPoison);
    names_.push_back({std::move(name), offset, count, sizeof(T)});
    return {offset, count};
  }

  template <typename T>
  Region<T> Add(std::string name, const std::vector<T>& values) {
    const Region<T> region = Add<T>(std::move(name), values.size());
    if (!values.empty()) std::memcpy(bytes_.data() + region.offset, values.data(), values.size() * sizeof(T));
    return region;
  }

  template <typename T>
  T* At(const Region<T>& region) {
    return region.In(bytes_.data());
  }

  template <typename T>
  std::vector<T> Values(const Region<T>& region) const {
    std::vector<T> values(region.count);
    if (region.count > 0) std::memcpy(values.data(), bytes_.data() + region.offset, region.count * sizeof(T));
    return values;
  }

  template <typename T>
  void Poison(const Region<T>& region) {
    std::memset(bytes_.data() + region.offset, static_cast<int>(kPoison), region.count * sizeof(T));
  }

  std::byte* data() { return bytes_.data(); }
  size_t bytes() const { return bytes_.size(); }

  // Success where all bytes are equal, otherwise the first difference: region, index, both values.
  testing::AssertionResult Equals(const Image& want) const;

 private:
  struct Name {
    std::string name;
    size_t offset;
    size_t count;
    size_t element_bytes;
  };

  std::vector<std::byte> bytes_;
  std::vector<Name> names_;
};

}  // namespace stoker::kernels
