// The environment of a daemon, or of another engine, that a program starts.
#pragma once

#include <unistd.h>

#include <vector>

#include "absl/strings/match.h"

namespace stoker::replay {

// This process's, null at the end, but for the connections to the GPU that DevicePlane::SetUpProcess may have asked the
// driver for: they are this process's, another asks for its own. The strings are those of `environ`.
inline std::vector<char*> ChildEnvironment() {
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!absl::StartsWith(*variable, "CUDA_DEVICE_MAX_CONNECTIONS=")) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  return environment;
}

}  // namespace stoker::replay
