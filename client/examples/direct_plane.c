/* Decodes on the direct plane, in C: steps are run by this process, on the mapped arena and pool. Where the daemon does
 * not offer that plane it says why, and ends with status 2.
 *
 *   example_direct_plane_c unix:/run/stoker/stokerd.sock [steps]
 *
 * Every row that a step hands out is compared with what was stored, and at the end all rows are read back. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/stoker_c.h"

enum {
  kLayers = 4,
  kGroups = 2, /* of two layers each */
  kRowBytes = 64,
  kPromptRows = 100,
  kMaxRows = 1024,
  kMaxSteps = kMaxRows - kPromptRows,
  kTopK = 16
};

/* What every byte of a row is, so that rows can be told apart. */
static unsigned char ByteOf(uint32_t layer, uint32_t position) {
  return (unsigned char)(layer * 61 + position * 7 + 1);
}

static int IsRow(const unsigned char* row, uint32_t layer, uint32_t position) {
  for (size_t i = 0; i < kRowBytes; ++i) {
    if (row[i] != ByteOf(layer, position)) return 0;
  }
  return 1;
}

/* Prints what went wrong; nonzero then. */
static int Failed(const char* what, int32_t code, const stoker_error* error) {
  if (code == STOKER_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, stoker_code_name(code), error->message);
  return 1;
}

static int StorePrompt(stoker_session* session, uint64_t sequence_id) {
  static unsigned char rows[kLayers][kPromptRows][kRowBytes];
  stoker_error error;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t row = 0; row < kPromptRows; ++row) memset(rows[layer][row], ByteOf(layer, row), kRowBytes);
  }
  return Failed("store", stoker_store(session, sequence_id, 0, kPromptRows, rows, sizeof rows, &error), &error);
}

static int CheckStored(stoker_session* session, uint64_t sequence_id, uint32_t count) {
  static unsigned char rows[kLayers * kMaxRows * kRowBytes];
  static uint32_t positions[kMaxRows];
  stoker_error error;
  for (uint32_t i = 0; i < count; ++i) positions[i] = i;
  if (Failed("read",
             stoker_read(session, sequence_id, positions, count, rows, (size_t)kLayers * count * kRowBytes, &error),
             &error)) {
    return 1;
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t i = 0; i < count; ++i) {
      if (IsRow(rows + ((size_t)layer * count + i) * kRowBytes, layer, i)) continue;
      fprintf(stderr, "stored row %" PRIu32 " of layer %" PRIu32 " is wrong\n", i, layer);
      return 1;
    }
  }
  return 0;
}

/* One step at this length. Adds the misses. */
static int Step(stoker_direct_plane* plane, const stoker_tensor* hot, const stoker_session_info* info,
                const stoker_sequence* sequence, uint32_t length, int32_t* misses) {
  const stoker_plane_row row = {sequence->sequence_id, sequence->state_row, length};
  const size_t newest = (size_t)sequence->state_row * info->region_rows + info->newest_row;
  const int32_t commit = 1;
  stoker_error error;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    memset((unsigned char*)hot[layer].data + newest * hot[layer].stride_bytes[0], ByteOf(layer, length - 1), kRowBytes);
  }
  if (Failed("begin", stoker_direct_plane_begin(plane, &row, 1, &error), &error)) return 1;
  for (uint32_t group = 0; group < kGroups; ++group) {
    int32_t* const entries = stoker_direct_plane_entries(plane, group, 0);
    const int32_t* const hot_rows = stoker_direct_plane_hot_rows(plane, group, 0);
    for (uint32_t k = 0; k < kTopK; ++k) entries[k] = (int32_t)((length - 1) - k * 6 % length);
    if (Failed("group", stoker_direct_plane_group(plane, group, &error), &error)) return 1;
    if (Failed("await", stoker_direct_plane_await(plane, group, 0, &error), &error)) return 1;
    if (Failed("batch row", stoker_direct_plane_row_error(plane, &error), &error)) return 1;
    /* Here the attention of the group's layers reads these rows. */
    for (uint32_t layer = group * 2; layer < group * 2 + 2; ++layer) {
      for (uint32_t k = 0; k < kTopK; ++k) {
        const unsigned char* const at =
            (const unsigned char*)hot[layer].data + (size_t)hot_rows[k] * hot[layer].stride_bytes[0];
        if (hot_rows[k] >= 0 && IsRow(at, layer, (uint32_t)entries[k])) continue;
        fprintf(stderr, "position %" PRId32 " of layer %" PRIu32 ": hot row %" PRId32 " is wrong\n", entries[k], layer,
                hot_rows[k]);
        return 1;
      }
    }
    *misses += stoker_direct_plane_misses(plane, group, 0);
  }
  if (Failed("commit", stoker_direct_plane_commit(plane, &commit, 1, &error), &error)) return 1;
  if (Failed("await commit", stoker_direct_plane_await_commit(plane, 0, &error), &error)) return 1;
  return Failed("batch row", stoker_direct_plane_row_error(plane, &error), &error);
}

