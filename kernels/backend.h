// The interface that the CPU and the CUDA implementation share: memory, streams, and the operations on them.
//
// Everything enqueued on a stream runs in order and asynchronously; the call returns at once. Arguments are copied, the
// memory that they point to must live until the work is done. A status that such a call returns is about the arguments
// or about the device; an error of the work itself comes out of Notify.
//
// Thread safety: a Backend may be used by any thread. A Stream may be used by any thread, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gather.h"
#include "kernels/invalidate.h"
#include "kernels/order_word.h"
#include "kernels/plane.h"
#include "kernels/resolve.h"
#include "kernels/resolve_gather.h"
#include "kernels/transfer.h"

namespace stoker::kernels {

// How another process maps a buffer's memory.
struct ExportedMemory {
  enum class Kind : uint8_t {
    kNone = 0,
    kFile = 1,            // a file to mmap
    kCudaAllocation = 2,  // allocations to import with cuMemImportFromShareableHandle
  };
  struct Part {
    int descriptor = -1;  // owned by the buffer; cannot be shrunk or grown
    size_t bytes = 0;     // of the mapping: a whole number of pages
  };
  Kind kind = Kind::kNone;
  std::vector<Part> parts;  // they lie one behind the other
};

// Owns memory. Freed by the destructor, which must not run before the work that uses it is done.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual std::byte* data() const = 0;
  virtual size_t bytes() const = 0;
  // Descriptor of the file in which the memory is, or -1: of memory that is one file. Owned by the buffer. It cannot be
  // shrunk or grown.
  virtual int descriptor() const { return -1; }
  // All of it for another process, for as long as the buffer lives.
  virtual ExportedMemory exported() const { return {}; }
  // The bytes of the cudaIpcMemHandle_t by which another process maps the memory, or none.
  virtual std::string_view ipc_handle() const { return {}; }
};

// Memory of another process that this one is to map: see Backend::MapClientMemory.
struct ClientMemory {
  std::string_view ipc_handle;  // the bytes of a cudaIpcMemHandle_t, or
  int descriptor = -1;          //   a file
  // The part of it that is wanted.
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};

// What the making of a pool is at.
enum class PoolPhase : uint8_t {
  kFault = 0,  // pages are found and zeroed
  kPin = 1,    // and made known to the devices
};

struct PoolProgress {
  PoolPhase phase = PoolPhase::kFault;
  size_t done_bytes = 0;  // of the phase
  size_t total_bytes = 0;
  std::string_view memory;  // what the pool is made of, for people
  std::string_view reason;  // why it is not made of what is preferred, or empty
};

class Backend;

// How another process is to map memory of Backend::AllocateShared.
enum class Sharing : uint8_t {
  kDefault = 0,     // by a descriptor on the CPU, by a handle on a GPU
  kIpcHandle = 1,   // Buffer::ipc_handle. The memory may be kept, and given out again
  kDescriptor = 2,  // Buffer::exported, one part. The memory is no other buffer's, before or after
};

struct PoolOptions {
  // Other backends, of the same kind, that must reach the pool as well.
  std::vector<const Backend*> peers;
  // Faults all pages in before the pool is handed out. A backend that pins does so in any case.
  bool populate = false;
  // Called before and after each piece of work, from several threads, one at a time. In a phase done_bytes begin with
  // 0, only grow and end with total_bytes; when a kind of memory cannot be had after all, all begins anew with the next
  // kind. False ends the allocation with CANCELLED.
  std::function<bool(const PoolProgress&)> progress;
};

// A point in a stream's work.
class Event {
 public:
  virtual ~Event() = default;
  // Whether all work before the event is done.
  virtual bool Done() const = 0;
};

// Operations of a stream that were recorded to be enqueued again and again. Destroyed before its stream, when no work
// of it is under way.
class Program {
 public:
  virtual ~Program() = default;
  // Enqueues all of it.
  virtual absl::Status Enqueue() = 0;
};

class Stream {
 public:
  // Waits for the stream's work.
  virtual ~Stream() = default;

