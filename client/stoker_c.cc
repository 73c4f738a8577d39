#include "client/stoker_c.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/direct_plane.h"
#include "client/plane.h"
#include "client/server_plane.h"
#include "client/session.h"

namespace client = stoker::client;
namespace v1 = stoker::v1;

struct stoker_client {
  client::Client client;
};

// Planes share it: handles are freed in any order.
struct SharedSession {
  std::unique_ptr<client::Session> session;
  uint32_t row_bytes = 0;
  int groups = 0;

  std::mutex mutex;
  std::shared_ptr<const client::Arena> arena;  // guarded by mutex: of the last pointers that were handed out
};

struct stoker_session {
  std::shared_ptr<SharedSession> shared;
};

struct stoker_server_plane {
  std::shared_ptr<SharedSession> shared;  // goes last
  std::vector<client::PlaneRow> rows;     // kept, so that a step allocates nothing
  std::unique_ptr<client::ServerPlane> plane;
};

struct stoker_direct_plane {
  std::shared_ptr<SharedSession> shared;
  std::vector<client::PlaneRow> rows;
  std::unique_ptr<client::DirectPlane> plane;
};

namespace {

static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) == STOKER_UNAUTHENTICATED);
template <typename Proto>
constexpr bool Equal(Proto proto, int value) {
  return static_cast<int>(proto) == value;
}
static_assert(Equal(v1::PLANE_DIRECT, STOKER_PLANE_DIRECT) && Equal(v1::PLANE_SERVER, STOKER_PLANE_SERVER) &&
              Equal(v1::PLANE_RPC, STOKER_PLANE_RPC));
static_assert(Equal(v1::ROW_LAYOUT_DSV4_PAGED, STOKER_ROW_LAYOUT_DSV4_PAGED));
static_assert(Equal(v1::INDEX_SPACE_POOL_ROW, STOKER_INDEX_SPACE_POOL_ROW));

int32_t Fill(int32_t code, absl::string_view message, stoker_error* error) {
  if (error == nullptr) return code;
  error->code = code;
  const size_t bytes = std::min(message.size(), sizeof(error->message) - 1);
  std::memcpy(error->message, message.data(), bytes);
  error->message[bytes] = '\0';
  return code;
}

// Runs a function's body. Only the standard library throws, where there is no memory.
template <typename Body>
int32_t Run(stoker_error* error, Body body) {
  try {
    const absl::Status status = body();
    return Fill(static_cast<int32_t>(status.code()), status.message(), error);
  } catch (const std::bad_alloc&) {
    return Fill(STOKER_RESOURCE_EXHAUSTED, "no memory", error);
  } catch (...) {
    return Fill(STOKER_INTERNAL, "an exception", error);
  }
}

absl::Status Null(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat(what, ": is NULL")); }

// The caller's struct as this library knows it.
template <typename T>
absl::Status Load(const T* from, absl::string_view what, T* to) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  *to = T{};
  if (from == nullptr) return Null(what);
  // Nothing else of it may be touched before its size is known.
  size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  if (size < sizeof(size)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ".struct_size: ", size, " is below ", sizeof(size)));
  }
  std::memcpy(static_cast<void*>(to), from, std::min(size, sizeof(T)));
  return absl::OkStatus();
}

// Whether a struct of the caller's can be written.
template <typename T>
absl::Status CheckTarget(const T* target, absl::string_view what) {
  T ignored;
  return Load(target, what, &ignored);
}

// Writes it as the caller knows it. It has passed CheckTarget.
template <typename T>
void Store(const T& from, T* to) {
  size_t size = 0;
  std::memcpy(&size, to, sizeof(size));
  char* const bytes = reinterpret_cast<char*>(to);
  const size_t known = std::min(size, sizeof(T));
  std::memcpy(bytes, &from, known);
  if (size > known) std::memset(bytes + known, 0, size - known);
  std::memcpy(bytes, &size, sizeof(size));
}

