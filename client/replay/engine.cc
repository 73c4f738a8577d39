#include "client/replay/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/replay/decoder.h"
#include "client/status.h"

namespace stoker::replay {
namespace {

// An engine that has nothing to decode asks again this often while the others hold the room it needs, and gives up when
// nothing has become free for so long.
constexpr absl::Duration kRoomPoll = absl::Milliseconds(5);
constexpr absl::Duration kRoomTimeout = absl::Seconds(120);

std::string SequenceKey(const ReplayPlan& plan, uint32_t number) {
  return plan.options.ranks == 1 ? "" : absl::StrCat(plan.run_id, ":", number);
}

absl::StatusOr<std::unique_ptr<EngineSession>> OpenSession(const ReplayPlan& plan, uint32_t engine, uint32_t rank,
                                                           uint32_t state_rows, RankReport* report) {
  SessionNeeds needs;
  needs.address = plan.address;
  needs.name = absl::StrCat(plan.run_id, ".e", engine, ".r", rank);
  needs.state_rows = state_rows;
  needs.batch_rows = plan.options.batch_rows();
  needs.max_sequence_rows = plan.max_sequence_rows;
  needs.pool_blocks = plan.pool_blocks;
  needs.stores = rank == 0;
  needs.steps = !plan.options.prefix_only;
  needs.process = engine * plan.options.ranks + rank;
  return EngineSession::Open(plan.options, needs, report);
}

void CountAdmitted(const OpenSequence& sequence, uint32_t rows_to_come, RankReport* report) {
  const Request& request = *sequence.request;
  report->input_rows.Add(request.input_rows);
  report->matched_rows.Add(sequence.matched_rows);
  report->prefix_blocks.Add(request.prefix_blocks());
  // A partial block at the end is matched only together with the whole prompt.
  report->matched_blocks.Add(sequence.matched_rows == request.input_rows ? request.prefix_blocks()
                                                                         : sequence.matched_rows / kPrefixBlockRows);
  report->unique_rows.Add(request.input_rows - sequence.matched_rows + rows_to_come);
}

// Releases the sequences that have ended; there are some.
absl::Status ReleaseAll(EngineSession& session, std::vector<OpenSequence>* ended) {
  std::vector<uint64_t> ids;
  for (const OpenSequence& sequence : *ended) ids.push_back(sequence.id);
  ended->clear();
  return session.Release(ids);
}

class Engine {
 public:
  Engine(const ReplayPlan& plan, uint32_t engine, FollowerLinks followers, RankReport* report)
      : plan_(plan), next_(engine), followers_(std::move(followers)), report_(report) {}

  absl::Status Run(uint32_t engine);

 private:
  bool pending() const { return next_ < plan_.requests.size(); }
  absl::Time NextArrival() const {
    return start_ +
           plan_.options.time_scale * absl::Milliseconds(static_cast<int64_t>(plan_.requests[next_].timestamp_ms));
  }
  // Takes requests as long as they have arrived and there is room for them.
  absl::Status TakeRequests();
  // Admits and stores the next one. False: there was no room.
  absl::StatusOr<bool> TakeNext();
  // Waits until something may have changed although nothing is being decoded.
  absl::Status WaitIdle();

