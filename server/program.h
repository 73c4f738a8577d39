// stokerd as a function: command line, signals, exit status.
#pragma once

#include "server/daemon.h"

namespace stoker::server {

// Runs until a signal ends it. Returns the exit status: 0 after a drain or an informational action, 1 when it could not
// start, 2 for a wrong command line or configuration. When a device is lost while it serves, the process ends at once
// with 3, and must be started again. Before any thread. Tests give backends of their own.
int RunProgram(int argc, char** argv, const Daemon::MakeBackends& make_backends = nullptr);

}  // namespace stoker::server
