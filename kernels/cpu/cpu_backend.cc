#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/client_memory.h"
#include "kernels/cpu/doorbell.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/sealed_file.h"
#include "kernels/cpu/strand.h"
#include "kernels/populate.h"

namespace stoker::kernels::cpu {
namespace {

// A copy of a host array that a call gets. Most groups have few layers.
using Layers = absl::InlinedVector<int32_t, 8>;

// Copies up to this size may be of tables, entries and words that operations of other streams use. Larger ones are of
// rows, and worth a memcpy.
constexpr size_t kSharedBytes = 64 << 10;

// A part of a bounded copy gives up the thread behind it.
Strand::Then ThenOf(const CopyLimits& limits) {
  return limits.max_bytes > 0 ? Strand::Then::kLetOthers : Strand::Then::kGoOn;
}

Layers CopyLayers(const int32_t* layers, int32_t count) { return Layers(layers, layers + count); }

class CpuStream : public Stream {
 public:
  CpuStream(StrandPool* pool, DoorbellPoller* poller) : poller_(poller), strand_(std::make_shared<Strand>(pool)) {}
  ~CpuStream() override { strand_->Drain(); }

  void Notify(absl::AnyInvocable<void(absl::Status) &&> done) override { strand_->Notify(std::move(done)); }
  absl::AnyInvocable<void() &&> Hold() override {
    strand_->Hold();
    return [strand = strand_] { strand->Release(); };
  }
  std::shared_ptr<Event> Record() override { return strand_->Record(); }
  void Wait(std::shared_ptr<Event> event) override { strand_->Wait(std::move(event)); }

  void Timestamp(uint64_t* ns) override {
    strand_->Run([ns] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      Store(ns, static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
      return absl::OkStatus();
    });
  }

  absl::Status Copy(void* dst, const void* src, size_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    if (dst == nullptr || src == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("copy.", dst == nullptr ? "dst" : "src", ": is null, for ", bytes, " bytes"));
    }
    strand_->Run([dst, src, bytes] {
      if (bytes <= kSharedBytes) {
        CopyShared(dst, src, bytes);
      } else {
        std::memcpy(dst, src, bytes);
      }
      return absl::OkStatus();
    });
    return absl::OkStatus();
  }

  absl::Status Write(uint64_t* target, uint64_t value) override { return WriteWord(target, value); }
  absl::Status Write(int32_t* target, int32_t value) override { return WriteWord(target, value); }

  absl::Status Resolve(const ResolveArgs& args) override { return Enqueue<cpu::Resolve>(args); }
  absl::Status Invalidate(const InvalidateArgs& args) override { return Enqueue<cpu::Invalidate>(args); }
  absl::Status Reset(const ResetArgs& args) override { return Enqueue<cpu::Reset>(args); }
  absl::Status Place(const PlaceArgs& args) override { return Enqueue<cpu::Place>(args); }
  absl::Status Gather(const GatherCompactArgs& args) override {
    if (absl::Status status = Validate(args); !status.ok()) return status;
    const int32_t layers =
        GatherLayers(args.rows, args.top_k, args.pool.layout.row_bytes(), args.limits, std::max(args.layer_count, 1));
    for (int32_t begin = 0; begin < args.layer_count; begin += layers) {
      GatherCompactArgs part = args;
      part.layers += begin;
      part.layer_count = std::min(layers, args.layer_count - begin);
      RunGather(part, ThenOf(args.limits));
    }
    return absl::OkStatus();
  }
  absl::Status Gather(const GatherDenseArgs& args) override {
    if (absl::Status status = Validate(args); !status.ok()) return status;
    RunGather(args, Strand::Then::kGoOn);
    return absl::OkStatus();
  }

  absl::Status Transfer(const TransferArgs& args) override {
    if (absl::Status status = Validate(args); !status.ok()) return status;
    ForTransferParts(args.count, args.layer_count, args.src.layout.row_bytes(), args.limits, /*max_pairs=*/args.count,
                     /*max_layers=*/std::max(args.layer_count, 1), [&](const TransferPart& of_all) {
                       const TransferArgs part = PartOf(args, of_all);
                       strand_->Run(
                           [part = part, src_layers = CopyLayers(part.src_layers, part.layer_count),
                            dst_layers = CopyLayers(part.dst_layers, part.layer_count)]() mutable {
                             part.src_layers = src_layers.data();
                             part.dst_layers = dst_layers.data();
                             cpu::Transfer(part);
                             return absl::OkStatus();
                           },
                           ThenOf(args.limits));
                     });
    return absl::OkStatus();
  }

