// The C interface against the real daemon: sizes of structs, null arguments, every entry, and the examples.
#include "client/stoker_c.h"

#include <cstring>
#include <limits>

#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kTopK = 16;
constexpr uint32_t kLayers = 4;
constexpr uint32_t kRowBytes = 48;

class StokerCTest : public DaemonTest {
 protected:
  StokerCTest() {
    pool_ = CreatePool(LinearPool("p", kLayers, kRowBytes, 64));
    EXPECT_EQ(stoker_connect(daemon().address().c_str(), nullptr, &client_, &error_), STOKER_OK) << error_.message;
  }
  ~StokerCTest() override { stoker_client_free(client_); }

  stoker_attach_options Options(int32_t plane) const {
    static constexpr uint32_t kFirst[] = {0, 1};
    static constexpr uint32_t kSecond[] = {2, 3};
    static constexpr stoker_index_group kGroups[] = {{kFirst, 2}, {kSecond, 2}};
    stoker_attach_options options;
    STOKER_INIT(&options);
    options.pool = "p";
    options.state_rows = 4;
    options.hot_rows = 64;
    options.max_top_k = kTopK;
    options.max_sequence_rows = 512;
    options.index_space = STOKER_INDEX_SPACE_POSITION;
    options.groups = kGroups;
    options.group_count = 2;
    options.plane = plane;
    options.reattach_timeout_ms = -1;
    return options;
  }

  stoker_session* Attach(int32_t plane) {
    stoker_session* session = nullptr;
    const stoker_attach_options options = Options(plane);
    EXPECT_EQ(stoker_attach(client_, &options, &session, &error_), STOKER_OK) << error_.message;
    return session;
  }

  // A sequence of 40 stored rows, as a test's rank stores it.
  stoker_sequence Open(stoker_session* session, const Tokens& tokens) {
    stoker_admit_item item;
    STOKER_INIT(&item);
    item.prompt_rows = 40;
    item.max_rows = 200;
    stoker_sequence sequence;
    STOKER_INIT(&sequence);
    EXPECT_EQ(stoker_admit(session, &item, &sequence, &error_), STOKER_OK) << error_.message;
    EXPECT_NE(sequence.sequence_id, 0u);
    EXPECT_EQ(sequence.writer, 1);
    const std::string rows = RowsOf(pool_, absl::MakeConstSpan(tokens).first(40));
    EXPECT_EQ(stoker_store(session, sequence.sequence_id, 0, 40, rows.data(), rows.size(), &error_), STOKER_OK)
        << error_.message;
    return sequence;
  }

  // The newest row, by the tensors alone.
  void WriteNewest(stoker_session* session, const stoker_sequence& sequence, uint64_t token) {
    stoker_session_info info;
    STOKER_INIT(&info);
    ASSERT_EQ(stoker_get_session_info(session, &info, &error_), STOKER_OK) << error_.message;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      stoker_tensor hot;
      STOKER_INIT(&hot);
      ASSERT_EQ(stoker_arena_tensor(session, absl::StrCat("hot.", layer).c_str(), &hot, &error_), STOKER_OK)
          << error_.message;
      const std::string row = RowOf(pool_, layer, token);
      std::memcpy(static_cast<char*>(hot.data) +
                      (uint64_t{sequence.state_row} * info.region_rows + info.newest_row) * hot.stride_bytes[0],
                  row.data(), row.size());
    }
  }

  std::string HotRow(stoker_session* session, uint32_t layer, int32_t hot_row) {
    stoker_tensor hot;
    STOKER_INIT(&hot);
    EXPECT_EQ(stoker_arena_tensor(session, absl::StrCat("hot.", layer).c_str(), &hot, &error_), STOKER_OK);
    return {static_cast<const char*>(hot.data) + static_cast<uint64_t>(hot_row) * hot.stride_bytes[0], kRowBytes};
  }

  v1::PoolSpec pool_;
  stoker_client* client_ = nullptr;
  stoker_error error_ = {};
};

