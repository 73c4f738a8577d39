#include "server/core/prefix_index.h"

#include <algorithm>
#include <bit>

#include "absl/hash/hash.h"
#include "server/core/check.h"

namespace stoker::core {

PrefixIndex::PrefixIndex(BlockAllocator* allocator)
    : allocator_(*allocator), buckets_(2 * std::bit_ceil(static_cast<uint64_t>(allocator->blocks())), kNone) {}

int32_t& PrefixIndex::Bucket(const PrefixHash& hash) {
  // Hashed again: the client chose the bits.
  return buckets_[absl::HashOf(hash) & (buckets_.size() - 1)];
}

void PrefixIndex::Prefetch(const Entry& entry) const {
  __builtin_prefetch(&buckets_[absl::HashOf(entry.hash) & (buckets_.size() - 1)]);
  if (entry.hotter == kNone) return;
  const Entry& after = at(entry.hotter);
  for (size_t offset = 0; offset < sizeof(Entry); offset += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(&after) + offset);
  }
}

int32_t PrefixIndex::Find(const PrefixHash& hash) const {
  int32_t entry = buckets_[absl::HashOf(hash) & (buckets_.size() - 1)];
  while (entry != kNone && at(entry).hash != hash) entry = at(entry).next_in_bucket;
  return entry;
}

void PrefixIndex::Hold(int32_t entry) {
  STOKER_CHECK(at(entry).stored);
  if (at(entry).users++ == 0) Unlist(entry);
}

void PrefixIndex::Release(int32_t entry) {
  STOKER_CHECK(at(entry).stored && at(entry).users > 0);
  if (--at(entry).users == 0) List(entry);
}

void PrefixIndex::Touch(int32_t entry) {
  if (!at(entry).listed) return;
  Unlist(entry);
  List(entry);
}

void PrefixIndex::Expect(const PrefixHash& hash, SequenceId owner) { at(FindOrCreate(hash)).owners.push_back(owner); }

bool PrefixIndex::Forget(const PrefixHash& hash, SequenceId owner) {
  const int32_t entry = Find(hash);
  if (entry == kNone) return false;
  Owners& owners = at(entry).owners;
  const auto found = std::find(owners.begin(), owners.end(), owner);
  if (found == owners.end()) return false;
  *found = owners.back();
  owners.pop_back();
  if (owners.empty() && !at(entry).stored) Remove(entry);
  return true;
}

int32_t PrefixIndex::Publish(const PrefixHash& hash, int64_t ordinal, int64_t rows, absl::Span<const int32_t> blocks) {
  int32_t entry = Find(hash);
  if (entry != kNone && at(entry).stored) return kNone;
  for (const int32_t block : blocks) {
    if (allocator_.indexed(block)) return kNone;
  }
  if (entry == kNone) entry = FindOrCreate(hash);
  Entry& e = at(entry);
  e.stored = true;
  e.users = 1;
  e.ordinal = static_cast<int32_t>(ordinal);
  e.rows = static_cast<int32_t>(rows);
  e.blocks.assign(blocks.begin(), blocks.end());
  for (const int32_t block : blocks) allocator_.Index(block);
  ++stored_entries_;
  return entry;
}

int64_t PrefixIndex::Evict(int64_t count) {
  int64_t freed = 0;
  for (int32_t entry = coldest_; entry != kNone && freed < count;) {
    const int32_t next = at(entry).hotter;
    Entry& e = at(entry);
    // Cold entries are not in the processor's caches: fetch the next one while this one is taken apart.
    if (next != kNone) Prefetch(at(next));
    const bool frees =
        std::any_of(e.blocks.begin(), e.blocks.end(), [this](int32_t block) { return allocator_.holders(block) == 0; });
    if (frees) {
      for (const int32_t block : e.blocks) {
        if (allocator_.holders(block) > 0) {
          allocator_.Unindex(block);
        } else {
          freed += allocator_.Evict(block);
        }
      }
      e.blocks.clear();
      Unlist(entry);
      e.stored = false;
      --stored_entries_;
      if (e.owners.empty()) Remove(entry);
    }
    entry = next;
  }
  return freed;
}

std::vector<int32_t> PrefixIndex::ColdToHot() const {
  std::vector<int32_t> entries;
  for (int32_t entry = coldest_; entry != kNone; entry = at(entry).hotter) entries.push_back(entry);
  return entries;
}

int32_t PrefixIndex::FindOrCreate(const PrefixHash& hash) {
  int32_t entry = Find(hash);
  if (entry != kNone) return entry;
  if (first_unused_ == kNone) {
    const int32_t first = static_cast<int32_t>(chunks_.size() * kChunkEntries);
    chunks_.push_back(std::make_unique<Entry[]>(kChunkEntries));
    for (int32_t i = kChunkEntries - 1; i >= 0; --i) {
      at(first + i).next_in_bucket = first_unused_;
      first_unused_ = first + i;
    }
  }
  entry = first_unused_;
  Entry& e = at(entry);
  first_unused_ = e.next_in_bucket;
  e.hash = hash;
  int32_t& bucket = Bucket(hash);
  e.next_in_bucket = bucket;
  bucket = entry;
  ++known_entries_;
  return entry;
}

void PrefixIndex::Remove(int32_t entry) {
  Entry& e = at(entry);
  int32_t* link = &Bucket(e.hash);
  while (*link != entry) link = &at(*link).next_in_bucket;
  *link = e.next_in_bucket;
  e.next_in_bucket = first_unused_;
  first_unused_ = entry;
  --known_entries_;
}

void PrefixIndex::List(int32_t entry) {
  Entry& e = at(entry);
  e.listed = true;
  e.colder = hottest_;
  e.hotter = kNone;
  (hottest_ == kNone ? coldest_ : at(hottest_).hotter) = entry;
  hottest_ = entry;
}

void PrefixIndex::Unlist(int32_t entry) {
  Entry& e = at(entry);
  STOKER_CHECK(e.listed);
  e.listed = false;
  (e.colder == kNone ? coldest_ : at(e.colder).hotter) = e.hotter;
  (e.hotter == kNone ? hottest_ : at(e.hotter).colder) = e.colder;
}

}  // namespace stoker::core
