#include "server/engine/bounce_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/core/check.h"
#include "server/engine/row_formats.h"

namespace stoker::engine {
namespace {

// Kernels read rows in vectors of 16 bytes where they are aligned.
constexpr int64_t kAlignment = 256;

}  // namespace

absl::StatusOr<std::unique_ptr<BounceMemory>> BounceMemory::Create(kernels::Backend& backend, int64_t capacity_bytes) {
  const int64_t rounded = RoundUp(capacity_bytes, kAlignment);
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> buffer = backend.AllocateHost(static_cast<size_t>(rounded));
  if (!buffer.ok()) return buffer.status();
  return std::unique_ptr<BounceMemory>(new BounceMemory(*std::move(buffer), rounded));
}

BounceMemory::BounceMemory(std::unique_ptr<kernels::Buffer> buffer, int64_t capacity_bytes)
    : buffer_(std::move(buffer)),
      capacity_bytes_(capacity_bytes),
      gaps_({{0, capacity_bytes}}),
      thread_([this] { Run(); }) {}

BounceMemory::~BounceMemory() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
  absl::MutexLock lock(&mutex_);
  STOKER_CHECK(gaps_.size() == 1 && gaps_.begin()->second == capacity_bytes_);
}

void BounceMemory::Take(int64_t bytes, absl::AnyInvocable<void(Memory) &&> taken) {
  STOKER_CHECK(bytes > 0 && bytes <= capacity_bytes_);
  absl::MutexLock lock(&mutex_);
  requests_.push_back({RoundUp(bytes, kAlignment), std::move(taken)});
}

void BounceMemory::Post(absl::AnyInvocable<void() &&> copy) {
  absl::MutexLock lock(&mutex_);
  copies_.push_back(std::move(copy));
}

int64_t BounceMemory::FindGap() const {
  if (requests_.empty()) return -1;
  const auto gap =
      std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& g) { return g.second >= requests_.front().bytes; });
  return gap == gaps_.end() ? -1 : gap->first;
}

void BounceMemory::Give(int64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  auto gap = gaps_.emplace(offset, bytes).first;
  if (const auto next = std::next(gap); next != gaps_.end() && next->first == offset + bytes) {
    gap->second += next->second;
    gaps_.erase(next);
  }
  if (gap != gaps_.begin()) {
    if (const auto before = std::prev(gap); before->first + before->second == offset) {
      before->second += gap->second;
      gaps_.erase(gap);
    }
  }
}

void BounceMemory::Run() {
  const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !copies_.empty() || FindGap() >= 0 || (stopping_ && requests_.empty());
  };
  for (;;) {
    absl::AnyInvocable<void() &&> copy;
    Request request;
    int64_t offset = -1;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ready));
      // What gives memory back comes before what takes it.
      if (!copies_.empty()) {
        copy = std::move(copies_.front());
        copies_.pop_front();
      } else if ((offset = FindGap()) >= 0) {
        request = std::move(requests_.front());
        requests_.pop_front();
        const auto gap = gaps_.find(offset);
        const int64_t left = gap->second - request.bytes;
        gaps_.erase(gap);
        if (left > 0) gaps_.emplace(offset + request.bytes, left);
      } else {
        return;
      }
    }
    if (copy) {
      std::move(copy)();
    } else {
      std::move(request.taken)(Memory(reinterpret_cast<char*>(buffer_->data()) + offset,
                                      [this, offset, bytes = request.bytes](char*) { Give(offset, bytes); }));
    }
  }
}

}  // namespace stoker::engine
