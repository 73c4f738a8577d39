// Echo servers with each of gRPC's three server APIs.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace stoker::bench {

inline constexpr const char* kEchoApis[] = {"sync", "callback", "cq"};

// Serves stoker.bench.Echo at "unix:PATH" with the named API until SIGTERM; with `standard`, gRPC's health and
// reflection services too, which poll with threads of their own. INVALID_ARGUMENT: no such API; UNAVAILABLE: cannot
// listen there.
absl::Status ServeEcho(absl::string_view api, bool standard, const std::string& socket_path);

}  // namespace stoker::bench
