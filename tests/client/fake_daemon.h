// A daemon that runs in the test's process and keeps to the protos' contract as far as the client can see: real gRPC on
// a real Unix socket, tokens checked, sequences opened and closed, arenas handed out, sessions armed (fake_plane.h). It
// moves no rows.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/arena.h"
#include "stoker/v1/admin.pb.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/residency.pb.h"
#include "stoker/v1/sessions.pb.h"
#include "tests/client/fake_plane.h"

namespace stoker::client {

// What the daemon saw of a call.
struct SeenCall {
  std::string method;  // "Step"
  std::string token;   // empty: none was sent
  absl::Duration time_left;
};

class FakeDaemon {
 public:
  // Sockets lie in `directory`. Serves at once.
  explicit FakeDaemon(std::string directory);
  ~FakeDaemon();

  // "unix:..."
  const std::string& address() const;

  // Ends all connections and calls, as death does: sessions, sequences and pools are gone. Then serves again with the
  // next boot epoch.
  void Kill();
  void Restart();

  void AddPool(const v1::PoolSpec& spec);
  // Runs at the beginning of each call; an error is the call's. May block; killing the daemon does not unblock it.
  void SetHook(std::function<absl::Status(const std::string& method)> hook);
  // Changes the first message of each later Attach.
  void SetAttachedEditor(std::function<void(v1::AttachResponse*)> editor);

  // Runs on the thread of each plane that is armed later, when the engine has rung a doorbell and before that is
  // answered. It must not block when the daemon is killed.
  void SetPlaneHook(FakePlane::Hook hook);
  // Of planes that are armed later; 1 by default.
  void SetFirstStep(uint64_t first_step);
  // Changes the reply of each later Arm, when the plane runs already.
  void SetArmedEditor(std::function<void(v1::ArmResponse*)> editor);

  // Sends an event to all sessions.
  void Send(const v1::AttachResponse& event);
  // Ends the Attach streams of all sessions with that status.
  void EndSessions(const absl::Status& status);

  uint64_t boot_epoch() const;
  // False where a session is left after a time in which it must have ended.
  bool AwaitNoSession() const;
  std::vector<SeenCall> calls(const std::string& method) const;
  // The memory of the newest session's arena.
  FileDescriptor arena_memory() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace stoker::client
