// ServerPlane: the engine's side of a session that is armed and whose arena is in host memory. Its steps are started by
// doorbells in the arena, and nothing is called for them (sessions.proto, ArenaLayout).
//
//   auto plane = ServerPlane::Arm(session, top_k);
//   (*plane)->Begin(rows);
//   for each index group, in order:
//     write (*plane)->Entries(group, row) of every batch row;
//     (*plane)->Ring(group);
//     (*plane)->Await(group);
//     read the rows that (*plane)->HotRows(group, row) names
//   write the newest rows, at the latest now;
//   (*plane)->Commit(commits);
//   (*plane)->AwaitCommit();
//
// A session on a GPU has its doorbells in device memory, and the engine's kernels ring them: no ServerPlane.
//
// Thread safety: belongs to one thread; the session may be used by others meanwhile. It must outlive the plane.
//
// Invariants:
//  1. Calls come in the order above. Any other is FAILED_PRECONDITION and changes nothing, as do wrong arguments.
//  2. Each wait has a bound: its timeout, and less where the plane or the session has ended.
//  3. After any other error the plane is over: every call but Disarm gives that error. The session may be armed anew.
//  4. A doorbell is rung only with the number of the step, and only when all before it have been answered: whatever the
//     caller does, the daemon has no cause to end the plane but time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/plane_batch.h"
#include "client/session.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

class ServerPlane {
 public:
  // How long a wait for the daemon lasts that does not say otherwise.
  static constexpr absl::Duration kDefaultTimeout = absl::Seconds(30);

  // Puts the session on the server plane, with top_k entries for each batch row. Where an older plane of the session is
  // still there, that one is over.
  //
  // FAILED_PRECONDITION: the daemon does not offer the plane (the message is its reason), or the arena is on a GPU; the
  // arena's status where it is not mapped; RESOURCE_EXHAUSTED: as many sessions as may be are armed; other errors as
  // Residency.Arm. INTERNAL: the daemon does not keep to the protocol.
  static absl::StatusOr<std::unique_ptr<ServerPlane>> Arm(Session& session, uint32_t top_k,
                                                          const CallOptions& options = {});
  // Disarms, unless the plane is over or was disarmed: then the session is left as it is.
  ~ServerPlane();
  ServerPlane(const ServerPlane&) = delete;
  ServerPlane& operator=(const ServerPlane&) = delete;

  // Begins a step with these rows, at most max_batch_rows of them: INVALID_ARGUMENT otherwise, and for a number that
  // does not fit. Sequences may have been admitted or released since the step before.
  absl::Status Begin(absl::Span<const PlaneRow> rows);
  // The top_k entries of a batch row: to be written before Ring(group), and left alone until Await(group) has returned.
  // `group` and `row` are not checked.
  absl::Span<int32_t> Entries(uint32_t group, size_t row) const { return batch_.Entries(group, row); }
  // Says that all entries of the group are written.
  absl::Status Ring(uint32_t group);
  // Waits until the hot rows of the group are there. The first one of a step brings statuses().
  //
  // DEADLINE_EXCEEDED: not within `timeout`, or the plane has ended because this side was late (doorbell_timeout());
  // UNAVAILABLE: the daemon is gone, or has disarmed the session; the status of the session's end; INTERNAL: the daemon
  // does not keep to the protocol.
  absl::Status Await(uint32_t group, absl::Duration timeout = kDefaultTimeout);
  // Valid from Await(group) to the next step's Ring(group).
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const { return batch_.HotRows(group, row); }
  int32_t Misses(uint32_t group, size_t row) const { return batch_.Misses(group, row); }
  // Says that the newest rows are written, and which of them are to be stored: one flag for each batch row, not 0 for
  // those that are, or none at all. Only the session that writes a sequence may have its rows stored.
  absl::Status Commit(absl::Span<const int32_t> commits);
  // Waits until that is done: now the newest rows may be overwritten. Brings statuses(). Errors as Await.
  absl::Status AwaitCommit(absl::Duration timeout = kDefaultTimeout);

  // How the daemon took each row of the step: as a row of the batch from Await(0) on, and with its commit from
  // AwaitCommit on. A row that failed was padding, and does not end the plane.
  absl::Span<const v1::BatchRowStatus> statuses() const { return batch_.statuses(); }
  // The first of them that is not OK, as a status.
  absl::Status FirstRowError() const { return batch_.FirstRowError(); }

  // Ends the plane, in the middle of a step or after an error as well; then the session's steps are calls again. Gives
  // the number of steps that were finished. Errors as Residency.Disarm: FAILED_PRECONDITION where the daemon has ended
  // the plane itself, and steps are calls already.
  absl::StatusOr<uint64_t> Disarm(const CallOptions& options = {});

  // OK while steps can be made; the error after which the plane is over.
  const absl::Status& status() const { return status_; }
  // Holds the newest rows and everything else. Of the generation that was armed.
  const Arena& arena() const { return *arena_; }
  uint32_t top_k() const { return top_k_; }
  // Number of the step that is under way, or comes next.
  uint64_t step() const { return batch_.step(); }
  // The daemon ends the plane where, inside a step, so much time passes from its answer to the next doorbell.
  absl::Duration doorbell_timeout() const { return doorbell_timeout_; }

 private:
  using Call = PlaneBatch::Call;

  ServerPlane(Session& session, std::shared_ptr<const Arena> arena, uint64_t generation, uint32_t top_k);
  // Makes the views.
  absl::Status Open();
  // Takes what Arm answered.
  absl::Status Start(const v1::ArmResponse& armed);
  // OK where this call is the next one. `doorbell` is the group, or that of the commits.
  absl::Status Expect(Call call, size_t doorbell) const;
  // OK where the session is attached and armed as it was by Arm.
  absl::Status CheckSession() const;
  void RingDoorbell(size_t doorbell);
  absl::Status AwaitDoorbell(size_t doorbell, absl::Duration timeout);
  absl::Status End(absl::Status why);

  Session& session_;
  const std::shared_ptr<const Arena> arena_;
  const uint64_t generation_;
  const uint32_t top_k_;
  PlaneBatch batch_;
  uint64_t arm_call_ = 0;
  absl::Duration doorbell_timeout_;

  absl::Status status_;
  bool disarmed_ = false;
};

}  // namespace stoker::client
