// What a write that replaced blocks or rewrote rows means for the other sessions that have the sequence open.
#pragma once

#include <cstdint>
#include <vector>

#include "server/core/session.h"

namespace stoker::core {

struct Session::WriteFollowUp {
  SequenceId id;
  std::vector<SessionId> sessions;
  std::vector<TableUpdate> updates;
  std::vector<BlockRef> replaced;
  int64_t rewritten_first = 0;
  int64_t rewritten_count = 0;
  std::vector<int32_t> rewritten_pool_rows;
};

}  // namespace stoker::core
