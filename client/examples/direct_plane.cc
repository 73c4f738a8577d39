// Decodes on the direct plane: steps are run by this process, on the mapped arena and pool. Where the daemon does not
// offer that plane it says why, and ends with status 2.
//
//   example_direct_plane unix:/run/stoker/stokerd.sock [steps]
//
// This one is for sessions on the CPU. On a GPU the engine's kernels write rows and entries, and the calls are
// EnqueueBegin, EnqueueGroup and EnqueueCommit: client/README.md.
#include "client/direct_plane.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/client.h"
#include "client/plane.h"
#include "client/session.h"

namespace {

using stoker::client::Arena;
using stoker::client::AttachOnPlane;
using stoker::client::Client;
using stoker::client::DirectPlane;
using stoker::client::FirstError;
using stoker::client::FromItem;
using stoker::client::Plane;
using stoker::client::PlaneRow;
using stoker::client::RowPart;
using stoker::client::Session;
namespace v1 = stoker::v1;

constexpr uint32_t kLayers = 4;
constexpr uint32_t kGroups = 2;  // of two layers each
constexpr uint32_t kRowBytes = 64;
constexpr uint32_t kPromptRows = 100;
constexpr uint32_t kMaxRows = 4096;
constexpr uint32_t kTopK = 16;

struct Opened {
  uint64_t sequence_id = 0;
  uint32_t state_row = 0;
};

// Admits a sequence and stores its prompt: calls, as on every plane.
absl::StatusOr<Opened> Open(Session& session) {
  v1::AdmitRequest admit;
  admit.add_items()->set_prompt_rows(kPromptRows);
  admit.mutable_items(0)->set_max_rows(kMaxRows);
  v1::AdmitResponse admitted;
  if (absl::Status status = session.Admit(admit, &admitted); !status.ok()) return status;
  if (absl::Status status = FromItem(admitted.sequences(0).status()); !status.ok()) return status;
  const Opened opened = {admitted.sequences(0).sequence_id(), admitted.sequences(0).state_row()};
  v1::StoreRequest store;
  v1::StoreItem* const item = store.add_items();
  item->mutable_range()->set_sequence_id(opened.sequence_id);
  item->mutable_range()->set_row_count(kPromptRows);
  item->set_source(v1::DATA_SOURCE_INLINE);
  item->set_rows(std::string(size_t{kLayers} * kPromptRows * kRowBytes, '\1'));
  v1::StoreResponse stored;
  if (absl::Status status = session.Store(store, &stored); !status.ok()) return status;
  if (absl::Status status = FirstError(stored.statuses()); !status.ok()) return status;
  return opened;
}

absl::Status WriteNewest(const Arena& arena, const Opened& opened, uint32_t length) {
  const auto newest = static_cast<uint32_t>(arena.RegionBegin(opened.state_row) + arena.newest_row());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    auto row = arena.HotRow(layer, RowPart::kRow, newest);
    if (!row.ok()) return row.status();
    std::memset(row->data(), static_cast<int>(length), row->size());
  }
  return absl::OkStatus();
}

absl::Status Step(DirectPlane& plane, const Opened& opened, uint32_t length, int32_t* misses) {
  const PlaneRow row = {opened.sequence_id, opened.state_row, length};
  if (absl::Status status = plane.Begin({row}); !status.ok()) return status;
  if (absl::Status status = WriteNewest(plane.arena(), opened, length); !status.ok()) return status;
  for (uint32_t group = 0; group < kGroups; ++group) {
    const absl::Span<int32_t> entries = plane.Entries(group, 0);
    for (uint32_t i = 0; i < kTopK; ++i) entries[i] = static_cast<int32_t>(length - 1 - i * 5);
    if (absl::Status status = plane.Group(group); !status.ok()) return status;
    if (absl::Status status = plane.Await(group); !status.ok()) return status;
    // Here the attention of the group's layers reads the rows of plane.HotRows(group, 0).
    *misses += plane.Misses(group, 0);
  }
  if (absl::Status status = plane.Commit({1}); !status.ok()) return status;
  if (absl::Status status = plane.AwaitCommit(); !status.ok()) return status;
  return plane.FirstRowError();
}

absl::Status Decode(const std::string& address, int steps) {
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
  attach.set_max_sequence_rows(kMaxRows);
  attach.set_index_space(v1::INDEX_SPACE_POSITION);
  for (uint32_t group = 0; group < kGroups; ++group) {
    v1::IndexGroup* const layers = attach.add_groups();
    for (uint32_t i = 0; i < kLayers / kGroups; ++i) layers->add_layers(group * (kLayers / kGroups) + i);
  }
  absl::StatusOr<std::unique_ptr<Session>> session = AttachOnPlane(*client, attach, Plane::kDirect);
  if (!session.ok()) return session.status();
  if ((*session)->arena()->on_device()) return absl::FailedPreconditionError("this example is for sessions on the CPU");
  absl::StatusOr<Opened> opened = Open(**session);
  if (!opened.ok()) return opened.status();
  absl::StatusOr<std::unique_ptr<DirectPlane>> plane = DirectPlane::Open(**session, kTopK);
  if (!plane.ok()) return plane.status();
  for (uint32_t length = kPromptRows + 1; steps > 0 && length <= kMaxRows; --steps, ++length) {
    int32_t misses = 0;
    if (absl::Status status = Step(**plane, *opened, length, &misses); !status.ok()) return status;
    std::printf("length %u: %d missed\n", length, misses);
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status =
      Decode(argc > 1 ? argv[1] : "unix:/run/stoker/stokerd.sock", argc > 2 ? std::atoi(argv[2]) : 8);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : absl::IsFailedPrecondition(status) ? 2 : 1;
}
