// Pool::CheckInvariants: recomputes from the sequences, the index and the unreclaimed plans what the rest keeps up to
// date.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/core/pool_state.h"

namespace stoker::core {
namespace {

absl::Status Broken(std::string what) { return absl::InternalError(std::move(what)); }

absl::Status CheckRows(const Sequence& sequence, int64_t blocks) {
  const bool ordered = sequence.stored_rows >= 0 && sequence.stored_rows <= sequence.written_rows &&
                       sequence.written_rows <= sequence.max_rows && sequence.sealed_rows <= sequence.max_rows &&
                       sequence.prompt_rows <= sequence.max_rows;
  if (!ordered) return Broken(absl::StrCat("sequence ", sequence.id.value, ": rows out of order"));
  if (sequence.blocks() != blocks) return Broken(absl::StrCat("sequence ", sequence.id.value, ": wrong table size"));
  if (sequence.held.size() > sequence.hashes.size()) {
    return Broken(absl::StrCat("sequence ", sequence.id.value, ": more entries than hashes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Pool::CheckInvariants() const {
  State& s = *state_;
  absl::MutexLock lock(&s.mutex);
  std::vector<uint32_t> holders(spec_.blocks);
  std::map<int32_t, uint32_t> users;
  std::map<SessionId, int64_t> reserved;
  std::map<std::pair<uint64_t, uint64_t>, std::multiset<uint64_t>> owners;
  int64_t retained = 0;

  for (const SequenceId id : s.sequences.ids()) {
    const Sequence* sequence = s.sequences.Find(id);
    if (sequence == nullptr || sequence->id != id) return Broken(absl::StrCat("sequence ", id.value, " is lost"));
    if (absl::Status status = CheckRows(*sequence, s.BlocksFor(sequence->max_rows)); !status.ok()) return status;
    for (const int32_t block : sequence->table) ++holders[block];
    if (sequence->copy.has_value()) ++holders[sequence->copy->source_block];
    for (size_t i = 0; i < sequence->held.size(); ++i) {
      const int32_t entry = sequence->held[i];
      if (entry == PrefixIndex::kNone) continue;
      ++users[entry];
      const absl::Span<const int32_t> blocks = s.index.blocks(entry);
      const size_t column = i * spec_.prefix_rows / spec_.block_rows;
      if (!s.index.stored(entry) || column + blocks.size() > sequence->table.size() ||
          !std::equal(blocks.begin(), blocks.end(), sequence->table.begin() + column)) {
        return Broken(absl::StrCat("sequence ", id.value, ": prefix block ", i, " is not the index's"));
      }
    }
    for (size_t i = sequence->held.size(); sequence->expected && i < sequence->hashes.size(); ++i) {
      owners[{sequence->hashes[i].words[0], sequence->hashes[i].words[1]}].insert(id.value);
    }
    if (sequence->sessions.empty() ? sequence->key.empty() || sequence->expected || bool{sequence->writer}
                                   : !sequence->IsOpenIn(sequence->writer)) {
      return Broken(absl::StrCat("sequence ", id.value, ": neither open nor retained"));
    }
    retained += sequence->sessions.empty();
    for (const SessionId session : sequence->sessions) reserved[session] += sequence->blocks();
    if (!sequence->key.empty() && s.sequences.FindKey(sequence->key) != sequence) {
      return Broken(absl::StrCat("sequence ", id.value, " is not found by its key"));
    }
  }
  if (retained != static_cast<int64_t>(s.sequences.retained().size())) return Broken("retained sequences are lost");
  for (const auto& [session, blocks] : reserved) {
    if (s.sequences.ReservedBlocks(session) != blocks) {
      return Broken(absl::StrCat("session ", session.value, " holds ", blocks, " blocks, not ",
                                 s.sequences.ReservedBlocks(session)));
    }
  }
  for (const auto& [block, plans] : s.replaced) {
    holders[block] += static_cast<uint32_t>(plans.second);
    if (s.allocator.ref(block).generation != plans.first) return Broken("a replaced block was given out again");
  }

  std::vector<bool> indexed(spec_.blocks);
  std::set<int32_t> unused;
  int64_t known = 0;
  int64_t stored = 0;
  absl::Status broken;
  s.index.ForEach([&](int32_t entry, const PrefixIndex::EntryView& view) {
    ++known;
    stored += view.stored;
    if (s.index.Find(view.hash) != entry) broken = Broken("an entry is not found by its hash");
    std::multiset<uint64_t> expected;
    for (const SequenceId owner : view.owners) expected.insert(owner.value);
    if (owners[{view.hash.words[0], view.hash.words[1]}] != expected) broken = Broken("an entry has the wrong owners");
    if (!view.stored && view.owners.empty()) broken = Broken("an entry is neither stored nor expected");
    if (view.users != users[entry]) broken = Broken("an entry has the wrong number of users");
    if (view.stored && view.users == 0) unused.insert(entry);
    if (view.stored && static_cast<int64_t>(view.blocks.size()) != s.BlocksFor(view.rows)) {
      broken = Broken("an entry has the wrong number of blocks");
    }
    for (const int32_t block : view.blocks) {
      if (indexed[block]) broken = Broken(absl::StrCat("block ", block, " belongs to two entries"));
      indexed[block] = true;
    }
  });
  if (!broken.ok()) return broken;
  if (known != s.index.known_entries() || stored != s.index.stored_entries()) return Broken("entries are miscounted");
  const std::vector<int32_t> listed = s.index.ColdToHot();
  if (listed.size() != unused.size() || std::set<int32_t>(listed.begin(), listed.end()) != unused) {
    return Broken("the list of entries without users is wrong");
  }

  for (int32_t block = 0; block < spec_.blocks; ++block) {
    if (s.allocator.holders(block) != holders[block] || s.allocator.indexed(block) != indexed[block]) {
      return Broken(absl::StrCat("block ", block, " has ", s.allocator.holders(block), " holders, indexed ",
                                 s.allocator.indexed(block), "; found were ", holders[block], ", indexed ",
                                 bool{indexed[block]}));
    }
  }
  if (!s.allocator.Consistent()) return Broken("the allocator's summaries or counts are wrong");
  if (s.allocator.freed_while_referenced() != 0) return Broken("a block was evicted while it was referenced");
  const bool counted = counters_.free_blocks == s.allocator.free() &&
                       counters_.referenced_blocks == s.allocator.referenced() &&
                       counters_.cached_blocks == s.allocator.cached() && counters_.sequences == s.sequences.size();
  return counted ? absl::OkStatus() : Broken("the counters differ from the state");
}

}  // namespace stoker::core