TEST_F(StokerCTest, DecodesOnTheDirectPlane) {
  stoker_session* const session = Attach(STOKER_PLANE_DIRECT);
  ASSERT_NE(session, nullptr);
  stoker_session_info info;
  STOKER_INIT(&info);
  ASSERT_EQ(stoker_get_session_info(session, &info, &error_), STOKER_OK);
  EXPECT_EQ(info.plane, STOKER_PLANE_DIRECT);
  EXPECT_EQ(info.generation, 1u);
  EXPECT_EQ(info.on_device, 0);
  EXPECT_EQ(info.layers, kLayers);
  EXPECT_EQ(info.row_bytes, kRowBytes);
  EXPECT_EQ(info.groups, 2u);
  EXPECT_EQ(info.max_batch_rows, 4u);
  EXPECT_EQ(info.max_top_k, kTopK);
  const Tokens tokens = MakeTokens(1, 200);
  const stoker_sequence sequence = Open(session, tokens);
  stoker_direct_plane_options options;
  STOKER_INIT(&options);
  options.top_k = kTopK;
  stoker_direct_plane* plane = nullptr;
  ASSERT_EQ(stoker_direct_plane_open(session, &options, &plane, &error_), STOKER_OK) << error_.message;
  stoker_direct_plane* second = nullptr;
  EXPECT_EQ(stoker_direct_plane_open(session, &options, &second, &error_), STOKER_FAILED_PRECONDITION);
  for (uint32_t length = 41; length <= 100; ++length) {
    WriteNewest(session, sequence, tokens[length - 1]);
    const stoker_plane_row rows[] = {{sequence.sequence_id, sequence.state_row, length}, {0, 0, 0}};
    ASSERT_EQ(stoker_direct_plane_begin(plane, rows, 2, &error_), STOKER_OK) << error_.message;
    for (uint32_t group = 0; group < 2; ++group) {
      int32_t* const entries = stoker_direct_plane_entries(plane, group, 0);
      ASSERT_NE(entries, nullptr);
      for (uint32_t k = 0; k < kTopK; ++k) entries[k] = static_cast<int32_t>((length * 7 + k * 5) % length);
      for (uint32_t k = 0; k < kTopK; ++k) stoker_direct_plane_entries(plane, group, 1)[k] = -1;
      ASSERT_EQ(stoker_direct_plane_group(plane, group, &error_), STOKER_OK) << error_.message;
      ASSERT_EQ(stoker_direct_plane_await(plane, group, 10000, &error_), STOKER_OK) << error_.message;
      ASSERT_EQ(stoker_direct_plane_row_error(plane, &error_), STOKER_OK) << error_.message;
      EXPECT_GE(stoker_direct_plane_misses(plane, group, 0), 0);
      const int32_t* const hot_rows = stoker_direct_plane_hot_rows(plane, group, 0);
      for (uint32_t k = 0; k < kTopK; ++k) {
        ASSERT_EQ(HotRow(session, 2 * group, hot_rows[k]),
                  RowOf(pool_, 2 * group, tokens[static_cast<size_t>(entries[k])]));
      }
    }
    const int32_t commits[] = {1, 0};
    ASSERT_EQ(stoker_direct_plane_commit(plane, commits, 2, &error_), STOKER_OK) << error_.message;
    ASSERT_EQ(stoker_direct_plane_await_commit(plane, 0, &error_), STOKER_OK) << error_.message;
    ASSERT_EQ(stoker_direct_plane_row_error(plane, &error_), STOKER_OK) << error_.message;
  }
  EXPECT_EQ(stoker_direct_plane_status(plane, nullptr), STOKER_OK);
  // What was stored comes back.
  const uint32_t positions[] = {0, 39, 40, 99};
  std::string rows(kLayers * 4 * kRowBytes, 'x');
  ASSERT_EQ(stoker_read(session, sequence.sequence_id, positions, 4, rows.data(), rows.size(), &error_), STOKER_OK)
      << error_.message;
  EXPECT_EQ(rows, RowsOf(pool_, Tokens{tokens[0], tokens[39], tokens[40], tokens[99]}));
  EXPECT_EQ(stoker_read(session, sequence.sequence_id, positions, 4, rows.data(), rows.size() - 1, &error_),
            STOKER_INVALID_ARGUMENT);
  // A wrong row has a status with a message, and the plane goes on.
  const stoker_plane_row wrong = {sequence.sequence_id, sequence.state_row, 500};
  ASSERT_EQ(stoker_direct_plane_begin(plane, &wrong, 1, &error_), STOKER_OK);
  for (uint32_t group = 0; group < 2; ++group) {
    ASSERT_EQ(stoker_direct_plane_group(plane, group, &error_), STOKER_OK);
    ASSERT_EQ(stoker_direct_plane_await(plane, group, 0, &error_), STOKER_OK);
  }
  EXPECT_EQ(stoker_direct_plane_row_error(plane, &error_), STOKER_INVALID_ARGUMENT);
  EXPECT_EQ(error_.code, STOKER_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("length 500"));
  ASSERT_EQ(stoker_direct_plane_commit(plane, nullptr, 0, &error_), STOKER_OK);
  ASSERT_EQ(stoker_direct_plane_await_commit(plane, 0, &error_), STOKER_OK);
  // For engines on a GPU.
  EXPECT_EQ(stoker_direct_plane_enqueue_begin(plane, &error_), STOKER_FAILED_PRECONDITION);
  EXPECT_EQ(stoker_direct_plane_enqueue_group(plane, 0, &error_), STOKER_FAILED_PRECONDITION);
  EXPECT_EQ(stoker_direct_plane_enqueue_commit(plane, &error_), STOKER_FAILED_PRECONDITION);
  EXPECT_EQ(stoker_release(session, sequence.sequence_id, &error_), STOKER_OK) << error_.message;
  EXPECT_EQ(stoker_release(session, sequence.sequence_id, &error_), STOKER_FAILED_PRECONDITION) << error_.message;
  // In any order.
  stoker_session_free(session);
  EXPECT_EQ(SessionCount(), 1);
  EXPECT_EQ(stoker_direct_plane_status(plane, &error_), STOKER_OK);
  stoker_direct_plane_free(plane);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return SessionCount() == 0; }));
}

