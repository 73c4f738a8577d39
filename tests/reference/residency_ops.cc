#include <cstdint>

#include "tests/reference/reference.h"

namespace stoker::reference {
namespace {

using kernels::Residency;

int32_t& KeyAt(const Residency& residency, int64_t state_row, int64_t slot) {
  return residency.slot_key[state_row * residency.hot_rows + slot];
}

}  // namespace

void Invalidate(const kernels::InvalidateArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t state_row = args.state_rows[i];
    const int64_t key = args.keys[i];
    if (state_row < 0 || state_row >= args.residency.state_rows || key < 0) continue;
    for (int64_t s = 0; s < args.residency.hot_rows; ++s) {
      if (KeyAt(args.residency, state_row, s) == key) KeyAt(args.residency, state_row, s) = -1;
    }
  }
}

void Reset(const kernels::ResetArgs& args) {
  for (int32_t i = 0; i < args.count; ++i) {
    const int64_t state_row = args.state_rows[i];
    if (state_row < 0 || state_row >= args.residency.state_rows) continue;
    for (int64_t s = 0; s < args.residency.hot_rows; ++s) {
      KeyAt(args.residency, state_row, s) = -1;
      args.residency.lru[state_row * args.residency.hot_rows + s] = static_cast<int16_t>(s);
    }
  }
}

void Place(const kernels::PlaceArgs& args) {
  for (int64_t p = args.first_position; p < int64_t{args.first_position} + args.count; ++p) {
    for (int64_t s = 0; s < args.residency.hot_rows; ++s) {
      if (KeyAt(args.residency, args.state_row, s) == p) KeyAt(args.residency, args.state_row, s) = -1;
    }
    KeyAt(args.residency, args.state_row, p) = static_cast<int32_t>(p);
  }
}

}  // namespace stoker::reference
