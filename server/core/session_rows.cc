// Bulk work of a session: store, load, commit, invalidate, gather, read.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/session.h"
#include "server/core/session_follow_up.h"

namespace stoker::core {
namespace {

constexpr size_t kMaxInvalidPositions = 8192;
constexpr size_t kMaxReadRows = 65536;
constexpr uint64_t kStagingAlignment = 16;
// Of items in bounce memory. What it adds to an item's rows is less than what surrounds them in a message.
constexpr int64_t kBounceAlignment = 16;

int64_t Padded(size_t bytes) {
  return (static_cast<int64_t>(bytes) + kBounceAlignment - 1) / kBounceAlignment * kBounceAlignment;
}

// Rows of one range that a completed write ends.
struct Written {
  RowRange range;
  size_t item = 0;
};

}  // namespace

absl::Status Session::CheckRange(const RowRange& range) const {
  if (range.count < 1 || range.count > spec_.max_sequence_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_count: ", range.count, " given, limits 1 and max_sequence_rows ", spec_.max_sequence_rows));
  }
  if (range.first < 0 || range.first > spec_.max_sequence_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_row: ", range.first, " given, limits 0 and max_sequence_rows ", spec_.max_sequence_rows));
  }
  // Another rank may have extended the sequence beyond what this session can name.
  if (range.first + range.count > spec_.max_sequence_rows) {
    return absl::InvalidArgumentError(absl::StrCat("row_count: rows from ", range.first, " end at ",
                                                   range.first + range.count, ", limit max_sequence_rows ",
                                                   spec_.max_sequence_rows));
  }
  return absl::OkStatus();
}

absl::Status Session::CheckStaging(const RowRange& range, uint64_t offset) const {
  const uint64_t bytes = static_cast<uint64_t>(range.count * BytesPerRow());
  const uint64_t limit = static_cast<uint64_t>(spec_.staging_bytes);
  if (offset % kStagingAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging_offset_bytes: ", offset, " given, not a multiple of ", kStagingAlignment));
  }
  if (offset > limit || bytes > limit - offset) {
    return absl::InvalidArgumentError(absl::StrCat("staging_offset_bytes: ", offset, " plus ", bytes,
                                                   " bytes of rows given, limit staging_bytes ", limit));
  }
  return absl::OkStatus();
}

absl::Status Session::BeginBounced(absl::string_view field, int64_t bytes, const CallOrder& order) {
  if (bounce_ != nullptr && bytes > bounce_->capacity_bytes()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(field, ": ", bytes, " bytes of rows in one message, limit ", bounce_->capacity_bytes()));
  }
  absl::MutexLock lock(&mutex_);
  return BeginOperation(order);
}

void Session::Store(std::vector<StoreItem> items, CallOrder order, Done<BatchResult> done) {
  // Items of another size are refused unseen.
  const auto bounces = [this](const StoreItem& item) {
    return bounce_ != nullptr && item.source == RowSource::kInline && !item.rows.empty() &&
           item.rows.size() == static_cast<uint64_t>(item.range.count * BytesPerRow());
  };
  int64_t bounced = 0;
  for (const StoreItem& item : items) bounced += bounces(item) ? Padded(item.rows.size()) : 0;
  absl::Status status = CheckItems("items", items.size());
  if (status.ok()) status = CheckOrder(order);
  for (size_t i = 0; status.ok() && order.signal && i < items.size(); ++i) {
    if (items[i].source != RowSource::kInline) continue;
    status = absl::InvalidArgumentError(
        absl::StrCat("source: INLINE given in item ", i,
                     " with order.signal, whose reply lets go of the message: allowed are SHARED (2) and TENSOR (3)"));
  }
  if (status.ok() && bounced > 0) status = BeginBounced("rows", bounced, order);
  if (!status.ok()) {
    RefuseOrder(order);
    std::move(done)(status);
  } else if (bounced == 0) {
    StoreBegun(std::move(items), order, nullptr, std::move(done));
  } else {
    bounce_->Take(bounced, [self = shared_from_this(), items = std::move(items), order, bounces,
                            done = std::move(done)](Bounce::Memory memory) mutable {
      char* next = memory.get();
      for (StoreItem& item : items) {
        if (!bounces(item)) continue;
        std::memcpy(next, item.rows.data(), item.rows.size());
        item.rows = absl::string_view(next, item.rows.size());
        next += Padded(item.rows.size());
      }
      self->StoreBegun(std::move(items), order, std::move(memory), std::move(done));
    });
  }
}