TEST_F(StokerCTest, DecodesOnTheServerPlane) {
  stoker_session* const session = Attach(STOKER_PLANE_SERVER);
  ASSERT_NE(session, nullptr);
  const Tokens tokens = MakeTokens(2, 200);
  const stoker_sequence sequence = Open(session, tokens);
  stoker_server_plane* plane = nullptr;
  EXPECT_EQ(stoker_server_plane_arm(session, kTopK + 1, &plane, &error_), STOKER_INVALID_ARGUMENT);
  ASSERT_EQ(stoker_server_plane_arm(session, kTopK, &plane, &error_), STOKER_OK) << error_.message;
  for (uint32_t length = 41; length <= 60; ++length) {
    WriteNewest(session, sequence, tokens[length - 1]);
    const stoker_plane_row row = {sequence.sequence_id, sequence.state_row, length};
    ASSERT_EQ(stoker_server_plane_begin(plane, &row, 1, &error_), STOKER_OK) << error_.message;
    for (uint32_t group = 0; group < 2; ++group) {
      int32_t* const entries = stoker_server_plane_entries(plane, group, 0);
      for (uint32_t k = 0; k < kTopK; ++k) entries[k] = static_cast<int32_t>((length * 3 + k * 7) % length);
      ASSERT_EQ(stoker_server_plane_ring(plane, group, &error_), STOKER_OK) << error_.message;
      ASSERT_EQ(stoker_server_plane_await(plane, group, 0, &error_), STOKER_OK) << error_.message;
      ASSERT_EQ(stoker_server_plane_row_error(plane, &error_), STOKER_OK) << error_.message;
      EXPECT_GE(stoker_server_plane_misses(plane, group, 0), 0);
      const int32_t* const hot_rows = stoker_server_plane_hot_rows(plane, group, 0);
      for (uint32_t k = 0; k < kTopK; ++k) {
        ASSERT_EQ(HotRow(session, 2 * group, hot_rows[k]),
                  RowOf(pool_, 2 * group, tokens[static_cast<size_t>(entries[k])]));
      }
    }
    const int32_t commit = 1;
    ASSERT_EQ(stoker_server_plane_commit(plane, &commit, 1, &error_), STOKER_OK) << error_.message;
    ASSERT_EQ(stoker_server_plane_await_commit(plane, 0, &error_), STOKER_OK) << error_.message;
  }
  uint64_t steps = 0;
  EXPECT_EQ(stoker_server_plane_disarm(plane, &steps, &error_), STOKER_OK) << error_.message;
  EXPECT_EQ(steps, 20u);
  stoker_server_plane_free(plane);
  stoker_session_free(session);
}

