// Rows in a pool, and whether the GPU sees them: for tests of pool memory, in this process and in another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"

namespace stoker::kernels::cuda {

// Writes rows of 656 bytes whose words tell where they are, one at the begin of each MiB, and two across each GiB.
void WriteRows(std::byte* pool, size_t bytes);

// Gathers these rows on the device. How many came wrong, -1 when the gather failed.
int64_t CountWrongRows(Backend& backend, std::byte* pool, size_t bytes);

}  // namespace stoker::kernels::cuda
