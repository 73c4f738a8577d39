// What core needs from the machine: memory for pools and sessions, and work on it. Implemented by server/engine.
//
// Work of one session runs in the order in which it is enqueued, asynchronously. The calls return at once; memory that
// a *Work points to must live until a later Notify has called back. A status that a call returns means that it enqueued
// nothing.
//
// Thread safety: an Engine may be used by any thread; a SessionStorage by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/core/ids.h"
#include "server/core/pool.h"
#include "server/core/sequence_word.h"
#include "server/core/tensor.h"

namespace stoker::core {

enum class IndexSpace : uint8_t { kUnspecified = 0, kPosition = 1, kPoolRow = 2 };

// How the engine is to map the session's arena. Values are those of ArenaSharing in sessions.proto.
enum class ArenaSharing : uint8_t { kUnspecified = 0, kIpcHandle = 1, kDescriptor = 2 };

// The largest number of a call with an order.
inline constexpr uint64_t kMaxOrder = uint64_t{1} << 62;

// How many entries ended how; the order of LookupCounts in residency.proto.
inline constexpr int kOutcomeCount = 6;

struct SessionSpec {
  std::string pool;
  std::string name;
  std::string device;   // one of Engine::devices; empty: the first
  bool direct = false;  // on the direct plane
  ArenaSharing arena_sharing = ArenaSharing::kUnspecified;
  int64_t state_rows = 0;
  int64_t hot_rows = 0;
  int64_t max_top_k = 0;
  int64_t max_batch_rows = 0;  // 0: state_rows
  int64_t max_sequence_rows = 0;
  IndexSpace index_space = IndexSpace::kUnspecified;
  std::vector<std::vector<int32_t>> groups;  // layers of each group
  int64_t staging_bytes = 0;
  int64_t max_reserved_blocks = 0;  // 0: the daemon's limit
  bool ordered_calls = false;
};

// One array of the arena that a client may map.
struct ArenaTensor {
  std::string name;
  uint64_t offset_bytes = 0;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> stride_bytes;
  std::string element;
};

// Where the client of a session on the direct plane finds the pool, in the memory that is behind the pool's
// descriptors.
struct DirectLayout {
  std::vector<uint64_t> part_bytes;  // of each descriptor: their memory lies side by side
  bool cuda = false;                 // to be imported with cuMemImportFromShareableHandle, else files
  uint64_t layer_stride_bytes = 0;
  uint64_t words_offset_bytes = 0;
  uint64_t words = 0;
  uint64_t result_offset_bytes = 0;  // kernels::PlaneResult
  int32_t max_copy_blocks = 0;       // of a step's launch; 0: no limit
  int64_t max_copy_bytes = 0;        // likewise
};

struct ArenaLayout {
  uint64_t size_bytes = 0;
  std::string ipc_handle;         // cudaIpcMemHandle_t of the arena; empty where it has none
  bool has_descriptor = false;    // SessionStorage::arena_descriptor is one,
  uint64_t allocation_bytes = 0;  //   of a CUDA allocation with so many bytes; 0: of a file
  std::optional<DirectLayout> direct;
  std::vector<ArenaTensor> tensors;
  int32_t region_rows = 0;
  int32_t newest_row = 0;
};

struct StepRowWork {
  int32_t state_row = -1;  // -1: padding
  int64_t length = 0;
  int32_t newest_index = 0;            // which row of the newest block is this batch row's newest
  bool commit = false;                 // first copy the newest row to the pool,
  int64_t commit_pool_row = -1;        //   here
  const char* newest_bytes = nullptr;  // [layer][row bytes], or null
  absl::Span<const int32_t> resident_pages;
};

struct StepGroupWork {
  int32_t group = 0;
  const int32_t* indices = nullptr;  // [rows][top_k]; null: the mailbox
  int32_t* hot_rows = nullptr;       // [rows][top_k] out; null: the mailbox
  int32_t* counts = nullptr;         // [rows][kOutcomeCount] out
  bool gather = true;
  int32_t* miss_pool_rows = nullptr;  // [rows][top_k] out, optional, with the next two
  int32_t* miss_hot_rows = nullptr;
  int32_t* miss_counts = nullptr;  // [rows]
};

// Totals since the session began.
struct DeviceTotals {
  uint64_t evictions = 0;
  uint64_t lru_repairs = 0;
  uint64_t gathered_bytes = 0;
};

struct StepWork {
  std::vector<StepRowWork> rows;
  std::vector<StepGroupWork> groups;
  int32_t top_k = 0;
  // Out.
  DeviceTotals totals;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
  // The engine's own copies of arguments.
  std::vector<int32_t> scratch;
};

// Whole rows of all layers between the pool and either bytes in host memory or the staging area, [layer][row][bytes].
// Where the session has a bounce(), bytes in host memory are memory of it.
struct RowsWork {
  std::vector<int32_t> pool_rows;
  const char* source_bytes = nullptr;  // store from here, or
  char* target_bytes = nullptr;        // load to here, or
  int64_t staging_offset = -1;         // the staging area
};

// Whole rows of all layers between the pool and tensors that together have all of its parts.
struct TensorWork {
  std::vector<int32_t> pool_rows;
  std::vector<int32_t> tensor_rows;
  std::vector<const Tensor*> tensors;
};

// Rows of listed layers to host memory, [layer][row][bytes]; memory of the session's bounce(), where it has one.
struct ReadWork {
  std::vector<int32_t> layers;
  std::vector<int32_t> rows;  // pool rows, or rows of the session's hot cache
  bool from_hot_cache = false;
  char* target_bytes = nullptr;
};

struct CommitWork {
  std::vector<int32_t> hot_rows;
  std::vector<int32_t> pool_rows;
};

struct InvalidateWork {
  std::vector<int32_t> state_rows;
  std::vector<int64_t> keys;
};

// Host memory that a device reaches, and a thread that copies to and from it, for a device that does not reach the
// memory of messages. Bounded: who asks while it is in use waits for his turn, without a thread.
//
// Thread safety: any thread.
class Bounce {
 public:
  // Gives itself back when its last owner lets go of it.
  using Memory = std::shared_ptr<char>;

