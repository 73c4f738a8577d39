// Collects the first wrong field of an argument struct. The messages say "<operation>.<field>: <value> <limit>".
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace stoker::kernels {

class FieldCheck {
 public:
  explicit FieldCheck(absl::string_view operation) : operation_(operation) {}

  FieldCheck& InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
      Fail(field, absl::StrCat(value, " is outside [", low, ", ", high, "]"));
    }
    return *this;
  }

  FieldCheck& AtLeast(absl::string_view field, int64_t value, int64_t low, absl::string_view low_name) {
    if (value < low) Fail(field, absl::StrCat(value, " is below ", low_name, " = ", low));
    return *this;
  }

  FieldCheck& AtMost(absl::string_view field, int64_t value, int64_t high, absl::string_view high_name) {
    if (value > high) Fail(field, absl::StrCat(value, " is above ", high_name, " = ", high));
    return *this;
  }

  FieldCheck& MultipleOf(absl::string_view field, int64_t value, int64_t factor) {
    if (value % factor != 0) Fail(field, absl::StrCat(value, " is not a multiple of ", factor));
    return *this;
  }

  // A pointer that may be null, but not misaligned.
  template <typename T>
  FieldCheck& Aligned(absl::string_view field, const T* address, size_t alignment = alignof(T)) {
    if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
      Fail(field,
           absl::StrCat("0x", absl::Hex(reinterpret_cast<uintptr_t>(address)), " is not a multiple of ", alignment));
    }
    return *this;
  }

  template <typename T>
  FieldCheck& Required(absl::string_view field, const T* address, size_t alignment = alignof(T)) {
    if (address == nullptr) Fail(field, "is null, which is allowed for 0 rows alone");
    return Aligned(field, address, alignment);
  }

  FieldCheck& Holds(absl::string_view field, bool holds, absl::string_view otherwise) {
    if (!holds) Fail(field, std::string(otherwise));
    return *this;
  }

  // Puts "<part>." before the fields of the checks that follow; "" ends it. Costs nothing unless a check fails, because
  // a backend checks on its way to the device.
  FieldCheck& Within(absl::string_view part) {
    part_ = part;
    return *this;
  }

  bool ok() const { return status_.ok(); }
  absl::Status status() const { return status_; }

 private:
  void Fail(absl::string_view field, std::string what) {
    if (!status_.ok()) return;
    status_ =
        absl::InvalidArgumentError(absl::StrCat(operation_, ".", part_, part_.empty() ? "" : ".", field, ": ", what));
  }

  absl::string_view operation_;
  absl::string_view part_;
  absl::Status status_;
};

}  // namespace stoker::kernels
