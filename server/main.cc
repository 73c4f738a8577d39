// stokerd. Exit status: 0 after a drain or an informational action, 1 when it could not start, 2 for a wrong command
// line or configuration.
#include <pthread.h>
#include <signal.h>

#include <cstdio>

#include "server/config.h"
#include "server/daemon.h"
#include "server/log.h"

namespace {

using stoker::server::Log;

// All threads inherit the mask, so the signals come to Await alone.
void BlockStopSignals(sigset_t* set) {
  sigemptyset(set);
  sigaddset(set, SIGTERM);
  sigaddset(set, SIGINT);
  pthread_sigmask(SIG_BLOCK, set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

}  // namespace

int main(int argc, char** argv) {
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
  absl::StatusOr<std::unique_ptr<stoker::server::Daemon>> daemon = stoker::server::Daemon::Start(config);
  if (!daemon.ok()) {
    Log::Error("cannot start", {{"reason", daemon.status().message()}});
    return 1;
  }
  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  Log::Info("signal", {{"number", signal_number}});
  (*daemon)->Stop();
  daemon->reset();
  return 0;
}
