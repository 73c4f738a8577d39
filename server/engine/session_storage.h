// The memory and the stream of one session, and the operations that core asks for, as operations of the backend.
//
// Thread safety: one thread at a time (core holds the session's mutex).
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "server/core/engine.h"
#include "server/engine/armed_plane.h"
#include "server/engine/engine.h"
#include "server/engine/order_words.h"
#include "server/engine/session_memory.h"

namespace stoker::engine {

// What a session on the direct plane has in the pool's memory.
struct DirectMemory {
  core::DirectLayout layout;
  kernels::PlaneResult* result = nullptr;
  std::vector<int> descriptors;  // of the pool's memory; owned by it
  std::shared_ptr<void> place;   // gives `result` back
};

inline kernels::Sharing SharingOf(core::ArenaSharing sharing) { return static_cast<kernels::Sharing>(sharing); }
static_assert(static_cast<int>(kernels::Sharing::kIpcHandle) == static_cast<int>(core::ArenaSharing::kIpcHandle));
static_assert(static_cast<int>(kernels::Sharing::kDescriptor) == static_cast<int>(core::ArenaSharing::kDescriptor));

class SessionStorage final : public core::SessionStorage {
 public:
  static absl::StatusOr<std::unique_ptr<core::SessionStorage>> Create(
      kernels::Backend& backend, core::Bounce* bounce, const core::PoolSpec& pool_spec, const kernels::RowStore& pool,
      absl::Span<core::SequenceWord> words, const core::SessionSpec& spec, const DirectMemory& direct,
      const CopyPolicy& copies);
  ~SessionStorage() override;

  const core::ArenaLayout& arena() const override { return memory_.arena; }
  int arena_descriptor() const override { return arena_descriptor_; }
  core::Bounce* bounce() const override { return bounce_; }

  std::shared_ptr<core::OrderAbort> order_abort() const override { return order_words_; }
  absl::Status AwaitOrder(uint64_t number) override;
  absl::Status SignalOrder(uint64_t number) override;
  int64_t backlog() const override { return stream_->backlog(); }
  int64_t PiecesOf(int64_t rows, absl::Span<const core::Tensor* const> tensors) const override;

  absl::Status Open(int32_t state_row, core::SequenceId id, absl::Span<const int32_t> table) override;
  absl::Status UpdateTable(int32_t state_row, absl::Span<const core::TableUpdate> updates,
                           absl::Span<const core::BlockRef> replaced) override;
  absl::Status Close(int32_t state_row) override;
  absl::Status CopyBlocks(absl::Span<const core::BlockCopy> copies) override;
  absl::Status Store(const core::RowsWork& work) override;
  absl::Status Load(const core::RowsWork& work) override;
  absl::Status StoreTensors(const core::TensorWork& work) override;
  absl::Status LoadTensors(const core::TensorWork& work) override;
  absl::Status LoadHot(int32_t state_row, int32_t first_position, const core::RowsWork& work) override;
  absl::Status Step(core::StepWork& work) override;
  absl::Status Gather(int32_t group, absl::Span<const int32_t> layers, core::DeviceTotals* totals) override;
  absl::Status Commit(const core::CommitWork& work) override;
  absl::Status Invalidate(const core::InvalidateWork& work) override;
  absl::Status Read(const core::ReadWork& work) override;
  absl::Span<const int> pool_descriptors() const override { return direct_.descriptors; }
  core::PlaneSample DirectSample() const override;
  absl::Status EndDirect(bool engine_gone, absl::Duration limit) override;
  absl::Status Arm(core::PlaneSetup setup) override;
  void Disarm() override;
  void Notify(absl::AnyInvocable<void(absl::Status) &&> done) override;
  absl::AnyInvocable<void() &&> Hold() override { return stream_->Hold(); }

 private:
  // The last plan of a group, and the layers whose rows were not copied yet. Its hot rows count as filled, so it is
  // carried out at the latest before the next plan of the group and before any block that it names can be given up.
  struct Plan {
    int32_t rows = 0;
    int32_t top_k = 0;
    std::vector<int32_t> pending;
  };

  SessionStorage(kernels::Backend& backend, core::Bounce* bounce, const core::PoolSpec& pool_spec,
                 const kernels::RowStore& pool, absl::Span<core::SequenceWord> words, const core::SessionSpec& spec,
                 const DirectMemory& direct, const CopyPolicy& copies, SessionMemory memory)
      : backend_(backend),
        bounce_(bounce),
        pool_spec_(pool_spec),
        spec_(spec),
        memory_(std::move(memory)),
        pool_(pool),
        words_(words),
        direct_(direct),
        copies_(copies) {}

