// Decodes open sequences in one continuous batch: each step gives every one of them its next token.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "client/replay/engine_session.h"
#include "client/replay/options.h"
#include "client/replay/random.h"
#include "client/replay/rank_report.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {

class Decoder {
 public:
  // `capacity` is the most sequences at a time. The pointers must outlive the decoder.
  Decoder(const Options& options, uint32_t capacity, EngineSession* session, RankReport* report)
      : options_(options), session_(session), report_(report) {
    running_.reserve(capacity);
  }

  // Takes a sequence whose prompt is stored and that has output tokens.
  void Add(const OpenSequence& sequence);
  size_t running() const { return running_.size(); }

  // Decodes one token of every sequence: writes the newest rows, has them committed where the session is the writer,
  // all groups resolved and gathered, and checks every row that the daemon names. Sequences that have all their tokens
  // leave, in the order in which they came, and are appended to `ended`.
  absl::Status Step(std::vector<OpenSequence>* ended);

 private:
  struct Running {
    OpenSequence sequence;
    uint32_t rows = 0;  // before the step
    Random random{0};
    std::vector<std::unique_ptr<WorkloadModel>> models;  // of each group
  };

  void Prepare();
  absl::Status CheckReply();

  const Options& options_;
  EngineSession* const session_;
  RankReport* const report_;
  std::vector<Running> running_;
  std::vector<BatchRow> batch_;  // of the step that is under way
  v1::StepRequest request_;
  v1::StepResponse response_;
};

}  // namespace stoker::replay