static int Decode(stoker_session* session, uint32_t steps) {
  stoker_error error;
  stoker_session_info info;
  stoker_admit_item item;
  stoker_sequence sequence;
  stoker_tensor hot[kLayers];
  stoker_direct_plane_options options;
  stoker_direct_plane* plane = NULL;
  int failed = 0;

  STOKER_INIT(&info);
  if (Failed("session", stoker_get_session_info(session, &info, &error), &error)) return 1;
  if (info.on_device) {
    fprintf(stderr, "this example writes rows by host code; the session is on a GPU\n");
    return 2;
  }
  STOKER_INIT(&item);
  STOKER_INIT(&sequence);
  item.prompt_rows = kPromptRows;
  item.max_rows = kPromptRows + steps;
  if (Failed("admit", stoker_admit(session, &item, &sequence, &error), &error)) return 1;
  if (StorePrompt(session, sequence.sequence_id)) return 1;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    char name[16];
    snprintf(name, sizeof name, "hot.%" PRIu32, layer);
    STOKER_INIT(&hot[layer]);
    if (Failed(name, stoker_arena_tensor(session, name, &hot[layer], &error), &error)) return 1;
  }

  STOKER_INIT(&options);
  options.top_k = kTopK;
  if (Failed("direct plane", stoker_direct_plane_open(session, &options, &plane, &error), &error)) return 1;
  for (uint32_t step = 0; step < steps && !failed; ++step) {
    const uint32_t length = kPromptRows + step + 1;
    int32_t misses = 0;
    failed = Step(plane, hot, &info, &sequence, length, &misses);
    if (!failed) printf("length %" PRIu32 ": %" PRId32 " missed\n", length, misses);
  }
  stoker_direct_plane_free(plane);
  if (failed || CheckStored(session, sequence.sequence_id, kPromptRows + steps)) return 1;
  return Failed("release", stoker_release(session, sequence.sequence_id, &error), &error);
}

int main(int argc, char** argv) {
  static const uint32_t layers[kGroups][2] = {{0, 1}, {2, 3}};
  const stoker_index_group groups[kGroups] = {{layers[0], 2}, {layers[1], 2}};
  const int given = argc > 2 ? atoi(argv[2]) : 8;
  const uint32_t steps = given < 1 ? 1 : given > kMaxSteps ? kMaxSteps : (uint32_t)given;
  stoker_error error;
  stoker_client* client = NULL;
  stoker_session* session = NULL;
  stoker_pool_spec pool;
  stoker_attach_options attach;
  int status = 1;

  STOKER_INIT(&pool);
  pool.name = "example";
  pool.layers = kLayers;
  pool.row_layout = STOKER_ROW_LAYOUT_LINEAR;
  pool.row_bytes = kRowBytes;
  pool.blocks = 64;
  STOKER_INIT(&attach);
  attach.pool = "example";
  attach.state_rows = 1;
  attach.hot_rows = 64;
  attach.max_top_k = kTopK;
  attach.max_sequence_rows = kMaxRows;
  attach.index_space = STOKER_INDEX_SPACE_POSITION;
  attach.groups = groups;
  attach.group_count = kGroups;
  attach.plane = STOKER_PLANE_DIRECT;

  if (!Failed("connect", stoker_connect(argc > 1 ? argv[1] : "unix:/run/stoker/stokerd.sock", NULL, &client, &error),
              &error) &&
      !Failed("create pool", stoker_create_pool(client, &pool, &error), &error)) {
    const int32_t code = stoker_attach(client, &attach, &session, &error);
    if (!Failed("attach", code, &error)) {
      status = Decode(session, steps);
    } else if (code == STOKER_FAILED_PRECONDITION) {
      status = 2;
    }
  }
  stoker_session_free(session);
  stoker_client_free(client);
  return status;
}