void Session::StoreBegun(std::vector<StoreItem> items, CallOrder order, Bounce::Memory memory, Done<BatchResult> done) {
  struct Operation {
    Bounce::Memory memory;  // that the items' rows are in, where they are in any
    BatchResult result;
    std::vector<RowsWork> work;
    std::vector<TensorWork> tensor_work;
    std::vector<Written> written;
    std::vector<WriteFollowUp> follow_ups;
  };
  auto op = std::make_shared<Operation>();
  op->memory = std::move(memory);
  std::optional<BatchResult> early;
  absl::ReleasableMutexLock lock(&mutex_);
  if (op->memory == nullptr) {
    if (absl::Status status = BeginOperation(order); !status.ok()) {
      lock.Release();
      RefuseOrder(order);
      std::move(done)(status);
      return;
    }
  }
  op->work.reserve(items.size());
  op->tensor_work.reserve(items.size());
  const absl::Status waits = AwaitOrder(order);
  for (size_t i = 0; i < items.size(); ++i) {
    const StoreItem& item = items[i];
    const uint64_t bytes = static_cast<uint64_t>(item.range.count * BytesPerRow());
    op->result.statuses.push_back([&]() -> absl::Status {
      if (!waits.ok()) return waits;
      absl::StatusOr<Opened> opened = Find(item.range.id);
      if (!opened.ok()) return opened.status();
      if (absl::Status check = CheckRange(item.range); !check.ok()) return check;
      std::vector<const Tensor*> tensors;
      if (item.source == RowSource::kStaging) {
        if (absl::Status check = CheckStaging(item.range, item.staging_offset); !check.ok()) return check;
      } else if (item.source == RowSource::kTensor) {
        absl::StatusOr<std::vector<const Tensor*>> found = FindTensors(item.tensor, item.range.count);
        if (!found.ok()) return found.status();
        tensors = *std::move(found);
      } else if (item.rows.size() != bytes) {
        return absl::InvalidArgumentError(absl::StrCat("rows: ", item.rows.size(), " bytes given, ", item.range.count,
                                                       " rows of all layers need ", bytes));
      }
      if (absl::Status room = CheckRoom(item.range.count, tensors); !room.ok()) return room;
      absl::StatusOr<WritePlan> plan = pool_->pool.BeginWrite(id_, item.range.id, item.range.first, item.range.count);
      if (!plan.ok()) return plan.status();
      AddFollowUp(item.range.id, id_, *plan, &op->follow_ups);
      if (absl::Status enqueued = EnqueuePlan(opened->state_row, *plan); !enqueued.ok()) return enqueued;
      absl::Status enqueued;
      if (item.source == RowSource::kTensor) {
        op->tensor_work.push_back(MakeTensorWork(plan->pool_rows, std::move(tensors), item.tensor));
        enqueued = storage_->StoreTensors(op->tensor_work.back());
      } else {
        op->work.push_back({.pool_rows = plan->pool_rows});
        if (item.source == RowSource::kStaging) {
          op->work.back().staging_offset = static_cast<int64_t>(item.staging_offset);
        } else {
          op->work.back().source_bytes = item.rows.data();
        }
        enqueued = storage_->Store(op->work.back());
      }
      if (!enqueued.ok()) return enqueued;
      op->written.push_back({item.range, i});
      op->result.bytes += bytes;
      return absl::OkStatus();
    }());
  }
  Done<BatchResult> answer = std::move(done);
  if (SignalOrder(order, absl::OkStatus())) {
    early = op->result;
    done = std::exchange(answer, nullptr);
  }
  storage_->Notify([self = shared_from_this(), op, order, done = std::move(answer)](absl::Status work) mutable {
    work = self->Outcome(order, done == nullptr, std::move(work));
    for (const Written& written : op->written) {
      if (work.ok()) {
        self->pool_->pool.FinishWrite(written.range.id, written.range.first, written.range.count);
      } else {
        op->result.statuses[written.item] = work;
      }
    }
    op->memory.reset();
    if (!work.ok()) op->result.bytes = 0;
    self->pool_->totals.stored_bytes.fetch_add(op->result.bytes, std::memory_order_relaxed);
    self->FollowUp(std::move(op->follow_ups), [self, op, done = std::move(done)]() mutable {
      if (done) std::move(done)(std::move(op->result));
      self->EndOperation();
    });
  });
  lock.Release();
  if (early.has_value()) std::move(done)(*std::move(early));
}

