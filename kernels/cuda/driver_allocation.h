// Allocations of the driver (cuMemCreate), mapped into one address range: what pools and arenas with a descriptor are
// made of. Another process maps them by their descriptors. To unmap and to release them waits for no stream's work,
// as cudaFree does.
//
// Thread safety: a buffer's chunks may be made and mapped by several threads, each chunk by one.
//
// Invariants:
//  1. Whatever fails, what was acquired before is given back with the buffer.
//  2. A chunk's memory lives as long as any of these: its mapping here, its descriptor, one of its mappings elsewhere.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/pool_driver.h"

namespace stoker::kernels::cuda {

constexpr size_t RoundUp(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Of an allocation on a device, or on a host NUMA node, that another process maps by a descriptor.
CUmemAllocationProp Shareable(CUmemLocationType type, int id);

// The CPU of a NUMA node, or a device, may read and write mapped memory.
CUmemAccessDesc ReadWrite(CUmemLocationType type, int id);

// OK, RESOURCE_EXHAUSTED where there is no memory, INTERNAL otherwise.
absl::Status ToStatus(const PoolDriver& driver, CUresult result, absl::string_view call, size_t bytes);

// FAILED_PRECONDITION: the driver lacks a function that AllocationBuffer takes.
absl::Status CheckFunctions(const PoolDriver& driver);
// FAILED_PRECONDITION: the device has not what the attribute tells, `what` to people, or no descriptors of allocations.
absl::Status CheckSupport(const PoolDriver& driver, int device, CUdevice_attribute attribute, absl::string_view what);

// Takes one acquired thing back when it goes, and says so when that fails.
class Owned {
 public:
  Owned() = default;
  Owned(const char* what, absl::AnyInvocable<CUresult()> give_back) : what_(what), give_back_(std::move(give_back)) {}
  ~Owned() { Reset(); }
  Owned(Owned&& other) noexcept : what_(other.what_), give_back_(std::exchange(other.give_back_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      Reset();
      what_ = other.what_;
      give_back_ = std::exchange(other.give_back_, nullptr);
    }
    return *this;
  }
  void Reset();

 private:
  const char* what_ = "";
  absl::AnyInvocable<CUresult()> give_back_;
};

class AllocationBuffer final : public Buffer {
 public:
  // Of `bytes`, in chunks of chunk_bytes, mapped_bytes in all; the latter two are multiples of the granularity.
  AllocationBuffer(std::shared_ptr<const PoolDriver> driver, size_t bytes, size_t chunk_bytes, size_t mapped_bytes);

  std::byte* data() const override { return reinterpret_cast<std::byte*>(address_); }
  size_t bytes() const override { return bytes_; }
  // None of what was imported.
  ExportedMemory exported() const override;

  // Before Map.
  absl::Status Reserve();
  // The chunk at `offset`: makes it and its descriptor, or takes what another process has made. The descriptor stays
  // the caller's.
  absl::Status Create(size_t offset, size_t bytes, const CUmemAllocationProp& properties);
  absl::Status Import(size_t offset, int descriptor, size_t bytes);
  // After both.
  absl::Status Map(size_t offset, size_t bytes, const std::vector<CUmemAccessDesc>& access);

 private:
  // One allocation of the driver. Destroyed from the last member on.
  struct Chunk {
    CUmemGenericAllocationHandle handle = 0;
    Owned allocation;  // not once it is mapped: the mapping and the descriptor keep it
    FileDescriptor file;
    Owned mapping;
  };

  void Own(Chunk* chunk);

  const std::shared_ptr<const PoolDriver> driver_;
  const size_t bytes_;
  const size_t chunk_bytes_;
  const size_t mapped_bytes_;
  CUdeviceptr address_ = 0;
  Owned range_;
  std::vector<Chunk> chunks_;  // after the range: goes first
};

}  // namespace stoker::kernels::cuda