  absl::Status AwaitDoorbell(const AwaitDoorbellArgs& args) override { return EnqueueWait<DoorbellWait>(args); }
  absl::Status RingDoorbell(const RingDoorbellArgs& args) override { return Enqueue<cpu::RingDoorbell>(args); }
  absl::Status AwaitQuiet(const AwaitQuietArgs& args) override { return EnqueueWait<QuietWait>(args); }
  absl::Status BeginBatch(const BatchArgs& args) override { return Enqueue<cpu::BeginBatch>(args); }
  absl::Status PlanCommits(const BatchArgs& args) override { return Enqueue<cpu::PlanCommits>(args); }
  absl::Status EndBatch(const BatchArgs& args) override { return Enqueue<cpu::EndBatch>(args); }
  absl::Status AwaitOrder(const AwaitOrderArgs& args) override { return EnqueueWait<OrderWait>(args); }
  absl::Status SignalOrder(const SignalOrderArgs& args) override { return Enqueue<cpu::SignalOrder>(args); }

 private:
  template <typename T>
  absl::Status WriteWord(T* target, T value) {
    if (target == nullptr) return absl::InvalidArgumentError("write.target: is null");
    strand_->Run([target, value] {
      std::atomic_ref<T>(*target).store(value, std::memory_order_release);
      return absl::OkStatus();
    });
    return absl::OkStatus();
  }

  template <auto kOperation, typename Args>
  absl::Status Enqueue(const Args& args) {
    if (absl::Status status = Validate(args); !status.ok()) return status;
    strand_->Run([args] {
      kOperation(args);
      return absl::OkStatus();
    });
    return absl::OkStatus();
  }

  // The work looks once, and leaves the rest to the poller.
  template <typename Waits, typename Args>
  absl::Status EnqueueWait(const Args& args) {
    if (absl::Status status = Validate(args); !status.ok()) return status;
    auto over = std::make_shared<StrandEvent>();
    strand_->Run([poller = poller_, wait = Waits(args), over]() mutable {
      wait.Begin();
      if (wait.Over()) {
        over->Fire();
      } else {
        poller->Await([wait = std::move(wait)]() mutable { return wait.Over(); }, std::move(over));
      }
      return absl::OkStatus();
    });
    strand_->Wait(std::move(over));
    return absl::OkStatus();
  }

  template <typename Args>
  void RunGather(const Args& args, Strand::Then then) {
    strand_->Run(
        [args = args, layers = CopyLayers(args.layers, args.layer_count)]() mutable {
          args.layers = layers.data();
          cpu::Gather(args);
          return absl::OkStatus();
        },
        then);
  }

  DoorbellPoller* const poller_;
  const std::shared_ptr<Strand> strand_;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads) : pool_(std::clamp(threads, 1, 256)) {}

  std::string_view device() const override { return "cpu"; }
  std::string_view no_order_words() const override { return {}; }
  absl::Status ReleaseOrder(uint64_t* word) override {
    cpu::ReleaseOrder(word);
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePool(size_t bytes, const PoolOptions& options) override {
    absl::StatusOr<std::unique_ptr<Buffer>> memory = bank_.Allocate("stoker-pool", bytes, MemoryBank::Sharing::kShared);
    if (!memory.ok() || !options.populate) return memory;
    const auto progress = [&](size_t done_bytes) {
      return options.progress == nullptr ||
             options.progress({PoolPhase::kFault, done_bytes, bytes, "shared memory", ""});
    };
    absl::Status status = Populate((*memory)->data(), bytes, PopulateThreads(), progress);
    if (!status.ok()) return status;
    return memory;
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t bytes, Sharing sharing) override {
    if (const std::string_view reason = NoSharing(sharing); !reason.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("sharing: ", std::string(reason)));
    }
    return bank_.Allocate("stoker-shared", bytes, MemoryBank::Sharing::kShared);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePrivate(size_t bytes) override {
    return bank_.Allocate("stoker-private", bytes, MemoryBank::Sharing::kPrivate);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(size_t bytes) override {
    return bank_.Allocate("stoker-host", bytes, MemoryBank::Sharing::kPrivate);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> MapClientMemory(const ClientMemory& memory) override {
    if (memory.descriptor < 0) {
      return absl::InvalidArgumentError(
          "cuda_ipc: given, the device is the CPU, where memory is named by a descriptor");
    }
    return MapSealedFile(memory.descriptor, memory.offset_bytes, memory.size_bytes);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    return std::make_unique<CpuStream>(&pool_, &poller_);
  }

 private:
  MemoryBank bank_;
  StrandPool pool_;
  DoorbellPoller poller_;  // ends before the pool, whose strands it wakes
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(int threads) { return std::make_unique<CpuBackend>(threads); }

}  // namespace stoker::kernels::cpu