TEST_F(StokerCTest, TensorsAndMail) {
  stoker_session* const session = Attach(STOKER_PLANE_AUTO);
  ASSERT_NE(session, nullptr);
  stoker_tensor tensor;
  STOKER_INIT(&tensor);
  ASSERT_EQ(stoker_arena_tensor(session, "indices.1", &tensor, &error_), STOKER_OK) << error_.message;
  EXPECT_EQ(tensor.rank, 2);
  EXPECT_EQ(tensor.shape[0], 4u);
  EXPECT_EQ(tensor.shape[1], kTopK);
  EXPECT_EQ(tensor.shape[2], 0u);
  EXPECT_EQ(tensor.stride_bytes[0], kTopK * 4);
  EXPECT_EQ(tensor.stride_bytes[1], 4u);
  EXPECT_STREQ(tensor.element, "i32");
  EXPECT_EQ(tensor.size_bytes, 4 * kTopK * 4);
  EXPECT_EQ(tensor.on_device, 0);
  const void* const before = tensor.data;
  EXPECT_EQ(stoker_arena_tensor(session, "no such", &tensor, &error_), STOKER_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("no such"));
  EXPECT_EQ(tensor.data, before);
  ASSERT_EQ(stoker_arena_tensor(session, "state.lru.0", &tensor, &error_), STOKER_OK) << error_.message;
  EXPECT_STREQ(tensor.element, "i16");
  stoker_plane_mail mail;
  STOKER_INIT(&mail);
  ASSERT_EQ(stoker_get_plane_mail(session, &mail, &error_), STOKER_OK) << error_.message;
  EXPECT_EQ(mail.max_batch_rows, 4u);
  for (const auto& [name, address] : {std::pair<const char*, const void*>{"request", mail.request},
                                      {"done", mail.done},
                                      {"ended", mail.ended},
                                      {"batch_rows", mail.batch_rows},
                                      {"sequence_ids", mail.sequence_ids},
                                      {"state_rows", mail.state_rows},
                                      {"lengths", mail.lengths},
                                      {"commits", mail.commits},
                                      {"statuses", mail.statuses}}) {
    ASSERT_EQ(stoker_arena_tensor(session, name, &tensor, &error_), STOKER_OK) << name;
    EXPECT_EQ(tensor.data, address) << name;
    if (name == std::string("request")) {
      EXPECT_EQ(tensor.stride_bytes[0], mail.request_stride_bytes);
    }
  }
  stoker_session_free(session);
}

