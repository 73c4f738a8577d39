// Which server API answers fastest, alone and beside gRPC's own services? Six servers in six processes take turns.
#include <memory>
#include <vector>

#include "tests/bench/benches.h"
#include "tests/bench/echo_client.h"

namespace stoker::bench {

absl::Status BenchEcho(const BenchContext& context) {
  const absl::StatusOr<std::vector<std::unique_ptr<EchoProcess>>> servers = StartEchoServers(*context.folder);
  if (!servers.ok()) return servers.status();
  for (const bool stream : {false, true}) {
    for (const size_t bytes : {size_t{16}, size_t{8} << 10, size_t{64} << 10, size_t{512} << 10}) {
      std::vector<std::unique_ptr<EchoCall>> calls;
      std::vector<Contender> contenders;
      for (const std::unique_ptr<EchoProcess>& server : *servers) {
        calls.push_back(std::make_unique<EchoCall>(*server, stream, bytes, bytes));
        contenders.push_back({[call = calls.back().get()] { return call->Run(); }, {}});
      }
      TakeTurns(context.Rounds(bytes > 100000 ? 30 : 60), 50, contenders);
      for (size_t i = 0; i < servers->size(); ++i) {
        context.report->Write(Line("echo")
                                  .Text("server", (*servers)[i]->api())
                                  .Bool("standard_services", (*servers)[i]->standard())
                                  .Text("call", stream ? "stream" : "unary")
                                  .Int("bytes", static_cast<int64_t>(bytes))
                                  .Times(contenders[i].samples));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
