// Invalidate, reset and place on the CPU. Values read from the residency are checked before they are followed.
#include "kernels/invalidate.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/key_index.h"

namespace stoker::kernels::cpu {
namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// The parts of one state row.
struct StateRow {
  StateRow(const Residency& residency, int64_t state_row)
      : slot_key(residency.slot_key + state_row * residency.hot_rows),
        lru(residency.lru + state_row * residency.hot_rows),
        hot_rows(residency.hot_rows) {}

  int32_t* slot_key;
  int16_t* lru;
  int32_t hot_rows;
};

// Drops the keys [first, end) of `args`, which name one state row.
void Drop(const StateRow& state, const InvalidateArgs& args, int64_t first, int64_t end) {
  thread_local const std::unique_ptr<KeyIndex> thread_index = std::make_unique<KeyIndex>();
  KeyIndex& index = *thread_index;
  index.Build(static_cast<int32_t>(end - first), 0, [&](int32_t i) {
    const int64_t key = Load(args.keys + first + i);
    return key >= 0 && key <= kMaxInt32 ? static_cast<int32_t>(key) : kNone;
  });
  for (int32_t s = 0; s < state.hot_rows; ++s) {
    const int32_t key = Load(state.slot_key + s);
    if (key >= 0 && index.Find(key) >= 0) Store(state.slot_key + s, kNone);
  }
}

}  // namespace

void Invalidate(const InvalidateArgs& args) {
  for (int64_t i = 0; i < args.count;) {
    const int32_t state_row = Load(args.state_rows + i);
    int64_t end = i + 1;
    // One scan of the slots serves as many keys as an index takes.
    const int64_t limit = std::min(args.count, i + KeyIndex::kMaxKeys);
    while (end < limit && Load(args.state_rows + end) == state_row) ++end;
    if (state_row >= 0 && state_row < args.residency.state_rows) {
      Drop(StateRow(args.residency, state_row), args, i, end);
    }
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
  }
}

void Place(const PlaceArgs& args) {
  const StateRow state(args.residency, args.state_row);
  const int32_t first = args.first_position;
  const int32_t end = first + args.count;
  for (int32_t s = 0; s < state.hot_rows; ++s) {
    if (s >= first && s < end) {
      Store(state.slot_key + s, s);
    } else if (const int32_t key = Load(state.slot_key + s); key >= first && key < end) {
      Store(state.slot_key + s, kNone);
    }
  }
}

}  // namespace stoker::kernels::cpu
