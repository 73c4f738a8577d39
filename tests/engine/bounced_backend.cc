#include "tests/engine/bounced_backend.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"

namespace stoker::engine_test {
namespace {

using kernels::Buffer;
using kernels::Event;
using kernels::Stream;

// The memory that the device reaches.
class Reach {
 public:
  void Add(const std::byte* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[data] = bytes;
  }
  void Remove(const std::byte* data) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(data);
  }
  bool Has(const void* pointer) const {
    const std::lock_guard lock(mutex_);
    const auto* const at = static_cast<const std::byte*>(pointer);
    auto range = ranges_.upper_bound(at);
    return range != ranges_.begin() && (--range)->first + range->second > at;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, size_t> ranges_;
};

constexpr size_t kMaxCopies = 1000;

struct Device {
  explicit Device(std::shared_ptr<Reach> host) : shared(std::move(host)) {}

  const std::shared_ptr<Reach> shared;  // pools and host memory, of all devices
  Reach own;
  std::atomic<bool> lost{false};
  std::mutex mutex;
  absl::AnyInvocable<void(absl::Status) &&> on_lost;  // guarded by mutex
  std::vector<BouncedCopy> copies;                    // guarded by mutex

  // What a wait for an order word looks at in place of the flag that ends it, and the other way round.
  const uint32_t never_aborted = 0;
  uint32_t unread = 0;
  const uint64_t released = kernels::kReleasedOrder;

  void NoteCopy(bool gathers, const kernels::CopyLimits& limits) {
    const std::lock_guard lock(mutex);
    // Nobody takes those of a daemon.
    if (copies.size() < kMaxCopies) copies.push_back({gathers, limits});
  }
  bool Has(const void* pointer) const { return own.Has(pointer) || shared->Has(pointer); }
  absl::Status status() const {
    return lost.load() ? absl::UnavailableError("device is lost: a test took it away") : absl::OkStatus();
  }
};

class ReachedBuffer final : public Buffer {
 public:
  ReachedBuffer(std::shared_ptr<Device> device, std::unique_ptr<Buffer> buffer, bool host)
      : device_(std::move(device)), buffer_(std::move(buffer)), reach_(host ? *device_->shared : device_->own) {
    reach_.Add(buffer_->data(), buffer_->bytes());
  }
  ~ReachedBuffer() override { reach_.Remove(buffer_->data()); }
  std::byte* data() const override { return buffer_->data(); }
  size_t bytes() const override { return buffer_->bytes(); }
  int descriptor() const override { return buffer_->descriptor(); }

 private:
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<Buffer> buffer_;
  Reach& reach_;
};

// As a GPU's arena: the descriptor is of an allocation, not of a file to be mapped.
class AllocationBuffer final : public Buffer {
 public:
  AllocationBuffer(std::unique_ptr<Buffer> buffer, size_t bytes) : buffer_(std::move(buffer)), bytes_(bytes) {}
  std::byte* data() const override { return buffer_->data(); }
  size_t bytes() const override { return bytes_; }
  kernels::ExportedMemory exported() const override {
    return {kernels::ExportedMemory::Kind::kCudaAllocation, {{buffer_->descriptor(), buffer_->bytes()}}};
  }

 private:
  const std::unique_ptr<Buffer> buffer_;
  const size_t bytes_;
};

class BouncedStream final : public Stream {
 public:
  BouncedStream(std::shared_ptr<Device> device, std::unique_ptr<Stream> stream)
      : device_(std::move(device)), stream_(std::move(stream)) {}

