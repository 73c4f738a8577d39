#include "client/replay/workload_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/replay/drift_model.h"
#include "client/replay/extreme_models.h"
#include "client/replay/realistic_model.h"

namespace stoker::replay {

absl::StatusOr<ModelKind> ParseModelKind(absl::string_view name) {
  constexpr ModelKind kKinds[] = {ModelKind::kRealistic, ModelKind::kDrift, ModelKind::kFresh, ModelKind::kResident};
  for (const ModelKind kind : kKinds) {
    if (name == ModelName(kind)) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not a workload model; it must be realistic, drift, fresh or resident"));
}

absl::string_view ModelName(ModelKind kind) {
  switch (kind) {
    case ModelKind::kRealistic:
      return "realistic";
    case ModelKind::kDrift:
      return "drift";
    case ModelKind::kFresh:
      return "fresh";
    case ModelKind::kResident:
      break;
  }
  return "resident";
}

std::unique_ptr<WorkloadModel> MakeWorkloadModel(ModelKind kind, uint32_t top_k, uint32_t max_tokens, uint64_t seed,
                                                 const ScoreNoise& noise) {
  switch (kind) {
    case ModelKind::kRealistic:
      return std::make_unique<RealisticModel>(max_tokens, seed, noise);
    case ModelKind::kDrift:
      return std::make_unique<DriftModel>(top_k, max_tokens, seed);
    case ModelKind::kFresh:
      return std::make_unique<FreshModel>(seed);
    case ModelKind::kResident:
      break;
  }
  return std::make_unique<ResidentModel>(top_k, seed);
}

void MixInNewest(Random& random, uint32_t newest, absl::Span<int32_t> entries) {
  const uint64_t word = random.Next();
  if (word >> 63 != 0) return;
  const auto padding = entries.back() < 0 ? std::find(entries.begin(), entries.end(), -1) : entries.end();
  const size_t place = padding != entries.end() ? static_cast<size_t>(padding - entries.begin())
                                                : random.Below(static_cast<uint32_t>(entries.size()));
  entries[place] = static_cast<int32_t>(newest);
}

void Shuffle(Random& random, absl::Span<int32_t> entries) {
  for (size_t i = entries.size(); i > 1; --i) {
    std::swap(entries[i - 1], entries[random.Below(static_cast<uint32_t>(i))]);
  }
}

}  // namespace stoker::replay
