#include "client/replay/host_plane.h"

#include <utility>

#include "client/direct_plane.h"
#include "client/server_plane.h"

namespace stoker::replay {
namespace {

// The two have the same calls, but for the name of the one that starts a group.
template <typename Plane, absl::Status (Plane::*kLaunch)(uint32_t)>
class HostPlane final : public StepPlane {
 public:
  explicit HostPlane(std::unique_ptr<Plane> plane)
      : plane_(std::move(plane)), groups_(static_cast<uint32_t>(plane_->arena().groups())) {}

  absl::Status RunGroups(absl::Span<const client::PlaneRow> rows) override {
    if (absl::Status status = plane_->Begin(rows); !status.ok()) return status;
    for (uint32_t group = 0; group < groups_; ++group) {
      if (absl::Status status = (*plane_.*kLaunch)(group); !status.ok()) return status;
      if (absl::Status status = plane_->Await(group); !status.ok()) return status;
    }
    return plane_->FirstRowError();
  }
  absl::Span<const int32_t> HotRows(uint32_t group, size_t row) const override { return plane_->HotRows(group, row); }
  int32_t Misses(uint32_t group, size_t row) const override { return plane_->Misses(group, row); }
  absl::Status Commit(absl::Span<const int32_t> commits) override {
    if (absl::Status status = plane_->Commit(commits); !status.ok()) return status;
    if (absl::Status status = plane_->AwaitCommit(); !status.ok()) return status;
    return plane_->FirstRowError();
  }

 private:
  const std::unique_ptr<Plane> plane_;
  const uint32_t groups_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StepPlane>> MakeHostPlane(client::Session& session, client::Plane plane,
                                                         uint32_t top_k) {
  using client::DirectPlane;
  using client::ServerPlane;
  if (plane == client::Plane::kDirect) {
    auto direct = DirectPlane::Open(session, top_k);
    if (!direct.ok()) return direct.status();
    return std::make_unique<HostPlane<DirectPlane, &DirectPlane::Group>>(*std::move(direct));
  }
  auto server = ServerPlane::Arm(session, top_k);
  if (!server.ok()) return server.status();
  return std::make_unique<HostPlane<ServerPlane, &ServerPlane::Ring>>(*std::move(server));
}

}  // namespace stoker::replay