template <typename Result>
void Session::AnswerNow(const CallOrder& order, const absl::Status& begun, std::optional<Result> early,
                        Done<Result> done) {
  if (early.has_value()) {
    std::move(done)(*std::move(early));
  } else if (!begun.ok()) {
    RefuseOrder(order);
    std::move(done)(begun);
  }
}

void Session::Load(std::vector<LoadItem> items, CallOrder order, Done<BatchResult> done) {
  struct Operation {
    BatchResult result;
    std::vector<RowsWork> work;
    std::vector<TensorWork> tensor_work;
    std::vector<size_t> loaded;
  };
  absl::Status status = CheckItems("items", items.size());
  if (status.ok()) status = CheckOrder(order);
  std::optional<BatchResult> early;
  auto op = std::make_shared<Operation>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = BeginOperation(order);
    if (status.ok()) {
      const absl::Status waits = AwaitOrder(order);
      op->work.reserve(items.size());
      op->tensor_work.reserve(items.size());
      for (size_t i = 0; i < items.size(); ++i) {
        const LoadItem& item = items[i];
        op->result.statuses.push_back([&]() -> absl::Status {
          if (!waits.ok()) return waits;
          absl::StatusOr<Opened> opened = Find(item.range.id);
          if (!opened.ok()) return opened.status();
          if (absl::Status check = CheckRange(item.range); !check.ok()) return check;
          std::vector<const Tensor*> tensors;
          if (item.target == RowTarget::kTensor) {
            absl::StatusOr<std::vector<const Tensor*>> found = FindTensors(item.tensor, item.range.count);
            if (!found.ok()) return found.status();
            tensors = *std::move(found);
          } else if (item.target == RowTarget::kHotBuffer) {
            if (spec_.index_space != IndexSpace::kPosition) {
              return absl::InvalidArgumentError(
                  "target: LOAD_TARGET_HOT_BUFFER given, which needs a session of INDEX_SPACE_POSITION");
            }
            if (item.range.first + item.range.count > spec_.hot_rows) {
              return absl::InvalidArgumentError(absl::StrCat("range: ends at row ", item.range.first + item.range.count,
                                                             ", limit hot_rows ", spec_.hot_rows));
            }
          } else if (absl::Status check = CheckStaging(item.range, item.staging_offset); !check.ok()) {
            return check;
          }
          if (absl::Status room = CheckRoom(item.range.count, tensors); !room.ok()) return room;
          std::vector<int64_t> positions(item.range.count);
          for (int64_t p = 0; p < item.range.count; ++p) positions[p] = item.range.first + p;
          absl::StatusOr<std::vector<int32_t>> rows = pool_->pool.PoolRows(id_, item.range.id, positions);
          if (!rows.ok()) return rows.status();
          absl::Status enqueued;
          if (item.target == RowTarget::kTensor) {
            op->tensor_work.push_back(MakeTensorWork(*std::move(rows), std::move(tensors), item.tensor));
            enqueued = storage_->LoadTensors(op->tensor_work.back());
          } else {
            op->work.push_back({.pool_rows = *std::move(rows)});
            if (item.target == RowTarget::kHotBuffer) {
              enqueued = storage_->LoadHot(opened->state_row, static_cast<int32_t>(item.range.first), op->work.back());
            } else {
              op->work.back().staging_offset = static_cast<int64_t>(item.staging_offset);
              enqueued = storage_->Load(op->work.back());
            }
          }
          if (!enqueued.ok()) return enqueued;
          op->loaded.push_back(i);
          op->result.bytes += static_cast<uint64_t>(item.range.count * BytesPerRow());
          return absl::OkStatus();
        }());
      }
      Done<BatchResult> answer = std::move(done);
      if (SignalOrder(order, absl::OkStatus())) {
        early = op->result;
        done = std::exchange(answer, nullptr);
      }
      storage_->Notify([self = shared_from_this(), op, order, done = std::move(answer)](absl::Status work) mutable {
        work = self->Outcome(order, done == nullptr, std::move(work));
        if (!work.ok()) {
          for (size_t item : op->loaded) op->result.statuses[item] = work;
          op->result.bytes = 0;
        }
        self->pool_->totals.loaded_bytes.fetch_add(op->result.bytes, std::memory_order_relaxed);
        if (done) std::move(done)(std::move(op->result));
        self->EndOperation();
      });
    }
  }
  AnswerNow(order, status, std::move(early), std::move(done));
}

