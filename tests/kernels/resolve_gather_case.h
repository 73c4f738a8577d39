// A resolve problem with the rows that it is about: a pool, and a hot cache in the image of the resolve.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/resolve_gather.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/resolve_case.h"
#include "tests/kernels/row_store_case.h"

namespace stoker::kernels {

class ResolveGatherCase {
 public:
  // Layers may be in any order. Pool rows at or above `pool_rows`, which resolve may name, are zero-filled.
  ResolveGatherCase(const ResolveShape& shape, const RowFormat& format, std::vector<int32_t> layers, int64_t pool_rows,
                    std::mt19937_64& rng);

  ResolveCase& resolve() { return resolve_; }
  const ResolveCase& resolve() const { return resolve_; }
  Image& pool() { return pool_; }
  // Of the backend's gather.
  void SetLimits(const CopyLimits& limits) { limits_ = limits; }

  // The gather over the copies of the two images.
  GatherCompactArgs GatherArgs(std::byte* device, std::byte* pool) const;

  // Poisons the outputs, runs one fused step on the backend and the two oracles one after the other, and compares all
  // memory. Every second step rings a doorbell at its end.
  testing::AssertionResult Step(Bench& bench);

 private:
  ResolveCase resolve_;
  Image pool_;
  const std::vector<int32_t> layers_;
  StoreCase from_;
  StoreCase to_;
  Region<uint64_t> gathered_bytes_;
  Region<uint64_t> plane_;  // a PlaneState
  Region<uint64_t> done_;
  uint64_t steps_ = 0;
  CopyLimits limits_;
};

}  // namespace stoker::kernels
