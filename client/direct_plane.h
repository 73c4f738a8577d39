// DirectPlane: steps of a session on the direct plane, which this process runs itself: the daemon's own kernels, on the
// mapped arena and pool. Nothing is called for a step, and the daemon does nothing; it reads the counters that each
// step leaves behind.
//
//   AttachRequest.plane = PLANE_DIRECT (or AttachOnPlane of plane.h);
//   auto plane = DirectPlane::Open(session, top_k);
//
// On the CPU the plane has threads of its own, and calls as ServerPlane has them:
//
//   (*plane)->Begin(rows);
//   for each index group, in order:
//     write (*plane)->Entries(group, row) of every batch row;
//     (*plane)->Group(group);
//     (*plane)->Await(group);
//     read the rows that (*plane)->HotRows(group, row) names
//   write the newest rows, at the latest now;
//   (*plane)->Commit(commits);
//   (*plane)->AwaitCommit();
//
// On a GPU it enqueues on the engine's stream, and the batch, the entries and the commits are written into the arena
// (Arena::Mail, Arena::Indices) by what the engine enqueues there before:
//
//   (*plane)->EnqueueBegin();
//   for each index group, in order: (*plane)->EnqueueGroup(group);
//   (*plane)->EnqueueCommit();
//
// These calls wait for nothing and allocate nothing, and may be captured into a graph.
//
// Security: an engine on this plane has the whole pool mapped, rows of other engines included.
//
// Thread safety: belongs to one thread; the session may be used by others meanwhile. It must outlive the plane.
//
// Invariants:
//  1. On the CPU, calls come in the order above. Any other is FAILED_PRECONDITION and changes nothing, as do wrong
//     arguments.
//  2. Nothing is enqueued when the session has ended, is detached or was attached anew; that ends the plane, and every
//     call from then on gives the reason. Arena and pool stay mapped for as long as the plane lives.
//  3. On the CPU no step is left open: when the plane ends in the middle of one, what remains of it runs without a
//     commit. The daemon waits for open steps when sequences are admitted or released, and at the session's end.
//  4. The destructor waits for the work that was enqueued.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/arena.h"
#include "client/plane_batch.h"
#include "client/session.h"
#include "kernels/backend.h"
#include "kernels/plane_step.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

struct DirectPlaneOptions {
  // On the CPU: threads that run the steps, 1 to 256. One for each index group that is in flight is of no use: groups
  // follow each other.
  int threads = 1;
  // On a GPU: the engine's stream, of the session's GPU. It must outlive the plane.
  CUstream_st* stream = nullptr;
  // Bound of AwaitAttached.
  absl::Duration timeout = absl::Seconds(30);
};

class DirectPlane {
 public:
  // How long a wait for a step lasts that does not say otherwise.
  static constexpr absl::Duration kDefaultTimeout = absl::Seconds(30);

  // With top_k entries for each batch row. One plane at a time for each session.
  //
  // FAILED_PRECONDITION: the session is not on the direct plane, or has a DirectPlane already; INVALID_ARGUMENT: top_k,
  // threads, or no stream for a session on a GPU; UNIMPLEMENTED: that, and this build of the client has no CUDA;
  // INTERNAL: the daemon's description of the memory cannot be.
  static absl::StatusOr<std::unique_ptr<DirectPlane>> Open(Session& session, uint32_t top_k,
                                                           const DirectPlaneOptions& options = {});
  // On a GPU it waits for the stream, which also ends graphs that were launched there; those on other streams must have
  // ended, and none may be launched afterwards.
  ~DirectPlane();
  DirectPlane(const DirectPlane&) = delete;
  DirectPlane& operator=(const DirectPlane&) = delete;