  void Notify(absl::AnyInvocable<void(absl::Status) &&> done) override {
    stream_->Notify([device = device_, batch = std::move(batch_), ended = ended_, enqueued = enqueued_,
                     done = std::move(done)](absl::Status status) mutable {
      ended->store(enqueued);
      if (status.ok()) status = device->status();
      for (const Copied& copied : batch) {
        if (status.ok() && copied.target != nullptr) {
          std::memcpy(copied.target, copied.bytes->data(), copied.bytes->size());
        }
      }
      std::move(done)(std::move(status));
    });
    batch_.clear();
  }
  absl::AnyInvocable<void() &&> Hold() override { return stream_->Hold(); }
  std::shared_ptr<Event> Record() override { return stream_->Record(); }
  void Wait(std::shared_ptr<Event> event) override { stream_->Wait(std::move(event)); }
  int64_t backlog() const override { return enqueued_ - ended_->load(); }
  void Timestamp(uint64_t* ns) override {
    ++enqueued_;
    Check("ns", ns);
    stream_->Timestamp(ns);
  }
  absl::Status Copy(void* dst, const void* src, size_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    ++enqueued_;
    const bool from_reach = device_->Has(src), to_reach = device_->Has(dst);
    if (from_reach && to_reach) return stream_->Copy(dst, src, bytes);
    auto staged = std::make_shared<std::vector<std::byte>>(bytes);
    if (!from_reach) std::memcpy(staged->data(), src, bytes);
    batch_.push_back({staged, to_reach ? nullptr : dst});
    return from_reach ? stream_->Copy(staged->data(), src, bytes) : stream_->Copy(dst, staged->data(), bytes);
  }
  absl::Status Write(uint64_t* target, uint64_t value) override {
    Check("write.target", target);
    return stream_->Write(target, value);
  }
  absl::Status Write(int32_t* target, int32_t value) override {
    Check("write.target", target);
    return stream_->Write(target, value);
  }

  absl::Status Resolve(const kernels::ResolveArgs& args) override {
    ++enqueued_;
    Check(args.residency);
    for (const void* pointer :
         {static_cast<const void*>(args.real_rows), static_cast<const void*>(args.entries), args.lengths.data,
          args.state_rows.data, static_cast<const void*>(args.block_table),
          static_cast<const void*>(args.newest_pool_rows), static_cast<const void*>(args.allowed_blocks),
          static_cast<const void*>(args.resident_table), static_cast<const void*>(args.hot_rows_out),
          static_cast<const void*>(args.miss_pool_rows), static_cast<const void*>(args.miss_hot_rows),
          static_cast<const void*>(args.miss_counts), static_cast<const void*>(args.counts),
          static_cast<const void*>(args.stats)}) {
      Check("resolve", pointer);
    }
    return stream_->Resolve(args);
  }
  absl::Status Gather(const kernels::GatherCompactArgs& args) override {
    for (const void* pointer :
         {static_cast<const void*>(args.pool.base), static_cast<const void*>(args.hot.base),
          static_cast<const void*>(args.miss_pool_rows), static_cast<const void*>(args.miss_hot_rows),
          static_cast<const void*>(args.miss_counts), static_cast<const void*>(args.gathered_bytes)}) {
      Check("gather", pointer);
    }
    ++enqueued_;
    device_->NoteCopy(/*gathers=*/true, args.limits);
    return stream_->Gather(args);
  }
  absl::Status Gather(const kernels::GatherDenseArgs& args) override {
    Check("gather.pool", args.pool.base);
    Check("gather.hot", args.hot.base);
    return stream_->Gather(args);
  }
  absl::Status Transfer(const kernels::TransferArgs& args) override {
    Check("transfer.src", args.src.base);
    Check("transfer.dst", args.dst.base);
    Check("transfer.src_rows", args.src_rows);
    Check("transfer.dst_rows", args.dst_rows);
    Check("transfer.skip", args.skip);
    ++enqueued_;
    device_->NoteCopy(/*gathers=*/false, args.limits);
    return stream_->Transfer(args);
  }
  absl::Status Invalidate(const kernels::InvalidateArgs& args) override {
    Check(args.residency);
    Check("invalidate.state_rows", args.state_rows);
    Check("invalidate.keys", args.keys);
    return stream_->Invalidate(args);
  }
  absl::Status Reset(const kernels::ResetArgs& args) override {
    Check(args.residency);
    Check("reset.state_rows", args.state_rows);
    return stream_->Reset(args);
  }
  absl::Status Place(const kernels::PlaceArgs& args) override {
    Check(args.residency);
    return stream_->Place(args);
  }
  absl::Status AwaitDoorbell(const kernels::AwaitDoorbellArgs& args) override {
    Check("await_doorbell.state", args.state);
    Check("await_doorbell.request", args.request);
    Check("await_doorbell.abort", args.abort);
    return stream_->AwaitDoorbell(args);
  }
  absl::Status RingDoorbell(const kernels::RingDoorbellArgs& args) override {
    Check("ring_doorbell.state", args.state);
    Check("ring_doorbell.done", args.done);
    return stream_->RingDoorbell(args);
  }
  absl::Status AwaitQuiet(const kernels::AwaitQuietArgs& args) override {
    Check("await_quiet.state", args.state);
    return stream_->AwaitQuiet(args);
  }
  absl::Status AwaitOrder(const kernels::AwaitOrderArgs& args) override {
    Check("await_order.word", args.word);
    Check("await_order.abort", args.abort);
    Check("await_order.aborted", args.aborted);
    ++enqueued_;
    // As a GPU: the word alone ends the wait, and the flag is looked at behind it.
    kernels::AwaitOrderArgs wait = args;
    wait.abort = &device_->never_aborted;
    wait.aborted = &device_->unread;
    kernels::AwaitOrderArgs look = args;
    look.word = &device_->released;
    if (absl::Status status = stream_->AwaitOrder(wait); !status.ok()) return status;
    return stream_->AwaitOrder(look);
  }
  absl::Status SignalOrder(const kernels::SignalOrderArgs& args) override {
    Check("signal_order.word", args.word);
    Check("signal_order.aborted", args.aborted);
    ++enqueued_;
    return stream_->SignalOrder(args);
  }
  absl::Status BeginBatch(const kernels::BatchArgs& args) override {
    Check(args);
    return stream_->BeginBatch(args);
  }
  absl::Status PlanCommits(const kernels::BatchArgs& args) override {
    Check(args);
    return stream_->PlanCommits(args);
  }
  absl::Status EndBatch(const kernels::BatchArgs& args) override {
    Check(args);
    return stream_->EndBatch(args);
  }

