// Requests of our own, in the shape of a chat service: few system prompts, many conversations, and each turn's prompt
// begins with what the turn before had.
#pragma once

#include <cstdint>
#include <vector>

#include "client/replay/trace.h"

namespace stoker::replay {

struct TraceShape {
  uint32_t requests = 0;
  // Means; single requests lie between a quarter of it and about four times as much.
  uint32_t input_rows = 0;   // at least 4
  uint32_t output_rows = 0;  // at least 4
  // Time between two requests, on average.
  uint32_t interval_ms = 0;
  uint64_t seed = 0;
};

// The same requests for the same shape on every machine: integer arithmetic only.
std::vector<Request> GenerateTrace(const TraceShape& shape);

}  // namespace stoker::replay
