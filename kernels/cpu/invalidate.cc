// Invalidate, reset and place on the CPU. Values read from the residency are checked before they are followed.
#include "kernels/invalidate.h"

#include <cstdint>
#include <limits>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/key_table.h"

namespace stoker::kernels::cpu {
namespace {

constexpr int32_t kNone = -1;
constexpr int16_t kNoSlot = -1;

// The parts of one state row.
struct StateRow {
  StateRow(const Residency& residency, int64_t state_row)
      : slot_key(residency.slot_key + state_row * residency.hot_rows),
        lru(residency.lru + state_row * residency.hot_rows),
        slot_of(residency.slot_of == nullptr ? nullptr : residency.slot_of + state_row * residency.slot_of_stride),
        hot_rows(residency.hot_rows),
        positions(residency.slot_of_stride) {}

  // Slot of a position, or -1.
  int32_t SlotOf(int32_t position) const {
    const int32_t slot = Load(slot_of + position);
    return slot >= 0 && slot < hot_rows && Load(slot_key + slot) == position ? slot : kNone;
  }

  int32_t* slot_key;
  int16_t* lru;
  int16_t* slot_of;
  int32_t hot_rows;
  int64_t positions;
};

void DropPosition(const StateRow& state, int64_t key) {
  if (key < 0 || key >= state.positions) return;
  const auto position = static_cast<int32_t>(key);
  const int32_t slot = state.SlotOf(position);
  if (slot < 0) return;
  Store(state.slot_key + slot, kNone);
  Store(state.slot_of + position, kNoSlot);
}

bool IsKey(int64_t key) { return key >= 0 && key <= std::numeric_limits<int32_t>::max(); }

// Drops the keys [first, end) of `args`, which name one state row.
void DropPoolRows(const StateRow& state, const InvalidateArgs& args, int64_t first, int64_t end) {
  // One scan of the slots serves all the keys.
  thread_local KeyTable keys;
  keys.Begin(end - first);
  for (int64_t i = first; i < end; ++i) {
    if (const int64_t key = Load(args.keys + i); IsKey(key)) keys.Insert(static_cast<int32_t>(key), 0);
  }
  for (int32_t s = 0; s < state.hot_rows; ++s) {
    const int32_t key = Load(state.slot_key + s);
    if (key >= 0 && keys.Find(key) >= 0) Store(state.slot_key + s, kNone);
  }
}

}  // namespace

void Invalidate(const InvalidateArgs& args) {
  // Keys taken in one scan, so that the table stays in the cache and bounded.
  constexpr int64_t kMaxRun = 4096;
  const auto valid = [&](int32_t state_row) { return state_row >= 0 && state_row < args.residency.state_rows; };
  for (int64_t i = 0; i < args.count;) {
    const int32_t state_row = Load(args.state_rows + i);
    if (!valid(state_row)) {
      ++i;
      continue;
    }
    const StateRow state(args.residency, state_row);
    if (args.index_space == IndexSpace::kPosition) {
      DropPosition(state, Load(args.keys + i++));
      continue;
    }
    int64_t end = i + 1;
    while (end < args.count && end - i < kMaxRun && Load(args.state_rows + end) == state_row) ++end;
    DropPoolRows(state, args, i, end);
    i = end;
  }
}

void Reset(const ResetArgs& args) {
  for (int32_t i = 0; i < args.count; ++i) {
    const int32_t state_row = Load(args.state_rows + i);
    if (state_row < 0 || state_row >= args.residency.state_rows) continue;
    const StateRow state(args.residency, state_row);
    for (int32_t s = 0; s < state.hot_rows; ++s) {
      Store(state.slot_key + s, kNone);
      Store(state.lru + s, static_cast<int16_t>(s));
    }
    if (args.index_space == IndexSpace::kPosition) {
      for (int64_t p = 0; p < state.positions; ++p) Store(state.slot_of + p, kNoSlot);
    }
  }
}

void Place(const PlaceArgs& args) {
  const StateRow state(args.residency, args.state_row);
  for (int32_t p = args.first_position; p < args.first_position + args.count; ++p) {
    const int32_t old_key = Load(state.slot_key + p);
    if (old_key >= 0 && old_key < state.positions && Load(state.slot_of + old_key) == p) {
      Store(state.slot_of + old_key, kNoSlot);
    }
    if (const int32_t slot = state.SlotOf(p); slot >= 0) Store(state.slot_key + slot, kNone);
    Store(state.slot_key + p, p);
    Store(state.slot_of + p, static_cast<int16_t>(p));
  }
}

}  // namespace stoker::kernels::cpu
