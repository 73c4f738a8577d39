// stokerd as on a machine with two GPUs, without any: devices that do not reach pageable memory and end the process
// when they are given some (tests/engine/bounced_backend.h). SIGUSR2 takes the first device away.
#include <signal.h>

#include <thread>
#include <utility>

#include "server/program.h"
#include "tests/engine/bounced_backend.h"

int main(int argc, char** argv) {
  sigset_t lose;
  sigemptyset(&lose);
  sigaddset(&lose, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &lose, nullptr);
  return stoker::server::RunProgram(
      argc, argv, [&lose]() -> absl::StatusOr<std::vector<std::unique_ptr<stoker::kernels::Backend>>> {
        std::vector<std::unique_ptr<stoker::kernels::Backend>> backends;
        for (auto& backend : stoker::engine_test::MakeBouncedBackends({"GPU-first", "GPU-second"}, 2)) {
          if (backends.empty()) {
            std::thread([lose, first = backend.get()] {
              int signal = 0;
              sigwait(&lose, &signal);
              first->Lose();
            }).detach();
          }
          backends.push_back(std::move(backend));
        }
        return backends;
      });
}
