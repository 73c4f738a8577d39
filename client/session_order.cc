#include "client/session_order.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/order_word.h"

namespace stoker::client {
namespace {

// As ServerPlane waits: see there.
constexpr absl::Duration kSpin = absl::Microseconds(20);
constexpr absl::Duration kFirstSleep = absl::Microseconds(10);
constexpr absl::Duration kLongestSleep = absl::Microseconds(500);

// Words that the daemon uses meanwhile. The caller of Signal and Await is what is a stream elsewhere.
class HostOrder final : public SessionOrder {
 public:
  HostOrder(std::shared_ptr<const Arena> arena, uint64_t* engine, uint64_t* daemon)
      : arena_(std::move(arena)), engine_(engine), daemon_(daemon) {}

  uint64_t Next() override {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }

  absl::StatusOr<uint64_t> Signal(CUstream_st* stream) override {
    if (stream != nullptr) return WrongStream();
    const std::lock_guard lock(mutex_);
    std::atomic_ref<uint64_t>(*engine_).store(++last_, std::memory_order_release);
    return last_;
  }

  absl::Status Await(uint64_t number, CUstream_st* stream, absl::Time deadline) override {
    if (stream != nullptr) return WrongStream();
    const absl::Time begin = absl::Now();
    absl::Duration sleep = kFirstSleep;
    while (!kernels::HasCome(std::atomic_ref<uint64_t>(*daemon_).load(std::memory_order_acquire), number)) {
      const absl::Time now = absl::Now();
      if (now >= deadline) {
        return absl::DeadlineExceededError(absl::StrCat("daemon_word did not come to ", number, " in time"));
      }
      if (now - begin < kSpin) {
        std::this_thread::yield();
      } else {
        absl::SleepFor(std::min(sleep, deadline - now));
        sleep = std::min(2 * sleep, kLongestSleep);
      }
    }
    return absl::OkStatus();
  }

  void Release() override {
    std::atomic_ref<uint64_t>(*daemon_).store(kernels::kReleasedOrder, std::memory_order_release);
  }
  bool Idle() override { return true; }

 private:
  static absl::Status WrongStream() {
    return absl::InvalidArgumentError("stream: given in CallOptions, the session is in host memory");
  }

  const std::shared_ptr<const Arena> arena_;
  uint64_t* const engine_;
  uint64_t* const daemon_;
  std::mutex mutex_;
  uint64_t last_ = 0;  // guarded by mutex_
};

}  // namespace

absl::StatusOr<SessionOrder::Words> SessionOrder::FindWords(const Arena& arena) {
  if (!arena.status().ok()) return arena.status();
  Words words;
  for (const auto& [name, word] : {std::pair("engine_word", &words.engine), std::pair("daemon_word", &words.daemon)}) {
    const absl::StatusOr<const TensorView*> tensor = arena.Tensor(name);
    if (!tensor.ok()) {
      return absl::FailedPreconditionError("ordered_calls: the daemon is of a version without");
    }
    if ((*tensor)->element != "u64" || (*tensor)->shape.size() != 1 || (*tensor)->shape[0] != 1) {
      return absl::InternalError(absl::StrCat("arena tensor '", name, "': is not u64 [1]"));
    }
    *word = reinterpret_cast<uint64_t*>((*tensor)->data);
  }
  return words;
}

absl::StatusOr<std::shared_ptr<SessionOrder>> SessionOrder::Make(std::shared_ptr<const Arena> arena) {
  const absl::StatusOr<Words> words = FindWords(*arena);
  if (!words.ok()) return words.status();
  if (arena->on_device()) return MakeOnDevice(std::move(arena), *words);
  return std::make_shared<HostOrder>(std::move(arena), words->engine, words->daemon);
}

}  // namespace stoker::client