  const ReplayPlan& plan_;
  size_t next_;
  FollowerLinks followers_;
  RankReport* const report_;
  const absl::Time start_ = absl::Now();
  absl::Time waiting_since_ = absl::InfiniteFuture();  // for room, with nothing to decode
  absl::Status no_room_;                               // why the next request was refused; OK: not yet tried
  std::unique_ptr<EngineSession> session_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<OpenSequence> ended_;
};

absl::StatusOr<bool> Engine::TakeNext() {
  const Request& request = plan_.requests[next_];
  auto sequence = session_->Admit(request, SequenceKey(plan_, request.number), request.total_rows());
  if (absl::IsResourceExhausted(sequence.status())) {
    if (no_room_.ok()) report_->waits.Add(1);
    no_room_ = sequence.status();
    return false;
  }
  if (!sequence.ok()) return sequence.status();
  if (!sequence->writer) {
    return absl::InternalError(absl::StrCat("request ", request.number, " was admitted, but not to be stored"));
  }
  no_room_ = absl::OkStatus();
  waiting_since_ = absl::InfiniteFuture();
  next_ += plan_.options.engines;

  CountAdmitted(*sequence, request.output_rows, report_);
  if (absl::Status status = session_->Store(*sequence, sequence->matched_rows, request.input_rows); !status.ok()) {
    return status;
  }
  if (absl::Status status = followers_.Send({RankCommand::kAdmit, request.number}); !status.ok()) return status;
  if (absl::Status status = followers_.AwaitAcknowledgements(); !status.ok()) return status;
  if (request.output_rows > 0) {
    decoder_->Add(*sequence);
  } else {
    ended_.push_back(*sequence);
  }
  return true;
}

absl::Status Engine::TakeRequests() {
  while (pending() && decoder_->running() + ended_.size() < plan_.options.concurrency && no_room_.ok()) {
    if (plan_.options.time_scale > 0 && absl::Now() < NextArrival()) break;
    auto taken = TakeNext();
    if (!taken.ok()) return taken.status();
  }
  return absl::OkStatus();
}

absl::Status Engine::WaitIdle() {
  // Nothing else would tell before the next request is due.
  if (absl::Status status = session_->status(); !status.ok()) return status;
  const absl::Time now = absl::Now();
  if (no_room_.ok()) {
    absl::SleepFor(std::min(NextArrival() - now, absl::Milliseconds(100)));
    return absl::OkStatus();
  }
  // Another engine, or a rank that lags behind, holds what is missing.
  waiting_since_ = std::min(waiting_since_, now);
  const bool alone = plan_.options.engines == 1 && plan_.options.ranks == 1 && plan_.options.server.empty();
  if (alone || now - waiting_since_ > kRoomTimeout) return no_room_;
  absl::SleepFor(kRoomPoll);
  auto taken = TakeNext();
  return taken.status();
}

absl::Status Engine::Run(uint32_t engine) {
  auto session = OpenSession(plan_, engine, 0, plan_.options.concurrency, report_);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  decoder_ = std::make_unique<Decoder>(plan_.options, plan_.options.concurrency, session_.get(), report_);

  while (pending() || decoder_->running() > 0 || !ended_.empty()) {
    if (absl::Status status = TakeRequests(); !status.ok()) return status;
    if (decoder_->running() > 0) {
      if (absl::Status status = decoder_->Step(&ended_); !status.ok()) return status;
      if (absl::Status status = followers_.Send({RankCommand::kStep, 0}); !status.ok()) return status;
    } else if (ended_.empty()) {
      if (absl::Status status = WaitIdle(); !status.ok()) return status;
      continue;
    }
    if (ended_.empty()) continue;
    report_->requests.Add(ended_.size());
    if (absl::Status status = ReleaseAll(*session_, &ended_); !status.ok()) return status;
    if (absl::Status status = followers_.Send({RankCommand::kRelease, 0}); !status.ok()) return status;
    no_room_ = absl::OkStatus();  // something was given back: try again
  }
  return followers_.Send({RankCommand::kEnd, 0});
}

}  // namespace

absl::Status RunEngine(const ReplayPlan& plan, uint32_t engine, FollowerLinks followers, RankReport* report) {
  return Engine(plan, engine, std::move(followers), report).Run(engine);
}

absl::Status RunFollower(const ReplayPlan& plan, uint32_t engine, uint32_t rank, LeaderLink leader,
                         RankReport* report) {
  auto session = OpenSession(plan, engine, rank, plan.options.concurrency, report);
  if (!session.ok()) return session.status();
  Decoder decoder(plan.options, plan.options.concurrency, session->get(), report);
  std::vector<OpenSequence> ended;
  for (;;) {
    const auto message = leader.Receive();
    if (!message.ok()) return message.status();
    switch (message->command) {
      case RankCommand::kAdmit: {
        const Request& request = plan.requests[message->request];
        auto sequence = (*session)->Admit(request, SequenceKey(plan, request.number), request.total_rows());
        if (!sequence.ok()) return sequence.status();
        if (sequence->writer) {
          return absl::InternalError(
              absl::StrCat("request ", request.number, " was given to rank ", rank, " to store"));
        }
        if (absl::Status status = leader.Acknowledge(); !status.ok()) return status;
        if (request.output_rows > 0) {
          decoder.Add(*sequence);
        } else {
          ended.push_back(*sequence);
        }
        break;
      }
      case RankCommand::kStep:
        if (absl::Status status = decoder.Step(&ended); !status.ok()) return status;
        break;
      case RankCommand::kRelease:
        if (absl::Status status = ReleaseAll(**session, &ended); !status.ok()) return status;
        break;
      case RankCommand::kEnd:
        return absl::OkStatus();
    }
  }
}

absl::Status RunPrefixOnly(const ReplayPlan& plan, RankReport* report) {
  auto session = OpenSession(plan, 0, 0, 1, report);
  if (!session.ok()) return session.status();
  for (const Request& request : plan.requests) {
    auto sequence = (*session)->Admit(request, "", request.input_rows);
    if (!sequence.ok()) return sequence.status();
    CountAdmitted(*sequence, 0, report);
    absl::Status status = (*session)->Store(*sequence, sequence->matched_rows, request.input_rows);
    if (!status.ok()) return status;
    const uint64_t id = sequence->id;
    status = (*session)->Release(absl::MakeConstSpan(&id, 1));
    if (!status.ok()) return status;
    report->requests.Add(1);
  }
  return absl::OkStatus();
}

}  // namespace stoker::replay
