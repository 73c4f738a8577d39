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
      : options_(options), session_(session), report_(report), padding_(options.seed) {
    running_.reserve(capacity);
  }

  // Takes a sequence whose prompt is stored and that has output tokens.
  void Add(const OpenSequence& sequence);
  size_t running() const { return running_.size(); }

  // Decodes one step of every sequence, of options.query_rows tokens or what it has left: writes the newest rows, has
  // all groups resolved and gathered, and checks every row that the daemon names. The first of the tokens, and at
  // random those behind it, are accepted: committed where the session is the writer. options.padding_rows rows of
  // nobody lie between the sequences. Sequences that have all their tokens leave, in the order in which they came, and
  // are appended to `ended`.
  absl::Status Step(std::vector<OpenSequence>* ended);

 private:
  struct Running {
    OpenSequence sequence;
    uint32_t rows = 0;      // before the step
    uint32_t accepted = 0;  // of the step's tokens
    Random random{0};
    std::vector<std::unique_ptr<WorkloadModel>> models;  // of each group
  };

  // What the step's batch is: rows of sequences and, here and there, of nobody.
  void ComposeBatch();
  void Prepare();
  absl::Status CheckReply();

  const Options& options_;
  EngineSession* const session_;
  RankReport* const report_;
  std::vector<Running> running_;
  Random padding_;                   // where padding rows lie
  std::vector<BatchRow> batch_;      // of the step that is under way
  std::vector<Running*> sequences_;  // of its rows; null: padding
  v1::StepRequest request_;
  v1::StepResponse response_;
};

}  // namespace stoker::replay
