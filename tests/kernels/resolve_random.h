// Random resolve problems: shapes, tables and inputs. Everything follows from the generator.
#pragma once

#include <cstdint>
#include <random>

#include "tests/kernels/resolve_case.h"

namespace stoker::kernels {

int32_t Draw(std::mt19937_64& rng, int32_t low, int32_t high);
bool Chance(std::mt19937_64& rng, double share);

enum class RandomSize {
  kSmall,  // up to 100 entries
  kLarge,  // 300 to 3,000 entries, up to 9,000 slots and 100,000 positions
};

// A third of them is Plain.
ResolveShape RandomShape(std::mt19937_64& rng, RandomSize size);
// Number of keys that RandomInputs draws from.
int32_t KeyLimit(const ResolveShape& shape);
// Block, resident and allowed tables, a tenth of them out of range.
void RandomTables(ResolveCase& c, std::mt19937_64& rng);
// One step: state rows in runs, lengths, entries of every kind.
void RandomInputs(ResolveCase& c, std::mt19937_64& rng);
// Random keys, repeated keys and a broken order in the residency.
void CorruptState(ResolveCase& c, std::mt19937_64& rng);

}  // namespace stoker::kernels
