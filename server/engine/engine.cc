#include "server/engine/engine.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/core/check.h"
#include "server/engine/bounce_memory.h"
#include "server/engine/row_formats.h"
#include "server/engine/session_storage.h"

namespace stoker::engine {
namespace {

constexpr size_t kResultBytes = 256;
static_assert(sizeof(kernels::PlaneResult) <= kResultBytes);
// Sessions on the direct plane that a pool can have at one time.
constexpr size_t kDirectSessions = 64;

// A pool's rows, and behind them what planes of its sessions share with the daemon: the sequences' words, and the
// results of steps of sessions on the direct plane.
class PoolMemory final : public core::PoolStorage {
 public:
  static int64_t Bytes(const core::PoolSpec& spec, const kernels::RowStore& rows) {
    return WordsOffset(rows) + core::Pool::MaxSequences(spec) * static_cast<int64_t>(sizeof(core::SequenceWord)) +
           static_cast<int64_t>(kDirectSessions * kResultBytes);
  }
  PoolMemory(const core::PoolSpec& spec, std::unique_ptr<kernels::Buffer> buffer, kernels::RowStore rows)
      : buffer_(std::move(buffer)), rows_(rows), words_(static_cast<size_t>(core::Pool::MaxSequences(spec))) {}

  int64_t bytes() const override { return static_cast<int64_t>(buffer_->bytes()); }
  absl::Span<core::SequenceWord> sequence_words() override {
    return {reinterpret_cast<core::SequenceWord*>(buffer_->data() + WordsOffset(rows_)), words_};
  }
  const kernels::RowStore& rows() const { return rows_; }
  bool exported() const { return buffer_->exported().kind != kernels::ExportedMemory::Kind::kNone; }

  // A place for a session's results, for as long as DirectMemory::place lives. RESOURCE_EXHAUSTED: kDirectSessions.
  absl::StatusOr<DirectMemory> TakeDirect() {
    size_t place = 0;
    {
      const absl::MutexLock lock(&mutex_);
      while (place < kDirectSessions && taken_[place]) ++place;
      if (place == kDirectSessions) {
        return absl::ResourceExhaustedError(
            absl::StrCat("plane: sessions on the direct plane: ", place, " of the pool, limit ", kDirectSessions));
      }
      taken_[place] = true;
    }
    DirectMemory direct;
    direct.place = std::shared_ptr<void>(nullptr, [this, place](void*) {
      const absl::MutexLock lock(&mutex_);
      taken_[place] = false;
    });
    const int64_t words = WordsOffset(rows_);
    const size_t offset = static_cast<size_t>(words) + words_ * sizeof(core::SequenceWord) + place * kResultBytes;
    direct.result = reinterpret_cast<kernels::PlaneResult*>(buffer_->data() + offset);
    *direct.result = {};
    const kernels::ExportedMemory exported = buffer_->exported();
    for (const kernels::ExportedMemory::Part& part : exported.parts) {
      direct.layout.part_bytes.push_back(part.bytes);
      direct.descriptors.push_back(part.descriptor);
    }
    direct.layout.cuda = exported.kind == kernels::ExportedMemory::Kind::kCudaAllocation;
    direct.layout.layer_stride_bytes = static_cast<uint64_t>(rows_.layer_stride);
    direct.layout.words_offset_bytes = static_cast<uint64_t>(words);
    direct.layout.words = words_;
    direct.layout.result_offset_bytes = offset;
    return direct;
  }

 private:
  static int64_t WordsOffset(const kernels::RowStore& rows) {
    return RoundUp(rows.layer_stride * rows.layers, kLayerAlignment);
  }

