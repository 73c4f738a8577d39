// Bad input: each request with a wrong field is refused with the right code and a message that names field, value and
// limit, and leaves everything as it was.
#include "absl/strings/str_cat.h"
#include "stoker/v1/admin.grpc.pb.h"
#include "stoker/v1/pools.grpc.pb.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "stoker/v1/sequences.grpc.pb.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/system/bad_input_fixture.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kResourceExhausted = absl::StatusCode::kResourceExhausted;

constexpr uint32_t kMax32 = 0xffffffffu;
constexpr uint64_t kMax64 = ~uint64_t{0};

TEST_F(BadInputTest, RefusesPoolsOutOfRange) {
  struct Case {
    const char* what;
    std::function<void(v1::PoolSpec&)> change;
    std::vector<std::string> message;
  };
  const std::string longest(63, 'a');
  for (const Case& c : std::vector<Case>{
           {"no name", [](auto& s) { s.set_name(""); }, {"name"}},
           {"long name", [&](auto& s) { s.set_name(longest + "a"); }, {"name", "64", "63"}},
           {"upper case", [](auto& s) { s.set_name("Pool"); }, {"name", "Pool"}},
           {"digit first", [](auto& s) { s.set_name("1pool"); }, {"name", "1pool"}},
           {"zero byte", [](auto& s) { s.set_name(std::string("a\0b", 3)); }, {"name"}},
           {"no layer", [](auto& s) { s.set_layers(0); }, {"layers", "0", "1024"}},
           {"many layers", [](auto& s) { s.set_layers(1025); }, {"layers", "1025", "1024"}},
           {"all layers", [](auto& s) { s.set_layers(kMax32); }, {"layers", "4294967295", "1024"}},
           {"no layout", [](auto& s) { s.set_row_layout(v1::ROW_LAYOUT_UNSPECIFIED); }, {"row_layout"}},
           {"unknown layout", [](auto& s) { s.set_row_layout(static_cast<v1::RowLayout>(77)); }, {"row_layout"}},
           {"negative layout", [](auto& s) { s.set_row_layout(static_cast<v1::RowLayout>(-1)); }, {"row_layout"}},
           {"no row", [](auto& s) { s.set_row_bytes(0); }, {"row_bytes", "0"}},
           {"odd row", [](auto& s) { s.set_row_bytes(18); }, {"row_bytes", "18", "4"}},
           {"wide row", [](auto& s) { s.set_row_bytes(65540); }, {"row_bytes", "65540", "65536"}},
           {"huge row", [](auto& s) { s.set_row_bytes(kMax32 - 3); }, {"row_bytes", "4294967292"}},
           {"V of linear", [](auto& s) { s.set_v_row_bytes(16); }, {"v_row_bytes", "16"}},
           {"no V of split", [](auto& s) { s.set_row_layout(v1::ROW_LAYOUT_SPLIT_KV); }, {"v_row_bytes", "0"}},
           {"paged rows of 48",
            [](auto& s) {
              s.set_row_layout(v1::ROW_LAYOUT_DSV4_PAGED);
              s.set_block_rows(64);
            },
            {"row_bytes", "48", "584"}},
           {"paged blocks of 16",
            [](auto& s) {
              s.set_row_layout(v1::ROW_LAYOUT_DSV4_PAGED);
              s.set_row_bytes(584);
            },
            {"block_rows", "16", "64"}},
           {"block of 8", [](auto& s) { s.set_block_rows(8); }, {"block_rows", "8", "16"}},
           {"block of 24", [](auto& s) { s.set_block_rows(24); }, {"block_rows", "24"}},
           {"block of 2048", [](auto& s) { s.set_block_rows(2048); }, {"block_rows", "2048", "1024"}},
           {"prefix of 24", [](auto& s) { s.set_prefix_rows(24); }, {"prefix_rows", "24"}},
           {"prefix of 65552", [](auto& s) { s.set_prefix_rows(65552); }, {"prefix_rows", "65552", "65536"}},
           {"no block", [](auto& s) { s.set_blocks(0); }, {"blocks", "0"}},
           {"blocks beyond int32", [](auto& s) { s.set_blocks(134217728); }, {"blocks", "134217728", "134217727"}},
           {"all blocks", [](auto& s) { s.set_blocks(kMax32); }, {"blocks", "4294967295"}},
       }) {
    v1::CreatePoolRequest request;
    *request.mutable_spec() = LinearPool("new", 2, 48, 4);
    c.change(*request.mutable_spec());
    ExpectRefused(c.what, client().CreatePool(request).status(), kInvalidArgument, c.message);
  }
  v1::CreatePoolRequest request;
  ExpectRefused("empty", client().CreatePool(request).status(), kInvalidArgument, {"name"});
  *request.mutable_spec() = pool();
  request.mutable_spec()->set_blocks(pool().blocks() + 1);
  ExpectRefused("other spec", client().CreatePool(request).status(), absl::StatusCode::kAlreadyExists, {"p"});
  *request.mutable_spec() = LinearPool("new", 1024, 65536, 1 << 20);
  ExpectRefused("more than there is", client().CreatePool(request).status(), kResourceExhausted, {"max_pool_bytes"});
  *request.mutable_spec() = pool();
  EXPECT_TRUE(client().CreatePool(request).ok());  // an equal one changes nothing
  v1::GetPoolRequest get;
  get.set_name("none");
  ExpectRefused("get", client().GetPool(get).status(), kNotFound, {"none"});
  v1::DeletePoolRequest remove;
  remove.set_name("none");
  ExpectRefused("delete", client().DeletePool(remove).status(), kNotFound, {"none"});
  remove.set_name("p");
  ExpectRefused("in use", client().DeletePool(remove).status(), kFailedPrecondition, {"2 sessions"});
}