  absl::Status AllocateArena();
  absl::Status MakeOrderWords();
  absl::Status Initialize();
  // Empties the residency of at most kChunkRows state rows.
  absl::Status Reset(std::vector<int32_t> state_rows);
  template <typename T>
  T* InArena(int64_t offset) const {
    return reinterpret_cast<T*>(arena_->data() + offset);
  }
  template <typename T>
  T* InState(int64_t offset) const {
    return reinterpret_cast<T*>((spec_.direct ? arena_->data() + memory_.state_offset : state_->data()) + offset);
  }
  int32_t* Argument(StepArgument argument) const {
    return InState<int32_t>(memory_.step_arguments) + argument * step_rows_;
  }
  // Of a session with ordered calls: not 0 behind a wait that was aborted. Null for others.
  uint32_t* aborted() const { return order_words_ == nullptr ? nullptr : InState<uint32_t>(memory_.aborted); }
  uint64_t* Counter(int64_t counter) const { return InState<uint64_t>(memory_.counters) + counter; }
  kernels::RowStore hot() const;
  // [layer][row][bytes] with `rows` rows a layer; the rows begin at `base`.
  kernels::RowStore DenseStore(char* base, int64_t rows, int64_t layers) const;
  kernels::Residency ResidencyOf(int32_t group) const;
  kernels::IndexSpace index_space() const { return static_cast<kernels::IndexSpace>(spec_.index_space); }
  // Keeps an argument of enqueued work alive until the next Notify has called back.
  template <typename T>
  std::vector<T>* Keep(std::vector<T> values);
  absl::Status Upload(void* target, const void* source, int64_t bytes);

  // `skip`: aborted(), of rows whose bytes or place may still be the engine's; null of what the pool alone is about.
  absl::Status TransferRows(const kernels::CopyLimits& limits, const kernels::RowStore& source,
                            const kernels::RowStore& target, absl::Span<const int32_t> source_rows,
                            absl::Span<const int32_t> target_rows, absl::Span<const int32_t> source_layers,
                            absl::Span<const int32_t> target_layers, const uint32_t* skip);
  // One tensor's part of a transfer; its row lists are on the device.
  absl::Status TransferTensor(const core::Tensor& tensor, bool store, const int32_t* pool_rows,
                              const int32_t* tensor_rows, int64_t count);
  absl::Status TransferTensors(const core::TensorWork& work, bool store);
  absl::Status UploadAllowed(int32_t state_row);
  absl::Status DropKeys(const core::InvalidateWork& work);
  absl::Status UploadResident(const core::StepRowWork& row);
  absl::Status EnqueueNewest(const core::StepWork& work);
  absl::Status EnqueueGroup(const core::StepWork& work, const core::StepGroupWork& group);
  kernels::GatherCompactArgs GatherArgs(int32_t group, absl::Span<const int32_t> layers) const;
  absl::Status FlushPlan(int32_t group);
  absl::Status FlushPlans();
  absl::Status CopyTotals(core::DeviceTotals* totals);

  // The sequence of a state row for steps of the plane; 0 for none.
  absl::Status UploadEntry(int32_t state_row, uint64_t sequence_id);
  // Between the two no step of the plane uses the state rows: a step that names one gets a status.
  absl::Status Suspend(absl::Span<const int32_t> state_rows);
  absl::Status AwaitQuiet(absl::Duration limit);
  absl::Status Resume(absl::Span<const int32_t> state_rows);
  kernels::PlaneMemory PlaneMemoryOf(uint64_t session, int32_t top_k) const;
  // One step of the server plane: see ArmedPlane::Body.
  absl::Status EnqueuePlaneStep(kernels::Stream& stream, const kernels::PlaneStep& step, absl::Duration timeout,
                                const uint32_t* abort, kernels::PlaneResult* result) const;

  kernels::Backend& backend_;
  core::Bounce* const bounce_;
  const core::PoolSpec pool_spec_;
  const core::SessionSpec spec_;
  SessionMemory memory_;
  const kernels::RowStore pool_;
  const absl::Span<core::SequenceWord> words_;
  const DirectMemory direct_;
  const CopyPolicy copies_;
  std::vector<uint64_t> sequence_ids_;  // of each state row; 0: closed
  std::vector<int32_t> all_layers_;
  std::vector<int32_t> no_pages_;             // -1, one for each column
  std::vector<std::vector<int32_t>> tables_;  // POOL_ROW: host copies of the block tables
  std::vector<int64_t> resident_pages_;       // pages set, of each state row
  bool any_resident_ = false;                 // whether the resident table was ever written
  std::vector<Plan> plans_;
  int64_t step_rows_ = 0;  // of the step being enqueued: columns of its arguments
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<kernels::Buffer> arena_;
  int arena_descriptor_ = -1;                     // of arena_
  std::unique_ptr<kernels::Buffer> state_;        // null on the direct plane
  std::unique_ptr<kernels::Buffer> quiet_abort_;  // the direct plane's: u32, not 0 when its engine is gone
  std::shared_ptr<ArmedPlane> plane_;             // the last one; it may have ended
  std::shared_ptr<OrderWords> order_words_;       // null: no ordered calls
  // Last: their destructors wait for work that uses the rest.
  std::unique_ptr<kernels::Stream> plane_stream_;  // null before the first Arm
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace stoker::engine
