// Decodes on the server plane: steps are started by doorbells in the mapped arena, and nothing is called for them.
// Where the daemon does not offer that plane it says why, and steps by calls. Comes back after a daemon's restart.
//
//   example_server_plane unix:/run/stoker/stokerd.sock [steps]
#include "client/server_plane.h"

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
using stoker::client::ArenaMapping;
using stoker::client::CallOptions;
using stoker::client::ChoosePlane;
using stoker::client::Client;
using stoker::client::FirstError;
using stoker::client::FromItem;
using stoker::client::Plane;
using stoker::client::PlaneRow;
using stoker::client::RowPart;
using stoker::client::ServerPlane;
using stoker::client::Session;
using stoker::client::SessionOptions;
namespace v1 = stoker::v1;

constexpr uint32_t kLayers = 4;
constexpr uint32_t kGroups = 2;  // of two layers each
constexpr uint32_t kRowBytes = 64;
constexpr uint32_t kPromptRows = 100;
constexpr uint32_t kMaxRows = 4096;
constexpr uint32_t kTopK = 16;
constexpr uint64_t kStagingBytes = uint64_t{kLayers} * kPromptRows * kRowBytes;

// What a re-attach takes away.
struct Opened {
  std::shared_ptr<const Arena> arena;
  std::unique_ptr<ServerPlane> plane;  // null: steps are calls
  uint64_t generation = 0;             // 0: nothing is open
  uint64_t sequence_id = 0;
  uint32_t state_row = 0;
};

// The server plane where it can be had. Null where not, which is no error.
absl::StatusOr<std::unique_ptr<ServerPlane>> ArmWherePossible(Session& session) {
  absl::Status status = ChoosePlane(session.info(), Plane::kServer).status();
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<ServerPlane>> plane = ServerPlane::Arm(session, kTopK);
    if (plane.ok()) return plane;
    status = plane.status();
  }
  // RESOURCE_EXHAUSTED: other sessions have it.
  if (!absl::IsFailedPrecondition(status) && !absl::IsResourceExhausted(status)) return status;
  std::fprintf(stderr, "steps are calls, for there is no server plane: %s\n", std::string(status.message()).c_str());
  return nullptr;
}

absl::StatusOr<Opened> Open(Session& session) {
  absl::StatusOr<uint64_t> generation = session.AwaitAttached();
  if (!generation.ok()) return generation.status();
  Opened opened;
  opened.generation = *generation;
  opened.arena = session.arena();
  CallOptions options;
  options.generation = opened.generation;

  v1::AdmitRequest admit;
  admit.add_items()->set_prompt_rows(kPromptRows);
  admit.mutable_items(0)->set_max_rows(kMaxRows);
  v1::AdmitResponse admitted;
  if (absl::Status status = session.Admit(admit, &admitted, options); !status.ok()) return status;
  if (absl::Status status = FromItem(admitted.sequences(0).status()); !status.ok()) return status;
  opened.sequence_id = admitted.sequences(0).sequence_id();
  opened.state_row = admitted.sequences(0).state_row();

  auto staging = opened.arena->Staging();
  if (!staging.ok()) return staging.status();
  std::memset(staging->data(), 1, kStagingBytes);
  v1::StoreRequest store;
  v1::StoreItem* const item = store.add_items();
  item->mutable_range()->set_sequence_id(opened.sequence_id);
  item->mutable_range()->set_row_count(kPromptRows);
  item->set_source(v1::DATA_SOURCE_SHARED);
  v1::StoreResponse stored;
  if (absl::Status status = session.Store(store, &stored, options); !status.ok()) return status;
  if (absl::Status status = FirstError(stored.statuses()); !status.ok()) return status;

  absl::StatusOr<std::unique_ptr<ServerPlane>> plane = ArmWherePossible(session);
  if (!plane.ok()) return plane.status();
  opened.plane = *std::move(plane);
  return opened;
}

absl::Status WriteNewest(const Opened& opened, uint32_t length) {
  const Arena& arena = *opened.arena;
  const auto newest = static_cast<uint32_t>(arena.RegionBegin(opened.state_row) + arena.newest_row());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    auto row = arena.HotRow(layer, RowPart::kRow, newest);
    if (!row.ok()) return row.status();
    std::memset(row->data(), static_cast<int>(length), row->size());
  }
  return absl::OkStatus();
}