TEST_F(StokerCTest, TheArenaIsSharedAsAskedFor) {
  stoker_attach_options options = Options(STOKER_PLANE_RPC);
  stoker_session* session = nullptr;
  options.arena_sharing = STOKER_ARENA_SHARING_DESCRIPTOR;
  ASSERT_EQ(stoker_attach(client_, &options, &session, &error_), STOKER_OK) << error_.message;
  stoker_session_free(session);
  options.arena_sharing = STOKER_ARENA_SHARING_IPC_HANDLE;
  EXPECT_EQ(stoker_attach(client_, &options, &session, &error_), STOKER_FAILED_PRECONDITION);
  EXPECT_THAT(error_.message, HasSubstr("arena_sharing"));
  options.arena_sharing = 3;
  EXPECT_EQ(stoker_attach(client_, &options, &session, &error_), STOKER_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("0 to 2"));
}

// A struct of an older caller is shorter, one of a newer caller longer.
TEST_F(StokerCTest, StructsOfOtherVersions) {
  struct Newer {
    stoker_attach_options known;
    uint64_t unknown[4];
  };
  Newer newer;
  std::memset(&newer, 0xff, sizeof(newer));
  newer.known = Options(STOKER_PLANE_DIRECT);
  newer.known.struct_size = sizeof(newer);
  stoker_session* session = nullptr;
  ASSERT_EQ(stoker_attach(client_, &newer.known, &session, &error_), STOKER_OK) << error_.message;
  // Cut off behind the groups: no plane was known.
  stoker_attach_options older = Options(99);
  older.struct_size = offsetof(stoker_attach_options, staging_bytes);
  stoker_session* other = nullptr;
  ASSERT_EQ(stoker_attach(client_, &older, &other, &error_), STOKER_OK) << error_.message;
  stoker_session_free(other);

  struct NewerInfo {
    stoker_session_info known;
    uint64_t unknown[2];
  };
  NewerInfo info;
  std::memset(&info, 0xff, sizeof(info));
  info.known.struct_size = sizeof(info);
  ASSERT_EQ(stoker_get_session_info(session, &info.known, &error_), STOKER_OK);
  EXPECT_EQ(info.known.struct_size, sizeof(info));
  EXPECT_EQ(info.known.groups, 2u);
  EXPECT_EQ(info.unknown[0], 0u);
  EXPECT_EQ(info.unknown[1], 0u);
  std::memset(&info, 0xff, sizeof(info));
  info.known.struct_size = offsetof(stoker_session_info, plane);
  ASSERT_EQ(stoker_get_session_info(session, &info.known, &error_), STOKER_OK);
  EXPECT_EQ(info.known.generation, 1u);
  EXPECT_EQ(info.known.plane, -1);  // not touched
  EXPECT_EQ(info.unknown[0], ~uint64_t{0});
  for (const size_t size : {size_t{0}, sizeof(size_t) - 1}) {
    info.known.struct_size = size;
    EXPECT_EQ(stoker_get_session_info(session, &info.known, &error_), STOKER_INVALID_ARGUMENT);
    EXPECT_THAT(error_.message, HasSubstr("struct_size"));
    stoker_attach_options options = Options(STOKER_PLANE_RPC);
    options.struct_size = size;
    EXPECT_EQ(stoker_attach(client_, &options, &other, &error_), STOKER_INVALID_ARGUMENT);
  }
  stoker_session_free(session);
}

