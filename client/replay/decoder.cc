#include "client/replay/decoder.h"

#include <algorithm>
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

void Decoder::Prepare() {
  auto* rows = request_.mutable_rows();
  while (rows->size() > static_cast<int>(running_.size())) rows->RemoveLast();
  while (rows->size() < static_cast<int>(running_.size())) rows->Add();
  session_->BeginStep(&request_);
  batch_.clear();
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& running = running_[i];
    v1::StepRow* row = rows->Mutable(static_cast<int>(i));
    row->set_sequence_id(running.sequence.id);
    row->set_length(running.rows + 1);
    row->set_commit(running.sequence.writer);
    batch_.push_back({&running.sequence, running.rows + 1});
    session_->WriteNewest(running.sequence, running.rows, row);
    for (uint32_t group = 0; group < options_.groups; ++group) {
      const absl::Span<int32_t> entries = session_->Entries(&request_, group, i);
      running.models[group]->Select(running.rows, entries);
      MixInNewest(running.random, running.rows, entries);
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
    for (size_t i = 0; i < running_.size(); ++i) {
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
      const uint64_t asked = static_cast<uint64_t>(
          std::count_if(entries.begin(), entries.end(), [](int32_t entry) { return entry >= 0; }));
      if (outcomes != asked) {
        return absl::InternalError(absl::StrCat("Step: the outcomes of request ", running_[i].sequence.request->number,
                                                ", group ", group, " add up to ", outcomes, "; ", asked,
                                                " entries were asked for"));
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
    if (running.sequence.writer) report_->output_rows.Add(1);
    if (++running.rows == running.sequence.request->total_rows()) {
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
