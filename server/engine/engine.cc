#include "server/engine/engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/check.h"
#include "server/engine/bounce_memory.h"
#include "server/engine/row_formats.h"
#include "server/engine/session_storage.h"

namespace stoker::engine {
namespace {

class PoolMemory final : public core::PoolStorage {
 public:
  PoolMemory(std::unique_ptr<kernels::Buffer> buffer, kernels::RowStore rows)
      : buffer_(std::move(buffer)), rows_(rows) {}

  int64_t bytes() const override { return static_cast<int64_t>(buffer_->bytes()); }
  const kernels::RowStore& rows() const { return rows_; }

 private:
  const std::unique_ptr<kernels::Buffer> buffer_;
  const kernels::RowStore rows_;
};

class MappedMemory final : public core::ClientMemory {
 public:
  explicit MappedMemory(std::unique_ptr<kernels::Buffer> buffer) : buffer_(std::move(buffer)) {}

  std::byte* data() const override { return buffer_->data(); }

 private:
  const std::unique_ptr<kernels::Buffer> buffer_;
};

// All layers of a pool one after the other, so that the rows of one layer's gather lie close together.
absl::StatusOr<kernels::RowStore> LayOut(const core::PoolSpec& spec) {
  absl::StatusOr<kernels::RowLayout> layout = kernels::RowLayout::Make(FormatOf(spec), spec.rows());
  if (!layout.ok()) return layout.status();
  kernels::RowStore rows;
  rows.layers = static_cast<int32_t>(spec.layers);
  rows.layer_stride = RoundUp(layout->layer_bytes, kLayerAlignment);
  rows.layout = *layout;
  return rows;
}

kernels::PoolOptions OptionsOf(const core::PoolPopulation& population) {
  kernels::PoolOptions options;
  options.populate = population.populate;
  if (population.progress == nullptr) return options;
  options.progress = [&population](const kernels::PoolProgress& progress) {
    return population.progress({progress.phase == kernels::PoolPhase::kPin ? core::PoolProgress::Phase::kPin
                                                                           : core::PoolProgress::Phase::kFault,
                                static_cast<int64_t>(progress.done_bytes), static_cast<int64_t>(progress.total_bytes),
                                absl::string_view(progress.memory.data(), progress.memory.size()),
                                absl::string_view(progress.reason.data(), progress.reason.size())});
  };
  return options;
}

class BackendEngine final : public core::Engine {
 public:
  BackendEngine(std::vector<kernels::Backend*> backends, std::unique_ptr<BounceMemory> bounce)
      : backends_(std::move(backends)), bounce_(std::move(bounce)) {
    for (const kernels::Backend* backend : backends_) devices_.emplace_back(backend->device());
  }

  const std::vector<std::string>& devices() const override { return devices_; }

  absl::StatusOr<int64_t> PoolBytes(const core::PoolSpec& spec) const override {
    const absl::StatusOr<kernels::RowStore> rows = LayOut(spec);
    if (!rows.ok()) return rows.status();
    return rows->layer_stride * rows->layers;
  }

  absl::StatusOr<int64_t> SessionBytes(const core::PoolSpec& pool, const core::SessionSpec& spec) const override {
    const absl::StatusOr<SessionMemory> memory = SessionMemory::Make(pool, spec);
    if (!memory.ok()) return memory.status();
    return memory->arena_bytes + memory->private_bytes;
  }

  absl::StatusOr<std::unique_ptr<core::PoolStorage>> CreatePool(const core::PoolSpec& spec,
                                                                const core::PoolPopulation& population) override {
    absl::StatusOr<kernels::RowStore> rows = LayOut(spec);
    if (!rows.ok()) return rows.status();
    kernels::PoolOptions options = OptionsOf(population);
    options.peers.assign(backends_.begin() + 1, backends_.end());
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer =
        backends_[0]->AllocatePool(static_cast<size_t>(rows->layer_stride * rows->layers), options);
    if (!buffer.ok()) return buffer.status();
    rows->base = (*buffer)->data();
    return std::make_unique<PoolMemory>(*std::move(buffer), *rows);
  }

  absl::StatusOr<std::unique_ptr<core::SessionStorage>> CreateSession(const core::PoolSpec& pool_spec,
                                                                      core::PoolStorage& pool,
                                                                      const core::SessionSpec& spec) override {
    return SessionStorage::Create(BackendOf(spec.device), bounce_.get(), pool_spec,
                                  static_cast<PoolMemory&>(pool).rows(), spec);
  }

  absl::StatusOr<std::unique_ptr<core::ClientMemory>> MapClientMemory(const std::string& device,
                                                                      const core::ClientMemorySource& source) override {
    kernels::ClientMemory memory;
    memory.ipc_handle = source.ipc_handle;
    memory.descriptor = source.descriptor;
    memory.offset_bytes = source.offset_bytes;
    memory.size_bytes = source.size_bytes;
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer = BackendOf(device).MapClientMemory(memory);
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<MappedMemory>(*std::move(buffer));
  }

 private:
  kernels::Backend& BackendOf(const std::string& device) const {
    const auto found = std::find(devices_.begin(), devices_.end(), device);
    STOKER_CHECK(found != devices_.end());
    return *backends_[static_cast<size_t>(found - devices_.begin())];
  }

  const std::vector<kernels::Backend*> backends_;
  const std::unique_ptr<BounceMemory> bounce_;
  std::vector<std::string> devices_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<core::Engine>> MakeEngine(std::vector<kernels::Backend*> backends,
                                                         int64_t message_bytes) {
  STOKER_CHECK(!backends.empty());
  std::unique_ptr<BounceMemory> bounce;
  if (!backends[0]->reaches_pageable_memory()) {
    absl::StatusOr<std::unique_ptr<BounceMemory>> created = BounceMemory::Create(*backends[0], message_bytes);
    if (!created.ok()) return created.status();
    bounce = *std::move(created);
  }
  return std::make_unique<BackendEngine>(std::move(backends), std::move(bounce));
}

}  // namespace stoker::engine
