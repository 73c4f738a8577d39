// A whole client in one file: stores a prompt's rows, then decodes a few tokens with the indices and hot rows in the
// messages. Runs against any daemon:
//
//   stokerd --config ... &
//   example_decode unix:/run/stoker/stokerd.sock
#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "client/client.h"
#include "client/session.h"

namespace {

using stoker::client::Client;
using stoker::client::FirstError;
using stoker::client::FromItem;
using stoker::client::Session;
namespace v1 = stoker::v1;

constexpr uint32_t kLayers = 4;
constexpr uint32_t kRowBytes = 64;
constexpr uint32_t kPromptRows = 100;
constexpr uint32_t kTokens = 8;
constexpr uint32_t kTopK = 16;

std::string RowsOf(uint32_t rows, uint32_t first) {
  std::string bytes;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t row = 0; row < rows; ++row) bytes.append(kRowBytes, static_cast<char>(layer * 31 + first + row));
  }
  return bytes;
}

absl::Status Decode(const std::string& address) {
  absl::StatusOr<Client> client = Client::Connect(address);
  if (!client.ok()) return client.status();

  v1::CreatePoolRequest pool;
  pool.mutable_spec()->set_name("example");
  pool.mutable_spec()->set_layers(kLayers);
  pool.mutable_spec()->set_row_layout(v1::ROW_LAYOUT_LINEAR);
  pool.mutable_spec()->set_row_bytes(kRowBytes);
  pool.mutable_spec()->set_blocks(64);
  if (auto created = client->CreatePool(pool); !created.ok()) return created.status();

  v1::AttachRequest attach;
  attach.set_pool("example");
  attach.set_state_rows(1);
  attach.set_hot_rows(64);
  attach.set_max_top_k(kTopK);
  attach.set_max_sequence_rows(kPromptRows + kTokens);
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  v1::IndexGroup* const group = attach.add_groups();
  for (uint32_t layer = 0; layer < kLayers; ++layer) group->add_layers(layer);
  absl::StatusOr<std::unique_ptr<Session>> session = client->Attach(attach);
  if (!session.ok()) return session.status();

  // Opens the sequence, and stores what the pool does not have of it.
  v1::AdmitRequest admit;
  admit.add_items()->set_prompt_rows(kPromptRows);
  admit.mutable_items(0)->set_max_rows(kPromptRows + kTokens);
  v1::AdmitResponse admitted;
  if (absl::Status status = (*session)->Admit(admit, &admitted); !status.ok()) return status;
  if (absl::Status status = FromItem(admitted.sequences(0).status()); !status.ok()) return status;
  const uint64_t sequence_id = admitted.sequences(0).sequence_id();

  v1::StoreRequest store;
  v1::StoreItem* const item = store.add_items();
  item->mutable_range()->set_sequence_id(sequence_id);
  item->mutable_range()->set_row_count(kPromptRows);
  item->set_source(v1::DATA_SOURCE_INLINE);
  item->set_rows(RowsOf(kPromptRows, 0));
  v1::StoreResponse stored;
  if (absl::Status status = (*session)->Store(store, &stored); !status.ok()) return status;
  if (absl::Status status = FirstError(stored.statuses()); !status.ok()) return status;

  // One step for each token: its row goes in, the hot rows of the top-k positions come out.
  v1::StepRequest step;
  v1::StepRow* const row = step.add_rows();
  row->set_sequence_id(sequence_id);
  row->set_commit(true);
  v1::StepGroup* const entries = step.add_groups();
  step.set_top_k(kTopK);
  step.set_source(v1::DATA_SOURCE_INLINE);
  v1::StepResponse stepped;
  for (uint32_t token = 0; token < kTokens; ++token) {
    const uint32_t length = kPromptRows + token + 1;
    row->set_length(length);
    row->set_newest_row(RowsOf(1, length - 1));
    entries->clear_indices();
    for (uint32_t i = 0; i < kTopK; ++i) entries->add_indices(static_cast<int32_t>(length - 1 - i * 5));
    if (absl::Status status = (*session)->Step(step, &stepped); !status.ok()) return status;
    if (absl::Status status = FirstError(stepped.statuses()); !status.ok()) return status;
    const v1::LookupCounts& counts = stepped.groups(0).counts(0);
    std::printf("length %u: %u hot, %u newest, %u missed\n", length, counts.hot(), counts.newest(), counts.miss());
  }

  v1::ReleaseRequest release;
  release.add_sequence_ids(sequence_id);
  v1::ReleaseResponse released;
  if (absl::Status status = (*session)->Release(release, &released); !status.ok()) return status;
  return FirstError(released.statuses());
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Decode(argc > 1 ? argv[1] : "unix:/run/stoker/stokerd.sock");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