  const std::unique_ptr<kernels::Buffer> buffer_;
  const kernels::RowStore rows_;
  const size_t words_;
  absl::Mutex mutex_;
  std::array<bool, kDirectSessions> taken_ ABSL_GUARDED_BY(mutex_) = {};
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
  BackendEngine(std::vector<kernels::Backend*> backends, std::unique_ptr<BounceMemory> bounce, const CopyPolicy& copies)
      : backends_(std::move(backends)), bounce_(std::move(bounce)), copies_(copies) {
    for (const kernels::Backend* backend : backends_) devices_.emplace_back(backend->device());
  }

  const std::vector<std::string>& devices() const override { return devices_; }

  bool MpsEnabled() const override {
    return std::all_of(backends_.begin(), backends_.end(),
                       [](const kernels::Backend* backend) { return backend->shares_contexts(); });
  }

  std::string NoServerPlane(absl::string_view device) const override {
    return std::string(BackendOf(device).no_doorbells());
  }

  std::string NoArenaSharing(absl::string_view device, core::ArenaSharing sharing) const override {
    return std::string(BackendOf(device).NoSharing(SharingOf(sharing)));
  }

  std::string NoDirectPlane(const core::PoolStorage& pool) const override {
    if (static_cast<const PoolMemory&>(pool).exported()) return {};
    return "the pool's memory cannot be mapped by another process";
  }

  bool RecyclesArenas(absl::string_view device) const override { return BackendOf(device).recycles_shared_memory(); }

  std::string NoOrderedCalls(absl::string_view device) const override {
    return std::string(BackendOf(device).no_order_words());
  }

  absl::StatusOr<int64_t> PoolBytes(const core::PoolSpec& spec) const override {
    const absl::StatusOr<kernels::RowStore> rows = LayOut(spec);
    if (!rows.ok()) return rows.status();
    return PoolMemory::Bytes(spec, *rows);
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
        backends_[0]->AllocatePool(static_cast<size_t>(PoolMemory::Bytes(spec, *rows)), options);
    if (!buffer.ok()) return buffer.status();
    rows->base = (*buffer)->data();
    return std::make_unique<PoolMemory>(spec, *std::move(buffer), *rows);
  }

  absl::StatusOr<std::unique_ptr<core::SessionStorage>> CreateSession(const core::PoolSpec& pool_spec,
                                                                      core::PoolStorage& pool,
                                                                      const core::SessionSpec& spec) override {
    auto& memory = static_cast<PoolMemory&>(pool);
    DirectMemory direct;
    if (spec.direct) {
      absl::StatusOr<DirectMemory> taken = memory.TakeDirect();
      if (!taken.ok()) return taken.status();
      direct = *std::move(taken);
      direct.layout.max_copy_blocks = copies_.step.max_blocks;
      direct.layout.max_copy_bytes = copies_.step.max_bytes;
    }
    return SessionStorage::Create(BackendOf(spec.device), bounce_.get(), pool_spec, memory.rows(),
                                  memory.sequence_words(), spec, direct, copies_);
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
  kernels::Backend& BackendOf(absl::string_view device) const {
    const auto found = std::find(devices_.begin(), devices_.end(), device);
    STOKER_CHECK(found != devices_.end());
    return *backends_[static_cast<size_t>(found - devices_.begin())];
  }

  const std::vector<kernels::Backend*> backends_;
  const std::unique_ptr<BounceMemory> bounce_;
  const CopyPolicy copies_;
  std::vector<std::string> devices_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<core::Engine>> MakeEngine(std::vector<kernels::Backend*> backends, int64_t message_bytes,
                                                         const CopyPolicy& copies) {
  STOKER_CHECK(!backends.empty());
  std::unique_ptr<BounceMemory> bounce;
  if (!backends[0]->reaches_pageable_memory()) {
    absl::StatusOr<std::unique_ptr<BounceMemory>> created = BounceMemory::Create(*backends[0], message_bytes);
    if (!created.ok()) return created.status();
    bounce = *std::move(created);
  }
  return std::make_unique<BackendEngine>(std::move(backends), std::move(bounce), copies);
}

}  // namespace stoker::engine
