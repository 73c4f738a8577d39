// Bad input of the data path, of batches, of tokens and of the wire: as bad_input_test.
#include <functional>
#include <future>

#include "absl/strings/str_cat.h"
#include "stoker/v1/residency.grpc.pb.h"
#include "stoker/v1/sequences.grpc.pb.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/system/bad_input_fixture.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kResourceExhausted = absl::StatusCode::kResourceExhausted;

constexpr uint32_t kMax32 = 0xffffffffu;

class BadStepTest : public BadInputTest {
 protected:
  BadStepTest() : BadInputTest({"--max-batch-items=4", "--max-message-bytes=65536", "--max-queued-operations=2"}) {}

  absl::Status Step(const v1::StepRequest& request) {
    v1::StepResponse response;
    const absl::Status status = rank().session().Step(request, &response);
    return status.ok() ? client::FirstError(response.statuses()) : status;
  }
};

TEST_F(BadStepTest, RefusesStepsOutOfRange) {
  struct Case {
    const char* what;
    std::function<void(v1::StepRequest&)> change;
    std::vector<std::string> message;
    absl::StatusCode code = kInvalidArgument;
  };
  const auto rows = [](v1::StepRequest& r, int count) {
    const v1::StepRow row = r.rows(0);
    r.clear_rows();
    for (int i = 0; i < count; ++i) *r.add_rows() = row;
    r.mutable_groups(0)->mutable_indices()->Resize(count * static_cast<int>(r.top_k()), 1);
  };
  for (const Case& c : std::vector<Case>{
           {"empty", [](auto& r) { r.Clear(); }, {"rows", "0", "8"}},
           {"no row", [](auto& r) { r.clear_rows(); }, {"rows", "0", "8"}},
           {"9 rows", [&](auto& r) { rows(r, 9); }, {"rows", "9", "max_batch_rows 8"}},
           {"no top_k", [](auto& r) { r.set_top_k(0); }, {"top_k", "0", "max_top_k 16"}},
           {"top_k 17", [](auto& r) { r.set_top_k(17); }, {"top_k", "17", "max_top_k 16"}},
           {"largest top_k", [](auto& r) { r.set_top_k(kMax32); }, {"top_k", "4294967295", "max_top_k 16"}},
           {"union beyond hot_rows",
            [&](auto& r) {
              r.set_top_k(16);
              rows(r, 5);
            },
            {"5 rows", "16", "hot_rows 64"}},
           {"no source", [](auto& r) { r.set_source(v1::DATA_SOURCE_UNSPECIFIED); }, {"source", "0"}},
           {"source 3", [](auto& r) { r.set_source(static_cast<v1::DataSource>(3)); }, {"source", "3"}},
           {"source -1", [](auto& r) { r.set_source(static_cast<v1::DataSource>(-1)); }, {"source", "-1"}},
           {"group 1", [](auto& r) { r.mutable_groups(0)->set_group(1); }, {"group", "1", "0"}},
           {"largest group", [](auto& r) { r.mutable_groups(0)->set_group(kMax32); }, {"group", "4294967295"}},
           {"group twice", [](auto& r) { *r.add_groups() = r.groups(0); }, {"groups", "2", "1"}},
           {"3 of 4 indices",
            [](auto& r) { r.mutable_groups(0)->mutable_indices()->Resize(3, 0); },
            {"indices", "3", "4"}},
           {"5 of 4 indices", [](auto& r) { r.mutable_groups(0)->add_indices(0); }, {"indices", "5", "4"}},
           {"indices of shared", [](auto& r) { r.set_source(v1::DATA_SOURCE_SHARED); }, {"indices", "4", "0"}},
           {"length 0", [](auto& r) { r.mutable_rows(0)->set_length(0); }, {"length", "0", "100"}},
           {"length 66",
            [](auto& r) { r.mutable_rows(0)->set_length(66); },
            {"length", "66", "64"},
            kFailedPrecondition},
           {"commit of 66",
            [](auto& r) {
              r.mutable_rows(0)->set_length(66);
              r.mutable_rows(0)->set_commit(true);
            },
            {"length", "66", "64"},
            kFailedPrecondition},
           {"length 101", [](auto& r) { r.mutable_rows(0)->set_length(101); }, {"length", "101", "100"}},
           {"largest length", [](auto& r) { r.mutable_rows(0)->set_length(kMax32); }, {"length", "4294967295", "1024"}},
           {"falling lengths",
            [&](auto& r) {
              rows(r, 2);
              r.mutable_rows(1)->set_length(63);
            },
            {"length", "63", "64"}},
           {"a gap in lengths",
            [&](auto& r) {
              rows(r, 2);
              r.mutable_rows(1)->set_length(66);
            },
            {"length", "66", "65"}},
           {"apart",
            [&](auto& r) {
              rows(r, 3);
              r.mutable_rows(1)->set_sequence_id(0);
            },
            {"rows", "row 2"}},
           {"short newest row",
            [](auto& r) { r.mutable_rows(0)->set_newest_row(std::string(95, 'x')); },
            {"newest_row", "95", "96"}},
           {"long newest row",
            [](auto& r) { r.mutable_rows(0)->set_newest_row(std::string(97, 'x')); },
            {"newest_row", "97", "96"}},
           {"pages",
            [](auto& r) { r.mutable_rows(0)->mutable_resident_pages()->Resize(65, -1); },
            {"resident_pages", "65", "64"}},
       }) {
    v1::StepRequest request = GoodStep();
    c.change(request);
    ExpectRefused(c.what, Step(request), c.code, c.message);
    // The same through a stream, where it ends the stream or fails the row.
    auto stream = rank().session().RunSteps();
    ASSERT_TRUE(stream.ok());
    v1::RunStepsRequest streamed;
    *streamed.mutable_step() = request;
    v1::RunStepsResponse reply;
    absl::Status status = (*stream)->Run(streamed, &reply);
    if (status.ok()) status = client::FirstError(reply.step().statuses());
    EXPECT_EQ(status.code(), c.code) << c.what << status;
  }
}

