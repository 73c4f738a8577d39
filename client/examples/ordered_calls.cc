// Decodes on a GPU without a wait on the host: what the engine's stream writes, the daemon's stream waits for, and the
// other way round. On the CPU the same calls wait. Where the daemon has no ordered calls it says why.
//
//   example_ordered_calls unix:/run/stoker/stokerd.sock [steps]
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "client/device_plane.h"
#include "client/session.h"

namespace {

using stoker::client::FirstError;
using stoker::client::FromItem;
using stoker::client::Session;
namespace v1 = stoker::v1;

constexpr uint32_t kLayers = 4;
constexpr uint32_t kRowBytes = 64;
constexpr uint32_t kPromptRows = 100;
constexpr uint32_t kMaxRows = 4096;
constexpr uint32_t kTopK = 16;
constexpr int kAhead = 16;
constexpr uint64_t kStagingBytes = uint64_t{kLayers} * kPromptRows * kRowBytes;

absl::Status FromCuda(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

// What stands for the engine's kernels: on the stream, or at once where the session is on the CPU and there is none.
absl::Status Fill(void* target, int value, size_t bytes, cudaStream_t stream) {
  if (stream != nullptr) return FromCuda(cudaMemsetAsync(target, value, bytes, stream));
  std::memset(target, value, bytes);
  return absl::OkStatus();
}
absl::Status Copy(void* target, const void* source, size_t bytes, cudaStream_t stream) {
  if (stream != nullptr) return FromCuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream));
  std::memcpy(target, source, bytes);
  return absl::OkStatus();
}