TEST_F(StokerCTest, NullsAndWrongNumbersAreSaid) {
  stoker_session* const session = Attach(STOKER_PLANE_DIRECT);
  stoker_session* const armed = Attach(STOKER_PLANE_SERVER);
  ASSERT_TRUE(session != nullptr && armed != nullptr);
  stoker_attach_options attach = Options(STOKER_PLANE_RPC);
  stoker_pool_spec spec;
  STOKER_INIT(&spec);
  stoker_admit_item item;
  STOKER_INIT(&item);
  item.prompt_rows = item.max_rows = 1;
  stoker_sequence sequence;
  STOKER_INIT(&sequence);
  stoker_tensor tensor;
  STOKER_INIT(&tensor);
  stoker_session_info info;
  STOKER_INIT(&info);
  stoker_plane_mail mail;
  STOKER_INIT(&mail);
  stoker_direct_plane_options open;
  STOKER_INIT(&open);
  open.top_k = kTopK;
  stoker_client* client = nullptr;
  stoker_session* other = nullptr;
  stoker_server_plane* server = nullptr;
  stoker_direct_plane* direct = nullptr;
  const uint32_t position = 0;
  char byte = 0;
  const auto expect_null = [&](int32_t code, const char* what) {
    EXPECT_EQ(code, STOKER_INVALID_ARGUMENT) << what;
    EXPECT_EQ(error_.code, STOKER_INVALID_ARGUMENT) << what;
    EXPECT_THAT(error_.message, HasSubstr(absl::StrCat(what, ": is NULL")));
    error_ = {};
  };
  expect_null(stoker_connect(nullptr, nullptr, &client, &error_), "address");
  expect_null(stoker_connect("unix:/x", nullptr, nullptr, &error_), "client");
  expect_null(stoker_create_pool(nullptr, &spec, &error_), "client");
  expect_null(stoker_create_pool(client_, nullptr, &error_), "spec");
  expect_null(stoker_create_pool(client_, &spec, &error_), "spec.name");
  expect_null(stoker_attach(nullptr, &attach, &other, &error_), "client");
  expect_null(stoker_attach(client_, nullptr, &other, &error_), "options");
  expect_null(stoker_attach(client_, &attach, nullptr, &error_), "session");
  attach.pool = nullptr;
  expect_null(stoker_attach(client_, &attach, &other, &error_), "options.pool");
  attach = Options(STOKER_PLANE_RPC);
  attach.groups = nullptr;
  expect_null(stoker_attach(client_, &attach, &other, &error_), "options.groups");
  const stoker_index_group no_layers = {nullptr, 1};
  attach.groups = &no_layers;
  attach.group_count = 1;
  expect_null(stoker_attach(client_, &attach, &other, &error_), "options.groups[0].layers");
  expect_null(stoker_get_session_info(nullptr, &info, &error_), "session");
  expect_null(stoker_get_session_info(session, nullptr, &error_), "info");
  expect_null(stoker_session_status(nullptr, &error_), "session");
  expect_null(stoker_admit(nullptr, &item, &sequence, &error_), "session");
  expect_null(stoker_admit(session, nullptr, &sequence, &error_), "item");
  expect_null(stoker_admit(session, &item, nullptr, &error_), "sequence");
  item.block_hash_bytes = 16;
  expect_null(stoker_admit(session, &item, &sequence, &error_), "item.block_hashes");
  expect_null(stoker_release(nullptr, 1, &error_), "session");
  expect_null(stoker_store(nullptr, 1, 0, 1, &byte, 1, &error_), "session");
  expect_null(stoker_store(session, 1, 0, 1, nullptr, 1, &error_), "rows");
  expect_null(stoker_read(nullptr, 1, &position, 1, &byte, 1, &error_), "session");
  expect_null(stoker_read(session, 1, nullptr, 1, &byte, 1, &error_), "positions");
  expect_null(stoker_read(session, 1, &position, 1, nullptr, 1, &error_), "rows");
  expect_null(stoker_arena_tensor(nullptr, "hot.0", &tensor, &error_), "session");
  expect_null(stoker_arena_tensor(session, nullptr, &tensor, &error_), "name");
  expect_null(stoker_arena_tensor(session, "hot.0", nullptr, &error_), "tensor");
  expect_null(stoker_get_plane_mail(nullptr, &mail, &error_), "session");
  expect_null(stoker_get_plane_mail(session, nullptr, &error_), "mail");
  expect_null(stoker_server_plane_arm(nullptr, 1, &server, &error_), "session");
  expect_null(stoker_server_plane_arm(armed, 1, nullptr, &error_), "plane");
  expect_null(stoker_direct_plane_open(nullptr, &open, &direct, &error_), "session");
  expect_null(stoker_direct_plane_open(session, nullptr, &direct, &error_), "options");
  expect_null(stoker_direct_plane_open(session, &open, nullptr, &error_), "plane");
  const stoker_plane_row row = {};
  const int32_t commit = 0;
  expect_null(stoker_server_plane_begin(nullptr, &row, 1, &error_), "plane");
  expect_null(stoker_server_plane_ring(nullptr, 0, &error_), "plane");
  expect_null(stoker_server_plane_await(nullptr, 0, 0, &error_), "plane");
  expect_null(stoker_server_plane_commit(nullptr, &commit, 1, &error_), "plane");
  expect_null(stoker_server_plane_await_commit(nullptr, 0, &error_), "plane");
  expect_null(stoker_server_plane_row_error(nullptr, &error_), "plane");
  expect_null(stoker_server_plane_disarm(nullptr, nullptr, &error_), "plane");
  expect_null(stoker_direct_plane_begin(nullptr, &row, 1, &error_), "plane");
  expect_null(stoker_direct_plane_group(nullptr, 0, &error_), "plane");
  expect_null(stoker_direct_plane_await(nullptr, 0, 0, &error_), "plane");
  expect_null(stoker_direct_plane_commit(nullptr, &commit, 1, &error_), "plane");
  expect_null(stoker_direct_plane_await_commit(nullptr, 0, &error_), "plane");
  expect_null(stoker_direct_plane_row_error(nullptr, &error_), "plane");
  expect_null(stoker_direct_plane_enqueue_begin(nullptr, &error_), "plane");
  expect_null(stoker_direct_plane_enqueue_group(nullptr, 0, &error_), "plane");
  expect_null(stoker_direct_plane_enqueue_commit(nullptr, &error_), "plane");
  expect_null(stoker_direct_plane_status(nullptr, &error_), "plane");
  EXPECT_EQ(stoker_direct_plane_entries(nullptr, 0, 0), nullptr);
  EXPECT_EQ(stoker_direct_plane_hot_rows(nullptr, 0, 0), nullptr);
  EXPECT_EQ(stoker_direct_plane_misses(nullptr, 0, 0), -1);
  EXPECT_EQ(stoker_server_plane_entries(nullptr, 0, 0), nullptr);
  EXPECT_EQ(stoker_server_plane_hot_rows(nullptr, 0, 0), nullptr);
  EXPECT_EQ(stoker_server_plane_misses(nullptr, 0, 0), -1);
  // With a plane, and without an error to fill.
  ASSERT_EQ(stoker_direct_plane_open(session, &open, &direct, nullptr), STOKER_OK);
  expect_null(stoker_direct_plane_begin(direct, nullptr, 1, &error_), "rows");
  EXPECT_EQ(stoker_direct_plane_begin(direct, &row, 5, nullptr), STOKER_INVALID_ARGUMENT);
  EXPECT_EQ(stoker_direct_plane_begin(direct, &row, std::numeric_limits<size_t>::max(), nullptr),
            STOKER_INVALID_ARGUMENT);
  expect_null(stoker_direct_plane_commit(direct, nullptr, 1, &error_), "commits");
  EXPECT_EQ(stoker_direct_plane_group(direct, 0, nullptr), STOKER_FAILED_PRECONDITION);
  EXPECT_EQ(stoker_direct_plane_entries(direct, 2, 0), nullptr);
  EXPECT_EQ(stoker_direct_plane_entries(direct, 0, 4), nullptr);
  EXPECT_NE(stoker_direct_plane_entries(direct, 1, 3), nullptr);
  EXPECT_EQ(stoker_direct_plane_hot_rows(direct, 0xffffffffu, 0), nullptr);
  EXPECT_EQ(stoker_direct_plane_misses(direct, 0, std::numeric_limits<size_t>::max()), -1);
  EXPECT_EQ(stoker_read(session, 1, &position, 0, &byte, 1, &error_), STOKER_INVALID_ARGUMENT);
  EXPECT_EQ(stoker_read(session, 1, &position, 65537, &byte, 1, &error_), STOKER_INVALID_ARGUMENT);
  attach = Options(4);
  EXPECT_EQ(stoker_attach(client_, &attach, &other, &error_), STOKER_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("options.plane: 4"));
  attach = Options(STOKER_PLANE_RPC);
  attach.group_count = std::numeric_limits<size_t>::max();
  EXPECT_EQ(stoker_attach(client_, &attach, &other, &error_), STOKER_INVALID_ARGUMENT);
  // A pool that is not there: the daemon's status comes through.
  attach = Options(STOKER_PLANE_RPC);
  attach.pool = "none";
  EXPECT_EQ(stoker_attach(client_, &attach, &other, &error_), STOKER_NOT_FOUND);
  EXPECT_EQ(other, nullptr);
  stoker_direct_plane_free(direct);
  stoker_direct_plane_free(nullptr);
  stoker_server_plane_free(nullptr);
  stoker_session_free(session);
  stoker_session_free(armed);
  stoker_session_free(nullptr);
  stoker_client_free(nullptr);
  EXPECT_EQ(stoker_api_version(), STOKER_C_API_VERSION);
  EXPECT_STREQ(stoker_code_name(STOKER_OK), "OK");
  EXPECT_STREQ(stoker_code_name(STOKER_UNAVAILABLE), "UNAVAILABLE");
  EXPECT_STREQ(stoker_code_name(STOKER_UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_STREQ(stoker_code_name(17), "?");
  EXPECT_STREQ(stoker_code_name(-1), "?");
}

TEST_F(StokerCTest, LongMessagesAreCutOff) {
  std::string name(2000, 'n');
  stoker_pool_spec spec;
  STOKER_INIT(&spec);
  spec.name = name.c_str();
  std::memset(&error_, 'x', sizeof(error_));
  EXPECT_NE(stoker_create_pool(client_, &spec, &error_), STOKER_OK);
  EXPECT_LT(std::strlen(error_.message), sizeof(error_.message));
  stoker_client* nobody = nullptr;
  stoker_connect_options options;
  STOKER_INIT(&options);
  options.connect_timeout_ms = 100;
  EXPECT_EQ(stoker_connect(("unix:/" + name.substr(0, 60)).c_str(), &options, &nobody, &error_), STOKER_UNAVAILABLE);
  EXPECT_EQ(nobody, nullptr);
}

class ExampleTest : public DaemonTest {
 protected:
  using DaemonTest::DaemonTest;
};

TEST_F(ExampleTest, BothDecode) {
  for (const char* const program : {EXAMPLE_DIRECT_PLANE, EXAMPLE_DIRECT_PLANE_C}) {
    const Finished run = RunToEnd({program, daemon().address(), "200"}, daemon().folder());
    EXPECT_EQ(run.status, 0) << run.output;
    EXPECT_THAT(run.output, HasSubstr("length 101: "));
    EXPECT_THAT(run.output, HasSubstr("length 300: "));
  }
  EXPECT_EQ(SessionCount(), 0);
}

class ExampleWithoutPlaneTest : public DaemonTest {
 protected:
  ExampleWithoutPlaneTest() : DaemonTest({"--direct-plane=false"}) {}
};

TEST_F(ExampleWithoutPlaneTest, BothSayWhy) {
  for (const char* const program : {EXAMPLE_DIRECT_PLANE, EXAMPLE_DIRECT_PLANE_C}) {
    const Finished run = RunToEnd({program, daemon().address()}, daemon().folder());
    EXPECT_EQ(run.status, 2) << run.output;
    EXPECT_THAT(run.output, HasSubstr("direct_plane is off"));
  }
}

}  // namespace
}  // namespace stoker::system_test