  // On the CPU. On a GPU these calls are FAILED_PRECONDITION, and what gives views must not be called.
  //
  // Begins a step with these rows, at most max_batch_rows of them: INVALID_ARGUMENT otherwise, and for a number that
  // does not fit. Sequences may have been admitted or released since the step before. UNAVAILABLE, or the status of the
  // session's end: see invariant 2.
  absl::Status Begin(absl::Span<const PlaneRow> rows);
  // The top_k entries of a batch row: to be written before Group(group), and left alone until Await(group) has
  // returned. `group` and `row` are not checked.
  absl::Span<int32_t> Entries(uint32_t group, size_t row) const { return batch_.Entries(group, row); }
  // Enqueues the group's resolve and gather.
  absl::Status Group(uint32_t group);
  // Waits until they are done. The first one of a step brings statuses(). DEADLINE_EXCEEDED: not within `timeout`; then
  // the plane is over.
  absl::Status Await(uint32_t group, absl::Duration timeout = kDefaultTimeout);
  // Valid from Await(group) to the next step's Group(group).
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const { return batch_.HotRows(group, row); }
  int32_t Misses(uint32_t group, size_t row) const { return batch_.Misses(group, row); }
  // Enqueues the end of the step. The newest rows are written; one flag for each batch row, not 0 for those that are to
  // be stored, or none at all. Only the session that writes a sequence may store its rows.
  absl::Status Commit(absl::Span<const int32_t> commits);
  // Waits until that is done: now the newest rows may be overwritten. Brings statuses(). Errors as Await.
  absl::Status AwaitCommit(absl::Duration timeout = kDefaultTimeout);
  // How each row of the step was taken: as a row of the batch from Await(0) on, and with its commit from AwaitCommit
  // on. A row that failed was padding, and does not end the plane.
  absl::Span<const v1::BatchRowStatus> statuses() const { return batch_.statuses(); }
  // The first of them that is not OK, as a status.
  absl::Status FirstRowError() const { return batch_.FirstRowError(); }
  // Number of the step that is under way, or comes next.
  uint64_t step() const { return batch_.step(); }

  // On a GPU, see above; on the CPU FAILED_PRECONDITION. A step that was begun must be ended by EnqueueCommit. The
  // order is the caller's affair: steps out of order give wrong rows to nobody but the engine. OUT_OF_RANGE: no such
  // group. In a graph, invariant 2 holds when it is captured: ask status() before each launch.
  absl::Status EnqueueBegin();
  absl::Status EnqueueGroup(uint32_t group);
  absl::Status EnqueueCommit();

  // OK while steps can be made; the reason for which the plane is over. Looks at the session.
  absl::Status status();
  // Holds the newest rows and everything else. Of the generation in which the plane was opened.
  const Arena& arena() const { return *arena_; }
  uint32_t top_k() const { return static_cast<uint32_t>(step_.memory().batch.top_k); }

 private:
  using Call = PlaneBatch::Call;

  DirectPlane(Session& session, Session::DirectLease lease, kernels::PlaneMemory memory);
  absl::Status OpenOnHost(int threads);
  absl::Status CheckSession() const;
  // OK where this call, of a session on the CPU, is the next one.
  absl::Status Expect(Call call, size_t doorbell);
  // OK where this call, of a session on a GPU, may enqueue.
  absl::Status CheckOnDevice();
  // `enqueued`, which ends the plane where it is not OK.
  absl::Status Enqueued(absl::Status enqueued);
  absl::Status CommitAndReport();
  absl::Status AwaitWork(absl::Duration timeout);
  absl::Status End(absl::Status why);
  // Runs what is left of the step, without a commit.
  void CloseStep();

  Session& session_;
  const std::shared_ptr<const Arena> arena_;
  const std::shared_ptr<const PoolMapping> pool_;
  const std::shared_ptr<std::atomic<bool>> taken_;  // true while this plane lives
  const uint64_t generation_;
  const kernels::PlaneStep step_;
  kernels::PlaneResult* const result_;
  PlaneBatch batch_;  // on the CPU

  absl::Status status_;
  bool step_is_open_ = false;                           // begun, its end not enqueued
  absl::AnyInvocable<absl::Status()> wait_for_stream_;  // on a GPU
  // Last: the stream's destructor waits for work that uses the rest.
  std::unique_ptr<kernels::Backend> backend_;  // on the CPU
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace stoker::client
