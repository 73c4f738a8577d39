#include "tests/gpu/order_engine.h"

#include <utility>

#include "absl/time/clock.h"
#include "client/status.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/stream_words.h"
#include "tests/system/rank.h"

namespace stoker::gpu_test {
namespace {

using kernels::cuda::ToStatus;

}  // namespace

v1::PoolSpec OrderEngine::Pool(const std::string& name) {
  return system_test::LinearPool(name, kLayers, kRowBytes, 2000);
}

absl::StatusOr<std::unique_ptr<OrderEngine>> OrderEngine::Attach(const client::Client& client, const std::string& pool,
                                                                 const std::string& name, const std::string& key,
                                                                 client::SessionOptions options) {
  std::unique_ptr<OrderEngine> engine(new OrderEngine);
  v1::PoolSpec spec = Pool(pool);
  v1::AttachRequest attach = system_test::AttachTo(spec, name, 2, kHotRows, kTopK, kMaxRows);
  attach.set_staging_bytes(uint64_t{kMaxRows} * kLayers * kRowBytes);
  options.arena_mapping = client::ArenaMapping::kDevice;
  options.ordered_calls = true;
  auto session = client.Attach(attach, std::move(options));
  if (!session.ok()) return session.status();
  engine->session_ = *std::move(session);
  engine->arena_ = engine->session_->arena();
  v1::AdmitRequest admit;
  v1::AdmitItem* item = admit.add_items();
  item->set_sequence_key(key);
  item->set_prompt_rows(kPrompt);
  item->set_max_rows(kMaxRows);
  v1::AdmitResponse admitted;
  absl::Status status = engine->session_->Admit(admit, &admitted);
  if (status.ok()) status = client::FromItem(admitted.sequences(0).status());
  if (!status.ok()) return status;
  engine->sequence_id_ = admitted.sequences(0).sequence_id();
  engine->state_row_ = admitted.sequences(0).state_row();
  engine->stored_rows_ = admitted.sequences(0).stored_rows();

  const auto entries = engine->arena_->Indices(0);
  if (!entries.ok()) return entries.status();
  const auto hot_rows = engine->arena_->HotRows(0);
  if (!hot_rows.ok()) return hot_rows.status();
  engine->entries_ = (*entries)[0].data();
  engine->hot_rows_ = (*hot_rows)[0].data();
  engine->hot_.layers = kLayers;
  engine->hot_.row_words = kRowBytes / 4;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto part = engine->arena_->HotPart(layer, client::RowPart::kRow);
    if (!part.ok()) return part.status();
    engine->hot_.layer[layer] = reinterpret_cast<uint32_t*>(part->data());
    // Rows of a LINEAR pool lie one behind the other, whatever their pages.
    engine->hot_.row_stride_words = static_cast<int64_t>(reinterpret_cast<uint32_t*>((*part)[1].data()) -
                                                         reinterpret_cast<uint32_t*>((*part)[0].data()));
  }
  auto stream = kernels::cuda::MakeStream();
  if (!stream.ok()) return stream.status();
  engine->stream_ = *std::move(stream);
  auto counts = kernels::cuda::MakeDeviceMemory(sizeof(RowCounts));
  if (!counts.ok()) return counts.status();
  engine->counts_ = *std::move(counts);
  auto told = kernels::cuda::MakePinnedMemory(sizeof(uint32_t));
  if (!told.ok()) return told.status();
  engine->told_ = *std::move(told);
  *static_cast<uint32_t*>(engine->told_.get()) = 0;
  status = ToStatus(cudaMemsetAsync(engine->counts_.get(), 0, sizeof(RowCounts), engine->stream()), "memset");
  if (!status.ok()) return status;
  return engine;
}

LayerRows OrderEngine::Staging(uint32_t first_row, uint32_t count) const {
  LayerRows rows = hot_;
  rows.row_stride_words = kRowBytes / 4;
  auto* const base =
      reinterpret_cast<uint32_t*>(arena_->Staging()->data()) + int64_t{first_row} * kLayers * rows.row_stride_words;
  for (uint32_t layer = 0; layer < kLayers; ++layer) rows.layer[layer] = base + layer * count * rows.row_stride_words;
  return rows;
}

