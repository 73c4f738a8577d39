// A tensor of a test's engine in shared memory, as the engine sees it: where rows lie is computed from the request by
// the formula of sessions.proto, apart from the daemon's code.
//
// Thread safety: one thread for each object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "client/arena.h"
#include "client/session.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::system_test {

// The geometry of a tensor with these parts of these layers (empty: all), dense: [layer][part][row].
v1::RegisterTensorRequest DenseTensor(const v1::PoolSpec& pool, uint32_t rows, std::vector<uint32_t> layers = {},
                                      std::vector<uint32_t> parts = {});
uint32_t PartBytesOf(const v1::PoolSpec& pool, uint32_t part);
uint32_t PartCountOf(const v1::PoolSpec& pool);

class HostTensor {
 public:
  // Makes the memory, offset_bytes + size_bytes of it, with every byte at 0xa5.
  HostTensor(const v1::PoolSpec& pool, v1::RegisterTensorRequest geometry);
  ~HostTensor();
  HostTensor(const HostTensor&) = delete;
  HostTensor& operator=(const HostTensor&) = delete;

  const v1::RegisterTensorRequest& geometry() const { return geometry_; }
  int descriptor() const { return memory_.get(); }
  // Hands the memory over and registers it.
  absl::Status Register(client::Session& session);
  uint64_t id() const { return id_; }

  // Writes a token's row, in each layer and part that the tensor has.
  void Put(uint32_t row, uint64_t token);
  bool Holds(uint32_t row, uint64_t token) const;
  // Bytes that are not as they were made.
  size_t ChangedBytes() const;
  // Makes all of them as they were made.
  void Poison();

 private:
  std::byte* At(size_t layer, const v1::TensorPart& part, uint32_t row) const;

  const v1::PoolSpec pool_;
  const v1::RegisterTensorRequest geometry_;
  std::vector<uint32_t> layers_;
  client::FileDescriptor memory_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t id_ = 0;
};

}  // namespace stoker::system_test
