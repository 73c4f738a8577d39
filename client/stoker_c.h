/* Stoker's client for C and for whatever calls C: sessions, and steps on the server plane and on the direct plane.
 *
 * Every function that can fail returns a status code, STOKER_OK or one of the others below, which are absl's and
 * gRPC's, and fills *error where it is not NULL. What it gives is written only when it returns STOKER_OK. No exception
 * comes out. NULL where something is needed is STOKER_INVALID_ARGUMENT; NULL handles may be freed.
 *
 * Versions: a struct begins with struct_size, which the caller sets to sizeof of the struct that it was compiled with
 * (STOKER_INIT does). Of a shorter struct, by an older caller, what is missing counts as zero; of a longer one, by a
 * newer caller, what this library does not know is ignored when it is read, and zeroed when it is written. Zero is
 * every field's default. Structs without struct_size never change.
 *
 * Thread safety: a client and a session may be used by any thread; a plane belongs to one. No handle may be freed while
 * a call uses it. A plane keeps its session, and a session its channel: handles are freed in any order.
 */
#ifndef STOKER_CLIENT_STOKER_C_H_
#define STOKER_CLIENT_STOKER_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one with every addition. */
#define STOKER_C_API_VERSION 1

enum {
  STOKER_OK = 0,
  STOKER_CANCELLED = 1,
  STOKER_UNKNOWN = 2,
  STOKER_INVALID_ARGUMENT = 3,
  STOKER_DEADLINE_EXCEEDED = 4,
  STOKER_NOT_FOUND = 5,
  STOKER_ALREADY_EXISTS = 6,
  STOKER_PERMISSION_DENIED = 7,
  STOKER_RESOURCE_EXHAUSTED = 8,
  STOKER_FAILED_PRECONDITION = 9,
  STOKER_ABORTED = 10,
  STOKER_OUT_OF_RANGE = 11,
  STOKER_UNIMPLEMENTED = 12,
  STOKER_INTERNAL = 13,
  STOKER_UNAVAILABLE = 14,
  STOKER_DATA_LOSS = 15,
  STOKER_UNAUTHENTICATED = 16
};

/* enum values are those of proto/stoker/v1. */
enum { STOKER_ROW_LAYOUT_LINEAR = 1, STOKER_ROW_LAYOUT_SPLIT_KV = 2, STOKER_ROW_LAYOUT_DSV4_PAGED = 3 };
enum { STOKER_INDEX_SPACE_POSITION = 1, STOKER_INDEX_SPACE_POOL_ROW = 2 };
/* AUTO is direct where that can be had, then server, then RPC; it is no plane of a session. */
enum { STOKER_PLANE_AUTO = 0, STOKER_PLANE_RPC = 1, STOKER_PLANE_SERVER = 2, STOKER_PLANE_DIRECT = 3 };
/* UNSPECIFIED: a descriptor on the CPU, a handle on a GPU. */
enum { STOKER_ARENA_SHARING_UNSPECIFIED = 0, STOKER_ARENA_SHARING_IPC_HANDLE = 1, STOKER_ARENA_SHARING_DESCRIPTOR = 2 };
/* stoker.v1.BatchRowStatus: how a batch row was taken. */
enum { STOKER_BATCH_ROW_OK = 0 };

typedef struct stoker_client stoker_client;
typedef struct stoker_session stoker_session;
typedef struct stoker_server_plane stoker_server_plane;
typedef struct stoker_direct_plane stoker_direct_plane;

/* Zeroes a struct and sets its struct_size. */
#define STOKER_INIT(pointer)                       \
  do {                                             \
    const size_t stoker_size_ = sizeof *(pointer); \
    stoker_init((pointer), stoker_size_);          \
  } while (0)
void stoker_init(void* object, size_t struct_size);

typedef struct {
  int32_t code;
  char message[508]; /* ends with a NUL; a longer one is cut off */
} stoker_error;

/* STOKER_C_API_VERSION of the library that runs. */
int32_t stoker_api_version(void);
/* "INVALID_ARGUMENT" and so on; "?" for other numbers. Never NULL. */
const char* stoker_code_name(int32_t code);

/* ---- Client ---- */

typedef struct {
  size_t struct_size;
  int64_t connect_timeout_ms; /* 0: 5 s; below 0: Connect does not wait */
  int64_t call_timeout_ms;    /* 0: 30 s */
} stoker_connect_options;

/* `address` is "unix:/path" or "host:port". `options` may be NULL. */
int32_t stoker_connect(const char* address, const stoker_connect_options* options, stoker_client** client,
                       stoker_error* error);
void stoker_client_free(stoker_client* client);

typedef struct {
  size_t struct_size;
  const char* name;
  uint32_t layers;
  int32_t row_layout;
  uint32_t row_bytes;
  uint32_t v_row_bytes;
  uint32_t block_rows; /* 0: 64 */
  uint32_t blocks;
} stoker_pool_spec;