std::string Text(const char* text) { return text == nullptr ? "" : text; }

absl::Duration Timeout(int64_t ms, absl::Duration otherwise) {
  return ms > 0 ? absl::Milliseconds(ms) : ms == 0 ? otherwise : absl::ZeroDuration();
}

absl::StatusOr<client::Plane> PlaneOf(int32_t plane) {
  switch (plane) {
    case STOKER_PLANE_AUTO:
      return client::Plane::kAuto;
    case STOKER_PLANE_RPC:
      return client::Plane::kRpc;
    case STOKER_PLANE_SERVER:
      return client::Plane::kServer;
    case STOKER_PLANE_DIRECT:
      return client::Plane::kDirect;
    default:
      return absl::InvalidArgumentError(absl::StrCat("options.plane: ", plane, " is not 0 to 3"));
  }
}

absl::Status ToRequest(const stoker_attach_options& options, v1::AttachRequest* request) {
  if (options.pool == nullptr) return Null("options.pool");
  if (options.groups == nullptr && options.group_count > 0) return Null("options.groups");
  constexpr size_t kMaxGroups = 1024;
  if (options.group_count > kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.group_count: ", options.group_count, " is above ", kMaxGroups));
  }
  request->set_pool(options.pool);
  request->set_name(Text(options.name));
  request->set_device(Text(options.device));
  request->set_state_rows(options.state_rows);
  request->set_hot_rows(options.hot_rows);
  request->set_max_top_k(options.max_top_k);
  request->set_max_batch_rows(options.max_batch_rows);
  request->set_max_sequence_rows(options.max_sequence_rows);
  request->set_index_space(static_cast<v1::IndexSpace>(options.index_space));
  request->set_staging_bytes(options.staging_bytes);
  request->set_max_reserved_blocks(options.max_reserved_blocks);
  request->set_arena_sharing(static_cast<v1::ArenaSharing>(options.arena_sharing));
  for (size_t i = 0; i < options.group_count; ++i) {
    const stoker_index_group& group = options.groups[i];
    if (group.layers == nullptr && group.layer_count > 0) return Null(absl::StrCat("options.groups[", i, "].layers"));
    if (group.layer_count > kMaxGroups) {
      return absl::InvalidArgumentError(
          absl::StrCat("options.groups[", i, "].layer_count: ", group.layer_count, " is above ", kMaxGroups));
    }
    request->add_groups()->mutable_layers()->Add(group.layers, group.layers + group.layer_count);
  }
  return absl::OkStatus();
}

uint32_t RowBytes(const v1::PoolSpec& pool) { return pool.row_bytes() + pool.v_row_bytes(); }

// The arena of now, which stays for as long as its pointers may be used.
std::shared_ptr<const client::Arena> HoldArena(SharedSession& shared) {
  const std::lock_guard lock(shared.mutex);
  shared.arena = shared.session->arena();
  return shared.arena;
}

// What both planes have.

template <typename Handle>
absl::Status Begin(Handle* handle, const stoker_plane_row* rows, size_t row_count) {
  if (handle == nullptr) return Null("plane");
  if (rows == nullptr && row_count > 0) return Null("rows");
  const size_t most = handle->plane->arena().Mail()->lengths.size();
  if (row_count > most) {
    return absl::InvalidArgumentError(absl::StrCat("row_count: ", row_count, " is above max_batch_rows, ", most));
  }
  handle->rows.clear();
  for (size_t i = 0; i < row_count; ++i) {
    handle->rows.push_back({rows[i].sequence_id, rows[i].state_row, rows[i].length});
  }
  return handle->plane->Begin(handle->rows);
}

template <typename Handle>
absl::Status Await(Handle* handle, uint32_t group, int64_t timeout_ms) {
  if (handle == nullptr) return Null("plane");
  return handle->plane->Await(group, Timeout(timeout_ms, client::ServerPlane::kDefaultTimeout));
}

