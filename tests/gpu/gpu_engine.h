// An engine on a GPU, which the test is, with a session of a daemon, which is another process: sequences of its own,
// none of which is shared, steps on any plane, and every row compared on the GPU, by the kernels of stoker-replay, with
// what its layer and token say it holds.
//
// Failures are the test's. Thread safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include "absl/types/span.h"
#include "client/client.h"
#include "client/replay/row_device.h"
#include "client/replay/step_plane.h"
#include "client/session.h"
#include "tests/system/rank.h"

namespace stoker::system_test {

inline constexpr uint32_t kLayers = 4;
inline constexpr uint32_t kGroups = 2;
inline constexpr uint32_t kRowBytes = 656;
inline constexpr uint32_t kTopK = 64;
inline constexpr uint32_t kHotRows = 128;
inline constexpr uint32_t kStateRows = 4;
inline constexpr uint32_t kMaxRows = 2400;
inline constexpr uint32_t kPrompt = 1000;

// A request of kPrompt tokens that no other number has.
replay::Request Prompt(uint32_t number);

class GpuEngine {
 public:
  // `plane` and `sharing`: as AttachRequest.plane and .arena_sharing.
  GpuEngine(const client::Client& client, const v1::PoolSpec& pool, const std::string& name,
            v1::Plane plane = v1::PLANE_UNSPECIFIED, v1::ArenaSharing sharing = v1::ARENA_SHARING_UNSPECIFIED);

  client::Session& session() { return rank_.session(); }
  replay::RowDevice& rows() { return *rows_; }
  uint64_t checked() const { return checked_; }

  // Opens a sequence and stores its prompt. `request` must outlive it.
  replay::OpenSequence Open(const replay::Request& request);
  void Close(const replay::OpenSequence& sequence);

  // Writes newest rows and entries for a step of these rows.
  void Publish(absl::Span<const replay::BatchRow> batch, const std::function<int32_t(const replay::BatchRow&)>& entry);
  // Half of the entries near the end, as decoders have it, the newest among them; now and then none.
  void Publish(absl::Span<const replay::BatchRow> batch, std::mt19937_64& random);
  // Every row that the step's hot rows name, and those that must be none. A few entries at most are none.
  void Check(absl::Span<const replay::BatchRow> batch);
  // The same, where all entries may be none.
  void CheckAny(absl::Span<const replay::BatchRow> batch);

  // One step on the plane, all rows committed.
  void Step(replay::StepPlane& plane, absl::Span<const replay::BatchRow> batch, std::mt19937_64& random);
  // One step by a call, all rows committed.
  void StepByCall(absl::Span<const replay::BatchRow> batch, std::mt19937_64& random);

 private:
  Rank rank_;
  std::unique_ptr<replay::RowDevice> rows_;
  uint64_t checked_ = 0;
};

}  // namespace stoker::system_test