void Session::Commit(std::vector<CommitItem> items, CallOrder order, Done<BatchResult> done) {
  struct Operation {
    BatchResult result;
    CommitWork work;
    std::vector<Written> written;
    std::vector<WriteFollowUp> follow_ups;
  };
  absl::Status status = CheckItems("items", items.size());
  if (status.ok()) status = CheckOrder(order);
  std::optional<BatchResult> early;
  auto op = std::make_shared<Operation>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = CheckNotArmed();
    if (status.ok()) status = BeginOperation(order);
    if (status.ok()) {
      const absl::Status waits = AwaitOrder(order);
      const int64_t newest_rows = pool_->pool.spec().block_rows;
      for (size_t i = 0; i < items.size(); ++i) {
        const CommitItem& item = items[i];
        op->result.statuses.push_back([&]() -> absl::Status {
          if (!waits.ok()) return waits;
          absl::StatusOr<Opened> opened = Find(item.id);
          if (!opened.ok()) return opened.status();
          if (item.count < 1 || item.count > newest_rows) {
            return absl::InvalidArgumentError(
                absl::StrCat("row_count: ", item.count, " given, limits 1 and block_rows ", newest_rows));
          }
          if (absl::Status room = CheckRoom(item.count, {}); !room.ok()) return room;
          absl::StatusOr<WritePlan> plan = pool_->pool.BeginWrite(id_, item.id, item.first, item.count);
          if (!plan.ok()) return plan.status();
          AddFollowUp(item.id, id_, *plan, &op->follow_ups);
          if (absl::Status enqueued = EnqueuePlan(opened->state_row, *plan); !enqueued.ok()) return enqueued;
          const int32_t region = opened->state_row * arena_.region_rows + arena_.newest_row;
          for (int64_t row = 0; row < item.count; ++row) {
            op->work.hot_rows.push_back(region + static_cast<int32_t>(row));
            op->work.pool_rows.push_back(plan->pool_rows[row]);
          }
          op->written.push_back({{item.id, item.first, item.count}, i});
          op->result.bytes += static_cast<uint64_t>(item.count * BytesPerRow());
          return absl::OkStatus();
        }());
      }
      const absl::Status enqueued = op->work.hot_rows.empty() ? absl::OkStatus() : storage_->Commit(op->work);
      Done<BatchResult> answer = std::move(done);
      if (SignalOrder(order, enqueued)) {
        early = op->result;
        done = std::exchange(answer, nullptr);
      }
      storage_->Notify(
          [self = shared_from_this(), op, enqueued, order, done = std::move(answer)](absl::Status work) mutable {
            if (work.ok()) work = enqueued;
            work = self->Outcome(order, done == nullptr, std::move(work));
            for (const Written& written : op->written) {
              if (work.ok()) {
                self->pool_->pool.FinishWrite(written.range.id, written.range.first, written.range.count);
              } else {
                op->result.statuses[written.item] = work;
              }
            }
            if (!work.ok()) op->result.bytes = 0;
            self->pool_->totals.committed_bytes.fetch_add(op->result.bytes, std::memory_order_relaxed);
            self->FollowUp(std::move(op->follow_ups), [self, op, done = std::move(done)]() mutable {
              if (done) std::move(done)(std::move(op->result));
              self->EndOperation();
            });
          });
    }
  }
  AnswerNow(order, status, std::move(early), std::move(done));
}