template <typename Handle>
absl::Status Commit(Handle* handle, const int32_t* commits, size_t commit_count) {
  if (handle == nullptr) return Null("plane");
  if (commits == nullptr && commit_count > 0) return Null("commits");
  return handle->plane->Commit(absl::MakeConstSpan(commits, commit_count));
}

template <typename Handle>
absl::Status AwaitCommit(Handle* handle, int64_t timeout_ms) {
  if (handle == nullptr) return Null("plane");
  return handle->plane->AwaitCommit(Timeout(timeout_ms, client::ServerPlane::kDefaultTimeout));
}

// Whether the plane has the batch row, in host memory.
template <typename Handle>
bool Has(const Handle* handle, uint32_t group, size_t row) {
  if (handle == nullptr) return false;
  const client::Arena& arena = handle->plane->arena();
  return !arena.on_device() && group < arena.groups() && row < arena.Indices(group)->rows();
}

template <typename Handle>
int32_t* Entries(Handle* handle, uint32_t group, size_t row) {
  return Has(handle, group, row) ? handle->plane->Entries(group, row).data() : nullptr;
}

template <typename Handle>
const int32_t* HotRows(Handle* handle, uint32_t group, size_t row) {
  return Has(handle, group, row) ? handle->plane->HotRows(group, row).data() : nullptr;
}

template <typename Handle>
int32_t Misses(Handle* handle, uint32_t group, size_t row) {
  return Has(handle, group, row) ? handle->plane->Misses(group, row) : -1;
}

template <typename Handle>
absl::Status RowError(const Handle* handle) {
  return handle == nullptr ? Null("plane") : handle->plane->FirstRowError();
}

}  // namespace

extern "C" {

void stoker_init(void* object, size_t struct_size) {
  if (object == nullptr || struct_size < sizeof(struct_size)) return;
  std::memset(object, 0, struct_size);
  std::memcpy(object, &struct_size, sizeof(struct_size));
}

int32_t stoker_api_version(void) { return STOKER_C_API_VERSION; }

const char* stoker_code_name(int32_t code) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return code >= 0 && static_cast<size_t>(code) < std::size(kNames) ? kNames[code] : "?";
}

int32_t stoker_connect(const char* address, const stoker_connect_options* options, stoker_client** out,
                       stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (address == nullptr) return Null("address");
    if (out == nullptr) return Null("client");
    stoker_connect_options known{};
    if (options != nullptr) {
      if (absl::Status status = Load(options, "options", &known); !status.ok()) return status;
    }
    client::ClientOptions to;
    to.connect_timeout = Timeout(known.connect_timeout_ms, to.connect_timeout);
    if (known.call_timeout_ms < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("options.call_timeout_ms: ", known.call_timeout_ms, " is below 0"));
    }
    to.call_timeout = Timeout(known.call_timeout_ms, to.call_timeout);
    absl::StatusOr<client::Client> connected = client::Client::Connect(address, to);
    if (!connected.ok()) return connected.status();
    *out = new stoker_client{*std::move(connected)};
    return absl::OkStatus();
  });
}

void stoker_client_free(stoker_client* handle) { delete handle; }

int32_t stoker_create_pool(stoker_client* handle, const stoker_pool_spec* spec, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("client");
    stoker_pool_spec known;
    if (absl::Status status = Load(spec, "spec", &known); !status.ok()) return status;
    if (known.name == nullptr) return Null("spec.name");
    v1::CreatePoolRequest request;
    v1::PoolSpec& pool = *request.mutable_spec();
    pool.set_name(known.name);
    pool.set_layers(known.layers);
    pool.set_row_layout(static_cast<v1::RowLayout>(known.row_layout));
    pool.set_row_bytes(known.row_bytes);
    pool.set_v_row_bytes(known.v_row_bytes);
    pool.set_block_rows(known.block_rows);
    pool.set_blocks(known.blocks);
    return handle->client.CreatePool(request).status();
  });
}

