// Keeps the ranks of one engine in step. Rank 0 decides what the engine does, as the scheduler of a tensor-parallel
// engine does, and tells the others in order; they do the same with their own sessions.
//
// Only admissions are acknowledged: rank 0 must not end a sequence before all ranks have opened it, or its key would
// name a new one. Steps are not, so ranks work at the same time.
//
// Thread safety: each end belongs to one thread of one process.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/arena.h"

namespace stoker::replay {

enum class RankCommand : uint32_t {
  kAdmit = 1,    // open the sequence of this request and add it to the batch
  kStep = 2,     // decode one token of all sequences
  kRelease = 3,  // release the sequences that have ended
  kEnd = 4,
};

struct RankMessage {
  RankCommand command = RankCommand::kEnd;
  uint32_t request = 0;
};

// Rank 0's ends.
class FollowerLinks {
 public:
  void Add(client::FileDescriptor socket) { sockets_.push_back(std::move(socket)); }
  bool empty() const { return sockets_.empty(); }
  // CANCELLED: a rank has gone.
  absl::Status Send(RankMessage message);
  // Waits until every rank has done what was sent last.
  absl::Status AwaitAcknowledgements();

 private:
  std::vector<client::FileDescriptor> sockets_;
};

// The end of another rank.
class LeaderLink {
 public:
  explicit LeaderLink(client::FileDescriptor socket) : socket_(std::move(socket)) {}
  // CANCELLED: rank 0 has gone.
  absl::StatusOr<RankMessage> Receive();
  absl::Status Acknowledge();

 private:
  client::FileDescriptor socket_;
};

struct RankLinkPair {
  client::FileDescriptor leader;
  client::FileDescriptor follower;
};
absl::StatusOr<RankLinkPair> MakeRankLink();

}  // namespace stoker::replay