TEST_F(BadStepTest, TakesAnyEntryAndAnyPageWithoutHarm) {
  v1::StepRequest request = GoodStep();
  request.set_top_k(8);
  request.mutable_groups(0)->clear_indices();
  for (int32_t entry : {INT32_MIN, -2, INT32_MAX, 64, 1 << 24, 0, 17, 33})
    request.mutable_groups(0)->add_indices(entry);
  for (int32_t page : {INT32_MAX, INT32_MIN, -2}) request.mutable_rows(0)->add_resident_pages(page);
  v1::StepResponse response;
  ASSERT_TRUE(rank().session().Step(request, &response).ok());
  ASSERT_EQ(response.statuses(0).code(), 0) << response.statuses(0).message();
  const v1::LookupCounts& counts = response.groups(0).counts(0);
  EXPECT_EQ(counts.invalid(), 3u);
  EXPECT_EQ(counts.hot() + counts.miss(), 3u);  // no page can be at INT32_MAX x block_rows
  for (int i = 0; i < 5; ++i) EXPECT_EQ(response.groups(0).hot_rows(i), -1) << i;
  rank().CheckStored(sequence(), 64);
}

TEST_F(BadStepTest, RefusesGathersAndReadsOutOfRange) {
  v1::GatherRequest gather;
  v1::GatherResponse gathered;
  ExpectRefused("no plan", rank().session().Gather(gather, &gathered), kFailedPrecondition, {"group"});
  gather.set_group(1);
  ExpectRefused("group 1", rank().session().Gather(gather, &gathered), kInvalidArgument, {"group", "1", "0"});
  gather.set_group(kMax32);
  ExpectRefused("group", rank().session().Gather(gather, &gathered), kInvalidArgument, {"group", "4294967295"});
  gather.set_group(0);
  gather.add_layers(2);
  ExpectRefused("layer", rank().session().Gather(gather, &gathered), kInvalidArgument, {"layers", "2"});
  gather.set_layers(0, 1);
  gather.add_layers(1);
  ExpectRefused("layer twice", rank().session().Gather(gather, &gathered), kInvalidArgument, {"layers", "1"});

  struct Case {
    const char* what;
    std::function<void(v1::ReadRequest&)> change;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  const std::vector<uint32_t> many(65537, 0);
  for (const Case& c : std::vector<Case>{
           {"nothing", [](auto&) {}, kInvalidArgument, {"rows", "0", "65536"}},
           {"no position", [](auto& r) { r.mutable_positions(); }, kInvalidArgument, {"rows", "0"}},
           {"no hot row", [](auto& r) { r.mutable_hot_rows(); }, kInvalidArgument, {"rows", "0"}},
           {"position 64", [](auto& r) { r.mutable_positions()->add_values(64); }, kFailedPrecondition, {"64"}},
           {"position",
            [](auto& r) { r.mutable_positions()->add_values(kMax32); },
            kFailedPrecondition,
            {"4294967295"}},
           {"hot row",
            [](auto& r) { r.mutable_hot_rows()->add_values(kMax32); },
            kInvalidArgument,
            {"hot_rows", "4294967295"}},
           {"layer",
            [](auto& r) {
              r.mutable_positions()->add_values(0);
              r.add_layers(2);
            },
            kInvalidArgument,
            {"layers", "2", "1"}},
           {"largest layer",
            [](auto& r) {
              r.mutable_positions()->add_values(0);
              r.add_layers(kMax32);
            },
            kInvalidArgument,
            {"layers", "4294967295", "1"}},
           {"3 layers",
            [](auto& r) {
              r.mutable_positions()->add_values(0);
              for (int i : {0, 1, 0}) r.add_layers(uint32_t(i));
            },
            kInvalidArgument,
            {"layers", "3", "2"}},
           {"reply too large",
            [](auto& r) { r.mutable_positions()->mutable_values()->Resize(700, 0); },
            kResourceExhausted,
            {"rows", "67200", "max_message_bytes 65536"}},
       }) {
    v1::ReadRequest request;
    request.set_sequence_id(sequence().id);
    c.change(request);
    v1::ReadResponse response;
    ExpectRefused(c.what, rank().session().Read(request, &response), c.code, c.message);
    EXPECT_TRUE(response.rows().empty());
  }
  // A row of another state row's region.
  v1::ReadRequest request;
  request.set_sequence_id(sequence().id);
  const auto arena = rank().session().arena();
  const auto begin = static_cast<uint32_t>(arena->RegionBegin(sequence().state_row));
  v1::ReadResponse response;
  request.mutable_hot_rows()->add_values(begin + static_cast<uint32_t>(arena->region_rows()));
  ExpectRefused("next region", rank().session().Read(request, &response), kInvalidArgument, {"hot_rows"});
  request.mutable_hot_rows()->set_values(0, begin);
  EXPECT_TRUE(rank().session().Read(request, &response).ok());
}

TEST_F(BadStepTest, RefusesBatchesOfTheWrongSize) {
  client::Session& session = rank().session();
  for (const int count : {0, 5}) {
    const std::vector<std::string> message = {absl::StrCat(count, " given"), "max_batch_items 4"};
    const auto expect = [&](const char* what, const absl::Status& status) {
      ExpectRefused(what, status, kInvalidArgument, message);
    };
    v1::AdmitRequest admit;
    v1::ExtendRequest extend;
    v1::ForkRequest fork;
    v1::ReleaseRequest release;
    v1::GetBlockTablesRequest tables;
    v1::StoreRequest store;
    v1::LoadRequest load;
    v1::CommitRequest commit;
    v1::InvalidateRequest invalidate;
    for (int i = 0; i < count; ++i) {
      *admit.add_items() = rank().Item(MakeTokens(60, 16), 16);
      extend.add_items()->set_sequence_id(sequence().id);
      extend.mutable_items(i)->set_max_rows(101);
      fork.add_items()->set_sequence_id(sequence().id);
      fork.mutable_items(i)->set_rows(1);
      fork.mutable_items(i)->set_max_rows(1);
      release.add_sequence_ids(sequence().id);
      tables.add_sequence_ids(sequence().id);
      *store.add_items() = StoreItem(sequence().id, 0, 1);
      load.add_items()->set_target(v1::LOAD_TARGET_STAGING);
      *load.mutable_items(i)->mutable_range() = store.items(i).range();
      commit.add_items()->set_sequence_id(sequence().id);
      invalidate.add_items()->set_sequence_id(sequence().id);
    }
    v1::AdmitResponse admitted;
    expect("Admit", session.Admit(admit, &admitted));
    v1::ExtendResponse extended;
    expect("Extend", session.Extend(extend, &extended));
    v1::ForkResponse forked;
    expect("Fork", session.Fork(fork, &forked));
    v1::ReleaseResponse released;
    expect("Release", session.Release(release, &released));
    v1::GetBlockTablesResponse told;
    expect("GetBlockTables", session.GetBlockTables(tables, &told));
    v1::StoreResponse stored;
    expect("Store", session.Store(store, &stored));
    v1::LoadResponse loaded;
    expect("Load", session.Load(load, &loaded));
    v1::CommitResponse committed;
    expect("Commit", session.Commit(commit, &committed));
    v1::InvalidateResponse invalidated;
    expect("Invalidate", session.Invalidate(invalidate, &invalidated));
  }
  v1::ListSequencesRequest list;
  list.set_pool("p");
  list.set_page_size(10001);
  ExpectRefused("page_size", client().ListSequences(list).status(), kInvalidArgument, {"page_size", "10001", "10000"});
  list.set_page_size(1);
  list.set_pool("none");
  ExpectRefused("pool", client().ListSequences(list).status(), kNotFound, {"none"});
  v1::EvictSessionRequest evict;
  for (const uint64_t id : {uint64_t{0}, ~uint64_t{0}}) {
    evict.set_session_id(id);
    ExpectRefused("session", client().EvictSession(evict).status(), kNotFound, {absl::StrCat(id)});
  }
}

TEST_F(BadStepTest, RefusesMessagesThatAreTooLargeOrNotMessages) {
  v1::StoreRequest store;
  *store.add_items() = StoreItem(sequence().id, 0, 700);
  v1::StoreResponse stored;
  ExpectRefused("too large", rank().session().Store(store, &stored), kResourceExhausted, {"65536"});
  const auto channel = grpc::CreateChannel(daemon().address(), grpc::InsecureChannelCredentials());
  for (const char* method : {"/stoker.v1.Pools/CreatePool", "/stoker.v1.Sessions/Attach", "/stoker.v1.Sequences/Admit",
                             "/stoker.v1.Residency/Step", "/stoker.v1.Residency/RunSteps"}) {
    EXPECT_FALSE(RawBytesCall(channel, method, "\xff\xff\xff\xff", nullptr).ok()) << method;
  }
  ExpectRefused("no such method", RawBytesCall(channel, "/stoker.v1.Residency/Nothing", "", nullptr),
                absl::StatusCode::kUnimplemented, {});
}

TEST_F(BadStepTest, RefusesMoreOperationsThanMayBeQueued) {
  const Tokens prompt = MakeTokens(61, 32);
  v1::AdmitItem item = other_rank().Item(prompt, 32);
  ASSERT_EQ(other_rank().Admit(item).status().code(), 0);
  item.set_wait_for_prefix(true);
  // An operation is counted until a moment after its reply.
  const auto queued = [&](double count) {
    return Eventually(absl::Seconds(10),
                      [&] { return Scrape(daemon().metrics_port())["stoker_queued_operations"] == count; });
  };
  ASSERT_TRUE(queued(0));
  std::vector<std::future<v1::AdmittedSequence>> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.push_back(
        std::async(std::launch::async, [&] { return rank().Admit(item, {.timeout = absl::Seconds(6)}); }));
  }
  ASSERT_TRUE(queued(2));
  const absl::Status status = Step(GoodStep());
  EXPECT_EQ(status.code(), kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("limit max_queued_operations 2"));
  for (auto& call : waiting) EXPECT_EQ(call.get().status().code(), 4);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return Step(GoodStep()).ok(); }));
}