int32_t stoker_attach(stoker_client* handle, const stoker_attach_options* options, stoker_session** out,
                      stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("client");
    if (out == nullptr) return Null("session");
    stoker_attach_options known;
    if (absl::Status status = Load(options, "options", &known); !status.ok()) return status;
    v1::AttachRequest request;
    if (absl::Status status = ToRequest(known, &request); !status.ok()) return status;
    absl::StatusOr<client::Plane> plane = PlaneOf(known.plane);
    if (!plane.ok()) return plane.status();
    client::SessionOptions session_options;
    session_options.attach_timeout = Timeout(known.attach_timeout_ms, session_options.attach_timeout);
    session_options.reattach_timeout = Timeout(known.reattach_timeout_ms, session_options.reattach_timeout);
    absl::StatusOr<std::unique_ptr<client::Session>> session =
        client::AttachOnPlane(handle->client, request, *plane, session_options);
    if (!session.ok()) return session.status();
    auto shared = std::make_shared<SharedSession>();
    shared->row_bytes = RowBytes((*session)->info().pool());
    shared->groups = request.groups_size();
    shared->session = *std::move(session);
    *out = new stoker_session{std::move(shared)};
    return absl::OkStatus();
  });
}

void stoker_session_free(stoker_session* handle) { delete handle; }

int32_t stoker_get_session_info(stoker_session* handle, stoker_session_info* info, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (absl::Status status = CheckTarget(info, "info"); !status.ok()) return status;
    const client::Session& session = *handle->shared->session;
    const v1::Attached attached = session.info();
    stoker_session_info known{};
    known.session_id = attached.session_id();
    known.boot_epoch = attached.boot_epoch();
    known.generation = session.generation();
    const absl::StatusOr<client::Plane> plane = client::ChoosePlane(attached, client::Plane::kAuto);
    known.plane = !plane.ok()                        ? STOKER_PLANE_RPC
                  : *plane == client::Plane::kDirect ? STOKER_PLANE_DIRECT
                  : *plane == client::Plane::kServer ? STOKER_PLANE_SERVER
                                                     : STOKER_PLANE_RPC;
    known.on_device = session.arena()->on_device();
    known.layers = attached.pool().layers();
    known.row_bytes = handle->shared->row_bytes;
    known.groups = static_cast<uint32_t>(handle->shared->groups);
    known.max_batch_rows = attached.limits().max_batch_rows();
    known.max_top_k = attached.limits().max_top_k();
    known.region_rows = attached.arena().region_rows();
    known.newest_row = attached.arena().newest_row();
    Store(known, info);
    return absl::OkStatus();
  });
}

int32_t stoker_session_status(stoker_session* handle, stoker_error* error) {
  return Run(error, [&] { return handle == nullptr ? Null("session") : handle->shared->session->status(); });
}

int32_t stoker_admit(stoker_session* handle, const stoker_admit_item* item, stoker_sequence* sequence,
                     stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    stoker_admit_item known;
    if (absl::Status status = Load(item, "item", &known); !status.ok()) return status;
    if (absl::Status status = CheckTarget(sequence, "sequence"); !status.ok()) return status;
    if (known.block_hashes == nullptr && known.block_hash_bytes > 0) return Null("item.block_hashes");
    v1::AdmitRequest request;
    v1::AdmitItem& to = *request.add_items();
    to.set_sequence_key(Text(known.sequence_key));
    to.set_prompt_rows(known.prompt_rows);
    to.set_max_rows(known.max_rows);
    if (known.block_hash_bytes > 0) to.set_block_hashes(known.block_hashes, known.block_hash_bytes);
    v1::AdmitResponse response;
    if (absl::Status status = handle->shared->session->Admit(request, &response); !status.ok()) return status;
    if (response.sequences_size() != 1) {
      return absl::InternalError(absl::StrCat("Admit: ", response.sequences_size(), " sequences came for 1 item"));
    }
    const v1::AdmittedSequence& admitted = response.sequences(0);
    if (absl::Status status = client::FromItem(admitted.status()); !status.ok()) return status;
    stoker_sequence result{};
    result.sequence_id = admitted.sequence_id();
    result.state_row = admitted.state_row();
    result.matched_rows = admitted.matched_rows();
    result.stored_rows = admitted.stored_rows();
    result.writer = admitted.writer();
    Store(result, sequence);
    return absl::OkStatus();
  });
}