  virtual ~Bounce() = default;
  // The most that can be taken at a time.
  virtual int64_t capacity_bytes() const = 0;
  // Calls `taken` with `bytes` (at most capacity_bytes) of memory when that much is free, in the order of the calls, on
  // the copying thread.
  virtual void Take(int64_t bytes, absl::AnyInvocable<void(Memory) &&> taken) = 0;
  // Calls `copy` on the copying thread.
  virtual void Post(absl::AnyInvocable<void() &&> copy) = 0;
};

// Why the server plane of a session has ended. Values are those of PlaneEnd in sessions.proto.
enum class PlaneEnd : uint8_t { kRunning = 0, kDisarmed = 1, kTimedOut = 2, kBadStep = 3 };

struct PlaneEnding {
  PlaneEnd why = PlaneEnd::kDisarmed;
  uint64_t step = 0;    // the one that ran, or was waited for
  absl::Status device;  // not OK: the device failed, and `why` means nothing
};

// What a server plane has done since it was armed.
struct PlaneSample {
  uint64_t steps = 0;
  uint64_t lookups[kOutcomeCount] = {};
  uint64_t committed_rows = 0;
  DeviceTotals totals;
  // Of the step that was finished last: from its first doorbell to its end.
  uint64_t step_ns = 0;
};

struct PlaneSetup {
  SessionId session;
  int32_t top_k = 0;
  absl::Duration doorbell_timeout;
  // After each step, one call at a time, from a thread of the backend. Must not block.
  std::function<void(const PlaneSample&)> stepped;
  // Once, likewise, when nothing of the plane runs any more.
  absl::AnyInvocable<void(PlaneEnding) &&> ended;
};

// Ends the waits of a session's work for the engine, those that come later as well. Behind them Store, Load, Commit and
// the commits of Step move no rows, and the daemon word is not raised.
//
// Thread safety: any thread, also when the session's storage is gone.
class OrderAbort {
 public:
  virtual ~OrderAbort() = default;
  // Waits for nothing. To be called again until nothing waits: the engine may set its word back.
  virtual void Abort() = 0;
};

class SessionStorage {
 public:
  // Waits for the session's work, then frees its memory. The server plane has ended.
  virtual ~SessionStorage() = default;

