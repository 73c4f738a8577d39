#include "tests/system/host_tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "client/tensor_memory.h"
#include "tests/system/row_tokens.h"

namespace stoker::system_test {
namespace {

constexpr std::byte kPoison{0xa5};
constexpr uint32_t kDsv4ScaleBytes = 8;

// The bytes of one part of a token's row.
std::string PartOf(const v1::PoolSpec& pool, uint32_t layer, uint32_t part, uint64_t token) {
  const std::string row = RowOf(pool, layer, token);
  return row.substr(part == 0 ? 0 : row.size() - PartBytesOf(pool, 1), PartBytesOf(pool, part));
}

}  // namespace

uint32_t PartCountOf(const v1::PoolSpec& pool) { return pool.row_layout() == v1::ROW_LAYOUT_LINEAR ? 1 : 2; }

uint32_t PartBytesOf(const v1::PoolSpec& pool, uint32_t part) {
  switch (pool.row_layout()) {
    case v1::ROW_LAYOUT_SPLIT_KV:
      return part == 0 ? pool.row_bytes() : pool.v_row_bytes();
    case v1::ROW_LAYOUT_DSV4_PAGED:
      return part == 0 ? pool.row_bytes() - kDsv4ScaleBytes : kDsv4ScaleBytes;
    default:
      return pool.row_bytes();
  }
}

v1::RegisterTensorRequest DenseTensor(const v1::PoolSpec& pool, uint32_t rows, std::vector<uint32_t> layers,
                                      std::vector<uint32_t> parts) {
  v1::RegisterTensorRequest request;
  const uint64_t layer_count = layers.empty() ? pool.layers() : layers.size();
  if (parts.empty()) {
    parts.resize(PartCountOf(pool));
    std::iota(parts.begin(), parts.end(), 0u);
  }
  request.mutable_layers()->Add(layers.begin(), layers.end());
  request.set_rows(rows);
  uint64_t layer_bytes = 0;
  for (const uint32_t p : parts) {
    v1::TensorPart* part = request.add_parts();
    part->set_part(p);
    part->set_offset_bytes(layer_bytes);
    part->set_row_stride_bytes(PartBytesOf(pool, p));
    layer_bytes += uint64_t{rows} * PartBytesOf(pool, p);
  }
  request.set_layer_stride_bytes(layer_bytes);
  request.set_size_bytes(layer_count * layer_bytes);
  return request;
}

HostTensor::HostTensor(const v1::PoolSpec& pool, v1::RegisterTensorRequest geometry)
    : pool_(pool), geometry_(std::move(geometry)), layers_(geometry_.layers().begin(), geometry_.layers().end()) {
  if (layers_.empty()) {
    layers_.resize(pool_.layers());
    std::iota(layers_.begin(), layers_.end(), 0u);
  }
  bytes_ = geometry_.offset_bytes() + geometry_.size_bytes();
  auto memory = client::MakeTensorMemory(bytes_);
  if (!memory.ok()) {
    std::fprintf(stderr, "MakeTensorMemory: %s\n", memory.status().ToString().c_str());
    std::abort();
  }
  memory_ = *std::move(memory);
  data_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0));
  if (data_ == MAP_FAILED) std::abort();
  Poison();
}

HostTensor::~HostTensor() { munmap(data_, bytes_); }

absl::Status HostTensor::Register(client::Session& session) {
  v1::RegisterTensorResponse response;
  const absl::Status status = session.RegisterTensor(memory_.get(), geometry_, &response);
  id_ = response.tensor_id();
  return status;
}

std::byte* HostTensor::At(size_t layer, const v1::TensorPart& part, uint32_t row) const {
  const uint64_t page_rows = std::max(1u, geometry_.page_rows());
  uint64_t offset = geometry_.offset_bytes() + layer * geometry_.layer_stride_bytes() + part.offset_bytes();
  offset += page_rows == 1 ? row * part.row_stride_bytes()
                           : row / page_rows * part.page_stride_bytes() + row % page_rows * part.row_stride_bytes();
  return data_ + offset;
}

void HostTensor::Put(uint32_t row, uint64_t token) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    for (const v1::TensorPart& part : geometry_.parts()) {
      const std::string bytes = PartOf(pool_, layers_[l], part.part(), token);
      std::memcpy(At(l, part, row), bytes.data(), bytes.size());
    }
  }
}

bool HostTensor::Holds(uint32_t row, uint64_t token) const {
  for (size_t l = 0; l < layers_.size(); ++l) {
    for (const v1::TensorPart& part : geometry_.parts()) {
      const std::string bytes = PartOf(pool_, layers_[l], part.part(), token);
      if (std::memcmp(At(l, part, row), bytes.data(), bytes.size()) != 0) return false;
    }
  }
  return true;
}

size_t HostTensor::ChangedBytes() const {
  return static_cast<size_t>(bytes_ - static_cast<size_t>(std::count(data_, data_ + bytes_, kPoison)));
}

void HostTensor::Poison() { std::fill(data_, data_ + bytes_, kPoison); }

}  // namespace stoker::system_test