void Session::Invalidate(std::vector<InvalidateItem> items, Done<BatchResult> done) {
  struct Operation {
    BatchResult result;
    InvalidateWork work;
  };
  absl::Status status = CheckItems("items", items.size());
  auto op = std::make_shared<Operation>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = BeginOperation();
    if (status.ok()) {
      for (const InvalidateItem& item : items) {
        op->result.statuses.push_back([&]() -> absl::Status {
          absl::StatusOr<Opened> opened = Find(item.id);
          if (!opened.ok()) return opened.status();
          if (item.positions.empty() || item.positions.size() > kMaxInvalidPositions) {
            return absl::InvalidArgumentError(
                absl::StrCat("positions: ", item.positions.size(), " given, limits 1 and ", kMaxInvalidPositions));
          }
          std::vector<int64_t> keys(item.positions.begin(), item.positions.end());
          const auto largest = std::max_element(keys.begin(), keys.end());
          // Asked of the pool: any rank may have extended the sequence.
          const absl::StatusOr<SequenceSnapshot> snapshot = pool_->pool.Snapshot(item.id);
          if (!snapshot.ok()) return snapshot.status();
          if (*largest >= snapshot->max_rows) {
            return absl::InvalidArgumentError(
                absl::StrCat("positions: ", *largest, " given, limit max_rows ", snapshot->max_rows));
          }
          if (spec_.index_space == IndexSpace::kPoolRow) {
            absl::StatusOr<std::vector<int32_t>> rows = pool_->pool.PoolRows(id_, item.id, keys);
            if (!rows.ok()) return rows.status();
            keys.assign(rows->begin(), rows->end());
          }
          op->work.state_rows.insert(op->work.state_rows.end(), keys.size(), opened->state_row);
          op->work.keys.insert(op->work.keys.end(), keys.begin(), keys.end());
          return absl::OkStatus();
        }());
      }
      const absl::Status enqueued = op->work.keys.empty() ? absl::OkStatus() : storage_->Invalidate(op->work);
      storage_->Notify([self = shared_from_this(), op, enqueued, done = std::move(done)](absl::Status work) mutable {
        if (work.ok()) work = enqueued;
        if (!work.ok()) {
          for (absl::Status& item : op->result.statuses) item.Update(work);
        }
        std::move(done)(std::move(op->result));
        self->EndOperation();
      });
      return;
    }
  }
  std::move(done)(status);
}

void Session::Gather(int64_t group, std::vector<int64_t> layers, CallOrder order, Done<uint64_t> done) {
  absl::Status status;
  if (group < 0 || group >= static_cast<int64_t>(spec_.groups.size())) {
    status = absl::InvalidArgumentError(
        absl::StrCat("group: ", group, " given, limit ", static_cast<int64_t>(spec_.groups.size()) - 1));
  }
  auto chosen = std::make_shared<std::vector<int32_t>>();
  if (status.ok()) {
    const std::vector<int32_t>& all = spec_.groups[group];
    for (int64_t layer : layers) {
      if (std::find(all.begin(), all.end(), layer) == all.end()) {
        status = absl::InvalidArgumentError(absl::StrCat("layers: ", layer, " given, which is not in group ", group));
      } else if (std::find(chosen->begin(), chosen->end(), layer) != chosen->end()) {
        status = absl::InvalidArgumentError(absl::StrCat("layers: ", layer, " given twice"));
      }
      chosen->push_back(static_cast<int32_t>(layer));
    }
    if (layers.empty()) *chosen = all;
  }
  if (status.ok()) status = CheckOrder(order);
  std::optional<uint64_t> early;
  auto totals = std::make_shared<DeviceTotals>();
  {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) status = CheckNotArmed();
    if (status.ok()) status = BeginOperation(order);
    if (status.ok()) {
      absl::Status enqueued = AwaitOrder(order);
      if (enqueued.ok()) enqueued = storage_->Gather(static_cast<int32_t>(group), *chosen, totals.get());
      Done<uint64_t> answer = std::move(done);
      if (SignalOrder(order, enqueued)) {
        early = 0;
        done = std::exchange(answer, nullptr);
      }
      storage_->Notify([self = shared_from_this(), chosen, totals, enqueued, order,
                        done = std::move(answer)](absl::Status work) mutable {
        if (work.ok()) work = enqueued;
        work = self->Outcome(order, done == nullptr, std::move(work));
        const uint64_t gathered = work.ok() ? self->CountDevice(*totals) : 0;
        if (done) std::move(done)(work.ok() ? absl::StatusOr<uint64_t>(gathered) : absl::StatusOr<uint64_t>(work));
        self->EndOperation();
      });
    }
  }
  AnswerNow(order, status, std::move(early), std::move(done));
}

