#include "client/replay/decoder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::replay {

void Decoder::Add(const OpenSequence& sequence) {
  Running& running = running_.emplace_back();
  running.sequence = sequence;
  running.rows = sequence.request->input_rows;
  // Of the request alone, so that all ranks of an engine select the same tokens.
  const uint64_t seed = Mix64(options_.seed) + sequence.request->number * uint64_t{options_.groups + 1};
  running.random = Random(seed);
  for (uint32_t group = 0; group < options_.groups; ++group) {
    running.models.push_back(MakeWorkloadModel(options_.model(), options_.top_k, sequence.request->total_rows(),
                                               seed + 1 + group, options_.noise()));
  }
}

void Decoder::ComposeBatch() {
  batch_.clear();
  sequences_.clear();
  uint32_t padding = options_.padding_rows;
  const auto pad = [&](uint32_t count) {
    batch_.resize(batch_.size() + count);
    sequences_.resize(batch_.size(), nullptr);
    padding -= count;
  };
  for (Running& running : running_) {
    // Rows of a sequence stay side by side.
    if (padding > 0) pad(padding_.Below(padding + 1));
    const uint32_t left = running.sequence.request->total_rows() - running.rows;
    const uint32_t count = std::min(options_.query_rows, left);
    running.accepted = count == 1 ? 1 : 1 + running.random.Below(count);
    for (uint32_t i = 0; i < count; ++i) {
      batch_.push_back({&running.sequence, running.rows + 1 + i, i});
      sequences_.push_back(&running);
    }
  }
  pad(padding);
}

void Decoder::Prepare() {
  ComposeBatch();
  auto* rows = request_.mutable_rows();
  while (rows->size() > static_cast<int>(batch_.size())) rows->RemoveLast();
  while (rows->size() < static_cast<int>(batch_.size())) rows->Add();
  session_->BeginStep(&request_);
  for (size_t i = 0; i < batch_.size(); ++i) {
    v1::StepRow* row = rows->Mutable(static_cast<int>(i));
    if (sequences_[i] == nullptr) {
      row->Clear();
      // Positions of any sequence: nobody may look at them.
      for (uint32_t group = 0; group < options_.groups; ++group) {
        const absl::Span<int32_t> entries = session_->Entries(&request_, group, i);
        std::iota(entries.begin(), entries.end(), 0);
      }
      continue;
    }
    Running& running = *sequences_[i];
    row->set_sequence_id(running.sequence.id);
    row->set_length(batch_[i].length);
    row->set_commit(running.sequence.writer && batch_[i].newest_index < running.accepted);
    session_->WriteNewest(batch_[i], row);
    for (uint32_t group = 0; group < options_.groups; ++group) {
      const absl::Span<int32_t> entries = session_->Entries(&request_, group, i);
      // A model's tokens do not fall, and not all of the step's may be accepted.
      running.models[group]->Select(running.rows, entries);
      for (uint32_t newest = running.rows; newest < batch_[i].length; ++newest) {
        MixInNewest(running.random, newest, entries);
      }
    }
  }
}

absl::Status Decoder::CheckReply() {
  if (response_.statuses_size() != request_.rows_size() || response_.groups_size() != request_.groups_size()) {
    return absl::InternalError(absl::StrCat("Step: the reply has ", response_.statuses_size(), " statuses and ",
                                            response_.groups_size(), " groups; ", request_.rows_size(), " and ",
                                            request_.groups_size(), " were asked for"));
  }
  report_->steps.Add(1);
  report_->gathered_bytes.Add(response_.gathered_bytes());

  if (absl::Status status = session_->CheckStep(batch_, &request_, response_); !status.ok()) return status;
  for (uint32_t group = 0; group < options_.groups; ++group) {
    const v1::StepGroupResult& result = response_.groups(static_cast<int>(group));
    for (size_t i = 0; i < batch_.size(); ++i) {
      const absl::Span<const int32_t> entries = session_->Entries(&request_, group, i);
      const v1::LookupCounts& counts = result.counts(static_cast<int>(i));
      report_->hot.Add(counts.hot());
      report_->newest.Add(counts.newest());
      report_->resident.Add(counts.resident());
      report_->miss.Add(counts.miss());
      report_->duplicate.Add(counts.duplicate());
      report_->invalid.Add(counts.invalid());
      const uint64_t outcomes = uint64_t{counts.hot()} + counts.newest() + counts.resident() + counts.miss() +
                                counts.duplicate() + counts.invalid();
      const uint64_t asked = sequences_[i] == nullptr
                                 ? 0
                                 : static_cast<uint64_t>(std::count_if(entries.begin(), entries.end(),
                                                                       [](int32_t entry) { return entry >= 0; }));
      if (outcomes != asked) {
        return absl::InternalError(absl::StrCat(
            "Step: the outcomes of batch row ", i, ", ",
            sequences_[i] == nullptr ? "which is padding"
                                     : absl::StrCat("of request ", sequences_[i]->sequence.request->number),
            ", group ", group, " add up to ", outcomes, "; ", asked, " entries were asked for"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Decoder::Step(std::vector<OpenSequence>* ended) {
  Prepare();
  if (absl::Status status = session_->Step(batch_, &request_, &response_); !status.ok()) return status;
  if (absl::Status status = CheckReply(); !status.ok()) return status;
  if (absl::Status status = session_->FinishStep(request_); !status.ok()) return status;
  report_->stored_rows.Add(static_cast<uint64_t>(std::count_if(request_.rows().begin(), request_.rows().end(),
                                                               [](const v1::StepRow& row) { return row.commit(); })));
  size_t kept = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& running = running_[i];
    if (running.sequence.writer) report_->output_rows.Add(running.accepted);
    running.rows += running.accepted;
    if (running.rows == running.sequence.request->total_rows()) {
      ended->push_back(running.sequence);
      continue;
    }
    if (kept != i) running_[kept] = std::move(running);
    ++kept;
  }
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(kept), running_.end());
  return absl::OkStatus();
}

}  // namespace stoker::replay
