// The open and the retained sequences of a pool: by id, by key, and what each session holds.
//
// Thread safety: none; the pool's mutex guards it.
//
// Invariants:
//  1. An id names one sequence for ever: a place's generation is raised when its sequence is freed, and a place whose
//     generations are used up is not used again.
//  2. A sequence has sessions, one of which is the writer, or is retained: without sessions and with a key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/core/ids.h"
#include "server/core/sequence_word.h"

namespace stoker::core {

// A copy that the session which opened the sequence still has to make. The source block has a holder for it.
struct PendingCopy {
  int32_t source_block = 0;
  int64_t first_row = 0;  // rows from here on are not in the sequence's own block yet
  SessionId session;
};

struct Sequence {
  SequenceId id;
  std::string key;
  int64_t prompt_rows = 0;
  int64_t admitted_max_rows = 0;  // max_rows before any Extend
  int64_t max_rows = 0;
  int64_t matched_rows = 0;  // when it was admitted
  int64_t stored_rows = 0;
  int64_t written_rows = 0;  // stored, or begun to be written by the writer
  int64_t sealed_rows = 0;   // others may see rows below this in blocks that are shared
  std::vector<int32_t> table;
  std::vector<PrefixHash> hashes;
  // Index entries of hashes[0, held.size()) of which the sequence is a user, or PrefixIndex::kNone. Later hashes are
  // published when their rows are stored.
  std::vector<int32_t> held;
  bool expected = false;  // is an expected owner of the hashes from held.size() on
  std::optional<PendingCopy> copy;
  // Write plans whose copied blocks may not hold their rows yet, and who waits for the last of them to open or fork the
  // sequence.
  int64_t unfinished_copies = 0;
  std::vector<std::function<void()>> waiting;
  absl::InlinedVector<SessionId, 2> sessions;  // the longest-standing one first
  SessionId writer;
  absl::Time retained_until;
  SequenceWord* word = nullptr;  // null: the pool has none

  int64_t blocks() const { return static_cast<int64_t>(table.size()); }
  bool IsOpenIn(SessionId session) const;
  // Rows that the session may read.
  int64_t VisibleRows(SessionId session) const {
    if (session == writer) return written_rows;
    return copy.has_value() ? std::min(stored_rows, copy->first_row) : stored_rows;
  }
};

class SequenceTable {
 public:
  // A new sequence with an id and, where `key` is not empty, findable by it.
  Sequence& Create(std::string_view key);
  // The sequence must have no sessions.
  void Free(Sequence& sequence);

  // Null where the id names no present sequence.
  Sequence* Find(SequenceId id) const;
  // NOT_FOUND, or FAILED_PRECONDITION where the id is of an earlier generation.
  absl::Status Find(SequenceId id, Sequence** sequence) const;
  // As above; FAILED_PRECONDITION where the session has not opened the sequence.
  absl::Status FindOpen(SessionId session, SequenceId id, Sequence** sequence) const;
  Sequence* FindKey(std::string_view key) const;

  // The session opens the sequence; the first one is its writer.
  void Open(Sequence& sequence, SessionId session);
  // Takes the session away; if it was the writer, the longest-standing other one is.
  void Close(Sequence& sequence, SessionId session);
  // The sequence's table is about to grow by `blocks`.
  void Grow(const Sequence& sequence, int64_t blocks);
  int64_t ReservedBlocks(SessionId session) const;

  void Retain(Sequence& sequence, absl::Time until);
  // A retained sequence whose time is over, or null.
  Sequence* Expired(absl::Time now) const;

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  const std::set<SequenceId>& ids() const { return ids_; }
  const std::set<std::pair<absl::Time, SequenceId>>& retained() const { return retained_; }

 private:
  struct Place {
    uint32_t generation = 1;
    std::unique_ptr<Sequence> sequence;
  };
  struct Use {
    int64_t sequences = 0;
    int64_t blocks = 0;
  };

  std::vector<Place> places_;
  std::vector<uint32_t> unused_;
  std::set<SequenceId> ids_;
  absl::flat_hash_map<std::string, Sequence*> keys_;
  absl::flat_hash_map<SessionId, Use> uses_;
  std::set<std::pair<absl::Time, SequenceId>> retained_;
};

}  // namespace stoker::core