 private:
  struct Copied {
    std::shared_ptr<std::vector<std::byte>> bytes;
    void* target = nullptr;  // null: the bytes went to the device
  };

  void Check(const char* name, const void* pointer) const {
    if (pointer == nullptr || device_->Has(pointer)) return;
    std::fprintf(stderr, "an operation was given memory that the device does not reach: %s\n", name);
    std::abort();
  }
  void Check(const kernels::Residency& residency) const {
    Check("residency.slot_key", residency.slot_key);
    Check("residency.lru", residency.lru);
  }
  void Check(const kernels::BatchArgs& args) const {
    for (const void* pointer : {static_cast<const void*>(args.state),
                                static_cast<const void*>(args.mail.rows),
                                static_cast<const void*>(args.mail.sequence_ids),
                                static_cast<const void*>(args.mail.state_rows),
                                static_cast<const void*>(args.mail.lengths),
                                static_cast<const void*>(args.mail.commits),
                                static_cast<const void*>(args.mail.statuses),
                                static_cast<const void*>(args.plan.rows),
                                static_cast<const void*>(args.plan.state_rows),
                                static_cast<const void*>(args.plan.lengths),
                                static_cast<const void*>(args.plan.newest_pool_rows),
                                static_cast<const void*>(args.plan.newest_hot_rows),
                                static_cast<const void*>(args.plan.words),
                                static_cast<const void*>(args.plan.commit_hot_rows),
                                static_cast<const void*>(args.plan.commit_pool_rows),
                                static_cast<const void*>(args.plan.claims),
                                static_cast<const void*>(args.entries),
                                static_cast<const void*>(args.words),
                                static_cast<const void*>(args.block_table),
                                static_cast<const void*>(args.committed_rows),
                                static_cast<const void*>(args.ended)}) {
      Check("batch", pointer);
    }
  }

