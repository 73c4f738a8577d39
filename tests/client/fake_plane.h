// The daemon's side of the server plane, as far as an engine can see: a thread that polls the doorbells of a fake
// arena. It answers each entry with itself, counts the entries of a batch row as its misses, and moves no rows.
//
// It finds its words by the formula of ArenaTensor's comment, in a mapping of its own, and so shares nothing with the
// views under test.
//
// Thread safety: the hook and the check run on the plane's thread; everything else belongs to one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "client/arena.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

class FakePlane {
 public:
  struct Row {
    uint64_t sequence_id = 0;
    int32_t state_row = 0;
    int32_t length = 0;
    int32_t commit = 0;  // of the last doorbell only
    bool operator==(const Row&) const = default;
  };
  // A doorbell that the engine has rung.
  struct Rung {
    uint64_t step = 0;
    uint32_t doorbell = 0;
    std::vector<Row> rows;
  };
  enum class Answer { kDone, kSilence };
  using Hook = std::function<Answer(const Rung& rung)>;
  // How a row of the batch is taken: v1::BatchRowStatus. Asked at the first doorbell, and again at the last one.
  using Check = std::function<int32_t(const Row& row)>;

  // Sets the doorbells to the step before the first one, and starts.
  FakePlane(const FileDescriptor& memory, v1::ArenaLayout layout, uint64_t first_step, uint32_t top_k, Check check,
            Hook hook);
  // Stops at once and writes nothing more, as death does.
  ~FakePlane();
  // Stops, and says so in the arena. The steps that were finished.
  uint64_t Disarm();

 private:
  std::byte* At(const std::string& name, uint64_t i, uint64_t j = 0) const;
  template <typename T>
  T& Word(const std::string& name, uint64_t i, uint64_t j = 0) const {
    return *reinterpret_cast<T*>(At(name, i, j));
  }
  template <typename T>
  void Publish(const std::string& name, uint64_t i, T value) const;
  void Run();
  // False: the plane has ended.
  bool RunStep(uint64_t step);
  // Waits until the doorbell has the number of the step.
  bool AwaitRequest(uint64_t step, uint32_t doorbell);
  void AnswerGroup(uint32_t group, size_t rows) const;
  void Stop();

  const v1::ArenaLayout layout_;
  const uint64_t first_step_;
  const uint32_t top_k_;
  const Check check_;
  const Hook hook_;
  uint32_t groups_ = 0;
  std::byte* data_ = nullptr;
  std::atomic<bool> stop_ = false;
  uint64_t steps_ = 0;
  std::thread thread_;
};

}  // namespace stoker::client
