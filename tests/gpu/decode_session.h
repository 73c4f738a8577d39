// A decode session with a daemon for the benchmarks: attached, its sequences stored, and its steps as graphs on the
// server and on the direct plane.
//
// Thread safety: one thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "client/session.h"
#include "kernels/cuda/handles.h"
#include "tests/gpu/decode_engine.h"

namespace stoker::bench {

// What a benchmark does with a plane whose step is one graph.
struct PlaneRun {
  // Launches shape.total_steps() steps; `launch` launches some and waits for them.
  std::function<void(const std::function<void(int32_t steps)>& launch)> drive;
  // After all steps, which were found to be good.
  std::function<void(const Engine& engine)> report;
};

// A session of the shape, without staging area.
v1::AttachRequest AttachTo(const Shape& shape, const std::string& pool, v1::Plane plane, v1::ArenaSharing sharing);
// Its arena is mapped on the device, and it is not attached again.
client::SessionOptions SessionOnDevice();

class DecodeSession {
 public:
  // `plane` as AttachRequest.plane: PLANE_DIRECT, or none for the others. `shape` must outlive the session.
  DecodeSession(const Shape& shape, const client::Client& client, const std::string& pool, v1::Plane plane,
                v1::ArenaSharing sharing = v1::ARENA_SHARING_UNSPECIFIED);

  // Waits on the engine's side: "separate" or "fused", see plane_bench.cc.
  void RunServer(const std::string& waits, const PlaneRun& run);
  // `client` is of the session's daemon.
  void RunDirect(const client::Client& client, const PlaneRun& run);

  client::Session& session() { return *session_; }
  const std::vector<Mailbox>& mailboxes() const { return mailboxes_; }
  const std::vector<uint64_t>& ids() const { return ids_; }
  cudaStream_t stream() const { return stream_.get(); }

 private:
  // Opens a sequence, and stores `context` rows of whatever the staging area holds.
  void Open(uint64_t chunk_rows);
  // Of the last step, which is taken only if all before it have stored their rows.
  void CheckStatuses(const char* plane) const;
  // That every step has stored a row of each sequence, as the daemon sees it.
  void CheckStored(const client::Client& client) const;

  const Shape& shape_;
  std::unique_ptr<client::Session> session_;
  std::shared_ptr<const client::Arena> arena_;
  std::vector<Mailbox> mailboxes_;
  std::vector<uint64_t> ids_;
  std::vector<int32_t> state_rows_;
  kernels::cuda::StreamHandle stream_;
};

// The spec of a pool with `blocks` blocks for sessions of the shape.
v1::PoolSpec PoolOf(const Shape& shape, const std::string& name, uint32_t blocks);

}  // namespace stoker::bench
