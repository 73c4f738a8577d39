#include "server/core/sequence_table.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/core/check.h"

namespace stoker::core {

bool Sequence::IsOpenIn(SessionId session) const {
  return std::find(sessions.begin(), sessions.end(), session) != sessions.end();
}

Sequence& SequenceTable::Create(std::string_view key) {
  if (unused_.empty()) {
    unused_.push_back(static_cast<uint32_t>(places_.size()));
    places_.emplace_back();
  }
  const uint32_t index = unused_.back();
  unused_.pop_back();
  Place& place = places_[index];
  place.sequence = std::make_unique<Sequence>();
  Sequence& sequence = *place.sequence;
  sequence.id = SequenceId::Make(place.generation, index);
  sequence.key = key;
  ids_.insert(sequence.id);
  if (!key.empty()) STOKER_CHECK(keys_.emplace(sequence.key, &sequence).second);
  return sequence;
}

void SequenceTable::Free(Sequence& sequence) {
  STOKER_CHECK(sequence.sessions.empty());
  const SequenceId id = sequence.id;
  retained_.erase({sequence.retained_until, id});
  if (!sequence.key.empty()) keys_.erase(sequence.key);
  ids_.erase(id);
  Place& place = places_[id.index()];
  place.sequence.reset();
  if (place.generation == std::numeric_limits<uint32_t>::max()) return;
  ++place.generation;
  unused_.push_back(id.index());
}

Sequence* SequenceTable::Find(SequenceId id) const {
  if (id.index() >= places_.size()) return nullptr;
  const Place& place = places_[id.index()];
  return place.generation == id.generation() ? place.sequence.get() : nullptr;
}

absl::Status SequenceTable::Find(SequenceId id, Sequence** sequence) const {
  *sequence = Find(id);
  if (*sequence != nullptr) return absl::OkStatus();
  if (id.index() < places_.size() && id.generation() > 0) {
    const Place& place = places_[id.index()];
    if (id.generation() < place.generation) {
      return absl::FailedPreconditionError(absl::StrCat("sequence_id ", id.value, " is of an earlier generation: ",
                                                        id.generation(), ", the present one is ", place.generation));
    }
  }
  return absl::NotFoundError(absl::StrCat("sequence_id ", id.value, " names no sequence of this pool"));
}

absl::Status SequenceTable::FindOpen(SessionId session, SequenceId id, Sequence** sequence) const {
  if (absl::Status status = Find(id, sequence); !status.ok()) return status;
  if ((*sequence)->IsOpenIn(session)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("sequence_id ", id.value, " is not open in session ", session.value));
}

Sequence* SequenceTable::FindKey(std::string_view key) const {
  if (key.empty()) return nullptr;
  const auto found = keys_.find(absl::string_view(key.data(), key.size()));
  return found == keys_.end() ? nullptr : found->second;
}

void SequenceTable::Open(Sequence& sequence, SessionId session) {
  STOKER_CHECK(!sequence.IsOpenIn(session));
  if (sequence.sessions.empty()) {
    sequence.writer = session;
    retained_.erase({sequence.retained_until, sequence.id});
  }
  sequence.sessions.push_back(session);
  Use& use = uses_[session];
  ++use.sequences;
  use.blocks += sequence.blocks();
}

void SequenceTable::Close(Sequence& sequence, SessionId session) {
  sequence.sessions.erase(std::find(sequence.sessions.begin(), sequence.sessions.end(), session));
  if (sequence.writer == session) sequence.writer = sequence.sessions.empty() ? SessionId{} : sequence.sessions.front();
  const auto use = uses_.find(session);
  use->second.blocks -= sequence.blocks();
  if (--use->second.sequences == 0) uses_.erase(use);
}

void SequenceTable::Grow(const Sequence& sequence, int64_t blocks) {
  for (const SessionId session : sequence.sessions) uses_[session].blocks += blocks;
}

int64_t SequenceTable::ReservedBlocks(SessionId session) const {
  const auto use = uses_.find(session);
  return use == uses_.end() ? 0 : use->second.blocks;
}

void SequenceTable::Retain(Sequence& sequence, absl::Time until) {
  STOKER_CHECK(sequence.sessions.empty() && !sequence.key.empty());
  sequence.retained_until = until;
  retained_.insert({until, sequence.id});
}

Sequence* SequenceTable::Expired(absl::Time now) const {
  if (retained_.empty() || retained_.begin()->first > now) return nullptr;
  return Find(retained_.begin()->second);
}

}  // namespace stoker::core
