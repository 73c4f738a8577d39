#include "server/program.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/config.h"
#include "server/log.h"

namespace stoker::server {
namespace {

constexpr int kDeviceLost = 3;
// A lost device may hold threads for ever; how long sessions may take to hear of it.
constexpr std::chrono::seconds kAbandonTime(8);
// How the daemon tells this thread that it failed after its start.
constexpr int kFailedSignal = SIGUSR1;
// After the stop only memory and threads are left, which the process's end gives back as well, and faster: to unpin a
// pool takes seconds.
constexpr absl::Duration kTeardownTime = absl::Seconds(2);

// All threads inherit the mask, so the signals come to Await alone.
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

// Ends the process without destructors: they could wait for the device.
[[noreturn]] void EndLost(Daemon& daemon) {
  Log::Error("a device is lost; the process ends and must be started again",
             {{"reason", daemon.lost().message()}, {"exit_status", kDeviceLost}});
  std::thread([] {
    std::this_thread::sleep_for(kAbandonTime);
    std::_Exit(kDeviceLost);
  }).detach();
  daemon.Abandon();
  std::_Exit(kDeviceLost);
}

}  // namespace

int RunProgram(int argc, char** argv, const Daemon::MakeBackends& make_backends) {
  TuneProcess();
  absl::StatusOr<CommandLine> command_line = ParseCommandLine(argc, argv);
  if (!command_line.ok()) {
    std::fprintf(stderr, "stokerd: %s\n", std::string(command_line.status().message()).c_str());
    return 2;
  }
  if (command_line->action != CommandLine::Action::kRun) {
    std::fputs(ActionOutput(*command_line).c_str(), stdout);
    return 0;
  }
  DaemonConfig config = command_line->config;
  ResolveAutomaticValues(&config);
  Log::Start(*ParseLogLevel(config.log_level()), *ParseLogFormat(config.log_format()));
  sigset_t stop_signals;
  BlockStopSignals(&stop_signals);
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(
      config, [] { kill(getpid(), kFailedSignal); }, make_backends);
  if (!daemon.ok()) {
    Log::Error("cannot start", {{"reason", daemon.status().message()}});
    return 1;
  }
  int signal_number = 0;
  absl::Status failure;
  do {
    sigwait(&stop_signals, &signal_number);
    if (!(*daemon)->lost().ok()) EndLost(**daemon);
    failure = (*daemon)->failure();
  } while (signal_number == kFailedSignal && failure.ok());  // somebody else's
  if (failure.ok()) {
    Log::Info("signal", {{"number", signal_number}});
  } else {
    Log::Error("cannot start", {{"reason", failure.message()}});
  }
  const int exit_status = failure.ok() ? 0 : 1;
  (*daemon)->Stop();
  if (!(*daemon)->lost().ok()) EndLost(**daemon);
  absl::Notification torn_down;
  std::thread limit([&torn_down, exit_status] {
    if (!torn_down.WaitForNotificationWithTimeout(kTeardownTime)) std::_Exit(exit_status);
  });
  daemon->reset();
  torn_down.Notify();
  limit.join();
  return exit_status;
}

}  // namespace stoker::server