TEST_F(BadInputTest, RefusesSessionsOutOfRange) {
  struct Case {
    const char* what;
    std::function<void(v1::AttachRequest&)> change;
    std::vector<std::string> message;
    absl::StatusCode code = kInvalidArgument;
  };
  for (const Case& c : std::vector<Case>{
           {"pool", [](auto& r) { r.set_pool("none"); }, {"none"}, kNotFound},
           {"no pool", [](auto& r) { r.set_pool(""); }, {"pool"}, kNotFound},
           {"name", [](auto& r) { r.set_name(std::string(64, 'a')); }, {"name", "64", "63"}},
           {"name with space", [](auto& r) { r.set_name("a b"); }, {"name", "a b"}},
           {"no state row", [](auto& r) { r.set_state_rows(0); }, {"state_rows", "0", "4096"}},
           {"state rows", [](auto& r) { r.set_state_rows(4097); }, {"state_rows", "4097", "4096"}},
           {"all state rows", [](auto& r) { r.set_state_rows(kMax32); }, {"state_rows", "4294967295"}},
           {"no hot row", [](auto& r) { r.set_hot_rows(0); }, {"hot_rows", "0", "32768"}},
           {"hot rows", [](auto& r) { r.set_hot_rows(32769); }, {"hot_rows", "32769", "32768"}},
           {"all hot rows", [](auto& r) { r.set_hot_rows(kMax32); }, {"hot_rows", "4294967295"}},
           {"no top_k", [](auto& r) { r.set_max_top_k(0); }, {"max_top_k", "0"}},
           {"top_k beyond hot_rows", [](auto& r) { r.set_max_top_k(65); }, {"max_top_k", "65", "64"}},
           {"top_k beyond 8192",
            [](auto& r) {
              r.set_max_top_k(8193);
              r.set_hot_rows(16384);
            },
            {"max_top_k", "8193", "8192"}},
           {"batch rows", [](auto& r) { r.set_max_batch_rows(4097); }, {"max_batch_rows", "4097", "4096"}},
           {"no sequence rows", [](auto& r) { r.set_max_sequence_rows(0); }, {"max_sequence_rows", "0"}},
           {"sequence rows",
            [](auto& r) { r.set_max_sequence_rows((1 << 24) + 1); },
            {"max_sequence_rows", "16777217", "16777216"}},
           {"no index space", [](auto& r) { r.set_index_space(v1::INDEX_SPACE_UNSPECIFIED); }, {"index_space"}},
           {"unknown index space", [](auto& r) { r.set_index_space(static_cast<v1::IndexSpace>(9)); }, {"index_space"}},
           {"no group", [](auto& r) { r.clear_groups(); }, {"groups", "0"}},
           {"group without layers", [](auto& r) { r.add_groups(); }, {"groups", "1"}},
           {"layer", [](auto& r) { r.add_groups()->add_layers(2); }, {"layer", "2", "1"}},
           {"huge layer", [](auto& r) { r.add_groups()->add_layers(kMax32); }, {"layer 4294967295", "1"}},
           {"layer twice", [](auto& r) { r.add_groups()->add_layers(1); }, {"layer 1"}},
           {"layer twice in a group", [](auto& r) { r.mutable_groups(0)->add_layers(1); }, {"layer 1"}},
           {"many groups",
            [](auto& r) {
              for (int i = 0; i < 1024; ++i) r.add_groups()->add_layers(0);
            },
            {"groups", "1025", "1024"}},
           {"odd staging", [](auto& r) { r.set_staging_bytes(100); }, {"staging_bytes", "100", "64"}},
           {"staging",
            [](auto& r) { r.set_staging_bytes((uint64_t{1} << 32) + 64); },
            {"staging_bytes", "4294967360", "4294967296"}},
           {"all staging", [](auto& r) { r.set_staging_bytes(kMax64); }, {"staging_bytes"}},
           {"staging memory",
            [](auto& r) { r.set_staging_bytes(uint64_t{1} << 32); },
            {"max_hot_bytes"},
            kResourceExhausted},
           {"hot memory",
            [](auto& r) {
              r.set_state_rows(4096);
              r.set_hot_rows(32768);
            },
            {"max_hot_bytes"},
            kResourceExhausted},
           {"state memory",
            [](auto& r) {
              r.set_state_rows(4096);
              r.set_max_sequence_rows(1 << 24);
            },
            {"bytes"},
            kResourceExhausted},
           {"arena sharing",
            [](auto& r) { r.set_arena_sharing(static_cast<v1::ArenaSharing>(3)); },
            {"arena_sharing", "3", "0 to 2"}},
           {"negative arena sharing",
            [](auto& r) { r.set_arena_sharing(static_cast<v1::ArenaSharing>(-1)); },
            {"arena_sharing", "-1", "0 to 2"}},
           {"handle of host memory",
            [](auto& r) { r.set_arena_sharing(v1::ARENA_SHARING_IPC_HANDLE); },
            {"arena_sharing", "ARENA_SHARING_IPC_HANDLE", "not available on"},
            kFailedPrecondition},
           {"handle of host memory, in place of another session's",
            [](auto& r) {
              r.set_name("other_rank");
              r.set_arena_sharing(v1::ARENA_SHARING_IPC_HANDLE);
            },
            {"arena_sharing", "ARENA_SHARING_IPC_HANDLE", "not available on"},
            kFailedPrecondition},
           {"reserved blocks", [](auto& r) { r.set_max_reserved_blocks(kMax32); }, {"max_reserved_blocks", "64"}},
       }) {
    v1::AttachRequest request = AttachTo(pool(), "other");
    c.change(request);
    ExpectRefused(c.what, RawAttach(request), c.code, c.message);
  }
  ExpectRefused("empty", RawAttach(v1::AttachRequest()), kNotFound, {"pool"});
}