  // Calls `done` once everything enqueued before is done, with the first error of that work since the last Notify.
  // `done` runs on a thread of the backend and must neither block nor destroy the stream.
  virtual void Notify(absl::AnyInvocable<void(absl::Status) &&> done) = 0;
  // Lets work that is enqueued from now on wait until the returned function is called, once, which may be after the
  // stream's end. That call may run some of the work, `done`s included, on its own thread instead of waking another
  // one: its caller must hold no lock that a `done` takes. A backend whose work does not need a thread begins at once.
  virtual absl::AnyInvocable<void() &&> Hold() {
    return [] {};
  }
  // Marks the present end of the work.
  virtual std::shared_ptr<Event> Record() = 0;
  // Work enqueued later begins after the event, which may be another stream's.
  virtual void Wait(std::shared_ptr<Event> event) = 0;
  // Writes the device's time in nanoseconds to *ns (device memory) when the work before it is done.
  virtual void Timestamp(uint64_t* ns) = 0;

  // Copies between host and device memory.
  virtual absl::Status Copy(void* dst, const void* src, size_t bytes) = 0;
  // Writes one aligned word of device memory, whole: work of other streams reads the old value or the new one.
  virtual absl::Status Write(uint64_t* target, uint64_t value) = 0;
  virtual absl::Status Write(int32_t* target, int32_t value) = 0;

  virtual absl::Status Resolve(const ResolveArgs& args) = 0;
  // Resolve, then Gather of its misses; a backend may make one operation of the two.
  virtual absl::Status ResolveGather(const ResolveArgs& resolve, const GatherCompactArgs& gather) {
    if (absl::Status status = Validate(resolve, gather); !status.ok()) return status;
    if (absl::Status status = Resolve(resolve); !status.ok()) return status;
    return Gather(gather);
  }
  // And then RingDoorbell.
  virtual absl::Status ResolveGather(const ResolveArgs& resolve, const GatherCompactArgs& gather,
                                     const RingDoorbellArgs& ring) {
    if (absl::Status status = Validate(ring); !status.ok()) return status;
    if (absl::Status status = ResolveGather(resolve, gather); !status.ok()) return status;
    return RingDoorbell(ring);
  }
  virtual absl::Status Gather(const GatherCompactArgs& args) = 0;
  virtual absl::Status Gather(const GatherDenseArgs& args) = 0;
  virtual absl::Status Transfer(const TransferArgs& args) = 0;
  virtual absl::Status Invalidate(const InvalidateArgs& args) = 0;
  virtual absl::Status Reset(const ResetArgs& args) = 0;
  virtual absl::Status Place(const PlaceArgs& args) = 0;

  // See plane.h. A wait holds up this stream and no other.
  virtual absl::Status AwaitDoorbell(const AwaitDoorbellArgs& args) = 0;
  virtual absl::Status RingDoorbell(const RingDoorbellArgs& args) = 0;
  virtual absl::Status AwaitQuiet(const AwaitQuietArgs& args) = 0;
  virtual absl::Status BeginBatch(const BatchArgs& args) = 0;
  virtual absl::Status PlanCommits(const BatchArgs& args) = 0;
  virtual absl::Status EndBatch(const BatchArgs& args) = 0;

  // See order_word.h. Not in programs: a number is of one call. A wait holds up this stream and no other; who destroys
  // a stream that may wait releases the word first (Backend::ReleaseOrder).
  virtual absl::Status AwaitOrder(const AwaitOrderArgs& args) = 0;
  virtual absl::Status SignalOrder(const SignalOrderArgs& args) = 0;

  // How many operations were enqueued behind the last Notify that has called back. With some 1,000 of them a device may
  // let the caller of the next one wait.
  virtual int64_t backlog() const { return 0; }

  // Records what `body` enqueues on this stream, without running it. `body` may use the operations, Timestamp, and Copy
  // within device memory and memory of AllocateHost; it is called once or each time, and all that it refers to must
  // outlive the program. An error of `body` comes out of MakeProgram or, where it is called each time, of Enqueue, with
  // what it had enqueued before. The stream's other work is enqueued between programs, never inside `body`.
  virtual absl::StatusOr<std::unique_ptr<Program>> MakeProgram(std::function<absl::Status(Stream&)> body);
};