TEST_F(BadStepTest, RefusesCallsWithoutTheRightToken) {
  const auto channel = grpc::CreateChannel(daemon().address(), grpc::InsecureChannelCredentials());
  const auto sessions = v1::Sessions::NewStub(channel);
  const auto sequences = v1::Sequences::NewStub(channel);
  const auto residency = v1::Residency::NewStub(channel);
  const auto each = [&](const std::string& token) {
    std::vector<absl::Status> statuses;
    const auto call = [&](auto& stub, auto method, auto request, auto response) {
      statuses.push_back(RawCall(stub, method, token, request, &response));
    };
    call(*sessions, &v1::Sessions::Stub::Detach, v1::DetachRequest(), v1::DetachResponse());
    call(*sequences, &v1::Sequences::Stub::Admit, v1::AdmitRequest(), v1::AdmitResponse());
    call(*sequences, &v1::Sequences::Stub::Extend, v1::ExtendRequest(), v1::ExtendResponse());
    call(*sequences, &v1::Sequences::Stub::Fork, v1::ForkRequest(), v1::ForkResponse());
    call(*sequences, &v1::Sequences::Stub::Release, v1::ReleaseRequest(), v1::ReleaseResponse());
    call(*sequences, &v1::Sequences::Stub::GetBlockTables, v1::GetBlockTablesRequest(), v1::GetBlockTablesResponse());
    call(*residency, &v1::Residency::Stub::Store, v1::StoreRequest(), v1::StoreResponse());
    call(*residency, &v1::Residency::Stub::Load, v1::LoadRequest(), v1::LoadResponse());
    call(*residency, &v1::Residency::Stub::Step, GoodStep(), v1::StepResponse());
    call(*residency, &v1::Residency::Stub::Resolve, v1::ResolveRequest(), v1::ResolveResponse());
    call(*residency, &v1::Residency::Stub::Gather, v1::GatherRequest(), v1::GatherResponse());
    call(*residency, &v1::Residency::Stub::Commit, v1::CommitRequest(), v1::CommitResponse());
    call(*residency, &v1::Residency::Stub::Invalidate, v1::InvalidateRequest(), v1::InvalidateResponse());
    call(*residency, &v1::Residency::Stub::Read, v1::ReadRequest(), v1::ReadResponse());
    grpc::ClientContext context;
    PrepareContext(context, token);
    const auto stream = residency->RunSteps(&context);
    v1::RunStepsResponse response;
    EXPECT_FALSE(stream->Read(&response));
    statuses.push_back(client::FromGrpc(stream->Finish()));
    return statuses;
  };
  const std::string token = rank().session().info().token();
  std::string altered = token;
  altered.back() = altered.back() == '0' ? '1' : '0';
  const uint64_t epoch = rank().session().info().boot_epoch();
  std::string old = token;
  old[0] = old[0] == '0' ? '1' : '0';
  const std::string never = token.substr(0, 17) + "ffff" + token.substr(token.rfind('-'));
  for (const auto& [bad, code] : std::vector<std::pair<std::string, absl::StatusCode>>{
           {"", absl::StatusCode::kUnauthenticated},
           {"nonsense", absl::StatusCode::kPermissionDenied},
           {"--", absl::StatusCode::kPermissionDenied},
           {std::string(2000, 'f'), absl::StatusCode::kPermissionDenied},
           {altered, absl::StatusCode::kPermissionDenied},
           {token + "0", absl::StatusCode::kPermissionDenied},
           {never, absl::StatusCode::kPermissionDenied},
           {old, kFailedPrecondition}}) {
    for (const absl::Status& status : each(bad)) {
      ExpectRefused(bad, status, code, {"stoker-token"});
      if (code != kFailedPrecondition) continue;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(epoch)));
    }
  }
  // A session that has ended.
  const std::string ended = other_rank().session().info().token();
  v1::DetachResponse detached;
  ASSERT_TRUE(RawCall(*sessions, &v1::Sessions::Stub::Detach, ended, v1::DetachRequest(), &detached).ok());
  EXPECT_EQ(detached.boot_epoch(), epoch);
  ASSERT_TRUE(Eventually(absl::Seconds(5), [&] { return SessionCount() == 1 && Usage("p").sessions() == 1; }));
  TakeReference();
  for (const absl::Status& status : each(ended)) ExpectRefused("ended", status, kFailedPrecondition, {"has ended"});
}

}  // namespace
}  // namespace stoker::system_test