int32_t stoker_release(stoker_session* handle, uint64_t sequence_id, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    v1::ReleaseRequest request;
    request.add_sequence_ids(sequence_id);
    v1::ReleaseResponse response;
    if (absl::Status status = handle->shared->session->Release(request, &response); !status.ok()) return status;
    return client::FirstError(response.statuses());
  });
}

int32_t stoker_store(stoker_session* handle, uint64_t sequence_id, uint32_t first_row, uint32_t row_count,
                     const void* rows, size_t row_bytes, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (rows == nullptr) return Null("rows");
    v1::StoreRequest request;
    v1::StoreItem& item = *request.add_items();
    item.mutable_range()->set_sequence_id(sequence_id);
    item.mutable_range()->set_first_row(first_row);
    item.mutable_range()->set_row_count(row_count);
    item.set_source(v1::DATA_SOURCE_INLINE);
    item.set_rows(rows, row_bytes);
    v1::StoreResponse response;
    if (absl::Status status = handle->shared->session->Store(request, &response); !status.ok()) return status;
    return client::FirstError(response.statuses());
  });
}

int32_t stoker_read(stoker_session* handle, uint64_t sequence_id, const uint32_t* positions, size_t position_count,
                    void* rows, size_t row_bytes, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (positions == nullptr) return Null("positions");
    if (rows == nullptr) return Null("rows");
    constexpr size_t kMaxPositions = 65536;
    if (position_count < 1 || position_count > kMaxPositions) {
      return absl::InvalidArgumentError(
          absl::StrCat("position_count: ", position_count, " is not 1 to ", kMaxPositions));
    }
    v1::ReadRequest request;
    request.set_sequence_id(sequence_id);
    request.mutable_positions()->mutable_values()->Add(positions, positions + position_count);
    v1::ReadResponse response;
    if (absl::Status status = handle->shared->session->Read(request, &response); !status.ok()) return status;
    if (response.rows().size() != row_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("row_bytes: ", row_bytes, " is not the ", response.rows().size(), " bytes of the rows"));
    }
    std::memcpy(rows, response.rows().data(), row_bytes);
    return absl::OkStatus();
  });
}

int32_t stoker_arena_tensor(stoker_session* handle, const char* name, stoker_tensor* tensor, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (name == nullptr) return Null("name");
    if (absl::Status status = CheckTarget(tensor, "tensor"); !status.ok()) return status;
    const std::shared_ptr<const client::Arena> arena = HoldArena(*handle->shared);
    const absl::StatusOr<const client::TensorView*> found = arena->Tensor(name);
    if (!found.ok()) return found.status();
    const client::TensorView& view = **found;
    stoker_tensor known{};
    if (view.shape.size() > STOKER_MAX_RANK || view.element.size() >= sizeof(known.element)) {
      return absl::InternalError(absl::StrCat("arena tensor '", name, "' has ", view.shape.size(), " dimensions of ",
                                              view.element, "; ", STOKER_MAX_RANK, " are possible"));
    }
    known.data = view.data;
    known.rank = static_cast<int32_t>(view.shape.size());
    known.on_device = arena->on_device();
    // The arena has checked that none of this overflows.
    known.size_bytes = view.element == "u64" ? 8 : view.element == "i32" ? 4 : view.element == "i16" ? 2 : 1;
    for (size_t i = 0; i < view.shape.size(); ++i) {
      known.shape[i] = view.shape[i];
      known.stride_bytes[i] = view.stride_bytes[i];
      if (view.shape[i] > 0) known.size_bytes += (view.shape[i] - 1) * view.stride_bytes[i];
    }
    if (std::count(view.shape.begin(), view.shape.end(), 0u) > 0) known.size_bytes = 0;
    std::memcpy(known.element, view.element.data(), view.element.size());
    Store(known, tensor);
    return absl::OkStatus();
  });
}