void SelectTopK(uint32_t length, absl::Span<int32_t> entries) {
  for (uint32_t i = 0; i < kTopK; ++i) entries[i] = static_cast<int32_t>(length - 1 - i * 5);
}

absl::Status StepByDoorbells(const Opened& opened, uint32_t length, int32_t* misses) {
  ServerPlane& plane = *opened.plane;
  const PlaneRow row = {opened.sequence_id, opened.state_row, length};
  if (absl::Status status = plane.Begin({row}); !status.ok()) return status;
  if (absl::Status status = WriteNewest(opened, length); !status.ok()) return status;
  for (uint32_t group = 0; group < kGroups; ++group) {
    SelectTopK(length, plane.Entries(group, 0));
    if (absl::Status status = plane.Ring(group); !status.ok()) return status;
    if (absl::Status status = plane.Await(group); !status.ok()) return status;
    // Here the attention of the group's layers reads the rows of plane.HotRows(group, 0).
    *misses += plane.Misses(group, 0);
  }
  if (absl::Status status = plane.Commit({1}); !status.ok()) return status;
  if (absl::Status status = plane.AwaitCommit(); !status.ok()) return status;
  return plane.FirstRowError();
}

absl::Status StepByCall(Session& session, const Opened& opened, uint32_t length, int32_t* misses) {
  if (absl::Status status = WriteNewest(opened, length); !status.ok()) return status;
  v1::StepRequest step;
  step.add_rows()->set_sequence_id(opened.sequence_id);
  step.mutable_rows(0)->set_length(length);
  step.mutable_rows(0)->set_commit(true);
  step.set_top_k(kTopK);
  step.set_source(v1::DATA_SOURCE_SHARED);
  for (uint32_t group = 0; group < kGroups; ++group) {
    auto indices = opened.arena->Indices(group);
    if (!indices.ok()) return indices.status();
    SelectTopK(length, (*indices)[0]);
    step.add_groups()->set_group(group);
  }
  v1::StepResponse stepped;
  CallOptions options;
  options.generation = opened.generation;
  if (absl::Status status = session.Step(step, &stepped, options); !status.ok()) return status;
  for (uint32_t group = 0; group < kGroups; ++group) {
    auto missed = opened.arena->Misses(group);
    if (!missed.ok()) return missed.status();
    *misses += (*missed)[0];
  }
  return FirstError(stepped.statuses());
}

// Whether it failed because the daemon went away (UNAVAILABLE) or is back without our sequences (FAILED_PRECONDITION),
// and not because the session has ended: then it is worth starting anew.
bool IsLost(const Session& session, const absl::Status& status) {
  return (absl::IsUnavailable(status) || absl::IsFailedPrecondition(status)) && !session.ended();
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
  attach.set_staging_bytes(kStagingBytes);
  for (uint32_t group = 0; group < kGroups; ++group) {
    v1::IndexGroup* const layers = attach.add_groups();
    for (uint32_t i = 0; i < kLayers / kGroups; ++i) layers->add_layers(group * (kLayers / kGroups) + i);
  }
  SessionOptions options;
  options.arena_mapping = ArenaMapping::kRequired;
  options.recreate_pool = true;
  absl::StatusOr<std::unique_ptr<Session>> session = client->Attach(attach, options);
  if (!session.ok()) return session.status();

  Opened opened;
  uint32_t length = 0;
  for (int done = 0; done < steps;) {
    if (opened.generation == 0) {
      absl::StatusOr<Opened> again = Open(**session);
      if (!again.ok() && IsLost(**session, again.status())) continue;
      if (!again.ok()) return again.status();
      opened = *std::move(again);
      length = kPromptRows;
    }
    int32_t misses = 0;
    ++length;
    const absl::Status status = opened.plane != nullptr ? StepByDoorbells(opened, length, &misses)
                                                        : StepByCall(**session, opened, length, &misses);
    if (status.ok()) {
      std::printf("length %u: %d missed\n", length, misses);
      ++done;
    } else if (IsLost(**session, status)) {
      opened = Opened();
    } else {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status =
      Decode(argc > 1 ? argv[1] : "unix:/run/stoker/stokerd.sock", argc > 2 ? std::atoi(argv[2]) : 8);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