/* As Pools.CreatePool: a pool that is there with the same spec is no error. */
int32_t stoker_create_pool(stoker_client* client, const stoker_pool_spec* spec, stoker_error* error);

/* ---- Session ---- */

typedef struct {
  const uint32_t* layers;
  size_t layer_count;
} stoker_index_group;

typedef struct {
  size_t struct_size;
  const char* pool;
  const char* name;   /* NULL: none */
  const char* device; /* NULL: the daemon's first */
  uint32_t state_rows;
  uint32_t hot_rows;
  uint32_t max_top_k;
  uint32_t max_batch_rows;
  uint32_t max_sequence_rows;
  int32_t index_space;
  const stoker_index_group* groups;
  size_t group_count;
  uint64_t staging_bytes;
  uint32_t max_reserved_blocks;
  int32_t plane;               /* STOKER_PLANE_AUTO and so on: as AttachOnPlane of plane.h */
  int64_t attach_timeout_ms;   /* 0: 10 s */
  int64_t reattach_timeout_ms; /* 0: 60 s; below 0: a lost session ends */
  int32_t arena_sharing;       /* STOKER_ARENA_SHARING_...: how the arena is mapped */
} stoker_attach_options;

/* Attaches, and maps the arena and, on the direct plane, the pool. On the other planes an arena that cannot be mapped
 * is no error: stoker_arena_tensor tells. */
int32_t stoker_attach(stoker_client* client, const stoker_attach_options* options, stoker_session** session,
                      stoker_error* error);
void stoker_session_free(stoker_session* session);

typedef struct {
  size_t struct_size;
  uint64_t session_id;
  uint64_t boot_epoch;
  uint64_t generation; /* rises when the session is attached anew; ids, state rows and pointers of before are gone */
  int32_t plane;       /* STOKER_PLANE_DIRECT, or the best of the others */
  int32_t on_device;   /* not 0: pointers into the arena are a GPU's addresses */
  uint32_t layers;
  uint32_t row_bytes; /* of one row of one layer, all parts */
  uint32_t groups;
  uint32_t max_batch_rows;
  uint32_t max_top_k;
  uint32_t region_rows; /* as ArenaLayout */
  uint32_t newest_row;
} stoker_session_info;

int32_t stoker_get_session_info(stoker_session* session, stoker_session_info* info, stoker_error* error);
/* STOKER_OK while attached; UNAVAILABLE while it tries to attach anew; the status of its end. */
int32_t stoker_session_status(stoker_session* session, stoker_error* error);

typedef struct {
  size_t struct_size;
  const char* sequence_key; /* NULL: none */
  uint32_t prompt_rows;
  uint32_t max_rows;
  const void* block_hashes; /* 16 bytes each */
  size_t block_hash_bytes;
} stoker_admit_item;

typedef struct {
  size_t struct_size;
  uint64_t sequence_id;
  uint32_t state_row;
  uint32_t matched_rows;
  uint32_t stored_rows;
  int32_t writer;
} stoker_sequence;

/* As Sequences.Admit and Release, of one sequence. */
int32_t stoker_admit(stoker_session* session, const stoker_admit_item* item, stoker_sequence* sequence,
                     stoker_error* error);
int32_t stoker_release(stoker_session* session, uint64_t sequence_id, stoker_error* error);
/* As Residency.Store and Read, inline: `rows` is [layer][row][row bytes]. */
int32_t stoker_store(stoker_session* session, uint64_t sequence_id, uint32_t first_row, uint32_t row_count,
                     const void* rows, size_t row_bytes, stoker_error* error);
int32_t stoker_read(stoker_session* session, uint64_t sequence_id, const uint32_t* positions, size_t position_count,
                    void* rows, size_t row_bytes, stoker_error* error);

/* ---- Arena ---- */

#define STOKER_MAX_RANK 4

/* Element [i0, i1, ...] is at data + sum(i x stride_bytes). */
typedef struct {
  size_t struct_size;
  void* data;
  uint64_t size_bytes; /* from data to behind the last element */
  int32_t rank;
  int32_t on_device;
  uint64_t shape[STOKER_MAX_RANK];
  uint64_t stride_bytes[STOKER_MAX_RANK];
  char element[8]; /* "u8", "i16", "i32" or "u64" */
} stoker_tensor;

/* The tensor of that name (ArenaLayout in sessions.proto). NOT_FOUND. Where the arena is not mapped, why. Valid until
 * the session is freed or, when it was attached anew, until this function or stoker_get_plane_mail is called again. */
int32_t stoker_arena_tensor(stoker_session* session, const char* name, stoker_tensor* tensor, stoker_error* error);