  virtual const ArenaLayout& arena() const = 0;
  // Descriptor of the arena's memory, or -1. Owned by the storage.
  virtual int arena_descriptor() const = 0;
  // Of a session on the direct plane: descriptors of the pool's memory, owned by the pool.
  virtual absl::Span<const int> pool_descriptors() const = 0;
  // Likewise: what its steps have done. Any thread; the numbers are the engine's.
  virtual PlaneSample DirectSample() const = 0;
  // Likewise: no step that begins from now on finds a sequence. The next Notify waits for a step that is in flight, not
  // longer than `limit`, and not at all where the engine is gone.
  virtual absl::Status EndDirect(bool engine_gone, absl::Duration limit) = 0;
  // Null where the device reaches all host memory. Outlives the storage.
  virtual Bounce* bounce() const = 0;

  // Of a session with ordered calls; null for others, and then the next two are not called.
  virtual std::shared_ptr<OrderAbort> order_abort() const = 0;
  // What is enqueued from now on begins when the engine word has come to `number`.
  virtual absl::Status AwaitOrder(uint64_t number) = 0;
  // Raises the daemon word to `number` behind the work enqueued so far, unless a wait of it was aborted.
  virtual absl::Status SignalOrder(uint64_t number) = 0;
  // See kernels::Stream::backlog.
  virtual int64_t backlog() const = 0;
  // By how much it grows, at most, with a Store or Load of so many rows, or with one of tensors.
  virtual int64_t PiecesOf(int64_t rows, absl::Span<const Tensor* const> tensors) const = 0;

  // Gives a state row its sequence and block table. The state row is empty.
  virtual absl::Status Open(int32_t state_row, SequenceId id, absl::Span<const int32_t> table) = 0;
  // Changes entries of it. `replaced`, empty or as long as `updates`, are the blocks that were there.
  virtual absl::Status UpdateTable(int32_t state_row, absl::Span<const TableUpdate> updates,
                                   absl::Span<const BlockRef> replaced) = 0;
  // Empties the state row.
  virtual absl::Status Close(int32_t state_row) = 0;
  virtual absl::Status CopyBlocks(absl::Span<const BlockCopy> copies) = 0;

  virtual absl::Status Store(const RowsWork& work) = 0;
  virtual absl::Status Load(const RowsWork& work) = 0;
  virtual absl::Status StoreTensors(const TensorWork& work) = 0;
  virtual absl::Status LoadTensors(const TensorWork& work) = 0;
  // Rows pool_rows[i] of the pool to slots first_position + i of the state row, in all groups.
  virtual absl::Status LoadHot(int32_t state_row, int32_t first_position, const RowsWork& work) = 0;
  virtual absl::Status Step(StepWork& work) = 0;
  // Copies the rows of the group's last plan, for the listed layers. Adds to *gathered_bytes when done.
  virtual absl::Status Gather(int32_t group, absl::Span<const int32_t> layers, DeviceTotals* totals) = 0;
  virtual absl::Status Commit(const CommitWork& work) = 0;
  virtual absl::Status Invalidate(const InvalidateWork& work) = 0;
  virtual absl::Status Read(const ReadWork& work) = 0;

