// Core's Engine on a kernel backend: pools are one buffer of all layers, sessions a shared arena and private state.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "server/core/engine.h"

namespace stoker::engine {

// `backend` must outlive the engine, the engine everything that it creates.
std::unique_ptr<core::Engine> MakeEngine(kernels::Backend* backend);

}  // namespace stoker::engine