/* What the engine and a plane tell each other (sessions.proto), for kernels that write it. Valid as above. */
typedef struct {
  size_t struct_size;
  int32_t on_device;
  uint32_t max_batch_rows;
  uint64_t* request; /* [groups + 1], request_stride_bytes apart; server plane alone */
  const uint64_t* done;
  uint64_t request_stride_bytes;
  uint64_t done_stride_bytes;
  const int32_t* ended;
  int32_t* batch_rows;
  uint64_t* sequence_ids; /* [max_batch_rows], as the next four */
  int32_t* state_rows;
  int32_t* lengths;
  int32_t* commits;
  const int32_t* statuses;
} stoker_plane_mail;

int32_t stoker_get_plane_mail(stoker_session* session, stoker_plane_mail* mail, stoker_error* error);

/* ---- Planes ---- */

typedef struct {
  uint64_t sequence_id; /* 0: padding */
  uint32_t state_row;
  uint32_t length; /* newest token included */
} stoker_plane_row;

/* The server plane of a session in host memory: client/server_plane.h, whose calls and errors these are. timeout_ms 0
 * is 30 s. */
int32_t stoker_server_plane_arm(stoker_session* session, uint32_t top_k, stoker_server_plane** plane,
                                stoker_error* error);
int32_t stoker_server_plane_begin(stoker_server_plane* plane, const stoker_plane_row* rows, size_t row_count,
                                  stoker_error* error);
int32_t stoker_server_plane_ring(stoker_server_plane* plane, uint32_t group, stoker_error* error);
int32_t stoker_server_plane_await(stoker_server_plane* plane, uint32_t group, int64_t timeout_ms, stoker_error* error);
/* `commits` is [row_count] of the step, or NULL with commit_count 0. */
int32_t stoker_server_plane_commit(stoker_server_plane* plane, const int32_t* commits, size_t commit_count,
                                   stoker_error* error);
int32_t stoker_server_plane_await_commit(stoker_server_plane* plane, int64_t timeout_ms, stoker_error* error);
/* The top_k entries, or hot rows, of a batch row; NULL where plane, group or row is none. */
int32_t* stoker_server_plane_entries(stoker_server_plane* plane, uint32_t group, size_t row);
const int32_t* stoker_server_plane_hot_rows(stoker_server_plane* plane, uint32_t group, size_t row);
/* -1 where plane, group or row is none. */
int32_t stoker_server_plane_misses(stoker_server_plane* plane, uint32_t group, size_t row);
/* STOKER_OK, or the first batch row of the step that was not taken. */
int32_t stoker_server_plane_row_error(stoker_server_plane* plane, stoker_error* error);
int32_t stoker_server_plane_disarm(stoker_server_plane* plane, uint64_t* steps, stoker_error* error);
void stoker_server_plane_free(stoker_server_plane* plane);

typedef struct {
  size_t struct_size;
  uint32_t top_k;
  int32_t threads; /* on the CPU; 0: 1 */
  void* stream;    /* on a GPU: the engine's cudaStream_t */
} stoker_direct_plane_options;

/* The direct plane: client/direct_plane.h. On the CPU, calls as on the server plane, with `group` for `ring`; */
int32_t stoker_direct_plane_open(stoker_session* session, const stoker_direct_plane_options* options,
                                 stoker_direct_plane** plane, stoker_error* error);
int32_t stoker_direct_plane_begin(stoker_direct_plane* plane, const stoker_plane_row* rows, size_t row_count,
                                  stoker_error* error);
int32_t stoker_direct_plane_group(stoker_direct_plane* plane, uint32_t group, stoker_error* error);
int32_t stoker_direct_plane_await(stoker_direct_plane* plane, uint32_t group, int64_t timeout_ms, stoker_error* error);
int32_t stoker_direct_plane_commit(stoker_direct_plane* plane, const int32_t* commits, size_t commit_count,
                                   stoker_error* error);
int32_t stoker_direct_plane_await_commit(stoker_direct_plane* plane, int64_t timeout_ms, stoker_error* error);
int32_t* stoker_direct_plane_entries(stoker_direct_plane* plane, uint32_t group, size_t row);
const int32_t* stoker_direct_plane_hot_rows(stoker_direct_plane* plane, uint32_t group, size_t row);
int32_t stoker_direct_plane_misses(stoker_direct_plane* plane, uint32_t group, size_t row);
int32_t stoker_direct_plane_row_error(stoker_direct_plane* plane, stoker_error* error);
/* on a GPU, enqueued on the engine's stream, which may be capturing a graph. */
int32_t stoker_direct_plane_enqueue_begin(stoker_direct_plane* plane, stoker_error* error);
int32_t stoker_direct_plane_enqueue_group(stoker_direct_plane* plane, uint32_t group, stoker_error* error);
int32_t stoker_direct_plane_enqueue_commit(stoker_direct_plane* plane, stoker_error* error);
/* STOKER_OK while steps can be made. Asked before a graph of steps is launched. */
int32_t stoker_direct_plane_status(stoker_direct_plane* plane, stoker_error* error);
void stoker_direct_plane_free(stoker_direct_plane* plane);

#ifdef __cplusplus
}
#endif

#endif /* STOKER_CLIENT_STOKER_C_H_ */
