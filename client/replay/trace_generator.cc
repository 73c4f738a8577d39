#include "client/replay/trace_generator.h"

#include <algorithm>

#include "client/replay/random.h"

namespace stoker::replay {
namespace {

constexpr uint32_t kSystemPrompts = 3;
constexpr size_t kLiveConversations = 8;
// Of 16 requests, as many continue a conversation. With prompts of a few thousand tokens about a third of all prefix
// blocks is then shared, as in the published conversation trace.
constexpr uint32_t kContinuing = 8;
// Each turn adds this part of the mean input to what its conversation already has.
constexpr uint32_t kNewShare = 3;
// A conversation that grew beyond this many times the mean ends.
constexpr uint32_t kLongest = 4;

// What later turns share: the whole blocks of the last prompt.
struct Conversation {
  std::vector<uint64_t> blocks;
  uint32_t rows = 0;  // of the last prompt and its answer
};

// Between mean / 4 and 7/4 mean, peaked at the mean; at least 1.
uint32_t Around(Random& random, uint32_t mean) {
  const uint32_t spread = std::max(1u, mean * 3 / 4);
  return std::max(1u, mean / 4 + random.Below(spread) + random.Below(spread));
}

}  // namespace

std::vector<Request> GenerateTrace(const TraceShape& shape) {
  Random random(shape.seed);
  uint64_t next_id = 0;

  std::vector<Conversation> system_prompts(kSystemPrompts);
  for (Conversation& prompt : system_prompts) {
    // Prompts shorter than a block share nothing.
    const uint32_t blocks = shape.input_rows < kPrefixBlockRows
                                ? 0
                                : 1 + random.Below(std::max(1u, shape.input_rows / (2 * kPrefixBlockRows)));
    for (uint32_t i = 0; i < blocks; ++i) prompt.blocks.push_back(next_id++);
    prompt.rows = blocks * kPrefixBlockRows;
  }

  std::vector<Conversation> live;
  std::vector<Request> requests;
  requests.reserve(shape.requests);
  uint64_t now_ms = 0;
  for (uint32_t number = 0; number < shape.requests; ++number) {
    size_t place = live.empty() ? 0 : random.Below(static_cast<uint32_t>(live.size()));
    if (live.empty() || random.Below(16) >= kContinuing) {
      if (live.size() < kLiveConversations) {
        place = live.size();
        live.emplace_back();
      }
      live[place] = system_prompts[random.Below(kSystemPrompts)];
    }
    Conversation& conversation = live[place];

    Request request;
    request.number = number;
    request.timestamp_ms = now_ms;
    request.input_rows =
        std::min(conversation.rows + Around(random, shape.input_rows / kNewShare), kMaxSequenceRows / 2);
    request.output_rows = Around(random, shape.output_rows);
    request.hash_ids = conversation.blocks;
    while (request.hash_ids.size() < request.prefix_blocks()) request.hash_ids.push_back(next_id++);
    now_ms += random.Below(2 * shape.interval_ms + 1);

    conversation.rows = request.total_rows();
    conversation.blocks.assign(request.hash_ids.begin(),
                               request.hash_ids.begin() + request.input_rows / kPrefixBlockRows);
    if (conversation.rows > kLongest * shape.input_rows) live.erase(live.begin() + static_cast<ptrdiff_t>(place));
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace stoker::replay