  // Starts the server plane: from the next Notify on, steps are started by doorbells. Meanwhile Step, Gather and Commit
  // are not called; everything else may be, and what it changes is seen by steps that begin later. An earlier plane has
  // ended.
  virtual absl::Status Arm(PlaneSetup setup) = 0;
  // Lets the plane, if there is one, end: `ended` is called soon, never inside this call.
  virtual void Disarm() = 0;

  // Calls `done` when all work enqueued before is done, with its first error. `done` must not block.
  virtual void Notify(absl::AnyInvocable<void(absl::Status) &&> done) = 0;
  // See kernels::Stream::Hold: work that is enqueued from now on waits for the call of the returned function, which may
  // run it, and `done`, on the calling thread.
  virtual absl::AnyInvocable<void() &&> Hold() = 0;
};

// Where memory of an engine is to be had: by the bytes of a cudaIpcMemHandle_t, or by the descriptor of a file.
struct ClientMemorySource {
  std::string ipc_handle;
  int descriptor = -1;
  // The part of it that is wanted.
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};

class PoolStorage {
 public:
  virtual ~PoolStorage() = default;
  virtual int64_t bytes() const = 0;
  // For Pool::UseWords.
  virtual absl::Span<SequenceWord> sequence_words() = 0;
};

// What the making of a pool's memory is at. In a phase done_bytes grow from 0 to total_bytes.
struct PoolProgress {
  enum class Phase : uint8_t { kFault = 0, kPin = 1 };

  Phase phase = Phase::kFault;
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;
  absl::string_view memory;  // what it is made of, for people
  absl::string_view reason;  // why it is not made of what is preferred, or empty
};

struct PoolPopulation {
  // Whether all pages are faulted in before the pool is handed out. Where devices pin them they are in any case.
  bool populate = false;
  // From any thread, one call at a time. False: stop, with CANCELLED.
  std::function<bool(const PoolProgress&)> progress;
};

class Engine {
 public:
  virtual ~Engine() = default;
  // "cpu", or UUIDs of GPUs. At least one.
  virtual const std::vector<std::string>& devices() const = 0;
  // Whether kernels of the daemon and of engines run side by side on every GPU (MPS). False where there is none.
  virtual bool MpsEnabled() const = 0;
  // Why sessions on the device can have no server plane; empty where they can.
  virtual std::string NoServerPlane(absl::string_view device) const = 0;
  // Why sessions on the device can have no arena that is shared so; empty where they can.
  virtual std::string NoArenaSharing(absl::string_view device, ArenaSharing sharing) const = 0;
  // Why sessions of this pool can have no direct plane; empty where they can.
  virtual std::string NoDirectPlane(const PoolStorage& pool) const = 0;
  // Whether an arena there that is not by descriptor is another session's memory later.
  virtual bool RecyclesArenas(absl::string_view device) const = 0;
  // Why sessions on the device can have no ordered calls; empty where they can.
  virtual std::string NoOrderedCalls(absl::string_view device) const = 0;
  // Bytes that CreatePool and CreateSession would take.
  virtual absl::StatusOr<int64_t> PoolBytes(const PoolSpec& spec) const = 0;
  virtual absl::StatusOr<int64_t> SessionBytes(const PoolSpec& pool, const SessionSpec& spec) const = 0;
  // For sessions on all devices. Can take a second for each GB.
  virtual absl::StatusOr<std::unique_ptr<PoolStorage>> CreatePool(const PoolSpec& spec,
                                                                  const PoolPopulation& population) = 0;
  // On spec.device, which is one of devices(). `pool` must outlive the session.
  virtual absl::StatusOr<std::unique_ptr<SessionStorage>> CreateSession(const PoolSpec& pool_spec, PoolStorage& pool,
                                                                        const SessionSpec& spec) = 0;
  // Memory of an engine, for sessions on that device. May take a system call's time. The statuses of RegisterTensor in
  // sessions.proto.
  virtual absl::StatusOr<std::unique_ptr<ClientMemory>> MapClientMemory(const std::string& device,
                                                                        const ClientMemorySource& source) = 0;
};

}  // namespace stoker::core
