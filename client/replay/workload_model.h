// Which tokens a sequence's attention selects, step by step: models of the top-k of a trained indexer.
//
// Thread safety: a model belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/replay/random.h"

namespace stoker::replay {

enum class ModelKind : uint8_t {
  // Calibrated to published LRU miss rates; O(tokens) a step. See realistic_model.h.
  kRealistic,
  // A set that drifts; O(top_k) a step. See drift_model.h.
  kDrift,
  // Nothing is hot, and everything is; O(top_k) a step. See extreme_models.h.
  kFresh,
  kResident,
};

// "realistic", "drift", "fresh" or "resident". INVALID_ARGUMENT otherwise.
absl::StatusOr<ModelKind> ParseModelKind(absl::string_view name);
absl::string_view ModelName(ModelKind kind);

// Factors of the deviations of the realistic model's changing parts. With 0 and 0 every step selects the same tokens.
struct ScoreNoise {
  float drift = 1;  // of the two that go on from step to step
  float white = 1;
};

// Selects tokens for one sequence and one index group. The same seed gives the same selection.
class WorkloadModel {
 public:
  virtual ~WorkloadModel() = default;

  // Fills `entries` with distinct positions in [0, tokens), in random order, or, where there are fewer tokens than
  // entries, with all of them and then -1. `tokens` does not fall from call to call and is at most max_tokens.
  virtual void Select(uint32_t tokens, absl::Span<int32_t> entries) = 0;
};

// `top_k` is the number of entries that Select will be given, at least 1. `noise` is for kRealistic.
std::unique_ptr<WorkloadModel> MakeWorkloadModel(ModelKind kind, uint32_t top_k, uint32_t max_tokens, uint64_t seed,
                                                 const ScoreNoise& noise = {});

// Puts the newest token among the entries of every second step, on average: in place of a random one, or of the first
// -1.
void MixInNewest(Random& random, uint32_t newest, absl::Span<int32_t> entries);

// Brings entries into random order.
void Shuffle(Random& random, absl::Span<int32_t> entries);

}  // namespace stoker::replay
