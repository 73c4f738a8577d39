// DevicePlane: the engine's side of a session that is armed and whose arena is on a GPU. What it does in a step are
// kernels on the engine's own stream, so that nothing is called for a step, and all of it can be captured in a graph.
//
//   DevicePlane::SetUpProcess();  // first of all
//   auto plane = DevicePlane::Arm(session, top_k);
//   (*plane)->PublishBatch(batch, stream);
//   for each index group, in order:
//     (*plane)->PublishEntries(group, entries, stride, stream);   // or: write the mailbox (Arena::Indices), and
//                                                                 // (*plane)->Ring(group, stream)
//     (*plane)->Await(group, stream);
//     kernels that read the rows that the hot rows (Arena::HotRows) name
//   kernels that write the newest rows, at the latest now;
//   (*plane)->PublishCommits(commits, stream);
//   (*plane)->RingCommit(stream);
//   (*plane)->AwaitCommit(stream);
//   on the host, now and then, when the stream's work is done: (*plane)->status()
//
// Kernels of the engine may ring and wait themselves: view(), and doorbell.cuh. The number of the step is in device
// memory, and PublishBatch raises it: a graph of one step is launched for each step. Steps may be enqueued ahead; the
// memory that they read their batch from must then be theirs.
//
// In device_plane.cc, or device_plane_none.cc in a build without CUDA. ServerPlane (server_plane.h) is its counterpart
// for arenas in host memory.
//
// Thread safety: belongs to one thread; the session may be used by others meanwhile. It must outlive the plane. A
// thread of the plane's own watches the session, and never calls CUDA.
//
// Invariants:
//  1. Each wait has a bound: `wait_limit`, and less than kWatchPeriod and some 100 us more once the session has ended,
//     is detached, was armed or attached anew, or the plane has ended.
//  2. After a wait that failed nothing is published, rung or waited for any more: what was enqueued ahead runs through
//     at once, and status() has the reason. The session may be armed anew.
//     Of both: under MPS a daemon that is killed can take this process's context along; then the stream ends with an
//     error of CUDA's, and nothing of it can be used any more.
//  3. A step whose kernels are enqueued in the order above gives the daemon no cause to end the plane but time. The
//     order is the caller's affair: out of order, steps give wrong rows to nobody but the engine.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/doorbell.h"
#include "client/session.h"

// The runtime's cudaStream_t is a pointer to it: no header of CUDA's is needed here.
struct CUstream_st;

namespace stoker::client {

struct DevicePlaneOptions {
  // How long a wait for the daemon may last on the GPU. Zero: without a limit, but for the end of session and plane.
  absl::Duration wait_limit = absl::Seconds(30);
  CallOptions arm;
};

// Where the batch of a step is read from when its kernels run: device memory, or pinned host memory.
struct DeviceBatch {
  const int32_t* rows = nullptr;  // [1]: 0 to max_batch_rows, padding included
  // [max_batch_rows], of which *rows are read.
  const uint64_t* sequence_ids = nullptr;  // 0: padding
  const int32_t* state_rows = nullptr;     // as Admit gave it
  const int32_t* lengths = nullptr;        // as StepRow.length
};

class DevicePlane {
 public:
  // Between two looks at the session.
  static constexpr absl::Duration kWatchPeriod = absl::Milliseconds(100);

  // Asks the driver, by the environment, for what streams that wait need: kernels that are loaded eagerly, and 8
  // connections under MPS, so that up to 8 streams of the process run beside one another. Leaves alone what the
  // environment says already. To be called before anything else that uses CUDA, and before threads are started.
  static void SetUpProcess();

