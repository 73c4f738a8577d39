#include "kernels/populate.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

// Linux 5.14; older headers lack it, and older kernels answer EINVAL.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace stoker::kernels {
namespace {

// 64 MiB are faulted in by one thread in about 30 ms: soon enough for a stop, and 8 threads share half a GiB.
constexpr size_t kFaultChunkBytes = size_t{64} << 20;
constexpr int kMaxThreads = 8;

// One run of ForEachChunk.
class ChunkRun {
 public:
  ChunkRun(size_t bytes, size_t chunk_bytes, const ChunkProgress& progress,
           const std::function<absl::Status(size_t, size_t)>& work)
      : bytes_(bytes), chunk_bytes_(chunk_bytes), progress_(progress), work_(work) {}

  void Begin() {
    absl::MutexLock lock(&mutex_);
    Report();
  }

  void Work() {
    while (!stopped_.load(std::memory_order_relaxed)) {
      const size_t offset = next_.fetch_add(chunk_bytes_, std::memory_order_relaxed);
      if (offset >= bytes_) return;
      const size_t chunk = std::min(chunk_bytes_, bytes_ - offset);
      const absl::Status status = work_(offset, chunk);
      absl::MutexLock lock(&mutex_);
      if (!status.ok()) return Stop(status);
      done_bytes_ += chunk;
      Report();
    }
  }

  absl::Status status() {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  void Report() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // After a stop nobody is told any more.
    if (stopped_.load(std::memory_order_relaxed) || progress_ == nullptr) return;
    if (!progress_(done_bytes_)) Stop(absl::CancelledError("stopped between two chunks"));
  }
  void Stop(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    status_.Update(status);
    stopped_.store(true, std::memory_order_relaxed);
  }

  const size_t bytes_;
  const size_t chunk_bytes_;
  const ChunkProgress& progress_;
  const std::function<absl::Status(size_t, size_t)>& work_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stopped_{false};
  absl::Mutex mutex_;
  size_t done_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

absl::Status PopulateChunk(std::byte* data, size_t bytes) {
  int result;
  do {
    result = madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  if (errno != EINVAL) {
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes cannot be faulted in: ", std::strerror(errno)));
  }
  // Nobody else writes yet, and the pages are zero: a zero changes nothing.
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < bytes; at += page_bytes) *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  return absl::OkStatus();
}

}  // namespace

absl::Status ForEachChunk(size_t bytes, size_t chunk_bytes, int threads, const ChunkProgress& progress,
                          const std::function<absl::Status(size_t offset, size_t bytes)>& work) {
  if (chunk_bytes == 0) return absl::InvalidArgumentError("chunk_bytes: 0 given, limit 1");
  ChunkRun run(bytes, chunk_bytes, progress, work);
  run.Begin();
  const size_t chunks = bytes / chunk_bytes + (bytes % chunk_bytes != 0 ? 1 : 0);
  const size_t workers = std::min<size_t>(chunks, static_cast<size_t>(std::max(threads, 1)));
  std::vector<std::thread> others;
  for (size_t i = 1; i < workers; ++i) others.emplace_back([&run] { run.Work(); });
  run.Work();
  for (std::thread& other : others) other.join();
  return run.status();
}

absl::Status Populate(std::byte* data, size_t bytes, int threads, const ChunkProgress& progress) {
  return ForEachChunk(bytes, kFaultChunkBytes, threads, progress,
                      [data](size_t offset, size_t chunk) { return PopulateChunk(data + offset, chunk); });
}

int PopulateThreads() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // Fails on machines with more than 1,024 cores.
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return kMaxThreads;
  return std::clamp(CPU_COUNT(&cores), 1, kMaxThreads);
}

}  // namespace stoker::kernels
