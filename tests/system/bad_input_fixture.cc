#include "tests/system/bad_input_fixture.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {

BadInputTest::BadInputTest(std::vector<std::string> flags) : DaemonTest(std::move(flags)) {
  v1::PoolSpec spec = LinearPool("p", 2, 48, 64);
  spec.set_prefix_rows(32);
  pool_ = CreatePool(spec);
  rank_ = std::make_unique<Rank>(client(), pool_, AttachTo(pool_, "rank"));
  other_rank_ = std::make_unique<Rank>(client(), pool_, AttachTo(pool_, "other_rank"));
  v1::AdmitItem item = rank_->Item(MakeTokens(1, 64), 100, "key");
  const v1::AdmittedSequence admitted = rank_->Admit(item);
  sequence_ = {admitted.sequence_id(), admitted.state_row(), MakeTokens(1, 64)};
  EXPECT_TRUE(rank_->Store(sequence_, 0, 64).ok());
  TakeReference();
}

void BadInputTest::TearDown() {
  rank_->CheckStored(sequence_, 64);
  v1::StepResponse response;
  EXPECT_TRUE(rank_->session().Step(GoodStep(), &response).ok());
  rank_.reset();
  other_rank_.reset();
  DaemonTest::TearDown();
}

v1::StepRequest BadInputTest::GoodStep() const {
  v1::StepRequest step;
  step.set_top_k(4);
  step.set_source(v1::DATA_SOURCE_INLINE);
  step.add_rows()->set_sequence_id(sequence_.id);
  step.mutable_rows(0)->set_length(64);
  step.add_groups();
  for (int32_t k = 0; k < 4; ++k) step.mutable_groups(0)->add_indices(k);
  return step;
}

v1::StoreItem BadInputTest::StoreItem(uint64_t id, uint32_t first, uint32_t count) const {
  v1::StoreItem item;
  item.mutable_range()->set_sequence_id(id);
  item.mutable_range()->set_first_row(first);
  item.mutable_range()->set_row_count(count);
  item.set_source(v1::DATA_SOURCE_INLINE);
  // Bytes that are not the sequence's: a write that should not happen shows.
  item.set_rows(std::string(size_t{count} * pool_.layers() * RowBytes(pool_), 'x'));
  return item;
}

std::string BadInputTest::Describe() {
  std::string text;
  const auto pools = client().ListPools();
  if (!pools.ok()) return pools.status().ToString();
  for (const v1::Pool& pool : pools->pools()) absl::StrAppend(&text, pool.ShortDebugString(), "\n");
  const auto sessions = client().ListSessions();
  if (!sessions.ok()) return sessions.status().ToString();
  for (v1::SessionInfo session : sessions->sessions()) {
    session.clear_attached_ms();
    // A refused row does not keep its step from being one.
    session.clear_steps();
    absl::StrAppend(&text, session.ShortDebugString(), "\n");
  }
  for (const v1::SequenceInfo& sequence : Sequences("p")) absl::StrAppend(&text, sequence.ShortDebugString(), "\n");
  std::vector<uint32_t> positions(64);
  for (uint32_t i = 0; i < 64; ++i) positions[i] = i;
  std::string rows;
  const absl::Status status = rank_->ReadStored(sequence_, positions, &rows);
  return absl::StrCat(text, status.ToString(), " ", std::hash<std::string>()(rows));
}

void BadInputTest::ExpectRefused(absl::string_view what, const absl::Status& status, absl::StatusCode code,
                                 const std::vector<std::string>& message) {
  EXPECT_EQ(status.code(), code) << what << ": " << status;
  for (const std::string& part : message) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(part)) << what;
  }
  EXPECT_EQ(Describe(), reference_) << what;
}

absl::Status BadInputTest::RawAttach(const v1::AttachRequest& request) {
  const auto channel = grpc::CreateChannel(daemon().address(), grpc::InsecureChannelCredentials());
  const auto stub = v1::Sessions::NewStub(channel);
  grpc::ClientContext context;
  PrepareContext(context, "");
  const auto reader = stub->Attach(&context, request);
  v1::AttachResponse response;
  if (reader->Read(&response)) {
    context.TryCancel();
    reader->Finish();
    return absl::OkStatus();
  }
  return client::FromGrpc(reader->Finish());
}

}  // namespace stoker::system_test