TEST_F(BadInputTest, RefusesAdmissionsOutOfRange) {
  struct Case {
    const char* what;
    std::function<void(v1::AdmitItem&)> change;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  for (const Case& c : std::vector<Case>{
           {"no prompt", [](auto& i) { i.set_prompt_rows(0); }, kInvalidArgument, {"prompt_rows", "0"}},
           {"prompt", [](auto& i) { i.set_prompt_rows(101); }, kInvalidArgument, {"max_rows", "100", "101"}},
           {"all of it", [](auto& i) { i.set_prompt_rows(kMax32); }, kInvalidArgument, {"4294967295"}},
           {"no rows", [](auto& i) { i.set_max_rows(0); }, kInvalidArgument, {"max_rows", "0"}},
           {"rows", [](auto& i) { i.set_max_rows(1025); }, kInvalidArgument, {"max_rows", "1025", "1024"}},
           {"all rows", [](auto& i) { i.set_max_rows(kMax32); }, kInvalidArgument, {"max_rows", "4294967295", "1024"}},
           {"key",
            [](auto& i) { i.set_sequence_key(std::string(256, 'k')); },
            kInvalidArgument,
            {"sequence_key", "256", "255"}},
           {"cut hash",
            [](auto& i) { i.set_block_hashes(std::string(15, 'h')); },
            kInvalidArgument,
            {"block_hashes", "15", "16"}},
           {"three hashes",
            [](auto& i) { i.set_block_hashes(std::string(16 * 3, 'h')); },
            kInvalidArgument,
            {"block_hashes"}},
           {"many hashes",
            [](auto& i) { i.set_block_hashes(std::string(16 * 5, 'h')); },
            kInvalidArgument,
            {"block_hashes", "5"}},
           {"key of another shape",
            [](auto& i) { i.set_sequence_key("key"); },
            kFailedPrecondition,
            {"key", "prompt_rows", "50"}},
           {"more than there is",
            [](auto& i) { i.set_max_rows(1024); },
            kResourceExhausted,
            {"blocks needed", "limit"}},
       }) {
    v1::AdmitItem item = rank().Item(MakeTokens(50, 50), 100);
    c.change(item);
    v1::AdmitRequest request;
    *request.add_items() = item;
    v1::AdmitResponse response;
    ASSERT_TRUE(rank().session().Admit(request, &response).ok()) << c.what;
    EXPECT_EQ(response.sequences(0).sequence_id(), 0u) << c.what;
    ExpectRefused(c.what, client::FromItem(response.sequences(0).status()), c.code, c.message);
  }
}

TEST_F(BadInputTest, RefusesUnknownAndStaleSequences) {
  const Sequence gone = rank().Open(MakeTokens(51, 16), 16);
  ASSERT_TRUE(rank().Close(gone).ok());
  v1::AdmitItem elsewhere_item = other_rank().Item(MakeTokens(52, 16), 16, "", false);
  const v1::AdmittedSequence elsewhere = other_rank().Admit(elsewhere_item);
  TakeReference();
  struct Id {
    const char* what;
    uint64_t value;
    absl::StatusCode code;
  };
  for (const Id& id : {Id{"zero", 0, kNotFound}, Id{"small", 5, kNotFound}, Id{"all ones", kMax64, kNotFound},
                       Id{"released", gone.id, kFailedPrecondition},
                       Id{"next generation", sequence().id + (uint64_t{1} << 32), kNotFound},
                       Id{"of another session", elsewhere.sequence_id(), kFailedPrecondition}}) {
    const auto expect = [&](const char* call, const absl::Status& status) {
      if (id.value != 0) {
        ExpectRefused(absl::StrCat(call, ", ", id.what), status, id.code, {absl::StrCat(id.value)});
      } else {
        EXPECT_FALSE(status.ok()) << call;
      }
    };
    v1::ExtendRequest extend;
    extend.add_items()->set_sequence_id(id.value);
    extend.mutable_items(0)->set_max_rows(100);
    expect("Extend", Call<v1::ExtendResponse>(&client::Session::Extend, extend));
    v1::ReleaseRequest release;
    release.add_sequence_ids(id.value);
    expect("Release", Call<v1::ReleaseResponse>(&client::Session::Release, release));
    v1::GetBlockTablesRequest tables;
    tables.add_sequence_ids(id.value);
    v1::GetBlockTablesResponse told;
    ASSERT_TRUE(rank().session().GetBlockTables(tables, &told).ok());
    ASSERT_EQ(told.tables_size(), 1);
    expect("GetBlockTables", client::FromItem(told.tables(0).status()));
    EXPECT_EQ(told.tables(0).blocks_size(), 0);
    v1::StoreRequest store;
    *store.add_items() = StoreItem(id.value, 0, 1);
    expect("Store", Call<v1::StoreResponse>(&client::Session::Store, store));
    v1::LoadRequest load;
    *load.add_items()->mutable_range() = store.items(0).range();
    load.mutable_items(0)->set_target(v1::LOAD_TARGET_STAGING);
    expect("Load", Call<v1::LoadResponse>(&client::Session::Load, load));
    v1::CommitRequest commit;
    commit.add_items()->set_sequence_id(id.value);
    commit.mutable_items(0)->set_row_count(1);
    expect("Commit", Call<v1::CommitResponse>(&client::Session::Commit, commit));
    v1::InvalidateRequest invalidate;
    invalidate.add_items()->set_sequence_id(id.value);
    invalidate.mutable_items(0)->add_positions(0);
    expect("Invalidate", Call<v1::InvalidateResponse>(&client::Session::Invalidate, invalidate));
    v1::ForkRequest fork;
    fork.add_items()->set_sequence_id(id.value);
    fork.mutable_items(0)->set_rows(1);
    fork.mutable_items(0)->set_max_rows(1);
    v1::ForkResponse forked;
    ASSERT_TRUE(rank().session().Fork(fork, &forked).ok());
    EXPECT_EQ(forked.sequences(0).sequence_id(), 0u);
    expect("Fork", client::FromItem(forked.sequences(0).status()));
    v1::ReadRequest read;
    read.set_sequence_id(id.value);
    read.mutable_positions()->add_values(0);
    v1::ReadResponse bytes;
    expect("Read", rank().session().Read(read, &bytes));
    if (id.value == 0) continue;  // a padding row
    v1::StepRequest step = GoodStep();
    step.mutable_rows(0)->set_sequence_id(id.value);
    v1::StepResponse stepped;
    ASSERT_TRUE(rank().session().Step(step, &stepped).ok());
    expect("Step", client::FromItem(stepped.statuses(0)));
    for (int32_t hot_row : stepped.groups(0).hot_rows()) EXPECT_EQ(hot_row, -1);
  }
}

TEST_F(BadInputTest, RefusesRangesOutOfBounds) {
  const uint64_t id = sequence().id;
  struct Case {
    const char* what;
    uint32_t first, count;
    absl::StatusCode store, load;
    std::vector<std::string> message;
  };
  // 100 rows may be, 64 are stored.
  for (const Case& c : std::vector<Case>{
           {"no row", 0, 0, kInvalidArgument, kInvalidArgument, {"row_count", "0"}},
           {"beyond the end", 60, 41, kInvalidArgument, kFailedPrecondition, {"100"}},
           {"a gap", 65, 1, kFailedPrecondition, kFailedPrecondition, {"65", "64"}},
           {"at max_rows", 100, 1, kInvalidArgument, kFailedPrecondition, {"100"}},
           {"all rows", 0, kMax32, kInvalidArgument, kInvalidArgument, {"row_count", "4294967295", "1024"}},
           {"the last first row", kMax32, 1, kInvalidArgument, kInvalidArgument, {"first_row", "4294967295", "1024"}},
           {"both", kMax32, kMax32, kInvalidArgument, kInvalidArgument, {"4294967295"}},
       }) {
    v1::StoreRequest store;
    *store.add_items() = StoreItem(id, c.first, std::min(c.count, 64u));
    store.mutable_items(0)->mutable_range()->set_row_count(c.count);
    if (c.count < 1000) {
      ExpectRefused(absl::StrCat("Store, ", c.what), Call<v1::StoreResponse>(&client::Session::Store, store), c.store,
                    c.message);
    }
    store.mutable_items(0)->clear_rows();
    store.mutable_items(0)->set_source(v1::DATA_SOURCE_SHARED);
    ExpectRefused(absl::StrCat("Store shared, ", c.what), Call<v1::StoreResponse>(&client::Session::Store, store),
                  c.store, c.message);
    for (const auto target : {v1::LOAD_TARGET_STAGING, v1::LOAD_TARGET_HOT_BUFFER}) {
      v1::LoadRequest load;
      *load.add_items()->mutable_range() = store.items(0).range();
      load.mutable_items(0)->set_target(target);
      const absl::Status status = Call<v1::LoadResponse>(&client::Session::Load, load);
      EXPECT_FALSE(status.ok()) << c.what;
      if (target == v1::LOAD_TARGET_STAGING) ExpectRefused(absl::StrCat("Load, ", c.what), status, c.load, {});
    }
  }
  // Truncated and overlong rows, an unknown source, staging out of bounds.
  for (const int difference : {-1, 1, -96, 96}) {
    v1::StoreRequest store;
    *store.add_items() = StoreItem(id, 0, 2);
    store.mutable_items(0)->mutable_rows()->resize(static_cast<size_t>(2 * 2 * 48 + difference));
    ExpectRefused("row bytes", Call<v1::StoreResponse>(&client::Session::Store, store), kInvalidArgument,
                  {"rows", absl::StrCat(192 + difference), "192"});
  }
  for (const uint64_t offset : {uint64_t{1} << 20, (uint64_t{1} << 20) - 16, kMax64 - 15, uint64_t{8}}) {
    v1::StoreRequest store;
    *store.add_items() = StoreItem(id, 0, 2);
    store.mutable_items(0)->clear_rows();
    store.mutable_items(0)->set_source(v1::DATA_SOURCE_SHARED);
    store.mutable_items(0)->set_staging_offset_bytes(offset);
    ExpectRefused("staging", Call<v1::StoreResponse>(&client::Session::Store, store), kInvalidArgument,
                  {"staging_offset_bytes", absl::StrCat(offset)});
    v1::LoadRequest load;
    *load.add_items()->mutable_range() = store.items(0).range();
    load.mutable_items(0)->set_target(v1::LOAD_TARGET_STAGING);
    load.mutable_items(0)->set_staging_offset_bytes(offset);
    ExpectRefused("staging", Call<v1::LoadResponse>(&client::Session::Load, load), kInvalidArgument,
                  {"staging_offset_bytes", absl::StrCat(offset)});
  }
  for (const int value : {0, 4, -1}) {
    v1::StoreRequest store;
    *store.add_items() = StoreItem(id, 0, 2);
    store.mutable_items(0)->set_source(static_cast<v1::DataSource>(value));
    ExpectRefused("source", Call<v1::StoreResponse>(&client::Session::Store, store), kInvalidArgument,
                  {"source", absl::StrCat(value)});
    v1::LoadRequest load;
    *load.add_items()->mutable_range() = store.items(0).range();
    load.mutable_items(0)->set_target(static_cast<v1::LoadTarget>(value));
    ExpectRefused("target", Call<v1::LoadResponse>(&client::Session::Load, load), kInvalidArgument,
                  {"target", absl::StrCat(value)});
  }
}

TEST_F(BadInputTest, RefusesForksExtensionsCommitsAndInvalidationsOutOfRange) {
  const uint64_t id = sequence().id;
  struct ForkCase {
    uint32_t rows, max_rows;
    const char* key;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  for (const ForkCase& c : std::vector<ForkCase>{{0, 100, "", kInvalidArgument, {"rows", "0"}},
                                                 {65, 100, "", kFailedPrecondition, {"65", "64"}},
                                                 {64, 63, "", kInvalidArgument, {"max_rows", "63"}},
                                                 {64, 1025, "", kInvalidArgument, {"max_rows", "1025", "1024"}},
                                                 {kMax32, kMax32, "", kInvalidArgument, {"4294967295"}},
                                                 {64, 64, "key", kFailedPrecondition, {"key"}},
                                                 {64, 1024, "", kResourceExhausted, {"blocks"}}}) {
    v1::ForkRequest fork;
    v1::ForkItem* item = fork.add_items();
    item->set_sequence_id(id);
    item->set_rows(c.rows);
    item->set_max_rows(c.max_rows);
    item->set_sequence_key(c.key);
    v1::ForkResponse forked;
    ASSERT_TRUE(rank().session().Fork(fork, &forked).ok());
    ExpectRefused("Fork", client::FromItem(forked.sequences(0).status()), c.code, c.message);
  }
  for (const uint32_t rows : {0u, 99u, 1025u, kMax32}) {
    v1::ExtendRequest extend;
    extend.add_items()->set_sequence_id(id);
    extend.mutable_items(0)->set_max_rows(rows);
    ExpectRefused("Extend", Call<v1::ExtendResponse>(&client::Session::Extend, extend), kInvalidArgument,
                  {"max_rows", absl::StrCat(rows)});
  }
  struct CommitCase {
    uint32_t first, count;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  for (const CommitCase& c : std::vector<CommitCase>{{64, 0, kInvalidArgument, {"row_count", "0", "16"}},
                                                     {64, 17, kInvalidArgument, {"row_count", "17", "16"}},
                                                     {64, kMax32, kInvalidArgument, {"row_count", "4294967295", "16"}},
                                                     {65, 1, kFailedPrecondition, {"65", "64"}},
                                                     {100, 1, kInvalidArgument, {"100"}},
                                                     {kMax32, 1, kInvalidArgument, {"4294967295", "100"}}}) {
    v1::CommitRequest commit;
    commit.add_items()->set_sequence_id(id);
    commit.mutable_items(0)->set_first_row(c.first);
    commit.mutable_items(0)->set_row_count(c.count);
    ExpectRefused("Commit", Call<v1::CommitResponse>(&client::Session::Commit, commit), c.code, c.message);
  }
  v1::InvalidateRequest invalidate;
  invalidate.add_items()->set_sequence_id(id);
  ExpectRefused("Invalidate", Call<v1::InvalidateResponse>(&client::Session::Invalidate, invalidate), kInvalidArgument,
                {"positions", "0", "8192"});
  invalidate.mutable_items(0)->add_positions(100);
  ExpectRefused("Invalidate", Call<v1::InvalidateResponse>(&client::Session::Invalidate, invalidate), kInvalidArgument,
                {"positions", "100"});
  invalidate.mutable_items(0)->set_positions(0, kMax32);
  ExpectRefused("Invalidate", Call<v1::InvalidateResponse>(&client::Session::Invalidate, invalidate), kInvalidArgument,
                {"positions", "4294967295"});
  for (int i = 0; i < 8193; ++i) invalidate.mutable_items(0)->add_positions(0);
  ExpectRefused("Invalidate", Call<v1::InvalidateResponse>(&client::Session::Invalidate, invalidate), kInvalidArgument,
                {"positions", "8194", "8192"});
}

}  // namespace
}  // namespace stoker::system_test
