// stokerd. Exit status: 0 after a drain or an informational action, 1 when it could not start, 2 for a wrong command
// line or configuration.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "absl/synchronization/mutex.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/log.h"

namespace {

using stoker::server::Log;

// How the daemon tells the main thread that it failed after its start.
constexpr int kFailedSignal = SIGUSR1;

// All threads inherit the mask, so the signals come to sigwait alone.
void BlockStopSignals(sigset_t* set) {
  sigemptyset(set);
  sigaddset(set, SIGTERM);
  sigaddset(set, SIGINT);
  sigaddset(set, kFailedSignal);
  pthread_sigmask(SIG_BLOCK, set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

// Before any thread.
void TuneProcess() {
  // Messages of a few hundred KiB come and go with each call: they should come from the heap, which keeps its top,
  // instead of being mapped and faulted in anew. 40 us of a call of 64 KiB.
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  mallopt(M_TRIM_THRESHOLD, 8 << 20);
  // Debian's Abseil, which gRPC uses as well, looks for deadlocks at every lock.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

}  // namespace

int main(int argc, char** argv) {
  TuneProcess();
  absl::StatusOr<stoker::server::CommandLine> command_line = stoker::server::ParseCommandLine(argc, argv);
  if (!command_line.ok()) {
    std::fprintf(stderr, "stokerd: %s\n", std::string(command_line.status().message()).c_str());
    return 2;
  }
  if (command_line->action != stoker::server::CommandLine::Action::kRun) {
    std::fputs(stoker::server::ActionOutput(*command_line).c_str(), stdout);
    return 0;
  }
  stoker::server::DaemonConfig config = command_line->config;
  stoker::server::ResolveAutomaticValues(&config);
  Log::Start(*stoker::server::ParseLogLevel(config.log_level()), *stoker::server::ParseLogFormat(config.log_format()));
  sigset_t stop_signals;
  BlockStopSignals(&stop_signals);
  absl::StatusOr<std::unique_ptr<stoker::server::Daemon>> daemon =
      stoker::server::Daemon::Start(config, [] { kill(getpid(), kFailedSignal); });
  if (!daemon.ok()) {
    Log::Error("cannot start", {{"reason", daemon.status().message()}});
    return 1;
  }
  int signal_number = 0;
  absl::Status failure;
  do {
    sigwait(&stop_signals, &signal_number);
    failure = (*daemon)->failure();
  } while (signal_number == kFailedSignal && failure.ok());  // somebody else's
  if (failure.ok()) {
    Log::Info("signal", {{"number", signal_number}});
  } else {
    Log::Error("cannot start", {{"reason", failure.message()}});
  }
  (*daemon)->Stop();
  daemon->reset();
  return failure.ok() ? 0 : 1;
}
