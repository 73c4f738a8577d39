#include <cstdint>

#include "tests/reference/reference.h"

namespace stoker::reference {
namespace {

using kernels::IndexSpace;
using kernels::Residency;

int32_t& KeyAt(const Residency& residency, int64_t state_row, int64_t slot) {
  return residency.slot_key[state_row * residency.hot_rows + slot];
}

int16_t& SlotOf(const Residency& residency, int64_t state_row, int64_t position) {
  return residency.slot_of[state_row * residency.slot_of_stride + position];
}

// Slot of a position by the contract: both sides must agree. -1 for none.
int64_t FindPosition(const Residency& residency, int64_t state_row, int64_t position) {
  for (int64_t s = 0; s < residency.hot_rows; ++s) {
    if (KeyAt(residency, state_row, s) == position && SlotOf(residency, state_row, position) == s) return s;
  }
  return -1;
}

}  // namespace

void Invalidate(const kernels::InvalidateArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const int64_t state_row = args.state_rows[i];
    const int64_t key = args.keys[i];
    if (state_row < 0 || state_row >= args.residency.state_rows || key < 0) continue;
    if (args.index_space == IndexSpace::kPosition) {
      if (key >= args.residency.slot_of_stride) continue;
      const int64_t slot = FindPosition(args.residency, state_row, key);
      if (slot < 0) continue;
      KeyAt(args.residency, state_row, slot) = -1;
      SlotOf(args.residency, state_row, key) = -1;
    } else {
      for (int64_t s = 0; s < args.residency.hot_rows; ++s) {
        if (KeyAt(args.residency, state_row, s) == key) KeyAt(args.residency, state_row, s) = -1;
      }
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
    if (args.index_space != IndexSpace::kPosition) continue;
    for (int64_t p = 0; p < args.residency.slot_of_stride; ++p) SlotOf(args.residency, state_row, p) = -1;
  }
}

void Place(const kernels::PlaceArgs& args) {
  for (int64_t p = args.first_position; p < int64_t{args.first_position} + args.count; ++p) {
    // The key that is in slot p leaves it ...
    const int64_t old_key = KeyAt(args.residency, args.state_row, p);
    if (old_key >= 0 && old_key < args.residency.slot_of_stride &&
        SlotOf(args.residency, args.state_row, old_key) == p) {
      SlotOf(args.residency, args.state_row, old_key) = -1;
    }
    // ... and p leaves the slot that it is in.
    const int64_t slot = FindPosition(args.residency, args.state_row, p);
    if (slot >= 0) KeyAt(args.residency, args.state_row, slot) = -1;
    KeyAt(args.residency, args.state_row, p) = static_cast<int32_t>(p);
    SlotOf(args.residency, args.state_row, p) = static_cast<int16_t>(p);
  }
}

}  // namespace stoker::reference