// Memory that the stream reads its entries from, and writes its hot rows to, for so many steps.
struct Memory {
  Memory(size_t bytes, bool pinned) : own(pinned ? 0 : bytes), data(own.data()) {
    if (pinned) error = cudaMallocHost(&data, bytes);
  }
  ~Memory() {
    if (own.empty()) cudaFreeHost(data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::vector<char> own;
  void* data;
  cudaError_t error = cudaSuccess;
};

absl::Status Run(Session& session, cudaStream_t stream, int steps) {
  const auto arena = session.arena();
  const stoker::client::CallOptions on_stream = {.stream = stream};
  v1::AdmitRequest admit;
  admit.add_items()->set_prompt_rows(kPromptRows);
  admit.mutable_items(0)->set_max_rows(kMaxRows);
  v1::AdmitResponse admitted;
  if (absl::Status status = session.Admit(admit, &admitted); !status.ok()) return status;
  if (absl::Status status = FromItem(admitted.sequences(0).status()); !status.ok()) return status;

  // Stands for the prefill. The store is enqueued behind it; nobody waits.
  if (absl::Status s = Fill(arena->Staging()->data(), 1, kStagingBytes, stream); !s.ok()) return s;
  v1::StoreRequest store;
  store.mutable_order()->set_wait(true);    // begin after what the stream has been given so far
  store.mutable_order()->set_signal(true);  // reply when the work is enqueued
  v1::StoreItem* const item = store.add_items();
  item->mutable_range()->set_sequence_id(admitted.sequences(0).sequence_id());
  item->mutable_range()->set_row_count(kPromptRows);
  item->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse stored;
  if (absl::Status status = session.Store(store, &stored, on_stream); !status.ok()) return status;
  if (absl::Status status = FirstError(stored.statuses()); !status.ok()) return status;

  const size_t words = static_cast<size_t>(steps) * kTopK;
  const Memory memory(2 * words * sizeof(int32_t), /*pinned=*/stream != nullptr);
  if (absl::Status s = FromCuda(memory.error); !s.ok()) return s;
  auto* const inputs = static_cast<int32_t*>(memory.data);
  int32_t* const outputs = inputs + words;
  const auto newest =
      static_cast<uint32_t>(arena->RegionBegin(admitted.sequences(0).state_row()) + arena->newest_row());
  const auto indices = arena->Indices(0);
  if (!indices.ok()) return indices.status();
  const auto hot_rows = arena->HotRows(0);
  if (!hot_rows.ok()) return hot_rows.status();
  v1::StepRequest step;
  step.mutable_order()->set_wait(true);
  step.mutable_order()->set_signal(true);
  step.set_top_k(kTopK);
  step.set_source(v1::DATA_SOURCE_SHARED);
  step.add_groups();
  v1::StepRow* const row = step.add_rows();
  row->set_sequence_id(admitted.sequences(0).sequence_id());
  row->set_commit(true);
  v1::StepResponse stepped;
  for (int i = 0; i < steps; ++i) {
    const uint32_t length = kPromptRows + 1 + static_cast<uint32_t>(i);
    // Stands for the model: its kernels write the newest row of each layer and the entries.
    int32_t* const entries = inputs + static_cast<size_t>(i) * kTopK;
    for (uint32_t k = 0; k < kTopK; ++k) entries[k] = static_cast<int32_t>(length - 1 - k * 5);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto target = arena->HotRow(layer, stoker::client::RowPart::kRow, newest);
      if (!target.ok()) return target.status();
      if (absl::Status s = Fill(target->data(), static_cast<int>(length), target->size(), stream); !s.ok()) return s;
    }
    if (absl::Status s = Copy((*indices)[0].data(), entries, kTopK * sizeof(int32_t), stream); !s.ok()) return s;
    // The reply comes when the step is enqueued; from here on the stream waits for it.
    row->set_length(length);
    if (absl::Status status = session.Step(step, &stepped, on_stream); !status.ok()) return status;
    if (absl::Status status = FirstError(stepped.statuses()); !status.ok()) return status;
    // Stands for the attention, which reads the rows that the hot rows name.
    int32_t* const output = outputs + static_cast<size_t>(i) * kTopK;
    if (absl::Status s = Copy(output, (*hot_rows)[0].data(), kTopK * sizeof(int32_t), stream); !s.ok()) return s;
    // No more calls than the daemon queues.
    if (stream != nullptr && i % kAhead == kAhead - 1) {
      if (absl::Status status = FromCuda(cudaStreamSynchronize(stream)); !status.ok()) return status;
    }
  }
  if (stream != nullptr) {
    if (absl::Status status = FromCuda(cudaStreamSynchronize(stream)); !status.ok()) return status;
  }
  // A wait that the end of the session has ended says nothing about rows.
  if (absl::Status status = session.status(); !status.ok()) return status;
  for (size_t i = 0; i < words; ++i) {
    if (outputs[i] < 0) return absl::InternalError("an entry has no hot row");
  }
  std::printf("%d steps, each entry has its hot row\n", steps);
  return absl::OkStatus();
}

absl::Status Decode(const std::string& address, int steps) {
  absl::StatusOr<stoker::client::Client> client = stoker::client::Client::Connect(address);
  if (!client.ok()) return client.status();
  v1::CreatePoolRequest pool;
  pool.mutable_spec()->set_name("example-ordered");
  pool.mutable_spec()->set_layers(kLayers);
  pool.mutable_spec()->set_row_layout(v1::ROW_LAYOUT_LINEAR);
  pool.mutable_spec()->set_row_bytes(kRowBytes);
  pool.mutable_spec()->set_blocks(64);
  if (auto created = client->CreatePool(pool); !created.ok()) return created.status();
  v1::AttachRequest attach;
  attach.set_pool("example-ordered");
  attach.set_state_rows(1);
  attach.set_hot_rows(64);
  attach.set_max_top_k(kTopK);
  attach.set_max_sequence_rows(kMaxRows);
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  attach.set_staging_bytes(kStagingBytes);
  v1::IndexGroup* const group = attach.add_groups();
  for (uint32_t layer = 0; layer < kLayers; ++layer) group->add_layers(layer);
  stoker::client::SessionOptions options;
  options.arena_mapping = stoker::client::ArenaMapping::kDevice;
  options.ordered_calls = true;
  absl::StatusOr<std::unique_ptr<Session>> session = client->Attach(attach, options);
  if (absl::IsFailedPrecondition(session.status())) {
    std::printf("no ordered calls: %s\n", std::string(session.status().message()).c_str());
    return absl::OkStatus();
  }
  if (!session.ok()) return session.status();
  if (!(*session)->arena()->on_device()) return Run(**session, nullptr, steps);
  cudaStream_t stream = nullptr;
  if (absl::Status s = FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); !s.ok()) return s;
  absl::Status status = Run(**session, stream, steps);
  // Before the session goes, and its arena.
  status.Update(FromCuda(cudaStreamSynchronize(stream)));
  status.Update(FromCuda(cudaStreamDestroy(stream)));
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  stoker::client::DevicePlane::SetUpProcess();  // kernels are loaded before a stream waits
  const absl::Status status =
      Decode(argc > 1 ? argv[1] : "unix:/run/stoker/stokerd.sock", argc > 2 ? std::atoi(argv[2]) : 8);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
