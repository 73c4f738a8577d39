#include "server/engine/session_storage.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::engine {

absl::StatusOr<std::unique_ptr<core::SessionStorage>> SessionStorage::Create(
    kernels::Backend& backend, core::Bounce* bounce, const core::PoolSpec& pool_spec, const kernels::RowStore& pool,
    absl::Span<core::SequenceWord> words, const core::SessionSpec& spec, const DirectMemory& direct,
    const CopyPolicy& copies) {
  absl::StatusOr<SessionMemory> memory = SessionMemory::Make(pool_spec, spec);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<SessionStorage> storage(
      new SessionStorage(backend, bounce, pool_spec, pool, words, spec, direct, copies, *std::move(memory)));
  if (absl::Status status = storage->AllocateArena(); !status.ok()) return status;
  if (spec.direct) {
    storage->memory_.arena.direct = direct.layout;
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> abort = backend.AllocateHost(sizeof(uint32_t));
    if (!abort.ok()) return abort.status();
    storage->quiet_abort_ = *std::move(abort);
  } else {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> state =
        backend.AllocatePrivate(static_cast<size_t>(storage->memory_.private_bytes));
    if (!state.ok()) return state.status();
    storage->state_ = *std::move(state);
  }
  if (spec.ordered_calls) {
    if (absl::Status status = storage->MakeOrderWords(); !status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<kernels::Stream>> stream = backend.CreateStream();
  if (!stream.ok()) return stream.status();
  storage->stream_ = *std::move(stream);
  if (absl::Status status = storage->Initialize(); !status.ok()) return status;
  return storage;
}

absl::Status SessionStorage::AllocateArena() {
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> arena =
      backend_.AllocateShared(static_cast<size_t>(memory_.arena_bytes), SharingOf(spec_.arena_sharing));
  if (!arena.ok()) return arena.status();
  arena_ = *std::move(arena);
  if (spec_.arena_sharing == core::ArenaSharing::kIpcHandle && arena_->ipc_handle().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("arena_sharing: ARENA_SHARING_IPC_HANDLE given, the driver has no handles of memory of ",
                     std::string(backend_.device())));
  }
  core::ArenaLayout& layout = memory_.arena;
  layout.ipc_handle = std::string(arena_->ipc_handle());
  arena_descriptor_ = arena_->descriptor();
  const kernels::ExportedMemory exported = arena_->exported();
  if (exported.kind == kernels::ExportedMemory::Kind::kCudaAllocation) {
    arena_descriptor_ = exported.parts.front().descriptor;
    layout.allocation_bytes = exported.parts.front().bytes;
  }
  layout.has_descriptor = arena_descriptor_ >= 0;
  return absl::OkStatus();
}

SessionStorage::~SessionStorage() {
  if (order_words_ == nullptr) return;
  stream_ = nullptr;
  order_words_->Close();
}

absl::Status SessionStorage::MakeOrderWords() {
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> flag = backend_.AllocateHost(sizeof(uint32_t));
  if (!flag.ok()) return flag.status();
  order_words_ = std::make_shared<OrderWords>(&backend_, *std::move(flag), InArena<uint64_t>(memory_.engine_word));
  return absl::OkStatus();
}

absl::Status SessionStorage::AwaitOrder(uint64_t number) {
  kernels::AwaitOrderArgs args;
  args.word = InArena<uint64_t>(memory_.engine_word);
  args.number = number;
  args.abort = order_words_->flag();
  args.aborted = aborted();
  return stream_->AwaitOrder(args);
}

absl::Status SessionStorage::SignalOrder(uint64_t number) {
  kernels::SignalOrderArgs args;
  args.word = InArena<uint64_t>(memory_.daemon_word);
  args.number = number;
  args.aborted = aborted();
  return stream_->SignalOrder(args);
}

absl::Status SessionStorage::Initialize() {
  all_layers_.resize(pool_spec_.layers);
  std::iota(all_layers_.begin(), all_layers_.end(), 0);
  no_pages_.assign(memory_.table_columns, -1);
  resident_pages_.assign(spec_.state_rows, 0);
  plans_.resize(spec_.groups.size());
  sequence_ids_.resize(spec_.state_rows);
  if (spec_.index_space == core::IndexSpace::kPoolRow) tables_.resize(spec_.state_rows);
  for (int64_t row = 0; row < spec_.state_rows; ++row) {
    for (const int64_t table : {memory_.block_table, memory_.resident_table}) {
      if (absl::Status status = Upload(InState<int32_t>(table) + row * memory_.table_columns, no_pages_.data(),
                                       memory_.table_columns * 4);
          !status.ok()) {
        return status;
      }
    }
  }
  const std::vector<int32_t>* unclaimed = Keep(std::vector<int32_t>(spec_.state_rows, kernels::kUnclaimed));
  absl::Status claims = Upload(InState<int32_t>(memory_.claims), unclaimed->data(), spec_.state_rows * 4);
  if (!claims.ok()) return claims;
  for (int64_t begin = 0; begin < spec_.state_rows; begin += kChunkRows) {
    std::vector<int32_t> rows(std::min(kChunkRows, spec_.state_rows - begin));
    std::iota(rows.begin(), rows.end(), static_cast<int32_t>(begin));
    if (absl::Status status = Reset(std::move(rows)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status SessionStorage::Reset(std::vector<int32_t> state_rows) {
  const std::vector<int32_t>* rows = Keep(std::move(state_rows));
  const int64_t count = static_cast<int64_t>(rows->size());
  if (absl::Status s = Upload(InState<int32_t>(memory_.source_rows), rows->data(), count * 4); !s.ok()) return s;
  for (size_t group = 0; group < spec_.groups.size(); ++group) {
    kernels::ResetArgs args;
    args.residency = ResidencyOf(static_cast<int32_t>(group));
    args.state_rows = InState<int32_t>(memory_.source_rows);
    args.count = static_cast<int32_t>(count);
    if (absl::Status status = stream_->Reset(args); !status.ok()) return status;
  }
  return absl::OkStatus();
}

kernels::RowStore SessionStorage::hot() const {
  kernels::RowStore rows;
  rows.base = arena_->data() + memory_.hot;
  rows.layer_stride = memory_.hot_layer_stride;
  rows.layers = static_cast<int32_t>(pool_spec_.layers);
  rows.layout = memory_.hot_layout;
  return rows;
}

kernels::RowStore SessionStorage::DenseStore(char* base, int64_t rows, int64_t layers) const {
  kernels::RowStore store;
  store.base = reinterpret_cast<std::byte*>(base);
  store.layout = kernels::DenseLayout(pool_.layout, rows);
  store.layer_stride = rows * store.layout.row_bytes();
  store.layers = static_cast<int32_t>(layers);
  return store;
}

kernels::Residency SessionStorage::ResidencyOf(int32_t group) const {
  const SessionMemory::Group& memory = memory_.groups[group];
  kernels::Residency residency;
  residency.slot_key = InState<int32_t>(memory.slot_key);
  residency.lru = InState<int16_t>(memory.lru);
  residency.state_rows = static_cast<int32_t>(spec_.state_rows);
  residency.hot_rows = static_cast<int32_t>(spec_.hot_rows);
  return residency;
}

template <typename T>
std::vector<T>* SessionStorage::Keep(std::vector<T> values) {
  auto kept = std::make_shared<std::vector<T>>(std::move(values));
  kept_.push_back(kept);
  return kept.get();
}
template std::vector<int32_t>* SessionStorage::Keep(std::vector<int32_t>);
template std::vector<int64_t>* SessionStorage::Keep(std::vector<int64_t>);
template std::vector<uint64_t>* SessionStorage::Keep(std::vector<uint64_t>);

absl::Status SessionStorage::Upload(void* target, const void* source, int64_t bytes) {
  return stream_->Copy(target, source, static_cast<size_t>(bytes));
}

void SessionStorage::Notify(absl::AnyInvocable<void(absl::Status) &&> done) {
  if (kept_.empty()) {
    stream_->Notify(std::move(done));
    return;
  }
  stream_->Notify([kept = std::move(kept_), done = std::move(done)](absl::Status status) mutable {
    kept.clear();
    std::move(done)(std::move(status));
  });
  kept_.clear();
}

absl::Status SessionStorage::UploadAllowed(int32_t state_row) {
  std::vector<uint64_t> words(memory_.allowed_words, 0);
  for (const int32_t block : tables_[state_row]) {
    if (block >= 0) words[block / 64] |= uint64_t{1} << (block % 64);
  }
  const std::vector<uint64_t>* kept = Keep(std::move(words));
  return Upload(InState<uint64_t>(memory_.allowed_blocks) + state_row * memory_.allowed_words, kept->data(),
                memory_.allowed_words * 8);
}

absl::Status SessionStorage::Open(int32_t state_row, core::SequenceId id, absl::Span<const int32_t> table) {
  std::vector<int32_t> row(table.begin(), table.end());
  row.resize(memory_.table_columns, -1);
  const std::vector<int32_t>* kept = Keep(std::move(row));
  if (!tables_.empty()) {
    tables_[state_row] = *kept;
    if (absl::Status status = UploadAllowed(state_row); !status.ok()) return status;
  }
  absl::Status status = Upload(InState<int32_t>(memory_.block_table) + state_row * memory_.table_columns, kept->data(),
                               memory_.table_columns * 4);
  if (!status.ok()) return status;
  sequence_ids_[state_row] = id.value;
  return UploadEntry(state_row, id.value);
}

absl::Status SessionStorage::UpdateTable(int32_t state_row, absl::Span<const core::TableUpdate> updates,
                                         absl::Span<const core::BlockRef> replaced) {
  if (!replaced.empty()) {
    if (absl::Status status = FlushPlans(); !status.ok()) return status;
    if (absl::Status status = Suspend({state_row}); !status.ok()) return status;
  }
  int32_t* const table = InState<int32_t>(memory_.block_table) + state_row * memory_.table_columns;
  for (const core::TableUpdate& update : updates) {
    // Another rank has extended the sequence beyond what this session can name.
    if (update.column >= memory_.table_columns) continue;
    if (absl::Status status = stream_->Write(table + update.column, update.block); !status.ok()) return status;
    if (!tables_.empty()) tables_[state_row][update.column] = update.block;
  }
  if (tables_.empty()) return replaced.empty() ? absl::OkStatus() : Resume({state_row});
  // Keys of the replaced blocks would name rows that are no longer the sequence's.
  core::InvalidateWork stale;
  for (const core::BlockRef& block : replaced) {
    for (int64_t row = 0; row < pool_spec_.block_rows; ++row) {
      stale.state_rows.push_back(state_row);
      stale.keys.push_back(block.index * pool_spec_.block_rows + row);
    }
  }
  if (!stale.keys.empty()) {
    if (absl::Status status = DropKeys(stale); !status.ok()) return status;
  }
  if (absl::Status status = UploadAllowed(state_row); !status.ok()) return status;
  return replaced.empty() ? absl::OkStatus() : Resume({state_row});
}

absl::Status SessionStorage::Close(int32_t state_row) {
  if (absl::Status status = FlushPlans(); !status.ok()) return status;
  sequence_ids_[state_row] = 0;
  if (absl::Status status = Suspend({state_row}); !status.ok()) return status;
  if (absl::Status status = Upload(InState<int32_t>(memory_.block_table) + state_row * memory_.table_columns,
                                   no_pages_.data(), memory_.table_columns * 4);
      !status.ok()) {
    return status;
  }
  if (resident_pages_[state_row] > 0) {
    core::StepRowWork none;
    none.state_row = state_row;
    if (absl::Status status = UploadResident(none); !status.ok()) return status;
  }
  return Reset({state_row});
}

absl::Status SessionStorage::Invalidate(const core::InvalidateWork& work) {
  if (absl::Status status = Suspend(work.state_rows); !status.ok()) return status;
  if (absl::Status status = DropKeys(work); !status.ok()) return status;
  return Resume(work.state_rows);
}

absl::Status SessionStorage::DropKeys(const core::InvalidateWork& work) {
  const std::vector<int32_t>* rows = Keep(work.state_rows);
  const std::vector<int64_t>* keys = Keep(work.keys);
  const int64_t count = static_cast<int64_t>(keys->size());
  for (int64_t begin = 0; begin < count; begin += kChunkRows) {
    const int64_t chunk = std::min(kChunkRows, count - begin);
    if (absl::Status s = Upload(InState<int32_t>(memory_.source_rows), rows->data() + begin, chunk * 4); !s.ok())
      return s;
    if (absl::Status s = Upload(InState<int64_t>(memory_.keys), keys->data() + begin, chunk * 8); !s.ok()) return s;
    for (size_t group = 0; group < spec_.groups.size(); ++group) {
      kernels::InvalidateArgs args;
      args.residency = ResidencyOf(static_cast<int32_t>(group));
      args.state_rows = InState<int32_t>(memory_.source_rows);
      args.keys = InState<int64_t>(memory_.keys);
      args.count = chunk;
      if (absl::Status status = stream_->Invalidate(args); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::engine
