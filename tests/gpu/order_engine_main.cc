// An engine in a process of its own, for whose work the daemon's stream waits. Says when that has been enqueued, and
// when it has ended, and stays there to be killed.
//
//   order_engine ADDRESS POOL KEY WORK_MS     WORK_MS of a kernel, or "hang": a stream that waits for ever
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "client/device_plane.h"
#include "tests/gpu/order_engine.h"

int main(int argc, char** argv) {
  using stoker::gpu_test::OrderEngine;
  if (argc != 5) {
    std::fprintf(stderr, "usage: order_engine ADDRESS POOL KEY WORK_MS|hang\n");
    return 2;
  }
  stoker::client::DevicePlane::SetUpProcess();
  absl::Status status;
  const auto client = stoker::client::Client::Connect(argv[1]);
  status = client.status();
  if (status.ok()) {
    auto engine = OrderEngine::Attach(*client, argv[2], "killed", argv[3]);
    status = engine.status();
    // A store that is done, for the pool to keep; then one step behind work that will not end.
    if (status.ok()) status = (*engine)->StorePrompt(0);
    if (status.ok()) status = (*engine)->AwaitStream(absl::Seconds(20));
    if (status.ok() && std::string(argv[4]) == "hang") status = (*engine)->Hang();
    if (status.ok())
      status = (*engine)->Step(OrderEngine::kPrompt + 1, 1'000'000 * std::strtoull(argv[4], nullptr, 10));
    if (status.ok()) {
      std::printf("enqueued\n");
      std::fflush(stdout);
      status = (*engine)->AwaitStream(absl::Seconds(60));
      if (status.ok() && (*engine)->counts().wrong == 0) {
        std::printf("ended\n");
        std::fflush(stdout);
        for (;;) pause();
      }
    }
  }
  std::fprintf(stderr, "order_engine: %s\n", status.ToString().c_str());
  return 1;
}