  // Puts the session on the server plane, with top_k entries for each batch row. Where an older plane of the session is
  // still there, that one is over.
  //
  // FAILED_PRECONDITION: the daemon does not offer the plane (the message is its reason), or the arena is in host
  // memory; the arena's status where it is not mapped; RESOURCE_EXHAUSTED: as many sessions as may be are armed;
  // UNIMPLEMENTED: this build of the client has no CUDA; other errors as Residency.Arm and of the runtime. INTERNAL:
  // the daemon does not keep to the protocol.
  static absl::StatusOr<std::unique_ptr<DevicePlane>> Arm(Session& session, uint32_t top_k,
                                                          const DevicePlaneOptions& options = {});
  // Ends the waits, then disarms as ~ServerPlane. What the caller has enqueued must be done, or be such that it ends
  // when waits do; no graph that was captured here may be launched afterwards. Freeing pinned memory waits for this
  // process's work on the GPU.
  virtual ~DevicePlane() = default;

  // These enqueue on the stream, which is of the arena's GPU, and wait for nothing. Status: of the launch alone.
  // OUT_OF_RANGE: no such group; INVALID_ARGUMENT: a null pointer.
  //
  // Begins a step: raises its number, and writes its batch. Sequences may be admitted or released between steps.
  virtual absl::Status PublishBatch(const DeviceBatch& batch, CUstream_st* stream) = 0;
  // Writes top_k entries of each batch row, which are `stride` elements apart, and rings.
  virtual absl::Status PublishEntries(uint32_t group, const int32_t* entries, uint64_t stride, CUstream_st* stream) = 0;
  // Says that the entries of the group, which kernels before this on the stream have written, are there.
  virtual absl::Status Ring(uint32_t group, CUstream_st* stream) = 0;
  // Lets what follows on the stream wait until the hot rows of the group are there.
  virtual absl::Status Await(uint32_t group, CUstream_st* stream) = 0;
  // One flag for each batch row, in memory as the batch's: not 0 stores the newest row. Null: none is stored.
  virtual absl::Status PublishCommits(const int32_t* commits, CUstream_st* stream) = 0;
  virtual absl::Status RingCommit(CUstream_st* stream) = 0;
  // Lets what follows wait until that is done: then newest rows may be overwritten.
  virtual absl::Status AwaitCommit(CUstream_st* stream) = 0;
  // Copies the statuses of all max_batch_rows rows (v1::BatchRowStatus) to pinned host memory: as rows of the batch
  // behind Await(0), with their commits behind AwaitCommit. Those at or above the batch's rows are of earlier steps.
  virtual absl::Status CopyStatuses(int32_t* target, CUstream_st* stream) = 0;

  // Ends the waits, without a call: what is enqueued runs through. The plane is over.
  virtual void Abort() = 0;
  // Ends the plane, in the middle of a step or after an error as well, and gives the number of steps that were
  // finished. As ServerPlane::Disarm.
  virtual absl::StatusOr<uint64_t> Disarm(const CallOptions& options = {}) = 0;

  // OK while steps can be made and no wait has failed; the error after which the plane is over. Of a step, once what
  // was enqueued for it is done. DEADLINE_EXCEEDED: a wait took longer than wait_limit, or the plane has ended because
  // this side was late (doorbell_timeout()); UNAVAILABLE: the daemon is gone, or has disarmed the session; the status
  // of the session's end; INTERNAL: the daemon does not keep to the protocol.
  virtual absl::Status status() = 0;
  // Number of the last step whose AwaitCommit is done.
  virtual uint64_t finished_step() const = 0;

  // For kernels of the engine that ring and wait themselves.
  virtual const DoorbellView& view() const = 0;
  // Holds the newest rows and everything else, at device addresses. Of the generation that was armed.
  virtual const Arena& arena() const = 0;
  virtual uint32_t top_k() const = 0;
  virtual uint32_t groups() const = 0;
  // Number of the first step since Arm.
  virtual uint64_t first_step() const = 0;
  // The daemon ends the plane where, inside a step, so much time passes from its answer to the next doorbell.
  virtual absl::Duration doorbell_timeout() const = 0;

 protected:
  DevicePlane() = default;
  // What Session lets a plane know.
  static uint64_t ArmCalls(const Session& session) { return session.arm_calls(); }
};

}  // namespace stoker::client