absl::Status OrderEngine::StorePrompt(uint64_t work_ns) {
  ProduceArgs produce;
  produce.work_ns = work_ns;
  produce.rows = Staging(0, kPrompt);
  produce.count = kPrompt;
  produce.told = static_cast<uint32_t*>(told_.get());
  produce.number = ++number_;
  if (absl::Status status = ToStatus(LaunchProduce(produce, stream()), "produce"); !status.ok()) return status;
  v1::StoreRequest store;
  store.mutable_order()->set_wait(true);
  store.mutable_order()->set_signal(true);
  v1::StoreItem* item = store.add_items();
  item->mutable_range()->set_sequence_id(sequence_id_);
  item->mutable_range()->set_row_count(kPrompt);
  item->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse stored;
  absl::Status status = session_->Store(store, &stored, {.stream = stream()});
  status.Update(client::FirstError(stored.statuses()));
  return status;
}

absl::Status OrderEngine::Hang() {
  auto never = kernels::cuda::MakeDeviceMemory(sizeof(uint64_t));
  if (!never.ok()) return never.status();
  never_ = *std::move(never);
  cudaError_t error = cudaMemsetAsync(never_.get(), 0, sizeof(uint64_t), stream());
  if (error == cudaSuccess) {
    const kernels::cuda::StreamWords words(kernels::cuda::LoadStreamWordDriver());
    error = words.Await(static_cast<const uint64_t*>(never_.get()), 1, stream());
  }
  return ToStatus(error, "a stream that waits");
}

absl::Status OrderEngine::Produce(uint32_t length, uint64_t work_ns) {
  ProduceArgs produce;
  produce.work_ns = work_ns;
  produce.rows = hot_;
  produce.row = static_cast<int64_t>(arena_->RegionBegin(state_row_) + arena_->newest_row());
  produce.first = length - 1;
  produce.count = 1;
  produce.entries = entries_;
  produce.top_k = kTopK;
  produce.length = length;
  produce.told = static_cast<uint32_t*>(told_.get());
  produce.number = ++number_;
  return ToStatus(LaunchProduce(produce, stream()), "produce");
}

v1::StepRequest OrderEngine::StepRequest(uint32_t length, bool wait) const {
  v1::StepRequest step;
  step.mutable_order()->set_wait(wait);
  step.mutable_order()->set_signal(true);
  step.set_top_k(kTopK);
  step.set_source(v1::DATA_SOURCE_SHARED);
  step.add_groups();
  v1::StepRow* row = step.add_rows();
  row->set_sequence_id(sequence_id_);
  row->set_length(length);
  row->set_commit(true);
  return step;
}

absl::Status OrderEngine::Step(uint32_t length, uint64_t work_ns, bool wait) {
  if (absl::Status status = Produce(length, work_ns); !status.ok()) return status;
  v1::StepResponse stepped;
  absl::Status status = session_->Step(StepRequest(length, wait), &stepped, {.stream = stream()});
  status.Update(client::FirstError(stepped.statuses()));
  if (!status.ok()) return status;
  return ToStatus(LaunchCheck(hot_, entries_, hot_rows_, kTopK, counts_on_device(), stream()), "check");
}

absl::Status OrderEngine::AwaitStream(absl::Duration limit) const {
  for (const absl::Time end = absl::Now() + limit; absl::Now() < end; absl::SleepFor(absl::Microseconds(200))) {
    const cudaError_t state = cudaStreamQuery(stream());
    if (state != cudaErrorNotReady) return ToStatus(state, "the engine's stream");
    cudaGetLastError();
  }
  return absl::DeadlineExceededError("the engine's stream does not end");
}

RowCounts OrderEngine::counts() const {
  RowCounts counts;
  if (cudaMemcpy(&counts, counts_.get(), sizeof counts, cudaMemcpyDeviceToHost) != cudaSuccess) counts.wrong = ~0ull;
  return counts;
}

}  // namespace stoker::gpu_test
