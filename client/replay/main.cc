// stoker-replay: a mock engine that replays requests through stokerd and checks every row that it is handed.
#include <cstdio>
#include <string>

#include "client/device_plane.h"
#include "client/replay/options.h"
#include "client/replay/replay.h"

int main(int argc, char** argv) {
  stoker::client::DevicePlane::SetUpProcess();
  const auto options =
      stoker::replay::ParseOptions(absl::Span<const char* const>(argv + 1, static_cast<size_t>(argc - 1)));
  if (!options.ok()) {
    std::fprintf(stderr, "stoker-replay: %s\n", std::string(options.status().message()).c_str());
    return stoker::replay::kExitUsage;
  }
  return stoker::replay::Run(*options);
}
