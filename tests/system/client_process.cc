// An engine that a test can kill: client_process ADDRESS POOL NAME MODE. Prints "ready" when it is where MODE says,
// then stays until it is killed.
//
//   attach  attached, before any other call
//   keyed   has opened the sequence "victim" and stored half of its prompt: 32 of 64 rows
//   ordered likewise, and the other half is to be stored when its engine word has come, which it does not
//   busy    runs steps without a pause
//   armed   is on the server plane, and has not begun a step
//   step    is there, in the middle of a step
//   stepping  runs steps of the server plane without a pause
//   direct, direct-step, direct-stepping  likewise on the direct plane
//   tensor  has registered three tensors, two of them the same memory, and handed a descriptor over; stores from one
//           without a pause
#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/time/clock.h"
#include "client/descriptor_exchange.h"
#include "client/direct_plane.h"
#include "client/server_plane.h"
#include "tests/system/host_tensor.h"
#include "tests/system/rank.h"

namespace {

using stoker::client::ServerPlane;
using stoker::system_test::BatchRow;
using stoker::system_test::DenseTensor;
using stoker::system_test::HostTensor;
using stoker::system_test::MakeTokens;
using stoker::system_test::Rank;
using stoker::system_test::Sequence;

// The mode "tensor".
int StoreForEver(Rank& rank) {
  HostTensor first(rank.pool(), DenseTensor(rank.pool(), 128)), second(rank.pool(), DenseTensor(rank.pool(), 128));
  for (HostTensor* tensor : {&second, &first, &first}) {
    if (!tensor->Register(rank.session()).ok()) return 1;
  }
  Sequence sequence{0, 0, MakeTokens(79, 128)};
  sequence.id = rank.Admit(rank.Item(sequence.tokens, 128, "", /*hashes=*/false)).sequence_id();
  stoker::v1::StoreRequest request;
  stoker::v1::StoreItem* item = request.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_row_count(128);
  item->set_source(stoker::v1::DATA_SOURCE_TENSOR);
  item->mutable_tensor()->add_tensor_ids(first.id());
  const stoker::v1::Attached attached = rank.session().info();
  const absl::Status offered = stoker::client::OfferDescriptor(attached.arena().descriptor_socket(), attached.token(),
                                                               second.descriptor(), absl::Now() + absl::Seconds(10))
                                   .status();
  if (!offered.ok()) return 1;
  std::puts("ready");
  std::fflush(stdout);
  for (;;) {
    stoker::v1::StoreResponse response;
    if (!rank.session().Store(request, &response).ok() || response.stored_bytes() == 0) return 1;
  }
}

// The mode "ordered": a call that is answered, whose work waits.
bool StoreInOrder(Rank& rank, const Sequence& sequence) {
  stoker::v1::StoreRequest request;
  request.mutable_order()->set_number(1);
  request.mutable_order()->set_wait(true);
  request.mutable_order()->set_signal(true);
  stoker::v1::StoreItem* const item = request.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_first_row(32);
  item->mutable_range()->set_row_count(32);
  item->set_source(stoker::v1::DATA_SOURCE_SHARED);
  stoker::v1::StoreResponse response;
  return rank.session().Store(request, &response).ok() && response.statuses(0).code() == 0;
}

// The modes of the direct plane.
int RunDirect(const stoker::client::Client& client, const stoker::v1::PoolSpec& pool,
              const stoker::v1::AttachRequest& request, const std::string& mode) {
  Rank rank(client, pool, request);
  const auto plane = stoker::client::DirectPlane::Open(rank.session(), 16);
  if (!plane.ok()) return 1;
  const Sequence decoded = rank.Open(MakeTokens(79, 200), 200);
  // Up to the first answer of a step, or all of it.
  const auto run_step = [&](bool whole) {
    bool ok = (*plane)->Begin({{decoded.id, decoded.state_row, 200}}).ok();
    for (int32_t& entry : (*plane)->Entries(0, 0)) entry = 7;
    ok = ok && (*plane)->Group(0).ok() && (*plane)->Await(0).ok() && (*plane)->FirstRowError().ok();
    return ok && (!whole || ((*plane)->Commit({}).ok() && (*plane)->AwaitCommit().ok()));
  };
  if (mode != "direct" && !run_step(mode == "direct-stepping")) return 1;
  std::puts("ready");
  std::fflush(stdout);
  while (mode == "direct-stepping") {
    if (!run_step(true)) return 1;
  }
  for (;;) pause();
}

int Run(const std::string& address, const std::string& pool, const std::string& name, const std::string& mode) {
  const auto client = stoker::client::Client::Connect(address);
  if (!client.ok()) return 1;
  stoker::v1::GetPoolRequest get;
  get.set_name(pool);
  const auto found = client->GetPool(get);
  if (!found.ok()) return 1;
  const stoker::v1::PoolSpec spec = found->pool().spec();
  stoker::v1::AttachRequest request = stoker::system_test::AttachTo(spec, name);
  if (mode.rfind("direct", 0) == 0) {
    request.set_plane(stoker::v1::PLANE_DIRECT);
    return RunDirect(*client, spec, request, mode);
  }
  const bool ordered = mode == "ordered";
  request.set_ordered_calls(ordered);
  if (ordered) request.set_staging_bytes(64 * 1024);
  Rank rank(*client, spec, request);
  if (mode == "keyed" || ordered) {
    Sequence sequence{0, 0, MakeTokens(77, 64)};
    sequence.id = rank.Admit(rank.Item(sequence.tokens, 64, "victim")).sequence_id();
    if (sequence.id == 0 || !rank.Store(sequence, 0, 32).ok()) return 1;
    if (ordered && !StoreInOrder(rank, sequence)) return 1;
  }
  if (mode == "tensor") return StoreForEver(rank);
  std::unique_ptr<ServerPlane> plane;
  const bool steps = mode == "step" || mode == "stepping";
  const Sequence decoded = steps ? rank.Open(MakeTokens(79, 200), 200) : Sequence();
  if (steps || mode == "armed") {
    auto armed = ServerPlane::Arm(rank.session(), 16);
    if (!armed.ok()) return 1;
    plane = *std::move(armed);
  }
  // Up to the first answer of a step, or all of it.
  const auto run_step = [&](bool whole) {
    bool ok = plane->Begin({{decoded.id, decoded.state_row, 200}}).ok();
    for (int32_t& entry : plane->Entries(0, 0)) entry = 7;
    ok = ok && plane->Ring(0).ok() && plane->Await(0).ok();
    return ok && (!whole || (plane->Commit({}).ok() && plane->AwaitCommit().ok()));
  };
  if (mode == "step" && !run_step(false)) return 1;
  const Sequence busy = mode == "busy" ? rank.Open(MakeTokens(78, 200), 200) : Sequence();
  std::puts("ready");
  std::fflush(stdout);
  for (int32_t step = 0; mode == "busy"; ++step) {
    std::vector<int32_t> entries(16);
    for (int32_t i = 0; i < 16; ++i) entries[static_cast<size_t>(i)] = (step * 7 + i * 11) % 199;
    const std::vector<BatchRow> batch = {{.sequence = &busy, .length = 200}};
    if (!rank.Step(batch, {entries}, 16).status.ok()) return 1;
  }
  while (mode == "stepping") {
    if (!run_step(true)) return 1;
  }
  for (;;) pause();
}

}  // namespace

int main(int argc, char** argv) { return argc == 5 ? Run(argv[1], argv[2], argv[3], argv[4]) : 2; }
