// Invalidate: drops written keys from residency. Seed kernel: vLLM hisparse_invalidate_written_slots.
//
// Every slot that holds the key stays where it is in the LRU order and becomes empty; its row is not touched. The slots
// of a state row are scanned once for many keys: keys of one state row belong side by side.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/resolve.h"

namespace stoker::kernels {

struct InvalidateArgs {
  Residency residency;
  // Key i is dropped from state row state_rows[i]; pairs with a negative or too large state row, or a negative key, are
  // skipped.
  const int32_t* state_rows = nullptr;  // device memory [count]
  const int64_t* keys = nullptr;        // device memory [count]: positions or pool rows
  int64_t count = 0;
};

// Empties whole state rows: no keys, and the LRU order 0, 1, 2, ...
struct ResetArgs {
  Residency residency;
  const int32_t* state_rows = nullptr;  // device memory [count]
  int32_t count = 0;
};

// Marks position p as being in slot p, for rows that a load has put there: any other key leaves slot p, p leaves every
// other slot, and the LRU order is kept.
struct PlaceArgs {
  Residency residency;  // by position
  int32_t state_row = 0;
  int32_t first_position = 0;
  int32_t count = 0;  // first_position + count <= hot_rows
};

absl::Status Validate(const InvalidateArgs& args);
absl::Status Validate(const ResetArgs& args);
absl::Status Validate(const PlaceArgs& args);

}  // namespace stoker::kernels