// A program that calls its body each time: for streams to which a call costs little.
class CalledProgram final : public Program {
 public:
  CalledProgram(Stream* stream, std::function<absl::Status(Stream&)> body) : stream_(stream), body_(std::move(body)) {}
  absl::Status Enqueue() override { return body_(*stream_); }

 private:
  Stream* const stream_;
  const std::function<absl::Status(Stream&)> body_;
};

inline absl::StatusOr<std::unique_ptr<Program>> Stream::MakeProgram(std::function<absl::Status(Stream&)> body) {
  if (body == nullptr) return absl::InvalidArgumentError("program.body: is null");
  return std::make_unique<CalledProgram>(this, std::move(body));
}

class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu", or the UUID of the GPU.
  virtual std::string_view device() const = 0;
  // Whether operations reach pageable host memory, so that bytes of a message need no copy to be read or written.
  virtual bool reaches_pageable_memory() const { return true; }
  // Whether kernels of several processes run side by side (MPS), and not in turns.
  virtual bool shares_contexts() const { return false; }
  // Why a stream must not wait for doorbells here; empty where it may.
  virtual std::string_view no_doorbells() const { return {}; }
  // FAILED_PRECONDITION: with so many streams that wait, for doorbells or order words, others would not go on.
  virtual absl::Status CheckWaitingStreams(int64_t streams) const {
    static_cast<void>(streams);
    return absl::OkStatus();
  }
  // Why a stream must not wait for order words here; empty where it may.
  virtual std::string_view no_order_words() const { return "it has no order words"; }
  // Sets a word of device memory to kReleasedOrder, soon, whatever streams of this backend wait for. Any thread.
  virtual absl::Status ReleaseOrder(uint64_t* /*word*/) {
    return absl::UnimplementedError("word: this device has no order words");
  }
  // Waits until the words of earlier calls of it are set, so that their memory may go.
  virtual absl::Status AwaitReleases() { return absl::OkStatus(); }
  // Why AllocateShared cannot give memory that is shared so; empty where it can.
  virtual std::string_view NoSharing(Sharing sharing) const {
    return sharing == Sharing::kIpcHandle ? "memory there has no handle of CUDA's, but a descriptor" : "";
  }
  // Zeroed host memory for a pool, which the device reads and writes. RESOURCE_EXHAUSTED names asked and available
  // bytes and the limit.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes, const PoolOptions& options) = 0;
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes) { return AllocatePool(bytes, PoolOptions()); }
  // Zeroed device memory that a client can map. RESOURCE_EXHAUSTED; FAILED_PRECONDITION, with the reason: NoSharing.
  // With kIpcHandle and kDefault the handle may be missing nevertheless, where the driver gives none.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes, Sharing sharing) = 0;
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes) {
    return AllocateShared(bytes, Sharing::kDefault);
  }
  // Zeroed device memory that no client can map.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocatePrivate(size_t bytes) = 0;
  // Zeroed host memory that operations and copies of every backend of its kind reach.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) = 0;
  // Maps a client's memory for operations of this backend: data() is where offset_bytes are. The buffer must end before
  // the backend. May take a system call's time. INVALID_ARGUMENT, with field, value and limit: no memory of the kind
  // that the backend maps, or less of it. FAILED_PRECONDITION: memory that its owner can take away. RESOURCE_EXHAUSTED:
  // no address space.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> MapClientMemory(const ClientMemory& /*memory*/) {
    return absl::UnimplementedError("memory: this device maps none of a client's");
  }
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
  // Calls `lost` once, with an UNAVAILABLE status, when the device can no longer be used: all work fails from then on.
  // On any thread, at once if it is so already; `lost` must not block. To be set once. The CPU is never lost.
  virtual void OnLost(absl::AnyInvocable<void(absl::Status) &&> /*lost*/) {}
};

}  // namespace stoker::kernels