absl::StatusOr<uint64_t> Session::ReadBytes(const ReadRequest& request) const {
  if (request.values.empty() || request.values.size() > kMaxReadRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows: ", request.values.size(), " given, limits 1 and ", kMaxReadRows));
  }
  const PoolSpec& pool = pool_->pool.spec();
  if (static_cast<int64_t>(request.layers.size()) > pool.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layers: ", request.layers.size(), " given, limit the pool's layers ", pool.layers));
  }
  for (int64_t layer : request.layers) {
    if (layer < 0 || layer >= pool.layers) {
      return absl::InvalidArgumentError(absl::StrCat("layers: ", layer, " given, limit ", pool.layers - 1));
    }
  }
  const uint64_t layers = request.layers.empty() ? pool.layers : request.layers.size();
  return layers * request.values.size() * static_cast<uint64_t>(pool.bytes_per_row());
}

void Session::Read(ReadRequest request, char* target, Done<uint64_t> done) {
  const absl::StatusOr<uint64_t> bytes = ReadBytes(request);
  absl::Status status = bytes.status();
  if (status.ok()) status = BeginBounced("rows", static_cast<int64_t>(*bytes), {});
  if (!status.ok()) {
    std::move(done)(status);
  } else if (bounce_ == nullptr) {
    ReadBegun(request, *bytes, target, std::move(done));
  } else {
    bounce_->Take(
        static_cast<int64_t>(*bytes), [self = shared_from_this(), request = std::move(request), bytes = *bytes, target,
                                       done = std::move(done)](Bounce::Memory memory) mutable {
          char* const from = memory.get();
          self->ReadBegun(
              request, bytes, from,
              [self, memory = std::move(memory), bytes, target,
               done = std::move(done)](absl::StatusOr<uint64_t> read) mutable {
                if (!read.ok()) {
                  memory.reset();
                  std::move(done)(read.status());
                  return;
                }
                self->bounce_->Post([memory = std::move(memory), bytes, target, done = std::move(done)]() mutable {
                  std::memcpy(target, memory.get(), bytes);
                  memory.reset();
                  std::move(done)(bytes);
                });
              });
        });
  }
}

void Session::ReadBegun(const ReadRequest& request, uint64_t bytes, char* target, Done<uint64_t> done) {
  auto work = std::make_shared<ReadWork>();
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
      const absl::StatusOr<Opened> opened = Find(request.id);
      if (!opened.ok()) return opened.status();
      for (int64_t layer : request.layers) work->layers.push_back(static_cast<int32_t>(layer));
      for (int32_t l = 0; request.layers.empty() && l < pool_->pool.spec().layers; ++l) work->layers.push_back(l);
      work->target_bytes = target;
      work->from_hot_cache = request.hot_rows;
      if (request.hot_rows) {
        const int64_t begin = int64_t{opened->state_row} * arena_.region_rows;
        for (uint32_t row : request.values) {
          if (row < begin || row >= begin + arena_.region_rows) {
            return absl::InvalidArgumentError(absl::StrCat("hot_rows: ", row, " given, limits ", begin, " and ",
                                                           begin + arena_.region_rows - 1, " for the sequence"));
          }
          work->rows.push_back(static_cast<int32_t>(row));
        }
        return absl::OkStatus();
      }
      const std::vector<int64_t> positions(request.values.begin(), request.values.end());
      absl::StatusOr<std::vector<int32_t>> rows = pool_->pool.PoolRows(id_, request.id, positions);
      if (!rows.ok()) return rows.status();
      work->rows = *std::move(rows);
      return absl::OkStatus();
    }();
    if (status.ok()) {
      const absl::Status enqueued = storage_->Read(*work);
      storage_->Notify(
          [self = shared_from_this(), work, enqueued, bytes, done = std::move(done)](absl::Status finished) mutable {
            if (finished.ok()) finished = enqueued;
            if (finished.ok()) {
              std::move(done)(bytes);
            } else {
              std::move(done)(finished);
            }
            self->EndOperation();
          });
      return;
    }
  }
  std::move(done)(status);
  EndOperation();
}

}  // namespace stoker::core