int32_t stoker_get_plane_mail(stoker_session* handle, stoker_plane_mail* out, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (absl::Status status = CheckTarget(out, "mail"); !status.ok()) return status;
    const std::shared_ptr<const client::Arena> arena = HoldArena(*handle->shared);
    const absl::StatusOr<client::PlaneMail> mail = arena->Mail();
    if (!mail.ok()) return mail.status();
    stoker_plane_mail known{};
    known.on_device = arena->on_device();
    known.max_batch_rows = static_cast<uint32_t>(mail->lengths.size());
    known.request = reinterpret_cast<uint64_t*>(mail->request.data());
    known.done = reinterpret_cast<const uint64_t*>(mail->done.data());
    known.request_stride_bytes = mail->request.stride_bytes();
    known.done_stride_bytes = mail->done.stride_bytes();
    known.ended = mail->ended;
    known.batch_rows = mail->batch_rows;
    known.sequence_ids = mail->sequence_ids.data();
    known.state_rows = mail->state_rows.data();
    known.lengths = mail->lengths.data();
    known.commits = mail->commits.data();
    known.statuses = mail->statuses.data();
    Store(known, out);
    return absl::OkStatus();
  });
}

int32_t stoker_server_plane_arm(stoker_session* handle, uint32_t top_k, stoker_server_plane** out,
                                stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (out == nullptr) return Null("plane");
    absl::StatusOr<std::unique_ptr<client::ServerPlane>> plane =
        client::ServerPlane::Arm(*handle->shared->session, top_k);
    if (!plane.ok()) return plane.status();
    auto made = std::make_unique<stoker_server_plane>();
    made->shared = handle->shared;
    made->rows.reserve((*plane)->arena().Mail()->lengths.size());
    made->plane = *std::move(plane);
    *out = made.release();
    return absl::OkStatus();
  });
}

int32_t stoker_server_plane_begin(stoker_server_plane* plane, const stoker_plane_row* rows, size_t row_count,
                                  stoker_error* error) {
  return Run(error, [&] { return Begin(plane, rows, row_count); });
}

int32_t stoker_server_plane_ring(stoker_server_plane* plane, uint32_t group, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->Ring(group); });
}

int32_t stoker_server_plane_await(stoker_server_plane* plane, uint32_t group, int64_t timeout_ms, stoker_error* error) {
  return Run(error, [&] { return Await(plane, group, timeout_ms); });
}

int32_t stoker_server_plane_commit(stoker_server_plane* plane, const int32_t* commits, size_t commit_count,
                                   stoker_error* error) {
  return Run(error, [&] { return Commit(plane, commits, commit_count); });
}

int32_t stoker_server_plane_await_commit(stoker_server_plane* plane, int64_t timeout_ms, stoker_error* error) {
  return Run(error, [&] { return AwaitCommit(plane, timeout_ms); });
}

int32_t* stoker_server_plane_entries(stoker_server_plane* plane, uint32_t group, size_t row) {
  return Entries(plane, group, row);
}

const int32_t* stoker_server_plane_hot_rows(stoker_server_plane* plane, uint32_t group, size_t row) {
  return HotRows(plane, group, row);
}

int32_t stoker_server_plane_misses(stoker_server_plane* plane, uint32_t group, size_t row) {
  return Misses(plane, group, row);
}

int32_t stoker_server_plane_row_error(stoker_server_plane* plane, stoker_error* error) {
  return Run(error, [&] { return RowError(plane); });
}

