// An engine that a test can kill: client_process ADDRESS POOL NAME MODE. Prints "ready" when it is where MODE says,
// then stays until it is killed.
//
//   attach  attached, before any other call
//   keyed   has opened the sequence "victim" and stored half of its prompt: 32 of 64 rows
//   busy    runs steps without a pause
#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/time/clock.h"
#include "tests/system/rank.h"

namespace {

using stoker::system_test::BatchRow;
using stoker::system_test::MakeTokens;
using stoker::system_test::Rank;
using stoker::system_test::Sequence;

int Run(const std::string& address, const std::string& pool, const std::string& name, const std::string& mode) {
  const auto client = stoker::client::Client::Connect(address);
  if (!client.ok()) return 1;
  stoker::v1::GetPoolRequest get;
  get.set_name(pool);
  const auto found = client->GetPool(get);
  if (!found.ok()) return 1;
  const stoker::v1::PoolSpec spec = found->pool().spec();
  Rank rank(*client, spec, stoker::system_test::AttachTo(spec, name));
  if (mode == "keyed") {
    Sequence sequence{0, 0, MakeTokens(77, 64)};
    sequence.id = rank.Admit(rank.Item(sequence.tokens, 64, "victim")).sequence_id();
    if (sequence.id == 0 || !rank.Store(sequence, 0, 32).ok()) return 1;
  }
  const Sequence busy = mode == "busy" ? rank.Open(MakeTokens(78, 200), 200) : Sequence();
  std::puts("ready");
  std::fflush(stdout);
  for (int32_t step = 0; mode == "busy"; ++step) {
    std::vector<int32_t> entries(16);
    for (int32_t i = 0; i < 16; ++i) entries[static_cast<size_t>(i)] = (step * 7 + i * 11) % 199;
    const std::vector<BatchRow> batch = {{.sequence = &busy, .length = 200}};
    if (!rank.Step(batch, {entries}, 16).status.ok()) return 1;
  }
  for (;;) pause();
}

}  // namespace

int main(int argc, char** argv) { return argc == 5 ? Run(argv[1], argv[2], argv[3], argv[4]) : 2; }
