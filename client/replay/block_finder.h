// Finds out in which blocks of the pool a sequence's rows lie, for a session whose entries are pool rows. No call says
// it; but a plan names the pool rows of what it misses. So a second session, by position and with one layer, opens the
// same sequences and resolves one position of each block, once.
//
// Invariants:
//  1. A block is asked for when nothing can move the sequence to another one any more: a block of the prompt alone is
//     never written again; one with output rows is the sequence's own from its first commit on, since a block that
//     others share is copied then.
//  2. No position is asked for twice, so that every one is a miss and in the plan.
//
// Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/replay/row_device.h"
#include "client/session.h"

namespace stoker::replay {

class BlockFinder {
 public:
  // Attaches beside a session that was attached with `beside`.
  static absl::StatusOr<std::unique_ptr<BlockFinder>> Attach(const client::Client& client,
                                                             const v1::AttachRequest& beside, uint32_t block_rows);

  // Opens what that session has admitted as `sequence` with this item, whose key is not empty.
  absl::Status Open(const v1::AdmitItem& item, const OpenSequence& sequence);
  // After that session has released them.
  absl::Status Release(absl::Span<const uint64_t> ids);

  // Learns all blocks that can be known when `rows` rows are stored.
  absl::Status Learn(const OpenSequence& sequence, uint32_t rows);
  // -1: the position's block is not known yet. The sequence is open.
  int32_t PoolRow(const OpenSequence& sequence, uint32_t position) const {
    const std::vector<int32_t>& blocks = known_[sequence.state_row].blocks;
    const uint32_t block = position / block_rows_;
    return block < blocks.size()
               ? blocks[block] * static_cast<int32_t>(block_rows_) + static_cast<int32_t>(position % block_rows_)
               : -1;
  }

 private:
  struct Known {
    uint64_t id = 0;  // in the finder's session
    std::vector<int32_t> blocks;
  };

  BlockFinder(uint32_t state_rows, uint32_t block_rows) : block_rows_(block_rows), known_(state_rows) {}

  const uint32_t block_rows_;
  std::unique_ptr<client::Session> session_;
  std::vector<Known> known_;                              // by state row of the other session
  absl::flat_hash_map<uint64_t, uint32_t> state_row_of_;  // by id in the other session
};

}  // namespace stoker::replay