int32_t stoker_server_plane_disarm(stoker_server_plane* plane, uint64_t* steps, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (plane == nullptr) return Null("plane");
    const absl::StatusOr<uint64_t> done = plane->plane->Disarm();
    if (done.ok() && steps != nullptr) *steps = *done;
    return done.status();
  });
}

void stoker_server_plane_free(stoker_server_plane* plane) { delete plane; }

int32_t stoker_direct_plane_open(stoker_session* handle, const stoker_direct_plane_options* options,
                                 stoker_direct_plane** out, stoker_error* error) {
  return Run(error, [&]() -> absl::Status {
    if (handle == nullptr) return Null("session");
    if (out == nullptr) return Null("plane");
    stoker_direct_plane_options known;
    if (absl::Status status = Load(options, "options", &known); !status.ok()) return status;
    client::DirectPlaneOptions to;
    if (known.threads != 0) to.threads = known.threads;
    to.stream = static_cast<CUstream_st*>(known.stream);
    absl::StatusOr<std::unique_ptr<client::DirectPlane>> plane =
        client::DirectPlane::Open(*handle->shared->session, known.top_k, to);
    if (!plane.ok()) return plane.status();
    auto made = std::make_unique<stoker_direct_plane>();
    made->shared = handle->shared;
    made->rows.reserve((*plane)->arena().Mail()->lengths.size());
    made->plane = *std::move(plane);
    *out = made.release();
    return absl::OkStatus();
  });
}

int32_t stoker_direct_plane_begin(stoker_direct_plane* plane, const stoker_plane_row* rows, size_t row_count,
                                  stoker_error* error) {
  return Run(error, [&] { return Begin(plane, rows, row_count); });
}

int32_t stoker_direct_plane_group(stoker_direct_plane* plane, uint32_t group, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->Group(group); });
}

int32_t stoker_direct_plane_await(stoker_direct_plane* plane, uint32_t group, int64_t timeout_ms, stoker_error* error) {
  return Run(error, [&] { return Await(plane, group, timeout_ms); });
}

int32_t stoker_direct_plane_commit(stoker_direct_plane* plane, const int32_t* commits, size_t commit_count,
                                   stoker_error* error) {
  return Run(error, [&] { return Commit(plane, commits, commit_count); });
}

int32_t stoker_direct_plane_await_commit(stoker_direct_plane* plane, int64_t timeout_ms, stoker_error* error) {
  return Run(error, [&] { return AwaitCommit(plane, timeout_ms); });
}

int32_t* stoker_direct_plane_entries(stoker_direct_plane* plane, uint32_t group, size_t row) {
  return Entries(plane, group, row);
}

const int32_t* stoker_direct_plane_hot_rows(stoker_direct_plane* plane, uint32_t group, size_t row) {
  return HotRows(plane, group, row);
}

int32_t stoker_direct_plane_misses(stoker_direct_plane* plane, uint32_t group, size_t row) {
  return Misses(plane, group, row);
}

int32_t stoker_direct_plane_row_error(stoker_direct_plane* plane, stoker_error* error) {
  return Run(error, [&] { return RowError(plane); });
}

int32_t stoker_direct_plane_enqueue_begin(stoker_direct_plane* plane, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->EnqueueBegin(); });
}

int32_t stoker_direct_plane_enqueue_group(stoker_direct_plane* plane, uint32_t group, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->EnqueueGroup(group); });
}

int32_t stoker_direct_plane_enqueue_commit(stoker_direct_plane* plane, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->EnqueueCommit(); });
}

int32_t stoker_direct_plane_status(stoker_direct_plane* plane, stoker_error* error) {
  return Run(error, [&] { return plane == nullptr ? Null("plane") : plane->plane->status(); });
}

void stoker_direct_plane_free(stoker_direct_plane* plane) { delete plane; }

}  // extern "C"
