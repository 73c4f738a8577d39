#include "client/replay/decoder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::replay {

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Make(const Options& options, uint32_t capacity,
                                                       EngineSession* session, RankReport* report) {
  auto decoder = std::unique_ptr<Decoder>(new Decoder(options, session, report));
  decoder->running_.reserve(capacity);
  decoder->request_.set_top_k(options.top_k);
  decoder->request_.set_source(session->shared() ? v1::DATA_SOURCE_SHARED : v1::DATA_SOURCE_INLINE);
  for (uint32_t group = 0; group < options.groups; ++group) {
    v1::StepGroup* entries = decoder->request_.add_groups();
    entries->set_group(group);
    if (!session->shared()) continue;
    auto indices = session->arena().Indices(group);
    if (!indices.ok()) return indices.status();
    auto hot_rows = session->arena().HotRows(group);
    if (!hot_rows.ok()) return hot_rows.status();
    decoder->indices_.push_back(*indices);
    decoder->hot_rows_.push_back(*hot_rows);
  }
  return decoder;
}

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

absl::Span<int32_t> Decoder::Entries(uint32_t group, size_t row) {
  if (session_->shared()) return indices_[group][row].first(options_.top_k);
  int32_t* all = request_.mutable_groups(static_cast<int>(group))->mutable_indices()->mutable_data();
  return absl::MakeSpan(all + row * options_.top_k, options_.top_k);
}

absl::Span<const int32_t> Decoder::HotRows(uint32_t group, size_t row) const {
  if (session_->shared()) return hot_rows_[group][row].first(options_.top_k);
  return absl::MakeConstSpan(response_.groups(static_cast<int>(group)).hot_rows().data() + row * options_.top_k,
                             options_.top_k);
}

void Decoder::Prepare() {
  auto* rows = request_.mutable_rows();
  while (rows->size() > static_cast<int>(running_.size())) rows->RemoveLast();
  while (rows->size() < static_cast<int>(running_.size())) rows->Add();
  if (!session_->shared()) {
    for (uint32_t group = 0; group < options_.groups; ++group) {
      request_.mutable_groups(static_cast<int>(group))
          ->mutable_indices()
          ->Resize(static_cast<int>(running_.size() * options_.top_k), -1);
    }
  }
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& running = running_[i];
    v1::StepRow* row = rows->Mutable(static_cast<int>(i));
    row->set_sequence_id(running.sequence.id);
    row->set_length(running.rows + 1);
    row->set_commit(running.sequence.writer);
    session_->WriteNewest(running.sequence, running.rows, row);
    for (uint32_t group = 0; group < options_.groups; ++group) {
      const absl::Span<int32_t> entries = Entries(group, i);
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
  uint64_t committed = 0;
  for (const v1::StepRow& row : request_.rows()) committed += row.commit() ? 1 : 0;
  report_->stored_rows.Add(committed);
  report_->steps.Add(1);
  report_->gathered_bytes.Add(response_.gathered_bytes());

  for (uint32_t group = 0; group < options_.groups; ++group) {
    const v1::StepGroupResult& result = response_.groups(static_cast<int>(group));
    const size_t rows = running_.size();
    if (result.group() != group || result.counts_size() != static_cast<int>(rows) ||
        (!session_->shared() && result.hot_rows_size() != static_cast<int>(rows * options_.top_k))) {
      return absl::InternalError(absl::StrCat("Step: group ", group, " of the reply has ", result.counts_size(),
                                              " counts and ", result.hot_rows_size(), " hot rows for ", rows,
                                              " rows of ", options_.top_k, " entries"));
    }
    for (size_t i = 0; i < rows; ++i) {
      const absl::Span<const int32_t> entries = Entries(group, i);
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
      absl::Status status =
          session_->CheckRows(running_[i].sequence, group, running_[i].rows + 1, entries, HotRows(group, i));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Decoder::Step(std::vector<OpenSequence>* ended) {
  Prepare();
  if (absl::Status status = session_->Step(request_, &response_); !status.ok()) return status;
  if (absl::Status status = CheckReply(); !status.ok()) return status;
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