  const std::shared_ptr<Device> device_;
  std::vector<Copied> batch_;
  int64_t enqueued_ = 0;  // operations, those that decode steps take
  // Of them, those before the last Notify that has called back.
  const std::shared_ptr<std::atomic<int64_t>> ended_ = std::make_shared<std::atomic<int64_t>>(0);
  const std::unique_ptr<Stream> stream_;  // last: its destructor waits for work that uses the rest
};

class Bounced final : public BouncedBackend {
 public:
  Bounced(std::string name, int threads, std::shared_ptr<Reach> host)
      : name_(std::move(name)),
        device_(std::make_shared<Device>(std::move(host))),
        cpu_(kernels::cpu::MakeCpuBackend(threads)) {}

  ~Bounced() override {
    if (std::getenv("STOKER_TEST_SLOW_END") != nullptr) std::this_thread::sleep_for(std::chrono::hours(1));
  }

  std::string_view device() const override { return name_; }
  bool reaches_pageable_memory() const override { return false; }
  std::string_view no_order_words() const override { return {}; }
  absl::Status ReleaseOrder(uint64_t* word) override { return cpu_->ReleaseOrder(word); }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes, const kernels::PoolOptions& options) override {
    return Reached(cpu_->AllocatePool(bytes, options), true);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes, kernels::Sharing sharing) override {
    if (sharing != kernels::Sharing::kDescriptor) return Reached(cpu_->AllocateShared(bytes, sharing), false);
    constexpr size_t kGranule = size_t{2} << 20;
    absl::StatusOr<std::unique_ptr<Buffer>> buffer =
        Reached(cpu_->AllocateShared((bytes + kGranule - 1) / kGranule * kGranule), false);
    if (!buffer.ok()) return buffer;
    return std::make_unique<AllocationBuffer>(*std::move(buffer), bytes);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePrivate(size_t bytes) override {
    return Reached(cpu_->AllocatePrivate(bytes), false);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    return Reached(cpu_->AllocateHost(bytes), true);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> MapClientMemory(const kernels::ClientMemory& memory) override {
    return Reached(cpu_->MapClientMemory(memory), false);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = cpu_->CreateStream();
    if (!stream.ok()) return stream.status();
    return std::make_unique<BouncedStream>(device_, *std::move(stream));
  }
  void OnLost(absl::AnyInvocable<void(absl::Status) &&> lost) override {
    const std::lock_guard lock(device_->mutex);
    device_->on_lost = std::move(lost);
  }

  std::vector<BouncedCopy> TakeCopies() override {
    const std::lock_guard lock(device_->mutex);
    return std::exchange(device_->copies, {});
  }

  void Lose() override {
    device_->lost = true;
    absl::AnyInvocable<void(absl::Status) &&> lost;
    {
      const std::lock_guard lock(device_->mutex);
      lost = std::move(device_->on_lost);
    }
    if (lost) std::move(lost)(device_->status());
  }

 private:
  absl::StatusOr<std::unique_ptr<Buffer>> Reached(absl::StatusOr<std::unique_ptr<Buffer>> buffer, bool host) {
    if (absl::Status status = device_->status(); !status.ok()) return status;
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<ReachedBuffer>(device_, *std::move(buffer), host);
  }

  const std::string name_;
  const std::shared_ptr<Device> device_;
  const std::unique_ptr<kernels::Backend> cpu_;
};

}  // namespace

std::vector<std::unique_ptr<BouncedBackend>> MakeBouncedBackends(const std::vector<std::string>& devices, int threads) {
  auto host = std::make_shared<Reach>();
  std::vector<std::unique_ptr<BouncedBackend>> backends;
  for (const std::string& device : devices) backends.push_back(std::make_unique<Bounced>(device, threads, host));
  return backends;
}

}  // namespace stoker::engine_test
